"""The driver's part of snapshots, and which snapshot is the one to go back to."""

import copy
import random
import re
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.stage.layers import Seeds
from strategies.pipeline.state.snapshots import OwnParts, OwnState, Snapshots, Whole, check_snapshots

CPU = torch.device("cpu")


class Callable:
    """An object that can be called, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Callable) and other.calls == self.calls

    def __hash__(self) -> int:
        return self.calls


class Layer(nn.Module):
    """A layer with attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("unset", None)
        self.rate, self.name = 0.5, "first"
        self.history: list[Any] = [torch.zeros(2), {"deep": (1, [2])}]
        self.queue = deque([1, 2], maxlen=4)
        self.counts: defaultdict[str, int] = defaultdict(int, a=1)
        self.ordered = OrderedDict(b=torch.ones(1))
        self.array = numpy.zeros(3)
        self.same = self.history
        self.function, self.called = len, Callable()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.mean += x.detach().mean(0)
        return self.last


def parts_of(model: nn.Module, layers: nn.Sequential, optimizers: list[Optimizer], seeds: Seeds) -> OwnParts:
    return OwnParts(
        modules=[model],
        stages=cut(layers, [1, len(layers) - 1]),
        parameters=list(model.parameters()),
        optimizers=optimizers,
        seeds=seeds,
        holders=[],
    )


def change(model: nn.Sequential, optimizer: Optimizer, seeds: Seeds) -> None:
    """One step, and a change of everything that user code may change."""
    layer: Any = model[1]
    x = torch.randn(4, 3) + random.random() + float(numpy.random.rand())
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
    optimizer.param_groups[1]["lr"].mul_(0.5)
    seeds.next(True)
    layer.rate, layer.new, layer.training = layer.rate + 1, "added", not layer.training
    layer.history[0] += 1
    layer.history.append(layer.rate)
    layer.history[1]["deep"][1].append(3)
    layer.queue.append(int(layer.rate))
    layer.counts["b"] += 1
    layer.ordered = OrderedDict(c=1)
    layer.array += 1
    layer.called()
    layer.register_buffer("late", torch.zeros(1))
    layer.unset = torch.ones(1)
    layer.mean = layer.mean + 1
    model[0].eval()
    layer.linear.bias.requires_grad_(not layer.linear.bias.requires_grad)


def state(model: nn.Sequential, optimizer: Optimizer, seeds: Seeds) -> Any:
    layer: Any = model[1]
    names = ("rate", "history", "queue", "counts", "ordered", "array", "called", "training", "unset", "mean")
    own = {name: getattr(layer, name) for name in names}
    flags = [p.requires_grad for p in model.parameters()]
    random_numbers = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    values = model.state_dict(), optimizer.state_dict(), own, sorted(vars(layer)), flags, seeds.state_dict()
    return copy.deepcopy((*values, model[0].training, random_numbers))


