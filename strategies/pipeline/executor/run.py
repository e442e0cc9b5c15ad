"""One pass through a pipeline, until its backward part has run or can no longer come."""

import weakref
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from strategies.pipeline.stage.stage import Pass


class Leading(Protocol):
    """What leads stages through passes."""

    def backward(self, run: Any, grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]: ...

    def forget(self, number: int) -> None: ...


Lead = TypeVar("Lead", bound=Leading)


class Run(Generic[Lead]):
    """One pass, from its forward part until its backward part has run or can no longer come.

    A result that the user keeps keeps this, which therefore does not keep the pipeline.
    """

    def __init__(self, this: Pass, passes: Lead) -> None:
        self.this = this
        self._passes = weakref.ref(passes)
        self._is_spent = False
        self.rows: list[list[int]] = []
        """For each output that wants a gradient, the number of rows that each micro-batch gave."""
        self.inputs_split: list[bool] = []
        """For each input that wants a gradient, whether it was split into micro-batches; others got it whole."""
        self.flags: list[list[bool]] = []
        """For each such output, whether that of each micro-batch wants one (those recomputed are only guessed)."""

    def spend(self) -> Lead:
        """Notes that the backward part runs now, after which nothing is kept for it any more.

        Raises:
            RuntimeError: If it has run before, or the pipeline has ended.
        """
        passes = self._passes()
        if passes is None:
            raise RuntimeError("the pipeline that computed this has ended, so it has no backward pass any more")
        if self._is_spent:
            raise RuntimeError(
                "the backward pass of this batch has already run through the pipeline, whose stages keep nothing for "
                "a second one (retain_graph=True has no effect on them); add the losses up and call backward once"
            )
        self._is_spent = True
        return passes

    def backward(self, grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Runs the backward part on every stage; see :meth:`Passes.backward`."""
        return self.spend().backward(self, grads, inputs)

    def __del__(self) -> None:
        passes = self._passes()
        if passes is not None and self.this.grad and not self._is_spent:
            passes.forget(self.this.number)
