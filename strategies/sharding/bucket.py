"""Buckets: parameters whose gradients are sent to their owner together, and whose new values are returned together."""

import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from strategies.sharding.transfer import Exchange

_LARGE_BYTES = 2**17
"""Tensors of at least this size are sent without a copy. Smaller tensors share a buffer, to send fewer messages."""

_ALIGNMENT_BYTES = 64
"""Alignment of torch's CPU allocator."""


class Bucket:
    """Parameters of one dtype and of one optimizer that one rank owns.

    Args:
        parameters: At least one parameter.
        owner: The rank that steps the parameters; ``None`` if no optimizer has them.
        optimizer: Number of their optimizer.
        averages: Filled with a reference to each gradient that is an average over all ranks. All buckets share it, so
            that buckets that replace others know their averages.
        as_view: Store the parameters in one buffer, so that values are sent without being copied.
        packed: Copy all gradients into one buffer, which can be summed in place (the gradients of two parameters may
            share memory). Otherwise large gradients are sent without a copy.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        owner: int | None,
        optimizer: int | None,
        *,
        averages: dict[Tensor, weakref.ref[Tensor]],
        as_view: bool,
        packed: bool,
    ) -> None:
        self.parameters, self.owner, self.optimizer = tuple(parameters), owner, optimizer
        self._strides = {p: torch.empty_like(p, device="meta").stride() for p in parameters}  # strides of dense memory
        self._packed = packed
        self._reduced = averages
        self._set_aside: dict[Tensor, Tensor] = {}
        self._values: Tensor | None = None
        if as_view and owner is not None:
            self._values = self._buffer(self.parameters)
            for parameter, part in self._parts(self._values, self.parameters):
                parameter.data = part.copy_(parameter.data)

    def release(self) -> None:
        """Move each parameter to separate memory again."""
        if self._values is not None:
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
        self._values = None

    def is_reduced(self, parameter: Tensor) -> bool:
        """Return whether the gradient is an average from :meth:`put_grads`, possibly scaled or zeroed since."""
        reference = self._reduced.get(parameter)
        return parameter.grad is not None and reference is not None and reference() is parameter.grad

    def forget_reduced(self, parameter: Tensor) -> None:
        """Treat the gradient of a parameter as not yet averaged."""
        self._reduced.pop(parameter, None)

    def set_reduced_aside(self, wanted: Sequence[Tensor]) -> None:
        """Keep averages of an earlier pass out of the next reduction."""
        for parameter in filter(self.is_reduced, wanted):
            assert parameter.grad is not None
            self._set_aside[parameter], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def put_back(self, size: int) -> None:
        """Set gradients to the averages that were set aside, after a pass that failed.

        A gradient of that pass is added with the weight that it would have in an average over ``size`` ranks.
        """
        for parameter, average in self._set_aside.items():
            if parameter.grad is not None:
                average.add_(parameter.grad, alpha=1 / size)
            parameter.grad = average
        self._set_aside.clear()

    @torch.no_grad()
    def take_grads(self, wanted: Sequence[Tensor], *, marked: bool) -> list[Tensor]:
        """Move gradients into buffers.

        Args:
            wanted: Parameters to include. A missing gradient counts as zero.
            marked: Whether the last buffer ends with a flag for each parameter: whether it has a gradient.
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
        """Set gradients to averages over all ranks; the inverse of :meth:`take_grads`."""
        found = pieces[-1][-len(wanted) :].tolist() if marked else [1.0] * len(wanted)
        number = dict(zip(wanted, found, strict=True))
        for parameter, grad in self._unpacked(pieces, wanted):
            before = self._set_aside.pop(parameter, None)
            kept = before if not number[parameter] else grad if before is None else before.add_(grad)
            if kept is not None:
                parameter.grad, self._reduced[parameter] = kept, weakref.ref(kept)

    @torch.no_grad()
    def start_sharing(self, exchange: Exchange, number: int, *, mine: bool) -> Callable[[], None]:
        """Start to send the owner's values to all ranks.

        Returns:
            A function that waits for the end.
        """
        assert self.owner is not None
        large, small = _divided(self.parameters, self.parameters[0].is_cuda)
        # Tensors that are not dense cannot be received in place.
        small += [p for p in large if p.stride() != self._strides[p]]
        large = [p for p in large if p.stride() == self._strides[p]]
        buffer = None
        if self._values is not None:
            for parameter, part in self._parts(self._values, self.parameters):
                if parameter.data_ptr() != part.data_ptr():  # its memory has been replaced
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
            increment_version(self.parameters)  # so that autograd graphs that need an old value raise an error

        def finish() -> None:
            wait()
            if buffer is not None and not mine:
                for parameter, part in self._parts(buffer, small):
                    parameter.data.copy_(part)

        return finish

    def _buffer(self, parameters: Sequence[Tensor], more: int = 0, *, like: Tensor | None = None) -> Tensor:
        return (parameters[0] if like is None else like).detach().new_empty(sum(map(_room, parameters)) + more)

    def _flat(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Return the memory of a parameter or of its gradient in one dimension, in the same order on all ranks."""
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
        """Return each parameter with its part of a buffer, in the parameter's shape and memory order."""
        parts, start = [], buffer.storage_offset()
        for parameter in parameters:
            parts.append((parameter, buffer.as_strided(parameter.shape, self._strides[parameter], start)))
            start += _room(parameter)
        return parts


def _room(parameter: Tensor) -> int:
    """Return the number of elements with padding: unaligned memory would change the order of sums in a product."""
    return -(-parameter.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES // parameter.element_size()


def _divided(parameters: Sequence[Tensor], packed: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that are sent without a copy, and those that are copied."""
    large = [p for p in parameters if p.nbytes >= _LARGE_BYTES and not packed]
    return large, [p for p in parameters if p.nbytes < _LARGE_BYTES or packed]


def form_buckets(kinds: Sequence[Hashable], sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Group items of one kind into buckets, sorted by the item that completes the bucket.

    Args:
        kinds: Kind of each item, in the order in which items become available.
        sizes: Size of each item.
        cap: Size at which a bucket is closed.

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
