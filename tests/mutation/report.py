"""The verdicts as Markdown: how many mutants were found, and each survivor with its line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.mutation.mutants import Mutant
from tests.mutation.runner import Verdict


def markdown(mutants: Sequence[Mutant], verdicts: Mapping[str, Verdict]) -> str:
    """A summary, the survivors as diffs, and a table of what found the others."""
    tested = [mutant for mutant in mutants if mutant.key in verdicts]
    survivors = [mutant for mutant in tested if not verdicts[mutant.key].found]
    flaky = sorted({test for verdict in verdicts.values() for test in verdict.flaky})
    parts = [f"{len(tested) - len(survivors)} of {len(tested)} mutants were found; {len(mutants)} were drawn.\n"]
    for m in survivors:
        parts.append(f"Survivor {m.key}, `{m.path}:{m.line}` ({m.operator}):\n{_diff(m)}")
    if flaky:
        parts.append("Tests that failed once and then passed with the same mutant: " + ", ".join(flaky) + "\n")
    rows = [f"| `{m.path}:{m.line}` | {m.operator} | {verdicts[m.key].by} |" for m in tested if m not in survivors]
    parts.append("\n".join(["| mutant | operator | found by |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _diff(mutant: Mutant) -> str:
    return f"```diff\n- {mutant.before}\n+ {mutant.after}\n```\n"
