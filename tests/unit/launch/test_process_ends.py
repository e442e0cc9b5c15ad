"""What is found out about threads and processes that end."""

import hashlib
import threading
import time
from pathlib import Path

import pytest

from strategies.launch.process_ends import _gloo_runs


@pytest.mark.parametrize(("name", "counts"), [("pt_gloo_runner", True), ("pt_other_runner", False)])
def test_a_thread_of_gloo_that_computes(name: str, counts: bool) -> None:
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
        deadline = time.monotonic() + (60 if counts else 0.2)
        while not (found := _gloo_runs()) and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        is_over.set()
        thread.join()
    assert found == counts
