"""The deferred calls of one pass: the values that the stages pass on, and the calls that cannot be deferred."""

import pickle
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import cloudpickle
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from strategies.common.joined_lists import why_one_list
from strategies.common.stage_layers import dotted
from strategies.common.torch_compat import TreeSpec, num_changes, tree_flatten, tree_leaves, tree_unflatten
from strategies.common.transformers_compat import active_collector, captures_in, collect
from strategies.pipeline.partition.blocks.calls import BlockCall, CallPlan, PlannedCalls, TableEntry
from strategies.pipeline.partition.blocks.expected import ExpectedOutputs, autocast_settings
from strategies.pipeline.partition.blocks.output import DeferredOutput
from strategies.pipeline.stage.layers import PassContext, refuse_checkpoint_around
from strategies.pipeline.stage.microbatch.split import PLAIN, is_object, pack_objects
from strategies.pipeline.transport.link import Unusual, structure_of

NOT_JOINED = (
    "it does not have one row per sample, or this is not clear, so its values for the micro-batches cannot be joined. "
    "Use schedule='1f1b'"
)
"""Why a deferred output of a split batch has no value."""

_MANY_CALLS, _MANY_PLANS = 4096, 64
"""Maximum number of known calls and plans. A model uses a few plans, and as many calls of each block."""


@dataclass(frozen=True)
class _OutputTensor:
    """A tensor in the output of a known call.

    Attributes:
        dtype: The dtype.
        shape: The shape; ``None`` if it is that of the table entry that :attr:`BlockCall.like` names.
    """

    dtype: torch.dtype
    shape: torch.Size | None


@dataclass(frozen=True)
class _KnownCall:
    """A call whose description later passes use again.

    Attributes:
        call: The call, without the entries that it drops.
        tensors: For each tensor among the arguments, its slot and the name or number of the argument.
        hidden_slot: The slot of the hidden state; -1 unless this is the first block.
        shapes: The shapes of the arguments, if those of the output follow from them; ``None`` if it does not matter.
        leaves: The leaves of the output.
        spec: The nesting of the output; ``None`` for the last block.
    """

    call: BlockCall
    tensors: Sequence[tuple[int, str]]
    hidden_slot: int
    shapes: Sequence[torch.Size] | None = None
    leaves: Sequence[Any] = ()
    spec: TreeSpec | None = None


class KnownCalls:
    """Descriptions of the calls and plans of earlier passes. Most passes repeat them with other tensors."""

    def __init__(self) -> None:
        self._calls: dict[Any, _KnownCall | None] = {}
        """The calls by a description of their arguments. Where shapes matter, this key leads to ``None``, and the key
        with the shapes to the call."""
        self._plans: dict[Any, tuple[Sequence[BlockCall], bytes]] = {}
        """The pickled plans by the identities of their calls, which they keep alive."""

    def call(self, key: Any, shapes: Callable[[], Sequence[torch.Size]]) -> _KnownCall | None:
        """Return a known call.

        Args:
            key: A description of its arguments without the shapes of tensors.
            shapes: Returns these shapes.
        """
        known = self._calls.get(key)
        return self._calls.get((key, *shapes())) if known is None and key in self._calls else known

    def add_call(self, key: Any, call: _KnownCall) -> None:
        """Store a call."""
        if len(self._calls) >= _MANY_CALLS:
            self._calls.clear()
            self._plans.clear()
        if call.shapes is not None:
            self._calls[key] = None
            key = key, *call.shapes
        self._calls[key] = call

    def plan(self, calls: Sequence[BlockCall], returned: Sequence[int], make: Callable[[], bytes]) -> bytes:
        """Return the pickled plan of some calls that returns some slots."""
        key = tuple(map(id, calls)), tuple(returned)
        if key not in self._plans:
            if len(self._plans) >= _MANY_PLANS:
                self._plans.clear()
            self._plans[key] = calls, make()
        return self._plans[key][1]


