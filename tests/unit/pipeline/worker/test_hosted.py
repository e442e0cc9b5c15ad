"""A stage on a worker: its commands, called without a driver in this process."""

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from strategies.common.activity import Activity
from strategies.common.waiting import wait_here
from strategies.optim.calls import hyperparameters
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.schedule.program import ranks_of
from strategies.pipeline.schedule.tables import loop
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.state.stage_state import StageState
from strategies.pipeline.transport.channel import ORDERS_TAG, Receiver, Sender
from strategies.pipeline.transport.interface import HostTransport
from strategies.pipeline.worker.hosted import HostedStage
from strategies.pipeline.worker.setup import StageSetup


def hosted(layers: nn.Sequential, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> HostedStage:
    """Stage 0; the driver is rank 1 of the group."""
    (own,) = cut(layers, [len(layers)])
    setup = StageSetup(0, "cpu", False, placement=loop(2))
    state = StageState.capture(own, [*own.parameters()], [optimizer])
    transport = HostTransport(group, torch.device("cpu"), wait_here)
    orders = Receiver(group, 1, device=torch.device("cpu"), tag=ORDERS_TAG)
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
    channel = Sender(groups[1], 0, tag=ORDERS_TAG)
    sent: list[Any] = [[("zero_grad", (0, True), {})], 3, None]
    for order in sent:
        channel.send(torch.frombuffer(bytearray(pickle.dumps(order)), dtype=torch.uint8), 0, 0)
    assert [stage.next_order() for _ in sent] == sent
