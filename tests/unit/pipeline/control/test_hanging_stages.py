"""Who hangs, and who is only slow: what the driver concludes from what the stages answer."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strategies.commands import host
from strategies.common.activity import Activity, Progress, noted
from strategies.pipeline.control import hanging_stages
from strategies.pipeline.control.client import Failures, RemoteStage
from strategies.pipeline.control.hanging_stages import Watch
from strategies.pipeline.control.lost_workers import StageProcess

TIMEOUT = 0.2
LOOKS = hanging_stages._LOOKS


class Answers:
    """A stage whose answers are made up; the clock is the real one.

    Args:
        answer: The answer to each question.
        ended_after: The number of questions after which the watch ends.
    """

    def __init__(self, answer: Callable[[int], Progress | None], ended_after: int = 1000) -> None:
        self.asked, self.num_aborts, self.ended_after = 0, 0, ended_after
        self.over, self.killed = threading.Event(), threading.Event()
        self.failures = Failures()
        process = StageProcess("process 7 on here", ended=lambda: None, doing=lambda: "in F2, layer 1", kill=self.kill)
        self.remote = RemoteStage("name", None, "stage 1 (layers 1 to 1: Linear)", process, self.failures)
        self._answer = answer
        vars(self.remote)["begin_beside"] = self.ask

    def kill(self) -> None:
        self.killed.set()
        self.over.set()

    def ask(self, function: Callable[..., Any]) -> Any:
        if function is hanging_stages.abort_waits:
            self.num_aborts += 1
            return None
        assert function is host.progress
        answer = self._answer(self.asked)
        self.asked += 1
        if self.asked == self.ended_after:
            self.over.set()
        return SimpleNamespace(done=lambda: answer is not None, wait=lambda: answer)

    def watched(self, timeout_seconds: float = TIMEOUT) -> str:
        """Why it was given up; nothing if it was not."""
        watch = Watch([self.remote], timeout_seconds)
        self.over.wait()
        watch.end()
        if not self.killed.is_set():
            assert not self.failures.any
            return ""
        with pytest.raises(RuntimeError) as raised:
            self.failures.raise_cause()
        with pytest.raises(RuntimeError, match="process 7 on here, was declared lost"):
            self.remote.result_or_loss(Future())
        return str(raised.value)


def progress(
    num_done: int = 1, *, waits: bool = False, idle: bool = False, busy: float = 0.0, stack: str = "sleep()"
) -> Progress:
    return Progress(num_done, "F2, layer 1", waits, idle, busy, stack)


def test_one_that_sleeps_is_given_up_with_its_stack() -> None:
    began, answers = time.monotonic(), Answers(lambda asked: progress())
    why = answers.watched()
    # The first answer has nothing to be compared with. A question is asked before the answer to the last one is judged.
    assert time.monotonic() - began > TIMEOUT and answers.asked == LOOKS + 2
    assert why.startswith(
        "stage 1 (layers 1 to 1: Linear), process 7 on here, hangs: it has made no progress in F2, layer 1 "
    )
    assert "for 0.2 s" in why and "raise rpc_timeout_sec" in why and why.endswith("Its stack:\nsleep()")


def test_one_that_lives_is_not() -> None:
    ways = {
        "gets on": lambda asked: progress(asked),
        "waits for others": lambda asked: progress(waits=True),
        "has nothing to do": lambda asked: progress(idle=True),
        "computes": lambda asked: progress(busy=time.monotonic()),
        "moves": lambda asked: progress(stack=f"line {asked}"),
    }
    answers = [Answers(way, ended_after=3 * LOOKS) for way in ways.values()]
    with ThreadPoolExecutor(len(ways)) as threads:
        given_up = threads.map(Answers.watched, answers)
    assert dict(zip(ways, given_up, strict=True)) == dict.fromkeys(ways, "")


def test_one_that_cannot_be_asked_does_not_end_the_watch() -> None:
    def refuses(number: int) -> Progress:
        raise RuntimeError("RPC has not been initialized")  # the user has ended the session of a Pipe

    gone, hung = Answers(refuses), Answers(lambda number: progress())
    watch = Watch([gone.remote, hung.remote], TIMEOUT)
    assert hung.killed.wait(20)
    watch.end()
    assert not gone.failures.any


def test_one_that_was_given_up_is_not_asked_again_and_others_are_watched() -> None:
    hung, later = Answers(lambda asked: progress()), Answers(lambda asked: progress(min(asked, 3 * LOOKS)))
    watch = Watch([hung.remote, later.remote], TIMEOUT)
    assert later.killed.wait(20)
    watch.end()
    assert hung.killed.is_set() and hung.asked == LOOKS + 2


def test_one_that_runs_one_action_for_too_long() -> None:
    why = Answers(lambda asked: progress(busy=time.monotonic())).watched(TIMEOUT / 4)
    assert "has run one action for too long" in why and "for 0.5 s" in why


def test_one_that_waits_in_vain_after_a_failure_elsewhere() -> None:
    answers = Answers(lambda asked: progress(waits=True))
    answers.failures.add(KeyError("elsewhere"), consequence=False)
    watch = Watch([answers.remote], TIMEOUT / 4)
    assert answers.killed.wait(60) and answers.remote.is_lost
    assert answers.num_aborts == 1
    watch.end()
    with pytest.raises(KeyError, match="elsewhere"):
        answers.failures.raise_cause()


def test_one_that_does_not_answer() -> None:
    why = Answers(lambda asked: None).watched()
    assert "does not answer: it has made no progress in F2, layer 1" in why and "holds Python's lock" in why


def test_what_a_thread_does_is_seen_from_another_one(tmp_path: Path) -> None:
    activity, go_on, asleep = Activity(tmp_path / "note"), threading.Event(), threading.Event()
    assert noted(tmp_path / "none") == "while it started" and noted(None) == ""

    def compute() -> None:
        with activity.running():
            activity.doing = "F0, layer 3"
            asleep.set()
            go_on.wait()
            activity.idle(lambda: (asleep.set(), go_on.wait()))

    thread = threading.Thread(target=compute)
    thread.start()
    asleep.wait()
    while "go_on.wait()" not in (seen := activity.progress()).stack:
        pass  # it has set the event, and is about to wait
    assert (seen.num_done, seen.doing, seen.waits, seen.idle) == (1, "F0, layer 3", False, False)
    assert "in compute" in seen.stack
    assert noted(tmp_path / "note") == "in F0, layer 3"
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert activity.progress().busy_seconds - seen.busy_seconds >= 0.19
    asleep.clear()
    go_on.set()
    asleep.wait()
    thread.join()
    assert noted(tmp_path / "note") == "idle after F0, layer 3"
