"""Several lists of layers as one sequence, which a pipeline divides and trains like one list."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from strategies.common.stage_layers import NamedLayers


class JoinedLists(NamedLayers, nn.ModuleList):
    """The layers of several lists as one sequence, with their names in the model.

    It is not a part of the model. The lists run one after another, each over all stages; the layers of an
    ``nn.Sequential`` count as blocks that the model calls itself.

    Args:
        model: The model.
        lists: For each list, the paths of the ``nn.Sequential`` and ``nn.ModuleList`` that it consists of, or of single
            layers between them, in the order in which the model calls them.

    Attributes:
        paths: ``lists``.
        lengths: The number of layers of each list.
    """

    def __init__(self, model: nn.Module, lists: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.paths, self.lengths = tuple(map(tuple, lists)), list[int]()
        self._homes: dict[str, tuple[nn.Module, str]] = {}
        """For each layer, the module that contains it, and its name there."""
        self._parts: dict[str, nn.Module] = {}
        for paths in self.paths:
            before = len(self._modules)
            for path in paths:
                part = model.get_submodule(path)
                if isinstance(part, nn.Sequential | nn.ModuleList):
                    self._parts[f"{path}."] = part
                    self._homes.update({f"{path}.{name}": (part, name) for name in part._modules})
                else:
                    around, _, name = path.rpartition(".")
                    self._parts[f"{path}."] = part
                    self._homes[path] = (model.get_submodule(around), name)
            self._modules.update({name: self._home(name) for name in list(self._homes)[before:]})
            self.lengths.append(len(self._modules) - before)

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]

    def _home(self, name: str) -> nn.Module:
        container, own = self._homes[name]
        layer = container._modules[own]
        assert layer is not None
        return layer

    @property
    def parts(self) -> list[tuple[str, nn.Module]]:
        """The modules of the model that contain the layers, or are one, each with the start of the layers' names."""
        return list(self._parts.items())

    @property
    def current(self) -> list[nn.Module]:
        """The layers that the model has now at the places of these layers."""
        return [self._home(name) for name in self._homes]

    @contextmanager
    def without(self, names: Iterable[str]) -> Iterator[None]:
        """Context in which the model does not contain the layers with these names."""
        homes = [self._homes[name] for name in names]
        before = {container: dict(container._modules) for container, _ in homes}
        for container, name in homes:
            del container._modules[name]
        try:
            yield
        finally:
            for container, children in before.items():
                container._modules.clear()
                container._modules.update(children)


def lists_of(module: nn.Module) -> list[list[nn.Module]]:
    """Return the layers of each list of a pipelined module, which has one list unless it joins several."""
    layers, ends = (
        [layer for layer in module._modules.values() if layer is not None],
        [0, *accumulate(lengths_of(module))],
    )
    return [layers[start:stop] for start, stop in pairwise(ends)]


def lengths_of(module: nn.Module) -> list[int]:
    """Return the number of layers of each list of a pipelined module."""
    return module.lengths if isinstance(module, JoinedLists) else [len(module._modules)]


def names_of(module: nn.Module) -> list[str]:
    """Return for each list of a pipelined module the paths of its parts, for messages."""
    if not isinstance(module, JoinedLists):
        return ["the pipelined module"]
    return [" and ".join(map(repr, dict.fromkeys((paths[0], paths[-1])))) for paths in module.paths]


def why_one_list(module: nn.Module, layer: str) -> str:
    """Return a remark for messages if the list that contains a layer joins several modules; else an empty string."""
    if not isinstance(module, JoinedLists):
        return ""
    place, ends = list(module._modules).index(layer), accumulate(module.lengths)
    paths = next(paths for paths, end in zip(module.paths, ends, strict=True) if place < end)
    listed = " and ".join(map(repr, paths))
    return f" ({listed} are one list, because forward calls them one after another)" if len(paths) > 1 else ""


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of the model that contain the layers, each with the start of the layers' names."""
    return module.parts if isinstance(module, JoinedLists) else [("", module)]


def layers_now(module: nn.Module) -> Callable[[], Sequence[nn.Module | None]]:
    """Return a function that returns the layers which a pipelined module, or the model with several lists, then has."""
    if isinstance(module, JoinedLists):
        return lambda: module.current
    return partial(list[nn.Module | None], module._modules.values())
