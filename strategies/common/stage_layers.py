"""The layers of one stage, and descriptions of stages and their parameters for messages."""

from collections.abc import Hashable, Sequence

from torch import Tensor, nn


class StageLayers(nn.Sequential):
    """The layers of a stage: one or several chunks of consecutive layers, named as in the whole module.

    Attributes:
        spans: For each chunk, the places of its layers in the whole module.
    """

    def __init__(self, spans: Sequence[range] = ()) -> None:
        super().__init__()
        self.spans = tuple(spans)

    @property
    def chunks(self) -> list[nn.Sequential]:
        """The chunks, which share the layers of the stage; the stage itself if it has only one."""
        if len(self.spans) == 1:
            return [self]
        ahead = iter(self._modules.items())
        chunks = []
        for span in self.spans:
            chunk = nn.Sequential()
            for _, (name, layer) in zip(span, ahead, strict=False):
                chunk.add_module(name, layer)
            chunks.append(chunk)
        return chunks


def kind_of(layer: nn.Module) -> Hashable:
    """Return a value that is equal for layers with the same modules inside and tensors of the same shapes."""
    return tuple(
        (
            name,
            type(module),
            tuple((n, t.shape) for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None),
        )
        for name, module in layer.named_modules()
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
