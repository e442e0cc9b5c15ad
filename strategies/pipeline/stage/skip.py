"""Skip connections: a layer stashes a tensor by name, and a later layer pops it, in the same or another process.

    @skippable(stash=["1to3"])                     @skippable(pop=["1to3"])
    class Down(nn.Module):                         class Up(nn.Module):
        def forward(self, x):                          def forward(self, x):
            yield stash("1to3", x)                         skip = yield pop("1to3")
            return self.conv(x)                            return self.conv(x + skip)

    nn.Sequential(Down(), Middle(), Up())
                    └────────────────┘

In a plain ``nn.Sequential`` a thread-local dict keeps the tensor until a layer pops it. A ``Pipe`` sends it directly
from the partition that stashes it to the partition that pops it, and its gradient back. The idea and the names are
those of torchgpipe (Kim et al., 2020, https://arxiv.org/abs/2004.09910).
"""

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor, nn

Layer = TypeVar("Layer", bound=type[nn.Module])

SKIPS = "_relay_skips"
"""Attribute of a skippable class: the names that it stashes and pops."""

_NAMESPACES = "_relay_namespaces"
"""Attribute of a skippable layer: the namespace of each name."""


@dataclass(frozen=True)
class Namespace:
    """Distinguishes skips of the same name; see ``isolate`` in :func:`skippable`. A copy equals the original."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)


SkipKey = tuple[Namespace | None, str]
"""A skip: its namespace, and its name."""


@dataclass(frozen=True)
class stash:
    """``yield stash(name, tensor)`` in a skippable layer's ``forward`` stores a tensor, or ``None``, under a name."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True)
class pop:
    """``tensor = yield pop(name)`` in a skippable layer's ``forward`` removes and returns the tensor of that name."""

    name: str


@dataclass(frozen=True)
class _DeclaredSkips:
    stashed: tuple[str, ...]
    popped: tuple[str, ...]


class _Waiting(threading.local):
    """The skips that layers have stashed and not yet popped on a thread; ``nn.Sequential`` passes on outputs only.

    Code that runs stages replaces the dict while it runs layers; see :func:`waiting_skips`.
    """

    def __init__(self) -> None:
        self.skips: dict[SkipKey, Tensor | None] = {}


_here = _Waiting()


