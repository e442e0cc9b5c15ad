"""Runs every benchmark: ``python -m benchmarks``."""

from benchmarks import pipeline_step

pipeline_step.main()
