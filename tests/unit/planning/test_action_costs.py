"""What the actions of a layer cost: each part is measured by itself, and counts where a schedule runs it."""

from typing import Any

import pytest
import torch
from sleep_layer import READ_SECONDS, Sleep, only_sleep_takes_time
from torch import Tensor, nn

from strategies.pipeline.partition.model_costs import Costs, Example, costs_of
from strategies.planning.action_costs import ByAction, PlannedLayer, model_costs, transfer_seconds

CPU = torch.device("cpu")
ROWS, WIDTH, FLOAT_BYTES = 4, 6, 4
READS_SECONDS = 20 * READ_SECONDS


class Model(nn.Module):
    """A linear layer, the pipelined layers, and parts that sleep for a multiple of a time before and after these."""

    def __init__(self, *layers: nn.Module, seconds: float = 0.0) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sleep(2 * seconds, 4 * seconds))
        self.after = Sleep(3 * seconds, 5 * seconds)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layers(self.before(x)))


def measured(model: Model, **settings: Any) -> Costs[PlannedLayer, Any]:
    example = Example(model, torch.rand(ROWS, WIDTH))
    return costs_of(model, model.layers, example, ByAction(budget_seconds=0.001, **settings), CPU)


def test_seconds_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    only_sleep_takes_time(monkeypatch)
    unit = 0.1
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]  # the input of the first one requires no gradient
    model = Model(nn.Sequential(*linear, Sleep(3 * unit, 6 * unit)), Sleep(5 * unit, 2 * unit), seconds=unit)
    expected = [unit * number for number in (3, 6, 6, 5, 2, 2, 8, 4)]
    costs = measured(model)
    first, second = (layer.costs for layer in costs.layers)
    driver = costs.driver.costs
    parts = [first.forward, first.input_grad, first.whole, second.forward, second.whole]
    parts += [driver.before, driver.after, driver.before_backward]
    assert parts == pytest.approx(expected, abs=READS_SECONDS)
    assert 0 < first.weight_grad < READS_SECONDS
    assert second.weight_grad == 0 and second.input_grad == second.whole  # nothing can wait
    assert not costs.not_measured


def test_large_products_are_split() -> None:
    """The gradients of the weights of a linear layer take about as long as those of its inputs."""
    layer, value = nn.Linear(512, 512), torch.rand(512, 512, requires_grad=True)
    example = Example(layer, value)
    for _ in range(10):
        (costs,) = ByAction(budget_seconds=0.05).layers(nn.Sequential(layer), value, example, CPU)
        share = costs.costs.weight_grad / costs.costs.whole
        if 0.25 < share < 0.75:
            break
    assert 0.25 < share < 0.75
    assert costs.held.output_size == 512 * 512 * FLOAT_BYTES


def test_costs_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    only_sleep_takes_time(monkeypatch)
    unit = 0.003
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Sleep(2 * unit, 4 * unit))
    value = torch.rand(ROWS, WIDTH, requires_grad=True)
    hidden, parameters = ROWS * WIDTH * FLOAT_BYTES, 2 * (WIDTH * WIDTH + WIDTH) * FLOAT_BYTES
    measure = ByAction(budget_seconds=0.001)
    (found,) = (each.costs for each in measure.layers(nn.Sequential(layer), value, Example(layer, value), CPU))
    times = [found.forward, found.input_grad, found.whole]
    assert times == pytest.approx([2 * unit, 4 * unit, 4 * unit], abs=READS_SECONDS) and found.weight_grad > 0
    assert found.activation_bytes > hidden
    assert found.kept == 4 * hidden  # the inputs and the gradients of two products
    assert found.parameter_bytes == 4 * parameters


def test_the_driver_has_what_is_outside_the_layers() -> None:
    costs = measured(Model(nn.Linear(WIDTH, WIDTH)), param_scale=3)
    assert costs.driver.parameter_bytes == 3 * (WIDTH * WIDTH + WIDTH) * FLOAT_BYTES
    assert costs.driver.costs.after_bytes > 0


class Wide(nn.Linear):
    """Has a parameter of 32 MiB besides."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.zeros(2**23))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table[0]


def test_steps_of_an_optimizer() -> None:
    """Measured if asked for; of a large parameter on a part, whose time is scaled."""
    model = Model(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False), Wide())
    without, costs = measured(model), measured(model, with_steps=True)
    assert all(layer.costs.step == 0 for layer in without.layers) and without.driver.step_seconds == 0
    small, frozen, wide = (layer.costs.step for layer in costs.layers)
    assert frozen == 0 < 5 * small < wide
    assert costs.driver.step_seconds > 0 and model_costs(costs).driver_step == costs.driver.step_seconds


def test_the_model_of_a_search() -> None:
    costs = measured(Model(nn.Linear(WIDTH, 2**22 // ROWS), nn.Linear(2**22 // ROWS, WIDTH), Sleep(0.0, 0.0)))
    model = model_costs(costs)
    first, large, last = model.transfers
    assert 0 < first == last < large  # 16 MiB
    assert model_costs(costs, in_reverse=True).transfers[1] > 2 * first
    assert list(model.layers) == [layer.costs for layer in costs.layers]
    assert list(model_costs(costs, in_reverse=True).layers) == list(model.layers)[::-1]
    assert model.driver == costs.driver.costs and model.action > 0


def test_more_bytes_take_longer_to_send() -> None:
    small, large = transfer_seconds(1), transfer_seconds(2**26)
    assert 0 < small < large


def test_of_a_model_that_does_not_call_its_layers() -> None:
    class Other(Model):
        def forward(self, x: Tensor) -> Tensor:
            return x

    costs = measured(Other(nn.Linear(WIDTH, WIDTH)))
    assert "does not call it" in costs.not_measured
    assert costs.driver.costs.after == 0 < costs.driver.parameter_bytes
    assert costs.layers[0].costs.forward > 0


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_a_transfer_of_nothing(num_bytes: int) -> None:
    assert transfer_seconds(num_bytes) > 0
