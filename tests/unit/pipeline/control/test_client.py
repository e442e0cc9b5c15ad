"""What the driver's client sends to a stage, and what it makes of the answers: RPC is replaced by a list.

Which failure of a pipeline is raised, and waits that end with a failure.
"""

import gc
import pickle
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from strategies.commands.failure import Failure
from strategies.commands.host import AfterFailure
from strategies.common.errors import PeerFailed, WorkerLost
from strategies.pipeline.control import client
from strategies.pipeline.control.client import Failures, InterruptibleWait, RemoteStage, leading
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.lost_workers import StageProcess
from strategies.pipeline.transport.link import ORDERS, Link, Receiver, Sender

STAGE = "stage 0 (layers 0 to 1: Linear, ReLU)"
CLOSED = "EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)"


class Wire:
    """Notes what is sent; answers when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.replies: list[torch.futures.Future[Any]] = []

    def rpc_async(self, name: str, function: Any, args: Any = (), kwargs: Any = None, timeout: float = -1) -> Any:
        assert timeout == 0
        self.sent.append(args[1:])
        self.replies.append(torch.futures.Future())
        return self.replies[-1]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(client.rpc, "rpc_async", wire.rpc_async)
    return wire


@pytest.fixture
def short_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the wait for a cause where only its consequences are known."""
    monkeypatch.setattr(client, "_DIAGNOSIS_SECONDS", 0.1)


def remote_stage(ended: str | None = None) -> RemoteStage:
    process = StageProcess("process 7 on here", ended=lambda: ended, doing=lambda: "in F2", kill=lambda: None)
    return RemoteStage("worker", None, STAGE, process, Failures())


def test_commands_that_can_wait_travel_ahead_of_the_next_one(wire: Wire) -> None:
    remote = remote_stage()
    remote.send(StageCommands.discard, 3)
    remote.send(StageCommands.start_journal)
    for name in ("0.weight", "0.bias"):
        remote.send_zero_grad(name, True)
    remote.send_zero_grad("0.weight", False)
    assert not wire.sent
    remote.ask(StageCommands.num_kept)
    remote.ask(StageCommands.grad_norms, 0, norm_type=1.0)
    cleared = [(["0.weight", "0.bias"], 0), True], [(["0.weight"], 0), False]
    ahead = [("discard", (3,), {}), ("start_journal", (), {})]
    first = [*ahead, *(("zero_grad", tuple(each), {}) for each in cleared), ("num_kept", (), {})]
    assert wire.sent == [(first, 0), ([("grad_norms", (0,), {"norm_type": 1.0})], 1)]


def test_commands_without_a_result_go_over_the_link_and_calls_of_rpc_have_their_place_there(
    wire: Wire, groups: tuple[ProcessGroup, ProcessGroup]
) -> None:
    remote, receiver = remote_stage(), Receiver(Link(groups[1], 0), ORDERS, device=torch.device("cpu"))

    def orders(number: int) -> list[Any]:
        return [pickle.loads(receiver.receive(0, 0).numpy()) for _ in range(number)]

    step = ("average_grads", (), {})
    remote.send(StageCommands.average_grads)
    assert wire.sent == [([step], 0)]  # there is no link yet
    remote.connect(link := Sender(Link(groups[0], 1), ORDERS))
    assert wire.sent[1:] == [()]  # follow
    remote.send(StageCommands.discard, 5)
    remote.send(StageCommands.average_grads)
    remote.send(StageCommands.discard, 6)
    remote.ask(StageCommands.num_kept)
    remote.send(StageCommands.average_grads)
    remote.disconnect()
    assert wire.sent[2:] == [([("discard", (6,), {}), ("num_kept", (), {})], 1)]
    assert orders(4) == [[("discard", (5,), {}), step], 1, [step], None]
    link.flush()


def test_what_fails_on_the_link_is_a_failure_and_later_results_are_behind_it(
    wire: Wire, groups: tuple[ProcessGroup, ProcessGroup]
) -> None:
    """Threads of RPC may bring the result of a later call first."""
    remote = remote_stage()
    remote.connect(Sender(Link(groups[0], 1), ORDERS))
    failure = Failure.of(KeyError("there"), STAGE, "B2")
    remote.send(StageCommands.average_grads)
    answer = remote.ask(StageCommands.num_kept)
    wire.replies[1].set_result(AfterFailure(failure, 3))
    with pytest.raises(KeyError, match="there"):
        answer.wait()
    assert answer.rescue() == 3
    wire.replies[0].set_result(failure)
    remote.send(StageCommands.average_grads)  # nobody follows the link any more
    remote.ask(StageCommands.num_kept)
    assert [args for args in wire.sent if args] == [([("num_kept", (), {})], number) for number in range(2)]


