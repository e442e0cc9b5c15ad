"""The command line with two processes, from the folder of the user's module."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_models import CONFIG
from harness import run
from paths import PYTHONPATH


@pytest.mark.slow
def test_two_processes_from_any_directory() -> None:
    run(two_ranks, timeout_seconds=120)


def two_ranks() -> None:
    """DDP from the command line in a folder with the user's module: one config, one checkpoint, two ranks."""
    Path("mine.py").write_text("from cli_models import Net\nclass Mine(Net):\n    pass\n")
    Path("config.yaml").write_text(CONFIG.replace("cli_models.Net", "mine.Mine").replace("devices: 1", "devices: 2"))
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-W", "ignore", "-m", "trainer", "fit", "--config=config.yaml"]
    command += ["--trainer.strategy.comm_hook=fp16_compress"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "MEMBER: 2/2" in done.stderr
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["config.yaml", "epoch=0-step=2.ckpt"]
    # Both ranks refuse the same set-up; one of them says so.
    refused = subprocess.run(
        [*command, "--model.trouble=setup"], env=environment, capture_output=True, text=True, timeout=100
    )
    lines = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert (refused.returncode, len(lines)) == (2, 1), (refused.returncode, refused.stderr)
    assert "Traceback" not in refused.stderr
