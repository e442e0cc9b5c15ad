"""The pipeline engine: plain PyTorch, no Lightning import."""

from strategies.pipeline.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
