"""The error that says that a worker's process is gone, and what it held with it."""


class WorkerLost(RuntimeError):
    """A worker has died, or hangs and has been ended: an error of the machine rather than of the model."""


class PeerFailed(RuntimeError):
    """The neighbour failed and says so; its own report tells why, so this error is only a consequence."""


class PeerSilent(RuntimeError):
    """The neighbour sent nothing in time. It may hang, or wait for another one that does."""


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` only tells that another process failed or has gone."""
    return (
        isinstance(error, PeerFailed | PeerSilent)
        or "onnection closed by peer" in str(error)
        or "onnection reset" in str(error)
        or "failed to connect" in str(error)
    )
