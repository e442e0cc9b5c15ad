"""Runs the cases of some seeds; see :mod:`tests.faults.simulator`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.faults.simulator.campaign import Campaign, Verdict, outstanding, version
from tests.faults.simulator.cases import draw
from tests.faults.simulator.report import markdown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases that have no right verdict yet; returns 1 if something is wrong with one of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument(
        "--resume",
        type=Path,
        help="a file that keeps the verdicts; right ones on the same case are kept",
    )
    parser.add_argument("--report", type=Path, help="the file of the report")
    parser.add_argument("--draw-only", action="store_true", help="print the cases and run none")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.count)
    if options.draw_only:
        print("\n".join(f"{seed}: {draw(seed)}" for seed in seeds))
        return 0
    verdicts = _read(options.resume)
    campaign = Campaign(version())
    for case in outstanding(seeds, verdicts):
        seed = case.seed
        verdict = verdicts[seed] = campaign.examine(case)
        told = "; ".join(verdict.wrong) if verdict.wrong else "right" if verdict.struck else "right (nothing struck)"
        print(f"{seed}: {verdict.case}\n    {verdict.ending} ({verdict.seconds} s) -- {told}", flush=True)
        if options.resume is not None:
            with open(options.resume, "a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    found = [verdicts[seed] for seed in seeds]
    if options.report is not None:
        options.report.write_text(markdown(found))
    return int(any(verdict.wrong for verdict in found))


def _read(file: Path | None) -> dict[int, Verdict]:
    if file is None or not file.exists():
        return {}
    return {verdict.seed: verdict for verdict in (Verdict(**json.loads(line)) for line in file.open())}


if __name__ == "__main__":
    raise SystemExit(main())
