"""A stage on a worker: its commands, called without a driver in this process."""

import pickle
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from strategies.common.activity import Activity
from strategies.common.waiting import wait_here
from strategies.optim.calls import hyperparameters
from strategies.optim.gradients import add_gradient, scale_gradients
from strategies.pipeline.control.commands import NamedParameters
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.schedule.program import ranks_of
from strategies.pipeline.schedule.tables import loop
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.state.stage_state import StageState
from strategies.pipeline.transport.interface import HostTransport
from strategies.pipeline.transport.link import ORDERS, Link, Links, Receiver, Sender
from strategies.pipeline.worker.hosted import HostedStage
from strategies.pipeline.worker.setup import StageSetup


def hosted(layers: nn.Sequential, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> HostedStage:
    """Stage 0; the driver is rank 1 of the group."""
    (own,) = cut(layers, [len(layers)])
    setup = StageSetup(0, "cpu", False, placement=loop(2))
    state = StageState.capture(own, [*own.parameters()], [optimizer])
    links = Links(group)
    transport = HostTransport(links, torch.device("cpu"), wait_here)
    orders = Receiver(links[1], ORDERS, device=torch.device("cpu"))
    return HostedStage(setup, state, Edges(0, ranks_of(setup.placement), transport), Activity(), orders)


def test_what_a_gradient_scaler_sets_applies_to_one_step(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    """A fused optimizer divides gradients by ``grad_scale``; a model may also call ``step`` without the scaler."""
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=True)
    stage, before = hosted(nn.Sequential(layer), optimizer, groups[0]), layer.weight.detach().clone()

    def change(scaling: dict[str, Tensor]) -> Tensor:
        start, layer.weight.grad = layer.weight.detach().clone(), torch.full_like(before, 8.0)
        stage.step(0, hyperparameters(optimizer), scaling, torch.float32, {})
        return start - layer.weight.detach()

    scaling = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)}
    torch.testing.assert_close(change(scaling), torch.full_like(before, 2.0))
    torch.testing.assert_close(change({}), torch.full_like(before, 8.0))
    torch.testing.assert_close(change({**scaling, "found_inf": torch.tensor(1.0)}), torch.zeros_like(before))
    torch.testing.assert_close(change({}), torch.full_like(before, 8.0))


def test_orders_come_over_the_link(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    layer = nn.Linear(2, 2)
    stage = hosted(nn.Sequential(layer), torch.optim.SGD(layer.parameters(), lr=1.0), groups[0])
    channel = Sender(Link(groups[1], 0), ORDERS)
    sent: list[Any] = [[("zero_grad", (0, True), {})], 3, None]
    for order in sent:
        channel.send(torch.frombuffer(bytearray(pickle.dumps(order)), dtype=torch.uint8), 0, 0)
    assert [stage.next_order() for _ in sent] == sent


def test_gradients_of_an_optimizer_or_of_single_parameters_change(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    stage = hosted(nn.Sequential(first, second), torch.optim.SGD(first.parameters(), lr=1.0), groups[0])
    parameters = [*first.parameters(), *second.parameters()]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    single = NamedParameters(["0.weight", "1.bias"])
    stage.change_grads(0, partial(scale_gradients, factor=torch.tensor(3.0)))
    stage.change_grads(single, partial(add_gradient, grad=torch.tensor(1.0)))
    assert [parameter.grad.unique().item() for parameter in parameters] == [7.0, 6.0, 2.0, 3.0]
    stage.zero_grad(single, True)
    assert [parameter.grad is None for parameter in parameters] == [True, False, False, True]
    stage.zero_grad(0, False)
    assert first.bias.grad.eq(0).all() and second.weight.grad.eq(2).all()


def test_a_trace_begins_where_the_one_before_ends(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    layer = nn.Linear(2, 2)
    stage = hosted(nn.Sequential(layer), torch.optim.SGD(layer.parameters(), lr=1.0), groups[0])
    assert stage.trace({"activities": [torch.profiler.ProfilerActivity.CPU]}) is None
    torch.ones(2).cosh()
    first = stage.trace({"activities": [torch.profiler.ProfilerActivity.CPU]})
    torch.ones(2).sinh()
    second = stage.trace(None)
    assert first is not None and second is not None and stage.trace(None) is None
    assert [(b"aten::cosh" in trace, b"aten::sinh" in trace) for trace in (first, second)] == [
        (True, False),
        (False, True),
    ]
