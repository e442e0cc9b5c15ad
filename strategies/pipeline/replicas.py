"""Several pipelines that train one model on different data: the same stage of each has the same gradients and weights.

    replica 0   stage 0 ──── stage 1 ──── driver
                   ┆            ┆            ┆       a group for each stage
    replica 1   stage 0 ──── stage 1 ──── driver

A stage averages its gradients when its own backward passes are done, while those before it still run theirs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from strategies.pipeline.channel import Wait, wait_here
from strategies.pipeline.meeting import LOOPBACK
from strategies.pipeline.session import join_group

_BUCKET_BYTES = 25 * 2**20
"""As in DistributedDataParallel: large enough to use the network well, and so that little memory is taken twice."""


@dataclass(frozen=True)
class Replicas:
    """How many pipelines there are.

    Attributes:
        number: This one's.
        count: How many.
        meeting: Where processes of the same stage meet, the same for all; see :mod:`~strategies.pipeline.meeting`.
        timeout_seconds: How long to wait for another replica.
        towards: An address that all can reach.
    """

    number: int
    count: int
    meeting: str
    timeout_seconds: float
    towards: str = LOOPBACK

    def join(self, stage: int) -> ProcessGroup:
        """Connects the processes of one stage, and returns when all are there."""
        url = f"{self.meeting}/stage-{stage}"
        return join_group(url, self.number, self.count, self.timeout_seconds, self.towards)


class Averaging:
    """One process's part in keeping its stage the same in all replicas.

    Args:
        group: The processes of the stage.
        parameters: Gives the parameters that live in this process, in the same order in all replicas.
        wait: Calls what waits for the others.
    """

    def __init__(
        self, group: ProcessGroup, parameters: Callable[[], Sequence[nn.Parameter]], *, wait: Wait = wait_here
    ) -> None:
        self._group, self._parameters, self._wait = group, parameters, wait
        self._count = group.size()

    @torch.no_grad()
    def share(self, tensors: Iterable[Tensor]) -> None:
        """Gives tensors the values that they have in replica 0."""
        for tensor in tensors:
            value = tensor.detach().cpu().contiguous()
            self._finish([self._group.broadcast(value, 0)])
            tensor.copy_(value)

    @torch.no_grad()
    def average(self) -> None:
        """Replaces each gradient by its mean over the replicas; where a replica has none, it counts as zero."""
        parameters = [parameter for parameter in self._parameters() if parameter.requires_grad]
        have = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        if not parameters:
            return
        self._finish([self._group.allreduce([have])])
        wanted = [parameter for parameter, number in zip(parameters, have.tolist(), strict=True) if number]
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in wanted if parameter.grad is not None]
        buckets = [(bucket, torch.cat([grad.flatten().cpu() for grad in bucket])) for bucket in _buckets(grads)]
        self._finish([self._group.allreduce([flat]) for _, flat in buckets])
        for bucket, flat in buckets:
            flat.div_(self._count)
            for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(mean.view_as(grad))

    def _finish(self, works: Sequence[Work]) -> None:
        for work in works:
            self._wait(work.wait)


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one type each, in order, and of about the size that travels best."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for same in by_dtype.values():
        bucket, size_bytes = [], 0
        for grad in same:
            bucket.append(grad)
            size_bytes += grad.nbytes
            if size_bytes >= _BUCKET_BYTES:
                yield bucket
                bucket, size_bytes = [], 0
        if bucket:
            yield bucket