def test_the_version_changes_with_commands_that_may_change_values(wire: Wire) -> None:
    remote = remote_stage()
    remote.send(StageCommands.free, 1)
    remote.ask(StageCommands.num_kept)
    assert remote.version == 0
    remote.send(StageCommands.zero_grad, 0, True)
    remote.send_zero_grad("0.weight", True)  # of some parameters, not of the optimizer before
    assert remote.version == 2


def test_results_and_failures_come_back(wire: Wire) -> None:
    remote = remote_stage()
    started = remote.ask(StageCommands.num_kept)
    wire.replies[0].set_result(2)
    assert started.wait() == 2
    started = remote.ask(StageCommands.num_kept)
    wire.replies[1].set_result(Failure.of(KeyError("there"), STAGE, "B2"))
    with pytest.raises(KeyError, match="there"):
        started.wait()
    assert remote.failures.raised


def test_who_has_a_result_knows_of_failures_before_it(wire: Wire) -> None:
    """Threads of RPC may bring replies in another order than that in which the stage has sent them."""
    remote = remote_stage()
    remote.ask(StageCommands.num_kept)
    later = remote.ask(StageCommands.num_kept)
    wire.replies[1].set_result(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(later.wait)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.05)
        wire.replies[0].set_result(Failure.of(KeyError("there"), STAGE, "B0"))
        with pytest.raises(KeyError, match="there"):
            waiting.result(timeout=10)


