"""Side outputs: tensors that a layer stores in its attributes in its forward pass, instead of returning them.

    self.aux_loss = ...     self.losses.append(...)     self.stats["entropy"] = ...

On a worker the side outputs of each micro-batch stay on that worker, with a graph that the driver's loss cannot reach.
Each stage searches for side outputs in the first and the last micro-batch of a pass, and sends the names of their
attributes together with its output, so that the driver has the names before user code continues:

    stage 0 ── (y, its attributes) ──▶ stage 1 ── (y, attributes of both) ──▶ driver: a placeholder for each attribute

Code that uses a placeholder gets an error that says what to do. On the driver's stage, an attribute keeps the value
that the layer stored if this value is right: in a pass of one micro-batch, and if ``training_step`` runs once per
micro-batch.

Index letters: ``m`` micro-batch, ``i`` stage, ``k`` place of a module in ``modules()``.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, starmap
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from strategies.common.patching import ABSENT, set_entry
from strategies.common.stage_layers import StageLayers, describe
from strategies.common.torch_compat import forward_hooks, version_of

_MAX_ITEMS = 1000
"""Maximum number of entries of a list or dict that are searched."""

_PLAIN = frozenset([bool, int, float, str, type(None)])

_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module."""

_CONTAINERS = (dict, list, tuple, set, deque)


class Attribute(NamedTuple):
    """An attribute of a module of a stage."""

    stage: int
    module: int
    name: str


class WithSideOutputs(NamedTuple):
    """The value that a stage sends to the next stage if layers have side outputs."""

    value: Any
    attributes: tuple[Attribute, ...]


class SideOutputs:
    """Finds the side outputs of the layers of one stage.

    Modules of ``torch.nn`` have none, so only modules of other classes and modules with hooks are searched.

    Args:
        index: Number of the stage.
        watched: The modules that may have side outputs, with their attributes before their first pass.
    """

    def __init__(self, index: int, watched: "Sequence[_WatchedModule]") -> None:
        self._index, self._watched = index, watched

    @classmethod
    def of(cls, index: int, layers: nn.Module) -> "SideOutputs | None":
        """Return the object that finds the side outputs of ``layers``; ``None`` if no module in them can have any."""
        watched = [_WatchedModule(k, vars(module)) for k, module in enumerate(layers.modules()) if _may_have(module)]
        return cls(index, watched) if watched else None

    def find(self) -> tuple[Attribute, ...]:
        """Return the attributes that have become side outputs since the last call."""
        return tuple(Attribute(self._index, each.module, name) for each in self._watched for name in each.new())


