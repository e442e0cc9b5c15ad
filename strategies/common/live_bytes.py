"""Count the bytes of live tensors that a block of code allocates: the current number and the maximum.

Unlike the memory of a process, these bytes do not depend on the allocator, and tensors on the ``meta`` device count as
if they had memory. Memory that an operator allocates and frees within its kernel and sparse tensors do not count.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strategies.common.torch_compat import TorchDispatchMode, number_of_storage, storage_key
from strategies.common.trees import tensors_in


class LiveBytes(TorchDispatchMode):
    """Mode that counts the storages that operators of this thread return, until they are freed.

    Attributes:
        bytes: The current number of live bytes.
        peak: The maximum of ``bytes`` since the start, or since :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def reset_peak(self) -> None:
        """Set the peak to the current number of bytes."""
        self.peak = self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(map(storage_key, _with_storage((args, kwargs))))  # views and in-place operators return these
        result = func(*args, **(kwargs or {}))
        for tensor in _with_storage(result):
            storage = tensor.untyped_storage()
            number = number_of_storage(storage)
            if number not in self._known and number not in given:
                self._add(number, storage)
        return result

    def _add(self, number: int, storage: Any) -> None:
        size = storage.nbytes()
        self._known[number] = weakref.ref(storage, partial(self._free, number, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _free(self, number: int, size: int, reference: Any) -> None:
        del self._known[number]
        self.bytes -= size


def _with_storage(value: Any) -> list[Tensor]:
    """Return the tensors in a value that have a storage. Sparse tensors have none."""
    return [tensor for tensor in tensors_in(value) if tensor.layout is torch.strided]
