"""Passes in which micro-batches go backward while others still go forward, as the driver leads them.

The user's code runs once per micro-batch and is suspended where it calls the module (:mod:`.suspended`). On three
stages, with ``b`` what comes before the call, ``a`` what comes after it (the loss), and the driver as the last stage:

    stage 0     F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1     .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    driver   b0 b1 b2 b3 F0 a0 B0 F1 a1 B1 F2 a2 B2 F3 a3 B3

Gradients are gathered apart from ``.grad``; the backward pass of the loss that comes out of it all releases them.

Index letters: ``m`` micro-batch, ``i`` stage.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.autograd import with_backward
from strategies.common.torch_compat import tree_leaves, tree_map_only
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.executor.passes import Passes
from strategies.pipeline.executor.run import Run
from strategies.pipeline.executor.suspended import Step
from strategies.pipeline.microbatch.chunks import plain
from strategies.pipeline.microbatch.packing import pack_objects, unpack_objects
from strategies.pipeline.optim.gathered import GatheredGradients
from strategies.pipeline.schedule.tables import Action
from strategies.pipeline.stage.context import PassContext
from strategies.pipeline.stage.layers import entered
from strategies.pipeline.stage.randomness import layer_seed
from strategies.pipeline.stage.side_outputs import is_fresh

Code = Callable[[], Tensor | None]
"""The user's code for one micro-batch, which calls the module once and returns a loss, or ``None`` to learn nothing."""


def interleave(
    passes: Passes,
    parameters: Sequence[nn.Parameter],
    codes: Sequence[Code],
    weights: Sequence[float],
    scale: float,
    context: PassContext,
) -> Tensor | None:
    """Runs forward and backward pass of every micro-batch.

    Args:
        passes: The pipeline's.
        parameters: Those that have their values in this process.
        codes: What to run for each micro-batch.
        weights: The share of each micro-batch in the loss.
        scale: By which the loss is multiplied for the backward pass, so that small gradients survive in float16.
        context: What forward passes run under; backward passes run as the caller does.

    Returns:
        The weighted sum of the losses, whose backward pass gives every parameter its gradient; ``None`` if there is no
        loss at all.
    """
    with torch.no_grad(), passes.explained():
        run = passes.begin(len(codes), True, context)
        for i, remote in enumerate(passes.remotes):
            remote.start(StageCommands.interleave, run.this, passes.actions(i, run.this))
        gathered = GatheredGradients(parameters)
        pass_ = _Interleaved(passes, run, codes, [weight * scale for weight in weights])
        with gathered.gathering():
            losses = pass_.run()
            if not pass_.learns and any(loss is not None for loss in losses):
                raise RuntimeError("the loss that training_step returns does not depend on anything that is trained")
            passes.ports.ties.move_gradients(run.this.number)
    known = [(weight, loss) for weight, loss in zip(weights, losses, strict=True) if loss is not None]
    if not known:
        return None
    total = torch.stack([weight * loss for weight, loss in known]).sum()
    return with_backward([total], [True], [], partial(_release, run, gathered, scale))[0]


def _release(
    run: Run[Passes], gathered: GatheredGradients, scale: float, grads: Sequence[Tensor | None], _: Any
) -> list[Tensor | None]:
    passes = run.spend()
    passes.num_backward += 1
    factor = 0.0 if grads[0] is None else grads[0].item() / scale
    with passes.explained():
        for remote in passes.remotes:
            remote.start(StageCommands.release, run.this.number, factor)
        gathered.release(factor)
    return []


