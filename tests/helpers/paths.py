"""Folders of this checkout, and where processes that tests start find the modules of tests."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PYTHONPATH = os.pathsep.join(map(str, [ROOT, TESTS / "helpers", TESTS / "jobs"]))


def environment() -> dict[str, str]:
    """The environment of this process, in which a script finds the modules of tests."""
    return {**os.environ, "PYTHONPATH": PYTHONPATH}
