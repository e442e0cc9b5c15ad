"""Which failure of a pipeline is raised, and waits that end with a failure."""

import threading

import pytest

from strategies.common.errors import PeerFailed
from strategies.pipeline.control.failures import Failures, InterruptibleWait


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


def test_a_consequence_alone_is_raised_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.pipeline.control.failures._DIAGNOSIS_SECONDS", 0.1)
    failures = Failures()
    failures.add(PeerFailed("rank 0 of the pipeline failed"), consequence=True)
    with pytest.raises(PeerFailed, match="rank 0 of the pipeline failed"):
        failures.raise_cause()


def test_what_fails_in_a_context_is_explained_by_its_cause() -> None:
    failures = Failures()
    failures.raise_untold()
    failures.add(KeyError("cause"), consequence=False)
    with pytest.raises(KeyError, match="cause"), failures.explained():
        raise PeerFailed("rank 0 failed")
    failures.raise_untold()  # the user knows
    assert failures.raised


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
