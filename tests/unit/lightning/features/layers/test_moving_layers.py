"""Runs in which layers cannot move to other stages, and descriptions of moves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from strategies.lightning.features.layers.moving_layers import check_can_move, check_movable, moves


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"devices": [torch.device("cpu"), torch.device("cuda:0")]},
            r"rebalance\(\) is for stages on CPUs, but one is on cuda:0",
        ),
        ({"is_external": True}, "starts workers, but torchrun, SLURM or the like have started those of this run"),
    ],
)
def test_runs_in_which_layers_cannot_move(given: dict[str, Any], match: str) -> None:
    fine: dict[str, Any] = {"num_pipelines": 1, "is_external": False, "devices": [torch.device("cpu")] * 2}
    check_movable("rebalance()", **fine, gathers=True, profiles=False)
    with pytest.raises(MisconfigurationException, match=match):
        check_movable("rebalance()", **{**fine, **given}, gathers=True, profiles=False)


def test_layers_that_are_divided_do_not_move() -> None:
    ranks = SimpleNamespace(world_size=1, num_pipelines=2, world=None)  # tensor_parallel_size=2
    run: Any = SimpleNamespace(ranks=ranks, devices=[torch.device("cpu")], gathers=True, is_profiled=False)
    with pytest.raises(MisconfigurationException, match="tensor_parallel_size is larger than 1"):
        check_can_move("rebalance()", run)


def test_descriptions_name_the_layers_and_both_stages() -> None:
    assert moves([6, 6], [5, 7], [0, 1]) == "layer 5 from stage 0 to the driver"
    assert (
        moves([4, 4, 4], [2, 5, 5], [0, 1, 2])
        == "layers 2 to 3 from stage 0 to stage 1, layer 7 from stage 1 to the driver"
    )
    assert moves([2, 2, 2, 2], [2, 1, 3, 2], [0, 1, 0, 1]) == "layer 3 from the driver to stage 0"
    assert moves([2, 2, 2, 2], [2, 3, 1, 2], [1, 0, 0, 1]) == "no layer, between processes"
