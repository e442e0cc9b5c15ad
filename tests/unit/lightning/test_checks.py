"""Warnings about models that train otherwise than in one process, and launches that are refused."""

import warnings
from types import SimpleNamespace

import pytest
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn

from strategies import RPCSequentialStrategy
from strategies.commands.failure import Failure
from strategies.lightning.checks import (
    as_misconfiguration,
    check_numbering,
    warn_of_compiled_model,
    warn_of_router_loss,
)
from strategies.pipeline.executor.settings import Settings
from trainer import Trainer


class Mixture(nn.Module):
    """A mixture of experts, as its configuration tells."""

    def __init__(self, output_router_logits: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(output_router_logits=output_router_logits)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "has_loss", "warns"),
    [("1f1b", 4, True, True), ("1f1b", 1, True, False), ("1f1b", 4, False, False), ("gpipe", 4, True, False)],
)
def test_an_auxiliary_loss_of_each_micro_batch(schedule: str, microbatches: int, has_loss: bool, warns: bool) -> None:
    model = nn.ModuleDict({"model": Mixture(has_loss)})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_router_loss(model, Settings(schedule=schedule, microbatches=microbatches))
    assert ["model, a Mixture, adds the auxiliary loss" in str(w.message) for w in said] == [True] * warns


def test_a_model_that_is_compiled_as_a_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_compiled_model("model.layers")
    with pytest.warns(UserWarning, match="Compile the blocks instead"):
        warn_of_compiled_model("model._orig_mod.layers")


def test_an_error_of_a_layer_in_another_process_is_no_misconfiguration() -> None:
    error = Failure.of(ValueError("of a layer"), "stage 0", "unpacking its layers").exception()
    with pytest.raises(ValueError, match="of a layer"), as_misconfiguration():
        raise error
    with pytest.raises(MisconfigurationException, match="of a setting"), as_misconfiguration():
        raise ValueError("of a setting")


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
