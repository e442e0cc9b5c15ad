"""A rank other than 0 is killed, at any moment: all end soon, rank 0 raises one error that says who, and trains again.

The harness fails where a process, thread, port or file is left.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import late_rank_0_job
import lost_connection_job
import pytest
import ranks_faults_job
import slow_gloo_job
import torch
from harness import run
from paths import environment
from ranks_faults_job import MOMENTS
from scripts import Script

from strategies.launch.rank_monitor import RankLost, RankMonitor

SECONDS = 10
ON_THREE_RANKS = ("start", "forward")
ON_TWO_RANKS = [moment for moment in MOMENTS if moment not in ON_THREE_RANKS]
SOME = ("meeting", "backward", "after")
"""Moments of ``make slow``: before the ranks have connected, in a collective operation, and between two calls."""


def start_job(*arguments: str, **kwargs: Any) -> Script:
    """Each moment, and some twice, starts the other ranks anew."""
    _, _, ranks, *moments = arguments
    return Script(ranks_faults_job.__file__, *arguments, num_copies=(int(ranks) - 1) * (len(moments) + 1), **kwargs)


def test_the_end_of_a_monitored_rank() -> None:
    """Processes that know nothing of it: one is killed, the other is ended."""
    before, hurried = signal.getsignal(signal.SIGURG), [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [subprocess.Popen(hurried) for _ in range(2)]
    monitor = RankMonitor(processes, [], {"RELAY_TEST": None})
    os.environ["RELAY_TEST"] = "set by a launch"
    killed, process = time.monotonic(), processes[1].pid
    processes[1].kill()
    message = f"rank 2, process {process} on {socket.gethostname()}, was killed by signal 9"
    with pytest.raises(RankLost, match=f"^{message}$"), monitor.call():
        time.sleep(600)
    assert time.monotonic() - killed < SECONDS
    assert monitor.has_ended and monitor.why(ValueError("its own")) is None
    assert monitor.why(RuntimeError("gloo: Connection closed by peer")) == message
    monitor.dismiss()
    assert processes[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGURG) is before and "RELAY_TEST" not in os.environ
    assert "relay-rank-monitor" not in {thread.name for thread in threading.enumerate()}


def endings(strategy: str, ranks: int, moments: Sequence[str], timeout_seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.pt"
        job = start_job(str(results), strategy, str(ranks), *moments)
        assert job.wait(timeout_seconds) == 0
        seen: dict[str, Any] = torch.load(results)
        return seen


def check_told(name: str, seen: dict[str, Any], phase: str) -> None:
    where = (name, seen)
    assert seen["kind"] == "RuntimeError", where
    assert seen["message"].startswith("rank 1, process "), where
    assert seen["message"].endswith(f" on {socket.gethostname()}, was killed by signal 9 {phase}"), where
    assert seen["seconds"] < SECONDS, where
    assert not seen["left"], where


@pytest.fixture(scope="module")
def undisturbed() -> float:
    seen = run(endings, "ddp", 2, [""], 60.0, timeout_seconds=70)
    loss: float = seen[""]["loss"]
    return loss


@pytest.mark.nightly
@pytest.mark.timeout(430)
def test_a_rank_is_killed_at_any_moment() -> None:
    seen = run(endings, "ddp", 2, ON_TWO_RANKS, 340.0, timeout_seconds=350)
    for moment in ON_TWO_RANKS:
        check_told(moment, seen[moment], MOMENTS[moment])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_is_killed_or_raises(undisturbed: float) -> None:
    """All on one rank 0: what one leaves would show in the next."""
    seen = run(endings, "ddp", 2, [*SOME, "raises", "rank 0 raises", "same Trainer"], 240.0, timeout_seconds=250)
    for moment in SOME:
        check_told(moment, seen[moment], MOMENTS[moment])
    raised = seen["raises"]
    assert raised["kind"] == "RuntimeError" and not raised["left"], raised
    by = "ended with status 1 after call 1 of the Trainer, which raised ValueError; see its output above"
    assert raised["message"].endswith(by), raised
    own = seen["rank 0 raises"]
    assert (own["kind"], own["message"]) == ("ValueError", "rank 0's own") and not own["left"], own
    assert seen["same Trainer"]["loss"] == undisturbed


@pytest.mark.slow
def test_under_zero(undisturbed: float) -> None:
    seen = run(endings, "zero", 2, ["step", "save", ""], 150.0, timeout_seconds=160)
    assert seen.pop("")["loss"] == undisturbed
    for moment, of_rank_0 in seen.items():
        check_told(moment, of_rank_0, MOMENTS[moment])


@pytest.mark.slow
def test_the_third_rank_ends_as_well() -> None:
    seen = run(endings, "ddp", 3, ON_THREE_RANKS, 110.0, timeout_seconds=120)
    for moment in ON_THREE_RANKS:
        check_told(moment, seen[moment], MOMENTS[moment])


@pytest.mark.slow
def test_the_driver_of_another_replica(undisturbed: float) -> None:
    seen = run(endings, "replicas", 4, ["forward", ""], 150.0, timeout_seconds=160)
    check_told("forward", seen["forward"], MOMENTS["forward"])
    assert seen[""]["loss"] == pytest.approx(undisturbed, rel=1e-5)  # float32, in micro-batches


def caught(launcher: Sequence[str], struck: bool, ranks: int = 2, fault: str = "all") -> tuple[list[Any], float]:
    """What became of the calls of each rank that came to an end, and when the fault struck."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if struck:
            (folder / "struck").write_text("nan")
        command = [sys.executable, "-W", "ignore", *launcher, lost_connection_job.__file__, name, str(ranks), fault]
        ended = subprocess.run(command, env=environment(), timeout=90)
        assert ended.returncode == 0
        return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)], float((folder / "struck").read_text())


