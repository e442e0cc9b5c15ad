"""The harness finds what it promises to find: each check is made to fail once.

torch is imported only where it is needed: each child imports this module, and torch is most of a child's start-up.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path

import procfs
import pytest
from harness import LEAKS, run

SETTLE = {"settle_seconds": 0.3}
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def add(a, b):
    return {"sum": a + b, "cwd": os.listdir(), "session": os.getsid(0) == os.getpid()}


def test_returns_the_result_of_a_fresh_process():
    import torch

    result = run(add, torch.tensor([1.0, 2.0], requires_grad=True), 1)
    assert torch.equal(result["sum"], torch.tensor([2.0, 3.0]))
    assert result["cwd"] == [] and result["session"]


def test_sends_a_function_that_cannot_be_imported():
    offset = 3
    assert run(lambda value: value + offset, 4) == 7


def environment():
    return dict(os.environ)


def test_environment(monkeypatch):
    monkeypatch.setenv("RELAY_TEST_REMOVED", "1")
    found = run(environment, env={"RELAY_TEST_ADDED": "2", "RELAY_TEST_REMOVED": None})
    assert found["RELAY_TEST_ADDED"] == "2" and "RELAY_TEST_REMOVED" not in found
    assert found["OMP_NUM_THREADS"] == "1"
    assert not Path(found["TMPDIR"]).parent.exists()


def helper_that_fails():
    print("last words")
    raise LookupError("no such layer")


def test_exception_shows_traceback_and_output():
    with pytest.raises(AssertionError, match=r"(?s)helper_that_fails.*LookupError: no such layer.*last words"):
        run(helper_that_fails)


def exit_hard():
    os._exit(7)


def exit_hard_at_exit():
    import atexit

    atexit.register(os._exit, 5)


def test_death_of_the_child():
    with pytest.raises(AssertionError, match="exit_hard ended its process with exit code 7"):
        run(exit_hard)
    with pytest.raises(AssertionError, match="returned, but its process then ended with exit code 5"):
        run(exit_hard_at_exit)


def unpicklable():
    return threading.Lock()


def test_result_that_cannot_be_sent():
    with pytest.raises(AssertionError, match="cannot pickle"):
        run(unpicklable)


def hang_with_a_grandchild(pid_file):
    grandchild = subprocess.Popen(SLEEP, start_new_session=True, env=os.environ | {"NAME": "grandchild"})
    Path(pid_file).write_text(str(grandchild.pid))
    threading.Thread(target=wait_in_a_thread, daemon=True).start()
    time.sleep(60)


def wait_in_a_thread():
    time.sleep(60)


def test_time_out_shows_stacks_and_kills_the_tree(tmp_path):
    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        run(hang_with_a_grandchild, str(tmp_path / "pid"), timeout_seconds=2)
    assert time.monotonic() - start < 15
    message = str(failure.value)
    assert "was still running after 2 s" in message
    assert "in wait_in_a_thread" in message and "in hang_with_a_grandchild" in message
    assert 'File "<string>", line 1 in <module>' in message  # the grandchild's stack
    assert not procfs.is_alive(int((tmp_path / "pid").read_text()))


def leak_process():
    subprocess.Popen(SLEEP)


def leak_detached_process():
    subprocess.Popen(SLEEP, start_new_session=True)


def leak_thread():
    threading.Thread(target=time.sleep, args=(60,)).start()


def leak_port():
    global listener
    listener = socket.create_server(("127.0.0.1", 0))


def leak_tmp():
    Path(tempfile.mkdtemp(prefix="forgotten-"), "file").touch()


def leak_shm():
    from multiprocessing import resource_tracker

    segment = shared_memory.SharedMemory(create=True, size=8)
    resource_tracker.unregister(segment._name, "shared_memory")  # or Python would remove it at exit
    segment.close()


def leak_env():
    os.environ["RELAY_TEST_LEAK"] = "set"


def leak_process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def leak_rpc():
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.getcwd()}/rendezvous")
    rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (leak_process, r"process: pid \d+: .*time.sleep"),
        (leak_detached_process, r"process: pid \d+: .*time.sleep"),
        (leak_thread, r"thread: <Thread"),
        (leak_port, r"port: \d+"),
        (leak_tmp, r"tmp: forgotten-\w+/file"),
        (leak_shm, r"shm: psm_"),
        (leak_env, r"env: RELAY_TEST_LEAK='set', was None"),
        (leak_process_group, r"process_group: torch's default process group is initialised"),
        (leak_rpc, r"rpc: torch\.distributed\.rpc is initialised"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_leaks_are_found(leak, message):
    shm_before = set(os.listdir("/dev/shm"))
    try:
        with pytest.raises(AssertionError, match=rf"{leak.__name__} left behind:(.|\n)*{message}"):
            run(leak, **SETTLE)
    finally:
        if leak is leak_shm:
            for name in set(os.listdir("/dev/shm")) - shm_before:
                if name.startswith("psm_"):
                    os.unlink(f"/dev/shm/{name}")


def leak_semaphores():
    """As processes that are killed leave them, of this test and of another one that runs meanwhile."""
    from multiprocessing import get_context

    semaphore = get_context("spawn").Semaphore()
    own = Path(f"/dev/shm/sem.{semaphore._semlock.name[1:]}")
    os.link(own, f"{own}-leaked")
    Path("/dev/shm/sem.relay-test-another-leaked").touch()


def test_a_semaphore_belongs_to_the_test_that_has_made_it():
    shm_before = set(os.listdir("/dev/shm"))
    try:
        with pytest.raises(
            AssertionError, match=r"leak_semaphores left behind:(.|\n)* shm: sem.relay-test-"
        ) as failure:
            run(leak_semaphores, settle_seconds=0.3)
        assert str(failure.value).count("shm: ") == 1 and "another" not in str(failure.value)
    finally:
        for name in set(os.listdir("/dev/shm")) - shm_before:
            if name.endswith("-leaked"):
                os.unlink(f"/dev/shm/{name}")


def end_soon():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])


def test_what_is_ending_may_settle():
    assert run(end_soon, settle_seconds=20) is None


def test_allow():
    assert run(leak_env, allow=("env",)) is None
    with pytest.raises(ValueError, match=r"allow got \['enviroment'\]; the kinds of leaks are process, "):
        run(leak_env, allow=("enviroment",))
    assert len(set(LEAKS)) == 8


def lightning_ddp():
    """Lightning starts rank 1 by running the child's own command again."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank == 0:
        copy = subprocess.run([sys.executable, *sys.argv], env=os.environ | {"LOCAL_RANK": "1"}, check=True)
        return copy.returncode
    print("rank", rank)
    return None


def test_a_copy_of_the_child_does_not_report():
    assert run(lightning_ddp) == 0
