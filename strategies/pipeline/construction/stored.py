"""Values in files: what a process gets instead of values, and reads by itself."""

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
    """Where the values of a tensor are, besides memory.

    Attributes:
        tensor: A tensor on the storage, which therefore exists as long as the reference.
        refer: Returns where the values of a tensor on this storage are.
        version: How often the storage had been changed in place when its values were those in the file.
    """

    tensor: Tensor
    refer: Callable[[Tensor], Stored]
    version: int


class References:
    """The references that are in use; none, outside of :meth:`used`."""

    def __init__(self) -> None:
        self._found: Mapping[int, FileReference] = {}

    @contextmanager
    def used(self, found: Mapping[int, FileReference]) -> Iterator[None]:
        """Within this, values that are in a file too are referred to.

        Args:
            found: The references, by the number of the storage.
        """
        self._found = found
        try:
            yield
        finally:
            self._found = {}

    def stored(self, tensor: Tensor) -> Stored | None:
        """Return where the values of a tensor are; ``None`` if they are in memory only, or have been changed there."""
        reference = self._found.get(storage_key(tensor))
        if reference is None or num_changes(reference.tensor) != reference.version:
            return None
        return reference.refer(tensor)
