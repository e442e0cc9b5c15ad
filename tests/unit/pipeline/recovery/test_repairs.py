"""The thread that replaces workers, and the driver's calls to a stage meanwhile: RPC is replaced by a list."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from strategies.commands.failure import Failure
from strategies.commands.host import AfterFailure
from strategies.common.errors import PeerFailed, WorkerLost
from strategies.optim.calls import MethodCall
from strategies.pipeline.control import client
from strategies.pipeline.control.client import Failures, RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.lost_workers import StageProcess
from strategies.pipeline.recovery.log import Log
from strategies.pipeline.recovery.repairs import Repair, Repairs, Replacement
from strategies.pipeline.stage.layers import PassContext

pytestmark = pytest.mark.filterwarnings("ignore:stage 0")

LOST = "stage 0 was killed"


class Run:
    """A run with one stage, whose workers are replaced at most twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.replies: list[torch.futures.Future[Any]] = []
        self.answers: dict[str, Any] = {}
        """What is answered at once, by the name of the commands."""
        self.at_replacement: list[Callable[[], Any]] = []
        """What happens while workers are replaced, for each time."""
        monkeypatch.setattr(client.rpc, "rpc_async", self._rpc_async)
        self.log = Log(Failures())
        self.log.mark(0)
        self.remote = RemoteStage("worker", None, "stage 0", self._process(), self.log.failures)
        self.remote.keep_log(self.log)
        self.done: list[Repair] = []
        self.num_killed = self.num_abandoned = 0
        self.repairs = Repairs(2, self.log, self._kill, self._replace, self._abandon, self.done)
        self.repairs.start()

    def lose(self) -> None:
        self.log.failures.add(WorkerLost(LOST), consequence=False)

    def _process(self) -> StageProcess:
        return StageProcess("a process", ended=lambda: None, doing=lambda: "idle", kill=lambda: None)

    def _kill(self) -> None:
        self.num_killed += 1

    def _abandon(self) -> None:
        self.num_abandoned += 1

    def _replace(self, failures: Failures, lost: str) -> Replacement:
        self.remote.renew("next", None, self._process(), failures)
        if self.at_replacement:
            self.at_replacement.pop(0)()
        return Replacement(time.perf_counter(), self.log.run_again(0))

    def _rpc_async(self, name: str, function: Any, args: Any, timeout: float) -> Any:
        calls = args[1] if len(args) > 1 else function.__name__
        name = calls if isinstance(calls, str) else ", ".join(call[0] for call in calls)
        self.asked.append(name)
        self.replies.append(torch.futures.Future())
        if name in self.answers:
            self.replies[-1].set_result(self.answers[name])
        return self.replies[-1]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(monkeypatch)
    yield run
    run.repairs.end()


def test_a_question_that_is_not_answered_is_asked_again(running: Run) -> None:
    norms = running.remote.ask(StageCommands.grad_norms, 0, 2.0)
    captured = running.remote.ask(StageCommands.capture, {})
    running.replies[0].set_result("norms")
    running.replies[1].set_result("captured")
    assert (norms.wait(), captured.wait()) == ("norms", "captured")
    running.remote.send_zero_grad("weight", True)
    call = MethodCall("lower", (), {})
    waiting = running.remote.ask(StageCommands.call_method, 0, call, [], PassContext.capture("cpu"), False)
    answers = {"capture": "captured again", "zero_grad, call_method": 7}
    running.at_replacement.append(lambda: running.answers.update(answers))
    running.lose()
    assert waiting.wait() == 7
    before, again = running.asked[:3], running.asked[3:]
    assert before == ["grad_norms", "capture", "zero_grad, call_method"]
    assert again == ["capture", "zero_grad, call_method"]  # a norm that has been read is not read again
    assert [repair.lost for repair in running.done] == [LOST] and running.done[0].num_messages == 3
    assert 0 < running.done[0].restart_seconds <= running.done[0].seconds
    assert (norms.wait(), captured.wait()) == ("norms", "captured")


def test_an_answer_after_a_failed_command_does_not_count(running: Run) -> None:
    """A neighbour of the lost worker goes on with the next command, without what the failed one was to compute."""
    norms = running.remote.ask(StageCommands.grad_norms, 0, 2.0)
    running.at_replacement.append(lambda: running.answers.update(grad_norms="right"))
    failed = Failure.of(RuntimeError("Connection closed by peer"), "stage 0", "B1")
    running.replies[0].set_result(AfterFailure(failed, "wrong"))
    running.lose()
    assert norms.wait() == "right"


