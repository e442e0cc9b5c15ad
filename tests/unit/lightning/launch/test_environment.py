"""Launches that are refused: ranks that are numbered in another way, or that cannot become workers."""

from typing import Any

import pytest
from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
)
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from strategies.lightning.compat import rank_zero_only
from strategies.lightning.launch.environment import check_environment, check_numbering, lasting_environment
from trainer import Trainer


@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (3, 1), (5, 1)])
def test_ranks_that_are_numbered_host_by_host(rank: int, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", str(rank))
    monkeypatch.setenv("SLURM_LOCALID", str(local_rank))
    check_numbering(SLURMEnvironment(), 2)


@pytest.mark.parametrize(("rank", "local_rank"), [(1, 0), (2, 1), (3, 2)])
def test_ranks_that_are_numbered_in_turn_on_each_host(
    rank: int, local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", str(rank))
    monkeypatch.setenv("SLURM_LOCALID", str(local_rank))
    with pytest.raises(MisconfigurationException, match=f"number {local_rank} on its host to rank {rank}.*=block"):
        check_numbering(SLURMEnvironment(), 2)


class CountsRanks(LightningEnvironment):
    """Like the environment of Ray Train: derived from Lightning's, for processes that something else has started."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def world_size(self) -> int:
        return self._number


def test_a_pipeline_over_ranks_that_cannot_become_workers() -> None:
    def build(number: int) -> Trainer:
        return Trainer(
            accelerator="cpu", devices=2, strategy=RPCSequentialStrategy(), plugins=[CountsRanks(number)], logger=False
        )

    build(1)
    with pytest.raises(MisconfigurationException, match=r"CountsRanks says that 2 ranks have been started.*\"ddp\" or"):
        build(2)
    check_environment(CountsRanks(2), (CountsRanks,))


class OfAnother(ClusterEnvironment):
    """The environment of a launcher that nobody knows."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 29500

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return 2

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return 0

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


def test_a_pipeline_over_ranks_of_an_unknown_launcher() -> None:
    with pytest.raises(MisconfigurationException, match=r"OfAnother says that 2 ranks have been started.*Kubeflow"):
        Trainer(accelerator="cpu", devices=2, strategy=RPCSequentialStrategy(), plugins=[OfAnother()], logger=False)


class OfMPI(MPIEnvironment):
    """Without MPI."""

    def __init__(self, number: int) -> None:
        self._number = number

    def world_size(self) -> int:
        return self._number


def test_a_later_trainer_asks_no_ranks_of_mpi_that_have_become_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.lightning.launch.environment._of_mpi", [])
    assert (alone := lasting_environment(OfMPI(1))) is not lasting_environment(OfMPI(1))
    assert isinstance(alone, OfMPI)
    first = lasting_environment(OfMPI(2))
    assert lasting_environment(OfMPI(2)) is first
    other = SLURMEnvironment()
    assert lasting_environment(other) is other


@pytest.mark.parametrize("strategy", [RPCSequentialStrategy, ZeROStrategy, DDPStrategy])
def test_num_nodes_that_is_forgotten_under_slurm(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on each of two nodes; one error of rank 0 instead of four."""
    variables = {"NTASKS": 4, "NTASKS_PER_NODE": 2, "NNODES": 2, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 7}
    for name, value in {**variables, "JOB_NAME": "relay", "NODELIST": "127.0.0.1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setattr("strategies.lightning.launch.environment._FIRST_SECONDS", 0.0)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # Lightning sets it, and no other test would see messages

    def build() -> Trainer:
        return Trainer(accelerator="cpu", devices=2, strategy=strategy(), logger=False)

    with pytest.raises(MisconfigurationException, match=r"has started 4 processes.*num_nodes=1 hosts make 2"):
        build()
    monkeypatch.setenv("SLURM_PROCID", "3")
    with pytest.raises(SystemExit) as ended:
        build()
    assert ended.value.code == 1
