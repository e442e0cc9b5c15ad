"""Defer the calls of blocks while the model's code runs, and run them as one pass through the stages.

    for block in self.layers:              call of block 0      deferred, returns a deferred output
        hidden = block(hidden, mask)       call of block 1      deferred, returns a deferred output
    hidden = self.norm(hidden)             call of the last     runs all of them, returns the output

The model's code before, between and after the calls runs on the driver, unchanged.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from strategies.common.joined_lists import JoinedLists, lengths_of, parts_of
from strategies.common.patching import replaced, unchanged
from strategies.common.random_seeds import ProcessRandomState
from strategies.common.stage_layers import dotted
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
from strategies.common.transformers_compat import collector_hidden
from strategies.common.trees import tensors_in
from strategies.pipeline.partition.blocks.batch_rows import (
    Rows,
    are_rows,
    decide,
    follows,
    kinds_of,
    num_rows,
    square_in,
    with_rows,
    with_tensors_replaced,
)
from strategies.pipeline.partition.blocks.calls import PlannedCalls, call_blocks
from strategies.pipeline.partition.blocks.deferred_calls import NOT_JOINED, DeferredCalls, KnownCalls
from strategies.pipeline.partition.blocks.expected import ExpectedOutputs
from strategies.pipeline.partition.blocks.output import DeferredOutput
from strategies.pipeline.stage.layers import Before, is_checkpointing, is_recomputing
from strategies.pipeline.stage.microbatch.split import pack_objects, unpack_objects
from strategies.sharding.gathered_layers import alone

FindRows = Callable[[], list[bool] | None]
"""Returns for each entry of the table whether it has rows; ``None`` if the batch cannot be split."""

RunBlocks = Callable[[PlannedCalls, FindRows, int], tuple[Any, list[Any]]]
"""Runs a value through all stages of a list. Returns the output of the last block and the returned table entries."""


_MANY = 1000
"""Maximum number of cached plans. Models use a few."""


class _Left(Enum):
    """Takes the place of a tensor that cannot be joined over micro-batches. A plain value, so that stages accept it."""

    OUT = "left out"


class _ReachedLastBlock(BaseException):
    """Ends a probe at the call of the last block. Not an ``Exception``, so that the model's code does not catch it."""

    def __init__(self, calls: DeferredCalls) -> None:
        super().__init__()
        self.calls = calls


@dataclass
class _OuterCall:
    """A call in progress of code that calls the blocks: of a module that contains the list, or of a training step.

    Attributes:
        repeat: The function that a probe calls.
        arguments: Positional and keyword arguments.
        ran: The number of the list of each pass of blocks that has run within the call.
    """

    repeat: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    ran: list[int] = field(default_factory=list)

    def num_rows(self) -> int:
        """Return the number of rows of the tensors, or of tensors within objects; 0 if there are no rows."""
        return num_rows(self.arguments) or num_rows(pack_objects(self.arguments))


