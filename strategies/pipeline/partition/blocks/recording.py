"""The recorded calls of one pass: the values that the stages pass on, and the calls that cannot be deferred."""

import pickle
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import cloudpickle
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from strategies.common.stage_layers import dotted
from strategies.common.torch_compat import num_changes, tree_flatten, tree_leaves, tree_unflatten
from strategies.common.transformers_compat import active_collector, captures_in, collect
from strategies.pipeline.partition.blocks.calls import BlockCall, Plan, TableEntry, Value
from strategies.pipeline.partition.blocks.output import DeferredOutput
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.microbatch.split import is_object, pack_objects

NOT_JOINED = (
    "it does not have one row per sample, or this is not clear, so its values for the micro-batches cannot be joined. "
    "Use schedule='1f1b'"
)
"""Why a deferred output of a split batch has no value."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


class RecordedCalls:
    """The calls of one pass.

    Args:
        path: Dotted path of the blocks.
        names: The names of the blocks, in order.
        blocks: The blocks.
    """

    def __init__(self, path: str, names: Sequence[str], blocks: nn.ModuleList) -> None:
        self._path, self.names, self._blocks = path, names, blocks
        self._calls: dict[str, BlockCall] = {}
        self.table: list[Any] = []
        """The tensors that the model passes to blocks; ``None`` for tensors that blocks will return."""
        self.hidden_slot = -1
        """The slot of the hidden state that the first block gets."""
        self.shapes: dict[int, torch.Size] = {}
        """For each slot of an output, the shape that the model was given."""
        self.last_arguments: tuple[tuple[Any, ...], dict[str, Any], list[Any]] = ((), {}, [])
        """The arguments of the last block, and their leaves."""
        self._originals: dict[int, Tensor] = {}
        """Inference tensors, which have no count of in-place changes. The table has copies of them."""
        self._slots: dict[int, int] = {}
        """The slot of each tensor that the model passes, by identity. The table keeps the tensors alive."""
        self._num_changes: dict[int, int] = {}
        """For each of these slots, the tensor's number of in-place changes when a block first got it."""
        self._settings: tuple[bool, PassContext] | None = None
        """The settings under which the first block was called."""
        self._outputs: list[ref[DeferredOutput]] = []
        self._last_use: dict[int, str] = {}
        self._users: dict[int, tuple[str, str]] = {}
        """For each slot, the first block that takes the tensor, and the argument."""
        self._last_output: Any = None
        self.returned: list[int] = []
        self._captured: list[tuple[int, MutableMapping[str, Any]]] = []
        """For each block with captured outputs, the slots and destinations of these outputs."""

    def record(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        find_output: Callable[[str, tuple[Any, ...], dict[str, Any], list[Any]], tuple[Any, bool]],
    ) -> bool:
        """Record a call.

        Returns:
            Whether this was the call of the last block.

        Raises:
            RuntimeError: If this is not the next block in order, or an argument cannot be sent to another process.
        """
        self._check_order(name)
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
        fixed: dict[int, str] = {}
        first: Tensor | None = None
        template = list(given)
        for place, leaf in enumerate(given):
            if isinstance(leaf, Tensor):
                slot, is_input = self._slot_of(block, arguments[place], leaf)
                if is_input:
                    fixed[slot] = arguments[place]
                first = leaf if first is None else first
                self._last_use[slot] = name
                self._users.setdefault(slot, (block, arguments[place]))
                template[place] = TableEntry(slot)
        self._check_settings(block)
        call = BlockCall(tree_unflatten(template, spec), None, fixed, has_objects, [], **self._capture(name, args))
        if not self._calls:
            self.hidden_slot = self._hidden_slot(kwargs, given)
        if name == self.names[-1]:
            self._calls[name], self.last_arguments = call, (args, kwargs, leaves)
            return True
        output, is_guess = find_output(name, args, kwargs, leaves)
        device = torch.device("cpu") if first is None else first.device
        leaves, spec = tree_flatten(output)
        slots: list[Any] = []
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                _check_output(block, leaf)
                slots.append(leaf)
                continue
            what = f"the output of block {block}" if len(leaves) == 1 else f"output {place} of block {block}"
            deferred = DeferredOutput(leaf, device, len(self.table), what)
            self.table.append(None)
            self._outputs.append(ref(deferred))
            self.shapes[deferred.slot] = leaf.shape
            slots.append(TableEntry(deferred.slot))
            leaves[place] = deferred
        self._last_output = tree_unflatten(leaves, spec)
        assumed = (tuple(output.shape[1:]), output.dtype) if is_guess else None
        told = {slot.number: tuple(self.shapes[slot.number][1:]) for slot in slots if isinstance(slot, TableEntry)}
        self._calls[name] = replace(call, output=tree_unflatten(slots, spec), assumed=assumed, shapes=told)
        return False

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

    def differs_from(self, other: "RecordedCalls") -> str | None:
        """Return an argument that is not a tensor and differs from ``other``; ``None`` if there is none."""
        for name, call in self._calls.items():
            leaves, spec = tree_flatten(call.arguments)
            others, other_spec = tree_flatten(other._calls[name].arguments)
            if spec != other_spec:
                return f"an argument of block {dotted(self._path, name)}"
            arguments = _arguments_of(*call.arguments, len(leaves))
            for argument, one, two in zip(arguments, leaves, others, strict=True):
                if type(one) is not type(two) or (isinstance(one, _PLAIN) and one != two and one == one):
                    return f"argument {argument!r} of block {dotted(self._path, name)}"
        return None

    def _capture(self, name: str, args: tuple[Any, ...]) -> dict[str, Any]:
        """Record the outputs that hooks of ``transformers`` would capture in a block."""
        collector = active_collector()
        captures = captures_in(self._blocks.get_submodule(name), collector) if collector is not None else []
        if collector is None or not captures:
            return {}
        if name == self.names[0] and args and any((c.path, c.key) == ("", "hidden_states") for c in captures):
            collect(collector, {"hidden_states": [args[0]]})  # includes the input of the blocks
        slot = TableEntry(len(self.table))
        self.table.append(None)
        self._captured.append((slot.number, collector))
        return {"captures": captures, "captured": slot}

    def last_output(self) -> Any:
        """Return the output of the last recorded call, with deferred outputs. Can be called once."""
        output, self._last_output = self._last_output, None
        return output

    def made_any_of(self, value: Any) -> bool:
        """Return whether a deferred output of this recording is in ``value``."""
        return any(isinstance(leaf, DeferredOutput) and self._made(leaf) for leaf in tree_leaves(value))

    def _made(self, deferred: DeferredOutput) -> bool:
        return any(made() is deferred for made in self._outputs)

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
            f"blocks {self.names[0]} to {self.names[-1]} once each, in this order. Switch off what skips or repeats "
            "blocks, such as layerdrop, or name another list of blocks by module=..."
        )

    def _check_settings(self, block: str) -> None:
        """Check that all blocks run under the same settings, and that no ``torch.utils.checkpoint`` calls the first."""
        settings = torch.is_grad_enabled(), PassContext.capture(self.device.type)
        if self._settings is None:
            self._settings = settings
            _refuse_checkpoint_around(block)
        if settings != self._settings:
            what = "grad mode" if settings[0] != self._settings[0] else "autocast or other setting"
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
        for made in self._outputs:
            if (deferred := made()) is not None:
                deferred.value = torch.zeros(self.shapes[deferred.slot], dtype=deferred.dtype, device=self.device)

    def _check_unchanged(self, slot: int) -> None:
        """Check that the model has not changed a tensor in place since a block first got it."""
        if slot in self._num_changes and num_changes(self.table[slot]) != self._num_changes[slot]:
            raise self._was_changed(slot)

    def _was_changed(self, slot: int) -> RuntimeError:
        return RuntimeError(
            f"the model has changed {self.describe(slot)} in place after it called the block; the blocks run later "
            "and would get the changed value. Give each block a separate tensor."
        )

    def _slot_of(self, block: str, argument: str, tensor: Tensor) -> tuple[int, bool]:
        """Return the slot of a tensor, and whether the model passes the tensor from outside of the blocks."""
        if isinstance(tensor, DeferredOutput):
            if self._made(tensor):
                return tensor.slot, False
            if tensor.value is None:
                raise tensor.refusal(torch.Tensor.to)
            tensor = tensor.value
        if _id(tensor) not in self._slots:
            slot = self._slots[_id(tensor)] = len(self.table)
            self._num_changes[slot] = num_changes(tensor)
            if tensor.is_inference():
                self._originals[slot] = tensor
            self.table.append(tensor.clone() if tensor.is_inference() else tensor)
        self._check_unchanged(self._slots[_id(tensor)])
        return self._slots[_id(tensor)], True

    def value(self) -> Value:
        """Return the value that the stages pass on.

        Raises:
            RuntimeError: If the model has changed an argument of a block in place.
        """
        for slot in self._num_changes:
            self._check_unchanged(slot)
        for slot, original in self._originals.items():
            if not torch.equal(original, self.table[slot]):
                raise self._was_changed(slot)
        alive = [made for made in (made() for made in self._outputs) if made is not None]
        returned = self.returned = [*(made.slot for made in alive), *(slot for slot, _ in self._captured)]
        kept = set(returned)
        used = {slot for slot, _ in self._last_use.items()}
        dropped: dict[str, list[int]] = {name: [] for name in self.names}
        for slot, name in self._last_use.items():
            if slot not in kept:
                dropped[name].append(slot)
        for name, call in self._calls.items():
            slots = [leaf.number for leaf in tree_leaves(call.output) if isinstance(leaf, TableEntry)]
            dropped[name] += [slot for slot in slots if slot not in used and slot not in kept]
        calls = {name: replace(call, dropped=dropped[name]) for name, call in self._calls.items()}
        plan = Plan(self._path, calls, self.names[-1], returned)
        return self.table, cloudpickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)

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
        for made in self._outputs:
            if (deferred := made()) is None or deferred.slot not in values:
                continue
            value, is_of_batch = values[deferred.slot]
            if is_of_batch:
                deferred.value = value
            else:
                deferred.ended = NOT_JOINED

    def describe(self, slot: int) -> str:
        """Describe the argument with a slot."""
        block, argument = self._users[slot]
        return f"argument {argument!r} (shape {list(self.table[slot].shape)}) of block {block}"

    def abandon(self, reason: str) -> None:
        """Record in the deferred outputs that they get no values."""
        for made in self._outputs:
            if (deferred := made()) is not None:
                deferred.ended = reason


def _refuse_checkpoint_around(block: str) -> None:
    """Refuse a call by ``torch.utils.checkpoint``, which only a frame on the stack shows."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise RuntimeError(
                f"block {block} is called within torch.utils.checkpoint, which would call it a second time in the "
                "backward pass. Disable it in the model, and set RPCSequentialStrategy(checkpoint=...); or use "
                "torch.utils.checkpoint within the block."
            )
        frame = frame.f_back


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
