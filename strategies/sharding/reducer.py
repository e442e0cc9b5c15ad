"""Reduce gradients to their owners during the backward pass.

    backward pass   ──▶ a gradient is ready ──▶ its bucket is complete ──▶ 1 start the sum
                                                                           │ (with at most LAG sums in flight)
                                         3 the owner may step it ◀── 2 wait for the oldest sum

Every rank does 1, 2 and 3 in the order of the buckets, so ranks never wait for each other in a cycle. torch's reducer
has no owners and no callback after a bucket.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from strategies.common.torch_compat import call_at_end_of_backward, number_of_backward_pass
from strategies.sharding.bucket import Bucket
from strategies.sharding.transfer import Exchange, InFlight

LAG = 2
"""Number of buckets whose sums are in flight while the next bucket is filled, which hides their latency."""


class Reducer:
    """Averages gradients over the ranks.

    Args:
        exchange: Connects the ranks.
        whole: Whether every rank gets every gradient, as in DistributedDataParallel. Otherwise only the owner gets it,
            and other ranks have no gradient after the backward pass.
        find_unused: Backward passes may leave out parameters, and these may differ between ranks.
        prepare: Called at the start of a backward pass. Returns the buckets.
        reduced: Called with each bucket when its gradients are averaged, on every rank in the same order.
        name_of: Names a parameter in messages.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        whole: bool,
        find_unused: bool,
        prepare: Callable[[], Sequence[Bucket]],
        reduced: Callable[[Bucket], None],
        name_of: Callable[[Tensor], str],
    ) -> None:
        self._exchange, self._whole, self._find_unused = exchange, whole, find_unused
        self._prepare, self._reduced, self._name_of = prepare, reduced, name_of
        self._buckets: Sequence[Bucket] = ()
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._wanted: dict[Bucket, list[Tensor]] = {}
        self._waiting: dict[Bucket, set[Tensor]] = {}
        self._next = 0
        self._in_flight = InFlight(LAG)
        self._pass: int | None = None
        self._marked = find_unused
        self._last_accumulation: int | None = None
        self._accumulated: set[Tensor] = set()
        """Parameters that may have accumulated gradients that are not reduced, the same on every rank."""

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """Start to reduce the gradients of these buckets' parameters."""
        self._buckets = buckets
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        for parameter in self._bucket_of:
            if parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._gradient_is_there)

    def close(self) -> None:
        """Remove all hooks from parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def follow(self, loss: Tensor, *, communicate: bool) -> None:
        """Reduce gradients in the backward pass of ``loss``; or only accumulate them, if ``communicate`` is false."""
        if loss.requires_grad:
            # The hook runs when the pass begins, and makes autograd call the reducer at the end of the pass.
            loss.register_hook(lambda _: self._enter_pass() if communicate else self._check_accumulation())

    def end_failed_pass(self) -> None:
        """End a backward pass that an error has ended, so that training can go on after ``zero_grad``.

        What was sent is reduced, so that no message is left for a later pass. Other gradients stay those of this rank.
        After a pass that has ended well, this does nothing.
        """
        self._pass = None
        with suppress(RuntimeError):  # a connection was lost; the error of the pass says more
            self._in_flight.drain()
        self._in_flight.forget()
        for bucket in self._buckets:
            bucket.put_back(self._exchange.size)

    def complete(self, parameters: Iterable[Tensor]) -> None:
        """Reduce gradients of parameters that earlier backward passes have only accumulated.

        After a pass that has reduced gradients, these are gradients of parameters that were frozen in that pass.
        """
        if pending := self._accumulated.intersection(parameters):
            self._start(pending.__contains__, marked=True)
            self._finish()

    def has_frozen_sums(self, bucket: Bucket) -> bool:
        """Whether a parameter was frozen after its gradient was accumulated; :meth:`complete` reduces it."""
        return any(not p.requires_grad for p in self._accumulated.intersection(bucket.parameters))

    def _enter_pass(self) -> None:
        this_pass = number_of_backward_pass()
        if self._pass == this_pass:
            return  # a second loss of the same backward pass
        self._pass = this_pass
        self._start(lambda p: p.requires_grad, marked=self._find_unused)
        call_at_end_of_backward(self._finish)

    def _start(self, is_reduced: Callable[[Tensor], bool], *, marked: bool) -> None:
        self._prepare()
        self._marked, self._next = marked, 0
        self._wanted = {bucket: [*filter(is_reduced, bucket.parameters)] for bucket in self._buckets}
        self._waiting = {bucket: set(wanted) for bucket, wanted in self._wanted.items()}
        if not self._whole:
            for bucket, wanted in self._wanted.items():
                if bucket.owner is not None:
                    bucket.set_reduced_aside(wanted)

    def _gradient_is_there(self, parameter: Tensor) -> None:
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        if self._pass is None:
            if self._has_owners_average(bucket, parameter):
                raise RuntimeError(self._mixed(parameter))
            if self._last_accumulation != (this_pass := number_of_backward_pass()):
                self._last_accumulation = this_pass
                self._accumulated.update(p for p in self._bucket_of if p.requires_grad)
            return
        if parameter not in self._waiting[bucket]:
            raise RuntimeError(
                f"parameter {self._name_of(parameter)} got a gradient twice in one backward pass, and the first "
                "gradient has already been sent to other ranks. Reentrant activation checkpointing does this: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        self._waiting[bucket].remove(parameter)
        while self._next < len(self._buckets) and not self._waiting[self._buckets[self._next]]:
            self._start_next()

    def _start_next(self) -> None:
        bucket, number = self._buckets[self._next], self._next
        self._next += 1
        wanted, marked = self._wanted[bucket], self._marked
        if not wanted:
            return  # the bucket is frozen in this pass, on every rank
        pieces = bucket.take_grads(wanted, marked=marked)
        wait = self._exchange.start_average(pieces, None if self._whole else bucket.owner, number)

        def finish() -> None:
            averages = wait()
            if averages is not None:
                bucket.put_grads(averages, wanted, marked=marked)
            self._reduced(bucket)

        self._in_flight.add(finish)

    def _finish(self) -> None:
        missing = [parameter for waiting in self._waiting.values() for parameter in waiting]
        self._pass = None
        if missing and not self._marked:
            names = sorted(map(self._name_of, missing))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise RuntimeError(
                f"the backward pass gave no gradient to {', '.join(names[:3])}{more}, so their ranks would wait "
                "forever. If parameters are left out on purpose, use ZeROStrategy(find_unused_parameters=True)."
            )
        while self._next < len(self._buckets):
            self._start_next()
        self._in_flight.drain()
        self._accumulated.difference_update(*self._wanted.values())

    def _check_accumulation(self) -> None:
        """Refuse to accumulate into an average that only the owner has, unless it is zero."""
        for parameter, bucket in self._bucket_of.items():
            if parameter.requires_grad and self._has_owners_average(bucket, parameter):
                if parameter.grad is not None and parameter.grad.any():
                    raise RuntimeError(self._mixed(parameter))
                bucket.forget_reduced(parameter)

    def _has_owners_average(self, bucket: Bucket, parameter: Tensor) -> bool:
        return not self._whole and bucket.owner is not None and bucket.is_reduced(parameter)

    def _mixed(self, parameter: Tensor) -> str:
        return (
            f"a backward pass without communication would add to the gradient of {self._name_of(parameter)}, which is "
            "an average over all ranks already. Clear gradients first, or use self.manual_backward(loss) for each loss."
        )
