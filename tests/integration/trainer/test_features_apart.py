"""Without the file of a feature and its line in the list, the strategy imports, trains, and refuses its option."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

TRAINING = """
import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn

import strategies
from strategies import RPCSequentialStrategy
from trainer import Trainer


class Net(BoringModel):
    def __init__(self):
        super().__init__()
        self.sequential_module = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))

    def forward(self, x):
        return self.sequential_module(x)


if __name__ == "__main__":
    assert strategies.__file__.startswith({folder!r}), strategies.__file__
    strategy = RPCSequentialStrategy([1, 1], schedule="1f1b", microbatches=2)
    settings = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, max_steps=2)
    Trainer(accelerator="cpu", devices=2, strategy=strategy, **settings).fit(Net())
    option = {option}
    if option:
        try:
            RPCSequentialStrategy(**option)
        except MisconfigurationException as error:
            assert "has no effect: no feature of the strategy uses it" in str(error), error
        else:
            raise AssertionError("the option is taken")
    print("trained without it")
"""


@pytest.mark.parametrize(
    ("file", "name", "option"),
    [
        ("lightning/features/recovery.py", "LostWorkers", "{'recovery': strategies.Recovery(1)}"),
        pytest.param("lightning/features/summary.py", "SummaryOfStages", "{}", marks=pytest.mark.slow),
        pytest.param(
            "planning/rebalancing.py",
            '"strategies.planning.rebalancing"',
            "{'rebalance': 'auto'}",
            marks=pytest.mark.slow,
        ),
        pytest.param("lightning/features/averages.py", "WeightAverages", "{}", marks=pytest.mark.slow),
    ],
    ids=["recovery", "summary", "rebalancing", "averages"],
)
def test_a_run_without_the_file_of_a_feature(tmp_path: Path, file: str, name: str, option: str) -> None:
    for package in ("strategies", "trainer"):
        being_written = shutil.ignore_patterns("*.pyc.*")  # by another process
        shutil.copytree(ROOT / package, tmp_path / package, ignore=being_written)
    (tmp_path / "strategies" / file).unlink()
    listed = tmp_path / "strategies" / "rpc_sequential.py"
    kept = [line for line in listed.read_text().splitlines(keepends=True) if name not in line]
    assert len(listed.read_text().splitlines()) - len(kept) in (1, 2)  # in the list, and the import
    listed.write_text("".join(kept))
    script = tmp_path / "training.py"
    script.write_text(TRAINING.replace("{folder!r}", repr(str(tmp_path))).replace("{option}", option))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0 and "trained without it" in done.stdout, done.stderr
