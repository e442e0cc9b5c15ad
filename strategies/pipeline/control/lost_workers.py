"""The loss of a stage's process: a pending call of RPC fails, and the driver finds out how the process ended.

process dies ──▶ its connections close ──▶ pending calls fail within milliseconds ──▶ how it ended ──▶ WorkerLost

A call is always pending, because every stage answers :func:`~strategies.commands.host.follow` only when it ends.
:class:`~strategies.pipeline.control.client.RemoteStage` makes the calls and notices that they fail. A process that
lives but hangs is found by :mod:`strategies.pipeline.control.hanging_stages`; a host or a rank that is lost, by
:mod:`strategies.launch.rank_monitor`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from strategies.common.errors import WorkerLost

_NUM_QUESTIONS = 3
"""The number of times to ask how a process has ended. Each takes up to half a second. Together they take less time than
:meth:`~strategies.pipeline.control.client.Failures.first_cause` waits."""

_RPC_TRANSPORT = "originated at tensorpipe/"
"""A part of the message of each connection error of RPC."""


@dataclass(frozen=True)
class StageProcess:
    """The process of a stage, which the driver reaches without RPC.

    Attributes:
        description: The process in words.
        ended: Returns how the process ended, or ``None`` while it runs.
        doing: Returns a description of what the process does or did last.
        kill: Ends the process.
    """

    description: str
    ended: Callable[[], str | None]
    doing: Callable[[], str]
    kill: Callable[[], None]


def cause_of(error: Exception, stage: str, process: StageProcess) -> Exception:
    """Return why a call of RPC failed: the process has ended or cannot be reached, or else ``error`` itself.

    Args:
        error: The exception of the call.
        stage: A description of the stage.
        process: The process of the stage.
    """
    ended = _how_it_ended(process)
    if ended is None and _RPC_TRANSPORT not in str(error):
        return error
    return _lost(error, stage, process, ended)


def loss_of(error: Exception, stage: str, process: StageProcess) -> tuple[WorkerLost, bool]:
    """Return the loss of a process whose pending call failed, and whether the process has ended.

    A process that lives but cannot be reached any more is killed: its peers would wait for it until their time-out.
    """
    ended = _how_it_ended(process)
    if ended is None and _RPC_TRANSPORT in str(error):
        process.kill()
    return _lost(error, stage, process, ended), ended is not None


def _lost(error: Exception, stage: str, process: StageProcess, ended: str | None) -> WorkerLost:
    return WorkerLost(f"{stage}, {process.description}, {ended or f'did not answer: {error}'}")


def _how_it_ended(process: StageProcess) -> str | None:
    """Return how a process has ended; a busy machine reports this some time after the connections have closed."""
    return next(filter(None, (process.ended() for _ in range(_NUM_QUESTIONS))), None)