def test_nor_does_such_an_answer_of_new_workers_of_which_one_is_lost(running: Run) -> None:
    norms = running.remote.ask(StageCommands.grad_norms, 0, 2.0)
    failed = Failure.of(WorkerLost(f"{LOST} again"), "stage 0", "B1")
    running.at_replacement.append(lambda: running.answers.update(grad_norms=AfterFailure(failed, "wrong")))
    running.at_replacement.append(lambda: running.answers.update(grad_norms="right"))
    running.lose()
    assert norms.wait() == "right" and running.num_killed == 2


def test_what_runs_beside_the_commands_is_called_again(running: Run) -> None:
    def progress(host: Any) -> int:
        raise AssertionError

    reply = running.remote.beside(progress)
    running.at_replacement.append(lambda: running.answers.update(progress=3))
    closed = RuntimeError("EOF: end of file (this error originated at tensorpipe/transport)")
    running.replies[0].set_exception(closed)
    assert reply.wait() == 3 and len(running.done) == 1


def test_a_call_that_failed_in_the_process_before_is_not_attributed_to_the_new_process(running: Run) -> None:
    """The driver may look at the reply when workers have been replaced, and not every error of RPC shows a loss."""

    def progress(host: Any) -> int:
        raise AssertionError

    def of_before() -> str:
        return "was killed by signal 9"

    before = StageProcess("a process", ended=of_before, doing=lambda: "idle", kill=lambda: None)
    running.remote.renew("worker", None, before, running.remote.failures)
    reply = running.remote.beside(progress)
    running.replies[0].set_exception(RuntimeError("RPC has ended"))
    running.answers.update(progress=3)
    first = running.log.failures
    running.lose()
    first.settle()
    assert reply.wait() == 3 and len(running.done) == 1


def test_a_loss_while_workers_are_replaced_counts_too(running: Run) -> None:
    def lose_another() -> None:
        raise WorkerLost("stage 1 was killed")

    running.at_replacement += [lose_another, lambda: None]
    first = running.log.failures
    running.lose()
    first.settle()
    assert running.num_killed == 2 and len(running.done) == 1
    running.lose()
    with pytest.raises(WorkerLost, match=LOST):
        running.log.failures.settle()


def test_an_error_while_workers_are_replaced_ends_the_run(running: Run) -> None:
    def differs() -> None:
        raise ValueError("computed other values")

    running.at_replacement.append(differs)
    running.lose()
    with pytest.raises(WorkerLost, match=f"{LOST}\nNo new workers could take over: computed other values") as raised:
        running.log.failures.settle()
    assert isinstance(raised.value.__cause__, ValueError)
    assert not running.done


def test_an_error_of_the_user_is_not_repaired(running: Run) -> None:
    running.log.failures.add(KeyError("of the user"), consequence=False)
    with pytest.raises(KeyError, match="of the user"):
        running.log.failures.settle()
    assert running.num_killed == 0


def test_what_interrupts_a_repair_is_raised(running: Run) -> None:
    failures, began, may_end = running.log.failures, threading.Event(), threading.Event()
    running.at_replacement.append(lambda: (began.set(), may_end.wait()))
    running.lose()
    began.wait()
    with pytest.raises(KeyboardInterrupt), failures.explained():
        raise KeyboardInterrupt
    may_end.set()
    failures.repair.result()
    with running.log.lock:  # held until the repair is over
        assert running.num_abandoned == 1
    assert failures.raised and isinstance(running.log.failures.cause(), KeyboardInterrupt)


def test_what_interrupts_the_search_for_a_cause_is_raised_too(running: Run) -> None:
    """The workers are replaced all the same, so that the weights of all stages can return."""
    failures = running.log.failures
    failures.add(PeerFailed("rank 0 failed"), consequence=True)
    with pytest.raises(KeyboardInterrupt), failures.explained():
        raise KeyboardInterrupt
    running.lose()
    assert failures.repair is not None and failures.repair.result() is not None
    with running.log.lock:
        assert [repair.lost for repair in running.done] == [LOST] and running.num_abandoned == 1
