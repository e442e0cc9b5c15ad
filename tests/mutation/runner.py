"""Tests a mutant in a copy of the checkout: the test files that reach its line first, then the rest."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        found: Whether a test failed.
        by: The test that failed, or the test file that took too long; empty for a survivor.
        seconds: How long the tests ran.
        flaky: Tests that failed once and passed when they ran alone with the same mutant.
    """

    found: bool
    by: str
    seconds: float
    flaky: tuple[str, ...] = ()


def order(reaching: Sequence[str], files: Sequence[str], seconds: Mapping[str, float]) -> list[list[str]]:
    """Groups of test files, each run by one pytest: the fast ones that reach the line, the slow ones, then the rest.

    Args:
        reaching: The test files that reach the mutant's line.
        files: All test files.
        seconds: What each test file takes; one that is unknown counts as slow.
    """
    own = sorted((file for file in files if file in set(reaching)), key=lambda file: seconds.get(file, 60.0))
    fast = [file for file in own if seconds.get(file, 60.0) < 15]
    rest = [file for file in files if file not in set(own)]
    return [group for group in (fast, *([file] for file in own if file not in fast), rest) if group]


class Checkout:
    """A copy of the tracked files, in which one mutant is tested at a time.

    Args:
        root: The checkout to copy.
        folder: Where the copy goes.
        marks: pytest's ``-m``: the tests that are to find the mutants.
    """

    def __init__(self, root: Path, folder: Path, marks: str) -> None:
        self._root, self._folder, self._marks = root, folder, marks

    def make(self) -> None:
        """Copies the tracked files, as they are in the working tree."""
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=self._root, check=True, capture_output=True, text=True)
        for name in listed.stdout.split("\0"):
            if name and (self._root / name).is_file():
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._root / name, self._folder / name)

    def test(self, mutant: Mutant | None, groups: Sequence[Sequence[str]], limit_seconds: float) -> Verdict:
        """Runs the groups one after another until a test fails; ``None`` runs them without a defect.

        Args:
            mutant: The defect.
            groups: Test files; see :func:`order`.
            limit_seconds: After so long in one group, the mutant counts as found: something waits for ever.
        """
        started, flaky = time.monotonic(), []
        if mutant is not None:
            self._write(mutant.path, _with(mutant, (self._root / mutant.path).read_text()))
        try:
            for group in groups:
                deselected: list[str] = []
                while (failed := self._pytest([*group, *deselected], limit_seconds)) is not None:
                    if "::" not in failed or self._pytest([failed], limit_seconds) is not None:
                        return Verdict(True, failed, round(time.monotonic() - started, 1), tuple(flaky))
                    flaky.append(failed)
                    deselected.append(f"--deselect={failed}")
        finally:
            if mutant is not None:
                self._write(mutant.path, (self._root / mutant.path).read_text())
        return Verdict(False, "", round(time.monotonic() - started, 1), tuple(flaky))

    def _pytest(self, arguments: Sequence[str], limit_seconds: float) -> str | None:
        """The first test that fails, or a test file that cannot be collected; ``None`` if all pass."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", self._marks, *arguments]
        output = self._folder.with_suffix(".output")
        with open(output, "w") as file:
            process = subprocess.Popen(
                command, cwd=self._folder, env=self._environment(), stdout=file, stderr=file, start_new_session=True
            )
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return f"{arguments[0]} ran for more than {limit_seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code in (0, 5):  # 5: no test has these marks
            return None
        said = output.read_text()
        named = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.MULTILINE)
        return named.group(1) if named else f"pytest ended with {code}: {said[-500:]}"

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self._folder)}

    def _write(self, path: str, text: str) -> None:
        """Writes a source file, and removes its compiled form, which could have the same time and size."""
        file = self._folder / path
        file.write_text(text)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()


def _with(mutant: Mutant, source: str) -> str:
    lines = source.splitlines(keepends=True)
    assert lines[mutant.line - 1].rstrip("\n") == mutant.before, f"{mutant.path} has changed since the draw"
    lines[mutant.line - 1] = mutant.after + "\n" if mutant.after else ""
    return "".join(lines)
