"""Splitting an ``nn.Sequential`` into stages."""

from typing import Any

import pytest
from torch import nn

from strategies.pipeline.partition.sequential import check_balance, cut


def test_a_balance_that_fits_is_returned_as_a_list() -> None:
    assert check_balance((1, 2), 3, 2) == [1, 2]


@pytest.mark.parametrize(
    ("balance", "num_layers", "num_stages", "message"),
    [
        (
            [2, 2],
            3,
            2,
            r"The provided balance sum: 4 does not match your Sequential length: 3\. Give each layer to exactly one",
        ),
        ([1, 2], 3, 3, r"The provided balance \[1, 2\] is for 2 stages, but there are 3 devices\. .*set devices=2"),
        ([3], 3, 2, r"The provided balance \[3\] is for 1 stages, but there are 2 devices\."),
        ([3, 0], 3, 2, r"The provided balance \[3, 0\] must consist of whole numbers above 0: every stage needs"),
        ([4, -1], 3, 2, r"The provided balance \[4, -1\] must consist of whole numbers above 0"),
        ([1.5, 1.5], 3, 2, r"The provided balance \[1\.5, 1\.5\] must consist of whole numbers"),
        ([True, 2], 3, 2, r"The provided balance \[True, 2\] must consist of whole numbers"),
        ("12", 3, 2, r"The balance must be a list of numbers of layers, one for each device, got '12'\."),
    ],
)
def test_a_balance_that_does_not_fit(balance: Any, num_layers: int, num_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_balance(balance, num_layers, num_stages)


def test_blocks_that_a_model_calls_from_the_last_to_the_first() -> None:
    blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    assert [list(stage._modules) for stage in cut(blocks, [1, 2], is_reversed=True)] == [["2"], ["1", "0"]]
    assert list(blocks._modules) == ["0", "1", "2"]


def test_stages_share_layers_and_keep_their_names() -> None:
    module = nn.Sequential()
    for name in ("embed", "block", "head"):
        module.add_module(name, nn.Linear(2, 2))
    first, second = cut(module, [1, 2])
    assert list(dict(first.named_parameters())) == ["embed.weight", "embed.bias"]
    assert list(dict(second.named_children())) == ["block", "head"]
    assert second[1] is module[2]


def test_a_layer_at_two_places_is_at_two_places() -> None:
    relu = nn.ReLU()
    module = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu, nn.Linear(2, 2))
    stages = cut(module, [2, 3])
    assert [type(layer).__name__ for stage in stages for layer in stage] == [type(layer).__name__ for layer in module]
    assert [len(stage) for stage in stages] == [2, 3]
