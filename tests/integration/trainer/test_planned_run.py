"""What ``python -m trainer plan`` prints as the best row trains as it stands."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_models import CONFIG
from harness import run

from strategies.planning import plan
from trainer.cli import main

PLANNED: dict[str, dict[str, Any]] = {
    "gpipe": {
        "schedule": {"name": "auto", "max_microbatches": 4, "memory_limit_bytes": 10**9},
        "microbatches": "auto",
    },
    "1f1b": {"schedule": {"name": "interleaved", "chunks": 2}},
    "interleaved": {"checkpoint": "never", "schedule": {"pipelined_backward": False}},
    "zbv": {},
}
"""The schedule that is asked for, and the strategy's settings in the configuration that is planned."""


def planned_and_trained(schedule: str) -> dict[str, Any]:
    """Plans, and trains one step with what is printed; returns the row and what the run noted."""
    plan.BUDGET_SECONDS = 0.01
    given = yaml.safe_load(CONFIG)
    given["model"]["class_path"] = "cli_models.Deep"
    settings = PLANNED[schedule]
    strategy = {"class_path": "strategies.RPCSequentialStrategy", "init_args": settings}
    given["trainer"] |= {"devices": 2, "strategy": strategy, "max_steps": 1, "enable_checkpointing": False}
    Path("config.yaml").write_text(yaml.safe_dump(given))
    with redirect_stdout(io.StringIO()) as said:
        main(["plan", "--config=config.yaml", f"--schedules=[{schedule}]", "--microbatches=[2]", "--json=plan.json"])
    block = said.getvalue()[said.getvalue().index("\ntrainer:\n") :]
    found = json.loads(Path("plan.json").read_text())

    Path("plan.yaml").write_text(block)
    monitor = "--trainer.callbacks+=trainer.PipelineMonitor"
    main(["fit", "--config=config.yaml", "--config=plan.yaml", monitor, "--trainer.default_root_dir=after"])
    del given["trainer"]["strategy"], given["trainer"]["devices"]
    own = [line for line in block.splitlines() if line and line != "trainer:"]
    Path("whole.yaml").write_text("\n".join([yaml.safe_dump(given, sort_keys=False).rstrip(), *own, ""]))
    main(["fit", "--config=whole.yaml", monitor, "--trainer.default_root_dir=within"])
    noted = [
        [json.loads(line) for line in Path(folder, "pipeline", "events.jsonl").read_text().splitlines()]
        for folder in ("after", "within")
    ]
    return {"row": found["rows"][found["best"]], "noted": noted}


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=() if name in ("1f1b", "zbv") else pytest.mark.slow) for name in PLANNED],
)
def test_the_block_after_the_planned_configuration_and_within_another_one(schedule: str) -> None:
    found = run(planned_and_trained, schedule)
    row = found["row"]
    assert row["schedule"] == schedule
    for start, end in found["noted"]:
        assert (start["event"], end["event"], end["step"]) == ("start", "end", 1)
        assert [start[name] for name in ("schedule", "microbatches", "balance")] == [
            row[name] for name in ("schedule", "microbatches", "balance")
        ]
        layers = [[layer["place"] for layer in process["layers"]] for process in start["processes"]]
        assert layers == [process["layers"] for process in row["processes"]]
