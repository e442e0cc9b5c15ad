"""Replicas: several pipelines that train one model on different data, with the same weights in each stage.

    replica 0   stage 0 ──── stage 1 ──── driver
                   ┆            ┆            ┆       a group for each stage
    replica 1   stage 0 ──── stage 1 ──── driver

A stage averages its gradients over the replicas as soon as its backward passes are done, while earlier stages still run
backward passes. The replicas of a stage may also divide its optimizer states and steps (ZeRO)::

    averaged gradients ──▶ each replica steps its share ──▶ new values to all replicas
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.optim import Optimizer

from strategies.common.autograd import scale_
from strategies.common.waiting import Wait, wait_here
from strategies.launch.rendezvous import LOOPBACK
from strategies.launch.session import join_group
from strategies.optim.calls import runs_own_code
from strategies.optim.restricted import parameters_of
from strategies.sharding.ownership import Ownership
from strategies.sharding.states import gather_states

_BUCKET_BYTES = 25 * 2**20
"""Size of a bucket, as in DistributedDataParallel: large enough for the network, and little extra memory."""

_ALONE_BYTES = 2**20
"""A gradient of at least this size is sent separately and not copied into a bucket."""


@dataclass(frozen=True)
class Replicas:
    """The place of one pipeline among the pipelines that train together.

    Attributes:
        number: Number of this pipeline.
        count: Number of pipelines.
        rendezvous: URL of the store at which the processes of one stage connect, the same for all pipelines; see
            :mod:`~strategies.launch.rendezvous`.
        timeout_seconds: Time-out for waiting for another replica.
        reachable_address: An address that every process can reach.
        zero_stage: What the replicas of a stage divide among themselves. 0: nothing; 1: its optimizer states and steps.
        round: How often the pipelines have returned to a snapshot, each time with new workers.
    """

    number: int
    count: int
    rendezvous: str
    timeout_seconds: float
    reachable_address: str = LOOPBACK
    zero_stage: int = 0
    round: int = 0

    def join(self, stage: int, check: Callable[[], None] = lambda: None) -> ProcessGroup:
        """Connect the processes of one stage. Returns their group when all have joined.

        Args:
            stage: Number of the stage.
            check: Called while waiting. Ends the wait by raising an exception.
        """
        url = f"{self.rendezvous}/stage-{stage}" + (f"-{self.round}" if self.round else "")
        return join_group(url, self.number, self.count, self.timeout_seconds, self.reachable_address, check)


class Averaging:
    """Keeps the gradients, parameters and buffers of one stage equal in all replicas.

    Args:
        group: The processes that hold the stage.
        parameters: Returns the parameters whose values are in this process, in an order that all replicas share.
        buffers: Returns the buffers whose values are in this process, in an order that all replicas share.
        wait: Calls a function that waits for other processes.
    """

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Callable[[], Sequence[nn.Parameter]],
        buffers: Callable[[], Sequence[Tensor]],
        *,
        wait: Wait = wait_here,
    ) -> None:
        self._group: ProcessGroup | None = group
        self._parameters, self._buffers, self._wait = parameters, buffers, wait
        self.replica, self.count = group.rank(), group.size()

    def close(self) -> None:
        """Close the connections, so that the waits of other replicas fail. A wait in this process delays this."""
        self._group = None

    @property
    def _connected(self) -> ProcessGroup:
        if self._group is None:
            raise RuntimeError("the connections between the replicas have been closed")
        return self._group

    def share(self) -> None:
        """Copy parameters and buffers from replica 0."""
        self.spread([*self._parameters(), *self._buffers()], 0)

    @torch.no_grad()
    def average(self, share: float | None = None) -> None:
        """Replace each gradient with its mean over the replicas. A missing gradient counts as zero.

        Buffers are copied from replica 0, as in DistributedDataParallel, so all replicas have the same statistics.

        Args:
            share: The weight of this replica in the mean. The weights of all replicas add up to 1. By default all
                replicas have the same weight.
        """
        parameters = self._parameters()
        self._agree(parameters)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for grad in grads:  # before the sum, which might be too large for float16
            if share is None:
                grad.div_(self.count)
            else:
                scale_(grad, share)
        buckets = [(bucket, _message(bucket)) for bucket in _buckets(grads)]
        self._finish([self._connected.allreduce([message]) for _, message in buckets])
        for bucket, message in buckets:
            parts = [message] if len(bucket) == 1 else message.split([grad.numel() for grad in bucket])
            for grad, mean in zip(bucket, parts, strict=True):
                if mean is not grad:
                    grad.copy_(mean.view(grad.shape) if mean.shape != grad.shape else mean)
        self.spread(self._buffers(), 0)

    @torch.no_grad()
    def spread(self, tensors: Sequence[Tensor], replica: int) -> None:
        """Copy tensors from one replica to all other replicas."""
        for bucket in _filled(tensors):
            message = torch.cat([tensor.detach().cpu().flatten().view(torch.uint8) for tensor in bucket])
            self._finish([self._connected.broadcast(message, replica)])
            for tensor, value in zip(bucket, message.split([tensor.nbytes for tensor in bucket]), strict=True):
                tensor.copy_(value.clone().view(tensor.dtype).view_as(tensor))  # the copy is aligned for its dtype

    def gathered(self, states: dict[int, Any]) -> dict[int, Any]:
        """Gather optimizer states on replica 0; see :func:`~strategies.sharding.states.gather_states`."""
        return gather_states(states, self._connected, self._wait)

    def _agree(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add a zero gradient, in the common layout, to parameters that have a gradient in another replica only."""
        layouts = [None if parameter.grad is None else parameter.grad.layout for parameter in parameters]
        kinds = (torch.strided, torch.sparse_coo)
        found = torch.tensor([[layout == kind for kind in kinds] for layout in layouts], dtype=torch.uint8)
        if not parameters:
            return
        self._finish([self._connected.allreduce([found], ReduceOp.MAX)])
        for parameter, (dense, sparse) in zip(parameters, found.tolist(), strict=True):
            grad = parameter.grad
            if grad is None and (dense or sparse):
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros if dense else zeros.to_sparse(1)
            elif grad is not None and grad.is_sparse and dense:
                parameter.grad = grad.to_dense()

    def _finish(self, works: Sequence[Work]) -> None:
        group = self._group

        def wait() -> None:
            nonlocal group
            try:
                for work in works:
                    work.wait()
            finally:
                group = None  # not earlier: the group's destructor would wait for the operation on the main thread

        self._wait(wait)


