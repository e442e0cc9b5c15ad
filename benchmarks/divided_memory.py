"""Memory of every process of pipelines that divide layers (``tensor_parallel_size``), compared with its share.

``python -m benchmarks.divided_memory FOLDER WIDTH`` trains a few steps. Lightning starts the driver of the second
pipeline by running the command once more. Each driver writes what the processes of its pipeline hold after the last
step, when all gradients still exist.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback
from torch.utils.data import DataLoader

from benchmarks.memory import ROWS, STEPS, Model, Shape
from benchmarks.report import Effort, Section, Table
from benchmarks.stage_memory import MEBI, memory_bytes, tensor_bytes
from strategies import RPCSequentialStrategy
from trainer import Trainer

STAGES, PARTS = 2, 2
MOST = 1.15
"""Maximum bytes of the tensors of a process, as a multiple of its share of parameters, gradients and states."""

LIMIT_SECONDS = 300.0


def shape_of(width: int) -> Shape:
    """Return the sizes of a model for AdamW."""
    return Shape(width, 2, late=False, layers=8)


class DividedLayers(Model):
    """Square layers that are divided by columns and by rows in turn."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        styles = ("colwise", "rowwise")
        return {f"sequential_module.{number}": styles[number % 2] for number in range(self.shape.layers)}


class Held(Callback):
    """Writes the bytes that the processes of a pipeline hold after the last step, the driver's first.

    Args:
        folder: The folder for a file of each pipeline.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != STEPS - 1:
            return
        pipeline = trainer.strategy.pipeline
        pipeline.wait()
        remotes = pipeline.remotes
        pids = [os.getpid(), *(process.pid for process in pipeline.workers._processes)]
        found = {
            "tensors": [tensor_bytes(), *(remote.beside(tensor_bytes).wait() for remote in remotes)],
            "resident": [memory_bytes(pid, "VmRSS") for pid in pids],
        }
        (self._folder / f"{trainer.strategy.part}.json").write_text(json.dumps(found))


def measured(width: int) -> dict[str, list[int]]:
    """Return what each process of both pipelines holds in a new run, in bytes, by kind of measurement."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.divided_memory", folder, str(width)]
        subprocess.run(command, check=True, timeout=LIMIT_SECONDS)
        parts = [json.loads((Path(folder) / f"{part}.json").read_text()) for part in range(PARTS)]
    return {kind: [size for part in parts for size in part[kind]] for kind in ("tensors", "resident")}


def main(effort: Effort) -> Section:
    width, small = (512, 64) if effort.tiny else (4096, 64)
    shape = shape_of(width)
    share = shape.model_mebi * (2 + shape.states) / STAGES / PARTS
    found, tiny = measured(width), measured(small)
    names = [f"{name} of pipeline {part}" for part in range(PARTS) for name in ("driver", "worker")]
    rows = []
    for name, tensors, resident, others in zip(
        names, found["tensors"], found["resident"], tiny["resident"], strict=True
    ):
        ratio = tensors / MEBI / share
        verdict = "yes" if ratio <= MOST else "NO"
        grown = (resident - others) / MEBI
        rows.append([name, f"{share:.1f}", f"{tensors / MEBI:.1f}", f"{ratio:.2f}", verdict, f"{grown:.0f}"])
    columns = ["", "share", "tensors", "tensors / share", f"at most {MOST}", "resident"]
    return Section(
        "Memory of pipelines that divide layers",
        f"tensor_parallel_size={PARTS}, {STAGES} stages, {shape.layers} linear layers of {shape.layer_mebi:.1f} MiB, "
        "each of which is divided, AdamW; after a step, in MiB. Share: parameters, gradients and optimizer states of "
        "all layers by the number of processes. Tensors: those that exist in the process, which it counts itself; "
        "they include the buffers of the transport, which do not grow with the layers. Resident: VmRSS less that of "
        "the same run with tiny layers; it includes freed blocks that the allocator keeps.",
        tables=[Table(columns, rows)],
    )


def train(folder: Path, width: int) -> None:
    """Train as one of the pipelines."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = shape_of(width)
    steps = DataLoader([torch.randn(ROWS, width) for _ in range(STEPS)], batch_size=None)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = RPCSequentialStrategy([shape.layers // STAGES] * STAGES, 4, tensor_parallel_size=PARTS)
    trainer = Trainer(
        accelerator="cpu",
        devices=STAGES * PARTS,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[Held(folder)],
        **quiet,
    )
    trainer.fit(DividedLayers(shape), steps)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
