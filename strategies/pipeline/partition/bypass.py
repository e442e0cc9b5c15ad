"""Refuses a model that computes with the weights of its layers itself and never calls the layers.

    for up, down in self.layers:          parts of the blocks are called, never a block
        x = x + down(up(x))
    for layer in self.sequential_module:  the layers are called, never the nn.Sequential
        x = layer(x)

Such a model would compute what it computes in one process, but in the driver's process alone, with weights that are
fetched from the workers for each operation.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from strategies.pipeline.partition.sequential import Pipelined


class BypassCheck:
    """Looks at the first steps of a run, until one has called the layers as the pipeline runs them.

    A step that neither calls the layers nor computes with their weights is not refused.

    Args:
        layers: The layers.
        path: Their dotted path in the model, for messages.
    """

    def __init__(self, layers: Pipelined, path: str) -> None:
        self._layers, self._path = layers, path
        self._is_watching = False
        self.has_run = False
        """Whether a step has called the layers, so that nothing is left to be looked at."""
        self._used = ""

    def note_call(self) -> None:
        """The model calls the layers, as a whole or block by block."""
        self.has_run |= self._is_watching

    def note_use(self, what: str, in_pass: bool) -> None:
        """An operation on the driver combines a parameter or buffer of a worker with another tensor.

        Args:
            what: The tensor and its stage.
            in_pass: Whether values of the stage cannot be read now.

        Raises:
            RuntimeError: If they cannot, and no step has called the layers.
        """
        if not self._is_watching or self.has_run:
            return
        self._used = self._used or what
        if in_pass:
            raise self._refusal(
                " If the model does call them, and uses this weight before that, such as that of a tied embedding, "
                "register the weight outside of the pipelined module as well, in __init__: self.tied = ...; the driver "
                "then holds it."
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this runs a step.

        Raises:
            RuntimeError: If the step has computed with the weights of the layers in this process, and neither this nor
                an earlier step has called the layers.
        """
        self._is_watching, self._used = True, ""
        try:
            yield
        finally:
            self._is_watching = False
        if self._used and not self.has_run:
            raise self._refusal()

    def _refusal(self, more: str = "") -> RuntimeError:
        if isinstance(self._layers, nn.ModuleList):
            calls, how = f"the blocks in {self._path!r}", "by calling a part or another method of a block"
            advice = (
                "Only calls of the blocks themselves, block(x), run in the pipeline. Move what the model does with the "
                "parts of a block into the block's forward, or choose the list whose modules the model calls: "
                "RPCSequentialStrategy(module=...)."
            )
        else:
            calls, how = f"{self._path!r}", "in a loop over its layers"
            advice = (
                "Only a call of the whole nn.Sequential runs in the pipeline. Call it; or, for a loop over its layers, "
                f"replace it by an nn.ModuleList, whose weights have the same names: model.{self._path} = "
                f"nn.ModuleList(model.{self._path})."
            )
        return RuntimeError(
            f"the model has not called {calls}, but computes with {self._used} in the driver's process, such as {how}; "
            f"the layers would not run on their stages. {advice}{more}"
        )
