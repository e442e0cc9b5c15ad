"""A warning about the auxiliary loss of routers."""

import warnings
from types import SimpleNamespace

import pytest
from torch import nn

from strategies.lightning.features.layers.block_settings import warn_of_router_loss
from strategies.pipeline.executor.settings import Settings


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
