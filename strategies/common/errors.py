"""Errors that report that another process has failed, hangs or has ended."""

from torch.distributed import DistBackendError


class WorkerLost(RuntimeError):
    """Raised if a worker died, or hung and was ended: an error of the machine rather than of the model."""


class PeerFailed(RuntimeError):
    """Raised if a neighbour announces that it failed. The neighbour reports the cause; this error is a consequence."""


class PeerSilent(RuntimeError):
    """Raised if a neighbour sent nothing in time. The neighbour hangs, or waits for another process that hangs."""


def is_consequence(error: BaseException) -> bool:
    """Return whether ``error`` only reports that another process failed or ended.

    This includes NCCL's errors: a communicator was aborted, or the peer has ended.
    """
    return (
        isinstance(error, PeerFailed | PeerSilent | DistBackendError)  # raised by NCCL
        or "onnection closed by peer" in str(error)
        or "onnection reset" in str(error)
        or "caused pair closure" in str(error)  # gloo, after a wait of another thread has timed out
        or ("Broken pipe" in str(error) and "gloo/transport" in str(error))
        or "failed to connect" in str(error)
    )


class RemoteTraceback(Exception):
    """The ``__cause__`` of an exception that another process raised: where it was raised, and the remote traceback."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}\n\n{text}")
