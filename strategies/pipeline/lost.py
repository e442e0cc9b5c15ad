"""The error that says that a worker's process is gone, and what it held with it."""


class WorkerLost(RuntimeError):
    """A worker has died, or hangs and has been ended: an error of the machine rather than of the model."""
