"""Cost of a one-row batch in an evaluation: pipelines compared with one process, in interleaved rounds."""

import io
import logging
import statistics
import warnings
from contextlib import redirect_stdout
from time import perf_counter
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.report import Effort, Section, Table, quartiles
from strategies import RPCSequentialStrategy
from trainer import Trainer

ROUNDS, BATCHES, WARM_UP, WIDTH, LAYERS = 3, 7000, 50, 8, 6
LIMIT_MS = 1.0
"""Goal: the additional time of a batch for each stage."""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", mse_loss(self.sequential_module(batch[0]), batch[1]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.sequential_module(batch[0])


class Clock(Callback):
    """Records the start time of each batch."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self.began.append(perf_counter())

    on_predict_batch_start = on_validation_batch_start


def milliseconds(verb: str, stages: int, batches: int, warm_up: int) -> float:
    """Return the mean time of a batch."""
    balance = [LAYERS // stages] * stages
    strategy = SingleDeviceStrategy("cpu") if stages == 1 else RPCSequentialStrategy(balance)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    clock = Clock()
    made = Trainer(accelerator="cpu", devices=stages, strategy=strategy, callbacks=[clock], **off)
    rows = torch.randn(batches + warm_up, WIDTH)
    with redirect_stdout(io.StringIO()):
        getattr(made, verb)(Net(), DataLoader(TensorDataset(rows, rows)))
    return (clock.began[-1] - clock.began[warm_up]) / (len(clock.began) - 1 - warm_up) * 1e3


def main(effort: Effort) -> Section:
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rounds, batches, warm_up = effort.rounds_or(ROUNDS), *((20, 5) if effort.tiny else (BATCHES, WARM_UP))
    rows, most = [], 0.0
    for verb in ("validate", "predict"):
        found: dict[int, list[float]] = {1: [], 2: [], 3: []}
        for _ in range(rounds):
            for stages, values in found.items():
                values.append(milliseconds(verb, stages, batches, warm_up))
        for stages, values in found.items():
            extra = [(own - alone) / stages for own, alone in zip(values, found[1], strict=True)]
            more = "" if stages == 1 else f"{statistics.median(extra):.2f}"
            most = max(most, statistics.median(extra))
            low, middle, high = quartiles(values)
            name = "one process" if stages == 1 else f"{stages} stages"
            rows.append([f"{verb}, {name}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}", more])
    return Section(
        "Cost of a batch of an evaluation",
        f"{LAYERS} linear layers of width {WIDTH}, batches of one row, one thread per process: the mean over {batches} "
        f"batches after {warm_up}, in each of {rounds} interleaved rounds; quartiles are over the rounds.",
        tables=[Table(["", "ms a batch", "quartiles", "more than one process, per stage"], rows)],
        notes=[f"The largest value per stage is {most:.2f} ms; the goal is at most {LIMIT_MS:.0f} ms."],
    )
