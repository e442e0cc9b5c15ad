"""Which modules stage 3 gathers together, which models it refuses, and initial values of modules without any."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from strategies.sharding.initialise import give_values, only_in_checkpoints
from strategies.sharding.model import check_model, find_blocks


def layers(number: int = 3) -> list[nn.Module]:
    return [nn.Linear(3, 3) for _ in range(number)]


class Model(nn.Module):
    """Blocks, blocks in a list of lists, and layers that are none."""

    def __init__(self, change: Callable[[Any], None] = lambda model: None) -> None:
        super().__init__()
        self.head, self.blocks = nn.Linear(3, 3), nn.ModuleList(layers())
        self.nested = nn.ModuleList([nn.ModuleList(layers(1)), nn.Sequential(*layers(2)), nn.ReLU()])
        change(self)


def share_weight(model: Any) -> None:
    model.blocks[1].weight = model.head.weight


def share_block(model: Any) -> None:
    model.again = model.blocks[2]


@pytest.mark.parametrize(
    ("change", "left_out"), [(lambda model: None, []), (share_weight, ["blocks.1"]), (share_block, ["blocks.2"])]
)
def test_blocks(change: Callable[[Any], None], left_out: list[str]) -> None:
    expected = ["blocks.0", "blocks.1", "blocks.2", "nested.0.0", "nested.1"]
    assert list(find_blocks(Model(change))) == [path for path in expected if path not in left_out]


def hook(model: Any) -> None:
    model.head.weight.register_hook(lambda grad: grad)


def set_parameter(parameter: torch.Tensor) -> Callable[[Any], None]:
    return lambda model: model.blocks[0].register_parameter("own", nn.Parameter(parameter))


def lazy(model: Any) -> None:
    model.head = nn.LazyLinear(3)


def compiled(model: Any) -> None:
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_parameter(torch.tensor(1.0)), "parameter blocks.0.own of Model by rows: it is a scalar"),
        (set_parameter(torch.ones(0, 3)), "parameter blocks.0.own of Model by rows: it has no elements"),
        (set_parameter(torch.ones(4, 2).T), "parameter blocks.0.own of Model by rows: its memory is not contiguous"),
        (set_parameter(torch.ones(2, dtype=torch.complex64)), "it is complex"),
        (
            set_parameter(torch.ones(2, dtype=torch.float64)),
            "blocks.0 of Model has trained parameters of several types",
        ),
        (hook, "parameter head.weight of Model by rows: it has gradient hooks"),
        (lazy, "head.weight of Model by rows: it has no shape yet"),
        (compiled, "blocks.0._orig_mod is compiled"),
    ],
)
def test_refused(change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(Model(change))
    check_model(Model())


class Bare(nn.Module):
    """A module without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_initial_values_depend_on_names_and_keep_ties() -> None:
    torch.manual_seed(0)
    made = []
    for names in (["first", "second"], ["second", "first"]):
        with torch.device("meta"):
            model = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
            model["tied"] = nn.Linear(3, 3)
        model["tied"].weight = model["first"].weight
        give_values(model, list(model.modules()), torch.device("cpu"))
        assert model["tied"].weight is model["first"].weight
        made.append(model.state_dict())
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not torch.equal(made[0]["first.weight"], made[0]["second.weight"])


def test_modules_that_cannot_be_initialised() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Bare())
    with pytest.raises(ValueError, match="table of 0 is on the meta device"):  # not in a checkpoint
        only_in_checkpoints(model)
    model[0].table = torch.ones(2)
    assert only_in_checkpoints(model) == {
        "0.weight": "weight of 0 is on the meta device, but Bare has no method reset_parameters to initialise it. Add "
        "this method, or load a checkpoint that has it."
    }
    give_values(model, list(model.modules()), torch.device("cpu"))
    assert model[0].weight.isnan().all() and not only_in_checkpoints(model)