class DeferredCalls:
    """The calls of one pass.

    Args:
        path: Dotted path of the blocks.
        names: The names of the blocks, in order.
        blocks: The blocks.
        expected: Predicts the outputs of blocks.
        known: The calls of earlier passes.
    """

    def __init__(
        self, path: str, names: Sequence[str], blocks: nn.ModuleList, expected: ExpectedOutputs, known: KnownCalls
    ) -> None:
        self._path, self.names, self._blocks, self._expected, self._known = path, names, blocks, expected, known
        self._why_one_list = why_one_list(blocks, names[0])
        self._calls: dict[str, BlockCall] = {}
        self._are_known = True
        """Whether a later pass can use the descriptions of all calls again."""
        self.table: list[Any] = []
        """The tensors that the model passes to blocks; ``None`` for tensors that blocks will return."""
        self.hidden_slot = -1
        """The slot of the hidden state that the first block gets."""
        self.shapes: dict[int, torch.Size] = {}
        """For each slot of an output, the shape that the model was given."""
        self._kinds: dict[int, tuple[int, torch.dtype, torch.device]] = {}
        """For each slot, number of dimensions, dtype and device."""
        self.last_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        """The arguments of the last block."""
        self._originals: dict[int, Tensor] = {}
        """Inference tensors, which have no count of in-place changes. The table has copies of them."""
        self._slots: dict[int, int] = {}
        """The slot of each tensor that the model passes, by identity. The table keeps the tensors alive."""
        self._num_changes: dict[int, int] = {}
        """For each of these slots, the tensor's number of in-place changes when a block first got it."""
        self._settings: tuple[bool, PassContext] | None = None
        """The settings under which the first block was called."""
        self._outputs: dict[int, ref[DeferredOutput]] = {}
        """The deferred outputs by slot."""
        self._last_use: dict[int, str] = {}
        self._users: dict[int, tuple[str, str]] = {}
        """For each slot, the first block that takes the tensor, and the argument."""
        self._last_output: Any = None
        self.returned: list[int] = []
        self._captured: list[tuple[int, MutableMapping[str, Any]]] = []
        """For each block with captured outputs, the slots and destinations of these outputs."""

    def defer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Describe a call, which runs after the last call of the pass.

        Returns:
            Whether this was the call of the last block.

        Raises:
            RuntimeError: If this is not the next block in order, or an argument cannot be sent to another process.
        """
        self._check_order(name)
        slots: list[int] = []

        def describe(tensor: Tensor) -> Any:
            slot = self._slot_of(tensor)
            slots.append(slot)
            return slot, slot in self._num_changes, self._kinds[slot]

        def shapes() -> list[torch.Size]:
            return [self._shape_of(slot) for slot in slots]

        key: Any = None
        if active_collector() is None:
            with suppress(Unusual):
                arguments = structure_of((args, kwargs), describe)
                key = name, arguments, len(self.table), autocast_settings(), self._block(name).training
        if key is None:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._slot_of(leaf)
        known = None if key is None else self._known.call(key, shapes)
        self._check_settings(dotted(self._path, name))
        if known is None:
            known = self._described(name, args, kwargs)
            if key is not None:
                self._known.add_call(key, known)
        self._are_known &= key is not None
        self._add(name, known)
        if name == self.names[-1]:
            self.last_arguments = args, kwargs
            return True
        return False

    def _described(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _KnownCall:
        """Describe a call of which no earlier one is known."""
        block = dotted(self._path, name)
        leaves, spec = tree_flatten((args, kwargs))
        arguments = _arguments_of(args, kwargs, len(leaves))
        has_objects = False
        for argument, leaf in zip(arguments, leaves, strict=True):
            _check_plain(block, argument, leaf)
            if is_object(leaf):
                _check_object(block, argument, leaf)
                has_objects = True
        given = leaves
        if has_objects:
            packed = pack_objects((args, kwargs))
            given, spec = tree_flatten(packed)
            arguments = _arguments_of(packed[0], packed[1], len(given))
        template = [TableEntry(self._slot_of(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in given]
        tensors = [
            (leaf.number, argument)
            for leaf, argument in zip(template, arguments, strict=True)
            if isinstance(leaf, TableEntry)
        ]
        fixed = {slot: argument for slot, argument in tensors if slot in self._num_changes}
        call = BlockCall(tree_unflatten(template, spec), None, fixed, has_objects, [], **self._capture(name))
        hidden_slot = self._hidden_slot(kwargs, given) if name == self.names[0] else -1
        if name == self.names[-1]:
            return _KnownCall(call, tensors, hidden_slot)
        own = [self._slot_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        found = self._expected.of(name, args, kwargs)
        like = next(slot for slot in own if self._kinds[slot][1].is_floating_point) if found.is_like_first else None
        leaves, spec = tree_flatten(found.output)
        shapes: dict[int, tuple[int, ...]] = {}
        dtypes: dict[int, torch.dtype] = {}
        slots = list(leaves)
        next_slot = len(self.table)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                _check_output(block, leaf)
                continue
            slots[place], next_slot = TableEntry(next_slot), next_slot + 1
            leaves[place] = _OutputTensor(leaf.dtype, leaf.shape if like is None else None)
            dtypes[slots[place].number] = leaf.dtype
            if like is None:
                shapes[slots[place].number] = tuple(leaf.shape[1:])
        output = tree_unflatten(slots, spec)
        call = replace(call, output=output, like=like, is_guess=found.is_guess, shapes=shapes, dtypes=dtypes)
        needed = None if found.is_like_first else [self._shape_of(slot) for slot, _ in tensors]
        return _KnownCall(call, tensors, hidden_slot, needed, leaves, spec)

    def _add(self, name: str, known: _KnownCall) -> None:
        """Add a call, and make its deferred outputs."""
        block, call = dotted(self._path, name), known.call
        if not self._calls:
            self.hidden_slot = known.hidden_slot
        self._calls[name] = call
        for slot, argument in known.tensors:
            self._last_use[slot] = name
            self._users.setdefault(slot, (block, argument))
        if known.spec is None:
            return
        device, leaves = self._kinds[known.tensors[0][0]][2], list(known.leaves)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, _OutputTensor):
                continue
            if leaf.shape is not None:
                shape = leaf.shape
            else:
                assert call.like is not None
                shape = self._shape_of(call.like)
            slot = len(self.table)
            what = f"the output of block {block}" if len(leaves) == 1 else f"output {place} of block {block}"
            leaves[place] = DeferredOutput(shape, leaf.dtype, device, slot, what + self._why_one_list)
            self.table.append(None)
            self._outputs[slot] = ref(leaves[place])
            self.shapes[slot], self._kinds[slot] = shape, (len(shape), leaf.dtype, device)
        self._last_output = tree_unflatten(leaves, known.spec)

    def _block(self, name: str) -> nn.Module:
        block = self._blocks._modules[name]
        assert block is not None
        return block

    def _shape_of(self, slot: int) -> torch.Size:
        shape: torch.Size = self.shapes[slot] if slot in self.shapes else self.table[slot].shape
        return shape

    def _hidden_slot(self, kwargs: Mapping[str, Any], given: Sequence[Any]) -> int:
        """Return the slot of the hidden state: ``hidden_states``, or otherwise the first floating-point tensor."""
        named = kwargs.get("hidden_states")
        candidates = [named] if isinstance(named, Tensor) else [leaf for leaf in given if isinstance(leaf, Tensor)]
        floating = [tensor for tensor in candidates if tensor.is_floating_point()]
        tensor = (floating or candidates)[0]
        return tensor.slot if isinstance(tensor, DeferredOutput) and tensor.value is None else self._slots[_id(tensor)]

    def users(self) -> tuple[tuple[int, str, str], ...]:
        """Return for each slot the first block that takes the tensor, and the argument."""
        return tuple((slot, *user) for slot, user in sorted(self._users.items()))

    def differs_from(self, other: "DeferredCalls") -> str | None:
        """Return an argument that is not a tensor and differs from ``other``; ``None`` if there is none."""
        for name, call in self._calls.items():
            leaves, spec = tree_flatten(call.arguments)
            others, other_spec = tree_flatten(other._calls[name].arguments)
            if spec != other_spec:
                return f"an argument of block {dotted(self._path, name)}"
            arguments = _arguments_of(*call.arguments, len(leaves))
            for argument, one, two in zip(arguments, leaves, others, strict=True):
                if type(one) is not type(two) or (isinstance(one, PLAIN) and one != two and one == one):
                    return f"argument {argument!r} of block {dotted(self._path, name)}"
        return None

    def _capture(self, name: str) -> dict[str, Any]:
        """Note the outputs that hooks of ``transformers`` would capture in a block."""
        collector = active_collector()
        if collector is None:
            return {}
        deferred = {capture.key for call in self._calls.values() for capture in call.captures}
        captures = captures_in(self._block(name), collector, deferred)
        if not captures:
            return {}
        slot = TableEntry(len(self.table))
        self.table.append(None)
        self._captured.append((slot.number, collector))
        return {"captures": captures, "captured": slot}

    def last_output(self) -> Any:
        """Return the output of the latest deferred call, with deferred outputs. Can be called once."""
        output, self._last_output = self._last_output, None
        return output

    def made_any_of(self, value: Any) -> bool:
        """Return whether a deferred output of these calls is in ``value``."""
        return any(isinstance(leaf, DeferredOutput) and self._made(leaf) for leaf in tree_leaves(value))

    def _made(self, deferred: DeferredOutput) -> bool:
        made = self._outputs.get(deferred.slot)
        return made is not None and made() is deferred

    def _check_order(self, name: str) -> None:
        expected = self.names[len(self._calls)]
        if name == expected:
            return
        if not self._calls and name == self.names[-1]:
            raise RuntimeError(
                f"the model calls block {dotted(self._path, name)} first and so runs its blocks in the reverse order "
                "of the stages. Set `self.example_input_array` on the LightningModule, so that the order is known "
                "before the blocks are sent to their processes, and name this list alone by module=..."
            )
        called = ", ".join(self._calls) or "none"
        what = "a second time" if name in self._calls else f"before block {expected}"
        raise RuntimeError(
            f"the model calls block {dotted(self._path, name)} {what} (called so far: {called}); a pipeline runs the "
            f"blocks {self.names[0]} to {self.names[-1]}{self._why_one_list} once each, in this order. Switch off what "
            "skips or repeats blocks, such as layerdrop, or name another list of blocks by module=..."
        )

    def _check_settings(self, block: str) -> None:
        """Check that all blocks run under the same settings, and that no ``torch.utils.checkpoint`` calls the first."""
        if self._settings is None:
            self._settings = torch.is_grad_enabled(), PassContext.capture(self.device.type)
            refuse_checkpoint_around(f"block {block}")
            return
        grad, context = self._settings
        if grad != torch.is_grad_enabled() or context != PassContext.capture(self.device.type):
            what = "grad mode" if grad != torch.is_grad_enabled() else "autocast or other setting"
            raise RuntimeError(
                f"block {block} is called under a different {what} than block {dotted(self._path, self.names[0])}; "
                "all blocks of a pass run under the same settings. Freeze blocks by requires_grad_(False) instead of "
                "no_grad, and enter other settings within the block."
            )

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the model passes to blocks."""
        return next((leaf.device for leaf in self.table if isinstance(leaf, Tensor)), torch.device("cpu"))

    def give_zeros(self) -> None:
        """Set the deferred outputs of blocks that do not run to zeros."""
        for slot, made in self._outputs.items():
            if (deferred := made()) is not None:
                deferred.value = torch.zeros(self.shapes[slot], dtype=self._kinds[slot][1], device=self.device)

    def _check_unchanged(self, slot: int) -> None:
        """Check that the model has not changed a tensor in place since a block first got it."""
        if slot in self._num_changes and num_changes(self.table[slot]) != self._num_changes[slot]:
            raise self._was_changed(slot)

    def _was_changed(self, slot: int) -> RuntimeError:
        return RuntimeError(
            f"the model has changed {self.describe(slot)} in place after it called the block; the blocks run later "
            "and would get the changed value. Give each block a separate tensor."
        )

    def _slot_of(self, tensor: Tensor) -> int:
        """Return the slot of a tensor, which is a new one if the model has not passed the tensor to a block before."""
        if isinstance(tensor, DeferredOutput):
            if self._made(tensor):
                return tensor.slot
            if tensor.value is None:
                raise tensor.refusal(torch.Tensor.to)
            tensor = tensor.value
        if _id(tensor) not in self._slots:
            slot = self._slots[_id(tensor)] = len(self.table)
            self._num_changes[slot] = num_changes(tensor)
            if tensor.is_inference():
                self._originals[slot] = tensor
            self.table.append(tensor.clone() if tensor.is_inference() else tensor)
            self._kinds[slot] = tensor.dim(), tensor.dtype, tensor.device
        slot = self._slots[_id(tensor)]
        self._check_unchanged(slot)
        return slot

    def value(self) -> PlannedCalls:
        """Return the value that the stages pass on.

        Raises:
            RuntimeError: If the model has changed an argument of a block in place.
        """
        for slot in self._num_changes:
            self._check_unchanged(slot)
        for slot, original in self._originals.items():
            if not torch.equal(original, self.table[slot]):
                raise self._was_changed(slot)
        alive = [slot for slot, made in self._outputs.items() if made() is not None]
        self.returned = [*alive, *(slot for slot, _ in self._captured)]
        if not self._are_known:
            return self.table, self._plan()
        return self.table, self._known.plan(list(self._calls.values()), self.returned, self._plan)

    def _plan(self) -> bytes:
        """Return the pickled plan of all calls."""
        kept = set(self.returned)
        dropped: dict[str, list[int]] = {name: [] for name in self.names}
        for slot, name in self._last_use.items():
            if slot not in kept:
                dropped[name].append(slot)
        for name, call in self._calls.items():
            slots = [leaf.number for leaf in tree_leaves(call.output) if isinstance(leaf, TableEntry)]
            dropped[name] += [slot for slot in slots if slot not in self._last_use and slot not in kept]
        calls = {name: replace(call, dropped=dropped[name]) for name, call in self._calls.items()}
        plan = CallPlan(self._path, calls, self.names[-1], self.returned)
        return cloudpickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)

    def give_values(self, returned: Sequence[Any], joined: Sequence[bool]) -> None:
        """Set the values of the deferred outputs.

        Args:
            returned: The values of the slots that the plan returns.
            joined: For each slot, whether the values of the micro-batches could be joined to a value of the batch.
        """
        self.table = []
        values = dict(zip(self.returned, zip(returned, joined, strict=True), strict=True))
        for slot, collector in self._captured:
            captured, is_of_batch = values[slot]
            if not is_of_batch:
                raise RuntimeError(
                    f"the {' and '.join(captured)} of the blocks {dotted(self._path, self.names[0])} to "
                    f"{self.names[-1]} do not have one row per sample, so their values for the micro-batches "
                    "cannot be joined. Use schedule='1f1b'."
                )
            collect(collector, captured)
        for slot, made in self._outputs.items():
            if (deferred := made()) is None or slot not in values:
                continue
            value, is_of_batch = values[slot]
            if is_of_batch:
                deferred.value = value
            else:
                deferred.ended = NOT_JOINED

    def describe(self, slot: int) -> str:
        """Describe the argument with a slot."""
        block, argument = self._users[slot]
        return f"argument {argument!r} (shape {list(self.table[slot].shape)}) of block {block}"

    def abandon(self, reason: str) -> None:
        """Note in the deferred outputs that they get no values."""
        for made in self._outputs.values():
            if (deferred := made()) is not None:
                deferred.ended = reason


