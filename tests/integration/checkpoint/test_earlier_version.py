"""Checkpoints that version 254e2d3 has written load, and training continues as that version continued it."""

import zipfile
from pathlib import Path
from typing import Any

import earlier_version_job
import pytest
import torch
from harness import run
from parity import alike
from paths import TESTS
from scripts import Script

from strategies.checkpoint.save_and_load import load_sharded

ARCHIVE = TESTS / "data/checkpoints_254e2d3.zip"
"""For each kind the checkpoint after one epoch, and as ``.pt`` what the version came to in the next one."""
KINDS = ("pipeline-full", "pipeline-sharded", "zero-sharded")


def unpacked() -> Path:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall()
    return Path.cwd()


def continued_in_one_process() -> dict[str, Any]:
    folder, seen = unpacked(), {}
    for kind in KINDS:
        checkpoint = folder / f"{kind}.ckpt"
        expected = torch.load(folder / f"{kind}.pt", weights_only=True)
        seen[kind] = earlier_version_job.fit("single", 2, checkpoint), expected
    sharded, _ = load_sharded(folder / "pipeline-sharded.ckpt")
    seen["forms"] = sharded, torch.load(folder / "pipeline-full.ckpt", weights_only=True)
    return seen


def test_in_one_process() -> None:
    seen = run(continued_in_one_process)
    sharded, full = seen.pop("forms")
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "relay"):
        alike(sharded[key], full[key], tolerance=0.0)
    for ours, theirs in seen.values():
        alike(ours, theirs, tolerance=1e-12)  # several processes add up in another order


def continued_in_the_same_way(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    folder, result = unpacked(), Path("result.pt").absolute()
    assert Script(earlier_version_job.__file__, "continue", kind, str(folder), str(result)).wait(timeout=100) == 0
    return tuple(torch.load(path, weights_only=True) for path in (result, folder / f"{kind}.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_the_same_way(kind: str) -> None:
    ours, theirs = run(continued_in_the_same_way, kind)
    alike(ours, theirs, tolerance=0.0)
