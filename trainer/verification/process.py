"""Runs in a separate process: ``python -m trainer.verification.process FOLDER EXECUTION ...``.

The folder holds the model, the data and the arguments of the Trainer, as they were before any run. Each execution
trains a few steps on the batches that the first execution has drawn, and writes what it has observed into the folder.
Lightning starts the other ranks of DDP and ZeRO with the same command.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch.nn.utils.parametrize import is_parametrized

from strategies.common.torch_compat import reduced_storage

_JOB, _PATHS, _BATCHES = "job.pickle", "paths.pickle", "batches.pickle"
_RANDOM = "layers-are-random"
"""Is there if layers draw random numbers in one process."""
_LOOK_SECONDS = 0.5
_STARTER = "RELAY_VERIFY_STARTER"
"""The environment variable with the id of the process that has started this process."""


@dataclass(frozen=True)
class VerifiedJob:
    """The settings that all runs have in common.

    Attributes:
        trainer_class: The class of the Trainer.
        model: The model.
        data: A data module, or loaders of training batches, or ``None``.
        arguments: Arguments of the Trainer that apply to every run.
        steps: Number of optimizer steps.
        accumulated: Number of batches of each rank in each step.
        ranks: Number of ranks, among which batches are divided.
        seed: The seed of all random numbers.
        blocks: Paths of the lists of blocks as the user has given them, ``None`` to find them, and the number of blocks
            to keep; ``None`` keeps all.
    """

    trainer_class: type
    model: Any
    data: Any
    arguments: dict[str, Any]
    steps: int
    accumulated: int = 1
    ranks: int = 1
    seed: int = 0
    blocks: tuple[str | Sequence[str] | None, int] | None = None

    @property
    def num_batches(self) -> int:
        """Number of batches on which all ranks train together."""
        return self.steps * self.accumulated * self.ranks


@dataclass(frozen=True)
class Execution:
    """One run of a job.

    Attributes:
        name: The name of the run, and of its files.
        strategy: Class and arguments of the strategy; ``None`` for one process.
        devices: The Trainer's devices.
        precision: The Trainer's precision; ``None`` for the precision of the job.
        microbatches: Number of micro-batches of each batch in one process; ``None`` for whole batches.
        by_tokens: Whether micro-batches are weighted by their tokens.
        max_tokens: The largest number of tokens of a micro-batch of rows of similar length; ``None`` if rows are split
            in order.
        reads_gradients: Whether a hook before the optimizer's step reads gradients.
        drops_nothing: Whether all dropout layers have a probability of 0.
        steps: Number of optimizer steps; ``None`` for that of the job.
        steps_if_random: Number of optimizer steps if layers draw random numbers in one process; ``None`` for ``steps``.
        needless_if: Attributes of an ``ObservedRun``. If one is true after the first forward pass, the run ends there.
        is_of_all_ranks: Whether all ranks run it, if a launcher such as torchrun has started ranks.
    """

    name: str
    strategy: tuple[type, dict[str, Any]] | None = None
    devices: Any = 1
    precision: Any = None
    microbatches: int | None = None
    by_tokens: bool = False
    max_tokens: int | None = None
    reads_gradients: bool = True
    drops_nothing: bool = False
    steps: int | None = None
    steps_if_random: int | None = None
    needless_if: tuple[str, ...] = ()
    is_of_all_ranks: bool = False

    @property
    def num_parts(self) -> int:
        """Number of pipelines that divide the layers of each rank, otherwise 1."""
        return 1 if self.strategy is None else self.strategy[1].get("tensor_parallel_size", 1)

    @property
    def is_pipeline(self) -> bool:
        """Whether the strategy splits the layers into stages."""
        kinds = self.strategy[0].__mro__ if self.strategy is not None else ()
        return "RPCSequentialStrategy" in [kind.__name__ for kind in kinds]


@dataclass
class DrawnBatches:
    """The batches of all runs, in the form in which the loaders yield them.

    Attributes:
        training: The batches for training.
        validation: One batch, or none, of each loader for validation.
        prediction: One batch, or none, of each loader for ``predict``.
        notes: What differs from the request.
    """

    training: list[Any]
    validation: list[list[Any]] = field(default_factory=list)
    prediction: list[list[Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class FailedRun(NamedTuple):
    """The error of an execution.

    Attributes:
        message: The message of the error.
        kind: The name of the class of the error.
        trace: The traceback.
    """

    message: str
    kind: str
    trace: str


def write_job(folder: Path, job: VerifiedJob) -> None:
    """Write the settings that the processes of a job have in common into a folder."""
    (folder / _PATHS).write_bytes(pickle.dumps([os.path.abspath(path) for path in sys.path]))
    with open(folder / _JOB, "wb") as file:
        _ModulePickler(file).dump(job)


class _ModulePickler(cloudpickle.Pickler):
    """Also pickles modules with parametrized tensors, whose class is made at run time, and storages.

    torch pickles tensors of some dtypes, such as ``uint16``, with a storage that it cannot unpickle.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.nn.Module) and is_parametrized(obj):
            return object.__new__, (type(obj),), vars(obj)
        if isinstance(obj, torch.UntypedStorage):
            return reduced_storage(obj)
        return super().reducer_override(obj)


