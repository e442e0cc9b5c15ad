"""The inbox of a process: messages are taken by their key, and a pass that is given up ends waits for it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from strategies.common.errors import PeerFailed
from strategies.pipeline.transport.rpc import Inbox, MessageKey


def test_messages_are_taken_by_key_whatever_the_order_of_arrival() -> None:
    inbox, first, second = Inbox(), MessageKey(16, 0, 0), MessageKey(16, 0, 1)
    inbox.put(second, "second")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(inbox.take, first)
        inbox.put(first, "first")
        assert waiting.result(timeout=10) == "first"
    assert inbox.take(second) == "second"


def test_a_pass_that_is_given_up_ends_its_waits_and_no_others() -> None:
    inbox, of_lost, of_next = Inbox(), MessageKey(16, 3, 1), MessageKey(16, 4, 0)
    inbox.put(of_lost._replace(microbatch=0), "dropped")
    with ThreadPoolExecutor() as pool:
        lost, following = pool.submit(inbox.take, of_lost), pool.submit(inbox.take, of_next)
        inbox.give_up(3)
        with pytest.raises(PeerFailed, match="pass 3 of the Pipe has failed elsewhere"):
            lost.result(timeout=10)
        inbox.put(of_lost, "late")
        inbox.put(of_next, "next")
        assert following.result(timeout=10) == "next"
    for microbatch in (0, 1):
        with pytest.raises(PeerFailed):
            inbox.take(of_lost._replace(microbatch=microbatch))
