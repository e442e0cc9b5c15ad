"""Parameters that travel together: their gradients to the rank that owns them, their new values back from it."""

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup


class Bucket:
    """Parameters of one type and of one optimizer that one rank owns.

    Args:
        parameters: At least one.
        owner: The rank that steps them; ``None`` if no optimizer has them.
        optimizer: The number of their optimizer.
        as_view: Let the parameters live in one buffer, so that values travel without being copied.
    """

    def __init__(
        self, parameters: Sequence[Tensor], owner: int | None, optimizer: int | None, *, as_view: bool
    ) -> None:
        self.parameters, self.owner, self.optimizer = tuple(parameters), owner, optimizer
        self._reduced: dict[Tensor, weakref.ref[Tensor]] = {}
        self._set_aside: dict[Tensor, Tensor] = {}
        self._values: Tensor | None = None
        if as_view and owner is not None:
            self._values = self._packed_values()
            for parameter, part in self._parts(self._values, self.parameters):
                parameter.data = part

    def release(self) -> None:
        """Gives each parameter memory of its own again."""
        if self._values is not None:
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
        self._values = None

    def is_reduced(self, parameter: Tensor) -> bool:
        """Whether its gradient is what came out of :meth:`put_grads`, perhaps scaled or zeroed since."""
        reference = self._reduced.get(parameter)
        return parameter.grad is not None and reference is not None and reference() is parameter.grad

    def forget_reduced(self, parameter: Tensor) -> None:
        """Takes what is in its gradient for this rank's own from now on."""
        self._reduced.pop(parameter, None)

    def set_reduced_aside(self, wanted: Sequence[Tensor]) -> None:
        """Keeps sums that are known from an earlier pass out of the next one."""
        for parameter in filter(self.is_reduced, wanted):
            assert parameter.grad is not None
            self._set_aside[parameter], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def take_grads(self, wanted: Sequence[Tensor], factor: float, *, marked: bool) -> Tensor:
        """Moves the gradients, times ``factor``, into one buffer.

        Args:
            wanted: Which of the parameters; one without a gradient counts as zero.
            factor: As in DistributedDataParallel, gradients are divided before they are summed.
            marked: Whether the end of the buffer says which of them have a gradient.
        """
        flat = wanted[0].new_empty(sum(map(torch.numel, wanted)) + marked * len(wanted))
        if marked:
            flat[-len(wanted) :] = torch.tensor([p.grad is not None for p in wanted])
        for parameter, part in self._parts(flat, wanted):
            if parameter.grad is None:
                part.zero_()
            else:
                torch.mul(parameter.grad, factor, out=part)
                parameter.grad = None
        return flat

    def put_grads(self, flat: Tensor | None, wanted: Sequence[Tensor], *, marked: bool) -> None:
        """The inverse of :meth:`take_grads`, for the sum over all ranks; ``None`` where that is not kept."""
        if flat is None:
            return
        found = flat[-len(wanted) :].tolist() if marked else [1.0] * len(wanted)
        for (parameter, grad), number in zip(self._parts(flat, wanted), found, strict=True):
            before = self._set_aside.pop(parameter, None)
            kept = before if not number else grad if before is None else before.add_(grad)
            if kept is not None:
                parameter.grad, self._reduced[parameter] = kept, weakref.ref(kept)

    @torch.no_grad()
    def start_sharing(self, group: ProcessGroup) -> Callable[[], None]:
        """Sends the owner's values to all ranks.

        Returns:
            What waits for them.
        """
        assert self.owner is not None
        mine = group.rank() == self.owner
        flat = self._values
        if flat is None:
            flat = self._packed_values() if mine else self._no_values()
        work = dist.broadcast(flat, self.owner, group=group, async_op=True)
        if not mine:
            increment_version(self.parameters)  # a graph that still needs an old value says so

        def finish() -> None:
            work.wait()
            if not mine and self._values is None:
                with torch.no_grad():
                    for parameter, part in self._parts(flat, self.parameters):
                        parameter.data.copy_(part)

        return finish

    def _no_values(self) -> Tensor:
        return self.parameters[0].new_empty(sum(map(torch.numel, self.parameters)))

    @torch.no_grad()
    def _packed_values(self) -> Tensor:
        flat = self._no_values()
        for parameter, part in self._parts(flat, self.parameters):
            part.copy_(parameter)
        return flat

    @staticmethod
    def _parts(flat: Tensor, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with its part of a buffer, which has the parameter's shape and order in memory."""
        parts, start = [], 0
        for parameter in parameters:
            strides = torch.empty_like(parameter, device="meta").stride()
            parts.append((parameter, flat.detach().as_strided(parameter.shape, strides, start)))
            start += parameter.numel()
        return parts
