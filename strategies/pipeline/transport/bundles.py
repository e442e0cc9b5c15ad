"""Inputs of several micro-batches in one message, from the driver to stage 0.

Under ``gpipe`` the driver has the inputs of all micro-batches at the start of a pass. A message costs the same for one
small input as for several, on both sides: much of what a small micro-batch costs at all.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from strategies.common.trees import tensors_in
from strategies.pipeline.transport.channel import SMALL_BYTES, Receiver, Sender


class BundlingSender(Sender):
    """A sender of inputs, whose receiver unpacks them with :class:`Unbundled`."""

    def send_inputs(self, inputs: Sequence[Any], pass_number: int, first: int, requires_grad: list[bool]) -> int:
        """Send as many inputs as are small together, but at least one.

        Args:
            inputs: The inputs of consecutive micro-batches.
            pass_number: Identifies the pass.
            first: Index of the first one's micro-batch.
            requires_grad: For each tensor of an input, whether the receiver sends a gradient back.

        Returns:
            The number of inputs that were sent.
        """
        number, size_bytes = 0, 0
        for value in inputs:
            size_bytes += sum(tensor.nbytes for tensor in tensors_in(value))
            if number and size_bytes > SMALL_BYTES // 2:  # in the message, each tensor starts at an aligned place
                break
            number += 1
        self.send(list(inputs[:number]), pass_number, first, requires_grad=requires_grad * number)
        return number


class Unbundled:
    """The port at which stage 0 receives the inputs of micro-batches; no skip is under way before the first layer.

    Args:
        receiver: Receives what a :class:`BundlingSender` sends.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._ahead: deque[Any] = deque()
        self._next = 0, 0

    def receive(self, pass_number: int, microbatch: int) -> Any:
        """Return the input of a micro-batch, without skips. For the errors see :meth:`Receiver.receive`."""
        if not self._ahead:
            self._ahead.extend(self._receiver.receive(pass_number, microbatch))
            self._next = pass_number, microbatch
        assert self._next == (pass_number, microbatch), f"expected {pass_number, microbatch}, got {self._next}"
        self._next = pass_number, microbatch + 1
        return self._ahead.popleft(), {}