class _WatchedModule:
    """The attributes of one module. A comparison of their ids quickly detects that none has changed."""

    def __init__(self, module: int, own: dict[str, Any]) -> None:
        self.module, self._own = module, own
        self._found: set[str] = set()
        self._constants = dict(self._tensors())
        self._look()

    def new(self) -> list[str]:
        """Return the names of the attributes that have become side outputs since the last call."""
        if not self._may_change_in_place and [*map(id, self._own.values())] == self._ids:
            return []
        new = [name for name, held in self._tensors() if not _unchanged(held, self._constants.get(name, ()))]
        self._found.update(new)
        self._look()
        return new

    def _look(self) -> None:
        self._ids = [*map(id, self._own.values())]
        self._may_change_in_place = any(_may_change_in_place(value) for _, value in self._others())

    def _others(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes that not every module has, and that are not known to be side outputs."""
        for name, value in list(self._own.items()):
            if type(value) not in _PLAIN and name not in _OWN_ATTRIBUTES and name not in self._found:
                yield name, value

    def _tensors(self) -> Iterator[tuple[str, list[tuple[Tensor, int]]]]:
        """Yield the attributes of :meth:`_others` that hold tensors, each tensor with its version counter."""
        for name, value in self._others():
            if held := list(_tensors_in(value)):
                yield name, [(tensor, 0 if tensor.is_inference() else version_of(tensor)) for tensor in held]


class Placeholder:
    """Replaces a side output whose value is in another process or is not right. Any use of it raises an error.

    A copy of a placeholder is a copy of the value that the attribute had before.
    """

    def __init__(self, message: str, before: Any) -> None:
        vars(self).update(_message=message, _before=before)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks up such names
            raise AttributeError(name)
        raise RuntimeError(self._message)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        placeholder = next(_placeholders_in((*args, *(kwargs or {}).values())))
        raise RuntimeError(vars(placeholder)["_message"])

    def __repr__(self) -> str:
        return f"<{vars(self)['_message']}>"

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else self._use()

    def __reduce_ex__(self, protocol: Any) -> Any:
        before = vars(self)["_before"]
        return copy.copy, (None if before is ABSENT else before,)

    def _use(self, *_: Any) -> NoReturn:
        raise RuntimeError(vars(self)["_message"])

    __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = __call__ = _use
    __float__ = __int__ = __index__ = __complex__ = __array__ = __neg__ = __pos__ = __abs__ = __invert__ = _use
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _use
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __mul__ = __rmul__ = __imul__ = _use
    __truediv__ = __rtruediv__ = __itruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _use
    __hash__ = object.__hash__


class Placeholders:
    """Replaces side outputs with placeholders on the driver.

    Args:
        stages: The driver's copies of the layers of each stage. The last stage is the driver's stage.
    """

    def __init__(self, stages: Sequence[StageLayers]) -> None:
        self._stages, self._own = stages, len(stages) - 1
        run_ahead = {module for chunk in stages[-1].chunks[:-1] for module in chunk.modules()}
        self._run_last = {k for k, module in enumerate(stages[-1].modules()) if module not in run_ahead}
        """Indices of the modules of the last chunk. Other chunks of the driver already run later micro-batches."""
        self.known: dict[Attribute, tuple[dict[str, Any], Placeholder]] = {}
        """For each side output that a stage has found, the attributes of its module and its placeholder."""
        self._stored: dict[Attribute, Any] = {}
        """Values of side outputs of the driver's stage that placeholders currently replace."""

    def unwrapped(self, value: Any) -> Any:
        """Keep the side outputs that arrived with an output, and return the output."""
        if not isinstance(value, WithSideOutputs):
            return value
        for attribute in starmap(Attribute, value.attributes):
            if attribute not in self.known:  # a worker that replaces another one reports what it finds once more
                self._add(attribute)
        return value.value

    def insert(self, is_right: Callable[[Any], bool]) -> None:
        """Insert the placeholders, except for side outputs of the driver's stage whose value is right."""
        for attribute, (own, placeholder) in self.known.items():
            if attribute.stage != self._own:
                own[attribute.name] = placeholder
            elif own.get(attribute.name) is not placeholder and not (
                attribute.module in self._run_last and is_right(own.get(attribute.name))
            ):
                self._replace(attribute)

    @contextmanager
    def removed_for_layers(self) -> Iterator[None]:
        """Context in which the attributes of the driver's layers have the values that the layers stored."""
        stored = list(self._stored.items())
        self._stored.clear()
        for attribute, value in stored:
            own, placeholder = self.known[attribute]
            if own.get(attribute.name) is placeholder:  # the user may have set another value
                set_entry(own, attribute.name, value)
        try:
            yield
        finally:
            for attribute, _ in stored:
                self._replace(attribute)

    def restore(self) -> None:
        """Remove the placeholders of the driver's stage. :meth:`insert` restores those whose values are not right."""
        for attribute, value in self._stored.items():
            own, placeholder = self.known[attribute]
            if own.get(attribute.name) is placeholder:
                set_entry(own, attribute.name, value)
        self._stored.clear()

    @property
    def have_graphs(self) -> bool:
        """Whether side outputs of the driver's stage without a placeholder have a graph, which a loss may use."""
        own = [
            values.get(a.name)
            for a, (values, _) in self.known.items()
            if a.stage == self._own and a not in self._stored
        ]
        return any(tensor.requires_grad for tensor in _tensors_in(own))

    def end(self) -> None:
        """Remove all placeholders.

        Attributes of remote stages get their previous values, those of the driver's stage the values of the layers.
        """
        self.restore()
        for attribute, (own, placeholder) in self.known.items():
            if own.get(attribute.name) is placeholder:
                set_entry(own, attribute.name, vars(placeholder)["_before"])
        self.known.clear()

    def _add(self, attribute: Attribute) -> None:
        stage = self._stages[attribute.stage]
        name, module = next(islice(stage.named_modules(), attribute.module, None))
        what = f"the forward pass of layer {name}, a {type(module).__name__}, leaves tensors in its attribute"
        where = describe(attribute.stage, stage)
        if attribute.stage != self._own:
            message = f"{what} {attribute.name!r} on {where}, in another process, so their values are not available."
        else:
            message = (
                f"{what} {attribute.name!r} on {where}, once for each micro-batch: it has only those of the last "
                'micro-batch, without gradients. With schedule="1f1b" and checkpoint="never", which runs training_step '
                "once per micro-batch, it has the tensors of the current micro-batch (a list or dict only if it is "
                "new)."
            )
        before = ABSENT if attribute.stage == self._own else vars(module).get(attribute.name, ABSENT)
        placeholder = Placeholder(f"{message} Return them from the layer (as one more output of the module).", before)
        self.known[attribute] = vars(module), placeholder

    def _replace(self, attribute: Attribute) -> None:
        own, placeholder = self.known[attribute]
        self._stored[attribute] = own.get(attribute.name, ABSENT)
        own[attribute.name] = placeholder


def is_fresh(value: Any) -> bool:
    """Whether the value is only from the latest micro-batch. A container may also hold values of earlier ones."""
    return not isinstance(value, list | dict | set | deque)


def with_graph(value: Any) -> bool:
    """Whether a side output is part of autograd's graph."""
    return any(tensor.requires_grad for tensor in _tensors_in(value))


def _may_have(module: nn.Module) -> bool:
    if isinstance(module, StageLayers):
        return False
    return any(forward_hooks(module)) or not type(module).__module__.startswith("torch.nn.")


def _tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):  # an optimizer changes parameters
            yield value
    elif isinstance(value, _CONTAINERS) and depth:
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for item in [item for item in islice(items, _MAX_ITEMS) if type(item) not in _PLAIN]:
            yield from _tensors_in(item, depth - 1)


def _may_change_in_place(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_may_change_in_place, value[:_MAX_ITEMS]))
    return isinstance(value, (Tensor, *_CONTAINERS))


def _unchanged(now: Sequence[tuple[Tensor, int]], before: Sequence[tuple[Tensor, int]]) -> bool:
    same = (a is b and version == known for (a, version), (b, known) in zip(now, before, strict=False))
    return len(now) <= len(before) and all(same)


def _placeholders_in(values: Iterable[Any]) -> Iterator[Placeholder]:
    for value in values:
        if isinstance(value, Placeholder):
            yield value
        elif isinstance(value, list | tuple):
            yield from _placeholders_in(value)
