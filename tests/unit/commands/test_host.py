"""A host runs commands one at a time, in order, on one thread; failures and results go to the callers."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import pytest

from strategies.commands.declaration import Call, command
from strategies.commands.failure import Failure
from strategies.commands.host import AfterFailure, Host, Order
from strategies.common.activity import Activity


class Commands(Protocol):
    @command(doing="appending")
    def append(self, value: int) -> list[int]: ...

    @command(collective=True)
    def sum(self) -> int: ...

    @command()
    def fail(self, error: BaseException) -> None: ...

    @command()
    def thread(self) -> str: ...

    @command()
    def take(self, value: object) -> None: ...


class Numbers(Commands):
    def __init__(self) -> None:
        self.values: list[int] = []
        self.num_announced = 0

    def describe(self) -> str:
        return f"numbers {self.values}"

    def announce_failure(self) -> None:
        self.num_announced += 1

    def append(self, value: int) -> list[int]:
        self.values.append(value)
        return list(self.values)

    def sum(self) -> int:
        return sum(self.values)

    def fail(self, error: BaseException) -> None:
        raise error

    def thread(self) -> str:
        return threading.current_thread().name

    def take(self, value: object) -> None:
        pass


def call_of(command: Callable[..., Any], *args: Any) -> Call:
    return command.__name__, args, {}


def host(create: Any = Numbers, num_callers: int = 1) -> Host[Numbers]:
    return Host(create, Commands, name="no numbers yet", activity=Activity(), num_callers=num_callers).start()


def test_calls_run_in_the_order_of_their_numbers() -> None:
    own = host()
    futures = {k: own.submit([call_of(Commands.append, k)], k) for k in (2, 1, 3, 0)}
    assert {k: future.wait() for k, future in futures.items()} == {k: list(range(k + 1)) for k in range(4)}
    assert own.submit([call_of(Commands.append, 4), call_of(Commands.thread)], 4).wait() == "compute"
    assert own.hosted.values == [0, 1, 2, 3, 4]
    own.close()


def test_without_numbers_calls_run_as_they_arrive() -> None:
    own = host()
    assert [own.submit([call_of(Commands.append, k)]).wait() for k in (5, 3)] == [[5], [5, 3]]
    progress = own.progress()
    assert progress.doing == "appending" and progress.num_done == 2
    own.close()


def test_a_failure_is_the_result_and_the_host_goes_on() -> None:
    own = host()
    for error in (ZeroDivisionError("nought"), SystemExit("a layer exits")):
        failure = own.submit([call_of(Commands.append, 1), call_of(Commands.fail, error)]).wait()
        assert (
            isinstance(failure, Failure) and failure.where.startswith("numbers [1") and "in appending" in failure.where
        )
    assert own.submit([call_of(Commands.append, 2)]).wait() == [1, 1, 2] and own.hosted.num_announced == 2
    own.close()


def test_a_host_that_follows_a_link_runs_orders_and_submissions_in_the_order_of_the_link() -> None:
    orders: SimpleQueue[Order] = SimpleQueue()
    own = Host(Numbers, Commands, name="", activity=Activity(), next_order=lambda _: orders.get()).start()
    own.submit([call_of(Commands.append, 0)], 0).wait()
    ended, second, first = own.follow(), own.submit([call_of(Commands.append, 4)], 2), None
    orders.put([call_of(Commands.append, 1), call_of(Commands.append, 2)])
    orders.put(2)  # submission 1 is on its way
    orders.put([call_of(Commands.append, 5)])
    first = own.submit([call_of(Commands.append, 3)], 1)
    assert (first.wait(), second.wait()) == ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    orders.put(None)
    assert ended.wait() is None
    assert own.submit([call_of(Commands.append, 6)], 3).wait() == list(range(7))
    own.close()


def test_after_an_order_has_failed_no_more_orders_run_and_results_tell_the_failure() -> None:
    orders: SimpleQueue[Order] = SimpleQueue()
    own = Host(Numbers, Commands, name="", activity=Activity(), next_order=lambda _: orders.get()).start()
    own.submit([call_of(Commands.append, 0)], 0).wait()
    for number in (1, 2):
        orders.put([call_of(Commands.append, number), call_of(Commands.fail, KeyError("there"))])
    failed = own.follow().wait()
    assert isinstance(failed, Failure) and isinstance(failed.exception(), KeyError)
    behind = own.submit([call_of(Commands.append, 3)], 1).wait()
    assert isinstance(behind, AfterFailure) and behind.failure is failed and behind.reply == [0, 1, 3]
    assert own.hosted.num_announced == 1  # it was announced before the next call ran
    own.close()


def test_the_first_call_reports_that_creating_failed_and_the_next_one_tries_again() -> None:
    attempts: list[int] = []

    def create() -> Numbers:
        attempts.append(1)
        if len(attempts) == 1:
            raise KeyError("no such table")
        return Numbers()

    own = host(create)
    failure = own.submit([call_of(Commands.append, 1)]).wait()
    assert isinstance(failure.exception(), KeyError) and failure.where.startswith("no numbers yet, process ")
    assert own.submit([call_of(Commands.append, 1)]).wait() == [1]
    own.close()


def test_a_collective_command_runs_once_when_all_callers_have_called_it() -> None:
    own = host(num_callers=3)
    futures = [own.submit([call_of(Commands.append, k), call_of(Commands.sum)]) for k in (1, 2)]
    assert own.submit([call_of(Commands.append, 10)]).wait() == [10]  # others do not wait for them
    assert not any(future.done() for future in futures)
    futures.append(own.submit([call_of(Commands.append, 4), call_of(Commands.sum)]))
    assert [future.wait() for future in futures] == [17] * 3 and own.hosted.values == [10, 1, 2, 4]
    own.close()


def test_an_unknown_command_is_a_failure() -> None:
    own = host()
    failure = own.submit([("__class__", (), {})]).wait()
    assert isinstance(failure.exception(), KeyError)
    own.close()


def test_arguments_are_not_kept_while_the_host_waits() -> None:
    own, value = host(), Numbers()
    kept = weakref.ref(value)
    own.submit([call_of(Commands.take, value)], 0).wait()
    del value
    assert holds_within_seconds(lambda: kept() is None)
    own.close()


@pytest.mark.parametrize("how", ["close", "collect"])
def test_the_thread_ends(how: str) -> None:
    before = set(threading.enumerate())
    own = host()
    own.submit([call_of(Commands.append, 1)]).wait()
    [thread] = set(threading.enumerate()) - before
    if how == "close":
        own.close()
    else:
        del own
        gc.collect()
    assert holds_within_seconds(lambda: not thread.is_alive())


def holds_within_seconds(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class AnnouncesSlowly(Numbers):
    """As a stage whose communicators cannot be aborted at once."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on, self.has_gone_on = threading.Event(), None

    def announce_failure(self) -> None:
        super().announce_failure()
        self.has_gone_on = self.may_go_on.wait(60)


def test_the_caller_hears_of_a_failure_before_others_do() -> None:
    numbers = AnnouncesSlowly()
    held = host(lambda: numbers)
    failed = held.submit([call_of(Commands.fail, KeyError("cause"))]).wait()
    assert isinstance(failed, Failure) and numbers.has_gone_on is None
    numbers.may_go_on.set()
    assert held.submit([call_of(Commands.append, 1)]).wait() == [1]
    assert numbers.num_announced == 1
    held.close()
