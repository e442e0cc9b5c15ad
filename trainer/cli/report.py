"""The command ``python -m trainer report RUN_FOLDER``, which needs neither a Trainer nor Lightning."""

import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import NoReturn

from trainer.report.page import page
from trainer.report.run_folder import UnusableFolder, read_run


class _ReportParser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _end(f"{message}; usage: python -m trainer report RUN_FOLDER [--output FILE]")


def run(args: list[str]) -> None:
    """Write the report, and print where it is.

    Raises:
        SystemExit: With status 2, after one line on stderr, if arguments or folder are wrong.
    """
    parser = _ReportParser(
        prog="python -m trainer report",
        description="Write one HTML file that shows a run: balance, losses, step times, timetables, memory, events.",
        allow_abbrev=False,
    )
    parser.add_argument("run_folder", type=Path, help="the folder of the run, such as runs/gpt/version_0")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the file; default: RUN_FOLDER/report.html")
    given = parser.parse_args(args)
    output: Path = given.output or given.run_folder / "report.html"
    try:
        text = page(read_run(given.run_folder))
        partial = output.with_name(f".{output.name}.{os.getpid()}")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
    except (UnusableFolder, OSError) as mistake:
        _end(str(mistake))
    print(output)


def _end(message: str) -> NoReturn:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    raise SystemExit(2)
