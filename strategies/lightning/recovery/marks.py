"""Marks of a run between two training steps, which tell whether something other than a step has changed it.

A repeated step begins with what the step before it has left. What a callback has changed in between would be lost
silently, so it must be noticed: tensors that are other ones or have been changed in place, states of optimizers,
attributes of layers, and gradients that the next step adds to.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.torch_compat import num_changes
from strategies.lightning.compat import LightningModule
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.state.objects import pickled_alone

_PLAIN = (bool, int, float, str)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WORDS_PER_ROW = 512
_ROW_BYTES = 8 * _WORDS_PER_ROW
_ROWS_PER_BLOCK = 256


@dataclass(frozen=True)
class Mark:
    """What a run is like at one moment.

    Attributes:
        state: Weights, buffers, states and groups of optimizers, attributes of layers.
        balance: Layers per stage.
        gradients: Gradients.
        values: Fingerprints of the tensors' values and of the objects in attributes, if they were read.
        values_of_gradients: Fingerprints of the gradients' values, if they were read.
        tensors: The tensors of ``state``, so that no other tensor gets the identity of one of them.
    """

    state: Any
    balance: list[int]
    gradients: Any
    values: Any
    values_of_gradients: Any
    tensors: list[Tensor]

    @property
    def has_values(self) -> bool:
        """Whether values were read. Without, a change through ``.data``, which torch does not count, is not noticed."""
        return self.values is not None

    def equals(self, other: "Mark", *, with_gradients: bool) -> bool:
        """Return whether nothing has changed between the two moments."""
        if (self.state, self.balance) != (other.state, other.balance) or (
            with_gradients and self.gradients != other.gradients
        ):
            return False
        if not self.has_values or not other.has_values:
            return True
        return self.values == other.values and (
            not with_gradients or self.values_of_gradients == other.values_of_gradients
        )


class Marks:
    """Makes marks of a run.

    Args:
        model: The model.
        pipeline: The pipeline.
    """

    def __init__(self, model: LightningModule, pipeline: Pipeline) -> None:
        self._model, self._pipeline = model, pipeline

    def now(self, *, reads_values: bool) -> Mark:
        """Return a mark of this moment.

        Args:
            reads_values: Whether values are read, which takes about as long as to add them up.
        """
        pipeline = self._pipeline
        tensors, others = self._tensors()
        state = (
            [_identity(tensor) for tensor in tensors],
            others,
            pipeline.num_updates,
            [len(optimizer.param_groups) for optimizer in pipeline.optimizers.optimizers],
            [value for module in pipeline.module.modules() for value in _plain_attributes(module)],
        )
        values = of_gradients = None
        if reads_values:
            values = [fingerprint(tensor) for tensor in tensors], self._objects()
            of_gradients = self._values_of_gradients()
        return Mark(state, list(pipeline.balance), self._gradients(), values, of_gradients, tensors)

    def in_step(self) -> Any:
        """Return what changes with the gradients, and with the weights, within a step."""
        return self._gradients(), self.values()

    def values(self) -> Any:
        """Return fingerprints of the weights, buffers and gradients of this process."""
        here = self._pipeline.parameters_here()
        return [fingerprint(each) for each in (*here, *self._model.buffers())], self._values_of_gradients()

    def _gradients(self) -> Any:
        here = self._pipeline.parameters_here()
        grads = [None if p.grad is None else _identity(p.grad) for p in here]
        return grads, [_identity(p) for p in here], [remote.version for remote in self._pipeline.remotes]

    def _values_of_gradients(self) -> Any:
        return [None if p.grad is None else fingerprint(p.grad) for p in self._pipeline.parameters_here()]

    def _tensors(self) -> tuple[list[Tensor], list[Any]]:
        """Return the tensors that steps leave to the steps after them, and what is beside them in optimizers."""
        found: list[Tensor] = [*self._pipeline.parameters_here(), *(b for b in self._model.buffers() if not b.is_meta)]
        others: list[Any] = []
        for optimizer in self._pipeline.optimizers.optimizers:
            for parameter, states in optimizer.state.items():
                others.append(id(parameter))
                for name, value in states.items() if isinstance(states, dict) else ():
                    if isinstance(value, Tensor):
                        found.append(value)
                    others.append((name, value if type(value) in _PLAIN else id(value)))
        for module in self._pipeline.stages[-1].modules():
            attributes = vars(module).items()
            own = {name: value for name, value in attributes if isinstance(value, Tensor) and not _is_result(value)}
            others += own
            found += own.values()
        return [tensor for tensor in found if not tensor.is_meta], others

    def _objects(self) -> list[Any]:
        """Return what changes with the objects in attributes of this process's layers."""
        return [
            (name, _content(value, set()))
            for module in self._pipeline.stages[-1].modules()
            for name, value in vars(module).items()
            if name not in _OF_EVERY_MODULE and type(value) not in _PLAIN and not isinstance(value, Tensor)
        ]


