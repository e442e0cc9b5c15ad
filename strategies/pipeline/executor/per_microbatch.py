"""Run the forward and backward passes of micro-batches interleaved (every schedule but ``gpipe``).

The user's code runs once per micro-batch and is suspended where it calls the module (:mod:`.suspended`). The diagram
shows three stages, with the driver as the last stage. ``b`` is the code before the call, ``r`` the code after the call
(the loss) and its backward pass. If the code before the call has parameters, ``a`` is its backward pass, after ``B``
of stage 0:

    stage 0     F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1     .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    driver   b0 b1 b2 b3 F0 r0 B0 F1 r1 B1 F2 r2 B2 F3 r3 B3

If there are several lists of layers, each list is one more round over the stages, and the code between two lists runs
after the driver's chunk of the earlier list (``b``, as the code before a call) and before the backward pass of this
chunk (``a``)::

    training_step   b0 ─▶ list 0 ─▶ 2b0 ─▶ list 1 ─▶ r0: loss and its backward pass
    gradients       a0 ◀─ list 0 ◀─ 2a0 ◀─ list 1 ◀─┘

Gradients are kept separate from ``.grad`` until the backward pass of the returned loss releases them.

Index letters: ``m`` micro-batch, ``i`` stage.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from strategies.common.autograd import GatheredGradients, with_backward
from strategies.common.joined_lists import names_of
from strategies.common.random_seeds import layer_seed, preserved_random_state
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.executor.executor import Executor, PendingPass
from strategies.pipeline.executor.suspended import Steps, SuspendedStep
from strategies.pipeline.schedule.operations import Operation, Post, Result, Row, UserCode
from strategies.pipeline.schedule.tables import Action
from strategies.pipeline.stage.action_recorder import ActionRecorder
from strategies.pipeline.stage.edges import leaves_of, tensors_of, with_leaves
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.microbatch.split import pack_objects, plain, unpack_objects
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.side_outputs import is_fresh
from strategies.pipeline.stage.stage import GradientSlot, entered
from strategies.sharding.gathered_layers import Event

UserStep = Callable[[], Tensor | None]
"""The user's code for one micro-batch. It calls the module once and returns a loss, or ``None`` to skip training."""


@dataclass(frozen=True)
class ReleaseFactors:
    """The factors of both summands when the gradients of a pass are added to ``.grad``.

    Attributes:
        added: The factor of the gradients of the pass.
        kept: The factor of the gradients that are already in ``.grad``.
    """

    added: float = 1.0
    kept: float = 1.0


class PerMicrobatch:
    """Runs user code once per micro-batch.

    Args:
        executor: Runs the passes on all stages.
        parameters: Returns the parameters whose values are in this process.
        modules: The modules whose attributes the user's code may set for a micro-batch.
    """

    def __init__(
        self, executor: Executor, parameters: Callable[[], Sequence[nn.Parameter]], modules: Sequence[nn.Module] = ()
    ) -> None:
        self._executor, self._parameters = executor, parameters
        self.steps = Steps(executor.stage.device, names_of(executor.module), modules)
        """The suspended runs of user code."""
        self._list_of = {first: number for number, first in enumerate(executor.programs.placement.firsts)}

    def run(
        self,
        codes: Sequence[UserStep],
        weights: Sequence[float],
        context: PassContext,
        scale: float = 1.0,
        release_factors: Callable[[], ReleaseFactors] = ReleaseFactors,
        factor: float = 1.0,
    ) -> Tensor | None:
        """Run the forward and backward pass of every micro-batch.

        Args:
            codes: The code to run for each micro-batch.
            weights: The weight of each micro-batch in the loss. A micro-batch with weight 0 has no backward pass, and
                its loss may be infinite or NaN.
            context: Settings for the forward passes. Backward passes run under the caller's settings.
            scale: The factor of the loss in the backward passes, so that small gradients do not underflow in float16.
            release_factors: Called when the gradients are added to ``.grad``; returns the factors of that sum.
            factor: The factor of the gradients, but not of the loss that is returned.

        Returns:
            The weighted sum of the losses, whose backward pass sets the gradient of every parameter; ``None`` if no
            code returned a loss.
        """
        executor = self._executor
        with torch.no_grad(), executor.explained():
            this = executor.begin(len(codes), grad=True, context=context, gathers=True)
            run = PendingPass(this, executor)
            gathered = GatheredGradients(self._parameters())
            code = _MicrobatchCode(
                executor, self.steps, self._list_of, this, codes, [weight * scale * factor for weight in weights]
            )
            with gathered.gathering(), preserved_random_state(executor.stage.device), code.abandoned_on_error():
                code.begin()
                with executor.unchanged_layers():
                    executor.run("training", this, code)
            losses = code.losses
            if not code.learns and any(loss is not None for loss in losses):
                raise RuntimeError("the loss that training_step returns does not depend on any trainable parameter")
        known = [(weight, loss) for weight, loss in zip(weights, losses, strict=True) if loss is not None]
        if not known:
            return None
        device = executor.stage.device  # a constant loss may be on another device
        parts = [weight * loss if weight else torch.zeros_like(loss) for weight, loss in known]
        total = torch.stack([part.to(device) for part in parts]).sum()
        return with_backward(total, [True], [], partial(_release, run, gathered, scale, release_factors))


