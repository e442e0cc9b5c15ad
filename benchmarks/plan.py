"""Predictions of ``trainer.plan`` compared with measurements: time of a step, and peak memory of every process.

The costs are measured next to a busy process, because processes on shared hardware slow each other down. They are
measured again in every round, alternating with the runs. The driver of each run is a new process, so that its memory
before the model exists is known. The memory of a run with a tiny model, mostly libraries that are loaded late, is
subtracted.
"""

import io
import itertools
import logging
import multiprocessing
import statistics
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.contestants import PROCESSES, Busy, Shape, loss_of, make_optimizer
from benchmarks.memory import Peaks
from benchmarks.processes import ContestantError, ContestantProcesses
from benchmarks.report import Effort, Section, Table, quartiles, ratios, spread
from benchmarks.stage_memory import MEBI
from strategies import RPCSequentialStrategy
from trainer import Trainer
from trainer.plan_report import strategy_block

ROUNDS, STEPS, WARM_UP, MICROBATCHES = 5, 10, 3, 8
SCHEDULES = ("gpipe", "1f1b", "zbv")
RUN_SECONDS = 300.0
NUM_BATCHES = 32
WIDTHS = (1024, 4096, 2048, 1024, 512, 4096, 256)
"""Widths of the MLP, whose layers differ by up to 16 times."""


class Repeated(Dataset):
    """A dataset that repeats one batch, so that the data take no further memory.

    Args:
        batch: The batch.
    """

    def __init__(self, batch: tuple[Tensor, ...]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, number: int) -> list[Tensor]:
        if number >= NUM_BATCHES:
            raise IndexError(number)
        return [*self.batch]


class Model(LightningModule):
    """A model with its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.began.append(perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self)

    def batch(self) -> tuple[Tensor, ...]:
        """Return a batch."""
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Repeated(self.batch()), batch_size=None)


class GPT(Model):
    """The GPT of the other sections."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        self.shape = Shape(num_blocks=4, width=64, rows=8, length=16) if tiny else Shape()
        self.sequential_module = self.shape.layers()

    def batch(self) -> tuple[Tensor, ...]:
        tokens = torch.randint(self.shape.vocabulary, (self.shape.rows, self.shape.length + 1))
        return tokens[:, :-1], tokens[:, 1:]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.sequential_module(batch[0]), batch[1])


class MLP(Model):
    """Linear layers of unequal sizes."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        self.widths, self.rows = [width // 32 if tiny else width for width in WIDTHS], 16 if tiny else 512
        sizes = itertools.pairwise(self.widths)
        self.sequential_module = nn.Sequential(
            *(nn.Sequential(nn.Linear(before, after), nn.GELU()) for before, after in sizes)
        )

    def batch(self) -> tuple[Tensor, ...]:
        return (torch.randn(self.rows, self.widths[0]),)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.sequential_module(batch[0]).square().mean()


class Llama(Model):
    """A Llama of transformers; the driver runs its embedding, norm, head and loss."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        width = 64 if tiny else 384
        shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": 4}
        self.rows, self.length = (8, 16) if tiny else (16, 64)
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, num_hidden_layers=8, **shape))

    def batch(self) -> tuple[Tensor, ...]:
        return (torch.randint(2000, (self.rows, self.length)),)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


MODELS: dict[str, type[Any]] = {"GPT": GPT, "MLP": MLP, "Llama": Llama}


def trainer_of(steps: int, arguments: dict[str, Any], callbacks: list[Any]) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = RPCSequentialStrategy(**arguments)
    return Trainer(
        accelerator="cpu", devices=PROCESSES, strategy=strategy, max_steps=steps, callbacks=callbacks, **quiet
    )


def be_quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Planner:
    """Plans a model in a separate process."""

    def __init__(self, number: int, name: str, tiny: bool) -> None:
        be_quiet()
        self.model = MODELS[name](tiny)

    def plan(self, schedules: list[str], microbatches: int) -> list[dict[str, Any]]:
        """Return, for each schedule, the strategy's arguments, the predicted seconds and the bytes of each process."""
        trainer = trainer_of(STEPS, {"checkpoint": "never"}, [])
        with redirect_stdout(io.StringIO()):
            table = trainer.plan(self.model, microbatches=microbatches, schedules=schedules)
        return [
            {
                "schedule": row.schedule,
                "arguments": strategy_block(table, row)["init_args"],
                "seconds": row.seconds,
                "bytes": [max(process.start_bytes, process.training_bytes) for process in row.processes],
            }
            for row in table.rows
        ]

    def close(self) -> None: ...


