"""Runs every benchmark, or those that are named: ``python -m benchmarks [--rounds N] [pipeline_step ...]``."""

import argparse

from benchmarks import checkpoint, pipeline_step, zero

_BENCHMARKS = {"pipeline_step": pipeline_step.main, "checkpoint": checkpoint.main, "zero": zero.main}

if __name__ == "__main__":  # a benchmark's processes import this file once more
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(_BENCHMARKS)}; by default all")
    parser.add_argument(
        "--rounds", type=int, help="of each contestant; by default as many as the figures in docs/ need"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(_BENCHMARKS):
        parser.error(f"no benchmark {sorted(unknown)}; there are {', '.join(_BENCHMARKS)}")
    for name in arguments.names or _BENCHMARKS:
        _BENCHMARKS[name](*([] if arguments.rounds is None else [arguments.rounds]))
