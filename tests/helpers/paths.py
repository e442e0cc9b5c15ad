"""Folders of this checkout, and where processes that tests start find the modules of tests."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PYTHONPATH = os.pathsep.join(map(str, [ROOT, TESTS / "helpers", TESTS / "jobs", TESTS / "integration/parity"]))