class _Interleaved:
    """One pass."""

    def __init__(self, passes: Passes, run: Run[Passes], codes: Sequence[Code], weights: Sequence[float]) -> None:
        self._passes, self._this, self._codes, self._weights = passes, run.this, codes, weights
        self.learns = False
        """Whether the loss of any micro-batch wants a backward pass."""
        self._steps: list[Step] = []
        self._inputs: list[list[Tensor]] = []
        """Of each micro-batch, the tensors that the module was called with and that want a gradient."""
        self._num_answered = 0

    def run(self) -> list[Tensor | None]:
        """Returns the loss of each micro-batch, detached."""
        stages, num = len(self._passes.remotes) + 1, len(self._codes)
        try:
            losses = []
            for m in range(num):
                while len(self._steps) < min(m + stages + 1, num):
                    # What stage 0 answers a period ago is there: this bounds what waits, and makes nobody wait.
                    self._answer(len(self._steps) - 2 * stages)
                    self._begin(len(self._steps))
                losses.append(self._forward_and_backward(m))
                for sender in self._passes.ports.senders:
                    sender.flush(keep=stages + 2)
            self._answer(num)
            return losses
        except BaseException:
            for step in self._steps:
                step.abandon()
            raise

    def _begin(self, m: int) -> None:
        """Runs the user's code until it calls the module, and sends what it calls it with."""
        this = self._this
        step = self._passes.steps.begin(partial(self._in_context, self._codes[m]), layer_seed(this.seed, m, -1))
        self._steps.append(step)
        if not step.has_called:
            raise RuntimeError(
                "training_step did not call the pipelined module for one of its micro-batches; schedule='1f1b' runs it "
                "once per micro-batch, with one call in each. Use schedule='gpipe'."
            )
        if step.context != this.context:
            raise RuntimeError(
                "training_step called the pipelined module under autocast or other settings of its own, but "
                "schedule='1f1b' runs its layers under those of the precision plug-in. Use schedule='gpipe'."
            )
        input, step.input = step.input, None
        # Code that runs meanwhile may use the memory of what is sent for its next micro-batch.
        input = pack_objects(input)
        sent = tree_map_only(Tensor, lambda tensor: plain(tensor).detach().clone(), input)
        tensors = [leaf for leaf in tree_leaves(input) if isinstance(leaf, Tensor)]
        self._passes.feed(sent, this, m, [t.requires_grad for t in tensors])
        self._inputs.append([t for t in tensors if t.requires_grad])

    def _in_context(self, code: Code) -> Any:
        with self._this.context.entered(grad=True):
            return code()

    def _forward_and_backward(self, m: int) -> Tensor | None:
        passes, this, step = self._passes, self._this, self._steps[m]
        last = len(passes.remotes)
        passes.side_outputs.reveal()
        passes.run_stage([Action("F", m, last)], this)
        leaves = passes.output(this, m)
        passes.side_outputs.show(lambda value: m >= this.recomputed and (this.microbatches == 1 or is_fresh(value)))
        wanted = [leaf for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        with torch.enable_grad():
            output = unpack_objects(entered(leaves))
        step.resume(output)
        loss, step.result = step.result, None
        if loss is not None and loss.numel() != 1:
            raise RuntimeError(f"training_step returned a loss of shape {list(loss.shape)}; it must be a single number")
        if loss is not None and loss.requires_grad:
            self.learns = True
            # The loss may also depend on the input directly; its part of the graph is gone through again in _answer.
            # If it depends on side outputs of the own stage, that stage's graph is gone through again below.
            keep = bool(self._inputs[m]) or passes.side_outputs.have_graphs
            loss.backward(torch.full_like(loss, self._weights[m]), retain_graph=keep)
        if wanted:
            passes.ports.output_grads.send([leaf.grad for leaf in wanted], this.number, m)
        passes.run_stage([Action("B", m, last)], this)
        return None if loss is None else loss.detach()

    def _answer(self, limit: int) -> None:
        """Runs the backward pass of what came before the call, of the micro-batches below ``limit``."""
        for m in range(self._num_answered, limit):
            inputs, self._inputs[m] = self._inputs[m], []
            if inputs:
                grads = self._passes.ports.fed_back.receive(self._this.number, m)
                known = [(t, grad) for t, grad in zip(inputs, grads, strict=True) if grad is not None]
                torch.autograd.backward([t for t, _ in known], [grad for _, grad in known])
            self._num_answered = m + 1
