"""Training under Ray Train (``make ray``), on two Ray nodes on this host: results are those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

CASES = ("ddp", "zero", "pipeline", "replicas", "replay", "restart", "error")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """The outcome of each case, all in one cluster."""
    pytest.importorskip("ray.train.lightning")
    job = [sys.executable, str(Path(ROOT) / "tests" / "jobs" / "ray_job.py"), *CASES]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    ended = subprocess.run(job, env=variables, capture_output=True, text=True, timeout=1700)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    assert ended.returncode == 0 and len(lines) == len(CASES), ended.stdout[-10000:] + ended.stderr[-10000:]
    return {(outcome := json.loads(line))["case"]: outcome for line in lines}


@pytest.mark.parametrize("case", ["ddp", "zero", "pipeline", "replicas", "replay", "restart"])
def test_results_are_those_of_one_process(case: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[case]
    assert outcome["difference"] < 1e-12
    assert outcome["losses"] == pytest.approx(outcome["losses_alone"], rel=1e-12)


def test_ray_notices_a_lost_stage_only_without_recovery(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["replay"]["begun"] == outcomes["pipeline"]["begun"] == 1
    assert outcomes["restart"]["begun"] == 2


def test_an_error_of_a_layer_is_the_error_of_the_run(outcomes: dict[str, dict[str, Any]]) -> None:
    assert "ZeroDivisionError: the layer does not work" in outcomes["error"]["error"]
