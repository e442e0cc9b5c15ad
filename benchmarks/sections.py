"""Runs a section of the report in its own process, so that the other sections run even if it fails or hangs."""

import importlib
import json
import multiprocessing
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from benchmarks.report import Effort, Section, plain


def work(name: str, effort: Effort, path: Path) -> None:
    """Run a section in a new session, to which all its processes belong, and write its outcome."""
    os.setsid()
    section = importlib.import_module(f"benchmarks.{name}").main(effort)
    path.write_text(json.dumps(plain(section)))


def outcome_of(name: str, effort: Effort, limit_seconds: float) -> Section:
    """Run a section in its own process, and end all processes of the section."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "section.json"
        process = multiprocessing.get_context("spawn").Process(target=work, args=(name, effort, path))
        process.start()
        try:
            process.join(limit_seconds)
            if process.is_alive():
                why = f"was still running after {limit_seconds:.0f} s"
            else:
                why = f"ended with status {process.exitcode}; its output is above"
            if path.exists():
                return Section.of(json.loads(path.read_text()))
        finally:
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return Section(name, "This section failed; the others do not depend on it.", absent={name: why})