def run(name: str, tiny: bool, steps: int, arguments: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Run steps in a new process; return their seconds, and the peaks in MiB of the workers and then the driver."""
    own, other = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(name, tiny, steps, arguments, other))
    process.start()
    other.close()
    try:
        if not own.poll(RUN_SECONDS):
            raise SystemExit(f"{name} with {arguments} took longer than {RUN_SECONDS:.0f} s")
        seconds, mebi = own.recv()
        return seconds, mebi
    except EOFError:
        raise SystemExit(f"{name} with {arguments} failed; its output is above") from None
    finally:
        process.kill()
        process.join()


def _work(name: str, tiny: bool, steps: int, arguments: dict[str, Any], pipe: Connection) -> None:
    be_quiet()
    torch.set_num_threads(1)
    peaks = Peaks(None)
    model = MODELS[name](tiny)
    trainer = trainer_of(steps, arguments, [peaks])
    with peaks.following():
        trainer.fit(model)
    ended = [after - before for before, after in itertools.pairwise(model.began)]
    driver, *workers = peaks.mebi["pass"]
    pipe.send((ended[WARM_UP - 1 :] if len(ended) >= WARM_UP else ended, [*workers, driver]))
    pipe.close()


def rounds_of(name: str, effort: Effort, schedules: list[str], microbatches: int) -> Iterator[dict[str, Any]]:
    """Yield the predictions and the measurements of each round."""
    tiny, steps = effort.tiny, 3 if effort.tiny else STEPS
    shape = Shape(num_blocks=4, width=64, rows=8, length=16) if tiny else Shape()
    go = multiprocessing.get_context("spawn").Event()
    busy, planner = ContestantProcesses(Busy, shape, go), ContestantProcesses(Planner, name, tiny)
    try:
        busy.call("prepare", microbatches)
        busy.call("step")
        for _ in range(effort.rounds_or(ROUNDS)):
            go.set()
            busy.command("keep_busy")
            sleep(0.05)
            try:
                rows = planner.call("plan", schedules, microbatches)[0]
            finally:
                go.clear()
                busy.replies()
            for row in rows:
                seconds, mebi = run(name, tiny, steps, row["arguments"])
                _, small = run(name, True, 3, {**row["arguments"], "balance": "even"})
                above = [peak - base for peak, base in zip(mebi, small, strict=True)]
                yield {**row, "measured": statistics.median(seconds), "measured_mebi": above}
    finally:
        go.clear()
        for processes in (planner, busy):
            with suppress(ContestantError):
                processes.end()


def rows_of(
    name: str, effort: Effort, schedules: list[str], microbatches: int
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of a model in the tables of times and of memory."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in rounds_of(name, effort, schedules, microbatches):
        found.setdefault(each["schedule"], []).append(each)
    times, peaks = [], []
    for schedule, rounds in found.items():
        predicted, measured = [each["seconds"] for each in rounds], [each["measured"] for each in rounds]
        low, middle, high = quartiles(ratios(predicted, measured))
        balance = " ".join(sorted({str(each["arguments"]["balance"]) for each in rounds}))
        times.append([f"{name}, {schedule}", balance, *spread(predicted), *spread(measured)])
        times[-1].append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        for process, place in (("stage 0", 0), ("driver", 1)):
            foreseen = [each["bytes"][place] / MEBI for each in rounds]
            taken = [each["measured_mebi"][place] for each in rounds]
            _, middle, _ = quartiles(ratios(foreseen, taken)) if min(taken) > 0 else (0.0, float("nan"), 0.0)
            cells = [f"{quartiles(foreseen)[1]:.1f}", *spread(taken, 1)]
            peaks.append([f"{name}, {schedule}, {process}", *cells, f"{middle:.3f}"])
    return times, peaks


def main(effort: Effort) -> Section:
    schedules, number = (["1f1b"], 4) if effort.tiny else ([*SCHEDULES], MICROBATCHES)
    times: list[list[str]] = []
    peaks: list[list[str]] = []
    for name in MODELS:
        own_times, own_peaks = rows_of(name, effort, schedules, number)
        times += own_times
        peaks += own_peaks
    columns = ["", "balance", "predicted s", "quartiles", "measured s", "quartiles", "predicted / measured"]
    return Section(
        "Plan: predicted and measured time and memory",
        f"Three models on {PROCESSES} processes with one thread each, {number} micro-batches without recomputation, "
        f"AdamW: the GPT of the first section; an MLP of widths {', '.join(map(str, WIDTHS))} and 512 rows; "
        "a Llama of transformers with 8 blocks of width 384, whose embedding, norm, head and loss run on the driver. "
        "`trainer.plan` measures and chooses the balance in every round, beside a busy process; then a run takes "
        f"{STEPS} steps with it. Time: from one batch to the next, in the Trainer, without the first {WARM_UP} steps.",
        tables=[
            Table(columns, times, "Seconds of a training step"),
            Table(["", "predicted", "measured", "quartiles", "predicted / measured"], peaks, "Peak memory in MiB"),
        ],
        notes=[
            "Memory: VmHWM of a process in training, less its value before the model, less the same of a run with a "
            "tiny model."
        ],
    )
