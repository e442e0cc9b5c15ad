"""Launches that are refused: ranks that are numbered in another way, or that cannot become workers."""

import pytest
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from strategies import RPCSequentialStrategy
from strategies.lightning.launch.environment import check_numbering
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
