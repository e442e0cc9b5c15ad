"""Overhead of a micro-batch: Relay under Lightning's Trainer and the same schedules of torch, alternating.

The layers are so small that a step of many micro-batches is only overhead. Every contestant has two processes with one
thread each. A turn is a number of consecutive steps, and ends when all processes have finished them. At the end of a
turn, Relay's driver asks its stages, so commands do not go over the data plane until a few steps later. A training run
does not stop in this way, so a turn has many steps.
"""

import itertools
import logging
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss

from benchmarks.contestants import PROCESSES, timed
from benchmarks.pipeline_step import draw_gantt
from benchmarks.plots import boxes, plot
from benchmarks.processes import ContestantError, ContestantProcesses
from benchmarks.report import Effort, Section, Table, quartiles, ratios, spread
from benchmarks.timeline import RecordingLayer, Span, spans_of

WIDTH, LAYERS, ROWS = 8, 12, 64
MICROBATCHES, ROUNDS, STEPS, WARM_UP = (8, 64), 15, 20, 3
SAME_SCHEDULE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
LEARNING_RATE, LOSS_TOLERANCE = 0.01, 1e-5


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target)


class UnderLightning:
    """Relay's driver: a fit by Lightning's Trainer, on a thread that waits before each turn."""

    def __init__(self, number: int, schedule: str) -> None:
        self.schedule = schedule
        self.fit: threading.Thread | None = None

    def prepare(self, microbatches: int) -> None:
        self.begin(microbatches, layers(), [LAYERS // PROCESSES] * PROCESSES)

    def begin(self, microbatches: int, module: nn.Sequential, balance: list[int]) -> None:
        """Start a fit of these layers."""
        from pytorch_lightning import Callback, LightningModule, Trainer

        from strategies.rpc_sequential import RPCSequentialStrategy

        self.close()
        warnings.filterwarnings("ignore")
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

        class Tiny(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.sequential_module = module

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                return loss_of(self.sequential_module(batch), batch)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

        class Data(torch.utils.data.IterableDataset[Tensor]):
            def __iter__(self) -> Iterator[Tensor]:
                return batches()

        class Turns(Callback):
            remaining, loss = 0, 0.0

            def on_train_batch_start(turns, trainer: Any, *_: Any) -> None:
                if turns.remaining == 0:
                    strategy.pipeline.wait()
                    self.done.put(turns.loss)
                    turns.remaining = self.orders.get()
                turns.remaining -= 1
                trainer.should_stop = turns.remaining < 0

            def on_train_batch_end(turns, trainer: Any, model: Any, outputs: Any, *_: Any) -> None:
                turns.loss = outputs["loss"].item()

        strategy = RPCSequentialStrategy(
            balance=balance, microbatches=microbatches, checkpoint="never", schedule=self.schedule
        )
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=PROCESSES, max_epochs=1, callbacks=[Turns()], **off
        )
        self.orders: SimpleQueue[int] = SimpleQueue()
        self.done: SimpleQueue[float | BaseException] = SimpleQueue()
        model, loader = Tiny(), torch.utils.data.DataLoader(Data(), batch_size=None)

        def fit() -> None:
            try:
                trainer.fit(model, loader)
            except BaseException as error:
                self.done.put(error)

        self.fit = threading.Thread(target=fit)
        self.fit.start()
        self.reply()

    def steps(self, number: int) -> float:
        self.orders.put(number)
        return self.reply()

    def reply(self) -> float:
        loss = self.done.get()
        if isinstance(loss, BaseException):
            raise loss
        return loss

    def trace(self, microbatches: int) -> list[Span]:
        """Return the spans of one step of recording layers; steps after it are not timed."""
        self.close()
        listeners = [RecordingLayer() for _ in range(PROCESSES)]
        own = LAYERS // PROCESSES
        stages = [[listener, *layers()[i * own : (i + 1) * own]] for i, listener in enumerate(listeners)]
        self.begin(microbatches, nn.Sequential(*itertools.chain(*stages)), [own + 1] * PROCESSES)
        self.steps(WARM_UP)
        began = perf_counter()
        self.steps(1)
        ended = perf_counter()
        self.close()
        notes = [*(listener.notes for listener in listeners[:-1]), listeners[-1].get_extra_state()]
        spans = [span for i, own_notes in enumerate(notes) for span in spans_of(own_notes, i, began)]
        return [span for span in spans if span.start < ended]  # the fit ends with an extra step

    def close(self) -> None:
        if self.fit is not None:
            self.orders.put(0)
            self.fit.join()
            self.fit = None


class TorchPipelining:
    """A rank of ``torch.distributed.pipelining`` in a hand-written loop."""

    def __init__(self, rank: int, schedule: str, store: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
        self.rank, self.make = rank, getattr(pipelining, schedule)

    def prepare(self, microbatches: int) -> None:
        own = layers()[LAYERS // PROCESSES * self.rank : LAYERS // PROCESSES * (self.rank + 1)]
        self.optimizer = torch.optim.SGD(own.parameters(), lr=LEARNING_RATE)
        self.batches = batches()
        self.stage = PipelineStage(own, self.rank, PROCESSES, torch.device("cpu"))
        self.schedule = self.make(self.stage, microbatches, loss_fn=loss_of)

    def steps(self, number: int) -> float:
        losses: list[Tensor] = []
        for batch in itertools.islice(self.batches, number):
            self.optimizer.zero_grad()
            losses.clear()
            if self.rank == 0:
                self.schedule.step(batch)
            else:
                self.schedule.step(target=batch, losses=losses)
            self.optimizer.step()
            loss = sum(loss.item() for loss in losses)
        return loss / max(len(losses), 1)

    def trace(self, microbatches: int) -> list[Span]:
        """Return the spans of one step."""
        self.prepare(microbatches)
        self.steps(WARM_UP)
        spans: list[Span] = []
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(self.stage, name, timed(self.rank, self.rank, name, getattr(self.stage, name), spans))
        self.steps(1)
        return spans

    def close(self) -> None:
        dist.destroy_process_group()


def contest(
    rounds: int, steps: int, numbers: tuple[int, ...], folder: Path
) -> tuple[dict[str, list[float]], list[str]]:
    """Return the seconds of a step of each contestant, with a value per round, and the differences in the losses."""
    contestants = {}
    for ours, theirs in SAME_SCHEDULE.items():
        contestants[f"Relay, {ours}"] = ContestantProcesses(UnderLightning, ours)
        contestants[f"torch, {theirs}"] = ContestantProcesses(
            TorchPipelining, theirs, str(folder / theirs), count=PROCESSES
        )
    seconds: dict[str, list[float]] = {}
    differ = []
    try:
        for microbatches in numbers:
            losses = {}
            for name, processes in contestants.items():
                processes.call("prepare", microbatches)
                losses[name] = processes.call("steps", WARM_UP)[-1]
            expected = losses["torch, ScheduleGPipe"]
            differ += [f"{name}: {x}" for name, x in losses.items() if abs(x - expected) > LOSS_TOLERANCE * expected]
            for number in range(rounds):
                for name, processes in list(contestants.items())[:: -1 if number % 2 else 1]:
                    taken = processes.timed("steps", steps) / steps
                    seconds.setdefault(f"{name}, {microbatches} micro-batches", []).append(taken)
        spans = {
            name: list(itertools.chain(*processes.call("trace", numbers[0]))) for name, processes in contestants.items()
        }
    finally:
        for processes in contestants.values():
            with suppress(ContestantError):
                processes.end()
    return seconds, differ, spans


def main(effort: Effort) -> Section:
    rounds, steps = effort.rounds_or(ROUNDS), 1 if effort.tiny else STEPS
    numbers = MICROBATCHES[:1] if effort.tiny else MICROBATCHES
    with tempfile.TemporaryDirectory() as folder:
        seconds, differ, spans = contest(rounds, steps, numbers, Path(folder))
    rows = []
    for name, values in seconds.items():
        row = [name, *spread(values, 1, 1000), ""]
        if name.startswith("Relay"):
            _, schedule, rest = name.split(", ")
            peer = seconds[f"torch, {SAME_SCHEDULE[schedule]}, {rest}"]
            row[-1] = "{1:.2f} ({0:.2f} to {2:.2f})".format(*quartiles(ratios(values, peer)))
        rows.append(row)
    section = Section(
        "Cost of a micro-batch",
        f"{LAYERS} linear layers of width {WIDTH}, {ROWS} rows, SGD, {PROCESSES} processes with one thread each: a "
        f"step is only overhead. Relay under Lightning's own Trainer, with its loop; torch in a loop by hand. {rounds} "
        f"interleaved rounds of {steps} steps each, after {WARM_UP} steps.",
        tables=[Table(["", "ms a step", "quartiles", "of torch's same"], rows)],
        notes=[f"DIFFERENT LOSS, so not the same work: {found}" for found in differ]
        or [f"After the warm-up, all contestants had the same loss (to {LOSS_TOLERANCE:g})."],
    )
    plot(
        section,
        effort,
        "microbatch_cost.png",
        lambda figure: boxes(figure.subplots(), seconds, x="seconds a step"),
        size=(8, 3),
    )
    plot(section, effort, "microbatch_cost_gantt.png", partial(draw_gantt, spans), size=(9, 1.5 * len(spans)))
    return section
