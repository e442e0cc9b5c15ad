"""The short forms of the simulator of faults; ``make faults`` runs a thousand cases (docs/faults.md)."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from two_hosts import CAN_HAVE_HOSTS

from tests.faults.simulator.__main__ import main
from tests.faults.simulator.campaign import Campaign, Verdict
from tests.faults.simulator.cases import DRIVER, WORKER, draw, first_seed

QUICK = {
    "kill": WORKER,
    "exception": WORKER,
    "disk full": WORKER,
    "cut off": DRIVER,
    "connection lost": WORKER,
    "hang": WORKER,
}


def check(seed: int) -> None:
    verdict = Campaign().examine(draw(seed))
    again = f"python -m tests.faults.simulator --seed {seed}"
    assert not verdict.wrong, "\n".join([again, verdict.case, verdict.ending, *verdict.wrong])


OF_MAKE_TEST = ("kill", "exception", "connection lost")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OF_MAKE_TEST else pytest.mark.slow) for kind in QUICK]
)
def test_a_fault(kind: str) -> None:
    check(first_seed(kind, QUICK[kind]))


OF_TORCHRUN = 2
"""A worker is killed and replaced."""
OF_TWO_HOSTS = (402, 593)
"""The link between the hosts goes down without ``max_restarts``, or drops packets for a time."""
WITH_RESTARTS = 267
"""The link goes down with ``max_restarts``."""


@pytest.mark.nightly
def test_a_rank_is_killed() -> None:
    check(OF_TORCHRUN)


@pytest.mark.skipif(not CAN_HAVE_HOSTS, reason="network namespaces need root, ip and unshare")
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(WITH_RESTARTS, marks=pytest.mark.slow),
        *(pytest.param(s, marks=pytest.mark.nightly) for s in OF_TWO_HOSTS),
    ],
)
def test_faults_of_two_hosts(seed: int) -> None:
    check(seed)


SOME = (1005, 1008, 1020, 1027)
"""Seeds of ``make slow``: driver or worker is killed or terminated, a checkpoint is cut off, two faults at once."""


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.slow if seed in SOME else pytest.mark.nightly) for seed in range(1000, 1030)],
)
def test_some_faults(seed: int) -> None:
    check(seed)


@pytest.mark.slow
def test_a_resumed_campaign_runs_what_has_no_right_verdict(tmp_path: Path) -> None:
    seed, verdicts, report = first_seed("kill", WORKER), tmp_path / "verdicts.jsonl", tmp_path / "report.md"
    of_another_case = Verdict(seed, "a run that the tables do not draw any more", ["kill"], True, "went on", [])
    verdicts.write_text(json.dumps(asdict(of_another_case)) + "\n")
    command = ["--seed", str(seed), "--resume", str(verdicts), "--report", str(report)]
    assert main(command) == 0
    first, second = map(json.loads, verdicts.read_text().splitlines())
    assert (first["case"], second["case"]) == (of_another_case.case, str(draw(seed))) and second["commit"]
    assert main(command) == 0
    assert len(verdicts.read_text().splitlines()) == 2
    assert report.read_text().startswith(
        f"1 cases ({second['commit']}), in 1 of which a fault struck; 0 ended wrongly."
    )
