"""The state of a stage, taken from a slot: another worker goes on as the first one."""

import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from parity_layers import Migrates
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from strategies.common.activity import Activity
from strategies.common.waiting import wait_here
from strategies.optim.calls import hyperparameters
from strategies.pipeline.control.operations import Strides, TensorOperation, WorkerTensor
from strategies.pipeline.control.parts import Part, PartKind
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.schedule.program import ranks_of
from strategies.pipeline.schedule.tables import loop
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.state.carriers import InSlot
from strategies.pipeline.state.held import HeldState
from strategies.pipeline.state.stage_state import StageState, differing
from strategies.pipeline.transport.interface import HostTransport
from strategies.pipeline.transport.link import Links
from strategies.pipeline.transport.slots import Slot, have_slots
from strategies.pipeline.worker.hosted import HostedStage
from strategies.pipeline.worker.setup import StageSetup

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not have_slots(), reason="files in memory need Linux")


class Noted(nn.Module):
    """A layer whose attributes share a tensor with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.notes: list[Any] = ["a", self.weight]
        self.view = self.weight.detach()[1:]


@pytest.fixture
def slot() -> Iterator[Slot]:
    own = Slot.created("test")
    yield own
    own.close()


def stage_of(layers: nn.Sequential, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> HostedStage:
    """Stage 0 with a copy of its layers; the driver is rank 1 of the group."""
    (own,), (average,) = cut(layers, [len(layers)]), cut(nn.Sequential(nn.Linear(3, 3), Noted()), [2])
    return started(StageState.capture(own, [*own.parameters()], [optimizer], [average]), group)


def started(state: StageState, group: ProcessGroup) -> HostedStage:
    setup = StageSetup(0, "cpu", False, placement=loop(2))
    edges = Edges(0, ranks_of(setup.placement), HostTransport(Links(group), CPU, wait_here))
    return HostedStage(setup, state, edges, Activity())


def taken_over(slot: Slot, number: int, group: ProcessGroup) -> HostedStage:
    """The stage that begins with a snapshot."""
    return started(InSlot(slot.address, number).take(lambda storages: None), group)


def give_grads(stage: HostedStage, grads: Mapping[str, Tensor | None]) -> None:
    for name, parameter in stage.held.layers.named_parameters():
        parameter.grad = grads[name]


def step(stage: HostedStage, optimizer: torch.optim.Optimizer, values: Tensor) -> None:
    named, mean = stage.held.layers.named_parameters(), float(values.mean())
    give_grads(stage, {name: torch.full_like(p, mean) for name, p in named})
    stage.step(0, hyperparameters(optimizer), {}, torch.float32, {})


def values_of(stage: HostedStage) -> dict[str, Tensor]:
    """Everything that a stage holds, by name."""
    states = stage.held.optimizers[0].state.values()
    return {
        **{f"layers.{name}": value for name, value in stage.held.layers.state_dict().items()},
        **{f"average.{name}": value for name, value in stage.held.copies[0].state_dict().items()},
        **{f"state {k}.{name}": value for k, state in enumerate(states) for name, value in state.items()},
        **{f"computed {number}": value for number, value in stage._values.computed.items()},
        "random": torch.get_rng_state(),
    }


def test_a_stage_goes_on_where_the_first_one_was(groups: tuple[ProcessGroup, ProcessGroup], slot: Slot) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), Noted())
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    first = stage_of(layers, optimizer, groups[0])
    step(first, optimizer, torch.ones(1))
    weight = WorkerTensor((0, "1.weight"), Strides((3,), (1,), 0, torch.float32), None)
    first.compute(TensorOperation(("aten", "clone", "default"), (weight,), {}, (4,)), torch.float32)
    first.compute(TensorOperation(("aten", "view", "default"), (weight, [3, 1]), {}, (5,)), torch.float32)
    first.snapshot(2, slot.address)
    expected = {name: value.clone() for name, value in values_of(first).items()}
    drawn = torch.rand(3), random.random()
    step(first, optimizer, torch.ones(1))
    second = taken_over(slot, 2, groups[0])
    ours = values_of(second)
    assert list(ours) == list(expected) and all(torch.equal(ours[name], expected[name]) for name in expected)
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]
    noted: Any = second.held.layers[1]
    assert noted.notes[1] is noted.weight and noted.view.data_ptr() == noted.weight[1:].data_ptr()
    step(second, optimizer, torch.ones(1))
    again, undisturbed = values_of(second), values_of(first)
    changed = [name for name in expected if not name.startswith("random")]
    assert all(torch.equal(again[name], undisturbed[name]) for name in changed)  # computed 5 is a view of the weight
    assert not torch.equal(again["computed 5"], expected["computed 5"])
    second.snapshot(3, slot.address)
    assert slot.number == 3


def test_gradients(groups: tuple[ProcessGroup, ProcessGroup], slot: Slot) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), Noted())
    first = stage_of(layers, torch.optim.SGD(layers.parameters(), lr=0.1), groups[0])
    grads = {name: torch.randn_like(p) if name != "0.bias" else None for name, p in layers.named_parameters()}
    give_grads(first, grads)
    first.snapshot(0, slot.address)
    ours = taken_over(slot, 0, groups[0]).held.capture(Part(PartKind.GRADS))
    assert list(ours) == list(grads) and ours["0.bias"] is None
    assert all(torch.equal(ours[name], grad) for name, grad in grads.items() if grad is not None)


def test_states_are_compared_by_the_values_of_views() -> None:
    def state(value: Tensor) -> StageState:
        layer = nn.Linear(2, 2).requires_grad_(False)
        nn.init.ones_(layer.weight), nn.init.ones_(layer.bias)
        layer.register_buffer("turned", value)
        return StageState.capture(cut(nn.Sequential(layer), [1])[0], [], [], [])

    numbers = torch.complex(torch.randn(3), torch.randn(3))
    for turned in (numbers.conj(), numbers.conj().imag, numbers.real):
        assert differing(state(turned), state(turned.clone().resolve_conj().resolve_neg())) == []
        assert differing(state(turned), state(turned + 1)) == ["0.turned"]


def test_an_object_that_cannot_be_pickled_is_named(groups: tuple[ProcessGroup, ProcessGroup], slot: Slot) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), Noted())
    stage = stage_of(layers, torch.optim.SGD(layers.parameters(), lr=0.1), groups[0])
    stage.snapshot(0, slot.address)
    noted: Any = layers[1]
    noted.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"no snapshot can be taken of stage 0 .* layer 1, a Noted, cannot be sent"):
        stage.snapshot(1, slot.address)
    assert slot.number is None


def test_a_state_dict_of_some_layers_is_loaded_into_these_only() -> None:
    layers = nn.Sequential(Migrates(3), Migrates(3))
    (own,) = cut(layers, [2])
    matrix = torch.randn(3, 3)
    HeldState(StageState(own), [], CPU).place(Part(PartKind.STATE_DICT), (["1"], {"1.matrix": matrix}))
    assert torch.equal(layers[1].weight, matrix.t())
