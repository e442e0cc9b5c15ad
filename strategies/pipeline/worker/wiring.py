"""The connections of a stage on a worker: to its neighbours over gloo, or to partitions of a ``Pipe`` over RPC."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from strategies.pipeline.schedule.timetable import ranks_of
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.stage.stage import Output, Ports, Posting
from strategies.pipeline.transport.channel import NO_LIMIT, ORDERS_TAG, Receiver, Sender
from strategies.pipeline.transport.interface import Transport
from strategies.pipeline.worker.setup import StageSetup


class Flushed(Output, Protocol):
    """An output that waits for the arrival of values; see :class:`~strategies.pipeline.transport.channel.Sender`."""

    limit: int | None

    def flush(self, keep: int = 0) -> None: ...


@dataclass(frozen=True)
class Wiring:
    """The connections of a stage.

    Attributes:
        ports: The ports of each chunk.
        outputs: Those of them that bring values to other processes.
        input_grads: Those of them that bring gradients to other processes.
        posting: Posts sends and receives in the order of a row; ``None`` if those of an action run with it.
        fed_back: That of them which brings the gradients of the pipeline's inputs to the driver; ``None`` if it is not
            here.
        transport: What carries the values; ``None`` if these are calls of RPC.
        settle: Waits at the end of each part of a pass until all values sent have arrived, where that is needed.
        forget: Drops messages of a pass by its number.
        orders: Brings the driver's orders; ``None`` if all commands come over RPC.
    """

    ports: Mapping[int, Ports]
    outputs: Sequence[Flushed]
    input_grads: Sequence[Flushed]
    settle: Callable[[], None]
    forget: Callable[[int], None]
    transport: Transport | None = None
    posting: Posting | None = None
    fed_back: Flushed | None = None
    orders: Receiver | None = None


def to_neighbours(setup: StageSetup, group: ProcessGroup, transport: Transport) -> Wiring:
    """Connect the chunks of a stage to those before and after them, and to the driver's code before chunk 0.

    Args:
        setup: The stage.
        group: The data plane; ranks are numbers of stages, and the last one is the driver's.
        transport: What carries the values.
    """
    driver = group.size() - 1
    edges = Edges(setup.index, ranks_of(setup.placement), transport)
    fed_back = edges.targets[0].grads if 0 in edges.targets else None
    assert fed_back is None or isinstance(fed_back, Sender)
    return Wiring(
        ports=edges.ports(),
        outputs=[source.values for source in edges.sources.values() if isinstance(source.values, Sender)],
        input_grads=[target.grads for target in edges.targets.values() if isinstance(target.grads, Sender)],
        fed_back=fed_back,
        transport=transport,
        posting=edges if transport.is_ordered else None,
        settle=lambda: None,  # a neighbour that fails announces it on the data plane
        forget=lambda number: None,
        orders=Receiver(group, driver, device=torch.device("cpu"), tag=ORDERS_TAG, timeout=NO_LIMIT),
    )
