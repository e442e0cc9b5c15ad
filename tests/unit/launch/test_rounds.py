"""Gates and rounds: members on threads, over a store in memory."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch import distributed as dist

from strategies.launch.rounds import MemberGone, Rounds


@pytest.fixture
def pair() -> tuple[Rounds, Rounds]:
    store = dist.HashStore()
    return Rounds(store, 0, 2, 10.0), Rounds(store, 1, 2, 10.0)


@pytest.fixture
def start() -> Iterator[Callable[..., "Future[Any]"]]:
    with ThreadPoolExecutor(2) as executor:
        yield executor.submit


def never() -> bool:
    return False


def test_all_have_what_each_has_reported(pair: tuple[Rounds, Rounds]) -> None:
    found = []
    for rank, number in ((0, 2), (1, 1), (1, 3)):
        pair[rank].report(number)
        found.append([pair[0].all_have(asked) for asked in range(4)])
    assert found == [[False] * 4, [True, True, False, False], [True, True, True, False]]


def test_all_pass_a_gate(pair: tuple[Rounds, Rounds], start: Callable[..., "Future[Any]"]) -> None:
    for _ in range(3):
        first = start(pair[0].pass_gate, never)
        time.sleep(0.02)
        assert not first.done()
        assert pair[1].pass_gate(never) and first.result(5)


def test_who_has_to_go_back_closes_the_gate(pair: tuple[Rounds, Rounds], start: Callable[..., "Future[Any]"]) -> None:
    lost = threading.Event()
    first = start(pair[0].pass_gate, lost.is_set)
    while not pair[0]._store.check(["0/gate/0"]):
        time.sleep(0.001)
    lost.set()
    assert first.result(5) is False
    assert pair[1].pass_gate(never) is False
    assert pair[0].announce("why") == pair[1].announced() == "why"
    assert pair[1].announce("something else") == "why"
    told = start(pair[0].tell, [3, 4])
    assert pair[1].tell([2, 3]) == told.result(5) == [[3, 4], [2, 3]]
    assert pair[0].number == pair[1].number == 1 and pair[0].announced() is None
    first = start(pair[0].pass_gate, never)
    assert pair[1].pass_gate(never) and first.result(5)


def test_a_gate_is_not_closed_behind_those_who_have_passed(pair: tuple[Rounds, Rounds]) -> None:
    """The second member comes, and passes, in the moment in which the first one finds that it has to go back."""
    passed: list[bool] = []

    def lost() -> bool:
        if looks.pop():
            passed.append(pair[1].pass_gate(never))
            return True
        return False

    looks = [True, False]
    assert pair[0].pass_gate(lost) and passed == [True]


def test_who_knows_that_it_has_to_go_back_does_not_come(
    pair: tuple[Rounds, Rounds], start: Callable[..., "Future[Any]"]
) -> None:
    lost = threading.Event()
    first = start(pair[0].pass_gate, lost.is_set)
    assert pair[1].pass_gate(lambda: True) is False
    time.sleep(0.02)
    assert not first.done()
    lost.set()
    assert first.result(5) is False


def test_a_member_that_has_left(pair: tuple[Rounds, Rounds]) -> None:
    pair[1].leave()
    assert pair[0].pass_gate(never)
    with pytest.raises(MemberGone, match="replica 1 has ended its run"):
        pair[0].tell([1])


def test_a_member_that_does_not_come() -> None:
    alone = Rounds(dist.HashStore(), 0, 2, 0.05)
    with pytest.raises(MemberGone, match=r"did not reach the same point within 0\.05 s"):
        alone.pass_gate(never)
    with pytest.raises(MemberGone, match=r"did not return to a snapshot within 0\.05 s"):
        alone.tell([1])
    with pytest.raises(MemberGone, match="replica 0 has ended its run"):
        alone.tell([1], lambda: True)
