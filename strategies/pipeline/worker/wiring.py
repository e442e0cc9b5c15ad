"""What a stage on a worker is connected to: its neighbours over gloo, or other partitions of a ``Pipe`` over RPC."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from strategies.common.waiting import Wait
from strategies.pipeline.stage.stage import Input, Output
from strategies.pipeline.transport.channel import FEED_TAG, Announcement, Receiver, Sender
from strategies.pipeline.worker.payload import Cargo


class Flushed(Output, Protocol):
    """An output that tells what has arrived; see :class:`~strategies.pipeline.transport.channel.Sender`."""

    def flush(self, keep: int = 0) -> None: ...

    def fail(self) -> None: ...


@dataclass(frozen=True)
class Wiring:
    """The connections of a stage.

    Attributes:
        inputs, outputs, output_grads, input_grads: Its ports.
        sender, receiver: Make a channel to a peer with a tag, for tied parameters.
        limit: How many values may be under way to one peer.
        settle: Called at the end of each part of a pass, when nothing more is to be sent.
        forget: Drops what is left of a pass.
        next_pass: Waits for the pass that the process before announces; ``None``: there will be no more.
        pass_on: Announces it to the next worker.
    """

    inputs: Input
    outputs: Flushed
    output_grads: Input
    input_grads: Flushed
    sender: Callable[[int, int], Sender]
    receiver: Callable[[int, int], Receiver]
    limit: int
    settle: Callable[[], None]
    forget: Callable[[int], None]
    next_pass: Callable[[], Announcement | None] | None = None
    pass_on: Callable[[Announcement | None], None] | None = None


def to_neighbours(cargo: Cargo, group: ProcessGroup, wait: Wait) -> Wiring:
    """Connects a stage to the one before, or to the driver's loader, and to the one after."""
    device = torch.device(cargo.device)
    first, limit = cargo.index == 0, group.size() + 2
    source, inputs_tag = (group.size() - 1, FEED_TAG) if first else (cargo.index - 1, 0)
    inputs = Receiver(group, source, device=device, tag=inputs_tag, wait=wait)
    outputs = Sender(group, cargo.index + 1, limit=limit, wait=wait)

    def pass_on(this: Announcement | None) -> None:
        if cargo.index == group.size() - 2:  # the next process is the driver, which announces passes itself
            return
        if this is None:
            outputs.end_passes()
        else:
            outputs.announce(this)

    return Wiring(
        inputs=inputs,
        outputs=outputs,
        output_grads=Receiver(group, cargo.index + 1, device=device, wait=wait),
        # The driver takes the gradients of its inputs only after its own backward pass: no limit, it would wait for it.
        input_grads=Sender(group, source, tag=inputs_tag, limit=None if first else limit, wait=wait),
        sender=lambda peer, tag: Sender(group, peer, tag=tag, wait=wait),
        receiver=lambda peer, tag: Receiver(group, peer, device=device, tag=tag, wait=wait),
        limit=limit,
        settle=lambda: None,  # a failing neighbour says so itself
        forget=lambda number: None,
        next_pass=inputs.announcement,
        pass_on=pass_on,
    )