@contextmanager
def waiting_skips(skips: dict[SkipKey, Tensor | None]) -> Iterator[None]:
    """Within the body, layers that run on this thread pop from ``skips`` and stash into it."""
    before, _here.skips = _here.skips, skips
    try:
        yield
    finally:
        _here.skips = before


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Layer], Layer]:
    """Let a layer's ``forward`` yield :class:`stash` and :class:`pop`.

    The decorator changes the class in place: the names in its ``state_dict`` and its pickled form stay the same. The
    class gets a method ``isolate(namespace, *, only=None)``, which puts the layer's skips, or those in ``only``, into a
    namespace and returns the layer. The layer that stashes a skip and the layer that pops it must use one namespace.

    Args:
        stash: The names that ``forward`` stashes.
        pop: The names that ``forward`` pops.

    Raises:
        TypeError: If the class is skippable already, or is torch's own, which other code uses.
    """
    names = _DeclaredSkips(_names("stash", stash), _names("pop", pop))

    def decorated(cls: Layer) -> Layer:
        if SKIPS in vars(cls) or cls.__module__.split(".")[0] == "torch":
            raise TypeError(
                f"skippable changes a class, so it cannot take {cls.__qualname__}: decorate a subclass of it"
            )
        forward: Callable[..., Any] = cls.forward

        @wraps(forward)
        def carried_out(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _carry_out(self, names, forward(self, *args, **kwargs))

        for name, value in {SKIPS: names, "forward": carried_out, "isolate": _isolate}.items():
            setattr(cls, name, value)
        return cls

    return decorated


def verify_skippables(module: nn.Module) -> None:
    """Check that one layer stashes each skip and one later layer pops it; both may be inside one layer.

    Raises:
        TypeError: If a skip has no such pair; the message lists each layer and name.
    """
    stashed, popped, wrong = set[SkipKey](), set[SkipKey](), []
    for path, layer, names in _skippables(module):
        both = set(names.stashed) & set(names.popped)
        wrong += [f"layer {path} both stashes and pops {name!r}" for name in both]
        for name in set(names.popped) - both:
            key = _key(layer, name)
            if key in popped:
                wrong.append(f"layer {path} pops {name!r}, which a layer before it has popped: isolate the pairs")
            elif key not in stashed:
                wrong.append(f"layer {path} pops {name!r}, which no layer before it stashes")
            popped.add(key)
        for name in set(names.stashed) - both:
            key = _key(layer, name)
            if key in stashed:
                wrong.append(f"layer {path} stashes {name!r}, which a layer before it has stashed: isolate the pairs")
            stashed.add(key)
    wrong += [f"{name!r} is stashed, but no layer after that pops it" for _, name in stashed - popped]
    if wrong:
        raise TypeError("skip connections do not match: " + "; ".join(sorted(wrong)))


def skips_of(layer: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Return the skips that a layer and the layers in it stash, and those that they pop."""
    found = list(_skippables(layer))
    return (
        [_key(inner, name) for _, inner, names in found for name in names.stashed],
        [_key(inner, name) for _, inner, names in found for name in names.popped],
    )


def _skippables(module: nn.Module) -> Iterator[tuple[str, nn.Module, _DeclaredSkips]]:
    for path, layer in module.named_modules():
        names = getattr(type(layer), SKIPS, None)
        if names is not None:
            yield path, layer, names


def _names(what: str, given: Iterable[str]) -> tuple[str, ...]:
    names = tuple(given)
    if isinstance(given, str) or any(not isinstance(name, str) for name in names):
        raise TypeError(f"{what} takes a list of names, got {given!r}")
    return names


def _key(layer: nn.Module, name: str) -> SkipKey:
    namespaces: Mapping[str, Namespace] = vars(layer).get(_NAMESPACES, {})
    return namespaces.get(name), name


def _isolate(self: Any, namespace: Namespace, *, only: Iterable[str] | None = None) -> Any:
    """Put this layer's skips, or those in ``only``, into a namespace; return the layer."""
    names: _DeclaredSkips = getattr(type(self), SKIPS)
    declared = {*names.stashed, *names.popped}
    chosen = declared if only is None else set(_names("only", only))
    if unknown := sorted(chosen - declared):
        raise ValueError(f"{type(self).__name__} neither stashes nor pops {unknown}, only {sorted(declared)}")
    vars(self)[_NAMESPACES] = {**vars(self).get(_NAMESPACES, {}), **dict.fromkeys(chosen, namespace)}
    return self


def _carry_out(layer: nn.Module, names: _DeclaredSkips, running: Any) -> Any:
    """Run a skippable layer's ``forward``, perform each stash and pop that it yields, and return its result."""
    to_stash, to_pop = set(names.stashed), set(names.popped)
    kind = type(layer).__name__
    output = running
    if isinstance(running, Generator):
        answer = None
        while True:
            try:
                asked = running.send(answer)
            except StopIteration as end:
                output = end.value
                break
            answer = _answer(layer, asked, to_stash, to_pop)
            asked = None  # otherwise this frame keeps the stashed tensor alive
    if to_stash or to_pop:
        raise RuntimeError(
            f"{kind} has returned without "
            + " and ".join(
                f"{verb} {sorted(left)}" for verb, left in (("stashing", to_stash), ("popping", to_pop)) if left
            )
        )
    return output


def _answer(layer: nn.Module, asked: Any, to_stash: set[str], to_pop: set[str]) -> Tensor | None:
    kind = type(layer).__name__
    if not isinstance(asked, stash | pop):
        raise TypeError(f"{kind} has yielded {type(asked).__name__}; skippable layers yield stash(...) or pop(...)")
    left = to_stash if isinstance(asked, stash) else to_pop
    if asked.name not in left:
        verb = type(asked).__name__
        raise RuntimeError(
            f"{kind} yields {verb}({asked.name!r}), which it has done before or which is not in skippable({verb}=...)"
        )
    left.remove(asked.name)
    key = _key(layer, asked.name)
    if isinstance(asked, pop):
        if key not in _here.skips:
            raise RuntimeError(f"{kind} pops {asked.name!r}, which has not been stashed")
        return _here.skips.pop(key)
    if asked.tensor is not None and not isinstance(asked.tensor, Tensor):
        raise TypeError(f"{kind} stashes {type(asked.tensor).__name__} as {asked.name!r}; it takes a tensor or None")
    _here.skips[key] = asked.tensor
    return None