def read_job(folder: Path) -> VerifiedJob:
    """Return a job, whose model is as it was before any run."""
    job: VerifiedJob = pickle.loads((folder / _JOB).read_bytes())
    return job


def write_execution(folder: Path, execution: Execution) -> None:
    """Write an execution into the folder of its job."""
    _file(folder, execution.name, "execution").write_bytes(cloudpickle.dumps(execution))


def read_observed(folder: Path, name: str) -> list[Any]:
    """Return what each rank of an execution has observed."""
    found = sorted(folder.glob(f"{_stem(name)}.*.observed"), key=lambda path: int(path.name.split(".")[1]))
    return [torch.load(path, weights_only=False) for path in found]


def read_failure(folder: Path, name: str) -> FailedRun | None:
    """Return the error that has ended an execution; ``None`` if there is none."""
    path = _file(folder, name, "error")
    return FailedRun(*pickle.loads(path.read_bytes())) if path.exists() else None


def steps_done(folder: Path, name: str) -> tuple[int, int | None]:
    """Return the number of steps that an execution has made, and the number that it makes, once it is known."""
    path = _file(folder, name, "steps")
    done = path.read_text().split() if path.exists() else []
    return (int(done[0]), int(done[1])) if len(done) == 2 else (0, None)


@contextmanager
def started(
    folder: Path, names: Sequence[str], output: Any, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Context with a process that runs executions; on exit, the process and its child processes end.

    Args:
        folder: The folder of the job.
        names: The names of the executions, which the process runs one after another.
        output: The file for what the process prints.
        environment: The environment variables.
    """
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    child = subprocess.Popen(
        [sys.executable, "-m", "trainer.verification.process", str(folder), *names],
        env={**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), _STARTER: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(10)
                    break


def _watch_starter() -> None:
    """End this process and its child processes when the process that has started it has ended."""
    from strategies.launch.process_ends import Watchdog

    starter = int(os.environ.pop(_STARTER, 0))  # ranks that this process starts do not watch the starter

    def has_ended() -> bool:
        while os.getppid() == starter:
            time.sleep(_LOOK_SECONDS)
        return True

    if starter:
        Watchdog("relay-verify-starter-watch", has_ended, clean_up=lambda: os.killpg(0, signal.SIGTERM)).start()


def run_execution(folder: Path, job: VerifiedJob, execution: Execution, drawn: DrawnBatches) -> Any:
    """Run an execution in this process, and return what this rank has observed.

    Args:
        folder: The folder for files of the run.
        job: The job, whose model is trained.
        execution: The execution.
        drawn: The batches.

    Returns:
        The observed run; ``None`` in all but the first of the pipelines that divide the layers of a rank.
    """
    from strategies.lightning.compat import LightningDataModule, pl
    from trainer.verification.observed_run import leaves
    from trainer.verification.observer import NOT_COMPARED, GradientsObserver, ValuesObserver
    from trainer.verification.reference import (
        NeedlessRun,
        note_logs,
        number_batches_of_ranks,
        run_microbatches,
        switch_off_dropout,
        watch_first_step,
    )

    alone, progress = execution.strategy is None, _file(folder, execution.name, "steps")
    is_random = (folder / _RANDOM).exists()
    steps = (execution.steps_if_random if is_random else None) or execution.steps or job.steps

    def advance(step: int) -> None:
        progress.write_text(f"{step} {steps}")

    kind = GradientsObserver if execution.reads_gradients else ValuesObserver
    own = folder / _stem(execution.name)
    own.mkdir(exist_ok=True)
    callback = kind(
        execution.name,
        job.seed,
        own,
        ranks=job.ranks if alone else 1,
        steps=steps if steps < job.steps else None,
        advance=advance,
    )
    trainer = trainer_of_run(folder, job, execution, [callback])
    if execution.drops_nothing:
        switch_off_dropout(job.model)
    if alone:
        if job.ranks > 1:
            number_batches_of_ranks(job.model, job.ranks)
        if execution.microbatches is not None:
            run_microbatches(
                job.model,
                execution.microbatches,
                by_tokens=execution.by_tokens,
                max_tokens=execution.max_tokens,
                batches=drawn.training,
                per_step=job.accumulated * job.ranks,
            )
        if job.ranks > 1:
            note_logs(job.model, callback.observed)
        watch_first_step(job.model, callback.observed, execution.needless_if)
    source = job.data if isinstance(job.data, LightningDataModule) else pl.LightningDataModule()
    _give(source, drawn, trainer, validations=job.ranks if alone else 1)
    pl.seed_everything(job.seed, verbose=False)
    observed = callback.observed
    observed.notes += drawn.notes
    try:
        trainer.fit(job.model, datamodule=source)
    except NeedlessRun:
        return observed
    if (path := observed.facts.pop("checkpoint", None)) is not None:
        observed.checkpoint = {
            key: value
            for key, value in leaves(_whole_checkpoint(Path(path))).items()
            if key.split(".")[0] not in NOT_COMPARED
        }
    if any(drawn.prediction):
        pl.seed_everything(job.seed, verbose=False)
        loaders = [_loader(batches) for batches in drawn.prediction]
        observed.predictions = leaves(trainer.predict(job.model, dataloaders=loaders))
    return None if getattr(trainer.strategy, "part", 0) else observed


def trainer_of_run(folder: Path, job: VerifiedJob, execution: Execution, callbacks: Sequence[Any]) -> Any:
    """Return the Trainer of an execution, which writes into ``folder`` only."""
    accumulated = job.accumulated
    if execution.strategy is None:
        strategy: Any = "auto"
        accumulated *= job.ranks
    else:
        kind, arguments = execution.strategy
        strategy = kind(**arguments)
    arguments = dict(job.arguments)
    if execution.precision is not None:
        arguments["precision"] = execution.precision
    arguments["callbacks"] = [*(arguments.get("callbacks") or []), *callbacks]
    return job.trainer_class(
        **arguments,
        strategy=strategy,
        devices=execution.devices,
        accumulate_grad_batches=accumulated,
        max_steps=job.steps,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder / _stem(execution.name),
    )


def draw_batches(trainer: Any, job: VerifiedJob) -> DrawnBatches:
    """Return the first batches of the loaders of a job."""
    from strategies.lightning.compat import LightningDataModule, attached, is_overridden, pl

    pl.seed_everything(job.seed, verbose=False)
    model, data = job.model, job.data
    module = data if isinstance(data, LightningDataModule) else None
    with attached(trainer, model, data):
        for holder in (module, model):
            if holder is not None:
                holder.prepare_data()
                holder.setup("fit")
        source = module or model
        loaders = source.train_dataloader() if data is module else data
        found = DrawnBatches(_training_batches(loaders, job.num_batches))
        if not found.training:
            raise ValueError("the training loader gives no batch")
        if (number := len(found.training)) < job.num_batches:
            found.notes.append(f"The loader has {number} batches, so they are used again in the same order.")
            found.training = list(islice(cycle(found.training), job.num_batches))
        if is_overridden("validation_step", model) and is_overridden("val_dataloader", source):
            found.validation = _first_of_each(source.val_dataloader())
        if is_overridden("predict_step", model):
            given = is_overridden("predict_dataloader", source)
            if given and module is not None:
                module.setup("predict")
            if given:
                found.prediction = _first_of_each(source.predict_dataloader())
            else:
                first = found.validation[:1]
                found.prediction = first if any(first) else [found.training[:1]]
    return found


def _training_batches(loaders: Any, number: int) -> list[Any]:
    """Return the first batches of training, combined from several loaders as ``fit`` combines them."""
    from strategies.lightning.compat import CombinedLoader

    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    return [batch for batch, *_ in islice(combined, number)]


def _first_of_each(loaders: Any) -> list[list[Any]]:
    """Return one batch, or none, of each loader that ``validate`` and ``predict`` run one after another."""
    from strategies.lightning.compat import CombinedLoader, combined_mode

    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    if combined_mode(combined) != "sequential":
        return [_training_batches(combined, 1)]
    return [list(islice(loader, 1)) for loader in combined.flattened]


def _give(source: Any, drawn: DrawnBatches, trainer: Any, *, validations: int) -> None:
    """Make a data module yield the drawn batches; for training, each rank gets its share of them.

    Args:
        source: The data module.
        drawn: The batches.
        trainer: The Trainer, which knows the rank.
        validations: Number of times that this process validates, for as many ranks.
    """
    source.train_dataloader = lambda: _loader(drawn.training[trainer.global_rank :: trainer.world_size])
    if drawn.validation:
        source.val_dataloader = lambda: [_loader(batches * validations) for batches in drawn.validation]


def _loader(batches: Any) -> Any:
    return torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def _whole_checkpoint(path: Path) -> Any:
    if path.is_dir():
        from strategies.checkpoint.save_and_load import load_sharded

        return load_sharded(path, weights_only=False)[0]
    return torch.load(path, map_location="cpu", weights_only=False)


def _stem(name: str) -> str:
    return name.replace(" ", "-")


def _file(folder: Path, name: str, kind: str) -> Path:
    return folder / f"{_stem(name)}.{kind}"


def main(folder: Path, names: Sequence[str]) -> None:
    """Run executions one after another. If the first fails, the rest do not run.

    Each writes what it has observed, or an error.
    """
    sys.path[:] = pickle.loads((folder / _PATHS).read_bytes())
    _watch_starter()
    warnings.filterwarnings("ignore")
    for name in names:
        try:
            execution: Execution = pickle.loads(_file(folder, name, "execution").read_bytes())
            if not (folder / _BATCHES).exists():
                drawing = Execution("drawing")
                job = prepared_job(folder, drawing)
                trainer = trainer_of_run(folder, job, drawing, [])
                partial = folder / f"{_BATCHES}.partial"
                partial.write_bytes(cloudpickle.dumps(draw_batches(trainer, job)))
                partial.replace(folder / _BATCHES)
            drawn: DrawnBatches = pickle.loads((folder / _BATCHES).read_bytes())
            observed = run_execution(folder, prepared_job(folder, execution), execution, drawn)
            rank = int(os.environ.get("LOCAL_RANK", 0)) if execution.strategy is not None else 0
            if execution.strategy is None and observed.is_random:
                (folder / _RANDOM).touch()
            if observed is not None:
                torch.save(observed, folder / f"{_stem(name)}.{rank}.observed")
        except Exception as error:
            if int(os.environ.get("LOCAL_RANK", 0)) == 0:
                told = (str(error), type(error).__name__, traceback.format_exc())
                _file(folder, name, "error").write_bytes(pickle.dumps(told))
            if name == names[0]:
                raise


def prepared_job(folder: Path, execution: Execution) -> VerifiedJob:
    """Return a job whose model has the requested number of blocks."""
    from trainer.verification.blocks import is_built_later, lists_of, shorten, shorten_when_built

    job = read_job(folder)
    if job.blocks is not None:
        given, number = job.blocks
        if is_built_later(job.model, given):
            shorten_when_built(job.model, given, number, is_pipeline=execution.is_pipeline)
        else:
            shorten(job.model, lists_of(job.model, given), number)
    return job


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
