"""Write a checkpoint file whose tensors are partly in other processes, with one tensor in memory at a time.

    torch.save   pickle the checkpoint ──▶ storage 0 ──▶ storage 1 ──▶ ...
                                           read, write, free           one at a time

The file has the same bytes as one that ``torch.save`` writes from a checkpoint with all values in memory.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class LateTensors:
    """Which tensors of a checkpoint are read only when they are written, and how to read them.

    Attributes:
        has: Returns whether a tensor on the ``meta`` device is such a tensor.
        read: Returns the values of tensors, in the order given.
    """

    has: Callable[[Tensor], bool]
    read: Callable[[Sequence[Any]], Iterator[Tensor]]


def save(checkpoint: Any, file: BinaryIO, late: LateTensors | None) -> None:
    """Write ``checkpoint`` as ``torch.save`` does, and read the values of some tensors with ``late``.

    Raises:
        RuntimeError: If the shape or dtype of the values differs from that of their tensor.
    """
    if late is None:
        torch.save(checkpoint, file)
        return
    tensors: list[Tensor] = []
    values: Iterator[Tensor] = iter(())

    def read(number: int) -> Tensor:
        nonlocal values
        if number == 0:  # everything has been pickled
            values = late.read(tensors)
        return next(values)

    class StreamPickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, Tensor) or late is None or not late.has(obj):
                return NotImplemented
            tensors.append(obj)
            return _LateStorage(obj, partial(read, len(tensors) - 1)).reduced()

    try:
        torch.save(checkpoint, file, pickle_module=SimpleNamespace(Pickler=StreamPickler, __name__=pickle.__name__))
    finally:
        tensors.clear()  # the class is in a reference cycle, so it lives until the next garbage collection
        values = iter(())


class _LateStorage(torch.storage.TypedStorage):
    """A storage without memory whose values are read when ``torch.save`` writes them.

    ``torch.save`` pickles first and then writes one storage after another. It copies a storage of another device to the
    CPU just before it writes the storage, and frees the copy before the next one. This storage is on the ``meta``
    device, and its copy on the CPU is what ``read`` returns. In the file it is a CPU storage.

    Args:
        tensor: A tensor on the ``meta`` device. No other tensor may use its storage.
        read: Returns the values.
    """

    def __new__(cls, *args: Any) -> "_LateStorage":
        return cast("_LateStorage", object.__new__(cls))  # TypedStorage.__new__ does not accept these arguments

    def __init__(self, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        self.dtype, self._tensor = tensor.dtype, tensor
        self._untyped_storage = cast(Any, _LateBytes(tensor, read))
        self._fake_device = cast(Any, "cpu")  # the same string as for other storages, so that pickle writes it once
        self._of_empty = torch.empty(0, dtype=tensor.dtype).__reduce_ex__(2)
        self._is_untyped = isinstance(self._of_empty[1][0], torch.UntypedStorage)

    def reduced(self) -> tuple[Any, ...]:
        """Return what ``Tensor.__reduce_ex__`` would return for a CPU tensor with the values."""
        rebuild, arguments = self._of_empty
        tensor = self._tensor
        return rebuild, (self, 0, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, *arguments[5:])

    def _size(self) -> int:
        return self._untyped_storage.nbytes() if self._is_untyped else self._tensor.numel()

    def _pickle_storage_type(self) -> str:
        return "UntypedStorage" if self._is_untyped else cast(str, super()._pickle_storage_type())


class _LateBytes:
    """Takes the place of the ``UntypedStorage`` of a :class:`_LateStorage`."""

    device = torch.device("meta")

    def __init__(self, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        self._tensor, self._read = tensor, read
        self._cdata = -id(self)  # negative, so it equals no address of a storage

    def nbytes(self) -> int:
        return self._tensor.numel() * self._tensor.element_size()

    def cpu(self) -> Any:
        """Return a storage with the values.

        Raises:
            RuntimeError: If the shape or dtype of the values differs from that of the tensor.
        """
        value, tensor = self._read(), self._tensor
        if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            raise RuntimeError(
                f"a tensor changed from {list(tensor.shape)} {tensor.dtype} to {list(value.shape)} {value.dtype} "
                "while it was being saved"
            )
        storage = value.untyped_storage()
        if value.stride() != tensor.stride() or value.storage_offset() or storage.nbytes() != self.nbytes():
            in_order = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            storage = in_order.copy_(value).untyped_storage()
        return storage
