"""Replicas: several pipelines that train one model on different data, with the same weights in each stage.

    replica 0   stage 0 ──── stage 1 ──── driver
                   ┆            ┆            ┆       a group for each stage
    replica 1   stage 0 ──── stage 1 ──── driver

A stage averages its gradients over the replicas as soon as its backward passes are done, while earlier stages still run
backward passes. The replicas of a stage may also divide its optimizer states and steps (ZeRO stage 1)::

    averaged gradients ──▶ each replica steps its share ──▶ new values to all replicas

Under stage 2, only the replica that steps a parameter gets its averaged gradient; the other replicas free theirs. Under
stage 3, large parameters are divided: :mod:`strategies.sharding.gathered_layers` averages their gradients.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from strategies.common.torch_compat import timeout_of
from strategies.common.waiting import Wait, wait_here
from strategies.launch.session import Peers
from strategies.optim.calls import runs_own_code
from strategies.optim.restricted import parameters_of
from strategies.sharding.divided_optimizers import Ownership
from strategies.sharding.gathered_layers import is_part
from strategies.sharding.gathered_states import gather_states
from strategies.sharding.reducer import LAG
from strategies.sharding.transfer import InFlight

_BUCKET_BYTES = 25 * 2**20
"""Size of a bucket, as in DistributedDataParallel: large enough for the network, and little extra memory."""

_FIRST_TAG = 2**12
"""Tag of the first message to an owner."""

_ALONE_BYTES = 2**20
"""A gradient of at least this size is sent separately and not copied into a bucket."""


@dataclass(frozen=True)
class Replicas(Peers):
    """The place of one pipeline among the pipelines that train together on different data.

    Attributes:
        zero_stage: What the replicas of a stage divide among themselves. 0: nothing; 1: its optimizer states
            and steps; 2: its gradients too; 3: its parameters too.
    """

    zero_stage: int = 0


class Averaging:
    """Keeps the gradients, parameters and buffers of one stage equal in all replicas.

    Args:
        group: The processes that hold the stage.
        parameters: Returns the parameters whose values are in this process, in an order that all replicas share.
        buffers: Returns the buffers whose values are in this process, in an order that all replicas share.
        wait: Calls a function that waits for other processes.
        owners: The replica that alone gets the averaged gradient of a parameter. All replicas get the averages of
            parameters without an owner.
        means: Parameters whose gradients are averages that only this replica has.
        follows_autograd: Whether a backward pass may add to gradients before :meth:`before_backward` is called.
    """

    def __init__(
        self,
        group: ProcessGroup,
        parameters: Callable[[], Sequence[nn.Parameter]],
        buffers: Callable[[], Sequence[Tensor]],
        *,
        wait: Wait = wait_here,
        owners: Mapping[Tensor, int] | None = None,
        means: Iterable[Tensor] = (),
        follows_autograd: bool = False,
    ) -> None:
        self._group: ProcessGroup | None = group
        self._parameters, self._buffers, self._wait = parameters, buffers, wait
        self.replica, self.count = group.rank(), group.size()
        self._owners: Mapping[Tensor, int] = owners or {}
        self._follows_autograd = follows_autograd
        self._means: dict[Tensor, weakref.ref[Tensor]] = {}
        """For each parameter whose average only this replica has, its gradient at that time."""
        self._hooks: list[RemovableHandle] = []
        self._note_means(means)

    def close(self) -> None:
        """Close the connections, so that the waits of other replicas fail. A wait in this process delays this."""
        self._group = None
        self._forget_means()

    @property
    def _connected(self) -> ProcessGroup:
        if self._group is None:
            raise RuntimeError("the connections between the replicas have been closed")
        return self._group

    def share(self) -> None:
        """Copy parameters and buffers from replica 0."""
        self.spread([*self._parameters(), *self._buffers()], 0)

    @torch.no_grad()
    def average(self) -> None:
        """Replace each gradient with its mean over the replicas. A missing gradient counts as zero.

        Replicas that do not own a parameter have no gradient of it afterwards. Buffers are copied from replica 0, as in
        DistributedDataParallel, so all replicas have the same statistics.
        """
        self.before_backward()
        parameters = self._parameters()
        self._agree(parameters)
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in trained:  # before the sum, which might be too large for float16
            _grad(parameter).div_(self.count)
        own = {p: owner for p in trained if (owner := self._owners.get(p)) is not None}
        self._average_for_all([_grad(p) for p in trained if p not in own or _grad(p).is_sparse])
        self._sum_for_owners({p: owner for p, owner in own.items() if not _grad(p).is_sparse})
        for parameter, owner in own.items():
            if owner != self.replica:
                parameter.grad = None
        self._note_means(p for p, owner in own.items() if owner == self.replica)
        self.spread(self._buffers(), 0)

    @torch.no_grad()
    def before_backward(self) -> None:
        """Prepare the addition of local gradients to averages that only this replica has.

        The next :meth:`average` divides the sum by the number of replicas, so the averages are multiplied by it.
        """
        for parameter in self.means:
            _grad(parameter).mul_(self.count)
        self._forget_means()

    @property
    def means(self) -> list[Tensor]:
        """The parameters whose gradients are averages that only this replica has, possibly scaled or zeroed since."""
        return [p for p, known in self._means.items() if p.grad is not None and known() is p.grad]

    def _note_means(self, parameters: Iterable[Tensor]) -> None:
        self._means = {parameter: weakref.ref(_grad(parameter)) for parameter in parameters}
        if self._follows_autograd:
            self._hooks = [p.register_hook(lambda _: self.before_backward()) for p in self._means if p.requires_grad]

    def _forget_means(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._means, self._hooks = {}, []

    def _average_for_all(self, grads: Iterable[Tensor]) -> None:
        """Replace gradients that have been divided with their sums over all replicas."""
        buckets = [(bucket, _message(bucket)) for bucket in _buckets(grads)]
        self._finish([self._connected.allreduce([message]) for _, message in buckets])
        for bucket, message in buckets:
            _take_apart(message, bucket)

    def _sum_for_owners(self, owners: Mapping[nn.Parameter, int]) -> None:
        """Replace gradients that have been divided with their sums over all replicas, in the owners only."""
        in_flight, number = InFlight(LAG), 0
        for owner in range(self.count):
            own = [_grad(parameter) for parameter, each in owners.items() if each == owner and parameter.numel()]
            for bucket in _buckets(own):
                in_flight.add(self._start_sum(bucket, owner, number))
                number += 1
        in_flight.drain()

    def _start_sum(self, bucket: Sequence[Tensor], owner: int, number: int) -> Callable[[], None]:
        """Start to sum gradients, and return a function that waits for the end.

        Gradients are sent to the owner directly, as under ``strategy="zero"``: gloo's reduce sends more.
        """
        message, tag, timeout = _message(bucket), _FIRST_TAG + number, timeout_of(self._connected)
        if owner != self.replica:
            sent = self._connected.send([message], owner, tag)
            return lambda: self._finish([sent], timeout)
        others = [replica for replica in range(self.count) if replica != owner]
        arriving = [torch.empty_like(message) for _ in others]
        works = [self._connected.recv([buffer], replica, tag) for replica, buffer in zip(others, arriving, strict=True)]

        def add_up() -> None:
            self._finish(works, timeout)
            for arrived in arriving:
                message.add_(arrived)
            _take_apart(message, bucket)

        return add_up

    @torch.no_grad()
    def spread(self, tensors: Sequence[Tensor], replica: int) -> None:
        """Copy tensors from one replica to all other replicas."""
        for bucket in _filled(tensors):
            message = torch.cat([tensor.detach().cpu().flatten().view(torch.uint8) for tensor in bucket])
            self._finish([self._connected.broadcast(message, replica)])
            for tensor, value in zip(bucket, message.split([tensor.nbytes for tensor in bucket]), strict=True):
                tensor.copy_(value.clone().view(tensor.dtype).view_as(tensor))  # the copy is aligned for its dtype

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the replicas, on the CPU."""
        total = values.detach().to("cpu", copy=True)
        self._finish([self._connected.allreduce([total])])
        return total

    def gathered(self, states: dict[int, Any]) -> dict[int, Any]:
        """Gather optimizer states on replica 0; see :func:`~strategies.sharding.gathered_states.gather_states`."""
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

    def _finish(self, works: Sequence[Work], *timeout: timedelta) -> None:
        """Wait for collectives, or with a time-out for messages, which have a shorter one by default."""
        group = self._group

        def wait() -> None:
            nonlocal group
            try:
                for work in works:
                    work.wait(*timeout)
            finally:
                group = None  # not earlier: the group's destructor would wait for the operation on the main thread

        self._wait(wait)