def same(ours: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor | numpy.ndarray):
        return bool((torch.as_tensor(ours) == torch.as_tensor(expected)).all())
    if isinstance(expected, dict):
        return list(ours) == list(expected) and all(same(ours[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple | deque):
        return len(ours) == len(expected) and all(map(same, ours, expected))
    return bool(ours == expected)


def built() -> tuple[nn.Sequential, Optimizer, Seeds]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Layer())
    first, second = ({"params": list(layer.parameters())} for layer in model)
    return model, torch.optim.AdamW([first, {**second, "lr": torch.tensor(0.1)}], lr=0.1, foreach=False), Seeds(7)


def test_everything_is_as_it_was_and_the_same_objects() -> None:
    model, optimizer, seeds = built()
    layer: Any = model[1]
    for steps_before in range(2):  # optimizer states do not exist before the first step
        if steps_before:
            change(model, optimizer, seeds)
        own, parts = OwnState(), parts_of(model, model, [optimizer], seeds)
        own.take(steps_before, parts, with_grads=False)
        objects = layer.history, layer.queue, layer.counts, layer.mean, optimizer.state, optimizer.param_groups[1]["lr"]
        expected = state(model, optimizer, seeds)
        assert own.number == steps_before and own.size_bytes > 4 * sum(p.numel() for p in model.parameters())
        for _ in range(2):  # it can be restored more than once
            change(model, optimizer, seeds)
            change(model, optimizer, seeds)
            assert not same(state(model, optimizer, seeds), expected)
            own.restore()
            assert same(state(model, optimizer, seeds), expected)
            assert all(p.grad is None for p in model.parameters())
            assert layer.same is layer.history and layer.function is len
        now = layer.history, layer.queue, layer.counts, layer.mean, optimizer.state, optimizer.param_groups[1]["lr"]
        assert all(ours is before for ours, before in zip(now, objects, strict=True))


def test_gradients() -> None:
    model, optimizer, seeds = built()
    change(model, optimizer, seeds)
    model[0].bias.grad = None
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    own = OwnState()
    own.take(0, parts_of(model, model, [optimizer], seeds), with_grads=True)
    for _ in range(2):
        model(torch.randn(2, 3)).sum().backward()
        own.restore()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is None if grad is None else torch.equal(parameter.grad, grad)


def test_a_second_snapshot_takes_the_memory_of_the_first() -> None:
    model, optimizer, seeds = built()
    change(model, optimizer, seeds)
    own = OwnState()
    own.take(0, parts_of(model, model, [optimizer], seeds), with_grads=False)
    places = [tensor.data_ptr() for tensor in own._memory]
    layer: Any = model[1]
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    expected = state(model, optimizer, seeds)
    own.take(1, parts_of(model, model, [optimizer], seeds), with_grads=False)
    assert [tensor.data_ptr() for tensor in own._memory] == places
    layer.history[0] += 1
    optimizer.step()
    own.restore()
    assert same(state(model, optimizer, seeds), expected)


def test_a_snapshot_that_fails_is_not_whole() -> None:
    model, optimizer, seeds = built()
    own = OwnState()
    own.take(0, parts_of(model, model, [optimizer], seeds), with_grads=False)

    class Fails:
        def state_dict(self) -> Any:
            raise OSError("on purpose")

    broken: Any = Fails()
    with pytest.raises(OSError, match="on purpose"):
        own.take(1, parts_of(model, model, [optimizer], broken), with_grads=False)
    assert own.number is None


def written(snapshots: Snapshots, whole: Whole, *workers: int) -> None:
    for i in workers:
        snapshots.slots[whole.place][i].write(whole.number, b"", [])


def taken(snapshots: Snapshots, whole: Whole) -> None:
    model, optimizer, seeds = built()
    snapshots.take_own(whole, parts_of(model, model, [optimizer], seeds), with_grads=False)


def test_the_snapshot_to_go_back_to_is_the_last_that_all_have_and_is_never_written_over() -> None:
    snapshots = Snapshots(2)
    assert snapshots.last() is None and not snapshots.is_under_way
    for number in (0, 2, 4):
        whole = snapshots.order(number)
        assert snapshots.is_under_way
        taken(snapshots, whole)
        written(snapshots, whole, 0)
        assert snapshots.is_under_way and snapshots.last() == (Whole(number - 2, 1 - whole.place) if number else None)
        written(snapshots, whole, 1)
        assert not snapshots.is_under_way and snapshots.last() == whole
    torn = snapshots.order(6)
    taken(snapshots, torn)
    written(snapshots, torn, 1)
    last = snapshots.last()
    assert last == Whole(4, 1 - torn.place)
    snapshots.go_back(last)
    assert snapshots.slots[torn.place][1].number is None and snapshots.last() == last
    with pytest.raises(ValueError, match="the number of a snapshot must be at least 5, got 4"):
        snapshots.order(4)
    assert snapshots.order(6) == torn  # the place of the torn one, again
    snapshots.close()


def test_a_snapshot_that_the_driver_lacks_is_written_over() -> None:
    snapshots = Snapshots(1)
    for number in (0, 1):
        whole = snapshots.order(number)
        taken(snapshots, whole)
        written(snapshots, whole, 0)
    failed = snapshots.order(2)
    written(snapshots, failed, 0)
    assert snapshots.last() == whole and snapshots.order(3).place == failed.place
    snapshots.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hosts": 2}, "they are in memory of the driver's host, but the stages are on 2 hosts"),
        ({"are_replaced": False}, "its first Trainer has neither snapshot_every_n_steps nor max_restarts"),
        ({"devices": [CPU, torch.device("cuda", 1)]}, "but one is on cuda:1"),
    ],
)
def test_what_has_no_snapshots_is_refused(changed: dict[str, Any], message: str) -> None:
    fine: dict[str, Any] = {"devices": [CPU, CPU]}
    check_snapshots(**fine)
    with pytest.raises(ValueError, match=f"snapshots cannot be taken: .*{re.escape(message)}"):
        check_snapshots(**{**fine, **changed})


def test_systems_without_files_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.pipeline.state.snapshots.have_slots", lambda: False)
    with pytest.raises(ValueError, match="which only Linux has"):
        check_snapshots(devices=[CPU])
