"""One stage: consecutive layers, and the forward and backward passes of micro-batches through them.

The same class runs on the driver and on the workers; they differ only in what their four ports are connected to:

    inputs ─────▶ ┌───────┐ ─────▶ outputs
                  │ Stage │
    input_grads ◀─└───────┘◀───── output_grads

Index letters: ``m`` micro-batch, ``i`` stage.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from strategies.common.activity import Activity
from strategies.common.torch_compat import tree_flatten, tree_leaves, tree_unflatten, version_of
from strategies.pipeline.microbatch.packing import pack_objects, unpack_objects
from strategies.pipeline.schedule.tables import Action
from strategies.pipeline.stage.calling import CallLayers, call_in_turn
from strategies.pipeline.stage.context import PassContext
from strategies.pipeline.stage.layers import Carried, Layers
from strategies.pipeline.stage.randomness import preserved_random_state
from strategies.pipeline.stage.recompute import Flags, frozen_statistics
from strategies.pipeline.stage.side_outputs import Noted, SideOutputs


@dataclass(frozen=True)
class Pass:
    """What every stage must know of one pass of a batch through the pipeline.

    Attributes:
        number: Counts the passes of a session.
        microbatches: How many micro-batches the batch was split into.
        grad: Whether a backward pass may follow.
        recomputed: How many of the first micro-batches keep only the stage's inputs and run again before backward.
        at_once: Run the backward passes of all micro-batches in one call of autograd instead of one after another.
        seed: Base of the random seeds of the layers in this pass.
        context: The driver's autocast, default dtype and so on.
    """

    number: int
    microbatches: int
    grad: bool
    recomputed: int
    at_once: bool
    seed: int
    context: PassContext


class Output(Protocol):
    """Where a stage puts values; see :class:`~strategies.pipeline.transport.channel.Sender`."""

    def send(
        self, value: Any, pass_number: int, microbatch: int, *, requires_grad: list[bool] | None = None
    ) -> None: ...


class Input(Protocol):
    """Where a stage takes values from; see :class:`~strategies.pipeline.transport.channel.Receiver`."""

    def receive(self, pass_number: int, microbatch: int) -> Any: ...


class Mailbox:
    """A port to the same process: what is sent is received there.

    Args:
        copies: Whether the receiver gets tensors of its own, which it may change in place.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self._copies = copies
        self._values: dict[tuple[int, int], Any] = {}

    def send(self, value: Any, pass_number: int, microbatch: int, *, requires_grad: list[bool] | None = None) -> None:
        leaves, spec = tree_flatten(value)
        flags = iter(requires_grad or [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)])
        own = [self._own(leaf).requires_grad_(next(flags)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._values[pass_number, microbatch] = tree_unflatten(own, spec)

    def receive(self, pass_number: int, microbatch: int) -> Any:
        return self._values.pop((pass_number, microbatch))

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if self._copies else tensor.detach()


@dataclass
class _Kept:
    """What a stage keeps of a micro-batch between its forward and its backward pass.

    ``inputs`` are places for the gradients of the input's tensors that want one; those tensors are not kept for it.
    ``outputs`` has an entry for each output that gets one from the next stage; it is ``None`` if the micro-batch is
    recomputed, as is an entry whose output wants none after all.
    """

    inputs: list["_Gradient"]
    outputs: list[GradientEdge | None]
    recompute_from: Any = None
    flags: Flags | None = None


@dataclass
class _Gradient:
    """Of one tensor that has entered a stage."""

    value: Tensor | None = None


class _Enter(torch.autograd.Function):
    """From a tensor that has arrived to one that layers may change in place, and whose gradient goes to its place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrived: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return arrived.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # A loss may reach this by a side output of a layer as well as by the stage's output.
        known = ctx.gradient.value
        ctx.gradient.value = grads[0] if known is None else known + grads[0]
        return None, None, None


class Stage:
    """Runs actions of a schedule on some consecutive layers.

    It takes and gives a value and the skips that travel with it (:data:`~strategies.pipeline.stage.layers.Carried`),
    with packed objects (:mod:`~strategies.pipeline.microbatch.packing`).

    Args:
        layers: The layers; their names are those of the whole module's children.
        first_layer: The first one's place in the whole module, which seeds its random numbers.
        device: Where the layers live.
        inputs, outputs, output_grads, input_grads: The ports.
        deferred_batch_norm: Update running statistics once per pass instead of once per micro-batch.
        call: How the layers are called; see :class:`~strategies.pipeline.stage.layers.Layers`.
        activity: Where it says what it does.
        side_outputs: Finds those of the layers, which are noted with the outputs of the stage; see
            :mod:`~strategies.pipeline.stage.side_outputs`.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        first_layer: int,
        device: torch.device,
        *,
        inputs: Input,
        outputs: Output,
        output_grads: Input,
        input_grads: Output,
        deferred_batch_norm: bool = False,
        call: CallLayers = call_in_turn,
        activity: Activity | None = None,
        side_outputs: SideOutputs | None = None,
    ) -> None:
        self.layers, self.first_layer, self.device = layers, first_layer, device
        self._own = Layers(layers, first_layer, device, deferred_batch_norm=deferred_batch_norm, call=call)
        self._inputs, self._outputs, self._output_grads, self._input_grads = inputs, outputs, output_grads, input_grads
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._writes_input: bool | None = None
        self._activity = activity or Activity()
        self._side_outputs = side_outputs

    def close(self) -> None:
        """Leaves the layers as they were; keeps nothing of any pass."""
        self._kept.clear()
        self._own.close()

    @property
    def num_kept(self) -> int:
        """How many micro-batches still wait for their backward pass."""
        return len(self._kept)

    def discard(self, pass_number: int) -> None:
        """Forgets a pass whose backward pass will never come; the garbage collector may ask for this at any time."""
        for key in list(self._kept):  # a copy, made at one stroke
            if key[0] == pass_number:
                self._kept.pop(key, None)

    def run(self, actions: Iterable[Action], this: Pass) -> None:
        """Runs actions of one pass in their order.

        Raises:
            Exception: Whatever a layer raises.
            RuntimeError: If a neighbour fails or does not answer in time.
        """
        at_once = []
        with preserved_random_state(self.device):
            for action in actions:
                if action.kind == "F":
                    self._forward(this, action.microbatch)
                elif this.at_once:
                    at_once.append(action.microbatch)
                else:
                    self._backward(this, [action.microbatch])
            if at_once:
                self._backward(this, at_once)

    def _forward(self, this: Pass, m: int) -> None:
        self._activity.doing = f"F{m}, waiting for its input"
        x = self._inputs.receive(this.number, m)
        x, noted = x if isinstance(x, Noted) else (x, ())
        recompute = this.grad and m < this.recomputed
        kept = _Kept([_Gradient() for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.requires_grad], [])
        if recompute:
            kept.recompute_from, kept.flags = x, Flags.of(self.layers)
            if self._writes_input is not False:
                x = _copied(x)
            before = _versions(x)
        elif this.grad:
            x = _entered(x, kept.inputs)
        y = self._run_layers(this, m, x, grad=this.grad and not recompute, recomputing=False)
        if recompute:
            self._writes_input = bool(self._writes_input) or before != _versions(x)
        tensors = [leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor)]
        if recompute:
            differentiable = bool(kept.inputs) or any(p.requires_grad for p in self.layers.parameters())
            flags = [differentiable and (t.is_floating_point() or t.is_complex()) for t in tensors]
            kept.outputs = [None for flag in flags if flag]
        else:
            flags = [this.grad and t.requires_grad for t in tensors]
            kept.outputs = [get_gradient_edge(t) for t, flag in zip(tensors, flags, strict=True) if flag]
        if kept.inputs or any(flags):
            self._kept[this.number, m] = kept
        if m == this.microbatches - 1:
            self._own.end_forward()
        if self._side_outputs is not None and m in (0, this.microbatches - 1):
            noted = (*noted, *self._side_outputs.find())
        self._outputs.send(Noted(y, noted) if noted else y, this.number, m, requires_grad=flags)

    def _backward(self, this: Pass, microbatches: Sequence[int]) -> None:
        """Runs the backward passes of the micro-batches in one call of autograd."""
        edges: list[GradientEdge] = []
        grads: list[Tensor] = []
        done = []
        for m in microbatches:
            kept = self._kept.pop((this.number, m), None)
            if kept is None:  # neither an output nor an input of this micro-batch wants a gradient
                continue
            done.append((m, kept.inputs))
            if not kept.outputs:  # the gradient ends in this stage; the one before still waits for an answer
                continue
            self._activity.doing = f"B{m}, waiting for its gradients"
            received = self._output_grads.receive(this.number, m)
            if kept.recompute_from is not None:
                assert kept.flags is not None
                x, kept.recompute_from = _entered(kept.recompute_from, kept.inputs), None
                with kept.flags.entered(self.layers):
                    y = self._run_layers(this, m, x, grad=True, recomputing=True)
                candidates = [t for t in tree_leaves(y) if isinstance(t, Tensor)]
                candidates = [t for t in candidates if t.is_floating_point() or t.is_complex()]
                kept.outputs = [get_gradient_edge(t) if t.requires_grad else None for t in candidates]
            for edge, grad in zip(kept.outputs, received, strict=True):
                if edge is not None and grad is not None:
                    edges.append(edge)
                    grads.append(grad)
        self._activity.doing = ", ".join(f"B{m}" for m in microbatches)
        if edges:
            with frozen_statistics(self.layers, self._own.frozen_in_backward):  # of what checkpoints itself
                torch.autograd.backward(edges, grads)
        for m, inputs in done:
            if inputs:
                self._input_grads.send([gradient.value for gradient in inputs], this.number, m)

    def _run_layers(self, this: Pass, m: int, carried: Carried, *, grad: bool, recomputing: bool) -> Carried:
        """Runs the layers on objects of their own; see :mod:`~strategies.pipeline.microbatch.packing`."""

        def doing(what: str) -> None:
            self._activity.doing = what

        x, skips = unpack_objects(carried[0]), carried[1]
        del carried
        y, skips = self._own.run(
            (x, skips),
            m,
            this.seed,
            this.context,
            grad=grad,
            checkpointing=this.grad and m < this.recomputed and not recomputing,
            recomputing=recomputing,
            doing=doing,
        )
        return pack_objects(y), skips


def _entered(value: Any, gradients: Sequence[_Gradient]) -> Any:
    """The same value, made of tensors that may be changed in place and whose gradients go to ``gradients``."""
    leaves, spec = tree_flatten(value)
    ahead = iter(gradients)
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        own = [
            _Enter.apply(anchor, t.detach(), next(ahead)) if isinstance(t, Tensor) and t.requires_grad else t
            for t in leaves
        ]
    return tree_unflatten(own, spec)


def _copied(value: Any) -> Any:
    leaves, spec = tree_flatten(value)
    return tree_unflatten([t.detach().clone() if isinstance(t, Tensor) else t for t in leaves], spec)


def _versions(value: Any) -> list[int]:
    return [version_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
