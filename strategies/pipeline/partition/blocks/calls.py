"""Calls of blocks as data, and how a stage runs them.

The value that the stages pass on is a table of tensors and a plan. For each block, the plan contains the arguments and
the output of its call. A :class:`TableEntry`, the number of a table entry, takes the place of each tensor:

    table   0: hidden   1: mask   2: output of block 0   3: output of block 1
    plan    block 0: ((TableEntry 0,), {mask: TableEntry 1}) -> TableEntry 2, drop 0
            block 1: ((TableEntry 2,), {mask: TableEntry 1}) -> TableEntry 3, drop 1, 2

A tensor that several blocks take is in the table once, so it is sent once per stage and micro-batch. A tensor that no
later block takes is dropped.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.stage_layers import dotted
from strategies.common.torch_compat import num_changes, tree_flatten
from strategies.common.transformers_compat import Capture, capturing
from strategies.pipeline.stage.edges import leaves_of
from strategies.pipeline.stage.layers import Before
from strategies.pipeline.stage.microbatch.split import PLAIN, freeze, objects_in, unpack_objects
from strategies.pipeline.transport.link import filled

_CONTAINERS = (dict, list, tuple)


@dataclass(frozen=True)
class TableEntry:
    """The number of an entry of the table, in place of a tensor."""

    number: int


@dataclass(frozen=True)
class BlockCall:
    """One call of a block.

    Attributes:
        arguments: Positional and keyword arguments, with a :class:`TableEntry` for each tensor.
        output: The output, with a :class:`TableEntry` for each tensor; not used for the last block.
        fixed: For each table entry that the block must not change in place, the name of the argument.
        has_objects: Whether any argument is an object that is neither a tensor nor a plain value.
        dropped: Table entries that no later call uses.
        like: The table entry whose shape beyond the first dimension the model was given for every tensor of the
            output; ``None`` if :attr:`shapes` has their shapes.
        is_guess: Whether the nesting of the output was not known in advance, and the model was given one tensor.
        shapes: For each table entry in the output, the shape beyond the first dimension that the model was given.
        dtypes: For each table entry in the output, the dtype that the model was given.
        captures: The outputs that hooks of ``transformers`` capture within the block.
        captured: The table entries for the captured outputs.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    output: Any
    fixed: Mapping[int, str]
    has_objects: bool
    dropped: Sequence[int]
    like: int | None = None
    is_guess: bool = False
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)
    captures: Sequence[Capture] = ()
    captured: TableEntry | None = None


@dataclass(frozen=True)
class CallPlan:
    """The calls of all blocks.

    Attributes:
        path: Dotted path of the blocks in the model, for messages.
        calls: The call of each block, by the block's name in its ``nn.ModuleList``.
        last: The name of the block that is called last.
        returned: Table entries that the model may use after the last call.
    """

    path: str
    calls: Mapping[str, BlockCall]
    last: str
    returned: Sequence[int]


PlannedCalls = tuple[list[Any], bytes]
"""The table and the pickled plan."""


def call_blocks(layers: nn.Sequential, value: PlannedCalls, before: Before) -> Any:
    """Run the deferred calls of some blocks; see :data:`~strategies.pipeline.stage.layers.CallLayers`.

    Returns:
        The value for the next stage. After the last block: the output of that block and the entries of the table that
        the plan returns.

    Raises:
        RuntimeError: If a block changed an argument in place, or if the nesting of its output differs from the plan.
    """
    table, pickled = list(value[0]), value[1]
    del value
    plan = _unpickled(pickled)
    for place, (name, block) in enumerate(layers._modules.items()):
        call = plan.calls[name]
        args, kwargs = filled(call.arguments, TableEntry, lambda entry: table[entry.number])
        if call.has_objects:
            args, kwargs = unpack_objects((args, kwargs))
        before(place, args)
        versions = {slot: num_changes(table[slot]) for slot in call.fixed}
        objects = {key: freeze(leaf) for key, leaf in objects_of(args, kwargs)} if call.has_objects else {}
        nested = {key: tree_flatten(value) for key, value in _containers(args, kwargs)}
        told = None if call.like is None else table[call.like].shape[1:]
        assert block is not None
        if call.captured is None:
            output = block(*args, **kwargs)
        else:
            with capturing(block, call.captures) as table[call.captured.number]:
                output = block(*args, **kwargs)
        for slot, argument in call.fixed.items():
            if num_changes(table[slot]) != versions[slot]:
                raise changed_argument(dotted(plan.path, name), argument, "tensor")
        for argument, leaf in objects_of(args, kwargs) if objects else ():
            if freeze(leaf) != objects[argument]:
                raise changed_argument(dotted(plan.path, name), argument, type(leaf).__name__)
        for argument, value in _containers(args, kwargs):
            (leaves, spec), (leaves_now, spec_now) = nested[argument], tree_flatten(value)
            if spec_now != spec or any(now is not leaf for now, leaf in zip(leaves_now, leaves, strict=True)):
                raise changed_argument(dotted(plan.path, name), argument, type(value).__name__)
        del args, kwargs
        if name == plan.last:
            return output, [table[slot] for slot in plan.returned]
        _store(dotted(plan.path, name), call, told, output, table)
        del output
        for slot in call.dropped:
            table[slot] = None
    return table, pickled


