"""The connections of a stage on a worker: to its neighbours over gloo, or to partitions of a ``Pipe`` over RPC."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from strategies.common.waiting import Wait
from strategies.pipeline.stage.stage import Input, Output
from strategies.pipeline.transport.channel import (
    COMMANDS_TAG,
    FEED_TAG,
    NO_LIMIT,
    Announcement,
    Inputs,
    Receiver,
    Sender,
)
from strategies.pipeline.worker.payload import Payload


class Flushed(Output, Protocol):
    """An output that waits for the arrival of values; see :class:`~strategies.pipeline.transport.channel.Sender`."""

    def flush(self, keep: int = 0) -> None: ...

    def fail(self) -> None: ...


@dataclass(frozen=True)
class Wiring:
    """The connections of a stage.

    Attributes:
        inputs, outputs, output_grads, input_grads: The ports of the stage.
        sender, receiver: Open a channel to a peer with a tag, for tied parameters.
        limit: How many values to one peer may not have arrived yet.
        settle: Waits at the end of each part of a pass until all values sent have arrived, where that is needed.
        forget: Drops messages of a pass by its number.
        commands: Brings commands without a result from the driver; ``None`` if all come over RPC.
        next_pass: Waits for the next pass that the preceding process announces; returns ``None`` at the end of passes.
        pass_on: Announces a pass, or the end of passes, to the next worker.
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
    commands: Receiver | None = None
    next_pass: Callable[[], Announcement | None] | None = None
    pass_on: Callable[[Announcement | None], None] | None = None


def to_neighbours(payload: Payload, group: ProcessGroup, wait: Wait, idle: Wait) -> Wiring:
    """Connect a stage to the preceding one, or to the driver for stage 0, and to the following one.

    Args:
        payload: The stage.
        group: The data plane; ranks are numbers of stages, and the last one is the driver's.
        wait: Calls a function that waits for a message.
        idle: Calls a function that waits for a command.
    """
    device, driver = torch.device(payload.device), group.size() - 1
    first, limit = payload.index == 0, group.size() + 2
    source, inputs_tag = (driver, FEED_TAG) if first else (payload.index - 1, 0)
    inputs = Receiver(group, source, device=device, tag=inputs_tag, wait=wait)
    outputs = Sender(group, payload.index + 1, limit=limit, wait=wait)

    def pass_on(this: Announcement | None) -> None:
        if payload.index + 1 == driver:  # the next process is the driver, which announces passes itself
            return
        if this is None:
            outputs.end_passes()
        else:
            outputs.announce(this)

    return Wiring(
        inputs=Inputs(inputs) if first else inputs,
        outputs=outputs,
        output_grads=Receiver(group, payload.index + 1, device=device, wait=wait),
        # No limit for stage 0: the driver receives the gradients of its inputs only after its own backward pass.
        input_grads=Sender(group, source, tag=inputs_tag, limit=None if first else limit, wait=wait),
        sender=lambda peer, tag: Sender(group, peer, tag=tag, wait=wait),
        receiver=lambda peer, tag: Receiver(group, peer, device=device, tag=tag, wait=wait),
        limit=limit,
        settle=lambda: None,  # a neighbour that fails announces it on the data plane
        forget=lambda number: None,
        commands=Receiver(group, driver, device=torch.device("cpu"), tag=COMMANDS_TAG, wait=idle, timeout=NO_LIMIT),
        next_pass=inputs.announcement,
        pass_on=pass_on,
    )
