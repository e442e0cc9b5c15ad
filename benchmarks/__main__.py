"""Runs all benchmarks or the named ones: ``python -m benchmarks [--rounds N] [pipeline_step ...]``.

Each benchmark runs in its own process with a time limit. If a benchmark fails or hangs, the report says so, and the
remaining benchmarks still run. The report is written after each benchmark, so an interrupted run keeps the results so
far.
"""

import argparse
import traceback
from pathlib import Path
from time import perf_counter

from benchmarks.report import Effort, Section, plain, read, stamp, write
from benchmarks.sections import outcome_of

SECTIONS = (
    "pipeline_step",
    "schedules",
    "plan",
    "microbatch_cost",
    "start",
    "driver_overhead",
    "stage_memory",
    "balance",
    "trainer_overhead",
    "monitor",
    "rebalance",
    "snapshots",
    "evaluation",
    "lengths",
    "growth",
    "zero",
    "checkpoint",
    "memory",
    "divided_memory",
)
ON_REQUEST = ("driver_part", "useful_time", "ends")
"""Sections that run only if they are named, because they take many minutes."""

KNOWN = (*SECTIONS, *ON_REQUEST)

LIMIT_SECONDS = 2400.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument(
        "names", nargs="*", help=f"some of {', '.join(KNOWN)}; by default all but {', '.join(ON_REQUEST)}"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each contestant; by default as many as the section needs")
    parser.add_argument("--tiny", action="store_true", help="only show that everything runs; figures have no meaning")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="folder for results.md and plots")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="time limit of a section, in seconds")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(KNOWN):
        parser.error(f"no benchmark {sorted(unknown)}; there are {', '.join(KNOWN)}")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    into = arguments.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    effort = Effort(into / "plots", arguments.rounds, arguments.tiny)
    outcomes, failed = read(into), []
    for name in arguments.names or SECTIONS:
        mark, began = stamp(tiny=effort.tiny), perf_counter()
        print(f"-- {name} --", flush=True)
        try:
            section = outcome_of(name, effort, arguments.limit)
        except OSError:  # no process could start, or the disk is full
            section = Section(name, "This section did not start.", absent={name: traceback.format_exc(0)})
        took = f"took {perf_counter() - began:.0f} s"
        failed += [name] if name in section.absent else []
        outcomes[name] = {"section": plain(section), "stamp": mark, "took": took}
        write(into, {key: outcomes[key] for key in KNOWN if key in outcomes})
        print(section.markdown(), f"{took}\n", sep="\n\n", flush=True)
    print(f"written to {into / 'results.md'}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
