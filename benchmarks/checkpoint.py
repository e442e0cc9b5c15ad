"""Time and memory of saving a pipeline of two stages, compared with ``torch.save`` of the same state by one process.

The modes of saving alternate between the steps of one training run, so that all of them run under the same load. The
benchmark measures the pause of training, the time until the checkpoint is on the disk, and the growth of each process.
"""

import ctypes
import logging
import os
import re
import tempfile
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.models import encoder_layers
from benchmarks.report import Effort, Section, Table, spread
from strategies import RPCSequentialStrategy
from strategies.checkpoint.atomic import remove
from strategies.checkpoint.background import Writer
from trainer import Trainer

NUM_LAYERS, WIDTH, ROWS, LENGTH, ROUNDS, WARM_UP = 8, 512, 4, 32, 5, 2
STEPS_MEANWHILE = 2
"""Number of steps while a checkpoint is written asynchronously."""

MODES = {
    "torch.save by one process": None,
    "the same, and fsync": None,
    "one file": ("full", False),
    "sharded": ("sharded", False),
    "one file, asynchronous": ("full", True),
    "sharded, asynchronous": ("sharded", True),
}


class Model(LightningModule):
    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.sequential_module = encoder_layers(num_layers, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequential_module(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def memory_mib(pid: int, kind: str) -> float:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


class Saving(Callback):
    """Saves every few steps, each time in the next mode."""

    def __init__(self, strategy: Any, folder: Path) -> None:
        self.strategy, self.path = strategy, folder / "a.ckpt"
        self.background: Any = None
        self.seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        self.grown: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        self.steps: dict[str, list[float]] = {"alone": [], "beside a save": []}
        self.state: dict[str, Any] = {}
        self._step_began = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._step_began = perf_counter()

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.strategy.pipeline.wait()
        turn, step = divmod(batch_idx, 1 + STEPS_MEANWHILE)
        mode = list(MODES)[turn % len(MODES)]
        warm, in_background = turn >= WARM_UP * len(MODES), mode.endswith("asynchronous")
        if step == 0:
            self.begin(trainer, mode)
        elif warm:
            self.steps["beside a save" if in_background else "alone"].append(perf_counter() - self._step_began)
        if step == STEPS_MEANWHILE:
            self.end(mode, warm)

    def begin(self, trainer: Any, mode: str) -> None:
        options = MODES[mode]
        self.background = self.background or self.strategy._writer
        self.strategy._state_dict_type, in_background = options or ("full", False)
        self.strategy._writer = self.background if in_background else Writer()
        if options is None:
            self.state = trainer._checkpoint_connector.dump_checkpoint()
        remove(self.path)
        os.sync()
        ctypes.CDLL(None).malloc_trim(0)  # returns freed memory, which would hide the growth of this save
        self.pids = [os.getpid(), self.strategy.pipeline.workers._processes[0].pid]
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        self.before = [memory_mib(pid, "VmRSS") for pid in self.pids]
        began = perf_counter()
        if options is None:
            with open(self.path, "wb") as file:
                torch.save(self.state, file)
                file.flush()
                if mode.endswith("fsync"):
                    os.fsync(file.fileno())
        else:
            trainer.save_checkpoint(self.path)
        self.pause = self.written = perf_counter() - began
        self.state = {}
        if in_background:
            self.background._saving.add_done_callback(lambda _: vars(self).update(written=perf_counter() - began))

    def end(self, mode: str, warm: bool) -> None:
        self.strategy._writer.wait()
        peaks = [memory_mib(pid, "VmHWM") for pid in self.pids]
        driver, worker = (peak - before for peak, before in zip(peaks, self.before, strict=True))
        self.grown[mode].append((driver, worker))
        if warm:
            self.seconds[mode].append((self.pause, self.written))

    def on_train_end(self, *args: Any) -> None:
        self.strategy._writer = self.background  # so that the strategy ends it


def main(effort: Effort) -> Section:
    rounds = effort.rounds_or(ROUNDS)
    num_layers, width = (4, 64) if effort.tiny else (NUM_LAYERS, WIDTH)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    strategy = RPCSequentialStrategy([num_layers // 2] * 2, microbatches=2, checkpoint="never", async_save=True)
    num_steps = (rounds + WARM_UP) * len(MODES) * (1 + STEPS_MEANWHILE)
    with tempfile.TemporaryDirectory() as folder:
        saving = Saving(strategy, Path(folder))
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_steps=num_steps, callbacks=[saving], **quiet
        )
        model = Model(num_layers, width)
        trainer.fit(model, DataLoader([torch.randn(ROWS, LENGTH, width)] * num_steps, batch_size=None))
    states = trainer.optimizers[0].state.values()
    tensors = [*model.state_dict().values(), *(value for state in states for value in state.values())]
    size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)) / 2**20
    section = Section(
        "Saving a checkpoint of a pipeline",
        f"{size:.0f} MiB of weights and optimizer states, half of them on each of two processes with one thread each; "
        f"{rounds} interleaved rounds after {WARM_UP}. Pause: the time for which training stops. Written: the time "
        "until the file is on the disk. Growth: the largest increase of each process's memory in any round.",
    )
    rows = []
    for mode, seconds in saving.seconds.items():
        pause, written = zip(*seconds, strict=True)
        grown = [max(column) for column in zip(*saving.grown[mode], strict=True)]
        rows.append([mode, *spread(pause, 2), *spread(written, 2), *(f"{mib:.0f}" for mib in grown)])
    columns = ["", "pause, s", "quartiles", "written, s", "quartiles", "driver grows, MiB", "worker grows, MiB"]
    steps = [[name, *spread(seconds)] for name, seconds in saving.steps.items()]
    section.tables = [Table(columns, rows), Table(["step", "median s", "quartiles"], steps)]
    return section
