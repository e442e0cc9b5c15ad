"""Run a batch in two parts, fill and drain (``gpipe``), or forward only.

    driver   split ─▶ F0 F1 F2 F3 ─▶ merge ─▶ output ─▶ the user's loss ─▶ backward() ─▶ B3 B2 B1 B0
                      └ FillDrain.run ┘                                                  └ backward ┘

The outputs of all micro-batches are the outputs of one autograd node. When the loss is differentiated, this node runs
the backward part on every stage. The driver runs its part inside the node and does not wait for the workers, whose
work overlaps with what the driver does next.

Index letters: ``m`` micro-batch, ``i`` stage.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strategies.common.autograd import with_backward
from strategies.pipeline.executor.executor import Executor, PendingPass
from strategies.pipeline.schedule.operations import Result, Row, UserCode
from strategies.pipeline.stage.edges import tensors_of
from strategies.pipeline.stage.microbatch.split import NoChunk, merge, pack_objects, split, unpack_objects
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.side_outputs import with_graph


class FillDrain:
    """Replaces the ``forward`` of the pipelined module.

    Args:
        executor: Runs the passes on all stages.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __call__(self, input: Any, microbatches: int | None = None, list_number: int = 0) -> Any:
        """Take the input of the module's ``forward`` and return its output.

        Args:
            input: The input.
            microbatches: The number of micro-batches; by default the one in the settings.
            list_number: The list of layers that the input goes through.
        """
        parts = split(pack_objects(input, NoChunk), microbatches or self._executor.settings.microbatches)
        return unpack_objects(merge(self.run(parts, list_number)))

    def run(self, parts: Sequence[Any], list_number: int = 0) -> list[Any]:
        """Run the forward part of a pass, and the backward part when the outputs are differentiated.

        Args:
            parts: The input of each micro-batch, with packed objects.
            list_number: The list of layers that the inputs go through.

        Returns:
            The output of each micro-batch, with packed objects.
        """
        executor, given = self._executor, [tensor for part in parts for tensor in tensors_of(part)]
        grad = torch.is_grad_enabled() and (
            any(t.requires_grad for t in given)
            or any(p.requires_grad for layer in executor.ends[list_number].layers for p in layer.parameters())
        )
        inputs = [t for t in given if grad and t.requires_grad]
        with torch.no_grad(), executor.explained():
            this = executor.begin(len(parts), grad=grad, list_number=list_number)
            outputs = self._forward(parts, this)
        required = [[t.requires_grad for t in tensors_of(output)] for output in outputs]
        run = PendingPass(this, self)
        wanted = [flag for flags in required for flag in flags]
        return with_backward(outputs, wanted, inputs, partial(_backward, run, required)) if any(wanted) else outputs

    def _forward(self, parts: Sequence[Any], this: Pass) -> list[Any]:
        """Run the forward part of a pass, and return the output of each micro-batch."""
        executor = self._executor
        if (recorder := executor.stage.recorder) is not None and this.list_number and recorder.pass_of_code >= 0:
            recorder.end("b", 0, self._first(this.list_number), this.number)
        code = _Code(executor, this, parts)
        executor.run("forward", this, code)
        if executor.stage.recorder is not None:
            executor.stage.recorder.begin(pass_of_code=this.number)  # the user's code runs until the backward part
        if executor.side_outputs.known:
            executor.side_outputs.restore()
            executor.side_outputs.insert(partial(_is_of_one_process, this))
        return code.results

    def backward(
        self,
        this: Pass,
        required: Sequence[Sequence[bool]],
        grads: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Run the backward part of a pass on every stage.

        Args:
            this: The pass.
            required: For each micro-batch, whether each tensor of its output requires a gradient; a guess for
                recomputed micro-batches.
            grads: The gradients of the tensors that require one, in order; ``None`` for tensors that the loss did not
                use.
            inputs: The tensors of the micro-batches' inputs that require a gradient.

        Returns:
            The gradients of ``inputs``.
        """
        executor, ahead = self._executor, iter(grads)
        ends = executor.ends[this.list_number]
        executor.note_backward(this.number)
        if (recorder := executor.stage.recorder) is not None and recorder.pass_of_code >= 0:
            last = this.microbatches - 1
            if recorder.pass_of_code == this.number:
                recorder.end("loss", last, ends.last_chunk, this.number)
            elif this.list_number + 1 < len(executor.ends):
                recorder.end("a", last, self._first(this.list_number + 1), recorder.pass_of_code)
        with executor.explained():
            for m, flags in enumerate(required):
                ends.output_grads.send([next(ahead) for flag in flags if flag], this.number, m)
            executor.carry_changes()  # autograd computes no gradients for parameters that were frozen since
            code = _Code(executor, this, answered=bool(inputs))
            executor.run("backward", this, code)
        if recorder is not None and this.list_number:
            recorder.begin(pass_of_code=this.number)  # the backward pass of the code before this list
        return [grad for m in sorted(code.received) for grad in code.received[m]]

    def _first(self, list_number: int) -> int:
        """Return the first chunk of a list of layers."""
        return self._executor.programs.placement.firsts[list_number]

    def forget(self, number: int) -> None:
        """Make every stage forget a pass whose backward part can no longer follow."""
        self._executor.forget(number)


class _Code:
    """The driver's code between the actions of a pass: sends inputs, receives outputs, receives gradients of inputs.

    Args:
        executor: Runs the passes on all stages.
        this: The pass.
        parts: The input of each micro-batch.
        answered: Whether the gradients of inputs are needed.
    """

    def __init__(self, executor: Executor, this: Pass, parts: Sequence[Any] = (), *, answered: bool = False) -> None:
        self._executor, self._this, self._parts, self._answered = executor, this, parts, answered
        self.results: list[Any] = []
        """The output of each micro-batch."""
        self.received: dict[int, list[Tensor | None]] = {}
        """The gradients of the input of each micro-batch."""

    def run(self, operation: UserCode | Result) -> None:
        executor, this, m = self._executor, self._this, operation.microbatch
        if isinstance(operation, Result):
            self.results.append(executor.output(this, m, this.list_number))
        elif operation.part == "b":  # there are no skips before the first layer
            part = self._parts[m]
            flags = [this.grad and tensor.requires_grad for tensor in tensors_of(part)]
            executor.ends[this.list_number].inputs.send((part, {}), this.number, m, requires_grad=flags)
        elif self._answered:
            self.received[m] = executor.ends[this.list_number].input_grads.receive(this.number, m)

    def joins(self, row: Row, place: int) -> bool:
        return False

    def around(self) -> AbstractContextManager[None]:
        return self._executor.own_values()


def _backward(
    run: PendingPass[FillDrain],
    required: Sequence[Sequence[bool]],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
) -> list[Tensor | None]:
    return run.spend().backward(run.this, required, grads, inputs)


def _is_of_one_process(this: Pass, value: Any) -> bool:
    """Whether a side output equals that of one process, and no gradient flows through it."""
    return this.microbatches == 1 and not (this.grad and (this.recomputed or with_graph(value)))
