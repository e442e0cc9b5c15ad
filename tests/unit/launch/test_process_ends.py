"""What is found out about threads and processes that end."""

import hashlib
import threading
import time
from pathlib import Path

import pytest
from harness import run

from strategies.launch.process_ends import _gloo_runs


def is_found(name: str, within_seconds: float) -> bool:
    """Whether a thread with this name that computes is found, in a process without threads of gloo."""
    computes, is_over = threading.Event(), threading.Event()

    def compute() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        data = bytes(2**22)
        computes.set()
        while not is_over.is_set():
            hashlib.sha256(data)  # without Python's lock

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert computes.wait(60)
        deadline = time.monotonic() + within_seconds
        while not (found := _gloo_runs()) and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        is_over.set()
        thread.join()
    return found


@pytest.mark.parametrize(("name", "seconds"), [("pt_gloo_runner", 60.0), ("pt_other_runner", 0.2)])
def test_a_thread_of_gloo_that_computes(name: str, seconds: float) -> None:
    assert run(is_found, name, seconds) == (name == "pt_gloo_runner")
