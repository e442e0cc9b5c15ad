"""Six processes train a model whose training state is four times the memory that each process may use.

``python -m examples.larger_than_memory`` limits the memory of every process (``RLIMIT_DATA``) to the memory of its
imports plus 864 MiB. It trains a model that needs 3456 MiB for parameters, gradients and the states of AdamW, and saves
the model. New processes then resume the training, and a third set of processes predicts. This takes one to two minutes,
6 GiB of memory in all, and 6 GiB of disk space.

``python -m examples.larger_than_memory --one-process`` tries the same in one process with this limit, and fails.

    driver      stage 5: 4 layers, 576 MiB    no process builds, holds, gathers or reads the other layers
    worker 0    stage 0: 4 layers, 576 MiB
    ...         ...
    worker 4    stage 4: 4 layers, 576 MiB
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from typing import Any

import psutil
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy
from trainer import Trainer

STAGES, LAYERS, WIDTH, STEPS, ROWS = 6, 24, 3072, 2, 8
MEBI = 2**20
STATE_BYTES = 4 * LAYERS * WIDTH**2 * 4
"""Parameters, gradients and two states of AdamW, of four bytes each."""

ALLOWED_BYTES = STATE_BYTES // 4
"""Memory that a process may use in addition to its imports."""

PHASES = ("fit", "resume", "predict")
WORKER_IMPORTS = "import torch._dynamo, strategies.pipeline.worker.process"


class Net(LightningModule):
    """Square layers, built in ``configure_model``."""

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) - batch).square().mean()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def used_bytes() -> int:
    """Return the memory of this process that counts towards ``RLIMIT_DATA``."""
    return int(psutil.Process().memory_info().data)


def used_by_imports(statement: str) -> int:
    """Return the memory that counts towards ``RLIMIT_DATA`` in a new process after an import statement."""
    code = f"{statement}\nimport psutil\nprint(psutil.Process().memory_info().data)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


class Limits(Callback):
    """Sets the limit of the workers, which inherit it, and then the limit of the driver; prints each process's memory.

    Args:
        own_bytes: The limit of this process.
        workers_bytes: The limit of a worker.
    """

    def __init__(self, own_bytes: int, workers_bytes: int) -> None:
        self._own, self._workers = own_bytes, workers_bytes

    def setup(self, trainer: Any, model: Any, stage: str) -> None:
        limit(self._workers)

    def on_fit_start(self, *args: Any) -> None:
        limit(self._own)

    def on_predict_start(self, *args: Any) -> None:
        limit(self._own)

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, *args: Any) -> None:
        used = [f"{(used_bytes() - self._own + ALLOWED_BYTES) / MEBI:.0f}"]
        for process in psutil.Process().children(recursive=True):
            if "worker" in process.cmdline():  # neither the fork server, their parent, nor its successor
                used.append(f"{(process.memory_info().data - self._workers + ALLOWED_BYTES) / MEBI:.0f}")
        print(f"step {trainer.global_step}: loss {outputs['loss']:.4f}; MiB beyond imports: {', '.join(used)}")


def limit(size_bytes: int) -> None:
    """Limit the memory of this process, and of the processes that it starts."""
    resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def run(phase: str, folder: str, *, one_process: bool) -> None:
    """Trains, resumes or predicts, in this process and in the processes that it starts."""
    torch.set_num_threads(1)
    own = used_bytes() + ALLOWED_BYTES
    limits = Limits(own, own if one_process else used_by_imports(WORKER_IMPORTS) + ALLOWED_BYTES)
    num_steps = STEPS * (2 if phase == "resume" else 1)
    strategy = RPCSequentialStrategy([LAYERS // STAGES] * STAGES, microbatches=2, state_dict_type="sharded")
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if one_process else STAGES,
        strategy="auto" if one_process else strategy,
        max_steps=num_steps,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS, save_top_k=-1), limits],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    data = DataLoader(torch.randn(2 * STEPS * ROWS, WIDTH), batch_size=ROWS)
    if phase == "fit":
        trainer.fit(Net(), data)
    elif phase == "resume":
        trainer.fit(Net(), data, ckpt_path=f"{folder}/step={STEPS}.ckpt")
    else:
        outputs = trainer.predict(Net(), data, ckpt_path=f"{folder}/step={2 * STEPS}.ckpt")
        assert outputs is not None
        print(f"predicted {len(outputs)} batches, mean square of the last one {float(outputs[-1]):.3e}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.larger_than_memory")
    parser.add_argument("--one-process", action="store_true", help="without a pipeline, which fails")
    parser.add_argument("--phase", choices=PHASES, help="run only this, with the checkpoints in --folder")
    parser.add_argument("--folder", default="", help="folder of the checkpoints of a phase")
    arguments = parser.parse_args()
    if arguments.phase is not None:
        run(arguments.phase, arguments.folder, one_process=arguments.one_process)
        return
    needed, allowed = STATE_BYTES / MEBI, ALLOWED_BYTES / MEBI
    print(f"training needs {needed:.0f} MiB; a process may use {allowed:.0f} MiB beyond its imports", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for phase in PHASES:
            print(f"-- {phase} --", flush=True)
            command = [sys.executable, "-m", "examples.larger_than_memory", f"--phase={phase}", f"--folder={folder}"]
            ended = subprocess.run([*command, *(["--one-process"] if arguments.one_process else [])], check=False)
            if ended.returncode != 0:
                raise SystemExit(f"{phase} failed")


if __name__ == "__main__":
    main()
