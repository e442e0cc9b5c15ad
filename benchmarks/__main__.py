"""Runs every benchmark: ``python -m benchmarks``."""

from benchmarks import checkpoint, pipeline_step

pipeline_step.main()
checkpoint.main()
