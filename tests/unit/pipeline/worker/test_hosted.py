"""A stage on a worker: its commands, called without a driver in this process."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from strategies.common.activity import Activity
from strategies.common.waiting import wait_here
from strategies.optim.calls import hyperparameters
from strategies.optim.restricted import numbers_of, taken_apart
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.schedule.tables import loop
from strategies.pipeline.transport.channel import COMMANDS_TAG, Sender
from strategies.pipeline.transport.interface import HostTransport
from strategies.pipeline.worker.hosted import HostedStage
from strategies.pipeline.worker.payload import Payload
from strategies.pipeline.worker.wiring import to_neighbours


def hosted(layers: nn.Sequential, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> HostedStage:
    """Stage 0; the driver is rank 1 of the group."""
    numbers = [numbers_of(optimizer, list(layers.parameters()))]
    (own,) = cut(layers, [len(layers)])
    parts = [taken_apart(optimizer)]
    payload = Payload(0, own, "cpu", False, optimizers=parts, numbers=numbers, placement=loop(2))
    transport = HostTransport(group, torch.device("cpu"), wait_here)
    return HostedStage(payload, to_neighbours(payload, group, transport, wait_here), Activity())


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


def test_commands_over_the_data_plane(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    """They run in order until the end of their number; what an earlier number has left, of a failure or Ctrl-C, not."""
    layer = nn.Linear(2, 2)
    stage = hosted(nn.Sequential(layer), torch.optim.SGD(layer.parameters(), lr=1.0), groups[0])
    channel = Sender(groups[1], 0, tag=COMMANDS_TAG)

    def send(number: int, calls: Any) -> None:
        channel.send(torch.frombuffer(bytearray(pickle.dumps((number, calls))), dtype=torch.uint8), 0, 0)

    def flags(*values: bool) -> Any:
        return [("set_requires_grad", (values,), {})]

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stage.take_commands, 1)
        send(1, flags(False, False) + flags(True, False))
        send(1, None)
        running.result(10)
        assert [p.requires_grad for p in layer.parameters()] == [True, False]
        running = pool.submit(stage.take_commands, 2)
        send(1, None)
        send(1, flags(False, False))
        send(2, flags(True, True))
        send(2, [("load_grads", ({},), {})])  # lacks the gradients of both parameters
        with pytest.raises(KeyError):
            running.result(10)
        assert [p.requires_grad for p in layer.parameters()] == [True, True]
        send(2, flags(False, False))
        send(2, None)
        running = pool.submit(stage.take_commands, 3)
        send(3, None)
        running.result(10)
    assert [p.requires_grad for p in layer.parameters()] == [True, True]
