"""A stage on a worker: its commands, called without a driver in this process."""

from pathlib import Path

import torch
from torch import Tensor, nn

from strategies.common.activity import Activity
from strategies.common.waiting import wait_here
from strategies.launch.session import join_group
from strategies.optim.calls import hyperparameters
from strategies.optim.restricted import numbers_of, taken_apart
from strategies.pipeline.worker.hosted import HostedStage
from strategies.pipeline.worker.payload import Payload
from strategies.pipeline.worker.wiring import to_neighbours


def hosted(folder: Path, layers: nn.Sequential, optimizer: torch.optim.Optimizer) -> HostedStage:
    group = join_group(f"{folder.as_uri()}/data", 0, 1, 30)
    numbers = [numbers_of(optimizer, list(layers.parameters()))]
    payload = Payload(0, layers, 0, "cpu", False, optimizers=[taken_apart(optimizer)], numbers=numbers)
    return HostedStage(payload, to_neighbours(payload, group, wait_here, wait_here), Activity())


def test_what_a_gradient_scaler_sets_applies_to_one_step(tmp_path: Path) -> None:
    """A fused optimizer divides gradients by ``grad_scale``; a model may also call ``step`` without the scaler."""
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=True)
    stage, before = hosted(tmp_path, nn.Sequential(layer), optimizer), layer.weight.detach().clone()

    def change(scaling: dict[str, Tensor]) -> Tensor:
        start, layer.weight.grad = layer.weight.detach().clone(), torch.full_like(before, 8.0)
        stage.step(0, hyperparameters(optimizer), scaling, torch.float32, {})
        return start - layer.weight.detach()

    scaling = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)}
    torch.testing.assert_close(change(scaling), torch.full_like(before, 2.0))
    torch.testing.assert_close(change({}), torch.full_like(before, 8.0))
    torch.testing.assert_close(change({**scaling, "found_inf": torch.tensor(1.0)}), torch.zeros_like(before))
    torch.testing.assert_close(change({}), torch.full_like(before, 8.0))
