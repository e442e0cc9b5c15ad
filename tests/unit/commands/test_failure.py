"""What a host reports instead of a result, and what its caller makes of it."""

import os
import pickle
import threading

from strategies.commands.failure import Failure
from strategies.common.errors import PeerFailed, RemoteTraceback


class Picky(Exception):
    """Cannot be unpickled: its constructor takes more than its message."""

    def __init__(self, number: int, *, unit: str) -> None:
        super().__init__(f"{number} {unit}")


def reported(error: BaseException) -> Failure:
    """What a worker would send to the driver."""
    try:
        raise error
    except BaseException as raised:
        failure: Failure = pickle.loads(pickle.dumps(Failure.of(raised, "stage 1 (layers 3 to 4: A, B)", "B2")))
        return failure


def test_an_exception_keeps_its_type_and_gets_its_origin() -> None:
    error = reported(ZeroDivisionError("nought")).exception()
    assert type(error) is ZeroDivisionError and str(error) == "nought"
    assert isinstance(error.__cause__, RemoteTraceback)
    assert str(error.__cause__).startswith(f"stage 1 (layers 3 to 4: A, B), process {os.getpid()} on ")
    assert "in B2\n" in str(error.__cause__) and "ZeroDivisionError: nought" in str(error.__cause__)


def test_an_exception_that_cannot_travel_is_told() -> None:
    class Holding(Exception):
        pass

    for error in (Picky(3, unit="apples"), Holding("holds", threading.Lock()), SystemExit("a layer exits")):
        came = reported(error).exception()
        assert type(came) is RuntimeError
        assert str(came).startswith("stage 1 (layers 3 to 4: A, B), process ")
        assert type(error).__name__ in str(came) and str(error.args[0]) in str(came)
        assert "Traceback" in str(came.__cause__)


def test_a_consequence_is_marked() -> None:
    assert reported(PeerFailed("x")).consequence and not reported(KeyError("x")).consequence
