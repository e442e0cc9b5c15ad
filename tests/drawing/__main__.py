"""Draws classes of public packages and compares pipelines with one process; see :mod:`tests.drawing`."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from harness import OWN_SERVER, run

from tests.drawing.draw import PACKAGES, TRANSFORMERS, draw, named
from tests.drawing.judgement import FAILED, Case, Finding, Verdict, markdown, shortcomings

LIMIT_SECONDS = 240.0
"""For all runs of a case, on a machine that may be busy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases of a seed; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.drawing", description=__doc__)
    today = int(datetime.now(timezone.utc).strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help="by default the date of the day, as 20261231")
    parser.add_argument("--count", type=int, default=20, help="how many classes of each package")
    parser.add_argument("--package", choices=PACKAGES, action="append", help="draw from this package only")
    parser.add_argument("--only", nargs="*", metavar="CLASS", help="run these classes, with the options of the seed")
    parser.add_argument("--report", type=Path, help="the file of the report")
    parser.add_argument("--draw-only", action="store_true", help="print the cases and run none")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    if options.only:
        cases = [named(name, options.seed) for name in options.only]
    else:
        cases = [case for each in options.package or PACKAGES for case in draw(each, options.seed, options.count)]
    if options.draw_only:
        print("\n".join(map(str, cases)))
        return 0
    verdicts = []
    for case in cases:
        verdicts.append(examine(case))
        print(verdicts[-1], flush=True)
        if options.report is not None:
            options.report.write_text(markdown(verdicts))
    wrong = shortcomings(verdicts)
    print("\n".join([f"\n{len(wrong)} wrong", *wrong]))
    return int(bool(wrong))


def examine(case: Case) -> Verdict:
    """Runs a case in a process of its own."""
    began = time.monotonic()
    module = importlib.import_module("tests.drawing." + ("families" if case.package == TRANSFORMERS else "optimizers"))
    try:
        findings = run(module.examine, case.name, case.seed, env=OWN_SERVER, timeout_seconds=LIMIT_SECONDS)
    except AssertionError as error:
        findings = [Finding(FAILED, told=str(error))]
    return Verdict(case, findings, time.monotonic() - began)


if __name__ == "__main__":
    raise SystemExit(main())
