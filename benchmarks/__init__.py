"""Benchmarks of Relay and comparable libraries: ``python -m benchmarks``."""
