"""One stage: chunks of consecutive layers, and the forward and backward passes of micro-batches through them.

The driver and the workers use the same classes, and connect the four ports of a chunk differently:

    inputs ─────▶ ┌───────┐ ─────▶ outputs
                  │ Chunk │
    input_grads ◀─└───────┘◀───── output_grads

Under most schedules a stage has one chunk. In tables of actions each chunk counts as a stage.

Index letters: ``m`` micro-batch, ``i`` chunk.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from strategies.common.activity import Activity
from strategies.common.random_seeds import RandomStateKeeper
from strategies.common.stage_layers import StageLayers
from strategies.pipeline.schedule.operations import Post, Result, Row, Tied, UserCode
from strategies.pipeline.schedule.tables import Action, recomputed
from strategies.pipeline.stage.action_recorder import ActionRecorder
from strategies.pipeline.stage.edges import Edges, Ports, leaves_of, tensors_of, with_leaves
from strategies.pipeline.stage.layers import CallLayers, Carried, KeptState, Layers, ReusedInput
from strategies.pipeline.stage.microbatch.split import pack_objects, unpack_objects
from strategies.pipeline.stage.out_of_memory import DeviceMemory, Situation, explained, is_float32
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.side_outputs import SideOutputs, WithSideOutputs
from strategies.pipeline.stage.weight_gradients import WeightGradients
from strategies.pipeline.transport.ties import TiedParameters

Note = Callable[[str], None]
"""Notes the current activity of a stage, such as ``F3, layer 5``."""


class DriverCode(Protocol):
    """The code that the driver runs between the actions of its row."""

    def run(self, operation: UserCode | Result) -> None:
        """Run the user's code, or take an output."""

    def joins(self, row: Row, place: int) -> bool:
        """Return whether the code itself runs the backward pass through the output of the action at this place."""

    def around(self, action: Action) -> AbstractContextManager[None]:
        """Return the context in which layers of the driver run an action."""


@dataclass
class GradientSlot:
    """Receives the gradient of one tensor that has gone through :func:`entered`."""

    value: Tensor | None = None


