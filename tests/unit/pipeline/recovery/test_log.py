"""The driver's log: what it keeps, what it drops, and how an operation in a broken session ends."""

import threading
from concurrent.futures import Future

import pytest
import torch

from strategies.common.errors import WorkerLost
from strategies.pipeline.control.client import Failures
from strategies.pipeline.recovery.log import Log, copied


class Operation:
    """Notes when it runs."""

    def __init__(self, ran: list[str], name: str, *, is_answered: bool = True, fails: bool = False) -> None:
        self.ran, self.name, self.size_bytes = ran, name, 10
        self.is_answered, self.fails, self.meets_replicas = is_answered, fails, name == "meets"

    def run(self) -> None:
        if self.fails:
            raise RuntimeError("Connection closed by peer")
        self.ran.append(self.name)

    def run_again(self) -> None:
        self.ran.append(f"{self.name} again")


def test_what_happened_since_a_snapshot_runs_again() -> None:
    log, ran = Log(Failures()), list[str]()
    for number, name in enumerate("abc"):
        log.mark(number)
        log.perform(operation := Operation(ran, name), operation.run)
    assert ran == ["a", "b", "c"] and log.size_bytes == 30
    assert log.run_again(1) == 2 and ran[3:] == ["b again", "c again"]
    log.forget_before(2)
    assert log.size_bytes == 10 and [log.can_begin_at(number) for number in range(4)] == [False, False, True, False]
    assert log.run_again(2) == 1 and ran[5:] == ["c again"]


def test_whether_replicas_have_met_since_a_snapshot() -> None:
    log, ran = Log(Failures()), list[str]()
    for number, name in enumerate(["a", "meets", "b", "c"]):
        log.mark(number)
        log.perform(operation := Operation(ran, name), operation.run)
    assert [log.has_met_since(number) for number in range(4)] == [True, True, False, False]
    log.forget_before(1)
    log.mark(4)
    log.perform(operation := Operation(ran, "meets"), operation.run)
    assert [log.has_met_since(number) for number in range(1, 5)] == [True] * 4


def test_a_snapshot_can_be_used_when_what_was_asked_before_it_is_answered() -> None:
    log, question = Log(Failures()), Operation([], "q", is_answered=False)
    log.mark(0)
    log.perform(question, question.run)
    log.mark(1)
    assert log.can_begin_at(0) and not log.can_begin_at(1)
    question.is_answered = True
    assert log.can_begin_at(1)


def test_an_operation_that_fails_ends_with_the_repair_or_with_the_cause() -> None:
    failures, ran = Failures(), list[str]()
    log = Log(failures)
    failures.repair, successor = Future(), Failures()
    log.mark(0)

    def repair() -> None:
        failures.first.result()
        with log.lock:
            log.run_again(0)
            log.failures = successor
            failures.give_way_to(successor)

    thread = threading.Thread(target=repair)
    thread.start()
    operation = Operation(ran, "a", fails=True)
    log.perform(operation, operation.run)  # returns: the new workers have done it
    thread.join()
    assert ran == ["a again"] and not failures.any and failures.current is successor

    successor.add(WorkerLost("stage 1 was killed"), consequence=False)
    with pytest.raises(WorkerLost, match="stage 1 was killed"):  # nothing repairs the failures of this session
        log.perform(operation, operation.run)
    assert failures.raised


def test_a_late_failure_of_a_session_that_is_over_counts_no_more() -> None:
    failures, successor = Failures(), Failures()
    failures.repair = Future()
    failures.give_way_to(successor)
    failures.add(WorkerLost("late"), consequence=False)
    assert not failures.any
    failures.settle()
    successor.add(WorkerLost("of now"), consequence=False)
    with pytest.raises(WorkerLost, match="of now"):
        failures.settle()


def test_a_copy_keeps_its_values_and_flags() -> None:
    value = torch.ones(2, requires_grad=True)
    (kept,), _ = copied((value,))
    value.detach().zero_()
    assert kept.tolist() == [1, 1] and kept.requires_grad and kept.is_leaf
