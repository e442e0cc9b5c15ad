"""The commands that the driver sends to a stage on a worker, by theme.

:class:`~strategies.pipeline.control.client.RemoteStage` sends them;
:class:`~strategies.pipeline.worker.hosted.HostedStage` implements them. Tensors in arguments and results are on the CPU
unless stated otherwise. ``module`` is the number of a module of the stage: 0 for its layers, ``k`` for its layers in
the ``k``-th copy of the model. ``optimizer`` is the number of one of the user's optimizers, and ``number`` is the
number of a pass.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from strategies.commands.declaration import Call, command
from strategies.optim.calls import MethodCall
from strategies.pipeline.control.operations import Operation, WorkerTensor
from strategies.pipeline.control.parts import Part, PartKind, Piece
from strategies.pipeline.schedule.operations import Row
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.records import Recorded
from strategies.pipeline.transport.journal import Comparison
from strategies.pipeline.transport.slots import SlotAddress

Attributes = dict[int, dict[str, Any]]
"""Plain attributes of some modules, by the place of the module in ``modules()``."""


class StageCommands(Protocol):
    """The commands of a stage on a worker.

    Commands run one at a time, in the order in which the driver calls them. Commands without ``changes_values`` do not
    change parameters, buffers or gradients.
    """

    # Passes

    @command(changes_values=False, can_wait=True, lasts=True)
    def learn(self, program: Hashable, row: Row) -> None:
        """Remember this process's row of a program, by the name of the program."""

    @command()
    def run(self, this: Pass, program: Hashable) -> None:
        """Run this process's row of a program.

        Args:
            this: The pass. If it gathers, its gradients stay apart from ``.grad`` until :meth:`release`.
            program: The name of the program.
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

    # Attributes of layers

    @command(changes_values=False, can_wait=True)
    def set_attributes(self, attributes: Attributes, trained: Sequence[bool] | None = None) -> None:
        """Set plain attributes of modules, such as ``training``.

        Args:
            attributes: The attributes.
            trained: ``requires_grad`` of each parameter, in the order of ``parameters()``; ``None`` does not change it.
        """

    # Single values and gradients, for stand-ins on the driver

    @command(only_reads=True, doing="handing over a value")
    def value(self, name: str, module: int = 0) -> tuple[Tensor | None, bool]:
        """Return a parameter or buffer, and whether it is a buffer with a place in the autograd graph."""

    @command(only_reads=True, doing="handing over a gradient")
    def gradient(self, name: str, module: int = 0) -> Tensor | None:
        """Return the gradient of a parameter."""

    @command(can_wait=True)
    def add_gradient(self, name: str, grad: Tensor, module: int = 0) -> None:
        """Add the gradient from the use of a parameter on the driver to the gradient of this parameter."""

    @command(can_wait=True)
    def compute(self, operation: Operation, dtype: torch.dtype) -> None:
        """Run an operation on values of this stage, with the default dtype of the driver."""

    @command(only_reads=True)
    def held_value(self, reference: WorkerTensor) -> Tensor:
        """Return a tensor of this stage."""

    @command(changes_values=False, can_wait=True)
    def free_value(self, number: int) -> None:
        """Free the result of an operation."""

    # Gradients of all parameters

    @command(can_wait=True)
    def zero_grads(self, names: Sequence[str], set_to_none: bool, module: int = 0) -> None:
        """Clear the gradients of parameters, as ``zero_grad`` of a module with these parameters does."""

    @command()
    def average_grads(self, share: float | None) -> None:
        """Average the gradients over the replicas of this stage. ``share`` is for this replica; ``None`` if equal."""

    # Optimizers

    @command()
    def adopt(self, blob: bytes, numbers: list[int]) -> None:
        """Add this stage's part of one more optimizer.

        Args:
            blob: Pickled class and attributes of the optimizer, with names in place of parameters.
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

    @command(can_wait=True)
    def zero_grad(self, optimizer: int, set_to_none: bool) -> None:
        """Clear the gradients of the parameters of an optimizer."""

    @command()
    def unscale_grads(self, optimizer: int, inv_scale: Tensor, allow_fp16: bool) -> float:
        """Divide the gradients of the parameters of an optimizer by the loss scale.

        Returns:
            Zero if all of them are finite.
        """

    @command(can_wait=True)
    def scale_grads(self, optimizer: int, factor: Tensor) -> None:
        """Multiply the gradients of the parameters of an optimizer by ``factor``, a scalar."""

    @command(can_wait=True)
    def clip_grad_values(self, optimizer: int, limit: float) -> None:
        """Clamp every element of the gradients of an optimizer's parameters to ``[-limit, limit]``."""

    @command(only_reads=True)
    def grad_norms(self, optimizer: int, norm_type: float) -> dict[int, Tensor]:
        """Return the norm of each gradient, by the number of the parameter in the whole optimizer."""

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
            part: A state dict, some buffers, or the states of an optimizer.
            content: The entries; see :meth:`~strategies.pipeline.state.held.HeldState.place`.
        """

    @command(only_reads=True)
    def shelved(self, number: int, pieces: Sequence[Piece]) -> Tensor:
        """Return bytes of tensors of the part with this number, one piece after another."""

    @command(changes_values=False)
    def copy_shelved(self, number: int) -> None:
        """Replace the tensors on the shelf by copies, which later commands do not change."""

    @command(changes_values=False, can_wait=True)
    def drop_shelved(self, number: int) -> None:
        """Take a part off the shelf."""

    # Snapshots, see strategies.pipeline.state.snapshots

    @command(changes_values=False, doing="snapshot")
    def snapshot(self, number: int, address: SlotAddress) -> int:
        """Copy the state of the stage into a slot, as the snapshot with this number.

        Returns:
            The memory of the slot, in bytes.
        """

    # Verification, see strategies.pipeline.recovery.verification

    @command(changes_values=False, can_wait=True)
    def start_journal(self) -> None:
        """Start to note what the stage sends and receives."""

    @command(doing="going back to a snapshot")
    def go_back(self, number: int, address: SlotAddress) -> None:
        """Restore a snapshot in this process.

        Until :meth:`compare`, :meth:`snapshot` compares the state with the snapshot that was written the first time.
        """

    @command(changes_values=False)
    def compare(self) -> Comparison:
        """Return what differs between the two computations of the stage, before and since :meth:`go_back`."""

    # Profiling

    @command(changes_values=False, can_wait=True)
    def start_recording(self) -> None:
        """Record from now on when the stage waits, computes and sends."""

    @command(changes_values=False, doing="handing over records")
    def stop_recording(self) -> Recorded:
        """Stop the recording and return it; it is empty if it was not started."""

    @command(changes_values=False, doing="starting the profiler", can_wait=True)
    def start_trace(self, options: Mapping[str, Any]) -> None:
        """Start a trace of the compute thread.

        Args:
            options: Arguments of ``torch.profiler.profile``.
        """

    @command(changes_values=False, doing="handing over a trace")
    def stop_trace(self) -> bytes | None:
        """End the trace and return it in Chrome's format; ``None`` if nothing has been recorded."""


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