class _Enter(torch.autograd.Function):
    """Identity of a tensor that stores the tensor's gradient in a slot."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrived: Tensor, slot: GradientSlot) -> Tensor:
        ctx.slot = slot
        return arrived.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Called twice if a loss uses a side output of a layer as well as the stage's output.
        known = ctx.slot.value
        ctx.slot.value = grads[0] if known is None else known + grads[0]
        return None, None, None


def entered(value: Any, slots: Sequence[GradientSlot]) -> Any:
    """Return ``value`` with tensors that are not autograd leaves, so that layers may change them in place.

    Args:
        value: Nested tensors and other objects.
        slots: For each tensor that requires a gradient, the slot that receives it. A slot does not keep the tensor.
    """
    leaves, spec = leaves_of(value)
    ahead = iter(slots)
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        own = [
            _Enter.apply(anchor, t.detach(), next(ahead)) if isinstance(t, Tensor) and t.requires_grad else t
            for t in leaves
        ]
    return with_leaves(own, spec)


@dataclass
class _KeptMicrobatch:
    """Data of a micro-batch that a stage keeps between its forward and its backward pass.

    Attributes:
        inputs: Slots for the gradients of the input tensors that require a gradient.
        outputs: One entry for each output tensor that receives a gradient from the next stage; ``None`` if the
            micro-batch is not recomputed yet, or if the recomputed tensor requires no gradient. Empty for an output
            that was returned with its graph.
        recompute_from: The input of a recomputed micro-batch.
        state: The state of the layers before the forward pass of a recomputed micro-batch.
    """

    inputs: list[GradientSlot]
    outputs: list[GradientEdge | None]
    recompute_from: Any = None
    state: KeptState | None = None


class Stage:
    """The layers of one process, and the only loop over operations, the same in every process.

    Args:
        chunks: The chunks by their numbers, which are those of stages in tables of actions.
        edges: This process's ends of the edges between chunks.
        ties: The tied parameters of this process; ``None`` if there are none.
        activity: Notes what the stage does; ``None`` on the driver.
        name: A description of the stage for errors.
    """

    def __init__(
        self,
        chunks: Mapping[int, "Chunk"],
        edges: Edges,
        *,
        ties: TiedParameters | None = None,
        activity: Activity | None = None,
        name: str = "a stage",
    ) -> None:
        first = next(iter(chunks.values()))
        self.chunks, self.device, self._random_state = chunks, first.device, first.random_state
        self._edges, self._ties, self._activity, self._name = edges, ties, activity, name
        self._now, self._runs_code = "", False
        self.recomputed: frozenset[tuple[int, int]] = frozenset()
        """The micro-batch and the chunk of each forward pass of the last row with forward passes that runs again."""
        self._found_for: tuple[Row, str] | None = None
        """The row, and which micro-batches are recomputed, for which :attr:`recomputed` was computed."""
        self.recorder: ActionRecorder | None = None
        """Records what the stage does; ``None`` while nothing is recorded."""

    def close(self) -> None:
        """Discard all passes, and remove hooks from the layers."""
        for chunk in self.chunks.values():
            chunk.close()

    @property
    def num_kept(self) -> int:
        """Number of micro-batches that wait for their backward pass, in all chunks."""
        return sum(chunk.num_kept for chunk in self.chunks.values())

    def discard(self, pass_number: int) -> None:
        """Discard a pass that will have no backward part. The garbage collector may call this at any time."""
        self._edges.discard(pass_number)
        for chunk in self.chunks.values():
            chunk.discard(pass_number)

    def note(self, what: str) -> None:
        """Note the current activity of the stage, such as ``F3, layer 5``."""
        if self._activity is not None:
            self._activity.doing = what

    def run(self, row: Row, this: Pass, code: DriverCode | None = None) -> None:
        """Run the operations of a row in order.

        Args:
            row: The operations of this process in a pass, or in a part of a pass.
            this: The pass.
            code: The code that the driver runs between the actions; ``None`` on a worker.

        Raises:
            Exception: Any exception of a layer or of the code.
            RuntimeError: If a neighbour fails or does not answer in time.
            torch.OutOfMemoryError: If the device is out of memory. The message says what helps.
        """
        self._edges.begin()
        if self._found_for is None or self._found_for[0] is not row or self._found_for[1] != this.checkpoint:
            self._find_recomputed(row, this)
        try:
            with self._random_state.preserving():
                self._run(row, this, code)
        except torch.OutOfMemoryError as error:
            if self._runs_code:
                raise
            raise explained(error, self._name, DeviceMemory.of(self.device), self._situation(this)) from error
        if code is not None or not self._edges.waits_for_receivers:
            self._edges.end()
        if self._ties is not None and not this.grad:
            self._ties.flush()

    def _find_recomputed(self, row: Row, this: Pass) -> None:
        actions = [operation for operation in row if isinstance(operation, Action)]
        if actions and actions[0].kind == "F":
            self.recomputed = recomputed(actions, this.checkpoint, this.microbatches)
            self._found_for = row, this.checkpoint

    def _run(self, row: Row, this: Pass, code: DriverCode | None) -> None:
        ended: Callable[[], None] | None = None  # ends the record of an action, which includes its send
        at_once: list[Action] = []
        for place, operation in enumerate(row):
            if ended is not None and not (isinstance(operation, Post) and operation.way == "SEND"):
                ended()
                ended = None
            if isinstance(operation, Action):
                at_once.append(operation)
                if this.at_once and operation.kind != "F" and isinstance(row[place + 1], Action):
                    continue
                with nullcontext() if code is None else code.around(at_once[0]):
                    self._act(at_once, this, with_graph=code is not None and code.joins(row, place))
                if self.recorder is not None:
                    kind, m, i = at_once[0]
                    ended = partial(self.recorder.end, kind, m, i, this.number)
                at_once = []
            elif isinstance(operation, Post):
                self._post(operation, this)
            elif isinstance(operation, Tied):
                self._exchange(operation, this)
            else:
                assert code is not None and isinstance(operation, UserCode | Result)
                self._runs_code = True
                code.run(operation)
                self._runs_code = False
        if ended is not None:
            ended()

    @contextmanager
    def in_backward(self, this: Pass, m: int, i: int) -> Iterator[None]:
        """Context for a backward pass through the graph of an output of a chunk.

        Args:
            this: The pass.
            m: The micro-batch. The code has taken its output with its graph.
            i: The chunk.
        """
        self._now = f"B{m}"
        self.note(self._now)
        self._runs_code = False
        with self._random_state.preserving(), self.chunks[i].in_backward():
            yield
        self._runs_code = True

    def _situation(self, this: Pass) -> Situation:
        chunks = self.chunks.values()
        return Situation(
            self._now,
            sum(len(chunk.layers) for chunk in chunks),
            this.microbatches,
            len({m for m, _ in self.recomputed}),
            self.num_kept,
            this.grad,
            not any(on for _, on, _ in this.context.autocast) and any(is_float32(chunk.layers) for chunk in chunks),
        )

    def _act(self, actions: Sequence[Action], this: Pass, *, with_graph: bool) -> None:
        """Run one action, or backward passes of several micro-batches in one call of autograd."""
        kind, m, i = actions[0]
        chunk, note, recorder = self.chunks[i], self.note, self.recorder
        self._now = f"{kind}{m}"
        if recorder is not None:
            recorder.begin()
        if kind == "F":
            chunk.forward(this, m, note, recorder, with_graph=with_graph, recompute=(m, i) in self.recomputed)
        elif kind == "W":
            chunk.weight_gradients(this, m, note)
        else:
            chunk.backward(this, [action.microbatch for action in actions], note, recorder, splits=kind == "I")

    def _post(self, post: Post, this: Pass) -> None:
        recorder, waits = self.recorder, self._edges.waits_in_receives
        sends, is_feed = post.way == "SEND", post.way == "SEND" and post.kind == "F" and post.edge in self._edges.firsts
        self._now = f"{post.kind}{post.microbatch}" if waits else str(post)
        if not waits:
            self.note(f"{post}, waiting for process {post.peer}")
        elif not sends:
            self.note(f"{self._now}, waiting for its {'input' if post.kind == 'F' else 'gradients'}")
        if recorder is not None and (is_feed or (waits and not sends)):
            recorder.begin()
            if is_feed:
                recorder.computed()
        self._edges.post(post, this)
        if recorder is not None and is_feed:
            recorder.end("feed", post.microbatch, post.edge, this.number)
        elif recorder is not None and waits and not sends:
            recorder.hold()

    def _exchange(self, exchange: Tied, this: Pass) -> None:
        if self._ties is None:
            return
        if exchange.what == "gradients":
            self._ties.move_gradients(this.number)
        elif this.ties_changed:
            self._ties.share_values(this.number)


class Chunk:
    """Consecutive layers, and the passes of micro-batches through them.

    A chunk receives and sends a value together with the skips that a later layer pops
    (:data:`~strategies.pipeline.stage.layers.Carried`). Objects in the value are packed
    (:func:`~strategies.pipeline.stage.microbatch.split.pack_objects`).

    Args:
        layers: Runs the layers.
        ports: The connections to other chunks and to the driver's code.
        side_outputs: Finds tensors that layers of the stage store in attributes; ``None`` if no layer can do so.
    """

    def __init__(self, layers: Layers, ports: Ports, *, side_outputs: SideOutputs | None = None) -> None:
        self.layers: nn.Sequential = layers.layers
        self.device, self.random_state = layers.device, layers.random_state
        self._runner, self._ports, self._side_outputs = layers, ports, side_outputs
        self._kept: dict[tuple[int, int], _KeptMicrobatch] = {}
        self._delayed: dict[tuple[int, int], WeightGradients] = {}
        self._reused_input = ReusedInput(layers.description)

    def close(self) -> None:
        """Discard all passes, and remove hooks from the layers."""
        self._kept.clear()
        self._delayed.clear()
        self._runner.close()

    @property
    def num_kept(self) -> int:
        """Number of micro-batches that wait for their backward pass."""
        return len(self._kept)

    def discard(self, pass_number: int) -> None:
        """Discard a pass that will have no backward part. The garbage collector may call this at any time."""
        for known in (self._kept, self._delayed):
            for key in list(known):  # a copy, which CPython makes without switching threads
                if key[0] == pass_number:
                    known.pop(key, None)

    def in_backward(self) -> AbstractContextManager[None]:
        """Context for a backward pass through the graph of an output."""
        return self._runner.in_backward()

    def forward(
        self,
        this: Pass,
        m: int,
        note: Note,
        recorder: ActionRecorder | None = None,
        *,
        with_graph: bool = False,
        recompute: bool = False,
    ) -> None:
        """Run the forward pass of a micro-batch.

        Args:
            this: The pass.
            m: The micro-batch.
            note: Notes what the stage does.
            recorder: Records when the stage waits, computes and sends.
            with_graph: Whether code of the same process gets the output with its graph. The code then differentiates
                the output within :meth:`in_backward`, and the backward pass only sends the resulting gradients.
            recompute: Whether to keep only the input, and run the layers again in the backward pass.
        """
        if m == 0:
            self._runner.begin_pass()
        x = self._ports.inputs.receive(this.number, m)
        if recorder is not None:
            recorder.received()
        x, attributes = x if isinstance(x, WithSideOutputs) else (x, ())
        kept = _KeptMicrobatch([GradientSlot() for tensor in tensors_of(x) if tensor.requires_grad], [])
        if recompute:
            kept.recompute_from = x
            with self._runner.kept() as kept.state, self._reused_input.lent(x, kept.state) as own:
                y = self._run_layers(this, m, own, note, grad=False, checkpointing=True, recorder=recorder)
            tensors = tensors_of(y)
            differentiable = bool(kept.inputs) or any(p.requires_grad for p in self.layers.parameters())
            flags = [differentiable and (t.is_floating_point() or t.is_complex()) for t in tensors]
            kept.outputs = [None for flag in flags if flag]
        else:
            if this.grad:
                x = entered(x, kept.inputs)
            y = self._run_layers(this, m, x, note, grad=this.grad, recorder=recorder)
            tensors = tensors_of(y)
            flags = [this.grad and t.requires_grad for t in tensors]
            if not with_graph:
                kept.outputs = [get_gradient_edge(t) for t, flag in zip(tensors, flags, strict=True) if flag]
        if kept.inputs or any(flags):
            self._kept[this.number, m] = kept
        if m == this.microbatches - 1:
            self._runner.end_forward()
        if self._side_outputs is not None and m in (0, this.microbatches - 1):
            attributes = (*attributes, *self._side_outputs.find())
        if recorder is not None:
            recorder.computed()
        value, outputs = WithSideOutputs(y, attributes) if attributes else y, self._ports.outputs
        if with_graph:
            assert not recompute, "there is no graph"
            outputs.put(value, this.number, m)
        else:
            outputs.send(value, this.number, m, requires_grad=flags)

    def backward(
        self,
        this: Pass,
        microbatches: Sequence[int],
        note: Note,
        recorder: ActionRecorder | None = None,
        *,
        splits: bool = False,
    ) -> None:
        """Run the backward passes of micro-batches in one call of autograd.

        Args:
            this: The pass.
            microbatches: The micro-batches; one if ``splits``.
            note: Notes what the stage does.
            recorder: Records when the stage waits, computes and sends; for several micro-batches, the first wait.
            splits: Whether to delay weight gradients that can wait until :meth:`weight_gradients`.
        """
        edges: list[GradientEdge] = []
        grads: list[Tensor] = []
        done = []
        for m in microbatches:
            kept = self._kept.pop((this.number, m), None)
            if kept is None:  # neither an output nor an input of this micro-batch requires a gradient
                continue
            done.append((m, kept.inputs))
            if not kept.outputs:  # no gradient passes through, but the previous stage waits for a message
                continue
            received = self._ports.output_grads.receive(this.number, m)
            if recorder is not None and m == microbatches[0]:
                recorder.received()
            if kept.state is not None:
                x, kept.recompute_from = entered(kept.recompute_from, kept.inputs), None
                with self._runner.restored(kept.state):
                    y = self._run_layers(this, m, x, note, grad=True, recomputing=True)
                candidates = [t for t in tensors_of(y) if t.is_floating_point() or t.is_complex()]
                kept.outputs = [get_gradient_edge(t) if t.requires_grad else None for t in candidates]
            for edge, grad in zip(kept.outputs, received, strict=True):
                if edge is not None and grad is not None:
                    edges.append(edge)
                    grads.append(grad)
        note(", ".join(f"B{m}" for m in microbatches))
        if edges:
            delayed = WeightGradients() if splits else None
            with self._runner.in_backward(delayed):
                torch.autograd.backward(edges, grads)
            if delayed is not None:
                self._delayed[this.number, microbatches[0]] = delayed
        if recorder is not None:
            recorder.computed()
        for m, slots in done:
            if slots:
                self._ports.input_grads.send([slot.value for slot in slots], this.number, m)

    def weight_gradients(self, this: Pass, m: int, note: Note) -> None:
        """Compute the weight gradients that the backward pass of a micro-batch has delayed."""
        delayed = self._delayed.pop((this.number, m), None)
        if delayed is not None:
            note(f"W{m}")
            delayed.compute()

    def _run_layers(
        self,
        this: Pass,
        m: int,
        carried: Carried,
        note: Note,
        *,
        grad: bool,
        checkpointing: bool = False,
        recomputing: bool = False,
        recorder: ActionRecorder | None = None,
    ) -> Carried:
        """Run the layers on new copies of objects, which no other run uses; see :func:`unpack_objects`."""
        x, skips = unpack_objects(carried[0]), carried[1]
        del carried
        y, skips = self._runner.run(
            (x, skips),
            m,
            this.seed,
            this.context,
            grad=grad,
            checkpointing=checkpointing,
            recomputing=recomputing,
            doing=note,
            splits=this.splits,
            recorder=recorder,
        )
        return pack_objects(y), skips


def chunks_of(
    layers: StageLayers,
    ports: Mapping[int, Ports],
    device: torch.device,
    *,
    deferred_batch_norm: bool,
    call: CallLayers,
    side_outputs: SideOutputs | None = None,
    random_state: RandomStateKeeper | None = None,
) -> dict[int, Chunk]:
    """Return the chunks of a stage by their numbers.

    Args:
        layers: The layers of the stage.
        ports: The ports of each chunk, in the order of the chunks.
        device: The device of the layers.
        deferred_batch_norm: See :class:`~strategies.pipeline.stage.layers.Layers`.
        call: How the layers are called; see :class:`~strategies.pipeline.stage.layers.Layers`.
        side_outputs: Finds tensors that layers store in attributes; ``None`` if no layer can do so.
        random_state: Restores the random state of the process; by default a new one that these chunks share.
    """
    random_state = random_state or RandomStateKeeper(device)
    return {
        number: Chunk(
            Layers(
                chunk,
                span.start,
                device,
                deferred_batch_norm=deferred_batch_norm,
                call=call,
                random_state=random_state,
            ),
            own,
            side_outputs=side_outputs,
        )
        for (number, own), chunk, span in zip(ports.items(), layers.chunks, layers.spans, strict=True)
    }
