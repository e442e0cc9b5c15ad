"""What the driver concludes from a failed call to the process of a stage."""

import pytest

from strategies.common.errors import WorkerLost
from strategies.pipeline.control.lost_workers import StageProcess, cause_of, loss_of

STAGE = "stage 0 (layers 0 to 1: Linear, ReLU)"
CLOSED = "EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)"


class Process:
    """A process that has ended somehow, or lives, and notes that it was killed."""

    def __init__(self, *ended: str | None) -> None:
        self._ended, self.killed = [*ended], False
        self.of_stage = StageProcess("process 7 on here", ended=self.ended, doing=lambda: "in F2", kill=self.kill)

    def ended(self) -> str | None:
        return self._ended.pop(0) if len(self._ended) > 1 else self._ended[0]

    def kill(self) -> None:
        self.killed = True


def test_an_exception_of_the_called_function_is_its_own_cause() -> None:
    error = RuntimeError("EOF: end of file")
    assert cause_of(error, STAGE, Process(None).of_stage) is error


def test_a_process_that_has_ended() -> None:
    """A busy machine knows the end some time after the connections have closed."""
    for ended in (["was killed by signal 9"], [None, None, "was killed by signal 9"]):
        cause = cause_of(RuntimeError("EOF: end of file"), STAGE, Process(*ended).of_stage)
        assert isinstance(cause, WorkerLost) and str(cause) == f"{STAGE}, process 7 on here, was killed by signal 9"


def test_a_process_that_cannot_be_reached() -> None:
    cause = cause_of(RuntimeError(CLOSED), STAGE, Process(None).of_stage)
    assert isinstance(cause, WorkerLost) and str(cause).startswith(f"{STAGE}, process 7 on here, did not answer: EOF")


@pytest.mark.parametrize(
    ("ended", "error", "is_killed"),
    [
        (None, CLOSED, True),  # nothing reaches it any more, but its peers would wait for it
        (None, "the function failed", False),
        ("was killed by signal 9", CLOSED, False),
    ],
)
def test_the_loss_behind_a_pending_call(ended: str | None, error: str, is_killed: bool) -> None:
    process = Process(ended)
    lost, has_ended = loss_of(RuntimeError(error), STAGE, process.of_stage)
    assert str(lost).endswith(ended or f"did not answer: {error}") and str(lost).startswith(STAGE)
    assert (has_ended, process.killed) == (ended is not None, is_killed)