@lru_cache(maxsize=64)
def _unpickled(plan: bytes) -> CallPlan:
    found: CallPlan = pickle.loads(plan)
    return found


def objects_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects among the arguments, each with the name or number of its argument."""
    for argument, value in [*enumerate(args), *kwargs.items()]:
        for number, leaf in enumerate(objects_in(value)):
            yield f"{argument}" if number == 0 else f"{argument}, object {number}", leaf


def _containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments that are nested structures which a block can change, each with its name or number."""
    for argument, value in [*enumerate(args), *kwargs.items()]:
        changeable = value if isinstance(value, tuple) else [value]
        if any(isinstance(part, _CONTAINERS) for part in changeable):
            yield f"{argument}", value


def changed_argument(block: str, argument: str, kind: str) -> RuntimeError:
    return RuntimeError(
        f"block {block} changed its argument {argument!r}, a {kind}, in place. Other processes would not see the "
        "change. Let the block return what it computes, or change a copy. For a key-value cache of Hugging Face, call "
        "the model with use_cache=False."
    )


def _is_same(value: Any, expected: Any) -> bool:
    """Return whether a value that is not a tensor equals the one that the model was given."""
    if isinstance(value, torch.dtype) and isinstance(expected, torch.dtype):
        return _is_told(value, expected)
    if isinstance(value, PLAIN):
        return type(value) is type(expected) and (value == expected or value != value)
    return type(value) is type(expected)


def _is_told(dtype: torch.dtype, told: torch.dtype) -> bool:
    """Return whether a tensor may have a dtype if the model was told another one.

    Autocast has no effect on the ``meta`` device, so under autocast any floating-point dtype stands for any other.
    """
    is_autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    return dtype == told or (is_autocast and dtype.is_floating_point and told.is_floating_point)


def _store(block: str, call: BlockCall, told: torch.Size | None, output: Any, table: list[Any]) -> None:
    """Put the tensors of an output into the table.

    Args:
        block: The name of the block.
        call: The call.
        told: The shape of all tensors beyond the first dimension, as the model was told; ``None`` if they differ.
        output: The output.
        table: The table.
    """
    if call.is_guess:
        guess = call.dtypes[call.output.number]
        found = (output.shape[1:], output.dtype) if isinstance(output, Tensor) else None
        if found != (told, guess):
            what = f"a {type(output).__name__}"
            if found is not None:
                what = f"a tensor of shape [*, {list(found[0])}] and {found[1]}"
            raise RuntimeError(
                f"block {block} returned {what}, but its code cannot run without values (on the meta device), so the "
                f"model was told that it returns a tensor like its first argument, [*, {list(told or ())}] and "
                f"{guess}. Let the block return that, or put an nn.Sequential in place of the loop over the blocks."
            )
    (leaves, spec), (expected, expected_spec) = leaves_of(output), leaves_of(call.output)
    if spec != expected_spec:
        raise RuntimeError(
            f"block {block} returned {spec}, but its code, run on the meta device, {expected_spec}. A pipeline needs "
            "outputs whose nesting does not depend on values."
        )
    for leaf, slot in zip(leaves, expected, strict=True):
        if isinstance(leaf, Tensor) if isinstance(slot, TableEntry) else _is_same(leaf, slot):
            continue
        expectation = "a tensor" if isinstance(slot, TableEntry) else repr(slot)
        value = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
        raise RuntimeError(
            f"block {block} returned {value}, but the model, which ran before the block, was told that it returns "
            f"{expectation}. Of what a block returns only tensors may depend on values or on earlier calls."
        )
    for leaf, slot in zip(leaves, expected, strict=True):
        if isinstance(slot, TableEntry):
            expected_shape = call.shapes[slot.number] if told is None else told
            if leaf.shape[1:] != expected_shape:
                raise RuntimeError(
                    f"block {block} returned a tensor of shape [*, {list(leaf.shape[1:])}], but the model, which ran "
                    f"before the block, was told [*, {list(expected_shape)}]. Let the shape of what a block "
                    "returns follow from the shapes of its arguments in the same way for all lengths."
                )
            if not _is_told(leaf.dtype, call.dtypes[slot.number]):
                raise RuntimeError(
                    f"block {block} returned a tensor of {leaf.dtype}, but the model, which ran before the block, was "
                    f"told {call.dtypes[slot.number]}. Let the block convert what it returns to a dtype that depends "
                    "only on its arguments, and not on torch.autocast within the block."
                )
            table[slot.number] = leaf
