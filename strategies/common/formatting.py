"""Descriptions of how processes ended, for messages."""


def ending(status: int) -> str:
    """Return how a process ended, given its exit status as :mod:`subprocess` reports it."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
