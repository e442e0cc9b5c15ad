"""Runs cases in the test harness, one after another, and gives each a verdict."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import OWN_SERVER, run

from tests.faults.simulator.cases import ANY_MOMENT, DRIVER, SERVER, Case, Shape, draw
from tests.faults.simulator.oracle import Outcome, judge
from tests.faults.simulator.subject import disturbed, undisturbed

LIMIT_SECONDS = 110.0
"""For all runs of a case; far above what the oracle allows, since the harness shows all stacks then."""

SETTLE_SECONDS = 30.0
"""How long processes may take to end after a run, on a machine that may be busy."""


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
        seed: Its seed.
        case: The case in words.
        kinds: The kinds of its faults.
        struck: Whether a fault has struck.
        ending: How the disturbed run ended.
        wrong: Everything that is wrong.
        seconds_to_end: From the fault to the end of a run that raised something.
        seconds: How long the case took.
        commit: The version of the code; ``+`` if files have changed since.
    """

    seed: int
    case: str
    kinds: list[str]
    struck: bool
    ending: str
    wrong: list[str]
    seconds_to_end: float | None = None
    seconds: float = field(default=0.0, compare=False)
    commit: str = field(default="", compare=False)


class Campaign:
    """Cases and the references that they share.

    Args:
        commit: The version of the code, for the verdicts.
    """

    def __init__(self, commit: str = "") -> None:
        self._commit = commit
        self._references: dict[Shape, Outcome] = {}

    def examine(self, case: Case) -> Verdict:
        """Runs a case, and the undisturbed run of its shape if no case before had that, and judges it."""
        began = time.monotonic()
        outcome = None
        try:
            reference = self._reference(replace(case.shape, launcher=""))
            assert reference.results is not None
            usual_seconds = reference.results.ended - reference.results.began
            outcome = run(
                disturbed,
                case,
                usual_seconds,
                timeout_seconds=LIMIT_SECONDS,
                settle_seconds=SETTLE_SECONDS,
                env=OWN_SERVER if any(fault.role == SERVER for fault in case.faults) else None,
                allow=_allowed(case),
            )
            wrong = judge(case, outcome, reference)
        except AssertionError as error:
            wrong = [str(error)]
        return Verdict(
            seed=case.seed,
            case=str(case),
            kinds=[fault.kind for fault in case.faults],
            struck=outcome is not None and (bool(outcome.struck) or outcome.of_damaged is not None),
            ending=_ending(outcome),
            wrong=wrong,
            seconds_to_end=outcome.seconds_to_end() if outcome is not None else None,
            seconds=round(time.monotonic() - began, 1),
            commit=self._commit,
        )

    def _reference(self, shape: Shape) -> Outcome:
        if shape not in self._references:
            limits = {"timeout_seconds": LIMIT_SECONDS, "settle_seconds": SETTLE_SECONDS}
            found = run(undisturbed, shape, **limits, allow=_allowed_of(shape))
            if found.results.error is not None:
                raise AssertionError(f"without faults, it raised {found.results.error}")
            self._references[shape] = found
        return self._references[shape]


def outstanding(seeds: Iterable[int], verdicts: Mapping[int, Verdict]) -> Iterator[Case]:
    """The cases without a verdict, and those whose verdict is wrong or on another case: tables may draw others now."""
    for case in map(draw, seeds):
        verdict = verdicts.get(case.seed)
        if verdict is None or verdict.wrong or verdict.case != str(case):
            yield case


def version() -> str:
    """The commit of the code, with ``+`` if files have changed since; empty if git does not know."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip()


def examine(seed: int) -> Verdict:
    """The verdict of one seed."""
    return Campaign().examine(draw(seed))


def _allowed(case: Case) -> set[str]:
    """What a case may leave: a driver that is killed cannot remove its temporary files.

    Neither can one that gets SIGTERM before Lightning handles signals.
    """
    is_killed = any(
        fault.role == DRIVER
        and (fault.kind in ("kill", "cut off") or (fault.kind == "terminate" and fault.phase == ANY_MOMENT))
        for fault in case.faults
    )
    return _allowed_of(case.shape) | ({"tmp"} if is_killed or case.shape.launcher else set())


def _allowed_of(shape: Shape) -> set[str]:
    """Lightning keeps the process group of ranks and its variables as long as the process."""
    return {"process_group", "env", "port"} if shape.replicas > 1 else set()


def _ending(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no outcome"
    if outcome.results is None:
        return f"the driver ended with status {outcome.status}"
    if outcome.results.error is None:
        return "went on"
    message = re.sub(r"process \d+ on [^ ,]+", "process N", outcome.results.error.message)[:160].partition("\n")[0]
    return f"{outcome.results.error.kind}: {message}"
