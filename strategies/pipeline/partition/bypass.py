"""Refuses a model that computes with the weights of its layers itself and never calls the layers.

    for up, down in self.layers:          parts of the blocks are called, never a block
        x = x + down(up(x))
    for layer in self.sequential_module:  the layers are called, never the nn.Sequential
        x = layer(x)

Such a model would compute the results of one process, but on the driver alone, and would fetch weights from the workers
for each operation.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from strategies.pipeline.partition.sequential import Pipelined


class BypassCheck:
    """Watches the first steps of a run, until a step has called the layers in the way that the pipeline runs them.

    A step that neither calls the layers nor computes with their weights is not refused.

    Args:
        layers: The layers.
        path: The dotted path of the layers in the model, for messages.
    """

    def __init__(self, layers: Pipelined, path: str) -> None:
        self._layers, self._path = layers, path
        self._is_watching = False
        self.has_run = False
        """Whether a step has called the layers, so that no check is necessary."""
        self._used = ""

    def note_call(self) -> None:
        """Remember that the model calls the layers, as a whole or block by block."""
        self.has_run |= self._is_watching

    def note_use(self, what: str, in_pass: bool) -> None:
        """Remember that an operation on the driver uses a parameter or buffer of a worker with another tensor.

        Args:
            what: The tensor and its stage.
            in_pass: Whether a pass is running, so that values of the stage cannot be read.

        Raises:
            RuntimeError: If they cannot be read, and no step has called the layers.
        """
        if not self._is_watching or self.has_run:
            return
        self._used = self._used or what
        if in_pass:
            raise self._refusal(
                " If the model does call them later, but uses this weight first, such as the weight of a tied "
                "embedding, also register the weight outside of the pipelined module, in __init__: self.tied = ...; "
                "the driver then holds it."
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context for a step.

        Raises:
            RuntimeError: If the step has computed with the weights of the layers in this process, and no step so far
                has called the layers.
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
                "Only calls of the blocks themselves, block(x), run in the pipeline. Move the code that uses the parts "
                "of a block into the block's forward, or choose the list whose modules the model calls: "
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