class SharedSteps:
    """Divides the optimizer states and steps of one stage among its replicas.

    Args:
        optimizers: Optimizers over the parameters of this process. Parameters on the ``meta`` device belong to other
            stages.
        averaging: Connects the replicas of the stage.
        owners: The replica that steps each parameter, if this has been decided before.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], averaging: Averaging, owners: Mapping[Tensor, int] | None = None
    ) -> None:
        self._averaging = averaging
        self._ownership = Ownership(optimizers, averaging.replica, averaging.count, owners)

    @property
    def owners(self) -> Mapping[Tensor, int]:
        """For each parameter, the number of the replica that steps it and has its states."""
        return self._ownership.owners

    def before_step(self, optimizer: Optimizer) -> None:
        """Remove all parameters but this replica's share from the parameter groups. Gradients are already averaged."""
        self._ownership.narrow(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Restore the parameter groups, and send the new values to all replicas."""
        if runs_own_code(optimizer) or not self._ownership.is_narrowed(optimizer):
            return
        self._ownership.widen(optimizer)
        for owner in range(self._averaging.count):
            own = [p for p in parameters_of(optimizer) if self._ownership.owners.get(p) == owner]
            self._averaging.spread(own, owner)

    def gathered(self, states: dict[int, Any]) -> dict[int, Any]:
        """Return the states of all parameters of the stage on replica 0, and an empty dict on the other replicas."""
        return self._averaging.gathered(states)

    def own_part(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the part of a whole optimizer's states that this replica keeps."""
        return self._ownership.own_part(optimizer, states)

    def close(self) -> None:
        """Restore the parameter groups of all optimizers. States stay divided."""
        self._ownership.widen_all()


def _message(bucket: Sequence[Tensor]) -> Tensor:
    """Return the tensor to send for a bucket: its only tensor if contiguous or sparse, otherwise a copy of all."""
    if len(bucket) == 1 and (bucket[0].is_sparse or bucket[0].is_contiguous()):
        return bucket[0].cpu()
    return torch.cat([grad.flatten().cpu() for grad in bucket])


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets: large and sparse gradients separately, all other gradients together by dtype, in order."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.is_sparse or grad.nbytes >= _ALONE_BYTES:
            yield [grad]
        else:
            small.setdefault(grad.dtype, []).append(grad)
    for same in small.values():
        yield from _filled(same)


def _filled(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors in buckets of about ``_BUCKET_BYTES``."""
    bucket: list[Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        bucket.append(tensor)
        size_bytes += tensor.nbytes
        if size_bytes >= _BUCKET_BYTES:
            yield bucket
            bucket, size_bytes = [], 0
    if bucket:
        yield bucket
