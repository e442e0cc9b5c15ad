"""The user's optimizers. Each rank steps the parameters that it owns.

Gradients are reduced to their owners, and new values are sent from the owners to all ranks:

    step at the end      backward ─▶ all gradients ─▶ step ─▶ new values
    step in backward     backward ─▶ bucket ─▶ step of bucket ─▶ new values of bucket
                              └────▶ bucket ─▶ step of bucket ─▶ new values of bucket
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from strategies.optim.calls import Draws, MethodCall, follow_steps, runs_own_code, same_result_on_ranks
from strategies.optim.gradients import clamp_gradients, clipping_factor, norms_of_gradients, scale_gradients
from strategies.optim.restricted import parameters_of, restricted
from strategies.sharding.bucket import Bucket, form_buckets
from strategies.sharding.divided_optimizers import Ownership
from strategies.sharding.reducer import LAG, Reducer
from strategies.sharding.transfer import Exchange, InFlight


class ShardedOptimizers:
    """Optimizers whose states are divided over the ranks of a group, and the gradients that they need.

    Args:
        optimizers: The same optimizers on every rank.
        parameters: All trainable parameters, also frozen ones, by name, in the order in which the model uses them.
        group: The ranks.
        whole_gradients: Whether every rank gets every gradient (ZeRO stage 1), or only the owner (stage 2).
        step_in_backward: In a step with a closure, step each bucket as soon as its gradients are reduced.
        parameters_as_bucket_view: Store parameters in the buffers that are sent.
        find_unused_parameters: Backward passes may leave out parameters.
        bucket_bytes: Approximate size of a bucket.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        parameters: Mapping[str, Tensor],
        group: ProcessGroup,
        *,
        whole_gradients: bool,
        step_in_backward: bool,
        parameters_as_bucket_view: bool,
        find_unused_parameters: bool,
        bucket_bytes: int,
    ) -> None:
        self.optimizers, self._group = list(optimizers), group
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._whole, self._step_in_backward = whole_gradients, step_in_backward
        self._as_view, self._bucket_bytes = parameters_as_bucket_view, bucket_bytes
        self.ownership = Ownership(self.optimizers, group.rank(), group.size())
        self._trained: dict[Tensor, None] = {}
        self._buckets: list[Bucket] = []
        self._averages: dict[Tensor, weakref.ref[Tensor]] = {}
        self._in_backward_of: Optimizer | None = None
        self._arguments: dict[str, Any] = {}
        """The arguments of the current step."""
        self._stepped: set[Bucket] = set()
        self._exchange, self._sharing = Exchange(group), InFlight(LAG)
        self._undo = [
            follow_steps(optimizer, self._narrow, evaluate=self._evaluate, is_divided=lambda: group.size() > 1)
            for optimizer in self.optimizers
        ]
        self.reducer = Reducer(
            self._exchange,
            whole=whole_gradients,
            find_unused=find_unused_parameters,
            prepare=self.take_in,
            reduced=self._gradients_are_there,
            name_of=lambda parameter: self._names.get(parameter, "(not of the model)"),
        )
        self.take_in()

    def close(self) -> None:
        """Restore optimizers and parameters. Optimizer states stay divided."""
        for undo in self._undo:
            undo()
        self._undo = []
        self.reducer.close()
        self.ownership.widen_all()
        for bucket in self._buckets:
            bucket.release()

    def follow(self, loss: Tensor, *, communicate: bool) -> None:
        """Reduce gradients in the backward pass of ``loss``, or only accumulate them if ``communicate`` is false."""
        self.reducer.follow(loss, communicate=communicate)

    def after_step(self, optimizer: Optimizer) -> None:
        """Send the new values to all ranks. Called on every rank after each step."""
        if runs_own_code(optimizer) or not self.ownership.is_narrowed(optimizer):
            return
        self.ownership.widen(optimizer)
        self._share_values(optimizer)
        self._stepped.clear()

    def call_method(self, optimizer: Optimizer, call: MethodCall) -> Any:
        """Call a method of an optimizer for this rank's parameters, and send the new values to all ranks.

        Every rank calls this.

        Raises:
            RuntimeError: If the method returns different values on different ranks.
        """
        with torch.inference_mode(False), torch.no_grad():  # optimizer.eval() may be called in a validation
            self.take_in() if self._undo else self.ownership.take_in()
        self.ownership.narrow(optimizer)
        try:
            result = call.on(optimizer)
        finally:
            self.ownership.widen(optimizer)
        with torch.inference_mode(False):  # validation may run in inference mode
            if self._undo:
                self._share_values(optimizer)
            else:  # after fit, when there are no buckets
                for parameter, owner in self.ownership.owners.items():
                    dist.broadcast(parameter.data, owner, group=self._group)

        return same_result_on_ranks(optimizer, call, result, self._group)

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their total norm is at most ``max_norm``.

        Every rank combines the norms of single parameters in the order of ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping, a scalar.
        """
        self._complete(optimizer)
        parameters = parameters_of(optimizer)
        if self._whole:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        norms = norms_of_gradients(parameters, norm_type)
        # The same on every rank, whichever gradients it has.
        dtype = torch.float64 if any(p.dtype.to_real() == torch.float64 for p in parameters) else torch.float32
        table = torch.zeros(2, len(parameters), dtype=dtype, device=parameters[0].device)
        for number, norm in enumerate(norms):
            if norm is not None:
                table[:, number] = torch.stack([norm.to(table), table.new_ones(())])
        dist.all_reduce(table, group=self._group)
        total = torch.linalg.vector_norm(table[0, table[1] > 0], norm_type)
        scale_gradients(parameters, clipping_factor(total, max_norm))
        return total

    def clip_grad_value(self, optimizer: Optimizer, max_value: float) -> None:
        """Limit the absolute value of each element of the gradients."""
        self._complete(optimizer)
        clamp_gradients(parameters_of(optimizer), max_value)

    def any_rank(self, found: Tensor) -> None:
        """Replace a scalar with its maximum over all ranks."""
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)

    def _share_values(self, optimizer: Optimizer) -> None:
        changed = set(parameters_of(optimizer))
        for bucket in self._buckets:
            if bucket.owner is not None and bucket not in self._stepped and changed.intersection(bucket.parameters):
                self._share(bucket)
        self._sharing.drain()

    def _share(self, bucket: Bucket) -> None:
        number = self._buckets.index(bucket)
        self._sharing.add(bucket.start_sharing(self._exchange, number, mine=bucket.owner == self.ownership.rank))

    # Steps

    def _evaluate(self, optimizer: Optimizer, arguments: dict[str, Any], closure: Callable[[], Any]) -> Any:
        """Call the closure, which computes gradients. Buckets may be stepped as soon as their gradients are reduced."""
        self._in_backward_of, self._arguments = optimizer if self._step_in_backward else None, arguments
        try:
            return closure()
        finally:
            self._in_backward_of = None

    def _complete(self, optimizer: Optimizer) -> None:
        """Reduce gradients that are only accumulated, and assign owners to parameters added since the backward pass."""
        self.reducer.complete(parameters_of(optimizer))
        self._sharing.drain()  # the buckets may change
        self.take_in()
        if not self._whole:
            for parameter in parameters_of(optimizer):
                if self.ownership.owners.get(parameter) != self.ownership.rank:
                    parameter.grad = None  # every rank has the average if the parameter had no owner

    def _narrow(self, optimizer: Optimizer, arguments: dict[str, Any]) -> None:
        self._complete(optimizer)
        self.ownership.narrow(optimizer, {parameter for bucket in self._stepped for parameter in bucket.parameters})

    def _gradients_are_there(self, bucket: Bucket) -> None:
        optimizer = self._in_backward_of
        if optimizer is None or bucket.optimizer is None or self.optimizers[bucket.optimizer] is not optimizer:
            return
        if self.reducer.has_frozen_sums(bucket):
            return  # they are reduced, and the bucket is stepped, after the backward pass
        if bucket.owner == self.ownership.rank:
            # A new copy for each step, with the current hyperparameters of the user's optimizer. What is common to all
            # parameters, such as a number of steps, is changed by the step at the end only.
            part = restricted(optimizer, bucket.parameters)
            with Draws(part):
                part.step(**self._arguments)
            optimizer.state.update({p: state for p, state in part.state.items() if isinstance(p, Tensor)})
        self._stepped.add(bucket)
        self._share(bucket)

    # Buckets

    def take_in(self) -> list[Bucket]:
        """Include parameters that have been thawed, or added to an optimizer, since the last call; return the buckets.

        Every rank calls this.
        """
        taken_in = any(p in self._trained for p in self.ownership.take_in())  # they were in buckets without an owner
        candidates = dict.fromkeys([*self._names, *self.ownership.owners])
        thawed = [p for p in candidates if p.requires_grad and p not in self._trained]
        if thawed or taken_in:
            self._trained.update(dict.fromkeys(thawed))
            self._form_buckets([p for p in reversed(candidates) if p in self._trained])
        return self._buckets

    def _form_buckets(self, parameters: list[Tensor]) -> None:
        """Form buckets of parameters in the order in which the backward pass is expected to reach them."""
        for before in self._buckets:
            before.release()
        owners, optimizer_of = self.ownership.owners, self.ownership.optimizer_of
        kinds = [(owners.get(p), optimizer_of.get(p), p.dtype, p.device) for p in parameters]
        self._buckets = []
        for numbers in form_buckets(kinds, [p.nbytes for p in parameters], self._bucket_bytes):
            members = [parameters[number] for number in numbers]
            owner, optimizer, _, device = kinds[numbers[0]]
            packed = self._whole or owner is None or device.type == "cuda"  # because a collective sums in place
            self._buckets.append(
                Bucket(members, owner, optimizer, averages=self._averages, as_view=self._as_view, packed=packed)
            )
        self.reducer.watch(self._buckets)
