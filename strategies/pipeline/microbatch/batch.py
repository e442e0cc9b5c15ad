"""Splitting a whole batch, whatever it is made of, into micro-batches for code that takes batches.

What is split along its rows: tensors and arrays by their first dimension, and lists and tuples of other things (words,
labels) that have one entry a row. What holds such things is taken apart: lists, tuples, dicts, dataclasses. Everything
else, such as a number, a string or a :class:`~strategies.pipeline.NoChunk`, is given to every micro-batch.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import accumulate, pairwise
from typing import Any

from strategies.pipeline.microbatch.chunks import NoChunk

_Map = Callable[[Any, str], Any]

_DEFINE = "define split_batch(self, batch, num_microbatches) on the model, which returns one batch per micro-batch"


def split_batch(batch: Any, microbatches: int) -> tuple[list[Any], list[int]]:
    """Splits a batch into at most ``microbatches`` parts that are made like it.

    Sizes differ by at most one row, the larger parts first; there is no part without a row, unless the batch has none.

    Args:
        batch: Tensors of shape ``[batch, ...]`` and other things, in any nesting.
        microbatches: How many parts to make at most; at least 1.

    Returns:
        The parts, and the number of rows of each. Tensors in them are views of those of ``batch``.

    Raises:
        ValueError: If it is not clear how many rows there are.
    """
    rows = _num_rows(batch)
    parts = max(1, min(microbatches, rows))
    whole, more = divmod(rows, parts)
    sizes = [whole + (m < more) for m in range(parts)]
    bounds = [0, *accumulate(sizes)]

    def part(start: int, stop: int) -> Any:
        def cut(value: Any, name: str) -> Any:
            if _has_rows(value):
                return value[start:stop]
            if _is_column(value) and len(value) == rows:
                if parts > 1:
                    _check_column(value, name)
                return value[start:stop]
            return _rebuilt(value, name, cut)

        return cut(batch, "batch")

    return [part(start, stop) for start, stop in pairwise(bounds)], sizes


def _num_rows(batch: Any) -> int:
    sizes = {name: value.shape[0] for name, value in _walk(batch, "batch") if _has_rows(value)}
    sizes = sizes or {name: len(value) for name, value in _walk(batch, "batch") if _is_column(value)}
    if not sizes:
        raise ValueError(
            f"a batch of type {type(batch).__name__} has nothing with rows (no tensor with a first dimension, no "
            f"list), so it cannot be split into micro-batches; {_DEFINE}"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {number}" for name, number in sizes.items())
        raise ValueError(
            f"it is not clear how many rows the batch has: {listed}. Make every tensor's first dimension the batch; "
            "wrap a tensor that all rows share in NoChunk (from strategies.pipeline import NoChunk), and every "
            f"micro-batch gets it whole; or {_DEFINE}"
        )
    return next(iter(sizes.values()))


def _has_rows(value: Any) -> bool:
    """A tensor or an array with a first dimension that is to be split."""
    return _is_array(value) and bool(value.shape) and not isinstance(value, NoChunk)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_column(value: Any) -> bool:
    """A list or tuple, not of fields but of one thing for each row."""
    return (
        isinstance(value, list | tuple)
        and not hasattr(value, "_fields")
        and not any(_is_array(leaf) and leaf.shape for _, leaf in _walk(value, ""))
    )


def _check_column(value: Any, name: str) -> None:
    if all(isinstance(entry, list | tuple) and len(entry) == len(value) for entry in value):
        raise ValueError(
            f"it is not clear how to split {name}: it has {len(value)} entries, one for each row, which have as many "
            f"entries themselves, as if they were fields; {_DEFINE}"
        )


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The value, if it is not made of others, or those in it, with their names; lists too, ahead of what is in them."""
    yield name, value
    for inner_name, inner in _parts(value, name):
        yield from _walk(inner, inner_name)


def _parts(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f"{name}.{field}", inner) for field, inner in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"{name}[{k}]", inner) for k, inner in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f"{name}.{field.name}", getattr(value, field.name)) for field in fields(value)]
    return []


def _rebuilt(value: Any, name: str, cut: _Map) -> Any:
    """The same as ``value``, with ``cut`` done to what it is made of."""
    new = [cut(inner, inner_name) for inner_name, inner in _parts(value, name)]
    made: Any = copy.copy(value)
    if isinstance(value, Mapping):
        for key, inner in zip(value, new, strict=True):
            made[key] = inner
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*new)
    if isinstance(value, list | tuple):
        return type(value)(new)
    if is_dataclass(value) and not isinstance(value, type):
        for field, inner in zip(fields(value), new, strict=True):
            object.__setattr__(made, field.name, inner)  # also of frozen ones
        return made
    return value
