"""Errors that tell that another process has failed, hangs or is gone."""

from torch.distributed import DistBackendError


class WorkerLost(RuntimeError):
    """Raised if a worker has died, or hangs and has been ended: an error of the machine rather than of the model."""


class PeerFailed(RuntimeError):
    """Raised if a neighbour reports that it failed. Its own report gives the cause; this error is a consequence."""


class PeerSilent(RuntimeError):
    """Raised if a neighbour has sent nothing in time. It may hang, or wait for another process that hangs."""


def is_consequence(error: BaseException) -> bool:
    """Return whether ``error`` only tells that another process failed or has gone.

    NCCL's errors count too: a communicator has been aborted, or its other end is gone.
    """
    return (
        isinstance(error, PeerFailed | PeerSilent | DistBackendError)  # of NCCL
        or "onnection closed by peer" in str(error)
        or "onnection reset" in str(error)
        or ("Broken pipe" in str(error) and "gloo/transport" in str(error))
        or "failed to connect" in str(error)
    )


class RemoteTraceback(Exception):
    """The cause of an exception that another process raised: where that process raised it, and the traceback there."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}\n\n{text}")
