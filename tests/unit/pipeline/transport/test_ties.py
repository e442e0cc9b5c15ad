"""Which parameters several processes use, and who owns them. That they train right is in test_parity_ties.py."""

from typing import Any

import pytest
from torch import nn

from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.transport.ties import Tie, find_ties, pairs_of


def linears(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(number)))


def test_nothing_is_tied() -> None:
    module = linears(3)
    assert find_ties(cut(module, [1, 1, 1]), module[2].parameters()) == []
    module[1].weight = module[0].weight
    assert find_ties(cut(module, [2, 1])) == []  # within a stage nothing has to be done


def test_the_first_stage_owns_what_the_driver_does_not_use() -> None:
    module = linears(4)
    module[1].weight = module[2].weight = module[0].weight
    (tie,) = find_ties(cut(module, [2, 1, 1]))
    assert tie == Tie(0, {0: ("0.weight", "1.weight"), 1: ("2.weight",)}) and tie.copies == [1]


def test_the_driver_owns_what_it_uses() -> None:
    module = linears(3)
    module[1].weight = module[2].weight = module[0].weight
    (tie,) = find_ties(cut(module, [1, 1, 1]))
    assert tie.owner == 2 and tie.copies == [0, 1]
    outside = linears(3)
    (tie,) = find_ties(cut(outside, [1, 1, 1]), [outside[0].bias])
    assert tie == Tie(2, {0: ("0.bias",)}) and tie.copies == [0]


def test_a_layer_at_two_places() -> None:
    layer = nn.Linear(2, 2)
    module = nn.Sequential(layer, nn.ReLU(), layer)
    ties = find_ties(cut(module, [1, 2]))
    assert [tie.names for tie in ties] == [{0: ("0.weight",), 1: ("2.weight",)}, {0: ("0.bias",), 1: ("2.bias",)}]


def test_running_statistics_cannot_be_tied() -> None:
    def stages(norm: Any) -> list[nn.Sequential]:
        return cut(nn.Sequential(norm, nn.ReLU(), norm), [1, 2])

    message = r"layer 2, a BatchNorm1d, is used by stage 0 and by stage 1, .*Use two layers, or choose a balance"
    with pytest.raises(ValueError, match=message):
        find_ties(stages(nn.BatchNorm1d(2)))
    assert len(find_ties(stages(nn.BatchNorm1d(2, track_running_stats=False)))) == 2


def test_an_embedding_that_changes_its_weight_cannot_be_tied() -> None:
    module = nn.Sequential(nn.Embedding(5, 2, max_norm=1.0), nn.Linear(2, 2), nn.Linear(2, 5, bias=False))
    find_ties(cut(module, [1, 2]))
    module[2].weight = module[0].weight
    with pytest.raises(ValueError, match=r"parameter 0\.weight of stage 0 is tied .*max_norm=1\.0 .*Leave max_norm"):
        find_ties(cut(module, [1, 2]))


def test_exchanges_have_one_order() -> None:
    ties = [Tie(3, {1: ("a",), 2: ("b",), 3: ("c",)}), Tie(0, {0: ("d",), 2: ("e",)}), Tie(0, {0: ("f",), 1: ("g",)})]
    assert pairs_of(ties) == [(0, 1), (0, 2), (3, 1), (3, 2)]
    assert pairs_of(ties, 2) == [(0, 2), (3, 2)]
