"""Runs every benchmark: ``python -m benchmarks``."""

from benchmarks import pipeline_step, zero

pipeline_step.main()
zero.main()
