"""The verdicts of many cases as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.simulator.campaign import Verdict


def markdown(verdicts: Sequence[Verdict]) -> str:
    """Counts, a line per kind of fault, and everything that is wrong, with the command to run it again."""
    wrong = [verdict for verdict in verdicts if verdict.wrong]
    struck = [verdict for verdict in verdicts if verdict.struck]
    commits = ", ".join(sorted({verdict.commit or "of an unknown version" for verdict in verdicts}))
    lines = [
        f"{len(verdicts)} cases ({commits}), in {len(struck)} of which a fault struck; {len(wrong)} ended wrongly.",
        "",
        "| fault | cases | ended wrongly | seconds from the fault to the error: median, longest |",
        "|---|---|---|---|",
    ]
    for kind in sorted({kind for verdict in struck for kind in _kinds(verdict)}):
        of_kind = [verdict for verdict in struck if kind in _kinds(verdict)]
        seconds = [verdict.seconds_to_end for verdict in of_kind if verdict.seconds_to_end is not None]
        took = f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
        lines.append(f"| {kind} | {len(of_kind)} | {sum(bool(v.wrong) for v in of_kind)} | {took} |")
    for verdict in wrong:
        lines += ["", f"Seed {verdict.seed}: {verdict.case}", "", "```"]
        lines += [f"python -m tests.faults.simulator --seed {verdict.seed}", verdict.ending]
        lines += [part[:4000] for part in verdict.wrong] + ["```"]
    return "\n".join(lines) + "\n"


def _kinds(verdict: Verdict) -> list[str]:
    return [" and ".join(sorted(verdict.kinds))] if len(verdict.kinds) > 1 else verdict.kinds
