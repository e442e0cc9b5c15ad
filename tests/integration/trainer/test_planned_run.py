"""The configuration that ``trainer.plan`` prints trains the model that was planned."""

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import yaml
from harness import run
from parity import Small, batches
from pytorch_lightning import seed_everything

from strategies import RPCSequentialStrategy
from trainer import Trainer

QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def planned_and_run() -> tuple[list[int], Any, list[float], list[float]]:
    settings: dict[str, Any] = {"accelerator": "cpu", "max_steps": 1, **dict.fromkeys(QUIET, False)}
    seed_everything(0, verbose=False)
    single, planned = Small(), Small()
    planned.load_state_dict(single.state_dict())
    Trainer(devices=1, **settings).fit(single, batches([8]))
    planner = Trainer(devices=2, strategy=RPCSequentialStrategy(), **settings)
    with redirect_stdout(said := io.StringIO()):
        table = planner.plan(planned, batches([8]), stages=[3], microbatches=4, schedules=["1f1b", "zb-h1"])
    found = yaml.safe_load(said.getvalue()[said.getvalue().index("\ntrainer:\n") :])["trainer"]
    assert found["strategy"]["class_path"] == "strategies.RPCSequentialStrategy"
    strategy = RPCSequentialStrategy(**found["strategy"]["init_args"])
    planned.losses.clear()
    Trainer(devices=found["devices"], strategy=strategy, **settings).fit(planned, batches([8]))
    return list(table.best.balance), strategy.balance, planned.losses, single.losses


@pytest.mark.slow
def test_the_printed_configuration_trains() -> None:
    """With the planned balance, and the loss of one process; under these schedules one value for each micro-batch."""
    balance, used, losses, (expected,) = run(planned_and_run)
    assert used == balance and len(balance) == 3
    assert len(losses) == 4 and sum(losses) / 4 == pytest.approx(expected, rel=1e-5)
