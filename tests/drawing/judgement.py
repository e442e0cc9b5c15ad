"""Verdicts: what an exception or a difference means, which verdicts are failures, and the report."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import strategies
from strategies.common.errors import RemoteTraceback

EQUAL, REFUSED, NOT_BUILT, FAILED = "equal", "refused", "not built", "FAILED"

LEAST_EQUAL = 1 / 3
"""The share of the classes of a package that must be equal under a schedule; else the drawing tests too little."""

_HOME = str(Path(strategies.__file__).parent)
_FOR_USERS = (ValueError, TypeError, RuntimeError, NotImplementedError)  # also Lightning's MisconfigurationException
_MISCONFIGURATION = "MisconfigurationException"


@dataclass(frozen=True)
class Case:
    """A class of a package.

    Attributes:
        package: Name of the package.
        name: What the package calls the class.
        seed: The seed of the drawing, from which the options of the case are drawn too.
    """

    package: str
    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.package} {version(self.package)}, {self.name}, seed {self.seed}"


@dataclass(frozen=True)
class Finding:
    """What came of a case under one schedule.

    Attributes:
        kind: ``EQUAL``, ``REFUSED``, ``NOT_BUILT`` or ``FAILED``.
        options: What was drawn for the case, and the schedule.
        told: The message, or what differed.
    """

    kind: str
    options: str = ""
    told: str = ""


@dataclass(frozen=True)
class Verdict:
    """What came of a case under every schedule, and how long that took."""

    case: Case
    findings: Sequence[Finding]
    seconds: float

    @property
    def is_equal(self) -> bool:
        return any(finding.kind == EQUAL for finding in self.findings)

    @property
    def has_failed(self) -> bool:
        return any(finding.kind == FAILED for finding in self.findings)

    def __str__(self) -> str:
        lines = [f"{self.case} ({self.seconds:.0f} s)"]
        lines += [f"    {each.kind}: {'; '.join(filter(None, (each.options, each.told)))}" for each in self.findings]
        if self.has_failed:
            lines.append(f"    again: python -m tests.drawing --seed {self.case.seed} --only {self.case.name}")
        return "\n".join(lines)


def kind_of(error: BaseException) -> str:
    """Tells a refusal, which a line of the strategies raises for users, from any other error.

    An error of torch or of a model, an assertion or an error that Python raises is none, even if it comes out of the
    strategies.
    """
    file, _, line = _origin(error)
    is_for_users = type(error) in _FOR_USERS or type(error).__name__ == _MISCONFIGURATION
    return REFUSED if is_for_users and file.startswith(_HOME) and line.startswith("raise ") else FAILED


def in_words(error: BaseException) -> str:
    """Returns type and message in one line; of a failure also the place."""
    file, number, _ = _origin(error)
    place = f" [{Path(file).name}:{number}]" if kind_of(error) == FAILED else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}{place}"


def _origin(error: BaseException) -> tuple[str, int, str]:
    """Returns file, number and text of the line that has raised an error, in whichever process."""
    if isinstance(error.__cause__, RemoteTraceback):
        file, number, line = re.findall(r'File "(.+?)", line (\d+), in .*\n\s+(.*)', str(error.__cause__))[-1]
        return file, int(number), line
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename, frame.lineno or 0, frame.line or ""


def shortcomings(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns what is wrong with a drawing: each failure, and packages of which too little was equal."""
    wrong = [str(verdict) for verdict in verdicts if verdict.has_failed]
    for package in dict.fromkeys(verdict.case.package for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.case.package == package]
        equal = sum(verdict.is_equal for verdict in own)
        if equal < LEAST_EQUAL * len(own):
            wrong.append(
                f"{package} {version(package)}, seed {own[0].case.seed}: only {equal} of {len(own)} classes were equal "
                f"under a schedule, and at least {LEAST_EQUAL:.0%} must be; the others were refused, or no small one "
                "could be built (tests/drawing/tiny.py)"
            )
    return wrong


def markdown(verdicts: Sequence[Verdict]) -> str:
    """Returns a report: counts, and a row for each finding."""
    kinds = (EQUAL, REFUSED, NOT_BUILT, FAILED)
    lines = ["| package | classes | " + " | ".join(kinds) + " |", "|---" * (2 + len(kinds)) + "|"]
    for package in dict.fromkeys(verdict.case.package for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.case.package == package]
        found = [finding.kind for verdict in own for finding in verdict.findings]
        counts = " | ".join(str(found.count(kind)) for kind in kinds)
        lines.append(f"| {package} {version(package)} | {len(own)} | {counts} |")
    lines += ["", "| class | seed | | options | |", "|---|---|---|---|---|"]
    for verdict in verdicts:
        for each in verdict.findings:
            cells = [verdict.case.name, str(verdict.case.seed), each.kind, each.options, each.told.replace("|", "\\|")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
