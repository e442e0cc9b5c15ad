"""Operations on stand-ins are carried out where the values are; here the worker is an object of this process."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from answered import Answered
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.state.remote_operations import HeldValues, Holder, OnStages
from strategies.pipeline.state.stand_ins import move_to_meta


class Worker:
    """Holds modules, and does what it was told when it is asked for something."""

    def __init__(self, description: str, *modules: nn.Module) -> None:
        self.description, self.held = description, HeldValues(modules, {})
        self.commands: list[bytes] = []
        self._numbers = itertools.count()

    def send(self, command: Callable[..., Any], *arguments: Any) -> None:
        self.commands.append(pickle.dumps((command.__name__, arguments, {})))

    def readable(self) -> "Worker":
        return self

    def ask(self, command: Callable[..., Any], *arguments: Any) -> Answered:
        assert command is StageCommands.value
        self.work()
        value = self.held.value(*arguments)
        assert value is not None
        return Answered(value.clone())

    def new_number(self) -> int:
        return next(self._numbers)

    def work(self) -> int:
        """Returns how many commands there were."""
        commands, self.commands = self.commands, []
        for command, arguments, _ in map(pickle.loads, commands):
            if command == "compute":
                self.held.compute(arguments[0])
            else:
                self.held.computed.pop(*arguments)
        return len(commands)


class Spread:
    """Two modules of the same layers, of which the first four live on two workers; ``real`` has all their values."""

    def __init__(self) -> None:
        self.modules = [net(seed) for seed in (0, 1)]
        self.real = copy.deepcopy(self.modules)
        parts = [slice(0, 2), slice(2, 4)]
        self.workers = [Worker(f"stage {i}", *(module[part] for module in self.real)) for i, part in enumerate(parts)]
        self.holders = [Holder(worker) for worker in self.workers]
        for holder, part in zip(self.holders, parts, strict=True):
            for number, module in enumerate(self.modules):
                move_to_meta(module[part], module, [])
                holder.take(number, module[part])
        for module, real in zip(self.modules, self.real, strict=True):
            real[4] = module[4]

    def values(self) -> list[dict[str, Tensor]]:
        for worker in self.workers:
            worker.work()
        return [{name: value.clone() for name, value in module.state_dict().items()} for module in self.real]


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)]
    return nn.Sequential(*layers).double()


def change(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data += torch.randn(tensor.shape, dtype=torch.float64).mul(3).to(tensor.dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"use_buffers": True},
        {},
        {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
        {"multi_avg_fn": get_swa_multi_avg_fn()},
    ],
)
def test_the_averages_of_torch(options: dict[str, Any]) -> None:
    spread, whole = Spread(), net(0)
    expected = AveragedModel(whole, **options)
    expected.module.load_state_dict(net(1).state_dict())
    average = AveragedModel(net(0), **options)
    average.module = spread.modules[1]
    for step in range(4):
        for module in (whole, spread.real[0]):
            change(module, step)
        with OnStages():
            average.update_parameters(spread.modules[0])
            changed, ours = spread.values()
        expected.update_parameters(whole)
        theirs = {name: value for name, value in expected.module.state_dict().items()}
        assert changed.keys() == ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(not worker.held.computed for worker in spread.workers)
    assert all(p.is_meta for p in spread.modules[1][:4].parameters())


def test_swapping_copying_and_views() -> None:
    spread = Spread()
    before = spread.values()
    with OnStages(), torch.inference_mode():
        for one, other in zip(spread.modules[0].parameters(), spread.modules[1].parameters(), strict=True):
            kept = one.data.clone()
            one.data.copy_(other.data)
            other.data.copy_(kept)
    swapped = spread.values()
    names = dict(spread.modules[0].named_parameters())
    assert all(torch.equal(swapped[k][name], before[1 - k][name]) for k in (0, 1) for name in names)
    ours, theirs = spread.modules[0][0], spread.modules[0][2]
    with OnStages(), torch.no_grad():
        ours.weight[1:].T.mul_(2)
        ours.bias.copy_(torch.arange(3.0))
        theirs.weight.view(-1)[4:6].fill_(7)
        theirs.bias.data.fill_(theirs.weight.numel())
        theirs.bias.add_(torch.arange(3.0))
    now, *_ = spread.values()
    assert torch.equal(now["0.weight"][1:], swapped[0]["0.weight"][1:] * 2)
    assert torch.equal(now["0.weight"][0], swapped[0]["0.weight"][0]) and now["0.bias"].tolist() == [0, 1, 2]
    assert now["2.weight"].view(-1)[4:6].tolist() == [7, 7] and now["2.bias"].tolist() == [9, 10, 11]
    assert [holder.num_writes for holder in spread.holders] == [10, 10 + 1]


def test_what_needs_values_here_fetches_them() -> None:
    spread = Spread()
    weight, bias = spread.real[0][0].weight, spread.real[0][2].bias
    with OnStages():
        doubled = spread.modules[0][0].weight.detach() * 2
        assert doubled.is_meta and doubled.norm().item() == (weight * 2).norm().item()
        assert spread.modules[0][2].bias.tolist() == bias.tolist()
        assert not torch.equal(doubled, spread.modules[1][0].weight)
    assert doubled.sum().item() == (weight * 2).sum().item()
    with OnStages():
        local, total = torch.zeros(3, dtype=torch.float64), torch.ones((), dtype=torch.float64)
        local.copy_(spread.modules[0][2].bias)
        local.add_(spread.modules[0][2].bias)
        total.add_(spread.modules[0][2].bias.sum())
    assert torch.equal(local, 2 * bias) and total.item() == 1 + bias.sum().item()


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda a, b: nn.init.normal_(a), r"normal_.* draws random numbers"),
        (lambda a, b: torch.rand_like(a), r"rand_like.* draws random numbers"),
        (lambda a, b: a + b, "combines values of stage 0 and stage 1"),
        (lambda a, b: a.copy_(b), "combines values of stage 0 and stage 1"),
        (lambda a, b: torch._foreach_add_([a], [b]), "combines values of stage 0 and stage 1"),
        (lambda a, b: a.__setitem__(0, 1.0), "takes a tensor without values"),
        (lambda a, b: a.mul_(torch.empty(3, 3, device="meta")), "takes a tensor without values"),
        (lambda a, b: setattr(a, "data", b), "."),
    ],
)
def test_what_is_refused(operation: Any, message: str) -> None:
    spread = Spread()
    before = spread.values()
    with OnStages():
        arguments = [spread.modules[0][0].weight.detach(), spread.modules[0][2].weight.detach()]
        with pytest.raises((RuntimeError, TypeError), match=message):
            operation(*arguments)
    now = spread.values()
    assert all(torch.equal(now[k][name], before[k][name]) for k in (0, 1) for name in before[k])


def test_values_end_with_their_stage() -> None:
    spread = Spread()
    with OnStages():
        kept = spread.modules[0][0].weight.detach().clone()
        assert spread.workers[0].work() == 1 and len(spread.workers[0].held.computed) == 1
        spread.holders[0].end()
        with pytest.raises(RuntimeError, match="stage 0 has ended, so the values that were computed there are lost"):
            kept.mul_(2)
    del kept
    spread.workers[0].work()
    assert not spread.workers[0].held.computed
