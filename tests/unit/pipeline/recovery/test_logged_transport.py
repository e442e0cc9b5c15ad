"""The driver's channels over several sessions."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from strategies.pipeline.control.client import Failures
from strategies.pipeline.recovery.log import Log
from strategies.pipeline.recovery.logged_transport import LoggedTransport

STAGES = ["stage 0", "stage 1 (layers 2 to 3: Linear, Noise)"]


class Ends:
    """Both ends of the channels of one session: notes what is sent, and has what is received."""

    def __init__(self, arriving: list[Any], *, is_broken: bool = False) -> None:
        self.sent: list[Any] = []
        self.arriving, self.is_broken, self.calls = arriving, is_broken, list[str]()
        self.is_ordered = False
        self.num_calls = 0

    def sender(self, peer: int, tag: int) -> Any:
        return self

    receiver = sender

    def send(self, value: Any, number: int, m: int, *, keep: int | None = None) -> bool:
        self._check()
        self.sent.append((value.clone(), number, m, keep))
        return False

    def receive(self, number: int, m: int) -> Any:
        self._check()
        return self.arriving.pop(0)

    def flush(self, keep: int = 0) -> None:
        self._check()

    release = flush

    def fail(self) -> None:
        self.calls.append("fail")

    def abort(self) -> None:
        self.calls.append("abort")

    def release_sent(self) -> None:
        self.calls.append("release_sent")

    def close(self) -> None:
        self.calls.append("close")

    def _check(self) -> None:
        self.num_calls += 1
        if self.is_broken:
            raise RuntimeError("Connection closed by peer")


class Repairing:
    """A log whose first failure is repaired at once, by going through it again on other connections."""

    def __init__(self, first: Ends, second: Ends) -> None:
        self.failures = Failures()
        self.failures.repair = Future()
        self.log = Log(self.failures)
        self.transport = LoggedTransport(self.log, first, STAGES)
        self.second, self.error = second, ""
        self.log.mark(0)
        self.failures.first.add_done_callback(self._repair)

    def _repair(self, _: Any) -> None:
        self.transport.connect(self.second)
        try:
            self.log.run_again(0)
        except RuntimeError as error:
            self.error = str(error)
        successor = Failures()
        self.log.failures = successor
        self.failures.give_way_to(successor)


def test_values_are_sent_again_as_they_were_and_what_is_received_again_is_dropped() -> None:
    one, two, three = (torch.full((2,), float(k)) for k in range(3))
    first, second = Ends([two]), Ends([two.clone(), three])
    repairing = Repairing(first, second)
    sender, receiver = repairing.transport.sender(1, 16), repairing.transport.receiver(1, 16)
    value = one.clone().requires_grad_()
    assert sender.send(value, 5, 0, keep=3)  # a gradient comes back
    value.detach().fill_(9)
    assert receiver.receive(5, 0) is two
    first.is_broken = True
    assert receiver.begin(5, 1).value() is three
    assert [(v.tolist(), *rest) for v, *rest in second.sent] == [([0, 0], 5, 0, 3)]
    assert not repairing.error


@pytest.mark.parametrize("operation", ["send", "flush", "release"])
def test_every_operation_outlasts_the_session(operation: str) -> None:
    first, second = Ends([], is_broken=True), Ends([])
    repairing = Repairing(first, second)
    sender = repairing.transport.sender(1, 16)
    getattr(sender, operation)(*([torch.ones(1), 0, 0] if operation == "send" else []))
    assert len(second.sent) == (operation == "send")


@pytest.mark.parametrize("operation", ["receive", "flush", "release"])
def test_nothing_else_uses_new_connections_while_the_log_is_repeated(operation: str) -> None:
    """The receive of the driver's next value would take a value that is received for the second time."""
    first, second = Ends([]), Ends([torch.ones(1)])
    log = Log(Failures())
    transport = LoggedTransport(log, first, STAGES)
    channel = transport.receiver(1, 16) if operation == "receive" else transport.sender(1, 16)
    with ThreadPoolExecutor(1) as pool:
        with log.lock:
            transport.connect(second)
            done = pool.submit(getattr(channel, operation), *([5, 0] if operation == "receive" else []))
            wait([done], 0.1)
            assert second.num_calls == 0
        done.result(60)
    assert second.num_calls == 1


def test_another_value_than_before_is_an_error() -> None:
    first, second = Ends([torch.zeros(2)]), Ends([torch.ones(2), torch.ones(2)])
    repairing = Repairing(first, second)
    receiver = repairing.transport.receiver(1, 16)
    receiver.receive(5, 2)
    first.is_broken = True
    receiver.receive(5, 3)
    assert repairing.error.startswith(
        f"{STAGES[1]} was run again after a worker was lost, and computed different values for"
    )
    assert "micro-batch 2 of pass 5" in repairing.error


def test_the_rest_goes_to_the_present_connections() -> None:
    first, second = Ends([]), Ends([])
    transport = LoggedTransport(Log(Failures()), first, STAGES)
    transport.fail()
    transport.connect(second)
    transport.abort()
    transport.release_sent()
    transport.close()  # a session closes its own
    assert (first.calls, second.calls) == (["fail"], ["abort", "release_sent"])
