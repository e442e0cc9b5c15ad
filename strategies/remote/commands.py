"""The commands that callers send to a module on another process.

:class:`~strategies.remote.client.ModuleClient` sends them; :class:`~strategies.remote.host.HostedModule` implements
them. Tensors in arguments and results are on the CPU. Commands of a training step:

    forward(args, kwargs, wanted, ...)    the owner calls the module, keeps the graph, and returns outputs and a number
    backward(number, grads)               the owner runs the backward pass of that graph, adds to ``.grad`` of the
                                          parameters, and returns the gradients of the inputs
    step(optimizer, values)               the owner steps an optimizer with the hyperparameters of the caller
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from strategies.commands.declaration import command
from strategies.pipeline.stage.layers import PassContext


class ModuleCommands(Protocol):
    """The commands of the owner of a module."""

    @command(doing="describing itself")
    def facts(self) -> tuple[str, int]:
        """Return the name of the module's class, and the number of callers."""

    @command(doing="check")
    def check(self, device: str) -> None:
        """Check that the object is a module on ``device``.

        Raises:
            TypeError: If it is not a module.
            ValueError: If it is on another device.
        """

    @command(doing="apply")
    def apply(self, packed: bytes, state: tuple[Any, Tensor]) -> tuple[tuple[Any, Tensor], bool]:
        """Call a function with each submodule and with the module.

        Args:
            packed: The function, pickled with cloudpickle.
            state: The random states of the caller, of ``random`` and of torch on the CPU.

        Returns:
            The random states afterwards, and whether the function has changed an object that it refers to.
        """

    @command(doing="forward")
    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: list[bool], grad: bool, context: PassContext
    ) -> tuple[Any, list[bool], int | None]:
        """Call the module.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            wanted: For each leaf of all arguments, whether the caller needs its gradient.
            grad: Whether a backward pass may follow.
            context: The caller's settings, of which autocast and inference mode apply.

        Returns:
            The output; for each of its tensors whether it has a gradient; and the number for :meth:`backward`, or
            ``None`` if no tensor has a gradient.
        """

    @command(doing="forget")
    def forget(self, number: int) -> None:
        """Free the graph of a call of :meth:`forward` that will have no backward pass."""

    @command(doing="backward")
    def backward(self, number: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Run the backward pass of a call, and accumulate the mean over the callers in the parameters' gradients.

        Args:
            number: The number that :meth:`forward` returned.
            grads: The gradient of each output that has one; ``None`` for outputs that the loss did not use.

        Returns:
            The gradient of each input whose gradient the caller needs.

        Raises:
            RuntimeError: If the backward pass of this call has already run.
        """

    @command(doing="num_graphs")
    def num_graphs(self) -> int:
        """Return the number of calls that wait for their backward pass."""

    @command(doing="parameters")
    def parameters(self) -> list[tuple[str, Tensor, Tensor | None, bool]]:
        """Return name, value, gradient and ``requires_grad`` of each parameter."""

    @command(doing="buffers")
    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return name and value of each buffer."""

    @command(doing="state_dict")
    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the module, with copies of its tensors."""

    @command(doing="load_state_dict")
    def load_state_dict(self, state: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
        """Load the entries of ``state`` that the module has.

        Returns:
            Missing keys, unexpected keys, and messages of other errors.
        """

    @command(doing="train")
    def train(self, mode: bool) -> None:
        """Set the mode of the module."""

    @command(doing="to")
    def to(self, dtype: torch.dtype) -> None:
        """Convert floating-point parameters and buffers."""

    @command(doing="requires_grad_")
    def requires_grad_(self, flag: bool) -> None:
        """Set ``requires_grad`` of all parameters."""

    @command(doing="zero_grad", collective=True)
    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the module."""

    @command(doing="make_optimizer", collective=True)
    def make_optimizer(self, packed: bytes) -> tuple[int, list[torch.Size], dict[str, Any]]:
        """Create an optimizer of all parameters.

        Args:
            packed: Its class and its keyword arguments, pickled with cloudpickle.

        Returns:
            The number of the optimizer, the shapes of its parameters, and its hyperparameters.
        """

    @command(doing="step", collective=True)
    def step(self, number: int, values: list[dict[str, Any]]) -> None:
        """Step an optimizer with the hyperparameters of its callers."""

    @command(doing="optimizer_state_dict")
    def optimizer_state_dict(self, number: int) -> dict[str, Any]:
        """Return the ``state_dict`` of an optimizer, with copies of its tensors."""

    @command(doing="load_optimizer_state_dict")
    def load_optimizer_state_dict(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Load the ``state_dict`` of an optimizer, and return the hyperparameters of its parameter group."""
