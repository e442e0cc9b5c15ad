"""Runs each test file under coverage, with the name of the file as context: ``make coverage``.

Processes that tests start are measured as well (``[tool.coverage.run]`` in pyproject.toml), forks and workers included;
those that are killed by SIGKILL are not. One pytest process per file, so that its children share its context.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/coverage"
DATA = FOLDER / "data"
SECONDS = FOLDER / "seconds.json"
"""Processor seconds of each test file that has been measured, with its children's."""


def test_files() -> list[str]:
    """Paths of all test files, relative to the checkout; the fastest tier first."""
    tiers = ("unit", "integration", "faults")
    return [
        str(path.relative_to(ROOT)) for tier in tiers for path in sorted((ROOT / "tests" / tier).rglob("test_*.py"))
    ]


def measure(file: str, marks: str) -> float:
    """Runs one test file; returns the processor seconds that it took."""
    target = FOLDER / "parts" / file.replace("/", "-")
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "coverage", "run", f"--context={file}", f"--data-file={target}/data"]
    command += [f"--rcfile={ROOT / 'pyproject.toml'}", "-m", "pytest", "-q", "-m", marks, file]
    with open(target / "output", "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 5):  # 5: no test has these marks
        print(f"{file} failed under coverage; see {target / 'output'}", flush=True)
    return usage.ru_utime + usage.ru_stime


def coverage(command: str, *arguments: str) -> None:
    """Runs a command of coverage on the combined data."""
    rcfile, data_file = f"--rcfile={ROOT / 'pyproject.toml'}", f"--data-file={DATA}"
    subprocess.run([sys.executable, "-m", "coverage", command, rcfile, data_file, *arguments], cwd=ROOT, check=True)


def lines_with_contexts() -> dict[str, dict[int, list[str]]]:
    """For each measured source file, relative to the checkout: the test files that reach each covered line.

    Lines that are reached only when a module is imported, such as definitions, count as reached.
    """
    from coverage import CoverageData

    data = CoverageData(basename=str(DATA))
    data.read()
    found: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for file in data.measured_files():
        path = Path(file)
        if path.is_relative_to(ROOT):
            for line, contexts in data.contexts_by_lineno(file).items():
                found[str(path.relative_to(ROOT))][line] = sorted(context for context in contexts if context)
    return dict(found)


def main() -> None:
    """Measures the files whose results are not there yet, combines all, and prints the coverage of each module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.measure", description=__doc__)
    parser.add_argument("--marks", default="", help="pytest's -m; by default all tests")
    parser.add_argument("--jobs", type=int, default=1, help="how many test files to run at once")
    parser.add_argument("--again", action="store_true", help="forget earlier measurements")
    parser.add_argument("files", nargs="*", help="test files; by default all")
    options = parser.parse_args()
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() and not options.again else {}
    files = options.files or [file for file in test_files() if file not in seconds]
    started = time.monotonic()

    def one(file: str) -> None:
        for old in (FOLDER / "parts" / file.replace("/", "-")).glob("data*"):
            old.unlink()
        seconds[file] = round(measure(file, options.marks), 1)
        print(f"{time.monotonic() - started:6.0f} s  {file}: {seconds[file]} s of processor time", flush=True)
        SECONDS.write_text(json.dumps(dict(sorted(seconds.items())), indent=1))

    FOLDER.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, files))
    DATA.unlink(missing_ok=True)
    coverage("combine", "--keep", "--quiet", *(str(folder) for folder in sorted((FOLDER / "parts").iterdir())))
    coverage("report", "--skip-covered", "--show-missing")


if __name__ == "__main__":
    main()
