"""Tensors that layers leave in attributes in their forward pass: the value where that is right, else an error."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, check, fit, small_layers
from parity_parts import Leaves
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from strategies import RPCSequentialStrategy
from strategies.common.stage_layers import StageLayers
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.stage.side_outputs import (
    Attribute,
    Placeholder,
    Placeholders,
    SideOutputs,
    WithSideOutputs,
    is_fresh,
)

LEFT = {"aux", "losses", "stats", "made", "average"}


def found_in(outputs: SideOutputs) -> set[tuple[int, str]]:
    return {(k, name) for _, k, name in outputs.find()}


def test_what_is_found() -> None:
    layers = nn.Sequential(nn.Tanh(), Leaves(), nn.Linear(WIDTH, WIDTH), nn.GELU())
    hooked = layers[2]
    hooked.register_forward_hook(lambda module, inputs, output: setattr(module, "seen", [output]))
    outputs = SideOutputs.of(1, layers)
    assert outputs is not None
    assert outputs.find() == ()
    layers(torch.rand(3, WIDTH))
    new = outputs.find()
    assert {(k, name) for _, k, name in new} == {*((2, name) for name in LEFT), (3, "seen")}
    assert all(type(each) is Attribute and each.stage == 1 for each in new)
    layers(torch.rand(3, WIDTH))
    assert outputs.find() == ()
    layers[1].late = {"x": torch.zeros(1)}
    assert found_in(outputs) == {(2, "late")}
    with torch.inference_mode():
        layers[1].later = torch.zeros(1)
    assert found_in(outputs) == {(2, "later")}


def test_layers_of_torch_are_not_looked_at() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2), nn.TransformerEncoderLayer(2, 1, 2), nn.BatchNorm1d(2))
    assert SideOutputs.of(0, layers) is None


def test_an_optimizer_changes_no_side_output() -> None:
    layer = Leaves()
    outputs = SideOutputs.of(0, layer)
    assert outputs is not None
    with torch.no_grad():
        layer.weight.mul_(2)
    assert outputs.find() == ()


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda placeholder: torch.ones(()) + placeholder,
    "radd": lambda placeholder: placeholder + 1,
    "multiply": lambda placeholder: 0.1 * placeholder,
    "stack": lambda placeholder: torch.stack([torch.ones(()), placeholder]),
    "sum": lambda placeholder: sum(placeholder),
    "torch": lambda placeholder: torch.mean(placeholder),
    "item": lambda placeholder: placeholder.item(),
    "append": lambda placeholder: placeholder.append(1),
    "values": lambda placeholder: placeholder.values(),
    "key": lambda placeholder: placeholder["x"],
    "length": len,
    "truth": lambda placeholder: 1 if placeholder else 2,
    "number": float,
    "equal": lambda placeholder: placeholder == 1,
    "format": lambda placeholder: f"{placeholder:.3f}",
    "iterate": lambda placeholder: [*placeholder],
    "contains": lambda placeholder: 1 in placeholder,
}


@pytest.mark.parametrize("use", USES)
def test_a_placeholder_cannot_be_used(use: str) -> None:
    placeholder = Placeholder("layer 0 leaves it", [1])
    with pytest.raises(RuntimeError, match="layer 0 leaves it"):
        USES[use](placeholder)


def test_what_can_be_done_with_a_placeholder() -> None:
    placeholder = Placeholder("layer 0 leaves it", [1])
    assert (
        repr(placeholder) == f"{placeholder}" == "<layer 0 leaves it>"
        and placeholder is not None
        and not hasattr(placeholder, "__deepcopy__")
    )
    assert copy.deepcopy(placeholder) == pickle.loads(pickle.dumps(placeholder)) == [1]
    assert hash(placeholder) == hash(placeholder)


def two_stages() -> tuple[list[StageLayers], Placeholders]:
    stages = cut(nn.Sequential(Leaves(), nn.Tanh(), nn.Tanh(), Leaves()), [2, 2])
    return stages, Placeholders(stages)


def test_placeholders_of_another_stage() -> None:
    stages, placeholders = two_stages()
    layer = stages[0][0]
    assert placeholders.unwrapped(5) == 5
    assert (
        placeholders.unwrapped(
            WithSideOutputs(7, (Attribute(0, 1, "aux"), Attribute(0, 1, "losses"), Attribute(0, 1, "made")))
        )
        == 7
    )
    placeholders.insert(lambda value: True)
    for name in ("aux", "losses", "made"):
        pattern = (
            rf"layer 0, a Leaves, leaves tensors in its attribute '{name}' on stage 0 \(layers 0 to 1: Leaves, Tanh\)"
        )
        with pytest.raises(RuntimeError, match=pattern + ".*Return them from the layer"):
            bool(getattr(layer, name))
    layer.losses = []  # as training loops do ahead of a pass
    placeholders.insert(lambda value: True)
    assert type(layer.losses) is Placeholder
    placeholders.end()
    assert (layer.aux, layer.losses) == (None, []) and not hasattr(layer, "made")


def test_placeholders_of_the_own_stage() -> None:
    """The layer itself always sees what it has left."""
    stages, placeholders = two_stages()
    layer = stages[1][1]
    layer(torch.rand(2, WIDTH))
    value = layer.aux
    placeholders.unwrapped(WithSideOutputs(0, (Attribute(1, 2, "aux"), Attribute(1, 2, "losses"))))
    placeholders.insert(is_fresh)
    assert layer.aux is value and type(layer.losses) is Placeholder and placeholders.have_graphs
    placeholders.insert(lambda value: False)
    assert type(layer.aux) is Placeholder and not placeholders.have_graphs
    with placeholders.removed_for_layers():
        layer(torch.rand(2, WIDTH))
        assert len(layer.losses) == 2 and layer.aux is not value
        value = layer.aux
    with pytest.raises(
        RuntimeError, match=r"'aux' on stage 1 .*once for each micro-batch: .*only those of the last.*1f1b.*never"
    ):
        layer.aux.item()
    placeholders.restore()
    assert layer.aux is value
    placeholders.insert(lambda value: False)
    placeholders.end()
    assert layer.aux is value and len(layer.losses) == 2


# In training


class Both(Small):
    """A layer on either of two stages leaves tensors; ``training_step`` reads them, and keeps what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        layers = small_layers()
        layers[0], layers[3] = Leaves(), Leaves()
        self.sequential_module = nn.Sequential(*layers)
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for place in (0, 3):
            for way, read in READS.items():
                key, layer = f"{place} {way}", self.sequential_module[place]
                try:
                    read(layer)
                    self.seen[key] = "read"
                except RuntimeError as error:
                    if self.seen.get(key) != "read":  # the last micro-batch is not recomputed
                        self.seen[key] = str(error)
        return loss


