"""Peak memory of every process of a run, and a run that cannot fit, which is refused before any process starts."""

import re
import resource
import subprocess
import sys

import psutil
import pytest
import torch
from harness import run
from paths import ROOT
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.memory import Outcome, Run, Shape
from strategies import RPCSequentialStrategy
from strategies.launch.limits import limits_of_process
from trainer import Trainer

MEBI = 2**20


class LateModel(LightningModule):
    """Eight layers of 16 MiB, trained by AdamW: with gradients and states 512 MiB."""

    def configure_model(self) -> None:
        if not hasattr(self, "sequential_module"):
            self.sequential_module = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequential_module(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Model(LateModel):
    """The same, built in ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        self.configure_model()


def fit(kind: type[LateModel]) -> str:
    """Trains one step on two stages; returns the message if that is refused."""
    strategy = RPCSequentialStrategy("even", microbatches=2)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, **quiet)
    try:
        trainer.fit(kind(), DataLoader([torch.randn(4, 2048)], batch_size=None))
    except MisconfigurationException as error:
        assert psutil.Process().children() == []  # no process has been started
        return str(error)
    return ""


def fit_with(mebi: int, kind: type[LateModel]) -> str:
    """Trains where a process may use some MiB more than this one does."""
    resource.setrlimit(resource.RLIMIT_DATA, (2**40, -1))
    used = limits_of_process()[0].used_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (used + mebi * MEBI, -1))
    return fit(kind)


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_before_any_process_starts() -> None:
    # A process each, since a run leaves memory behind that the next one gets. What a first run imports has to fit
    # (about 100 MiB), and the 64 or 128 MiB of parameters that are built before all needs are known.
    refused = [run(fit_with, 250, kind) for kind in (LateModel, Model)]
    needs = "needs at least 256 MiB (64 MiB of parameters, 64 MiB of gradients, 128 MiB of optimizer states)"
    for message in refused:
        assert message.startswith("Stage 1 (layers 4 to 7: ") and needs in message
        # How much there is for a stage depends on imports.
        assert re.search(r"With \d+ MiB for a stage per process, [3-8] stages are needed at least \(balance=", message)
    assert run(fit_with, 2000, LateModel) == ""


LIBRARIES_MEBI = 130
"""What torch imports in a process's first steps, and what threads and connections take; about 90 MiB in a worker."""


def measured(given: Run) -> Outcome:
    torch.set_num_threads(1)
    return given.measured_here()


@pytest.mark.slow
def test_no_process_holds_more_than_its_part() -> None:
    """Loosely, for 6 layers of 36 MiB; ``python -m benchmarks memory`` has the figures of a larger model."""
    built = Shape(3072, 0, late=False, layers=6)
    outcome = run(measured, Run(built))
    assert list(outcome.mebi) == ["start", "pass", "end"]
    for driver, *workers in outcome.mebi.values():
        assert len(workers) == 2
        assert driver <= built.driver_bound_mebi() + LIBRARIES_MEBI
        assert max(workers) <= built.bound_mebi(trains=True) + LIBRARIES_MEBI
    start, peak = outcome.mebi["start"], outcome.mebi["pass"]
    assert max(start[1:]) < 1.2 * 72 + 36 < min(peak)  # a stage arrives without a second copy; gradients come later


@pytest.mark.slow
def test_no_process_builds_more_than_its_part() -> None:
    late = Shape(3072, 2, late=True, layers=6)
    outcome = run(measured, Run(late))
    for phase in ("start", "pass", "end"):
        assert max(outcome.mebi[phase]) <= late.bound_mebi(trains=True) + LIBRARIES_MEBI
    assert max(outcome.mebi["start"]) < 1.2 * 72 + 36  # the driver has only its own stage too


def example(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.larger_than_memory", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_training_state_of_four_times_what_a_process_may_use() -> None:
    done = example()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 4: " in done.stdout and "predicted 4 batches" in done.stdout
    alone = example("--one-process")
    assert alone.returncode != 0
    assert "can't allocate memory" in alone.stderr or "MemoryError" in alone.stderr  # torch's error, or Python's