@pytest.mark.nightly
def test_ranks_that_lose_their_connection_and_catch_the_error() -> None:
    """The next fit of rank 0 has other ranks, so it goes as one without faults."""
    (expected, _), _ = run(caught, [], True, timeout_seconds=100)
    (of_rank_0, of_rank_1), struck = run(caught, [], False, timeout_seconds=100)
    (message, ended), loss = of_rank_0
    assert message.startswith("The ranks have lost a connection between them, although the process of each of"), message
    assert re.search(r" rank 1, process \d+, has raised \w+\. Rank 0 has ended the others,", message), message
    assert ended - struck < SECONDS and [loss] == expected == of_rank_1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(
            "to rank 2",
            r"rank [12], process \d+ on \S+, has raised \w+ in call 1 of the Trainer, in which rank 0 still",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "raises",
            r"rank 1, process \d+ on \S+, has raised KeyError in call 1 of the Trainer, in which rank 0 still",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_error_of_other_ranks_that_their_scripts_catch(fault: str, message: str) -> None:
    """Rank 0 would wait for them in a collective operation, which would meet those of their next fit."""
    (expected, *_), _ = run(caught, [], True, 3, timeout_seconds=100)
    (of_rank_0, *others), struck = run(caught, [], False, 3, fault, timeout_seconds=100)
    (found, ended), loss = of_rank_0
    assert re.match(message, found), found
    # Rank 0 waits for 3 s, and has 2 s more to notice by itself; else it would wait for torch's time-out.
    assert ended - struck < 2 * SECONDS and [loss] == expected and others == [expected] * 2


@pytest.mark.slow
def test_ranks_of_torchrun_that_lose_their_connection_and_catch_the_error() -> None:
    """Nobody can start them again, so the next fit of each rank says what to do, at once."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ranks, struck = run(caught, launcher, False, timeout_seconds=100, allow=["tmp"])
    for (first, _), (second, ended) in ranks:
        assert "/gloo/" in first and ended - struck < SECONDS, (first, ended - struck)
        refused = "This process cannot train, validate, test or predict with the other ranks again, because"
        assert second.startswith(refused) and "/gloo/" in second and "--max-restarts=1" in second, second


def on_two_ranks(*script: str) -> tuple[int, str]:
    """Status and words of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280)
    return done.returncode, done.stdout.decode()


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_rank_0_leaves_its_run_while_another_rank_ends(strategy: str) -> None:
    """A thread of rank 1 that waited inside torch would be woken now, and abort the process (SIGABRT)."""
    status, said = run(on_two_ranks, late_rank_0_job.__file__, strategy, timeout_seconds=300, allow=["tmp"])
    assert status == 0 and "terminate called" not in said, said


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_python_ends_while_gloo_has_tensors_of_the_last_operation() -> None:
    """A thread of gloo that drops one while Python ends would abort the process (SIGABRT)."""
    status, said = run(on_two_ranks, slow_gloo_job.__file__, timeout_seconds=300, allow=["tmp"])
    assert status == 0 and "terminate called" not in said, said


def orphan() -> tuple[int, str, float]:
    """Status and words of a run whose rank 0 is killed before the ranks have connected, and when it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        job = start_job(str(Path(folder) / "results.pt"), "ddp", "3", "orphan", stderr=subprocess.PIPE)
        job.wait(60)
        killed = time.monotonic()
        _, said = job.communicate(timeout=60)  # the others hold the other end of the pipe
        return job.returncode, said, time.monotonic() - killed


@pytest.mark.slow
def test_a_rank_0_that_is_killed_before_they_meet() -> None:
    status, said, seconds = run(orphan, timeout_seconds=130)
    assert status == -signal.SIGKILL and seconds < SECONDS, (status, said, seconds)
    # A rank that is connecting may fail with an error of torch's store before it finds out.
    assert re.search("rank [12]: rank 0 is gone, so this process ends as well", said), said


def deaf() -> tuple[int, str, float]:
    """Status and words of a rank 0 that listens to nothing, and when it ended after the kill."""
    with tempfile.TemporaryDirectory() as folder:
        job = start_job(str(Path(folder) / "results.pt"), "ddp", "2", "deaf", stderr=subprocess.PIPE)
        _, said = job.communicate(timeout=60)
        return job.returncode, said, time.time() - float((Path(folder) / "killed").read_text())


@pytest.mark.slow
def test_a_rank_0_that_cannot_be_interrupted() -> None:
    status, said, seconds = run(deaf, timeout_seconds=70)
    assert status == 1 and seconds < SECONDS, (status, said, seconds)
    assert said.count("was killed by signal 9 in training step; rank 0 did not come back, so it ends as well") == 1
