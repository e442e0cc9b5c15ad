"""Starts the runs that a certificate needs, each in a separate process, with files only in a temporary folder."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from strategies.lightning.compat import (
    READING_CALLBACKS,
    Callback,
    LightningDataModule,
    LightningModule,
    MisconfigurationException,
    Precision,
    StochasticWeightAveraging,
    Strategy,
    WeightAveraging,
    is_overridden,
)
from strategies.lightning.options import Schedule
from trainer.verification.blocks import check_blocks, is_built_later, kept_blocks, lists_of
from trainer.verification.certificate import Certificate, ReferenceRuns, certify
from trainer.verification.compare import rounding_of
from trainer.verification.launched_ranks import GRACE_SECONDS, LaunchedRanks, without_launch
from trainer.verification.observed_run import ObservedRun, merged, with_logs_of_ranks
from trainer.verification.process import (
    Execution,
    FailedRun,
    VerifiedJob,
    read_failure,
    read_observed,
    started,
    steps_done,
    write_execution,
    write_job,
)

KEPT = (
    *("accelerator", "precision", "gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark"),
    *("inference_mode", "detect_anomaly"),
)
"""Arguments of the Trainer that change what a step computes."""

_IN_FLOAT64 = (None, 32, "32", "32-true")
"""Precisions that the runs replace with float64, if the model allows it."""

_LEFT_OUT = ("recovery", "rebalance", "tensor_parallel_size")
"""Settings of a pipeline that do not apply to a reference with one stage and whole layers."""


class VerifiedStrategy:
    """The properties of a strategy that determine the runs that verify it.

    Args:
        strategy: The strategy of a Trainer.
        num_devices: The number of devices.

    Raises:
        MisconfigurationException: If the strategy cannot be verified.
    """

    def __init__(self, strategy: Strategy, num_devices: int) -> None:
        self.kind: type = type(strategy)
        names = [cls.__name__ for cls in self.kind.__mro__]
        self.name = next((n for n in ("RPCSequentialStrategy", "ZeROStrategy", "DDPStrategy") if n in names), "")
        arguments = getattr(strategy, "given_arguments", None)
        if not self.name or arguments is None:
            raise MisconfigurationException(
                f"verify compares RPCSequentialStrategy, DDPStrategy and ZeROStrategy with one process, got "
                f"{self.kind.__name__}. Set strategy to 'rpc_sequential', 'ddp' or 'zero'."
            )
        self.arguments: dict[str, Any] = dict(arguments)
        self.num_devices = num_devices

    @property
    def is_pipeline(self) -> bool:
        """Whether the strategy splits the layers into stages."""
        return self.name == "RPCSequentialStrategy"

    @property
    def ranks(self) -> int:
        """Number of ranks among which batches are divided."""
        return self.arguments.get("data_parallel_size", 1) if self.is_pipeline else self.num_devices

    @property
    def num_parts(self) -> int:
        """Number of pipelines that divide the layers of each rank, otherwise 1."""
        return self.arguments.get("tensor_parallel_size", 1)

    @property
    def num_stages(self) -> int:
        """Number of stages of a pipeline, otherwise 1."""
        return self.num_devices // self.ranks // self.num_parts if self.is_pipeline else 1

    @property
    def is_whole_loss(self) -> bool:
        """Whether ``training_step`` runs once for the whole batch."""
        schedule = self.arguments.get("schedule", "gpipe")
        name = schedule.name if isinstance(schedule, Schedule) else schedule
        return not self.is_pipeline or name == "gpipe"

    @property
    def counts_tokens(self) -> bool:
        """Whether micro-batches are weighted by their tokens."""
        return self.arguments.get("loss_weight", "rows") == "tokens"

    @property
    def steps_in_backward(self) -> bool:
        """Whether a hook that reads gradients would change when the strategy steps."""
        return self.name == "ZeROStrategy" and bool(self.arguments.get("overlap_with_ddp"))

    def run(self, precision: Any) -> Execution:
        """Return the run of the strategy itself."""
        return Execution(
            "the strategy",
            (self.kind, self.arguments),
            devices=self.num_devices,
            precision=precision,
            reads_gradients=not self.steps_in_backward,
            is_of_all_ranks=True,
        )

    def with_one_stage(self, precision: Any, facts: Mapping[str, Any]) -> Execution:
        """Return the run of the same strategy with one stage of whole layers, in one process for each replica."""
        from strategies.rpc_sequential import RPCSequentialStrategy

        arguments = {name: value for name, value in self.arguments.items() if name not in _LEFT_OUT}
        arguments |= {
            "balance": "even",
            "microbatches": facts.get("microbatches", self.arguments.get("microbatches", 8)),
        }
        if not self.is_whole_loss:
            arguments["schedule"] = "1f1b"
        return Execution(
            "the strategy with one stage", (RPCSequentialStrategy, arguments), devices=self.ranks, precision=precision
        )


def verify_run(
    trainer_class: type,
    given: Mapping[str, Any],
    strategy: Strategy,
    num_devices: int,
    model: LightningModule,
    data: Any,
    *,
    steps: int = 3,
    blocks: int | None = None,
    seed: int = 0,
    report: Callable[[Certificate], None] = lambda certificate: None,
) -> Certificate:
    """Run a few steps in one process and under a strategy, and return the verdict.

    If a launcher such as torchrun has started several ranks, all of them call this, and all return the same verdict.

    Args:
        trainer_class: The class of the Trainer.
        given: The arguments of the Trainer.
        strategy: The strategy of the Trainer.
        num_devices: The number of devices of the Trainer.
        model: The model, which is not changed.
        data: A data module, or loaders of training batches; ``None`` if the model has loaders.
        steps: Number of optimizer steps.
        blocks: Number of blocks of the model to keep; ``None`` keeps all.
        seed: The seed of all random numbers.
        report: Called with the verdict, on rank 0 only.

    Raises:
        MisconfigurationException: Before any process starts, if the model or the settings cannot be verified.
        RuntimeError: If the model does not train in one process or does not train under the strategy.
    """
    _check(given, model, steps, data)
    verified = VerifiedStrategy(strategy, num_devices)
    arguments, notes = kept_arguments(given)
    shortened = None
    if blocks is not None:
        given_lists = verified.arguments.get("module")
        if is_built_later(model, given_lists):
            notes.append(f"Of the blocks that configure_model makes, only the first {blocks} were run.")
        else:
            lists = lists_of(model, given_lists)
            check_blocks(model, lists, blocks, verified.num_stages)
            notes.append(kept_blocks(model, lists, blocks))
        shortened = given_lists, blocks
        if isinstance(verified.arguments.get("balance"), list | tuple):
            verified.arguments["balance"] = "even"
            notes.append("The layers were divided evenly, because the given balance counts all blocks.")
    job = VerifiedJob(
        trainer_class,
        model,
        data,
        arguments,
        steps,
        accumulated=int(given.get("accumulate_grad_batches") or 1),
        ranks=verified.ranks,
        seed=seed,
        blocks=shortened,
    )
    launched = LaunchedRanks.of(getattr(strategy, "cluster_environment", None))
    if launched is not None and launched.rank > 0:
        return launched.follow()
    with tempfile.TemporaryDirectory(prefix="relay-verify-", ignore_cleanup_errors=True) as name:
        runs = RunProcesses(Path(name), job, launched)
        try:
            with _detached(data):
                write_job(Path(name), job)
            certificate = _certified(runs, verified, model, given)
            certificate.notes = [*notes, *certificate.notes]
            report(certificate)
        except Exception as error:
            if launched is not None:
                launched.publish(error)
            raise
        if launched is not None:
            launched.publish(certificate)
    return certificate


def _certified(
    runs: "RunProcesses", verified: VerifiedStrategy, model: LightningModule, given: Mapping[str, Any]
) -> Certificate:
    notes, precision = [], given.get("precision")
    wished = "64-true" if precision in _IN_FLOAT64 and not given.get("plugins") else None
    number = verified.arguments.get("microbatches", 8) if verified.is_pipeline else None
    has_micro = verified.is_pipeline and model.automatic_optimization
    with_masks, without_masks = steps_of_random_layers(runs.steps)
    one, own = Execution("one process", precision=wished), verified.run(wished)
    if verified.is_pipeline:  # whose masks and whose BatchNorm are not those of one process
        of_microbatches = ["norm_layers"] if number != 1 else []
        one = replace(one, needless_if=("is_random", *of_microbatches))
        own = replace(own, steps_if_random=with_masks)
    failed = runs.run([one, own])
    if one.name in failed and wished is not None:
        notes.append(f"Not in float64, in which the model does not train: {failed[one.name].message.splitlines()[0]}")
        wished = None
        one, own = (replace(each, precision=None) for each in (one, own))
        failed = runs.run([one, own])
    first = _observed_in_one(runs, one, failed)
    rounding = rounding_of(str(wished or precision), first.narrowest)
    if own.name in failed:
        raise RuntimeError(f"the model does not train under {verified.name}: {_told(failed[own.name])}")
    actual = runs.observed(own.name)
    if verified.steps_in_backward:
        actual.notes.append("Gradients and norms were not read, because the strategy steps within the backward pass.")
    if verified.is_whole_loss and _has_the_same_loss(actual, first):
        whole = replace(one, needless_if=(), steps=with_masks if first.is_random else None)
        first = _observed_in_one(runs, whole, runs.run([whole]))
    first.facts["counts tokens"] = verified.counts_tokens
    references = ReferenceRuns(first)
    judge = partial(
        certify, rounding=rounding, is_whole_loss=verified.is_whole_loss, strategy=_described(verified, actual)
    )
    result = judge(actual, references)
    micro = Execution(
        "one process with the same micro-batches",
        precision=wished,
        microbatches=number if isinstance(number, int) else int(actual.facts.get("microbatches", 1)),
        by_tokens=verified.counts_tokens,
        max_tokens=verified.arguments.get("microbatch_tokens"),
    )
    needs_stage = first.is_random or first.norm_layers
    if first.is_random or (result.is_right and not rounding.safety):
        pass  # masks of micro-batches are different ones; in float64, rounding needs no measurement
    elif has_micro and (result.is_right or first.norm_layers or not needs_stage):
        failed |= runs.run([micro])
        if micro.name not in failed:
            references = replace(references, micro=runs.observed(micro.name))
    elif rounding.safety and not has_micro and model.automatic_optimization:
        halves = Execution("one process with two micro-batches", precision=wished, microbatches=2)
        failed |= runs.run([halves])
        if halves.name not in failed:
            references = replace(references, divided=(runs.observed(halves.name), first))
    result = judge(actual, references)
    if verified.is_pipeline and needs_stage and not result.is_right:
        stage = verified.with_one_stage(wished, actual.facts)
        plain: list[Execution] = []
        if first.is_random:
            stage = replace(stage, steps=with_masks)
            plain = _without_dropout(one, own, micro if has_micro else None, without_masks, first)
        is_needed = rounding.safety or first.norm_layers
        failed |= runs.run([stage, *plain[: 3 if is_needed else 2]])
        if stage.name in failed:
            raise RuntimeError(
                f"the model does not train under {verified.name} with one stage: {_told(failed[stage.name])}"
            )
        alone = [runs.observed(each.name) for each in plain if each.strategy is None and runs.has_observed(each.name)]
        known = [first, *([] if references.micro is None else [references.micro]), *alone]
        order = next((each.order for each in known if each.order), [])
        references = replace(references, stage=replace(runs.observed(stage.name), order=order))
        if len(alone) == 2:
            references = replace(references, divided=(alone[1], alone[0]))
        result = judge(actual, references)
        if plain and result.is_right:
            result = _with_and_without_dropout(result, runs, plain, failed, judge)
    if result.explained is None and rounding.safety:
        result.notes.append(
            f"The limits are those of {rounding.described}, because no run with micro-batches could measure rounding."
        )
    if result.is_right:
        result.notes += _check_steps(actual, runs.steps)
    described = first if first.stopped_after != 0 else references.micro
    result.notes = [*notes, *result.notes, *([] if described is None else _not_compared(described))]
    result.facts["runs"], result.facts["steps of runs"] = runs.names, runs.made
    return result


def steps_of_random_layers(steps: int) -> tuple[int, int]:
    """Return the number of steps of the runs with and without dropout, if layers draw random numbers in a pipeline.

    Two runs have masks, two have none, and one step measures rounding. Together they make at most ``3 * steps`` steps,
    if ``steps`` is at least 3. A fault that starts in the second step shows with masks and without.
    """
    if steps < 3:
        return steps, 1
    without = 2
    return min(steps, (3 * steps - 2 * without - 1) // 2), without


def _observed_in_one(runs: "RunProcesses", one: Execution, failed: Mapping[str, FailedRun]) -> ObservedRun:
    if one.name in failed:
        raise RuntimeError(f"the model does not train in one process: {_told(failed[one.name])}")
    return runs.observed(one.name)


def _check_steps(actual: ObservedRun, steps: int) -> list[str]:
    """Return a note if the model made fewer optimizer steps than requested, as manual optimization may.

    Raises:
        MisconfigurationException: If it made none, so that no gradient and no step was compared.
    """
    requested = steps if actual.stopped_after is None else actual.stopped_after
    made = len(actual.steps)
    if made >= requested:
        return []
    found = f"The model made {made} of {requested} optimizer steps, because it does not step after every batch."
    if not made:
        raise MisconfigurationException(
            f"{found} There is no step to compare; set steps to at least the number of batches of one optimizer step."
        )
    return [f"{found} A larger number of steps compares more."]


def _has_the_same_loss(actual: ObservedRun, one: ObservedRun) -> bool:
    """Return whether the random numbers, or the rows for BatchNorm, of the first batch are those of one process.

    ``one`` was stopped after the forward pass of this batch. Losses in less than float32 are too coarse to tell.
    """
    eps = torch.finfo(getattr(torch, one.narrowest)).eps
    if one.stopped_after != 0 or eps > 1e-6 or not actual.losses:
        return False
    ours, theirs = actual.losses[0], one.losses[0]
    return ours is not None and theirs is not None and math.isclose(ours, theirs, rel_tol=max(1e-9, 4 * eps))


def _without_dropout(
    one: Execution, own: Execution, micro: Execution | None, steps: int, first: ObservedRun
) -> list[Execution]:
    """Return the runs with a dropout of 0: one process, the strategy, and one process with the same micro-batches.

    The last one makes one step, unless BatchNorm normalises micro-batches, so that it is the only reference.
    """
    needless = tuple(name for name in one.needless_if if name != "is_random") if micro is not None else ()
    runs = [replace(one, needless_if=needless, steps=steps), replace(own, steps_if_random=None, steps=steps)]
    if micro is not None:
        runs.append(replace(micro, steps=steps if first.norm_layers else 1))
    return [replace(each, name=f"{each.name} without dropout", drops_nothing=True) for each in runs]


def _not_compared(one: ObservedRun) -> list[str]:
    """Return a note about logged values of ranks that were not compared, if there are any."""
    if one.calls is None:
        return []
    logged = {call.name for batch in one.calls for call in batch}
    others = [name for name in (one.logged[-1] if one.logged else {}) if name.removesuffix("_step") not in logged]
    left = list(dict.fromkeys([*others, *one.left_out]))
    return [
        f"Logged values of ranks that were not compared: {', '.join(map(repr, left))}. They are logged outside "
        "training_step, with rank_zero_only=True, or in the validation with reduce_fx='sum' on each rank alone."
    ] * bool(left)


def _with_and_without_dropout(
    result: Certificate,
    runs: "RunProcesses",
    plain: Sequence[Execution],
    failed: Mapping[str, FailedRun],
    judge: Callable[..., Certificate],
) -> Certificate:
    """Return the verdict about runs without dropout if it is "wrong"; otherwise return ``result`` with notes.

    A comparison with one stage alone would miss faults of the engine that do not depend on the number of stages.
    """
    one, own, *micro = plain
    if failure := failed.get(one.name) or failed.get(own.name):
        result.notes.append(f"The model does not train with a dropout of 0: {failure.message}")
        return result
    references = ReferenceRuns(runs.observed(one.name), ignores_buffers=True)
    references.one.facts["counts tokens"] = bool(micro) and micro[0].by_tokens
    if micro and runs.has_observed(micro[0].name):
        references = replace(references, micro=runs.observed(micro[0].name))
    without = judge(runs.observed(own.name), references)
    if not without.is_right and references.one.is_random:
        result.notes.append(
            "Layers draw random numbers with a dropout of 0 too, so the strategy was not compared with one process."
        )
        return result
    if not without.is_right and micro and references.micro is None and not runs.run(micro):
        references = replace(references, micro=runs.observed(micro[0].name))  # it may differ because of micro-batches
        without = judge(runs.observed(own.name), references)
    if not without.is_right:
        return without
    number = f"{without.steps} {'step' if without.steps == 1 else 'steps'}"
    result.notes.append(
        f"With a dropout of 0, the strategy is {without.verdict}, compared with {without.reference} over {number}."
    )
    result.reasons += without.reasons
    return result


def _told(failure: FailedRun) -> str:
    return f"{failure.kind}: {failure.message}\n{failure.trace}"


def _described(verified: VerifiedStrategy, actual: ObservedRun) -> str:
    words = [verified.kind.__name__]
    if verified.is_pipeline:
        facts = actual.facts
        words.append(f"schedule={facts.get('schedule')!r}, balance={facts.get('balance')}")
        tokens = verified.arguments.get("microbatch_tokens")
        words.append(f"microbatch_tokens={tokens}" if tokens else f"microbatches={facts.get('microbatches')}")
        words += [f"tensor_parallel_size={verified.num_parts}"] * (verified.num_parts > 1)
    elif verified.name == "ZeROStrategy":
        words.append(f"stage={verified.arguments.get('stage', 1)}")
    return ", ".join([*words, f"{verified.num_devices} processes"])


def _check(given: Mapping[str, Any], model: LightningModule, steps: int, data: Any) -> None:
    """Check the arguments before any process starts.

    Raises:
        MisconfigurationException: If an argument is wrong.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise MisconfigurationException(f"steps must be a whole number of at least 1, got {steps!r}.")
    for name in ("training_step", "configure_optimizers"):
        if not is_overridden(name, model):
            raise MisconfigurationException(f"verify trains the model, but {type(model).__name__} has no {name}.")
    if data is None and not is_overridden("train_dataloader", model):
        raise MisconfigurationException(
            f"There are no batches: {type(model).__name__} has no train_dataloader. Give a data module or a loader."
        )
    if int(given.get("num_nodes") or 1) > 1:
        raise MisconfigurationException(f"verify runs on one host, got num_nodes={given['num_nodes']}.")
    if given.get("sync_batchnorm"):
        raise MisconfigurationException(
            "verify cannot compare sync_batchnorm=True, which one process does not have. Leave it out."
        )


