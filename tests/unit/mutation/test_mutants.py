"""The mutation tool draws one-line defects of covered lines, never of words or types, and the same ones for a seed."""

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")
from tests.mutation.mutants import draw, mutant_at, places_by_line
from tests.mutation.report import markdown
from tests.mutation.runner import Verdict, order

SOURCE = '''\
"""Adds 1 + 1."""


def add(a: int | None, b: int = 1, *, c: int = 0) -> int | None:
    if a is None:
        raise ValueError(f"a is None, with {b + 1}" + "; give 1 + 1")
    return a + b


class Word:
    def __repr__(self) -> str:
        return "a" + "b"
'''


def test_only_code_changes() -> None:
    places = places_by_line(SOURCE)
    assert set(places) == {4, 5, 7}
    header = [mutant_at("a.py", SOURCE, 4, *place) for place in places[4]]
    changed = {mutant.after for mutant in header if mutant is not None}
    assert changed == {
        f"def add(a: int | None, b: int = {b}, *, c: int = {c}) -> int | None:"
        for b, c in (("2", "0"), ("0", "0"), ("1", "1"), ("1", "-1"))
    }
    for line, known in ((5, "    if a is not None:"), (7, "    return a - b")):
        mutants = [mutant_at("a.py", SOURCE, line, *place) for place in places[line]]
        assert known in {mutant.after for mutant in mutants if mutant is not None}


def test_whether_a_dataclass_refuses_assignments_does_not_change() -> None:
    source = "@dataclass(frozen=True, order=True)\nclass Point: ...\n"
    mutants = [mutant_at("a.py", source, 1, *place) for place in places_by_line(source)[1]]
    assert {mutant.after for mutant in mutants if mutant is not None} == {"", "@dataclass(frozen=True, order=False)"}


def test_a_draw_is_seeded_and_takes_each_line_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    first, again = (draw(tmp_path, {"a.py": range(1, 13)}, seed=3, count=3) for _ in range(2))
    assert first == again and {mutant.line for mutant in first} == {4, 5, 7}
    with pytest.raises(ValueError, match="4 mutants were wanted, but only 3 covered lines have one"):
        draw(tmp_path, {"a.py": range(1, 13)}, seed=3, count=4)
    text = markdown(first, {mutant.key: Verdict(mutant.line != 7, "test_a", 1.0) for mutant in first})
    assert text.startswith("2 of 3 mutants were found") and "-     return a + b\n" in text


def test_what_is_likely_to_fail_soon_runs_first() -> None:
    files, seconds = ["a", "b", "c", "d"], {"a": 30.0, "b": 2.0, "c": 1.0, "d": 1.0}
    assert order(["a", "b", "c"], files, seconds) == [["c", "b"], ["a"], ["d"]]
