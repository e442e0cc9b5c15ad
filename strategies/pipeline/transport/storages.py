"""Send the values of a stage from the driver to its worker: one storage at a time, directly to its final place.

Neither process holds a second copy: gloo reads the memory of the driver's tensors and writes to that of the worker's.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, UntypedStorage

from strategies.common.waiting import Wait
from strategies.pipeline.transport.link import NO_LIMIT, Link


def send_storages(storages: list[UntypedStorage], link: Link, wait: Wait) -> None:
    """Send the values of storages. Removes each storage from the list, so that the list does not keep its memory.

    Args:
        storages: The storages, on any device.
        link: The link with the worker.
        wait: Runs a function that blocks until values have arrived.
    """
    while storages:
        message = as_bytes(storages.pop(0)).cpu()
        wait(partial(link.send_memory(message).wait, link.timeout))


def receive_storages(storages: Sequence[UntypedStorage], link: Link, wait: Wait) -> None:
    """Receive the values of storages of the same sizes, on the CPU; see :func:`send_storages`.

    There is no time-out, because the sender may serve other stages first. The wait ends if the sender ends.
    """
    for storage in storages:
        wait(partial(link.receive_memory(as_bytes(storage)).wait, NO_LIMIT))


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Return the bytes of a storage as a tensor on the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
