"""A rank of MPI is told from other ranks, because it must not become a worker by ``exec``."""

import sys
from types import SimpleNamespace

import pytest

from strategies.launch.ranks import initialized_mpi


def test_mpi_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert initialized_mpi() is None
    mpi = SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    assert initialized_mpi() is mpi
    mpi.Is_finalized = lambda: True
    assert initialized_mpi() is None
