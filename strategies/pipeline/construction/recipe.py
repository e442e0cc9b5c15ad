"""Recipes: the operations that compute the values of a storage, in the order in which the code called them.

Any process that replays a recipe gets the same values, bit by bit. Each operation that draws random numbers is kept
with the state of the generator, so recipes can be replayed in any order and in any process.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from strategies.common.torch_compat import named_operator, tree_map_only
from strategies.common.trees import tensors_in
from strategies.pipeline.construction.stored import Stored


@dataclass(frozen=True)
class View:
    """A tensor on an unbuilt storage.

    Attributes:
        storage: The number of the storage.
        num_bytes: The size of the storage.
        dtype, size, stride, offset: The geometry of the tensor.
    """

    storage: int
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor on a storage with values."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    @property
    def is_whole(self) -> bool:
        """Whether the tensor contains every element of the storage exactly once."""
        count = 1
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: pair[1]):
            if size != 1 and stride != count:
                return False
            count *= size
        return self.offset == 0 and count * self.dtype.itemsize == self.num_bytes


@dataclass
class RecipeStep:
    """An operation on tensors without memory.

    Attributes:
        operator: Namespace, name and overload of the operator; ``None`` if the result is the only argument.
        args, kwargs: The arguments, with a :class:`View` in place of each tensor on an unbuilt storage, and
            :class:`Stored` in place of values in files.
        outputs: A view for each tensor that the operation returns, except for views of arguments.
        default_dtype: The default dtype when the code called the operation.
        random_state: The state of the generator, if the operation draws random numbers.
    """

    operator: tuple[str, str, str] | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[View] = ()
    default_dtype: torch.dtype = torch.float32
    random_state: Tensor | None = None

    def run(self, storages: dict[int, UntypedStorage]) -> None:
        """Replay the operation.

        Args:
            storages: The values of unbuilt storages so far, by number. Storages that the operation writes are added.
        """

        def real(view: View) -> Tensor:
            if view.storage not in storages:
                storages[view.storage] = UntypedStorage(view.num_bytes)
            return view.on(storages[view.storage])

        args, kwargs = tree_map_only(View, real, (list(self.args), dict(self.kwargs)))
        args, kwargs = tree_map_only(_Constant, lambda constant: constant.value(), (args, kwargs))
        if self.operator is None:
            results = args
        else:
            draws = self.random_state is not None
            with _default_dtype(self.default_dtype), torch.random.fork_rng(devices=[], enabled=draws):
                if self.random_state is not None:
                    torch.set_rng_state(self.random_state)
                try:
                    results = tensors_in(named_operator(*self.operator)(*args, **kwargs))
                except Exception as error:  # of any kind, from an operator
                    raise RuntimeError(
                        f"`{self.operator[1]}`, called while the model was built in configure_model or init_module, "
                        f"cannot be repeated: {error}. Build the model in __init__, or compute this value differently."
                    ) from error
        for view, result in zip(self.outputs, results, strict=bool(self.outputs)):
            storages[view.storage] = _placed(view, result)


@dataclass(frozen=True)
class _Constant:
    """A tensor with values, or a reference to a tensor in a file."""

    tensor: Tensor | None
    stored: Stored | None = None

    def value(self) -> Tensor:
        if self.stored is not None:
            return self.stored.read()
        assert self.tensor is not None
        return self.tensor


def constant(tensor: Tensor | None, stored: Stored | None = None) -> Any:
    """Return the object that represents a tensor with values in the arguments of a :class:`RecipeStep`."""
    return _Constant(tensor, stored)


@dataclass
class Recipe:
    """How to compute the values of one storage.

    Attributes:
        storage: The number of the storage.
        num_bytes: The size of the storage.
        steps: The operations to run, in order.
    """

    storage: int
    num_bytes: int
    steps: list[RecipeStep]

    def replay(self, known: Mapping[int, UntypedStorage] | None = None) -> UntypedStorage:
        """Return a storage with the values. The caller may change them.

        Args:
            known: Storages that have been computed before, by number. The operations change them.
        """
        storages = dict(known or {})
        last_use: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            for view in views_in(step):
                last_use[view.storage] = i
        with torch.no_grad():
            for i, step in enumerate(self.steps):
                step.run(storages)
                for number in [n for n, last in last_use.items() if last == i and n != self.storage]:
                    storages.pop(number, None)
        return storages.get(self.storage) or UntypedStorage(self.num_bytes)


def views_in(step: RecipeStep) -> Iterator[View]:
    """Return the views in the arguments and outputs of a step."""
    found: list[View] = []
    tree_map_only(View, found.append, (list(step.args), dict(step.kwargs), list(step.outputs)))
    return iter(found)


def is_random(operator: Any) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def _placed(view: View, result: Tensor) -> UntypedStorage:
    """Return a storage in which ``view`` has the values of ``result``."""
    storage = result.untyped_storage()
    is_placed = (
        storage.nbytes() == view.num_bytes
        and result.stride() == view.stride
        and result.storage_offset() == view.offset
        and result.dtype == view.dtype
    )
    if is_placed:
        return storage
    storage = UntypedStorage(view.num_bytes)
    view.on(storage).copy_(result)
    return storage


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
