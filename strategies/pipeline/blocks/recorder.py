"""Records the calls of blocks while the model's own code runs, and runs them as one pass over the stages.

    for block in self.layers:              call of block 0      recorded, returns a deferred output
        hidden = block(hidden, mask)       call of block 1      recorded, returns a deferred output
    hidden = self.norm(hidden)             call of the last     runs all of them, returns the output

What the model does before, between and after the calls runs on the driver, as it stands.
"""

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any
from weakref import ref

import cloudpickle
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from strategies.common.patching import replaced
from strategies.common.torch_compat import (
    CALL_ATTRIBUTE,
    call_of_module,
    not_compiled,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from strategies.common.transformers_compat import active_collector, captures_in, collect, collector_hidden
from strategies.pipeline.blocks.calls import BlockCall, Plan, Slot, Value, call_blocks, num_changes
from strategies.pipeline.blocks.output import DeferredOutput
from strategies.pipeline.blocks.rows import (
    Rows,
    all_follow,
    are_rows,
    decide,
    kinds_of,
    num_rows,
    square_in,
    tensors_of,
    with_rows,
    with_tensors_replaced,
)
from strategies.pipeline.microbatch.split import is_object, pack_objects
from strategies.pipeline.stage.layers import (
    Before,
    PassContext,
    is_checkpointing,
    is_recomputing,
    preserved_random_state,
)

FindRows = Callable[[], list[bool] | None]
"""Returns for each entry of the table whether it has rows; ``None`` if the batch cannot be split."""

Run = Callable[[Value, FindRows], tuple[Any, list[Any]]]
"""Runs the value through all stages; returns the output of the last block and the returned table entries."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has, such as the dict of its hooks."""


class _Left(Enum):
    """What a micro-batch has in place of a tensor that cannot be joined; plain, so that it passes through a stage."""

    OUT = "left out"


_NOT_JOINED = (
    "it has not one row per sample, or that is not clear, so its values for the micro-batches cannot be joined. Use "
    "schedule='1f1b'"
)


class _Reached(BaseException):
    """Ends a probe at the call of the last block. Not an ``Exception``, so that the model's code does not catch it."""

    def __init__(self, recording: "_Recording") -> None:
        super().__init__()
        self.recording = recording


class DeferredBlocks:
    """Takes over the calls of the blocks in an ``nn.ModuleList`` between :meth:`start` and :meth:`end`.

    Args:
        blocks: The list.
        run: Runs the recorded calls.
        path: The dotted path of the list in ``model``.
        model: The whole model. The calls of the modules that contain the list tell how many rows a batch has.
        order: The names of the blocks in the order in which the model calls them; by default that of the list.
    """

    def __init__(
        self,
        blocks: nn.ModuleList,
        run: Run,
        path: str = "blocks",
        model: nn.Module | None = None,
        order: Sequence[str] | None = None,
    ) -> None:
        self._blocks, self._run, self.path, self._model = blocks, run, path, model
        self._names = list(order or blocks._modules)
        self._outputs: dict[Any, _Known] = {}
        """What blocks return, by block and the kinds of its arguments; see :meth:`_output`."""
        self._recording: _Recording | None = None
        self._is_probing = self._in_stage = False
        self._outer_calls: list[tuple[Callable[..., Any], Any]] = []
        """Calls in progress of modules that contain the list, with their arguments; the outermost one first."""
        self._rows: dict[Any, tuple[Rows | None, str]] = {}
        """What has rows, or why that is not clear, by the arguments of all blocks and their kinds."""
        self._left_out: dict[bytes, list[int]] = {}
        """By plan, the tensors in the output of the last block that cannot be joined over micro-batches."""
        self._split: Rows | None = None
        """What has rows in the current pass, if it is split."""
        self._parts: list[tuple[Any, list[Any]]] = []
        """The outputs of the micro-batches of the current pass."""
        self._ending = ExitStack()

    def start(self) -> None:
        """Take over the calls of all blocks."""
        for name, block in self._blocks._modules.items():
            assert block is not None
            call = not_compiled(partial(self._called, name, call_of_module(block)))
            self._ending.callback(replaced(block, CALL_ATTRIBUTE, call))
        for module in self._containers():
            outer = not_compiled(partial(self._container_called, call_of_module(module)))
            self._ending.callback(replaced(module, CALL_ATTRIBUTE, outer))

    def end(self) -> None:
        """Give the blocks their own calls back."""
        self._ending.close()
        self._recording, self._parts, self._split = None, [], None

    def call(self, layers: nn.Sequential, value: Value, before: Before) -> Any:
        """Run recorded calls on this process; see :func:`~strategies.pipeline.blocks.calls.call_blocks`."""
        self._in_stage = True
        try:
            with collector_hidden():
                output = call_blocks(layers, value, before)
        finally:
            self._in_stage = False
        if self._names[-1] not in layers._modules:
            return output
        trains = torch.is_grad_enabled() or is_checkpointing() or is_recomputing()
        if trains and (left_out := self._left_out.get(value[1])):  # the same in the recomputation
            output = with_tensors_replaced(output[0], left_out, lambda tensor: _Left.OUT), output[1]
        if not is_recomputing():
            self._parts.append(output)
        return output

    def _containers(self) -> list[nn.Module]:
        """The modules that contain the list, outermost first."""
        parts = self.path.split(".")[:-1]
        found = [self._model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)] if self._model else []
        return [module for module in found if not isinstance(module, nn.ModuleList | nn.ModuleDict)]

    def _container_called(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._outer_calls.append((own, (args, kwargs)))
        try:
            return own(*args, **kwargs)
        finally:
            self._outer_calls.pop()

    def _called(self, name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call of a block by the model, or run one that a stage makes."""
        if self._in_stage:
            return own(*args, **kwargs)
        recording = self._recording
        if recording is None or (recording.names[0] == name and not recording.made_any_of((args, kwargs))):
            if recording is not None:
                recording.abandon(f"block {self.path}.{name} was called first for another pass")
            recording = self._recording = _Recording(self.path, self._names, self._blocks)
        try:
            if not recording.record(name, args, kwargs, self._output):
                return recording.last_output()
        except BaseException:
            self._recording = None
            raise
        self._recording = None
        if self._is_probing:
            raise _Reached(recording)
        self._parts, self._split = [], None
        value = recording.value()
        output, returned = self._run(value, partial(self._find_rows, recording, value[1]))
        recording.give_values(returned, [self._can_be_joined(slot, k) for k, slot in enumerate(recording.returned)])
        self._check_last_output(name)
        self._parts, self._split = [], None
        if torch.is_grad_enabled() and value[1] in self._left_out:
            output = tree_map(lambda leaf: self._not_joined(name) if leaf is _Left.OUT else leaf, output)
        return output

    def _not_joined(self, name: str) -> DeferredOutput:
        """Return what stands in place of a tensor of the last block's output that has no rows."""
        made = DeferredOutput(
            torch.empty(0, device="meta"), self._device(), -1, f"an output of block {self.path}.{name}"
        )
        made.ended = _NOT_JOINED
        return made

    def _can_be_joined(self, slot: int, k: int) -> bool:
        """Return whether the ``k``-th returned entry of the table, of a slot, is right for the whole batch."""
        if len(self._parts) < 2 or self._split is None:
            return True
        if self._split.is_joined is not None and slot in self._split.is_joined:
            return self._split.is_joined[slot]
        columns = zip(*(tree_leaves(returned[k]) for _, returned in self._parts), strict=True)
        return all(are_rows(column, self._split.sizes(len(self._parts))) for column in columns)

    def _check_last_output(self, name: str) -> None:
        """Check the output of the last block, of a batch that was split, if it was not known in advance."""
        if len(self._parts) < 2 or self._split is None or self._split.last is not None:
            return
        for (output, _), size in zip(self._parts, self._split.sizes(len(self._parts)), strict=True):
            if not isinstance(output, Tensor) or not output.dim() or len(output) != size:
                raise RuntimeError(
                    f"block {self.path}.{name} returned {type(output).__name__} {getattr(output, 'shape', '')} for a "
                    f"micro-batch of {size} rows, so the outputs of the micro-batches cannot be joined. Use "
                    "schedule='1f1b'."
                )

    def _find_rows(self, recording: "_Recording", plan: bytes) -> list[bool] | None:
        """Decide which tensors of a recording have rows.

        Raises:
            RuntimeError: If that is not clear in a pass that trains; another pass runs as one micro-batch then.
        """
        outer = self._outer_calls[0] if self._outer_calls else None
        rows = num_rows(outer[1]) if outer is not None else 0
        if rows == 1:
            return None
        key = recording.users(), kinds_of(recording.table, rows)
        why = "no module that contains the blocks was called with tensors that have rows"
        if outer is not None and rows:
            if key not in self._rows:
                self._rows[key] = self._evidence(recording, *outer, rows)
            found, why = self._rows[key]
            if found is not None and not torch.is_grad_enabled() and not found.joins(recording.returned):
                return None
            if found is not None:
                self._split = replace(found, rows=rows)
                if found.last is not None and not all(found.last):
                    self._left_out[plan] = [k for k, has_rows in enumerate(found.last) if not has_rows]
                return found.table
        if not torch.is_grad_enabled():
            return None
        raise RuntimeError(
            f"it is not clear how to split the batch into micro-batches: {why}. Use schedule='1f1b', which runs the "
            "model once per micro-batch."
        )

    def _evidence(
        self, recording: "_Recording", own: Callable[..., Any], arguments: Any, rows: int
    ) -> tuple[Rows | None, str]:
        """Return what has rows, found by calls with half of the rows; or ``None`` and why that is not clear."""
        if (square := square_in(arguments, rows)) is not None:
            return None, f"the model got a tensor of shape {list(square.shape)}, which may have rows or positions"
        half, why = max(1, rows // 2), "the model fails when it is called with half of the rows"
        for part in (slice(0, half), slice(rows - half, rows)):
            probe = self._probe(own, arguments, rows, part)
            if probe is None:
                continue
            found, why = self._compared(recording, probe, rows, half)
            if found is not None:
                return found, ""
        return None, why

    def _compared(
        self, recording: "_Recording", probe: "_Recording", rows: int, probe_rows: int
    ) -> tuple[Rows | None, str]:
        """Decide by the recordings of two calls."""
        if recording.users() != probe.users():
            return None, "with half of the rows the blocks get other numbers of tensors"
        if (changed := recording.differs_from(probe)) is not None:
            return None, f"{changed} depends on the number of rows"
        found = decide(recording.table, probe.table, rows, probe_rows)
        for slot, has_rows in enumerate(found):
            if has_rows is None or (slot == recording.hidden_slot and not has_rows):
                return None, f"it is not clear whether {recording.describe(slot)} has one row per sample"
        last, last_of_probe = (self._output(self._names[-1], *one.last_arguments) for one in (recording, probe))
        shapes, probe_shapes = ([t.shape for t in tensors_of(one[0])] for one in (last, last_of_probe))
        if len(shapes) != len(probe_shapes):
            return None, f"what block {self.path}.{self._names[-1]} returns depends on the number of rows"
        follow = [all_follow([one], [two], rows, probe_rows) for one, two in zip(shapes, probe_shapes, strict=True)]
        if not last[1] and not any(follow[:1]):
            return None, f"what block {self.path}.{self._names[-1]} returns has not one row per sample"
        is_joined = {
            slot: all_follow([shape], [probe.shapes[slot]], rows, probe_rows)
            for slot, shape in recording.shapes.items()
        }
        return Rows([bool(has_rows) for has_rows in found], is_joined, None if last[1] else follow), ""

    def _probe(self, own: Callable[..., Any], arguments: Any, rows: int, part: slice) -> "_Recording | None":
        """Return the recording of a call with some of the rows; ``None`` if that call fails."""
        assert self._model is not None
        inside = set(self._blocks.modules())
        outside = [module for module in self._model.modules() if module not in inside]
        calls, self._outer_calls, self._is_probing = self._outer_calls, [], True
        args, kwargs = with_rows(arguments, rows, part)
        try:
            with torch.no_grad(), preserved_random_state(self._device()), _unchanged(outside):
                own(*args, **kwargs)
        except _Reached as reached:
            return reached.recording
        except Exception:  # whatever the model raises that cannot run with other shapes
            return None
        finally:
            self._outer_calls, self._is_probing, self._recording = calls, False, None
        return None

    def _device(self) -> torch.device:
        return next((p.device for p in self._blocks.parameters() if not p.is_meta), torch.device("cpu"))

    def _output(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> tuple[Any, bool]:
        """Find out how the output of a block is nested, and the shapes of the tensors in it, without running the block.

        The block's code runs on the ``meta`` device, once for each combination of kinds of arguments.

        Args:
            name: The name of the block.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            leaves: The leaves of both.

        Returns:
            The output, with tensors on the ``meta`` device; and whether it is a guess, because the code needs values: a
            tensor like the first one among the arguments.
        """
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if first is None:
            raise RuntimeError(
                f"block {self.path}.{name} got no tensor of floating-point numbers, so what it returns is not known "
                "before it runs; give it the hidden state as its first argument"
            )
        kinds = [(leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves]
        nesting = [type(value) for value in args], *((argument, type(value)) for argument, value in kwargs.items())
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        block = self._blocks.get_submodule(name)
        key = name, repr((kinds, nesting)), autocast, block.training, torch.is_grad_enabled() or self._is_probing
        shapes = [tensor.shape for tensor in tensors]
        known = self._outputs.get(key)
        if known is None or not (known.is_like_first or known.shapes == shapes):
            found = _on_meta(block, args, kwargs)
            given = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            is_like_first = all((leaf.shape, leaf.dtype) == (first.shape, first.dtype) for leaf in given)
            # Of two arguments alike, either may be the one that the output is like.
            is_like_first &= sum((t.shape, t.dtype) == (first.shape, first.dtype) for t in tensors) == 1
            known = self._outputs[key] = _Known(found, shapes, is_like_first)
        if known.output is None:
            return _like(first), True
        output = known.output[0]
        return tree_map_only(Tensor, lambda _: _like(first), output) if known.is_like_first else output, False


@dataclass(frozen=True)
class _Known:
    """What a block returns for some kinds of arguments.

    Attributes:
        output: The output on the ``meta`` device, in a tuple; ``None`` if the code needs values.
        shapes: The shapes of the arguments for which this is known.
        is_like_first: Whether every tensor has the shape and dtype of the first one among the arguments, as is then
            taken to hold for other shapes too.
    """

    output: tuple[Any] | None
    shapes: list[torch.Size]
    is_like_first: bool


class _Recording:
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
        """The tensors that are given from outside; ``None`` for those that blocks will return."""
        self.hidden_slot = -1
        """The slot of the hidden state that the first block gets."""
        self.shapes: dict[int, torch.Size] = {}
        """For each slot of an output, the shape that the model was told."""
        self.last_arguments: tuple[tuple[Any, ...], dict[str, Any], list[Any]] = ((), {}, [])
        """The arguments of the last block, and their leaves."""
        self._originals: dict[int, Tensor] = {}
        """Tensors of inference mode, which do not count their changes; the table has copies."""
        self._slots: dict[int, int] = {}
        """The slot of each tensor that is given from outside, by identity; the table keeps it alive."""
        self._num_changes: dict[int, int] = {}
        """For each such slot, how often the tensor had been changed in place when a block first got it."""
        self._settings: tuple[bool, PassContext] | None = None
        """The settings under which the first block was called."""
        self._outputs: list[ref[DeferredOutput]] = []
        self._last_use: dict[int, str] = {}
        self._users: dict[int, tuple[str, str]] = {}
        """For each slot, the first block that takes it, and the argument."""
        self._last_output: Any = None
        self.returned: list[int] = []
        self._captured: list[tuple[int, MutableMapping[str, Any]]] = []
        """For each block in which something is captured, its slot and where it goes."""

    def record(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        find_output: Callable[[str, tuple[Any, ...], dict[str, Any], list[Any]], tuple[Any, bool]],
    ) -> bool:
        """Record a call.

        Returns:
            Whether it was that of the last block.

        Raises:
            RuntimeError: If another block should have been called, or an argument cannot be sent to another process.
        """
        self._check_order(name)
        block = f"{self._path}.{name}"
        self._check_settings(block)
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
                template[place] = Slot(slot)
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
                _check_plain(block, "output", leaf)
                slots.append(leaf)
                continue
            what = f"the output of block {block}" if len(leaves) == 1 else f"output {place} of block {block}"
            deferred = DeferredOutput(leaf, device, len(self.table), what)
            self.table.append(None)
            self._outputs.append(ref(deferred))
            self.shapes[deferred.slot] = leaf.shape
            slots.append(Slot(deferred.slot))
            leaves[place] = deferred
        self._last_output = tree_unflatten(leaves, spec)
        assumed = (tuple(output.shape[1:]), output.dtype) if is_guess else None
        told = {slot.number: tuple(self.shapes[slot.number][1:]) for slot in slots if isinstance(slot, Slot)}
        self._calls[name] = replace(call, output=tree_unflatten(slots, spec), assumed=assumed, shapes=told)
        return False

    def _hidden_slot(self, kwargs: Mapping[str, Any], given: Sequence[Any]) -> int:
        """Return the slot of the hidden state: ``hidden_states``, or else the first floating-point tensor."""
        named = kwargs.get("hidden_states")
        candidates = [named] if isinstance(named, Tensor) else [leaf for leaf in given if isinstance(leaf, Tensor)]
        floating = [tensor for tensor in candidates if tensor.is_floating_point()]
        tensor = (floating or candidates)[0]
        return tensor.slot if isinstance(tensor, DeferredOutput) and tensor.value is None else self._slots[_id(tensor)]

    def users(self) -> tuple[tuple[int, str, str], ...]:
        """Return for each slot the first block that takes it, and the argument."""
        return tuple((slot, *user) for slot, user in sorted(self._users.items()))

    def differs_from(self, other: "_Recording") -> str | None:
        """Return which argument that is not a tensor differs from that of another recording; ``None`` if none does."""
        for name, call in self._calls.items():
            leaves, spec = tree_flatten(call.arguments)
            others, other_spec = tree_flatten(other._calls[name].arguments)
            if spec != other_spec:
                return f"an argument of block {self._path}.{name}"
            arguments = _arguments_of(*call.arguments, len(leaves))
            for argument, one, two in zip(arguments, leaves, others, strict=True):
                if type(one) is not type(two) or (isinstance(one, _PLAIN) and one != two and one == one):
                    return f"argument {argument!r} of block {self._path}.{name}"
        return None

    def _capture(self, name: str, args: tuple[Any, ...]) -> dict[str, Any]:
        """Note what hooks of ``transformers`` would capture in a block."""
        collector = active_collector()
        captures = captures_in(self._blocks.get_submodule(name), collector) if collector is not None else []
        if collector is None or not captures:
            return {}
        if name == self.names[0] and args and any((c.path, c.key) == ("", "hidden_states") for c in captures):
            collect(collector, {"hidden_states": [args[0]]})  # the hidden state that enters the blocks is one too
        slot = Slot(len(self.table))
        self.table.append(None)
        self._captured.append((slot.number, collector))
        return {"captures": captures, "captured": slot}

    def last_output(self) -> Any:
        """Return the output of the last recorded call, with deferred outputs; only once."""
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
                f"the model calls block {self._path}.{name} first and so runs its blocks in the order opposite to that "
                "of the stages. Set `self.example_input_array` on the LightningModule, so that the order is known "
                "before the blocks are sent to their processes."
            )
        called = ", ".join(self._calls) or "none"
        what = "a second time" if name in self._calls else f"before block {expected}"
        raise RuntimeError(
            f"the model calls block {self._path}.{name} {what} (called so far: {called}); a pipeline runs the blocks "
            f"{self.names[0]} to {self.names[-1]} once each, in this order. Switch off what skips or repeats blocks, "
            "such as layerdrop, or name another list of blocks by module=..."
        )

    def _check_settings(self, block: str) -> None:
        """Check that a block is called under the settings of the first one, which no ``checkpoint`` of torch calls."""
        settings = torch.is_grad_enabled(), PassContext.capture(self._device_type())
        if self._settings is None:
            self._settings = settings
            _refuse_checkpoint_around(block)
        if settings != self._settings:
            what = "grad mode" if settings[0] != self._settings[0] else "autocast, or another setting of torch"
            raise RuntimeError(
                f"block {block} is called under another {what} than block {self._path}.{self.names[0]}; all blocks of "
                "a pass run under the same settings. Freeze blocks by requires_grad_(False) instead of no_grad, and "
                "enter other settings within the block."
            )

    def _device_type(self) -> str:
        return next((leaf.device.type for leaf in self.table if isinstance(leaf, Tensor)), "cpu")

    def _check_unchanged(self, slot: int) -> None:
        """Check that the model has not changed a tensor in place since a block first got it."""
        if slot in self._num_changes and num_changes(self.table[slot]) != self._num_changes[slot]:
            raise self._was_changed(slot)

    def _was_changed(self, slot: int) -> RuntimeError:
        return RuntimeError(
            f"the model has changed {self.describe(slot)} in place after it called the block; the blocks run later "
            "and would get the changed value. Give each block a tensor of its own."
        )

    def _slot_of(self, block: str, argument: str, tensor: Tensor) -> tuple[int, bool]:
        """Return the slot of a tensor, and whether the tensor is given from outside."""
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
        """Return what travels through the stages.

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
            slots = [leaf.number for leaf in tree_leaves(call.output) if isinstance(leaf, Slot)]
            dropped[name] += [slot for slot in slots if slot not in used and slot not in kept]
        calls = {name: replace(call, dropped=dropped[name]) for name, call in self._calls.items()}
        plan = Plan(self._path, calls, self.names[-1], returned)
        return self.table, cloudpickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)

    def give_values(self, returned: Sequence[Any], joined: Sequence[bool]) -> None:
        """Give the deferred outputs their values.

        Args:
            returned: The values of the slots that the plan returns.
            joined: For each, whether the values of the micro-batches could be joined to one of the batch.
        """
        self.table = []
        values = dict(zip(self.returned, zip(returned, joined, strict=True), strict=True))
        for slot, collector in self._captured:
            captured, is_of_batch = values[slot]
            if not is_of_batch:
                raise RuntimeError(
                    f"the {' and '.join(captured)} of the blocks in {self._path} have not one row per sample, so those "
                    "of the micro-batches cannot be joined. Use schedule='1f1b'."
                )
            collect(collector, captured)
        for made in self._outputs:
            if (deferred := made()) is None or deferred.slot not in values:
                continue
            value, is_of_batch = values[deferred.slot]
            if is_of_batch:
                deferred.value = value
            else:
                deferred.ended = _NOT_JOINED

    def describe(self, slot: int) -> str:
        """Return which argument has a slot."""
        block, argument = self._users[slot]
        return f"argument {argument!r} (shape {list(self.table[slot].shape)}) of block {block}"

    def abandon(self, reason: str) -> None:
        """Tell the deferred outputs that they get no values."""
        for made in self._outputs:
            if (deferred := made()) is not None:
                deferred.ended = reason


def _refuse_checkpoint_around(block: str) -> None:
    """Refuse a call by ``torch.utils.checkpoint``, which leaves no trace but its frame on the stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise RuntimeError(
                f"block {block} is called within torch.utils.checkpoint, which would call it a second time in the "
                "backward pass. Switch that off in the model, and choose RPCSequentialStrategy(checkpoint=...); or "
                "use torch.utils.checkpoint within the block."
            )
        frame = frame.f_back


def _id(tensor: Tensor) -> int:
    """Return the identity of a tensor, or of the value of a deferred output of an earlier pass."""
    return id(tensor.value if isinstance(tensor, DeferredOutput) else tensor)


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


def _constant(leaf: Any) -> Any:
    """What of an argument that is not a tensor may decide what a block returns."""
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


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


def _check_object(block: str, argument: str, leaf: Any) -> None:
    if any(kind.__name__.endswith("Cache") for kind in type(leaf).__mro__):
        raise RuntimeError(
            f"block {block} gets a key-value cache as argument {argument!r} ({type(leaf).__name__}), which blocks in "
            "other processes would fill without effect. Call the model with use_cache=False, or set "
            "model.config.use_cache = False."
        )


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _copied(attribute: Any) -> Any:
    """Return a copy in which a block's code can add to lists, dicts and sets."""
    return tree_map(lambda leaf: set(leaf) if type(leaf) is set else leaf, attribute)


@contextmanager
def _unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore attributes and buffers of modules after the body, in which lists, dicts and sets may be added to."""
    attributes = [(module, dict(vars(module))) for module in modules]
    own = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    try:
        for module, before in attributes:
            vars(module).update({name: _copied(before[name]) for name in before.keys() - _OF_EVERY_MODULE})
            kept = {name: b for name, b in module._buffers.items() if b is not None and not b.is_meta}
            module._buffers.update({name: buffer.clone() for name, buffer in kept.items()})
        yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for module, parameters, buffers in own:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _on_meta(block: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any] | None:
    """Run a block's code on the ``meta`` device; return its output, or ``None`` if the code needs values."""
    tensors = {name: _like(t) for name, t in [*block.named_parameters(), *block.named_buffers()]}
    given, named = tree_map_only(Tensor, _like, (args, dict(kwargs)))
    modules = list(block.modules())
    try:
        with torch.no_grad(), preserved_random_state(torch.device("cpu")), collector_hidden(), _unchanged(modules):
            for module in modules:
                vars(module).pop(CALL_ATTRIBUTE, None)
            output = torch.func.functional_call(block, tensors, given, named)
    except Exception:  # whatever the code raises that finds no values
        return None
    if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves(output)):
        return None
    return (tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output),)