def _release(
    run: PendingPass,
    gathered: GatheredGradients,
    scale: float,
    release_factors: Callable[[], ReleaseFactors],
    grads: Sequence[Tensor | None],
    _: Any,
) -> list[Tensor | None]:
    """Add the gradients of a pass, times the gradient of its loss, to ``.grad`` on every stage."""
    executor = run.spend()
    executor.note_backward(run.this.number)
    factors = release_factors()
    factor = 0.0 if grads[0] is None else grads[0].item() / scale * factors.added
    with executor.explained():
        executor.agree(Event.RELEASE, factor)
        for remote in executor.remotes:
            remote.send(StageCommands.release, run.this.number, factor, factors.kept)
        gathered.release(factor, factors.kept)
    return []


class _MicrobatchCode:
    """Runs ``training_step`` for each micro-batch of one pass, between the actions of the driver.

    Args:
        executor: Runs the passes on all stages.
        steps: Begins suspended runs.
        list_of: For the first stage of each list of layers, and the edge to it, the number of the list.
        this: The pass.
        codes: The code to run for each micro-batch.
        weights: The factor of each loss in its backward pass.
    """

    def __init__(
        self,
        executor: Executor,
        steps: Steps,
        list_of: Mapping[int, int],
        this: Pass,
        codes: Sequence[UserStep],
        weights: Sequence[float],
    ) -> None:
        self._executor, self._side_outputs = executor, executor.side_outputs
        self._ends, self._last = executor.ends, executor.ends[-1]
        self._list_of, self._threads, self._this, self._codes, self._weights = list_of, steps, this, codes, weights
        self._firsts = [*list_of]
        self.losses: list[Tensor | None] = []
        """The loss of each micro-batch, detached."""
        self.learns = False
        """Whether the loss of any micro-batch requires a backward pass."""
        self._steps: dict[int, SuspendedStep] = {}
        """The suspended run of each micro-batch. A run that has ended is dropped: its small objects lie between freed
        blocks of tensors, and would prevent later tensors from using this memory again."""
        self._inputs: list[list[list[GradientEdge]]] = [[] for _ in codes]
        """For each micro-batch and list of layers, the tensors in the list's input that require a gradient.

        They are edges of the graph, because later code may change the tensors in place.
        """
        self._slots: list[list[list[GradientSlot]]] = [[] for _ in codes]
        """For each micro-batch and list but the last, the gradients of the list's output."""
        self._is_joined = False
        """Whether the last output of the last list has its graph."""

    def begin(self) -> None:
        """Run the code of the first micro-batch up to its call. What it changes in layers holds for the whole pass."""
        self._call(0, 0)

    def run(self, operation: UserCode | Result) -> None:
        if isinstance(operation, Result):
            self.losses.append(self._loss(operation.microbatch))
        elif operation.part == "b":
            number = self._list_of[operation.stage]
            if (operation.microbatch, number) != (0, 0):
                self._call(operation.microbatch, number)
        else:
            self._answer(operation.microbatch, self._list_of[operation.stage])

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        step = self._steps.get(action.microbatch)  # hooks of layers may set attributes of the model
        with self._executor.own_values(), nullcontext() if step is None else step.own_attributes():
            yield

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Context that ends the suspended runs if an error occurs."""
        try:
            yield
        except BaseException:
            for suspended in self._steps.values():
                suspended.abandon()
            raise

    def _call(self, m: int, number: int) -> None:
        """Run the user's code until it calls a list, and put the list's input into the mailbox of its first stage."""
        this, recorder = self._this, self._executor.stage.recorder
        if recorder is not None:
            recorder.begin()
        if number == 0:
            code = partial(self._in_context, self._codes[m])
            self._steps[m] = self._threads.begin(code, layer_seed(this.seed, m, -1))
        else:
            output, slots = self._cut_off(self._output(m, number - 1))
            self._slots[m].append(slots)
            self._steps[m].resume(output)
            del output
        step = self._steps[m]
        if not step.has_called:
            raise RuntimeError(
                f"training_step did not call {self._threads.lists[number]} for one of its micro-batches; "
                "schedule='1f1b' runs it once per micro-batch, with one call in each. "
                + ("Leave it out of module=[...], or use" if len(self._ends) > 1 else "Use")
                + " schedule='gpipe'."
            )
        if step.context != this.context:
            raise RuntimeError(
                "training_step called the pipelined module under autocast or other changed settings, but "
                "schedule='1f1b' runs its layers under those of the precision plug-in. Use schedule='gpipe'."
            )
        input, step.input = step.input, None
        # The input is copied, because the code of the next micro-batch may reuse its memory.
        input = pack_objects(input)
        leaves, spec = leaves_of(input)
        sent = [plain(leaf).detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if recorder is not None:
            recorder.end("b", m, self._firsts[number], this.number)
        self._inputs[m].append([get_gradient_edge(t) for t in tensors if t.requires_grad])
        flags = [t.requires_grad for t in tensors]
        self._ends[number].inputs.send((with_leaves(sent, spec), {}), this.number, m, requires_grad=flags)

    def _output(self, m: int, number: int) -> Any:
        """Return the output of a list for a micro-batch, with packed objects."""
        if self._side_outputs.known:
            self._side_outputs.restore()
        output, this = self._executor.output(self._this, m, number), self._this
        if self._side_outputs.known:
            again = (m, self._ends[number].last_chunk) in self._executor.stage.recomputed
            self._side_outputs.insert(lambda value: not again and (this.microbatches == 1 or is_fresh(value)))
        return output

    @staticmethod
    def _cut_off(output: Any) -> tuple[Any, list[GradientSlot]]:
        """Return an output for the user's code, without its graph, and the slots for its gradients."""
        slots = [GradientSlot() for tensor in tensors_of(output) if tensor.requires_grad]
        output = entered(output, slots)
        with torch.enable_grad():
            return unpack_objects(output), slots

    def _in_context(self, code: UserStep) -> Any:
        with self._this.context.entered(grad=True):
            return code()

    def joins(self, row: Row, place: int) -> bool:
        """Whether the backward pass of a micro-batch's loss continues through the last chunk.

        This is so if the action is the forward pass of the last chunk, and the chunk's whole backward action follows
        the loss immediately. Two calls of autograd, with the output as a leaf in between, would cost more.
        """
        action, this = row[place], self._this
        if not isinstance(action, Action) or action.kind != "F" or action.stage != self._last.last_chunk:
            return False
        m = action.microbatch
        self._is_joined = (
            not this.splits
            and (m, action.stage) not in self._executor.stage.recomputed
            and not any(self._inputs[m])  # otherwise _answer uses the graph of the code before the call again
            and self._comes_next(Action("B", m, action.stage), islice(row, place + 1, None))
        )
        return self._is_joined

    def _comes_next(self, backward: Action, later: Iterable[Operation]) -> bool:
        for operation in later:
            if isinstance(operation, UserCode):
                if operation.part == "b" or self._inputs_of(operation.microbatch, operation.stage):
                    return False
            elif not isinstance(operation, Result) and not self._is_empty(operation):
                return operation == backward
        return False

    def _is_empty(self, operation: Operation) -> bool:
        """Whether an operation receives the gradients of an input that requires no gradient."""
        if not isinstance(operation, Post) or (operation.way, operation.kind) != ("RECV", "B"):
            return False
        return operation.edge in self._list_of and not self._inputs_of(operation.microbatch, operation.edge)

    def _inputs_of(self, m: int, stage: int) -> list[GradientEdge]:
        return self._inputs[m][self._list_of[stage]]

    def _loss(self, m: int) -> Tensor | None:
        """Run the code after the call of the module for a micro-batch, with its backward pass."""
        executor, this, is_joined = self._executor, self._this, self._is_joined
        if (recorder := executor.stage.recorder) is not None:
            recorder.begin()
        output = self._output(m, len(self._ends) - 1)
        slots: list[GradientSlot] = []
        ended: list[bool] = []
        if is_joined and recorder is not None:
            self._end_at_output(recorder, output, m, ended)
        if is_joined:
            with torch.enable_grad():
                output = unpack_objects(output)
        else:
            output, slots = self._cut_off(output)
        # The loss may also depend on the input directly; _answer then uses that part of the graph again. If it depends
        # on side outputs of this stage, which the code may drop, the backward action uses the stage's graph again.
        keep = not is_joined and (any(self._inputs[m]) or self._use_graphs_of_stages)
        self._steps[m].resume(output)
        del output
        loss = self._steps.pop(m).result
        if loss is not None and loss.numel() != 1:
            raise RuntimeError(f"training_step returned a loss of shape {list(loss.shape)}; it must be a single number")
        if loss is not None and loss.requires_grad:
            self.learns = True
        if loss is not None and loss.requires_grad and self._weights[m]:  # 0 times an infinite gradient is NaN
            with executor.in_backward(this, m) if is_joined else nullcontext():
                loss.backward(torch.full_like(loss, self._weights[m]), retain_graph=keep)
        if slots:
            self._last.output_grads.send([slot.value for slot in slots], this.number, m)
        if recorder is not None and not ended:
            recorder.end("loss", m, self._last.last_chunk, this.number)
        return None if loss is None else loss.detach().clone()  # later code may change the returned loss

    def _end_at_output(self, recorder: ActionRecorder, output: Any, m: int, ended: list[bool]) -> None:
        """When the backward pass reaches the output, end the record of the code and begin the record of the chunk.

        Args:
            recorder: The recorder.
            output: The output, with its graph.
            m: The micro-batch.
            ended: An entry is added when this has happened.
        """

        def end(_: Tensor) -> None:
            if not ended:
                ended.append(True)
                recorder.split("loss", m, self._last.last_chunk, self._this.number)

        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(end)

    @property
    def _use_graphs_of_stages(self) -> bool:
        """Whether the user's code may have used side outputs of the driver's stage with their graphs."""
        return bool(self._side_outputs.known) and self._side_outputs.have_graphs

    def _answer(self, m: int, number: int) -> None:
        """Run the backward pass of the code before the call of a list."""
        inputs, self._inputs[m][number], this = self._inputs[m][number], [], self._this
        if inputs:
            if (recorder := self._executor.stage.recorder) is not None:
                recorder.begin()
            grads = self._ends[number].input_grads.receive(this.number, m)
            if recorder is not None:
                recorder.received()
            known = [(edge, grad) for edge, grad in zip(inputs, grads, strict=True) if grad is not None]
            # The input may also depend on the input of an earlier list directly.
            keep = number > 0 and (any(self._inputs[m]) or self._use_graphs_of_stages)
            torch.autograd.backward([edge for edge, _ in known], [grad for _, grad in known], retain_graph=keep)
            if recorder is not None:
                recorder.end("a", m, self._firsts[number], this.number)
        if number > 0 and (slots := self._slots[m][number - 1]):
            self._ends[number - 1].output_grads.send([slot.value for slot in slots], this.number, m)
            self._slots[m][number - 1] = []