def _content(value: Any, above: set[int]) -> Any:
    """Return what changes with an object, as far as a snapshot restores it."""
    if type(value) in _PLAIN or isinstance(value, nn.Module):
        return value
    if isinstance(value, Tensor):
        return "a result" if _is_result(value) else (id(value), fingerprint(value))
    if id(value) in above:
        return "an object that contains itself"
    if type(value) in (list, tuple, deque):
        return type(value).__name__, [_content(item, {*above, id(value)}) for item in value]
    if type(value) in (dict, OrderedDict, defaultdict):
        return [(_content(key, set()), _content(item, {*above, id(value)})) for key, item in value.items()]
    return pickled_alone(value) or id(value)


def _is_result(tensor: Tensor) -> bool:
    """Return whether a tensor comes from a forward pass, which a layer keeps to be looked at."""
    return tensor.grad_fn is not None or tensor.is_inference()


def _plain_attributes(module: nn.Module) -> Iterable[Any]:
    return (value for name, value in vars(module).items() if type(value) in _PLAIN and name != "training")


def _identity(tensor: Tensor) -> tuple[int, int, int]:
    """Return what changes if the tensor is another one, gets another memory, or is changed in place."""
    return id(tensor), num_changes(tensor), tensor.data_ptr() if tensor.layout is torch.strided else 0


def fingerprint(tensor: Tensor) -> Any:
    """Return a few numbers that are others if a value has changed, and if values have changed their places.

    These are sums of the values' bits, as words of eight bytes in rows of 512: of each row, and of each column, both
    weighted by their places. Sums are as fast as the memory; a cryptographic hash would take ten times as long.
    """
    if tensor.is_meta or tensor.layout is not torch.strided:
        return None
    tensor = tensor.detach()
    shape, size_bytes = tuple(tensor.shape), tensor.numel() * tensor.element_size()
    if size_bytes < _ROW_BYTES:
        of_numpy = tensor.dtype in (torch.float32, torch.float64, torch.int64)
        return shape, (tensor if of_numpy else tensor.flatten().view(torch.uint8)).numpy().tobytes()
    data = tensor.contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    num_rows = size_bytes // _ROW_BYTES
    rows = data[: num_rows * _ROW_BYTES].view(torch.int64).view(num_rows, _WORDS_PER_ROW)
    of_rows, of_columns = 0, torch.zeros(_WORDS_PER_ROW, dtype=torch.int64)
    for begin in range(0, num_rows, _ROWS_PER_BLOCK):  # small enough that the cache has them for the second sum
        block = rows[begin : begin + _ROWS_PER_BLOCK]
        of_rows += int((block.sum(1) * _places(begin, len(block))).sum())
        of_columns += block.sum(0)
    return (
        shape,
        of_rows,
        int((of_columns * _places(0, _WORDS_PER_ROW)).sum()),
        data[num_rows * _ROW_BYTES :].numpy().tobytes(),
    )


def _places(begin: int, count: int) -> Tensor:
    """Return the weights of sums: odd, so that no bit of a sum is lost."""
    return torch.arange(2 * begin + 1, 2 * (begin + count) + 1, 2)
