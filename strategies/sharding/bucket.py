"""Parameters that travel together: their gradients to the rank that owns them, their new values back from it."""

import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from strategies.sharding.transfer import Exchange

_LARGE_BYTES = 2**17
"""What is at least so large travels as it is; the rest is copied into one buffer, since each message costs time."""

_ALIGNMENT_BYTES = 64
"""Of torch's CPU allocator."""


class Bucket:
    """Parameters of one type and of one optimizer that one rank owns.

    Args:
        parameters: At least one.
        owner: The rank that steps them; ``None`` if no optimizer has them.
        optimizer: The number of their optimizer.
        as_view: Let the parameters live in one buffer, so that values travel without being copied.
        packed: Copy all gradients into one buffer, which can be summed in place. (A gradient may share its memory with
            that of another parameter.) Otherwise large ones travel as they are.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        owner: int | None,
        optimizer: int | None,
        *,
        as_view: bool,
        packed: bool,
    ) -> None:
        self.parameters, self.owner, self.optimizer = tuple(parameters), owner, optimizer
        self._strides = {p: torch.empty_like(p, device="meta").stride() for p in parameters}  # those of dense memory
        self._packed = packed
        self._reduced: dict[Tensor, weakref.ref[Tensor]] = {}
        self._set_aside: dict[Tensor, Tensor] = {}
        self._values: Tensor | None = None
        if as_view and owner is not None:
            self._values = self._buffer(self.parameters)
            for parameter, part in self._parts(self._values, self.parameters):
                parameter.data = part.copy_(parameter.data)

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
        """Keeps averages that are known from an earlier pass out of the next one."""
        for parameter in filter(self.is_reduced, wanted):
            assert parameter.grad is not None
            self._set_aside[parameter], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def take_grads(self, wanted: Sequence[Tensor], *, marked: bool) -> list[Tensor]:
        """Moves gradients into buffers.

        Args:
            wanted: Which of the parameters; one without a gradient counts as zero.
            marked: Whether the end of the last buffer says which of them have a gradient.
        """
        marks = [p.grad is not None for p in wanted]
        grads = {p: torch.zeros_like(p) if p.grad is None else p.grad for p in wanted}
        for parameter in wanted:
            parameter.grad = None
        large, small = _divided(wanted, self._packed)
        pieces = [self._flat(parameter, grads.pop(parameter)) for parameter in large]
        if small or marked:
            buffer = self._buffer(small, marked * len(marks), like=wanted[0])
            for parameter, part in self._parts(buffer, small):
                part.copy_(grads[parameter])
            if marked:
                buffer[-len(marks) :] = torch.tensor(marks)
            pieces.append(buffer)
        return pieces

    def put_grads(self, pieces: Sequence[Tensor], wanted: Sequence[Tensor], *, marked: bool) -> None:
        """The inverse of :meth:`take_grads`, for averages over all ranks."""
        found = pieces[-1][-len(wanted) :].tolist() if marked else [1.0] * len(wanted)
        number = dict(zip(wanted, found, strict=True))
        for parameter, grad in self._unpacked(pieces, wanted):
            before = self._set_aside.pop(parameter, None)
            kept = before if not number[parameter] else grad if before is None else before.add_(grad)
            if kept is not None:
                parameter.grad, self._reduced[parameter] = kept, weakref.ref(kept)

    @torch.no_grad()
    def start_sharing(self, exchange: Exchange, number: int, *, mine: bool) -> Callable[[], None]:
        """Sends the owner's values to all ranks.

        Returns:
            What waits for them.
        """
        assert self.owner is not None
        large, small = _divided(self.parameters, self.parameters[0].is_cuda)
        # What is not dense cannot arrive in place.
        small += [p for p in large if p.stride() != self._strides[p]]
        large = [p for p in large if p.stride() == self._strides[p]]
        buffer = None
        if self._values is not None:
            for parameter, part in self._parts(self._values, self.parameters):
                if parameter.data_ptr() != part.data_ptr():  # somebody has given it other memory
                    parameter.data = part.copy_(parameter.data)
            pieces = [self._values]
        else:
            pieces = [self._flat(parameter, parameter.data) for parameter in large]
            if small:
                buffer = self._buffer(small)
                pieces.append(buffer)
                if mine:
                    for parameter, part in self._parts(buffer, small):
                        part.copy_(parameter)
        wait = exchange.start_broadcast(pieces, self.owner, number)
        if not mine:
            increment_version(self.parameters)  # a graph that still needs an old value says so

        def finish() -> None:
            wait()
            if buffer is not None and not mine:
                for parameter, part in self._parts(buffer, small):
                    parameter.data.copy_(part)

        return finish

    def _buffer(self, parameters: Sequence[Tensor], more: int = 0, *, like: Tensor | None = None) -> Tensor:
        return (parameters[0] if like is None else like).detach().new_empty(sum(map(_room, parameters)) + more)

    def _flat(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """The memory of a parameter or of its gradient in one dimension, the same on all ranks."""
        if tensor.stride() != self._strides[parameter]:
            tensor = torch.empty_strided(
                tensor.shape, self._strides[parameter], dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        return tensor.detach().as_strided((tensor.numel(),), (1,))

    def _unpacked(self, pieces: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        large, small = _divided(parameters, self._packed)
        alone = [part for p, piece in zip(large, pieces, strict=False) for part in self._parts(piece, [p])]
        return alone + (self._parts(pieces[-1], small) if small else [])

    def _parts(self, buffer: Tensor, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with its part of a buffer, which has the parameter's shape and order in memory."""
        parts, start = [], buffer.storage_offset()
        for parameter in parameters:
            parts.append((parameter, buffer.as_strided(parameter.shape, self._strides[parameter], start)))
            start += _room(parameter)
        return parts


def _room(parameter: Tensor) -> int:
    """Its elements, filled up: a product sums in another order where memory is not aligned as it usually is."""
    return -(-parameter.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES // parameter.element_size()


def _divided(parameters: Sequence[Tensor], packed: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Those that travel as they are, and those that are copied."""
    large = [p for p in parameters if p.nbytes >= _LARGE_BYTES and not packed]
    return large, [p for p in parameters if p.nbytes < _LARGE_BYTES or packed]


def form_buckets(kinds: Sequence[Hashable], sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Puts items of one kind into common buckets, and buckets into the order in which they are complete.

    Args:
        kinds: One for each item, in the order in which items become available.
        sizes: One for each item.
        cap: A bucket is closed once it holds so much.

    Returns:
        The numbers of the items of each bucket.

    >>> form_buckets("abab", [1, 2, 1, 2], 2)
    [[1], [0, 2], [3]]
    """
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    for item, kind in enumerate(kinds):
        bucket = filling.setdefault(kind, [])
        bucket.append(item)
        if sum(sizes[other] for other in bucket) >= cap:
            closed.append(filling.pop(kind))
    return sorted([*closed, *filling.values()], key=lambda bucket: bucket[-1])