class DeferredBlocks:
    """Intercepts the calls of the blocks in an ``nn.ModuleList`` between :meth:`start` and :meth:`end`.

    Args:
        blocks: The list, or several lists, each of which runs as a separate pass.
        run: Runs the deferred calls.
        path: The dotted path of the list in ``model``; empty for several lists.
        model: The whole model. The arguments of the modules that contain the list show how many rows a batch has. For
            blocks that are called elsewhere, the arguments of :meth:`step` show this.
        is_reversed: Whether the model calls the blocks of a list from the last to the first.
        repeating: Context in which the model's code runs a second time for some of the rows of a batch.
    """

    def __init__(
        self,
        blocks: nn.ModuleList,
        run: RunBlocks,
        path: str = "blocks",
        model: nn.Module | None = None,
        *,
        is_reversed: bool = False,
        repeating: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._blocks, self._run, self.path, self._model = blocks, run, path, model
        self._repeating = repeating
        names, ends = list(blocks._modules), [0, *accumulate(lengths_of(blocks))]
        self._lists = [names[start:stop][:: -1 if is_reversed else 1] for start, stop in pairwise(ends)]
        """The names of the blocks of each list in the order in which the model calls them."""
        self._list_of = {name: number for number, own in enumerate(self._lists) for name in own}
        self._expected, self._known = ExpectedOutputs(blocks, path), KnownCalls()
        self._calls: DeferredCalls | None = None
        self._in_stage = False
        self._skipped: list[int] | None = None
        """During a probe, the lists of the passes that it still has to skip."""
        self._outer_calls: list[_OuterCall] = []
        """Calls in progress of modules that contain the list, the outermost one first."""
        self._step: _OuterCall | None = None
        """The training step in progress, which may call the blocks itself."""
        self._rows: dict[Any, tuple[Rows | None, str]] = {}
        """Which values have rows, or why this is not clear, by the arguments of all blocks and their kinds."""
        self._seen: dict[Any, dict[tuple[int, int], bool]] = {}
        """Whether a slot had rows at a size of its first dimension, by the arguments of all blocks."""
        self._left_out: dict[bytes, list[int]] = {}
        """For each plan, the tensors in the output of the last block that cannot be joined over micro-batches."""
        self._split: Rows | None = None
        """Which values have rows in the current pass, if it is split."""
        self._parts: list[tuple[Any, list[Any]]] = []
        """The outputs of the micro-batches of the current pass."""
        self._ending = ExitStack()

    def start(self) -> None:
        """Start to intercept the calls of all blocks."""
        for name, block in self._blocks._modules.items():
            assert block is not None
            call = not_compiled(partial(self._called, name, call_of_module(block)))
            self._ending.callback(replaced(block, CALL_ATTRIBUTE, call))
        for module in self._containers():
            outer = not_compiled(partial(self._container_called, call_of_module(module)))
            self._ending.callback(replaced(module, CALL_ATTRIBUTE, outer))

    def end(self) -> None:
        """Stop intercepting calls."""
        self._ending.close()
        self._calls, self._parts, self._split = None, [], None

    def call(self, layers: nn.Sequential, value: PlannedCalls, before: Before) -> Any:
        """Run deferred calls on this process; see :func:`~strategies.pipeline.partition.blocks.calls.call_blocks`."""
        self._in_stage = True
        try:
            with collector_hidden():
                output = call_blocks(layers, value, before)
        finally:
            self._in_stage = False
        if not any(own[-1] in layers._modules for own in self._lists):
            return output
        trains = torch.is_grad_enabled() or is_checkpointing() or is_recomputing()
        if trains and (left_out := self._left_out.get(value[1])):  # the recomputation replaces the same tensors
            output = with_tensors_replaced(output[0], left_out, lambda tensor: _Left.OUT), output[1]
        if not is_recomputing():
            self._parts.append(output)
        return output

    def _containers(self) -> list[nn.Module]:
        """The modules that contain the list, outermost first."""
        if self._model is None:
            return []
        paths = [start[:-1] for start, _ in parts_of(self._blocks)] if isinstance(self._blocks, JoinedLists) else []
        found: dict[nn.Module, None] = {}
        for path in paths or [self.path]:
            parts = path.split(".")[:-1]
            found.update({self._model.get_submodule(".".join(parts[:n])): None for n in range(len(parts) + 1)})
        return [module for module in found if not isinstance(module, nn.ModuleList | nn.ModuleDict)]

    def _container_called(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._outer_calls.append(_OuterCall(own, (args, kwargs)))
        try:
            return own(*args, **kwargs)
        finally:
            self._outer_calls.pop()

    @contextmanager
    def step(self, repeat: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Context for a training step, which may call the blocks outside of any module's call.

        Args:
            repeat: Runs the code of the step again, with some of the rows.
            args: The positional arguments of the step.
            kwargs: The keyword arguments of the step.
        """
        # The containers are copied, because the step may remove entries from its batch.
        self._step = _OuterCall(repeat, tree_unflatten(*tree_flatten((args, kwargs))))
        try:
            yield
        finally:
            self._step = None

    def _called(self, name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Defer a call of a block by the model, or run a call of a block by a stage."""
        if self._in_stage:
            return own(*args, **kwargs)
        calls, number = self._calls, self._list_of[name]
        names = self._lists[number]
        if calls is None or (names[0] == name and not calls.made_any_of((args, kwargs))):
            if calls is not None:
                calls.abandon(f"block {dotted(self.path, name)} was called first for another pass")
            calls = self._calls = DeferredCalls(self.path, names, self._blocks, self._expected, self._known)
        try:
            if not calls.defer(name, args, kwargs):
                return calls.last_output()
        except BaseException:
            self._calls = None
            raise
        self._calls = None
        if self._skipped is not None:
            return self._skip(calls, number)
        self._parts, self._split = [], None
        value = calls.value()
        output, returned = self._run(value, partial(self._find_rows, calls, value[1]), number)
        for call in self._calls_in_progress():
            call.ran.append(number)
        joined = [self._can_be_joined(calls, slot, k) for k, slot in enumerate(calls.returned)]
        calls.give_values(returned, joined)
        self._check_last_output(name)
        self._parts, self._split = [], None
        if torch.is_grad_enabled() and value[1] in self._left_out:
            output = tree_map(lambda leaf: self._not_joined(name) if leaf is _Left.OUT else leaf, output)
        return output

    def _skip(self, calls: DeferredCalls, number: int) -> Any:
        """During a probe, return zeros in place of the output of a pass that has run in the call that is repeated.

        Raises:
            _ReachedLastBlock: If this is the pass that the probe is for.
        """
        assert self._skipped is not None
        if not self._skipped:
            raise _ReachedLastBlock(calls)
        if self._skipped.pop(0) != number:
            raise RuntimeError("it calls the lists of blocks in another order")
        device = calls.device
        calls.give_zeros()
        expected = self._expected.of(calls.names[-1], *calls.last_arguments)
        return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device), expected.output)

    def _not_joined(self, name: str) -> DeferredOutput:
        """Return the replacement of a tensor without rows in the last block's output."""
        what = f"an output of block {dotted(self.path, name)}"
        made = DeferredOutput(torch.Size([0]), torch.get_default_dtype(), self._device(), -1, what)
        made.ended = NOT_JOINED
        return made

    def _can_be_joined(self, calls: DeferredCalls, slot: int, k: int) -> bool:
        """Return whether the ``k``-th returned table entry, with index ``slot``, can be joined to that of the batch."""
        if len(self._parts) < 2 or self._split is None:
            return True
        if self._split.is_joined is not None and slot in self._split.is_joined:
            return self._split.is_joined[slot]
        columns = zip(*(tree_leaves(returned[k]) for _, returned in self._parts), strict=True)
        sizes = self._split.sizes(len(self._parts))
        inputs = [entry for entry, has_rows in zip(calls.table, self._split.table, strict=True) if has_rows]
        return all(are_rows(column, sizes, inputs) for column in columns)

    def _check_last_output(self, name: str) -> None:
        """If a batch was split and the output of the last block was not known in advance, check this output."""
        if len(self._parts) < 2 or self._split is None or self._split.last is not None:
            return
        for (output, _), size in zip(self._parts, self._split.sizes(len(self._parts)), strict=True):
            if not isinstance(output, Tensor) or not output.dim() or len(output) != size:
                raise RuntimeError(
                    f"block {dotted(self.path, name)} returned {type(output).__name__} {getattr(output, 'shape', '')} "
                    f"for a micro-batch of {size} rows, so the outputs of the micro-batches cannot be joined. Use "
                    "schedule='1f1b'."
                )

    def _find_rows(self, calls: DeferredCalls, plan: bytes) -> list[bool] | None:
        """Decide which tensors of deferred calls have rows.

        Raises:
            RuntimeError: If this is not clear in a training pass. Other passes then run as one micro-batch.
        """
        outer, rows = self._outer_call()
        if rows == 1:
            return None
        key = calls.users(), kinds_of(calls.table, rows)
        why = "neither a module that contains the blocks nor training_step was called with tensors that have rows"
        if outer is not None and rows:
            if key not in self._rows:
                self._rows[key] = self._evidence(calls, outer, rows)
            found, why = self._rows[key]
            if found is not None and (slot := self._contradicted(calls, found)) is not None:
                found = None
                why = (
                    f"whether {calls.describe(slot)} has one row per sample differs between batches. Give the model "
                    "a tensor that all rows share as NoChunk (from strategies.pipeline import NoChunk)"
                )
            if found is not None and not torch.is_grad_enabled() and not found.joins(calls.returned):
                return None
            if found is not None:
                self._split = replace(found, rows=rows)
                if found.last is not None and not all(found.last):
                    if len(self._left_out) > _MANY:  # old passes have ended
                        self._left_out.clear()
                    self._left_out[plan] = [k for k, has_rows in enumerate(found.last) if not has_rows]
                return found.table
        if not torch.is_grad_enabled():
            return None
        raise RuntimeError(
            f"it is not clear how to split the batch into micro-batches: {why}. Use schedule='1f1b', which runs the "
            "model once per micro-batch."
        )

    def _contradicted(self, calls: DeferredCalls, found: Rows) -> int | None:
        """Return a slot with rows that had as many entries, but no rows, in a batch of another size, or the reverse."""
        if len(self._seen) > _MANY:
            self._seen.clear()
        seen = self._seen.setdefault(calls.users(), {})
        for slot, (leaf, has_rows) in enumerate(zip(calls.table, found.table, strict=True)):
            if isinstance(leaf, Tensor) and leaf.dim() and seen.setdefault((slot, len(leaf)), has_rows) != has_rows:
                return slot
        return None

    def _calls_in_progress(self) -> list[_OuterCall]:
        return self._outer_calls + ([self._step] if self._step is not None else [])

    def _outer_call(self) -> tuple[_OuterCall | None, int]:
        """Return a call with rows and its number of rows: the call of the outermost module, or the training step.

        Prefers a call in which no pass has run, because a probe has to skip the passes that have run.
        """
        found: tuple[_OuterCall | None, int] = None, 0
        for call in self._calls_in_progress():
            if rows := call.num_rows():
                if not call.ran:
                    return call, rows
                found = (call, rows) if found[0] is None else found
        return found

    def _evidence(self, calls: DeferredCalls, outer: _OuterCall, rows: int) -> tuple[Rows | None, str]:
        """Find out which values have rows by calls with half of the rows. Returns ``None`` and a reason if unclear."""
        if self._list_of[calls.names[0]] in outer.ran:
            return None, "the model has called the blocks before in the same call, with different kinds of arguments"
        arguments = pack_objects(outer.arguments)
        if (square := square_in(arguments, rows)) is not None:
            return None, f"the model got a tensor of shape {list(square.shape)}, which may have rows or positions"
        assert self._model is not None
        own = [*self._model.parameters(), *self._model.buffers()]
        half, why = max(1, rows // 2), ""
        parts = slice(0, half), slice(rows - half, rows)
        for part, whole in product(parts, (own, [])):  # a batch may itself be a buffer
            probe = self._probe(outer, with_rows(arguments, rows, part, whole))
            if isinstance(probe, str):
                why = why or f"the model fails when it is called with half of the rows ({probe})"
                continue
            found, why = self._compared(calls, probe, rows, half)
            if found is not None:
                return found, ""
        return None, why

    def _compared(
        self, calls: DeferredCalls, probe: DeferredCalls, rows: int, probe_rows: int
    ) -> tuple[Rows | None, str]:
        """Compare the deferred calls of the batch and of a probe."""
        if calls.users() != probe.users():
            return None, "with half of the rows the blocks get a different number of tensors"
        if (changed := calls.differs_from(probe)) is not None:
            return None, f"{changed} depends on the number of rows"
        found = decide(calls.table, probe.table, rows, probe_rows)
        for slot, has_rows in enumerate(found):
            if has_rows is None or (slot == calls.hidden_slot and not has_rows):
                return None, f"it is not clear whether {calls.describe(slot)} has one row per sample"
        name = calls.names[-1]
        last, last_of_probe = (self._expected.of(name, *one.last_arguments) for one in (calls, probe))
        shapes, probe_shapes = ([t.shape for t in tensors_in(one.output)] for one in (last, last_of_probe))
        if len(shapes) != len(probe_shapes):
            return None, f"the output of block {dotted(self.path, name)} depends on the number of rows"
        follow = [follows(one, two, rows, probe_rows) for one, two in zip(shapes, probe_shapes, strict=True)]
        if not last.is_guess and not any(follow[:1]):
            return None, f"the output of block {dotted(self.path, name)} does not have one row per sample"
        is_joined = {slot: follows(shape, probe.shapes[slot], rows, probe_rows) for slot, shape in calls.shapes.items()}
        return Rows([bool(has_rows) for has_rows in found], is_joined, None if last.is_guess else follow), ""

    def _probe(self, outer: _OuterCall, arguments: Any) -> "DeferredCalls | str":
        """Return the deferred calls of a probe, after the passes that have run in the call; or why the probe fails."""
        assert self._model is not None
        inside = set(self._blocks.modules())
        outside = [module for module in self._model.modules() if module not in inside]
        outer_calls, step, random_state = self._outer_calls, self._step, ProcessRandomState(self._device())
        self._outer_calls, self._step, self._skipped = [], None, list(outer.ran)
        args, kwargs = unpack_objects(arguments)
        try:
            with torch.no_grad(), self._repeating(), unchanged(outside), alone():
                outer.repeat(*args, **kwargs)
        except _ReachedLastBlock as reached:
            return reached.calls
        except Exception as error:  # a model that cannot run with other shapes may raise any exception
            return f"{type(error).__name__}: {error}"
        finally:
            random_state.restore()
            self._outer_calls, self._step, self._skipped, self._calls = outer_calls, step, None, None
        return "it does not call all blocks"

    def _device(self) -> torch.device:
        return next((p.device for p in self._blocks.parameters() if not p.is_meta), torch.device("cpu"))
