"""Communicators between GPUs: one NCCL communicator and stream for each direction of each edge.

No part of this module has run on a GPU yet. ``docs/gpu.md`` says how to run it and what to expect.

The communicators are created, and used once, when the pipeline starts. All processes use the same order, because the
two processes of a communicator wait for each other.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from strategies.common.torch_compat import nccl_backend
from strategies.common.trees import TensorLayout
from strategies.pipeline.transport.device import Communicators, Route, bytes_of, given_up
from strategies.pipeline.transport.link import Transfer

_LOOK_SECONDS = 5e-5
"""How often a blocked process checks whether a transfer has run. A wait within CUDA could not be interrupted."""

COMMUNICATOR_BYTES = 12 * 2**20
"""Minimum GPU memory of a communicator of two ranks: the mean of sender and receiver.

NCCL connects two ranks with at least two channels for sends and receives (up to 32 over NVLink). In each of them, the
receiver has a buffer for each protocol: 4 MiB (``NCCL_BUFFSIZE``), 4.7 MiB and 0.5 MiB, rounded up to 10 MiB, and the
sender has 2 MiB; or 6 MiB each, if receivers read from senders (NCCL 2.30: ``transport/p2p.cc``, ``graph/paths.cc``;
allocations of these sizes are in NVIDIA/nccl#1685). A process has as many routes to it as from it, so the mean of both
is correct.
"""


class NcclTransfer:
    """A transfer of tensors between two GPUs.

    Args:
        works: The sends or receives.
        tensors: The tensors that they read or write.
        are_new: Whether the tensors are new, allocated on the stream of the communicator.
        given_up: Returns whether the communicators of this process have been aborted, or another process has failed.
    """

    def __init__(
        self, works: Sequence[Any], tensors: Sequence[Tensor], *, are_new: bool, given_up: Callable[[], bool]
    ) -> None:
        self._works, self._tensors, self._are_new, self._given_up = works, tensors, are_new, given_up

    def wait(self) -> None:
        for work in self._works:
            work.wait()  # makes the current stream wait, not the CPU
        if self._are_new:
            for tensor in self._tensors:  # the communicator must not reuse their memory before this stream is done
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def synchronize(self) -> None:
        while not self.is_over:
            time.sleep(_LOOK_SECONDS)
        if self._given_up():  # an aborted work counts as completed
            raise given_up()
        self.wait()

    @property
    def is_over(self) -> bool:
        # In this order: is_completed waits, with the interpreter locked, for an abort that runs on another thread.
        return self._given_up() or all(work.is_completed() for work in self._works)


class NcclCommunicator:
    """One direction between the GPUs of two processes.

    Args:
        backend: A communicator of the two processes, whose rank 0 is the source.
        peer: The rank of the other process in ``backend``.
        device: The device of this process.
        given_up: Returns whether the communicators of this process have been aborted, or another process has failed.
    """

    def __init__(self, backend: Any, peer: int, device: torch.device, given_up: Callable[[], bool]) -> None:
        self._backend, self._peer, self._device, self._given_up = backend, peer, device, given_up
        self._stream = torch.cuda.Stream(device)
        """The stream on which received tensors are allocated, so that receives do not wait for computation."""

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        works = [self._backend.send([bytes_of(tensor)], self._peer, 0) for tensor in tensors]
        return NcclTransfer(works, tensors, are_new=False, given_up=self._given_up)

    def receive(self, layouts: Sequence[TensorLayout]) -> tuple[list[Tensor], Transfer]:
        with torch.cuda.stream(self._stream):
            tensors = [torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in layouts]
            works = [self._backend.recv([bytes_of(tensor)], self._peer, 0) for tensor in tensors]
        return tensors, NcclTransfer(works, tensors, are_new=True, given_up=self._given_up)

    def abort(self) -> None:
        self._backend.abort()


class NcclCommunicators(Communicators):
    """The communicators of a process that has its own GPU. Complete after :meth:`connect`.

    Args:
        rank: The rank of this process.
        device: The device of this process.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__()
        self._rank, self._device = rank, device

    def connect(self, routes: Iterable[Route], store: Store) -> None:
        """Create the communicators, in the order of ``routes``, and send one byte over each.

        Args:
            routes: The routes of the pipeline.
            store: The store through which the processes connect.

        Raises:
            PeerFailed: If the communicators are aborted while they connect.
        """
        with torch.cuda.device(self._device):
            for number, route in enumerate(routes):
                if self._rank not in (route.source, route.target):
                    continue
                own = int(self._rank == route.target)
                backend = nccl_backend(PrefixStore(f"{number}", store), own, 2)
                communicator = NcclCommunicator(backend, 1 - own, self._device, self.is_given_up)
                self.add(route, communicator)
                backend.eager_connect_single_device(self._device)
                if self._is_aborted:  # perhaps before there was a communicator to abort
                    self.abort_late(communicator)
                    raise given_up()
                first = torch.zeros(1, dtype=torch.uint8, device=self._device)
                described = TensorLayout((1,), torch.uint8, False)
                transfer = communicator.receive([described])[1] if own else communicator.send([first])
                transfer.synchronize()
