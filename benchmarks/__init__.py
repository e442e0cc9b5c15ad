"""Measurements of Relay beside its peers: ``python -m benchmarks``."""
