"""Runs every benchmark: ``python -m benchmarks``."""

from benchmarks import checkpoint, pipeline_step, zero

pipeline_step.main()
checkpoint.main()
zero.main()
