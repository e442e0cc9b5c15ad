"""Several pipelines that train one model on different data: the same stage of each has the same gradients and weights.

    replica 0   stage 0 ──── stage 1 ──── driver
                   ┆            ┆            ┆       a group for each stage
    replica 1   stage 0 ──── stage 1 ──── driver

A stage averages its gradients when its own backward passes are done, while those before it still run theirs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.optim import Optimizer

from strategies.common.waiting import Wait, wait_here
from strategies.launch.rendezvous import LOOPBACK
from strategies.launch.session import join_group
from strategies.optim.calls import runs_own_code
from strategies.optim.restricted import parameters_of
from strategies.sharding.ownership import Ownership
from strategies.sharding.states import gather_states

_BUCKET_BYTES = 25 * 2**20
"""As in DistributedDataParallel: large enough to use the network well, and so that little memory is taken twice."""

_ALONE_BYTES = 2**20
"""A gradient of this size or more travels as it is, without being copied together with others."""


@dataclass(frozen=True)
class Replicas:
    """How many pipelines there are.

    Attributes:
        number: This one's.
        count: How many.
        meeting: Where processes of the same stage meet, the same for all; see :mod:`~strategies.launch.rendezvous`.
        timeout_seconds: How long to wait for another replica.
        towards: An address that all can reach.
        divide_states: Whether the same stage of all divides its optimizer states among them.
    """

    number: int
    count: int
    meeting: str
    timeout_seconds: float
    towards: str = LOOPBACK
    divide_states: bool = False

    def join(self, stage: int, check: Callable[[], None] = lambda: None) -> ProcessGroup:
        """Connects the processes of one stage, and returns when all are there, or when ``check`` raises."""
        url = f"{self.meeting}/stage-{stage}"
        return join_group(url, self.number, self.count, self.timeout_seconds, self.towards, check)


class Averaging:
    """One process's part in keeping its stage the same in all replicas.

    Args:
        group: The processes of the stage.
        parameters: Gives the parameters that live in this process, in the same order in all replicas.
        buffers: The same for buffers.
        wait: Calls what waits for the others.
    """

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Callable[[], Sequence[nn.Parameter]],
        buffers: Callable[[], Sequence[Tensor]],
        *,
        wait: Wait = wait_here,
    ) -> None:
        self._group, self._parameters, self._buffers, self._wait = group, parameters, buffers, wait
        self.replica, self.count = group.rank(), group.size()

    def share(self) -> None:
        """Gives parameters and buffers the values that they have in replica 0."""
        self.spread([*self._parameters(), *self._buffers()], 0)

    @torch.no_grad()
    def average(self) -> None:
        """Replaces each gradient by its mean over the replicas; where a replica has none, it counts as zero.

        Buffers become those of replica 0, as in DistributedDataParallel, so that all go on with the same statistics.
        """
        parameters = self._parameters()
        self._agree(parameters)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for grad in grads:
            grad.div_(self.count)  # first: the sum might be too large for float16
        buckets = [(bucket, _message(bucket)) for bucket in _buckets(grads)]
        self._finish([self._group.allreduce([message]) for _, message in buckets])
        for bucket, message in buckets:
            parts = [message] if len(bucket) == 1 else message.split([grad.numel() for grad in bucket])
            for grad, mean in zip(bucket, parts, strict=True):
                if mean is not grad:
                    grad.copy_(mean.view(grad.shape) if mean.shape != grad.shape else mean)
        self.spread(self._buffers(), 0)

    @torch.no_grad()
    def spread(self, tensors: Sequence[Tensor], replica: int) -> None:
        """Gives tensors the values that they have in one of the replicas."""
        for bucket in _filled(tensors):
            message = torch.cat([tensor.detach().cpu().flatten().view(torch.uint8) for tensor in bucket])
            self._finish([self._group.broadcast(message, replica)])
            for tensor, value in zip(bucket, message.split([tensor.nbytes for tensor in bucket]), strict=True):
                tensor.copy_(value.clone().view(tensor.dtype).view_as(tensor))  # a copy is where its type may be

    def gathered(self, states: dict[int, Any]) -> dict[int, Any]:
        """Puts optimizer states together on replica 0; see :func:`~strategies.sharding.states.gather_states`."""
        return gather_states(states, self._group, self._wait)

    def _agree(self, parameters: Sequence[nn.Parameter]) -> None:
        """Lets a parameter that has a gradient in some replica have one in this one too, and of the same layout."""
        layouts = [None if parameter.grad is None else parameter.grad.layout for parameter in parameters]
        kinds = (torch.strided, torch.sparse_coo)
        found = torch.tensor([[layout == kind for kind in kinds] for layout in layouts], dtype=torch.uint8)
        if not parameters:
            return
        self._finish([self._group.allreduce([found], ReduceOp.MAX)])
        for parameter, (dense, sparse) in zip(parameters, found.tolist(), strict=True):
            grad = parameter.grad
            if grad is None and (dense or sparse):
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros if dense else zeros.to_sparse(1)
            elif grad is not None and grad.is_sparse and dense:
                parameter.grad = grad.to_dense()

    def _finish(self, works: Sequence[Work]) -> None:
        self._wait(lambda: [work.wait() for work in works])


class SharedSteps:
    """One process's part in the steps of its stage.

    Args:
        optimizers: Over the parameters that live in this process; what is on the ``meta`` device is another stage's.
        averaging: Reaches the same stage of the other replicas.
    """

    def __init__(self, optimizers: Iterable[Optimizer], averaging: Averaging) -> None:
        self._averaging = averaging
        self._ownership = Ownership(optimizers, averaging.replica, averaging.count)

    def before_step(self, optimizer: Optimizer) -> None:
        """Leaves this process's share in the groups; gradients are averages by now."""
        self._ownership.narrow(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Makes the groups whole again, and brings the new values to all replicas."""
        if runs_own_code(optimizer) or not self._ownership.is_narrowed(optimizer):
            return
        self._ownership.widen(optimizer)
        for owner in range(self._averaging.count):
            own = [p for p in parameters_of(optimizer) if self._ownership.owners.get(p) == owner]
            self._averaging.spread(own, owner)

    def gathered(self, states: dict[int, Any]) -> dict[int, Any]:
        """On the first replica the states of the stage's parameters, put together from all; on the others nothing."""
        return self._averaging.gathered(states)

    def own_part(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Out of the states of an optimizer, those that this process keeps."""
        return self._ownership.own_part(optimizer, states)

    def close(self) -> None:
        """Leaves the optimizers whole, but for their state."""
        self._ownership.widen_all()


def _message(bucket: Sequence[Tensor]) -> Tensor:
    """What travels for a bucket: its only tensor if that can, otherwise a copy of all."""
    if len(bucket) == 1 and (bucket[0].is_sparse or bucket[0].is_contiguous()):
        return bucket[0].cpu()
    return torch.cat([grad.flatten().cpu() for grad in bucket])


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Large gradients and sparse ones by themselves; of the others some of one type each, in order."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.is_sparse or grad.nbytes >= _ALONE_BYTES:
            yield [grad]
        else:
            small.setdefault(grad.dtype, []).append(grad)
    for same in small.values():
        yield from _filled(same)


def _filled(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of about the size that travels best."""
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
