"""The commands that the driver sends to a stage on a worker, by theme.

:class:`~strategies.pipeline.control.client.RemoteStage` sends them;
:class:`~strategies.pipeline.worker.hosted.HostedStage` implements them. Tensors in arguments and results are on the CPU
unless stated otherwise. ``module`` is the number of a module of the stage: 0 for its layers, ``k`` for its layers in
the ``k``-th copy of the model. ``optimizer`` is the number of one of the user's optimizers, ``number`` is the number
of a pass, and ``key`` is that of a part on the shelf or of the result of an operation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from strategies.commands.declaration import Call, command
from strategies.optim.calls import MethodCall
from strategies.pipeline.control.operations import GradientOf, Name, TensorOperation, WorkerTensor
from strategies.pipeline.control.parts import Part, PartKind, Piece
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.records import ProcessRecords
from strategies.pipeline.transport.journal import Comparison
from strategies.pipeline.transport.slots import SlotAddress


class NamedParameters(NamedTuple):
    """Some parameters of a module of the stage."""

    names: list[str]
    module: int = 0


Parameters = int | NamedParameters
"""Parameters of a stage: those of the optimizer with this number, or some by name."""


class StageCommands(Protocol):
    """The commands of a stage on a worker.

    Commands run one at a time, in the order in which the driver calls them. Commands without ``changes_values`` do not
    change parameters, buffers or gradients.
    """

    # Passes

    @command()
    def run(self, this: Pass, row: bytes) -> None:
        """Run this process's row of a program.

        Args:
            this: The pass. If it gathers, its gradients stay apart from ``.grad`` until :meth:`release`.
            row: The :data:`~strategies.pipeline.schedule.operations.Row`, pickled once for all passes with this row.
        """

    @command(can_wait=True)
    def release(self, number: int, factor: float, kept: float) -> None:
        """Multiply the gradients of the parameters by ``kept``, and add ``factor`` times the gradients of a pass."""

    @command(changes_values=False, can_wait=True)
    def discard(self, number: int) -> None:
        """Forget a pass that will have no backward part."""

    @command(only_reads=True)
    def num_kept(self) -> int:
        """Return the number of micro-batches that wait for their backward pass."""

    # Single values, for stand-ins on the driver

    @command(only_reads=True, doing="handing over a value")
    def value(self, reference: Name | GradientOf | WorkerTensor) -> Tensor | None:
        """Return a tensor of this stage; ``None`` if it does not exist.

        Of the results for a parameter or buffer, only that for a buffer with a place in the autograd graph requires a
        gradient.
        """

    @command(can_wait=True)
    def compute(self, operation: TensorOperation, dtype: torch.dtype) -> None:
        """Run an operation on values of this stage, with the default dtype of the driver."""

    # Gradients

    @command(can_wait=True)
    def zero_grad(self, parameters: Parameters, *args: Any, **kwargs: Any) -> None:
        """Clear gradients: of an optimizer by its ``zero_grad``, of named parameters as ``nn.Module.zero_grad`` does.

        Args:
            parameters: The number of the optimizer, or the names of the parameters.
            args: The positional arguments of ``zero_grad``.
            kwargs: The keyword arguments of ``zero_grad``.
        """

    @command(can_wait=True)
    def change_grads(self, parameters: Parameters, change: Callable[[Sequence[Tensor]], object]) -> None:
        """Call a function that changes the gradients of the parameters that it gets."""

    @command()
    def unscale_grads(self, optimizer: int, inv_scale: Tensor, allow_fp16: bool) -> float:
        """Divide the gradients of the parameters of an optimizer by the loss scale.

        Returns:
            Zero if all of them are finite.
        """

    @command(only_reads=True)
    def grad_norms(self, optimizer: int, norm_type: float) -> dict[int, Tensor]:
        """Return the norm of each gradient, by the number of the parameter in the whole optimizer."""

    @command()
    def average_grads(self) -> None:
        """Average the gradients over the replicas of this stage."""

    # Optimizers

    @command()
    def adopt(self, blob: bytes, numbers: list[int]) -> None:
        """Add this stage's part of one more optimizer.

        Args:
            blob: Pickled class, attributes and states of the optimizer, with names in place of parameters.
            numbers: The numbers that the whole optimizer gives to the parameters of this stage.
        """

    @command()
    def step(
        self,
        optimizer: int,
        values: list[dict[str, Any]],
        scaling: dict[str, Tensor],
        dtype: torch.dtype,
        arguments: Mapping[str, Any],
    ) -> None:
        """Step an optimizer with the hyperparameters of the driver.

        Args:
            optimizer: Number of the optimizer.
            values: The hyperparameters of each group.
            scaling: Attributes that a gradient scaler sets on an optimizer that unscales within its step.
            dtype: The default dtype of the driver, which some optimizers give to counters that they create.
            arguments: Arguments of ``step``.
        """

    @command()
    def call_method(
        self, optimizer: int, call: MethodCall, values: list[dict[str, Any]], context: PassContext, grad: bool
    ) -> Any:
        """Call a method that the class of an optimizer adds to the methods of ``torch.optim.Optimizer``.

        Args:
            optimizer: Number of the optimizer.
            call: The method and its arguments.
            values: The hyperparameters of each group on the driver.
            context: The settings of the driver.
            grad: Whether gradients are enabled on the driver.

        Returns:
            The result of the method; ``None`` in place of the optimizer itself.
        """

    # Parts of the state. Captured parts are on the shelf, see strategies.pipeline.control.shelf

    @command(changes_values=False)
    def capture(self, parts: Mapping[int, Part]) -> list[Any]:
        """Put parts of the state on the shelf, under their numbers, without copying their tensors.

        All replicas call this for :attr:`~strategies.pipeline.control.parts.PartKind.WHOLE_OPTIMIZER`.

        Returns:
            Each part, with layouts in place of its tensors.
        """

    @command(can_wait=True)
    def place(self, part: Part, content: Any) -> None:
        """Replace a part of the state, or some entries of it.

        Args:
            part: A state dict, some buffers, attributes, ``requires_grad`` flags, or the states of an optimizer.
            content: The entries; see :meth:`~strategies.pipeline.state.held.HeldState.place`.
        """

    @command(only_reads=True)
    def shelved(self, key: int, pieces: Sequence[Piece]) -> Tensor:
        """Return bytes of tensors of a part on the shelf, one piece after another."""

    @command(changes_values=False)
    def copy_shelved(self, key: int) -> None:
        """Replace the tensors of a part on the shelf by copies, which later commands do not change."""

    @command(changes_values=False, can_wait=True)
    def free(self, key: int) -> None:
        """Free the result of an operation, or a part on the shelf, to which the driver refers no more."""

    # Snapshots, see strategies.pipeline.state.snapshots

    @command(changes_values=False, doing="snapshot")
    def snapshot(self, number: int, address: SlotAddress) -> None:
        """Copy the state of the stage into a slot, as the snapshot with this number."""

    # Verification, see strategies.pipeline.recovery.verification

    @command(can_wait=True)
    def start_journal(self, begin: tuple[int, SlotAddress] | None = None) -> None:
        """Start to note what the stage sends and receives.

        Args:
            begin: Number and slot of a snapshot that this process restores first, to compute for the second time.
                Until :meth:`compare`, :meth:`snapshot` then compares the state with the snapshot that was written the
                first time.
        """

    @command(changes_values=False)
    def compare(self) -> Comparison:
        """Return what differs between the first and the second computation of the stage, and end its journal."""

    # Profiling

    @command(changes_values=False, doing="handing over records")
    def record(self, goes_on: bool) -> ProcessRecords:
        """Return the recording of when the stage waited, computed and sent; it is empty if there was none.

        Args:
            goes_on: Whether a new recording starts.
        """

    @command(changes_values=False, doing="starting or ending a trace")
    def trace(self, options: Mapping[str, Any] | None) -> bytes | None:
        """End the trace of the compute thread and return it in Chrome's format; ``None`` if there was none.

        Args:
            options: Arguments of ``torch.profiler.profile`` for a new trace, which starts now; ``None`` starts none.
        """


_MEETINGS = frozenset(
    each.__name__ for each in (StageCommands.average_grads, StageCommands.step, StageCommands.call_method)
)


def meets_replicas(call: Call) -> bool:
    """Return whether a stage may exchange values with the same stage of other replicas in a command."""
    name, arguments, _ = call
    if name != StageCommands.capture.__name__:
        return name in _MEETINGS
    parts: Mapping[int, Part] = arguments[0]
    return any(part.kind is PartKind.WHOLE_OPTIMIZER for part in parts.values())
