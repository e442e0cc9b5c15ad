"""Replicas of a pipeline that go back to a snapshot together, as the driver of one of them sees it.

    driver 0   step 7   ✗ a worker is lost ── announces ──────────── agrees ── step 6' ── step 7' ──▶
                                                  │                     │
    driver 1   step 7 or 8, or a validation ── learns of it ───────── agrees ── step 6' ── step 7' ──▶

A driver learns of it while it runs a step, waits for stages, or waits for the other drivers. Whatever else it does
between two steps is not disturbed, unless its own workers fail.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from strategies.common.errors import WorkerLost
from strategies.common.patching import replaced
from strategies.launch.rounds import Disagreement, MemberGone, Rounds
from strategies.pipeline.control.client import Failures
from strategies.pipeline.driver import Pipeline

_LOOK_SECONDS = 0.03
_DIAGNOSIS_SECONDS = 3.0


class Together:
    """The other drivers of one ``fit``.

    Args:
        connect: Connects to a store that the drivers share.
        rank: The number of this replica.
        size: The number of replicas.
        timeout_seconds: How long another driver may take to come to a collective, or to go back.
        pipeline: The pipeline of this replica.
        always: Whether a loss is a failure of this pipeline at any time.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        rank: int,
        size: int,
        timeout_seconds: float,
        pipeline: Pipeline,
        *,
        always: bool = False,
    ) -> None:
        self._rounds = Rounds(connect(), rank, size, timeout_seconds)
        self._rank, self._pipeline, self._connect = rank, pipeline, connect
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._is_listening = always
        self._told: Failures | None = None
        self._thread = threading.Thread(target=self._watch, name="relay-replicas-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take no part in further rounds."""
        self._ended.set()
        self._thread.join()
        with suppress(dist.DistError):  # rank 0 is gone, and this process is about to end
            self._rounds.leave()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within this, a worker that another replica has lost is a failure of this pipeline; may be nested."""
        before, self._is_listening = self._is_listening, True
        try:
            yield
        finally:
            self._is_listening = before

    @property
    def round(self) -> int:
        """How often all have gone back."""
        return self._rounds.number

    def announce(self, why: str) -> str:
        """Tell the other drivers that all have to go back; return why, as the first one has told it."""
        return self._rounds.announce(f"In replica {self._rank}: {why}")

    def agree(self, numbers: Sequence[int]) -> int | None:
        """Return the largest number that all drivers have given, when each has given those of its snapshots.

        Raises:
            RuntimeError: If another driver has ended its run, or starts ``fit`` again.
        """
        with self._lock:
            return self._rounds.agree(numbers, "snapshots")

    def agree_on_checkpoint(self, error: WorkerLost, numbers: Sequence[int]) -> int | None:
        """Return the largest number that all drivers have given, when each is about to start ``fit`` again.

        Args:
            error: Why.
            numbers: Those of the checkpoints that this driver knows of.

        Raises:
            WorkerLost: If another driver has ended its run.
        """
        with self._lock:
            while True:
                self.announce(str(error))
                try:
                    return self._rounds.agree(numbers, "checkpoints")
                except Disagreement:  # another one has tried to go back to a snapshot, and learns of this now
                    continue
                except MemberGone as gone:
                    raise WorkerLost(f"{error}\n{gone}") from error

    def pass_gate(self) -> None:
        """Wait until all drivers are here.

        Raises:
            WorkerLost: If a replica has lost a worker, so that no driver passes.
        """
        failures = self._pipeline.failures
        if not self._rounds.pass_gate(lambda: failures.any and not failures.raised):
            if failures.any:
                failures.raise_cause()
            raise WorkerLost(self._why())

    def _why(self) -> str:
        """Return why another driver goes back. It announces that when it knows how its worker has ended."""
        for _ in range(round(_DIAGNOSIS_SECONDS / _LOOK_SECONDS)):
            if (why := self._rounds.announced()) is not None:
                return why
            time.sleep(_LOOK_SECONDS)
        return "another replica has lost a worker, or failed"

    def _watch(self) -> None:
        store = self._connect()
        while not self._ended.wait(_LOOK_SECONDS):
            number = self.round
            try:
                why = self._rounds.announced(store)
            except dist.DistError:  # rank 0 is gone, and this process is about to end
                return
            if why is None:
                continue
            with self._lock:
                failures = self._pipeline.failures
                if self._is_listening and number == self.round and failures is not self._told:
                    self._told = failures
                    failures.add(WorkerLost(why), consequence=False)


def gather_within(model: nn.Module, gather: Callable[..., list[Tensor]]) -> list[Callable[[], Any]]:
    """Make metrics of a model exchange their states by a function, unless the user has given one."""
    metrics = [module for module in model.modules() if isinstance(module, Metric) and module.dist_sync_fn is None]
    return [replaced(metric, "dist_sync_fn", gather) for metric in metrics]


def gathering_after(before: Callable[[], None]) -> Callable[..., list[Tensor]]:
    """Return a function that exchanges the states of metrics as torchmetrics does, and calls ``before`` first."""

    def gather(result: Tensor, group: Any | None = None) -> list[Tensor]:
        before()
        return gather_all_tensors(result, group)

    return gather
