"""The layers of one stage, and descriptions of stages and their parameters for messages."""

import math
import re
from collections.abc import Collection, Hashable, Sequence

from torch import Tensor, nn

_NUMBER_OF_LAYER = re.compile(r"(^|_)(idx|index|layer_id|layer_number)$")


def dotted(path: str, name: str) -> str:
    """Return the name of something in the module at ``path``, which is empty for the model itself."""
    return f"{path}.{name}" if path else name


def layer_of(name: str, layers: Collection[str]) -> str | None:
    """Return the name of the layer that a parameter or module belongs to; ``None`` if it belongs to none.

    Args:
        name: The name of the parameter or module, such as ``encoder.layers.0.weight``.
        layers: The names of the layers. The name of a layer of one of several lists has dots.
    """
    end = name.find(".")
    while end != -1:
        if name[:end] in layers:
            return name[:end]
        end = name.find(".", end + 1)
    return name if name in layers else None


class NamedLayers(nn.Module):
    """A module whose layers may have names with dots, because they are layers of several lists."""

    def get_submodule(self, target: str) -> nn.Module:
        """Return the module with a dotted name, as :meth:`torch.nn.Module.get_submodule` does."""
        name = layer_of(target, self._modules)
        if name is None:
            return super().get_submodule(target)
        layer = self._modules[name]
        assert layer is not None
        return layer.get_submodule(target[len(name) + 1 :])


class StageLayers(NamedLayers, nn.Sequential):
    """The layers of a stage: one or more chunks of consecutive layers, named as in the whole module.

    Attributes:
        spans: For each chunk, the indices of its layers in the whole module.
    """

    def __init__(self, spans: Sequence[range] = ()) -> None:
        super().__init__()
        self.spans = tuple(spans)

    @property
    def chunks(self) -> list[nn.Sequential]:
        """Return the chunks, which share the layers of the stage. If there is one chunk, this is the stage itself."""
        if len(self.spans) == 1:
            return [self]
        ahead = iter(self._modules.items())
        chunks = []
        for span in self.spans:
            chunk = nn.Sequential()
            for _, (name, layer) in zip(span, ahead, strict=False):
                chunk._modules[name] = layer  # add_module refuses names with dots
            chunks.append(chunk)
        return chunks


def kinds_of(layers: Sequence[nn.Module]) -> list[Hashable]:
    """Return a key for each layer. Layers that perform the same computation have equal keys.

    Such layers contain the same modules, with tensors of the same shapes and equal plain attributes, such as a stride.
    An attribute that only counts the layers is ignored: one with a known name, such as Hugging Face's ``layer_idx``, or
    a number that grows evenly over at least three layers that are otherwise equal.
    """
    shapes, attributes = [_shapes(layer) for layer in layers], [_attributes(layer) for layer in layers]
    alike: dict[tuple[Hashable, tuple[tuple[str, str], ...]], list[int]] = {}
    for place, (shape, own) in enumerate(zip(shapes, attributes, strict=True)):
        alike.setdefault((shape, tuple(own)), []).append(place)
    for (_, keys), places in alike.items():
        for key in keys:
            if _counts(places, [attributes[place][key] for place in places]):
                for place in places:
                    del attributes[place][key]
    return [(shape, tuple(own.items())) for shape, own in zip(shapes, attributes, strict=True)]


def _shapes(layer: nn.Module) -> Hashable:
    return tuple(
        (
            name,
            type(module),
            tuple((n, t.shape) for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None),
        )
        for name, module in layer.named_modules()
    )


def _attributes(layer: nn.Module) -> dict[tuple[str, str], Hashable]:
    """Return the public attributes of the modules that are numbers, strings or tuples of these."""
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and not _NUMBER_OF_LAYER.search(name) and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)


def _counts(places: Sequence[int], values: Sequence[Hashable]) -> bool:
    """Return whether values grow in proportion to the indices of the layers."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < max(3, len(values)):
        return False
    slope = (numbers[-1] - numbers[0]) / (places[-1] - places[0])
    return slope != 0 and all(
        math.isclose(number, numbers[0] + slope * (place - places[0]), rel_tol=1e-6, abs_tol=1e-9)
        for place, number in zip(places, numbers, strict=True)
    )


def describe(index: int, layers: StageLayers) -> str:
    """Return a description such as ``stage 1 (layers 3 to 5: Block, Block, Linear)``."""
    kinds = ", ".join(type(layer).__name__ for layer in layers)
    places = " and ".join(f"{span.start} to {span.stop - 1}" for span in layers.spans)
    return f"stage {index} (layers {places}: {kinds})"


def locate(stages: Sequence[StageLayers], model: nn.Module | None, parameter: Tensor) -> str:
    """Return a description of a parameter with its stage, or with its name in the model."""
    for i, stage in enumerate(stages):
        for name, own in stage.named_parameters():
            if own is parameter:
                return f"parameter {name} of {describe(i, stage)}"
    named = model.named_parameters() if model is not None else ()
    return next((f"parameter {name}" for name, own in named if own is parameter), "a parameter")
