"""Consecutive layers and how one micro-batch goes through them: random seeds, running statistics, settings of the pass.

What a micro-batch is made of and how gradients come back is the caller's affair: a :class:`Stage` of the strategy or of
``Pipe``, or the one autograd graph of a ``Pipe`` in one process.
"""

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.torch_compat import BatchNorm, NormBase, tree_flatten, tree_leaves, tree_unflatten
from strategies.common.tracing import Labels
from strategies.pipeline.stage.batchnorm import DeferredStatistics
from strategies.pipeline.stage.calling import CallLayers, call_in_turn
from strategies.pipeline.stage.context import PassContext
from strategies.pipeline.stage.randomness import layer_seed, seed_device
from strategies.pipeline.stage.recompute import frozen_statistics, phase
from strategies.pipeline.stage.skip import Key, waiting_skips

Carried = tuple[Any, dict[Key, Tensor | None]]
"""What goes from stage to stage: what the last layer returned, and the skips that wait for a layer further on."""


class _Enter(torch.autograd.Function):
    """The identity from a leaf to a tensor that layers may change in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Layers:
    """Runs micro-batches through some layers.

    Args:
        layers: The layers; their names are those of the whole module's children.
        first_layer: The first one's place in the whole module, which seeds its random numbers.
        device: Where the layers live.
        deferred_batch_norm: Update running statistics once per pass instead of once per micro-batch.
        call: How the layers are called; one after the other by default.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        first_layer: int,
        device: torch.device,
        *,
        deferred_batch_norm: bool = False,
        call: CallLayers = call_in_turn,
    ) -> None:
        self.layers, self.first_layer, self.device = layers, first_layer, device
        self._deferred = DeferredStatistics(layers) if deferred_batch_norm else None
        self._call = call

    @property
    def frozen_in_backward(self) -> type[NormBase] | None:
        """The normalising layers whose statistics a backward pass must leave alone: one may checkpoint itself."""
        return BatchNorm if self._deferred else None

    def run(
        self,
        carried: Carried,
        microbatch: int,
        seed: int,
        context: PassContext,
        *,
        grad: bool,
        checkpointing: bool,
        recomputing: bool,
        doing: Callable[[str], None] | None = None,
    ) -> Carried:
        """Takes a micro-batch through the layers.

        Args:
            carried: What the first layer takes, and skips; leaves of autograd in it must not be changed in place, see
                :func:`entered`.
            microbatch: Its number; with the first one a pass begins.
            seed: That of the pass.
            context: The settings of the pass.
            grad: Whether autograd is to record it.
            checkpointing: Whether this will be done again in the backward pass.
            recomputing: Whether this has been done before, so that nothing is counted twice.
            doing: Told what is done, for error reports.
        """
        frozen = NormBase if recomputing else self.frozen_in_backward
        if self._deferred is not None and microbatch == 0 and not recomputing:
            self._deferred.forget()
        gathering = self._deferred.gathering() if self._deferred and not recomputing else nullcontext()
        given, skips = carried[0], dict(carried[1])
        del carried  # or a skip would be kept beyond its pop
        labels = Labels()

        def before(place: int, value: Any) -> None:
            nonlocal given
            given, layer = value, self.first_layer + place
            what = f"{'recomputing ' if recomputing else ''}F{microbatch}, layer {layer}"
            if doing is not None:
                doing(what)
            labels.next(what)
            seed_device(layer_seed(seed, microbatch, layer), self.device)

        this_run = phase(checkpointing=checkpointing, recomputing=recomputing)
        with context.entered(grad=grad), frozen_statistics(self.layers, frozen), gathering, this_run:
            try:
                with waiting_skips(skips):
                    return self._call(self.layers, given, before), skips
            except ValueError as error:
                self._explain_single_row(error, given, microbatch)
                raise
            finally:
                labels.end()

    def _explain_single_row(self, error: ValueError, x: Any, microbatch: int) -> None:
        """Raises an error that names the layer and the way out, if one could not normalise a micro-batch of one row."""
        if not str(error).startswith("Expected more than 1 value per channel when training"):
            return
        names = {module: name for name, module in self.layers.named_modules()}
        callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        norm = next((caller for caller in reversed(callers) if isinstance(caller, nn.Module) and caller in names), None)
        rows = [len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if norm is None or rows[:1] != [1]:
            return
        raise ValueError(
            f"Layer {names[norm]}, a {type(norm).__name__} in training mode, cannot normalise micro-batch {microbatch}"
            f", which has 1 row. {error}. Use at most half as many micro-batches as the smallest batch has rows (leave "
            "smaller batches out, as drop_last=True of a DataLoader does with the last one), or a layer that "
            "normalises each row by itself, such as nn.LayerNorm."
        ) from error

    def end_forward(self) -> None:
        """Notes that the last micro-batch of a pass is through."""
        if self._deferred is not None:
            self._deferred.commit()

    def close(self) -> None:
        """Leaves the layers as they were."""
        if self._deferred is not None:
            self._deferred.remove()


def entered(value: Any) -> Any:
    """The same value, made of tensors that may be changed in place though those of ``value`` are leaves."""
    leaves, spec = tree_flatten(value)
    own = [_Enter.apply(t) if isinstance(t, Tensor) and t.requires_grad else t for t in leaves]
    return tree_unflatten(own, spec)