def test_a_process_that_has_ended_before_it_is_called(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """RPC may raise at once, because it could not create the host of the stage."""

    refused = (
        "ECONNREFUSED: connection refused (this error originated at tensorpipe/transport/uv/connection_impl.cc:62)"
    )

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(refused)

    monkeypatch.setattr(client.rpc, "rpc_async", refuse)
    remote = remote_stage("was killed by signal 9")
    with pytest.raises(WorkerLost, match=r"stage 0 .*, process 7 on here, was killed by signal 9"):
        remote.ask(StageCommands.num_kept).wait()
    with pytest.raises(WorkerLost, match=r"stage 0 .*, process 7 on here, did not answer: .*ECONNREFUSED"):
        remote_stage(None).ask(StageCommands.num_kept).wait()  # a busy machine tells later how a process has ended
    refused = "RPC has not been initialised"
    with pytest.raises(RuntimeError, match=rf"^{refused}$"):
        remote_stage(None).ask(StageCommands.num_kept).wait()


@pytest.mark.parametrize("ended", [None, "was killed by signal 9"])
def test_a_stage_that_does_not_answer(wire: Wire, ended: str | None) -> None:
    remote = remote_stage(ended)
    started = remote.ask(StageCommands.num_kept)
    wire.replies[0].set_exception(RuntimeError("broken pipe"))
    why = ended or "did not answer: .*broken pipe"
    with pytest.raises(WorkerLost, match=rf"^stage 0 \(.*\), process 7 on here, {why}"):
        started.wait()


@pytest.mark.parametrize(("error", "is_killed"), [(CLOSED, True), ("an answer that cannot be unpickled", False)])
def test_a_process_that_cannot_be_reached_is_killed(wire: Wire, error: str, is_killed: bool) -> None:
    """Other stages would wait for it until the time-out."""
    killed: list[bool] = []
    process = StageProcess("process 7", ended=lambda: None, doing=lambda: "", kill=lambda: killed.append(True))
    remote = RemoteStage("worker", None, STAGE, process, Failures())
    started = remote.ask(StageCommands.num_kept)
    wire.replies[0].set_exception(RuntimeError(error))
    with pytest.raises(WorkerLost, match="did not answer"):
        started.rescue()
    assert killed == [True] * is_killed


def test_an_exception_of_a_stage_at_which_a_loop_would_end(wire: Wire) -> None:
    remote = remote_stage()
    remote.failures.add(KeyError("elsewhere"), consequence=False)
    started = remote.ask(StageCommands.num_kept)
    wire.replies[0].set_result(Failure.of(StopIteration("of a layer"), STAGE, "teardown"))
    with pytest.raises(RuntimeError, match=r"raised StopIteration\('of a layer'\)") as raised:
        started.rescue()
    assert isinstance(raised.value.__cause__, StopIteration)


def test_after_a_failure_was_raised_other_stages_can_be_rescued(wire: Wire) -> None:
    remote = remote_stage()
    remote.failures.add(KeyError("elsewhere"), consequence=False)
    with pytest.raises(KeyError, match="elsewhere"):
        remote.ask(StageCommands.num_kept).wait()
    started = remote.ask(StageCommands.num_kept)
    wire.replies[0].set_result(0)
    wire.replies[1].set_result(1)
    assert started.wait() == 1
    started = remote.ask(StageCommands.num_kept)
    remote.give_up("hangs")
    with pytest.raises(WorkerLost, match="process 7 on here, was declared lost"):
        started.wait()


def test_reading_is_refused_within_a_pass_and_after_the_end(wire: Wire) -> None:
    remote = remote_stage()
    with leading(Failures(), [remote], list), leading(Failures(), [remote], list):
        assert remote.in_pass
        with pytest.raises(RuntimeError, match=r"values of stage 0 .* cannot be read while micro-batches go through"):
            remote.readable()
    assert not remote.in_pass
    remote.close()
    with pytest.raises(RuntimeError, match="the pipeline has ended, and stage 0"):
        remote.readable()
    assert not wire.sent


def test_the_first_cause_is_raised_not_its_consequences() -> None:
    failures = Failures()
    assert not failures.any
    failures.add(PeerFailed("rank 0 failed"), consequence=True)
    failures.add(KeyError("cause"), consequence=False)
    failures.add(ValueError("later"), consequence=False)
    assert failures.any
    for _ in range(2):
        with pytest.raises(KeyError, match="cause"):
            failures.raise_cause()


def test_a_callback_that_blocks_delays_neither_another_failure_nor_its_report() -> None:
    """The driver ends waits for devices in such a callback."""
    failures, may_go_on = Failures(), threading.Event()
    failures.first.add_done_callback(lambda _: may_go_on.wait(60))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(failures.add, PeerFailed("rank 0 failed"), consequence=True)
        while not failures.first.done():
            time.sleep(0.001)
        failures.add(KeyError("cause"), consequence=False)
        with pytest.raises(KeyError, match="cause"):
            failures.raise_cause()
        assert not first.done()
        may_go_on.set()


def test_a_consequence_alone_is_raised_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.pipeline.control.client._DIAGNOSIS_SECONDS", 0.1)
    failures = Failures()
    failures.add(PeerFailed("rank 0 of the pipeline failed"), consequence=True)
    with pytest.raises(PeerFailed, match="rank 0 of the pipeline failed"):
        failures.raise_cause()


def test_a_killed_worker_whose_exit_status_comes_late_is_lost(wire: Wire, short_diagnosis: None) -> None:
    """The driver's own connection with it fails first, in a wait for a message."""
    remote = remote_stage(ended=None)
    remote.ask(StageCommands.num_kept)
    lost = pytest.raises(WorkerLost, match=r"^stage 0 \(.*\), process 7 on here, did not answer: ")
    with lost, remote.failures.explained():
        wire.replies[0].set_exception(RuntimeError("ECONNRESET: connection reset by peer"))
        raise RuntimeError("Read error [127.0.0.1]:14025: Connection reset by peer")
    failures = Failures()  # here the message's wait fails first
    with pytest.raises(WorkerLost, match="stage 0"), failures.explained():
        failures.add(PeerFailed("rank 1 of the pipeline failed"), consequence=True)
        failures.add(RuntimeError("Connection reset by peer"), consequence=True)
        failures.add(WorkerLost("stage 0 did not answer"), consequence=True)
        raise PeerFailed("rank 1 of the pipeline failed")


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48867"


def test_a_connection_that_is_lost_between_processes_that_live(short_diagnosis: None) -> None:
    failures = Failures()
    lost = r"the data plane between the stages has failed, although .* still runs: .* Connection closed by peer"
    with pytest.raises(WorkerLost, match=lost), failures.explained():
        raise RuntimeError(GLOO)
    failures = Failures()
    own = ConnectionResetError("the user's own: Connection reset by peer")
    with pytest.raises(ConnectionResetError, match="the user's own"), failures.explained():
        raise own


@pytest.mark.parametrize("is_over", [False, True])
def test_a_repaired_failure_does_not_keep_what_user_code_has_dropped(is_over: bool) -> None:
    """An output of the model that a variable of ``training_step`` held would prevent snapshots for ever."""

    class Output: ...

    outputs = []
    failures = Failures()
    failures.repair = Future()

    def wait() -> None:
        try:
            try:
                raise RuntimeError("Connection reset by peer")
            except RuntimeError as error:
                raise PeerFailed("another process has failed") from error
        except PeerFailed as error:
            failed = error
        failures.add(failed, consequence=True)

    def training_step() -> None:
        output = Output()
        outputs.append(weakref.ref(output))
        wait()

    gc.disable()
    try:
        if not is_over:
            training_step()
        failures.give_way_to(Failures())
        if is_over:
            training_step()
        assert outputs[0]() is None
    finally:
        gc.enable()


def test_failures_do_not_keep_the_waits_of_a_session_that_has_ended() -> None:
    """A message that is waited for in vain holds the connection of the session."""

    class Message:
        def wait(self) -> None: ...

    failures, message = Failures(), Message()
    kept = weakref.ref(message)
    waiting = InterruptibleWait(failures)
    waiting(message.wait)
    failures.add(PeerFailed("rank 0 failed"), consequence=True)
    waiting._waits.put(message.wait)  # nobody takes its end, because the failure has ended the wait
    waiting.end()
    del waiting, message
    deadline = time.monotonic() + 60
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert kept() is None and failures.any


def test_a_wait_that_begins_while_the_session_ends() -> None:
    failures = Failures()
    failures.repair = Future()
    waiting = InterruptibleWait(failures)
    queue = waiting._waits

    def put(wait_for_message: Any) -> None:
        if wait_for_message is not None:
            failures.add(PeerFailed("rank 0 failed"), consequence=True)
            waiting.end()

    waiting._waits = SimpleNamespace(put=put)
    with pytest.raises(PeerFailed, match="the wait for a message ends"):
        waiting(lambda: None)
    queue.put(None)


def test_an_exception_at_which_a_loop_would_end_without_an_error() -> None:
    failures = Failures()
    failures.add(StopIteration("of a layer"), consequence=False)
    with pytest.raises(RuntimeError, match=r"raised StopIteration\('of a layer'\)") as raised:
        failures.raise_cause()
    assert isinstance(raised.value.__cause__, StopIteration)


def test_a_process_whose_end_is_known_late(wire: Wire) -> None:
    """It is the cause, not the closed connections that show it first."""
    answers = iter([None, None, "was killed by signal 9"])
    process = StageProcess("process 7 on here", ended=lambda: next(answers), doing=lambda: "", kill=lambda: None)
    remote = RemoteStage("worker", None, STAGE, process, Failures())
    started = remote.ask(StageCommands.num_kept)
    wire.replies[-1].set_exception(RuntimeError("EOF: end of file"))
    with pytest.raises(WorkerLost, match="was killed by signal 9"):
        started.rescue()


def test_what_fails_in_a_context_is_explained_by_its_cause() -> None:
    failures = Failures()
    failures.raise_untold()
    failures.add(KeyError("cause"), consequence=False)
    with pytest.raises(KeyError, match="cause"), failures.explained():
        raise PeerFailed("rank 0 failed")
    failures.raise_untold()  # the user knows
    assert failures.raised


def test_where_passes_are_led_neighbours_hear_of_an_error_before_its_cause_is_raised() -> None:
    failures, remote, told = Failures(), remote_stage(), []
    with pytest.raises(KeyError, match="cause"), leading(failures, [remote], lambda: told.append(remote.in_pass)):
        failures.add(KeyError("cause"), consequence=False)
        raise PeerFailed("rank 0 failed")
    assert told == [True] and not remote.in_pass
    with pytest.raises(KeyError, match="cause"), leading(failures, [remote], lambda: told.append(True)):
        raise AssertionError("does not run after a failure")
    assert told == [True]


def test_a_wait_returns_raises_or_ends_with_a_failure() -> None:
    failures, arrived = Failures(), threading.Event()
    wait = InterruptibleWait(failures)
    arrived.set()
    wait(arrived.wait)
    with pytest.raises(ZeroDivisionError):
        wait(lambda: 1 / 0)
    arrived.clear()
    threading.Timer(0.05, failures.add, [KeyError("elsewhere")], {"consequence": False}).start()
    with pytest.raises(KeyError, match="elsewhere"):
        wait(arrived.wait)
    with pytest.raises(KeyError, match="elsewhere"):
        wait(lambda: None)
    arrived.set()
    wait.end()
    with pytest.raises(RuntimeError, match="the pipeline has ended"):
        wait(lambda: None)


def test_a_stage_in_another_process_starts_anew_and_late_replies_are_those_of_the_process_before(
    wire: Wire, short_diagnosis: None
) -> None:
    remote = remote_stage()
    before = remote.failures
    remote.ask(StageCommands.num_kept)
    remote.send(StageCommands.discard, 9)
    process = StageProcess("process 8 on here", ended=lambda: None, doing=lambda: "idle", kill=lambda: None)
    remote.renew("next", None, process, Failures())
    assert not remote.has_ended
    answer = remote.ask(StageCommands.num_kept)
    assert wire.sent[-1] == ([("discard", (9,), {}), ("num_kept", (), {})], 0)  # numbers begin again
    wire.replies[0].set_exception(RuntimeError("ECONNRESET: connection reset by peer"))
    assert before.any and not remote.failures.any
    with pytest.raises(WorkerLost, match="process 7 on here, did not answer"):
        before.raise_cause()
    wire.replies[-1].set_result(3)
    assert answer.wait() == 3


def test_a_process_that_has_been_given_up_does_not_count_against_the_next_one(wire: Wire) -> None:
    remote = remote_stage()
    remote.give_up("hangs")
    assert remote.is_lost
    process = StageProcess("process 8 on here", ended=lambda: "was killed", doing=lambda: "", kill=lambda: None)
    remote.renew("next", None, process, Failures())
    assert not remote.is_lost and remote.has_ended
    started = remote.ask(StageCommands.num_kept)
    wire.replies[-1].set_exception(RuntimeError("EOF"))
    with pytest.raises(WorkerLost, match="process 8 on here, was killed"):
        started.wait()


def test_what_fails_late_is_a_failure_of_the_pass_that_sent_it(wire: Wire) -> None:
    """A consequence of a failed pass of a ``Pipe`` does not end the next pass."""
    remote = remote_stage()
    of_first, of_second = remote.failures, Failures()
    remote.ask(StageCommands.step, 0)
    remote.send(StageCommands.run, None, [])
    remote.failures = of_second
    answer = remote.ask(StageCommands.num_kept)
    wire.replies[1].set_result(Failure.of(PeerFailed("pass 0 has failed elsewhere"), STAGE, "F3"))
    wire.replies[2].set_result(5)
    assert not of_first.any and not of_second.any  # in the order of the calls
    wire.replies[0].set_result(Failure.of(ArithmeticError("in the step"), STAGE, "step"))
    assert of_first.any and of_second.any
    assert answer.rescue() == 5
    with pytest.raises(ArithmeticError):  # which no pass has raised
        of_second.raise_untold()
    with pytest.raises(PeerFailed):
        of_first.raise_untold()


def test_a_result_that_came_before_the_decision_not_to_repair_is_asked_for_again(wire: Wire) -> None:
    """Otherwise the layers of a stage would be lost after an error of the user's code."""
    remote = remote_stage()
    failures = remote.failures
    failures.repair = Future()
    log = SimpleNamespace(failures=failures, lock=nullcontext(), perform=lambda entry, run: run())
    remote.keep_log(log)
    after = AfterFailure(Failure.of(ArithmeticError("in the step"), STAGE, "step"), [3])
    rescued = remote.ask(StageCommands.capture, {}), remote.ask(StageCommands.step, 0)
    for reply in wire.replies:
        reply.set_result(after)
    failures.repair.set_result(None)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(rescued[0].rescue)
        for _ in range(5000):
            if len(wire.replies) < 3:
                time.sleep(0.001)
        wire.replies[2].set_result(after)
        assert found.result() == [3]
    with pytest.raises(ArithmeticError):  # a step is not repeated
        rescued[1].rescue()
    assert len(wire.replies) == 3
