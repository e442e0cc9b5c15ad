"""Runs a whole batch through the pipeline: fill, then drain (``gpipe``), or forward only.

    driver   split ─▶ F0 F1 F2 F3 ─▶ merge ─▶ output ─▶ the user's loss ─▶ backward() ─▶ B3 B2 B1 B0
                      └──────── WholeBatch.__call__ ────┘                └── WholeBatch.backward ──┘

The output is one autograd node. When the loss differentiates it, every stage runs its backward part. The driver runs
its own part inside the node and does not wait for the others, whose work overlaps with what the driver does next.

Index letters: ``m`` micro-batch, ``i`` stage.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strategies.common.autograd import with_backward
from strategies.pipeline.executor.executor import Executor, Run
from strategies.pipeline.schedule.operations import Result, Row, UserCode
from strategies.pipeline.stage.microbatch.split import (
    NoChunk,
    has_rows,
    merge,
    merge_gradients,
    pack_objects,
    plain,
    split,
    unpack_objects,
)
from strategies.pipeline.stage.side_outputs import with_graph
from strategies.pipeline.stage.stage import Pass, tensors_of


@dataclass(frozen=True)
class _Gradients:
    """How gradients of a batch and of its micro-batches belong together.

    Attributes:
        rows: For each output that requires a gradient, the number of rows per micro-batch.
        required: For each such output, whether that of each micro-batch requires one; a guess for recomputed ones.
        inputs_split: For each input that requires a gradient, whether micro-batches got rows of it or all of it.
    """

    rows: list[list[int]]
    required: list[list[bool]]
    inputs_split: list[bool]


class WholeBatch:
    """Stands for the forward function of the pipelined module.

    Args:
        executor: Leads the stages.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __call__(self, input: Any, microbatches: int | None = None) -> Any:
        """Take and return what the module's own forward function does.

        Args:
            input: The input.
            microbatches: Into how many parts to split it; by default as many as the settings say.
        """
        input = pack_objects(input, NoChunk)
        given = tensors_of(input)
        grad = torch.is_grad_enabled() and (
            any(t.requires_grad for t in given) or any(p.requires_grad for p in self._executor.module.parameters())
        )
        inputs = [t for t in given if grad and t.requires_grad]
        with torch.no_grad(), self._executor.explained():
            parts = split(input, microbatches or self._executor.settings.microbatches)
            this = self._executor.begin(len(parts), grad=grad)
            results = self._forward(parts, this, [grad and t.requires_grad for t in given])
            output = merge(results)
        columns = [*zip(*map(tensors_of, results), strict=True)]
        required = [[t.requires_grad for t in column] for column in columns]
        run = Run(this, self)
        if not any(any(flags) for flags in required):
            return unpack_objects(output)
        gradients = _Gradients(
            rows=[[t.shape[0] for t in column] for column, flags in zip(columns, required, strict=True) if any(flags)],
            required=[flags for flags in required if any(flags)],
            inputs_split=[has_rows(t) for t in inputs],
        )
        wanted = [any(flags) for flags in required]
        output = with_backward(output, wanted, [plain(t) for t in inputs], partial(_backward, run, gradients))
        return unpack_objects(output)

    def _forward(self, parts: Sequence[Any], this: Pass, requires_grad: list[bool]) -> list[Any]:
        """Run the forward part of a pass, and return the output of each micro-batch."""
        executor = self._executor
        code = _Code(executor, this, parts, requires_grad)
        executor.run("forward", this, code)
        if executor.stage.recorder is not None:
            executor.stage.recorder.begin(pass_of_code=this.number)  # which runs until the backward part
        if executor.side_outputs.known:
            executor.side_outputs.restore()
            executor.side_outputs.insert(partial(_is_of_whole_batch, this))
        return code.results

    def backward(
        self, this: Pass, gradients: _Gradients, grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run the backward part of a pass on every stage.

        Args:
            this: The pass.
            gradients: How gradients of the batch and of micro-batches belong together.
            grads: The gradient of each output that requires one; ``None`` where the loss did not use it.
            inputs: The pipeline's inputs that require a gradient.

        Returns:
            The gradients of ``inputs``.
        """
        executor = self._executor
        executor.note_backward()
        if (recorder := executor.stage.recorder) is not None and recorder.pass_of_code == this.number:
            recorder.end("loss", this.microbatches - 1, executor.last_chunk, this.number)
        with executor.explained():
            columns = [
                [None] * this.microbatches if grad is None else grad.split(rows)
                for grad, rows in zip(grads, gradients.rows, strict=True)
            ]
            for m in range(this.microbatches):
                parts = [column[m] for column, flags in zip(columns, gradients.required, strict=True) if flags[m]]
                executor.output_grads.send(parts, this.number, m)
            executor.carry_changes()  # autograd computes no gradient for what requires none by now
            code = _Code(executor, this, [], [], answered=bool(inputs))
            executor.run("backward", this, code)
        return [
            merge_gradients([code.received[m][k] for m in range(this.microbatches)], original, is_split=is_split)
            for k, (original, is_split) in enumerate(zip(inputs, gradients.inputs_split, strict=True))
        ]

    def forget(self, number: int) -> None:
        """Make every stage forget a pass whose backward part can no longer come."""
        self._executor.forget(number)


class _Code:
    """What the driver does between the actions of a pass: it gives inputs, takes outputs and takes gradients of inputs.

    Args:
        executor: Leads the stages.
        this: The pass.
        parts: The input of each micro-batch.
        requires_grad: For each tensor of an input, whether it requires a gradient.
        answered: Whether gradients of inputs are wanted.
    """

    def __init__(
        self,
        executor: Executor,
        this: Pass,
        parts: Sequence[Any],
        requires_grad: list[bool],
        *,
        answered: bool = False,
    ) -> None:
        self._executor, self._this, self._parts, self._requires_grad = executor, this, parts, requires_grad
        self._answered = answered
        self.results: list[Any] = []
        """The output of each micro-batch."""
        self.received: dict[int, list[Tensor | None]] = {}
        """The gradients of the input of each micro-batch."""

    def run(self, operation: UserCode | Result) -> None:
        executor, number, m = self._executor, self._this.number, operation.microbatch
        if isinstance(operation, Result):
            self.results.append(executor.output(self._this, m))
        elif operation.part == "b":  # no skip before the first layer
            executor.inputs.send((self._parts[m], {}), number, m, requires_grad=self._requires_grad)
        elif self._answered:
            self.received[m] = executor.input_grads.receive(number, m)

    def joins(self, row: Row, place: int) -> bool:
        return False

    def around(self) -> AbstractContextManager[None]:
        return self._executor.own_values()


def _backward(
    run: Run[WholeBatch], gradients: _Gradients, grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    return run.spend().backward(run.this, gradients, grads, inputs)


def _is_of_whole_batch(this: Pass, value: Any) -> bool:
    """Whether a side output is that of one process, and no gradient flows through it."""
    return this.microbatches == 1 and not (this.grad and (this.recomputed or with_graph(value)))