def _id(tensor: Tensor) -> int:
    """Return the identity of a tensor, or of the value of a deferred output of an earlier pass."""
    return id(tensor.value if isinstance(tensor, DeferredOutput) else tensor)


def _arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any], num_leaves: int) -> list[str]:
    """Return for each leaf of the arguments the name or number of its argument."""
    names = [*map(str, range(len(args))), *kwargs]
    if num_leaves == len(names):  # nothing is nested
        return names
    values = [*args, *kwargs.values()]
    return [name for name, value in zip(names, values, strict=True) for _ in tree_leaves(value)]


def _check_plain(block: str, argument: str, leaf: Any) -> None:
    if isinstance(leaf, nn.Module):
        raise RuntimeError(
            f"block {block} gets a module as argument {argument!r} ({type(leaf).__name__}). A module is not data: its "
            "parameters would be trained on a copy in another process. Make it a part of the block."
        )


def _check_output(block: str, leaf: Any) -> None:
    if is_object(leaf) or isinstance(leaf, nn.Module):
        raise RuntimeError(
            f"block {block} returns a {type(leaf).__name__}, which is neither a tensor nor a plain value, so the model "
            "cannot get it before the block has run. Let the block return tensors, in tuples, lists or dicts."
        )


def _check_object(block: str, argument: str, leaf: Any) -> None:
    if any(kind.__name__.endswith("Cache") for kind in type(leaf).__mro__):
        raise RuntimeError(
            f"block {block} gets a key-value cache as argument {argument!r} ({type(leaf).__name__}), which blocks in "
            "other processes would fill without effect. Call the model with use_cache=False, or set "
            "model.config.use_cache = False."
        )
