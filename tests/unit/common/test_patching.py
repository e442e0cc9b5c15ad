"""Modules that code may change for a while."""

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from strategies.common.patching import replaced, unchanged


class Counts(nn.Module):
    """Changes everything that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.number = nn.BatchNorm1d(2), 0
        self.kept, self.nested, self.total = [1], {"a": [1]}, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.kept.append(2)
        self.nested["a"].append(2)
        self.total += 1
        self.late = x
        return self.norm(x)


def test_what_a_forward_pass_changes_is_restored() -> None:
    module = Counts()
    kept, total, mean = module.kept, module.total, module.norm.running_mean
    with unchanged(module.modules()):
        module(torch.arange(4.0).reshape(2, 2))
        assert module.number == 1 and module.norm.num_batches_tracked == 1
    assert (module.number, module.kept, module.nested) == (0, [1], {"a": [1]}) and module.kept is kept
    assert module.total is total and torch.equal(total, torch.zeros(2)) and not hasattr(module, "late")
    assert module.norm.running_mean is mean and torch.equal(mean, torch.zeros(2))
    assert module.norm.num_batches_tracked == 0


def test_generators_of_random_numbers_are_restored() -> None:
    module = nn.Module()
    module.torchs, module.python = torch.Generator(), random.Random(0)
    module.numpys, module.older = numpy.random.default_rng(0), numpy.random.RandomState(0)

    def draw() -> tuple[float, ...]:
        of_torch = torch.rand((), generator=module.torchs).item()
        return of_torch, module.python.random(), float(module.numpys.random()), float(module.older.rand())

    with unchanged([module]):
        drawn = draw()
    assert draw() == drawn


# What is reached from attributes of modules


class Forbids(OrderedDict[str, int]):
    """A dict whose entries cannot be removed by its own methods, with attributes."""

    def clear(self) -> None:
        raise NotImplementedError

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Frozen:
    value: int = 1


@dataclass
class Context:
    """An object of user code."""

    number: int = 0
    own: Frozen = Frozen()
    entries: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def note(self) -> None:
        self.number += 1
        self.late = 1
        object.__setattr__(self.own, "value", 2)
        self.entries["a"].append(2)


def of_an_object() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    context = Context(entries=defaultdict(list, b=[1]))
    return context, context.note, lambda: ({**vars(context)}, context.own.value, {**context.entries})


def of_a_namespace() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    context = SimpleNamespace()
    return {"nested": (context,)}, lambda: setattr(context, "penalty", 1), lambda: vars(context).copy()


def of_a_queue() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    queue = deque([1, 2], maxlen=2)
    return queue, lambda: queue.append(3), lambda: ([*queue], queue.maxlen)


def of_an_own_dict() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    kept = Forbids(a=1, b=2)

    def change() -> None:
        kept.move_to_end("a")
        kept["c"] = 3
        kept.late = 1

    return kept, change, lambda: ([*kept.items()], vars(kept).copy())


def of_a_closure() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    number, kept = 0, dict[str, int]()
    late: int  # has no value yet

    def hook() -> None:
        nonlocal number, late
        number += 1
        kept["a"] = late = 1

    def read() -> tuple[Any, ...]:
        try:
            return number, {**kept}, late
        except NameError:
            return number, {**kept}

    return hook, hook, read


def of_a_partial_function() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    kept, shared = list[int](), list[int]()

    def hook(held: list[int], *, default: list[int] = shared) -> None:
        held.append(1)
        default.append(1)
        hook.late = 1

    call = partial(hook, kept)
    return call, call, lambda: ([*kept], [*shared], vars(hook).copy())


def of_a_method() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    context = Context()
    return [context.note], context.note, lambda: context.number


def of_tensors_and_arrays() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    tensor, array = torch.zeros(2), numpy.zeros(2)

    def change() -> None:
        tensor.add_(1)
        numpy.add(array, 1, out=array)

    return {"a": [tensor, array]}, change, lambda: (tensor.tolist(), array.tolist())


REACHED = [
    of_an_object,
    of_a_namespace,
    of_a_queue,
    of_an_own_dict,
    of_a_closure,
    of_a_partial_function,
    of_a_method,
    of_tensors_and_arrays,
]


@pytest.mark.parametrize("made", REACHED)
def test_what_the_code_reaches_from_attributes_is_restored(made: Callable[[], Any]) -> None:
    module = nn.Module()
    module.held, change, read = made()
    before = read()
    with unchanged([module]):
        change()
        assert read() != before
    assert read() == before


def test_a_tensor_of_inference_mode_is_restored() -> None:
    module = nn.Module()
    with torch.inference_mode():
        module.total = torch.zeros(2)
        with unchanged([module]):
            module.total += 1
        assert module.total.tolist() == [0, 0]
    with unchanged([module]):
        assert module.total.tolist() == [0, 0]


def test_given_parameters_are_restored_however_they_are_changed() -> None:
    module = nn.Linear(2, 2)
    module.pairs = [*module.parameters()]
    weight, before, version = module.weight, module.weight.detach().clone(), module.weight._version
    with unchanged([module], [module.weight]), torch.no_grad():
        module.weight.data.add_(1)  # counts no change
        module.pairs[0].data = module.pairs[0].data + 1
        assert torch.equal(module.weight, before + 1 + 1)
    assert module.weight is weight and torch.equal(weight, before) and weight._version == version


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self) -> None:
        self.seen += 1


def test_buffers_and_modes_of_a_script_module_are_restored() -> None:
    module = torch.jit.script(Scripted())
    buffer = module.seen
    with unchanged([module]):
        module.eval()()
        assert module.seen == 1
    assert module.training and module.seen is buffer and buffer == 0


def test_what_relay_and_other_modules_hold_stays_changed() -> None:
    module, other, kept = nn.Module(), nn.Module(), list[int]()
    module.undo, module.others = partial(replaced, kept), [other]
    with unchanged([module]):
        other.number = 1
        kept.append(1)
    assert other.number == 1 and kept == [1]