class Aux(Both):
    """Its loss has a term of the layer on the driver, which leads back into the other stage."""

    def __init__(self) -> None:
        super().__init__()
        for place in (0, 3):  # what depends on the number of calls depends on that of micro-batches
            self.sequential_module[place].constant = torch.zeros(2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]), batch[1]) + 0.1 * self.sequential_module[3].aux
        self.log("loss", loss)
        return loss


class LeavesOne(nn.Linear):
    aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.pow(2).mean()
        return y


class DropsAux(Small):
    """Drops the tensor that a layer has left, when its loss depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[3] = LeavesOne(WIDTH, WIDTH)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        layer = self.sequential_module[3]
        loss = mse_loss(self(batch[0]), batch[1]) + 0.1 * layer.aux
        layer.aux = None
        return loss


class Unread(Both):
    """Nobody reads what the layers leave, but the layers themselves."""

    training_step = Small.training_step


READS: dict[str, Callable[[Any], Any]] = {
    "aux": lambda layer: torch.zeros(()) + layer.aux,
    "losses": lambda layer: sum(layer.losses[-1:]),
    "stats": lambda layer: layer.stats["mean"][0],
    "made": lambda layer: getattr(layer, "made", [0])[0] * 2,
    "guarded": lambda layer: layer.aux * 2 if layer.aux is not None else 0.0,
}


def read_under(**options: Any) -> tuple[dict[str, str], list[Any]]:
    """What came of reading, and what the layer on the worker has in its attributes afterwards."""
    outcome = fit(Both, RPCSequentialStrategy(**{"balance": [3, 3], "microbatches": 2, **options}), 2, max_steps=2)
    layer = outcome.model.sequential_module[0]
    return outcome.model.seen, [layer.aux, layer.losses, layer.stats, hasattr(layer, "made"), layer.calls]


def everything() -> dict[str, Any]:
    settings = {"microbatches": 2, "balance": [3, 3]}
    check(Aux, stages=(2,), strategy={**settings, "schedule": "1f1b", "checkpoint": "never"})
    check(DropsAux, stages=(2,), strategy={**settings, "schedule": "zb-h1", "checkpoint": "never"})
    check(Unread, stages=(2,), strategy={**settings, "microbatches": 1})
    return {
        "gpipe": read_under(checkpoint="never"),
        "one": read_under(checkpoint="never", microbatches=1),
        "1f1b": read_under(checkpoint="never", schedule="1f1b"),
        "recomputed": read_under(checkpoint="always", schedule="1f1b"),
    }


def test_side_outputs_in_training() -> None:
    found = run(everything, timeout_seconds=175)
    for case, (seen, after) in found.items():
        assert after[:4] == [None, [], {"mean": None}, False] and after[4] > 0
        right = {"3 aux", "3 made", "3 guarded"} if case == "1f1b" else set()
        assert {key for key, message in seen.items() if message == "read"} == right, case
        for key in seen.keys() - right:
            place = key[0]
            where = {"0": "stage 0 .*in another process", "3": "stage 1 .*1f1b.*checkpoint="}[place]
            assert re.search(rf"layer {place}, a Leaves, leaves tensors in its attribute .*{where}", seen[key]), seen[
                key
            ]