class SharedSteps:
    """Divides the optimizer states and steps of one stage among its replicas.

    Args:
        ownership: The replica that steps each parameter.
        averaging: Connects the replicas of the stage.
        divides_gradients: Whether only the owner of a parameter has its gradient.
    """

    def __init__(self, ownership: Ownership, averaging: Averaging, *, divides_gradients: bool) -> None:
        self._averaging, self._ownership, self._divides_gradients = averaging, ownership, divides_gradients

    @property
    def means(self) -> list[Tensor]:
        """The parameters whose gradients are averages that only this replica has."""
        return self._averaging.means

    def all_norms(self, norms: Mapping[int, Tensor], parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the norms of the gradients of all replicas. Every replica calls this.

        Args:
            norms: The norm of each gradient that this replica has, by the number of the parameter.
            parameters: The parameters, which may be on the ``meta`` device.
        """
        if not self._divides_gradients:
            return dict(norms)
        table = torch.zeros(2, len(parameters), dtype=torch.float64)
        for k, norm in norms.items():
            table[:, k] = torch.stack([norm.to(table), table.new_ones(())])
        total, count = self._averaging.sum(table)  # all replicas may have the gradient of a parameter
        return {k: (total[k] / count[k]).to(p.dtype.to_real()) for k, p in enumerate(parameters) if count[k]}

    def any_replica(self, found: Tensor) -> None:
        """Set a scalar that is 0 or 1 to 1 if it is 1 in any replica. Every replica calls this."""
        if self._divides_gradients:
            found.copy_(self._averaging.sum(found).clamp_(max=1.0))

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
        """Return the states of an optimizer without those that other replicas own."""
        return self._ownership.own_part(optimizer, states)

    def close(self) -> None:
        """Restore the parameter groups of all optimizers. States stay divided."""
        self._ownership.widen_all()


def connected(
    group: ProcessGroup,
    zero_stage: int,
    optimizers: Iterable[Optimizer],
    parameters: Callable[[], Sequence[nn.Parameter]],
    buffers: Callable[[], Sequence[Tensor]],
    *,
    owners: Mapping[Tensor, int] | None = None,
    means: Iterable[Tensor] = (),
    wait: Wait = wait_here,
    follows_autograd: bool = False,
) -> tuple[Averaging, SharedSteps | None]:
    """Return what keeps one stage equal in all replicas, and what divides its steps; ``None`` under stages 0 and 3.

    Args:
        group: The processes that hold the stage.
        zero_stage: What the replicas divide; see :class:`Replicas`.
        optimizers: Optimizers over the parameters of this process. Parameters on the ``meta`` device belong to other
            stages.
        parameters: See :class:`Averaging`.
        buffers: See :class:`Averaging`.
        owners: The replica that steps each parameter, if this has been decided before.
        means: See :class:`Averaging`.
        wait: See :class:`Averaging`.
        follows_autograd: See :class:`Averaging`.
    """
    if zero_stage == 3:
        return Averaging(group, lambda: [p for p in parameters() if not is_part(p)], buffers, wait=wait), None
    if not zero_stage:
        return Averaging(group, parameters, buffers, wait=wait), None
    ownership, divides_gradients = Ownership(optimizers, group.rank(), group.size(), owners), zero_stage > 1
    averaging = Averaging(
        group,
        parameters,
        buffers,
        wait=wait,
        owners=ownership.owners if divides_gradients else None,
        means=means,
        follows_autograd=follows_autograd,
    )
    return averaging, SharedSteps(ownership, averaging, divides_gradients=divides_gradients)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _take_apart(message: Tensor, bucket: Sequence[Tensor]) -> None:
    """Copy the parts of a message for a bucket into the bucket's tensors."""
    parts = [message] if len(bucket) == 1 else message.split([grad.numel() for grad in bucket])
    for grad, mean in zip(bucket, parts, strict=True):
        if mean is not grad:
            grad.copy_(mean.view(grad.shape) if mean.shape != grad.shape else mean)


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
