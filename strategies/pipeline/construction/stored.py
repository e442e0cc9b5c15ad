"""Values in files: a process gets a reference instead of values, and reads the file itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from strategies.common.torch_compat import num_changes, storage_key


class Stored(ABC):
    """A tensor in a file that every process can read."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return the values."""


@dataclass(frozen=True)
class FileReference:
    """Where the values of a storage are in a file.

    Attributes:
        tensor: A tensor on the storage. It keeps the storage alive as long as the reference.
        refer: Returns the place in the file of the values of a tensor on this storage.
        version: The number of in-place changes of the storage when its values equalled those in the file.
    """

    tensor: Tensor
    refer: Callable[[Tensor], Stored]
    version: int


def where_stored(tensor: Tensor, found: Mapping[int, FileReference]) -> Stored | None:
    """Return where the values of a tensor are; ``None`` if they are only in memory, or have changed in memory.

    Args:
        tensor: The tensor. A view with the conjugate or the negative values does not have the values of its storage.
        found: The references, by the number of the storage.
    """
    reference = found.get(storage_key(tensor))
    if reference is None or num_changes(reference.tensor) != reference.version or tensor.is_conj() or tensor.is_neg():
        return None
    return reference.refer(tensor)


class References:
    """The references in use. Outside of :meth:`used` there are none."""

    def __init__(self) -> None:
        self._found: Mapping[int, FileReference] = {}

    @contextmanager
    def used(self, found: Mapping[int, FileReference]) -> Iterator[None]:
        """Context in which references replace values that are also in a file.

        Args:
            found: The references, by the number of the storage.
        """
        self._found = found
        try:
            yield
        finally:
            self._found = {}

    def stored(self, tensor: Tensor) -> Stored | None:
        """Return where the values of a tensor are; see :func:`where_stored`."""
        return where_stored(tensor, self._found)