def kept_arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of the Trainer that apply to the runs, and notes about arguments that are left out."""
    kept = {name: given[name] for name in KEPT if given.get(name) is not None}
    callbacks = given.get("callbacks") or []
    callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    own = [each for each in callbacks if isinstance(each, WeightAveraging | StochasticWeightAveraging)]
    kept["callbacks"] = own
    notes = []
    others = [type(each).__name__ for each in callbacks if each not in own and not isinstance(each, READING_CALLBACKS)]
    others = [name for name in others if name not in ("SaveConfigBesideCheckpoints", "PipelineMonitor")]
    if others:
        notes.append(f"Callbacks that were left out: {', '.join(dict.fromkeys(others))}.")
    plugins = given.get("plugins") or []
    precision = [each for each in (plugins if isinstance(plugins, list) else [plugins]) if isinstance(each, Precision)]
    if precision:
        kept["plugins"] = precision
        kept.pop("precision", None)
    return kept, notes


class RunProcesses:
    """The processes of a job.

    Args:
        folder: The folder of the job.
        job: The job.
        launched: The ranks that a launcher has started; ``None`` if there are none.

    Attributes:
        names: The names of the runs that have been made.
        made: The number of steps of each of these runs.
        steps: The number of steps of the job.
    """

    def __init__(self, folder: Path, job: VerifiedJob, launched: LaunchedRanks | None = None) -> None:
        self._folder, self._job, self._log, self.launched = folder, job, folder / "output", launched
        self.names: list[str] = []
        self.made: list[int] = []
        self.steps = job.steps

    def run(self, executions: Sequence[Execution]) -> dict[str, FailedRun]:
        """Run executions in as few processes as possible, one after another; return the errors of those that failed.

        If a launcher has started ranks, every rank runs the executions of all ranks in a separate process.
        """
        failed: dict[str, FailedRun] = {}
        for of_all, group in groupby(executions, self._process_of):
            failed |= self._run(list(group), self.launched if of_all[0] else None)
            if executions[0].name in failed:  # then the rest do not run
                break
        return failed

    def _process_of(self, execution: Execution) -> tuple[bool, str]:
        """Return a key that is equal for executions that run in the same process, one after another."""
        of_all = execution.is_of_all_ranks and self.launched is not None
        has_ranks = execution.strategy is not None and self._job.ranks > 1  # which run the command again
        return of_all, execution.name if of_all or has_ranks or execution.num_parts > 1 else ""

    def _run(self, executions: Sequence[Execution], launched: LaunchedRanks | None = None) -> dict[str, FailedRun]:
        for execution in executions:
            write_execution(self._folder, execution)
            for path in self._folder.glob(f"{execution.name.replace(' ', '-')}.*"):
                if path.suffix in (".observed", ".error", ".steps"):
                    path.unlink()
        names = [execution.name for execution in executions]
        self.names += names
        failure = self._execute(names) if launched is None else self._execute(names, launched)
        self.made += [steps_done(self._folder, name)[0] for name in names]
        failed = {name: found for name in names if (found := read_failure(self._folder, name)) is not None}
        if failure is not None and not failed:
            message, _, told = failure.partition("\n")
            failed[names[0]] = FailedRun(message, "RuntimeError", told)
        return failed

    def has_observed(self, name: str) -> bool:
        """Return whether an execution has written what it has observed."""
        return any(self._folder.glob(f"{name.replace(' ', '-')}.*.observed"))

    def observed(self, name: str) -> ObservedRun:
        """Return what an execution has observed, merged from all its ranks."""
        found = merged(read_observed(self._folder, name.replace(" ", "-")))
        return with_logs_of_ranks(found, self._job.ranks)

    def _execute(self, names: Sequence[str], launched: LaunchedRanks | None = None) -> str | None:
        """Run executions in a process, or in one process of each rank; return how a process has failed, if any has."""
        environment: Mapping[str, str] = os.environ
        if self.launched is not None:
            environment = without_launch(environment) if launched is None else launched.begin(self._folder, names)
        failure, deadline = None, math.inf
        with (
            open(self._log, "ab") as output,
            started(self._folder, names, output, environment) as child,
            _progress(names) as show,
        ):
            while child.poll() is None and time.monotonic() < deadline:
                for name in names:
                    show(name, *steps_done(self._folder, name))
                if launched is not None and failure is None and (failure := launched.failed()) is not None:
                    deadline = time.monotonic() + GRACE_SECONDS  # the own process may give a better reason
                time.sleep(0.05)
        if launched is not None:
            failure = launched.end() or failure
        if child.returncode:
            told = self._log.read_text(errors="replace")[-2000:]
            failure = failure or f"the process has ended with status {child.returncode}\n{told}"
        return failure


@contextmanager
def _detached(data: Any) -> Iterator[None]:
    """Context in which a data module has no Trainer, so that the Trainer is not copied with it."""
    if not isinstance(data, LightningDataModule):
        yield
        return
    before, data.trainer = data.trainer, None
    try:
        yield
    finally:
        data.trainer = before


@contextmanager
def _progress(names: Sequence[str]) -> Iterator[Any]:
    """Show the number of steps that have been made, if the output is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name, step, total: None
        return
    with Progress(console=console, transient=True) as progress:
        tasks = {name: progress.add_task(name, total=None) for name in names}
        yield lambda name, step, total: progress.update(tasks[name], completed=step, total=total)
