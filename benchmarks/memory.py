"""Peak memory of every process of a pipeline, compared with what its stage needs, and the time until it trains.

Each run has a new driver process, so that the memory of the driver before the model exists is known. A peak is
``VmHWM`` minus this value. The peak is reset at the end of each phase, so that each phase has its own peak.
"""

import ctypes
import logging
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from pytorch_lightning import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.report import Effort, Section, Table, quartiles, ratios, spread
from benchmarks.stage_memory import MEBI, memory_bytes, reset_peaks
from strategies import RPCSequentialStrategy
from strategies.launch.session import Session
from strategies.launch.workers import Workers
from trainer import Trainer

STAGES, ROWS, STEPS, ROUNDS = 3, 16, 2, 3
MICROBATCHES = 4
RUN_SECONDS = 400.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model.

    Attributes:
        width: Width of the square layers; 4096 makes 64 MiB each.
        states: Number of optimizer states of each parameter: 0 for SGD, 2 for AdamW.
        late: Whether ``configure_model`` builds the layers, instead of ``__init__``.
        layers: Number of layers.
    """

    width: int
    states: int
    late: bool
    layers: int = 12

    @property
    def layer_mebi(self) -> float:
        """Size of a layer in MiB."""
        return self.width**2 * 4 / MEBI

    @property
    def model_mebi(self) -> float:
        """Size of all parameters in MiB."""
        return self.layers * self.layer_mebi

    @property
    def activations_mebi(self) -> float:
        """Size in MiB of the activations that a stage keeps for the backward pass, and of their gradients."""
        return 2 * (self.layers / STAGES + 1) * ROWS * self.width * 4 / MEBI

    def bound_mebi(self, *, trains: bool) -> float:
        """Memory that a process may use for its stage, in MiB: 1.2 x state + activations + the largest layer."""
        held = self.model_mebi / STAGES * (2 + self.states if trains else 1)
        return 1.2 * held + self.activations_mebi + self.layer_mebi

    def driver_bound_mebi(self) -> float:
        """Memory that a driver that builds the whole model may use, in MiB: 1.1 x model + gradients of its stage."""
        return 1.1 * self.model_mebi + self.model_mebi / STAGES


class Model(LightningModule):
    """Square layers, built in ``__init__``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        if not shape.late:
            self.sequential_module = self.layers()

    def layers(self) -> nn.Sequential:
        width = self.shape.width
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(self.shape.layers)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequential_module(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.sequential_module(batch).square().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequential_module(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.shape.states else torch.optim.SGD
        return kind(self.parameters(), lr=1e-4)


class LateModel(Model):
    """Square layers, built in ``configure_model``."""

    def configure_model(self) -> None:
        if not hasattr(self, "sequential_module"):
            self.sequential_module = self.layers()


class Peaks(Callback):
    """Keeps the peak of each process in each phase of a run.

    Attributes:
        mebi: For each phase, the peak of the driver and then of the workers, in MiB above the value before the model.
        began: When the run began.
        seconds: The time from ``began`` until the first step can begin.
    """

    def __init__(self, save_to: str | None) -> None:
        self.mebi: dict[str, list[float]] = {}
        self.began = self.seconds = 0.0
        self._save_to, self._workers = save_to, list[int]()
        ctypes.CDLL(None).malloc_trim(0)
        reset_peaks([os.getpid()])
        self._base = {os.getpid(): memory_bytes(os.getpid(), "VmHWM")}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Context in which the workers are known, from the moment they have joined until they end."""
        start, stop = Workers.start, Workers.stop

        def started(workers: Workers, **settings: Any) -> Session:
            session = start(workers, **settings)
            self._workers = [process.pid for process in workers._processes]
            reset_peaks(self._workers)
            self._base.update({pid: memory_bytes(pid, "VmHWM") for pid in self._workers})
            return session

        def stopped(workers: Workers, **settings: Any) -> None:
            self.mark("end", self._workers)
            self._workers = []
            stop(workers, **settings)

        with patch.object(Workers, "start", started), patch.object(Workers, "stop", stopped):
            yield

    def mark(self, phase: str, pids: list[int] | None = None) -> None:
        """End a phase of the given processes, by default of all."""
        pids = [os.getpid(), *self._workers] if pids is None else pids
        grown = [(memory_bytes(pid, "VmHWM") - self._base[pid]) / MEBI for pid in pids]
        known = self.mebi.setdefault(phase, [])
        self.mebi[phase] = grown + known if os.getpid() in pids else known + grown
        reset_peaks(pids)

    def _started(self) -> None:
        self.seconds = perf_counter() - self.began
        self.mark("start")

    def on_train_start(self, *args: Any) -> None:
        self._started()

    def on_validation_start(self, *args: Any) -> None:
        self._started()

    def on_predict_start(self, *args: Any) -> None:
        self._started()

    def on_validation_end(self, *args: Any) -> None:
        self.mark("pass")

    def on_predict_end(self, *args: Any) -> None:
        self.mark("pass")

    def on_train_end(self, trainer: Any, model: Any) -> None:
        self.mark("pass")
        if self._save_to is not None:
            trainer.save_checkpoint(self._save_to)
            self.mark("save")


@dataclass(frozen=True)
class Run:
    """One call of the Trainer in a new process.

    Attributes:
        shape: The model.
        verb: The Trainer's method.
        form: The strategy's ``state_dict_type``.
        save_to: Path of the checkpoint that is saved after the last step.
        load_from: Path of the checkpoint to begin with.
    """

    shape: Shape
    verb: str = "fit"
    form: str = "full"
    save_to: str | None = None
    load_from: str | None = None

    def with_width(self, width: int) -> "Run":
        """Return the same run with layers of a different width, and with the checkpoints of that width."""
        paths = [path and f"{path}-{width}" for path in (self.save_to, self.load_from)]
        return replace(self, shape=replace(self.shape, width=width), save_to=paths[0], load_from=paths[1])

    def measured(self) -> "Outcome":
        """Run in a new process, and return what the run measured."""
        own, other = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_work, args=(self, other))
        process.start()
        other.close()
        try:
            if not own.poll(RUN_SECONDS):
                raise SystemExit(f"{self} took longer than {RUN_SECONDS:.0f} s")
            outcome = own.recv()
            assert isinstance(outcome, Outcome)
            return outcome
        except EOFError:
            raise SystemExit(f"{self} failed; its output is above") from None
        finally:
            process.kill()
            process.join()

    def measured_here(self) -> "Outcome":
        """Run in this process, which is the driver."""
        steps = DataLoader([torch.randn(ROWS, self.shape.width)] * STEPS, batch_size=None)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        peaks = Peaks(self.save_to)
        model = (LateModel if self.shape.late else Model)(self.shape)
        strategy = RPCSequentialStrategy(
            [self.shape.layers // STAGES] * STAGES, MICROBATCHES, state_dict_type=self.form
        )
        num_steps = STEPS * (2 if self.load_from else 1)
        trainer = Trainer(
            accelerator="cpu", devices=STAGES, strategy=strategy, max_steps=num_steps, callbacks=[peaks], **quiet
        )
        with peaks.following():
            peaks.began = perf_counter()
            getattr(trainer, self.verb)(model, steps, ckpt_path=self.load_from)
            peaks.mark("end", [os.getpid()])
        copy_seconds = 0.0
        if not self.shape.late:
            ctypes.CDLL(None).malloc_trim(0)  # so that the copies need new pages, as a first copy does
            began = perf_counter()
            copies = [parameter.detach().clone() for parameter in model.parameters()]
            copy_seconds = perf_counter() - began
            del copies
        return Outcome(peaks.mebi, peaks.seconds, copy_seconds)


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    Attributes:
        mebi: Peaks by phase; see :class:`Peaks`.
        seconds: The time until the first step can begin.
        copy_seconds: The time of copying every parameter once, if the model was built in ``__init__``.
    """

    mebi: dict[str, list[float]]
    seconds: float
    copy_seconds: float


def _work(run: Run, pipe: Connection) -> None:
    """Run one call of the Trainer as the driver."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    pipe.send(run.measured_here())
    pipe.close()


PHASES = {"start": "start-up", "pass": "", "save": "save", "end": "end"}


def rows_of(name: str, run: Run, outcome: Outcome, tiny: Outcome) -> list[list[str]]:
    """Return a row for each phase of a run."""
    rows, shape = [], run.shape
    bound = shape.bound_mebi(trains=run.verb == "fit")
    driver_bound = bound if shape.late else shape.driver_bound_mebi()
    for phase, words in PHASES.items():
        if phase in outcome.mebi:
            driver, *workers = outcome.mebi[phase]
            small, *others = tiny.mebi[phase]
            rows.append([f"{name}: {words}" if words else name])
            rows[-1] += _cells(driver, small, driver_bound) + _cells(max(workers), max(others), bound)
    return rows


def _cells(peak: float, tiny: float, bound: float) -> list[str]:
    verdict = "yes" if peak <= bound else "less libraries" if peak - tiny <= bound else "NO"
    return [f"{peak:.0f}", f"{tiny:.0f}", f"{bound:.0f}", verdict]


COLUMNS = ["", "driver", "tiny", "bound", "within", "worker", "tiny", "bound", "within"]


def peaks_table(heading: str, runs: dict[str, Run], small: int) -> Table:
    """Make each run, also with layers of width ``small``, and return the table of peaks in MiB."""
    rows = []
    for name, run in runs.items():
        outcome = run.measured()
        same = run.shape.width == small
        rows += rows_of(name, run, outcome, outcome if same else run.with_width(small).measured())
    return Table(COLUMNS, rows, heading)


def start_table(shape: Shape, small: int, rounds: int) -> Table:
    """Return the time until a model trains, compared with copying its bytes and with starting the processes."""
    outcomes, tiny = [], []
    for _ in range(rounds):
        outcomes.append(Run(shape).measured())
        tiny.append(outcomes[-1].seconds if small == shape.width else Run(shape).with_width(small).measured().seconds)
    copies = [outcome.copy_seconds for outcome in outcomes]
    least = [copied + started for copied, started in zip(copies, tiny, strict=True)]
    seconds = [outcome.seconds for outcome in outcomes]
    rows = [
        ["processes with tiny layers", *spread(tiny, 2), ""],
        ["one copy of the model's bytes", *spread(copies, 2), ""],
        ["the model", *spread(seconds, 2), f"{quartiles(ratios(seconds, least))[1]:.2f}"],
    ]
    return Table(["until the first step", "s", "quartiles", "of both above"], rows, "Start-up")


def main(effort: Effort) -> Section:
    width, small = (64, 64) if effort.tiny else (4096, 64)
    rounds = effort.rounds_or(ROUNDS)
    built, late = Shape(width, 0, late=False), Shape(width, 2, late=True)
    with tempfile.TemporaryDirectory() as folder:
        file, shards = f"{folder}/full.ckpt", f"{folder}/sharded.ckpt"
        of_built = {"fit": Run(built), "validate": Run(built, "validate"), "predict": Run(built, "predict")}
        of_late = {
            "fit, sharded": Run(late, form="sharded", save_to=shards),
            "resumed fit, sharded": Run(late, form="sharded", load_from=shards),
            "fit, one file": Run(late, save_to=file),
            "resumed fit, one file": Run(late, load_from=file),
            "validate, one file": Run(late, "validate", load_from=file),
            "predict, sharded": Run(late, "predict", load_from=shards),
        }
        if effort.tiny:
            of_built, of_late = {}, dict(list(of_late.items())[:2])
        tables = [
            peaks_table("Built in __init__, SGD: peaks in MiB", of_built, small),
            peaks_table("Built in configure_model, AdamW: peaks in MiB", of_late, small),
            start_table(built, small, rounds),
        ]
    return Section(
        "Peak memory of every process",
        f"{built.layers} linear layers of {built.layer_mebi:.0f} MiB on {STAGES} stages ({built.model_mebi:.0f} MiB, "
        f"a third per stage), {STEPS} steps of {ROWS} rows in {MICROBATCHES} micro-batches. VmHWM of a process less "
        "its value before the model, for a worker when it has joined the session; of the workers the higher peak. "
        '"tiny" is the peak of the same run with tiny layers: libraries that are loaded late. Bound: 1.2 x '
        "(parameters, and in fit gradients and optimizer state, of a stage) + activations + the largest layer; for "
        "the driver of a model built in __init__ 1.1 x the model + the gradients of its stage. Within the bound: "
        '"less libraries" if it is so without what the run with tiny layers needs.',
        tables=tables,
    )
