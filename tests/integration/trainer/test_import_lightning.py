"""Scripts with ``import lightning as L``, and configurations that name classes of such modules, train as others do."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from paths import PYTHONPATH, ROOT

CONFIG = """
model: lightning_models.Net
data: lightning_models.Data
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 2
  logger: false
  enable_progress_bar: false
  strategy: rpc_sequential
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: checkpoints, filename: last}
    - class_path: lightning_models.Count
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def script(*ways: str) -> dict[str, Any]:
    done = python(str(ROOT / "tests/jobs/lightning_job.py"), "outcomes.pt", *ways)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = torch.load("outcomes.pt")
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    return run(script, "one process", "pipeline", "1f1b under Lightning's Trainer")


def check(outcome: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert (outcome["loss"], outcome["steps"]) == (pytest.approx(expected["loss"], rel=1e-9), expected["steps"])
    torch.testing.assert_close(outcome["parameters"], expected["parameters"], rtol=1e-9, atol=0)


@pytest.mark.parametrize("way", ["pipeline", "1f1b under Lightning's Trainer"])
def test_a_pipeline_equals_one_process(way: str, outcomes: dict[str, Any]) -> None:
    assert outcomes["one process"]["steps"] == 8
    check(outcomes[way], outcomes["one process"])


@pytest.mark.slow
def test_ranks_equal_one_process(outcomes: dict[str, Any]) -> None:
    found = run(script, "ddp", "zero")
    for way in ("ddp", "zero"):
        check(found[way], outcomes["one process"])


@pytest.mark.slow
def test_the_command_line_uses_the_package_of_the_models_class(outcomes: dict[str, Any]) -> None:
    checkpoint = run(a_command)
    torch.testing.assert_close(
        checkpoint["state_dict"], outcomes["one process"]["parameters"], rtol=1e-9, atol=0, check_device=False
    )


def a_command() -> dict[str, Any]:
    Path("config.yaml").write_text(CONFIG)
    done = python("-m", "trainer", "fit", "--config=config.yaml")
    assert done.returncode == 0, done.stderr
    for option in (
        "--trainer.logger=pytorch_lightning.loggers.CSVLogger",
        "--trainer.strategy=pytorch_lightning.strategies.DDPStrategy",
    ):
        refused = python("-m", "trainer", "fit", "--config=config.yaml", option)
        lines = refused.stderr.splitlines()
        assert refused.returncode == 2 and len(lines) == 1, refused.stderr
        key = option.removeprefix("--").partition("=")[0]
        assert lines[0].startswith(f"error: {key}: pytorch_lightning.") and "use lightning.pytorch" in lines[0]
    checkpoint: dict[str, Any] = torch.load("checkpoints/last.ckpt", weights_only=False)
    return checkpoint
