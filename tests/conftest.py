"""Rules for tests that need a GPU or have to run alone, and a fixture for tests that compare to the last digits."""

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
from harness_child import ACCELERATOR, DATA_PLANE, VALUES, data_planes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data-plane",
        choices=["simulated", "simulated-serial", "nccl"],
        help="what data_plane='auto' means in processes of the harness, where stages can use it",
    )
    parser.addoption(
        "--accelerator",
        choices=["cpu", "gpu"],
        default="cpu",
        help="what tests of parity that leave the accelerator open run on",
    )


def pytest_configure(config: pytest.Config) -> None:
    if plane := config.getoption("--data-plane"):
        os.environ[DATA_PLANE] = plane
    os.environ[ACCELERATOR] = config.getoption("--accelerator")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a session with ``--data-plane`` in which nothing has gone over that plane."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput[DATA_PLANE] = dict(data_planes())
    elif config.getoption("--data-plane") and session.testscollected and not data_planes()[VALUES]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Takes over what a process of pytest-xdist has counted."""
    data_planes().update(getattr(node, "workeroutput", {}).get(DATA_PLANE, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if plane := config.getoption("--data-plane"):
        pipelines = ", ".join(f"{number} over {name}" for name, number in data_planes().items() if name != VALUES)
        values = data_planes()[VALUES]
        terminalreporter.write_line(f"--data-plane={plane}: pipelines {pipelines or 'none'}; {values} values received")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Has the garbage collector leave alone what is imported: hundreds of thousands of objects that are no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


_LONGEST = (
    "test_verify",
    *("test_readme_commands", "test_rank_recovery", "test_launch", "test_parity_schedules", "test_zero"),
    "test_repair",
    *(
        "test_faults",
        "test_faults_ranks",
        "test_basics",
        "test_families",
        "test_blocks",
        "test_adapters",
    ),
    *("test_configure_model", "test_parity_weight_averaging", "test_resume_strategies", "test_recovery_replicas"),
    *("test_fault_simulator", "test_checkpoint_resume", "test_pipe_rpc", "test_security"),
    *("test_benchmarks", "test_memory_of_processes", "test_posting"),
)
"""The files that take longest."""

_LONGEST_OF_UNIT = ("test_trial", "test_rpc_sequential", "test_cli", "test_search")


def _turn_of(item: pytest.Item) -> int:
    """pytest-xdist hands out files in this order: the longest first, the short ones of ``unit`` last.

    So no process has a long file left when the others have nothing to do any more.
    """
    if item.path.stem in _LONGEST:
        return _LONGEST.index(item.path.stem)
    if item.path.stem in _LONGEST_OF_UNIT:
        return len(_LONGEST) + 1
    return len(_LONGEST) + 2 * ("unit" in item.path.parts)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch  # here, so that the process that starts pytest-xdist's workers does not import it before them

    items.sort(key=_turn_of)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the time-out of a test does not count the wait
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Runs a test marked ``alone`` while no other test of this checkout runs, in any process."""
    if not hasattr(item.config, "workerinput"):  # which workers of pytest-xdist have
        return (yield)
    with _turn(exclusive=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def _turn(*, exclusive: bool) -> Iterator[None]:
    """Holds a lock that many tests share, or one test has for itself.

    All pass a gate first. One that waits for the lock keeps the gate closed, so that no others get ahead of it.
    """
    name = f"relay-tests-{sha1(str(Path(__file__).resolve()).encode()).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir())
    with open(folder / f"{name}.lock", "a") as lock:
        with open(folder / f"{name}.gate", "a") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


@pytest.fixture
def float64() -> Iterator[None]:
    """Double precision and one thread, in this process."""
    import torch

    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)
