"""Replaces lost workers of a running pipeline: takes snapshots, and repeats the driver's log with new workers.

To verify a step, it repeats the log in the same way, with the same workers.
"""

import gc
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from strategies.common.errors import PeerFailed
from strategies.launch.rounds import Rounds
from strategies.pipeline.control.client import Answer, Failures, RemoteStage, wait_for_any
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.recovery.log import Log, NotRepeated
from strategies.pipeline.recovery.logged_transport import LoggedTransport
from strategies.pipeline.recovery.repairs import Recovery, Repair, Repairs, Replacement
from strategies.pipeline.recovery.together import InStep, Together
from strategies.pipeline.recovery.verification import check_repeated
from strategies.pipeline.state.carriers import InSlot
from strategies.pipeline.state.snapshots import Snapshot, Snapshots
from strategies.pipeline.transport.interface import Transport
from strategies.pipeline.transport.journal import Comparison
from strategies.pipeline.transport.slots import SlotAddress

MOST_LOGGED_BYTES = 2**28
"""If the log exceeds this size, a snapshot is taken before it is due."""

_KEPT = "output of the model that was computed with gradients is kept somewhere, and no backward pass has used it"
_WAY_OUT = "Detach the output, drop it at the end of the step, or compute it under torch.no_grad()."

Restart = Callable[[Failures, Sequence[InSlot], int], Transport]
"""Starts new workers from the states in slots, and returns the transport that connects the driver with them.

The arguments are the failures of the new session, the slots, and how often the pipelines have replaced their workers.
"""


class Recoverer:
    """Replaces lost workers of a pipeline, from :meth:`start` to :meth:`end`.

    Args:
        settings: The maximum number of repairs, and the interval of snapshots.
        failures: The failures of the first session.
        transport: The transport that connects the driver with the first workers.
        remotes: The stages on workers.
        slots: The two slots of each worker.
        restart: Starts new workers.
        done: The repairs so far. Each repair adds an entry.
        rounds: The store through which the drivers of all pipelines agree, if there are several.
        in_step: The pipelines that divide layers or parameters with this one, if there are any.
    """

    def __init__(
        self,
        settings: Recovery,
        failures: Failures,
        transport: Transport,
        remotes: Sequence[RemoteStage],
        slots: Sequence[Sequence[SlotAddress]],
        restart: Restart,
        done: list[Repair],
        rounds: Rounds | None = None,
        in_step: InStep | None = None,
    ) -> None:
        self._settings, self._remotes, self._restart = settings, remotes, restart
        self._log = Log(failures)
        self.transport = LoggedTransport(self._log, transport, [remote.description for remote in remotes])
        """The transport of the driver's stage, which stays the same in all sessions."""
        self._snapshots = Snapshots(slots)
        self._answers: list[Answer[None]] = []
        """The answers of the workers to the last order of a snapshot."""
        self._repairs = Repairs(settings.max_restarts, self._log, self._kill, self._replace, self.transport.fail, done)
        self._together, self._in_step = None, in_step
        if rounds is not None:
            self._together = Together(rounds, failures, in_step.ranks if in_step is not None else [rounds.rank])
        self._num_steps = self._steps_at_snapshot = self._num_updates = 0
        self._num_further_points = 0
        """How often :meth:`verify` has verified a step, or :meth:`after_loading` was called, as in all pipelines."""
        self._has_warned = False
        self._verified_from: Snapshot | None = None
        """The snapshot from which the present step is computed a second time; ``None`` if it is not verified."""

    def start(self) -> None:
        """Take the first snapshot, and replace lost workers from now on."""
        for remote in self._remotes:
            remote.keep_log(self._log)
        self._repairs.start()
        if self._together is not None:
            self._together.start()
        first = self._take_snapshot()
        self._complete()
        self._begin(first)

    def end_together(self) -> None:
        """Wait until no other pipeline needs the workers of this pipeline to replace its own workers."""
        if self._together is not None:
            self._together.end_together(self._log.failures)

    def end(self) -> None:
        """Stop replacing workers. Call this after :meth:`start`, even if :meth:`start` has failed."""
        if self._together is not None:
            self._together.give_up()
        self._repairs.end()
        if self._together is not None:
            self._together.end()

    @property
    def log_bytes(self) -> int:
        """The memory of the log, in bytes."""
        return self._log.size_bytes

    def between_passes(self, num_steps: int, unfinished: Collection[int], *, is_due: bool = False) -> None:
        """Take a snapshot if it is due. No pass is under way. Pipelines in step with this one call this together.

        Args:
            num_steps: The number of optimizer steps so far.
            unfinished: The passes that wait for their backward part. No snapshot can be taken while there are any.
            is_due: Whether a snapshot is due in any case. Equal in all pipelines.

        Raises:
            ComputedWrongly: If a step is verified here, and a stage computes differently the second time.
            RuntimeError: See :meth:`_waits_and_is_large`.
        """
        every, repairs = self._settings.snapshot_every_n_steps, self._settings.max_restarts > 0
        if self._verified_from is not None:
            is_regular = is_verification = is_due or num_steps > self._steps_at_snapshot
        else:
            is_verification = self._is_next_verified(num_steps)
            is_due = is_due or num_steps // every > self._steps_at_snapshot // every
            is_regular = is_verification or (repairs and is_due)
        waits, is_large = self._waits_and_is_large(unfinished, is_regular=is_regular, is_verification=is_verification)
        if waits:
            return
        self._count(num_steps)
        self._report()
        if self._verified_from is not None:
            if is_regular or (is_large and self._may_take_extra()):
                self._verify(self._verified_from, is_extra=not is_regular)
            return
        if is_regular or (repairs and is_large and self._may_take_extra()):
            self._begin(self._take_snapshot(is_extra=not is_regular))
        elif not repairs:
            self._log.drop()
        elif self._together is None:
            with self._log.lock:
                self._forget()

    def before_evaluation(self, num_steps: int, unfinished: Collection[int]) -> None:
        """Take a snapshot if optimizers have stepped since the last one and there are other replicas.

        While a replica evaluates, it may take more snapshots only if the replicas have met in no step since the last.
        Pipelines that are all in step take all snapshots together, and need none here.

        Args:
            num_steps: The number of optimizer steps so far.
            unfinished: See :meth:`between_passes`.
        """
        if self._has_others and num_steps > self._steps_at_snapshot:
            self.between_passes(num_steps, unfinished, is_due=True)

    def after_loading(self, num_steps: int, unfinished: Collection[int]) -> None:
        """Take a snapshot, and wait until it is complete, because stages have read values from files.

        The files may be replaced or deleted after this, so they must not be read a second time. All pipelines call this
        at the same points.

        Args:
            num_steps: The number of optimizer steps so far.
            unfinished: See :meth:`between_passes`.
        """
        self._num_further_points += 1
        self.between_passes(num_steps, unfinished, is_due=True)
        self._complete()

    def _waits_and_is_large(
        self, unfinished: Collection[int], *, is_regular: bool, is_verification: bool
    ) -> list[bool]:
        """Return whether no snapshot can be taken, because a pass waits for its backward part, and if one is urgent.

        Args:
            unfinished: The passes that wait for their backward part.
            is_regular: Whether a snapshot is due that all replicas take at this point.
            is_verification: Whether a verified step begins or ends at this point, in all replicas.

        Raises:
            RuntimeError: If a pass waits although the other replicas begin or end a verified step. The second
                computation of a replica exchanges values with that of the others.
        """
        is_large = self._log.size_bytes > MOST_LOGGED_BYTES
        if unfinished and ((is_large and not self._has_warned) or (is_regular and self._has_others)):
            gc.collect()  # the output of the pass may only belong to a cycle of objects
        if unfinished and is_verification and self._has_others:
            raise RuntimeError(
                f"an {_KEPT}, so this replica cannot verify the step that all replicas verify. {_WAY_OUT}"
            )
        if unfinished and (is_large or (is_regular and self._has_others)):
            self._warn_of_kept_output()
        return self._any(bool(unfinished), is_large)

    def _warn_of_kept_output(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"An {_KEPT}. As long as it is kept, no snapshot of the workers can be taken, so the log of what is "
                f"repeated after a loss grows (it has {self._log.size_bytes / 2**20:.0f} MiB now), and no step is "
                f"verified. Replicas can be repaired only if all of them take snapshots of the same step. {_WAY_OUT}",
                stacklevel=2,
            )

    @property
    def _has_others(self) -> bool:
        """Whether there are replicas that are not in step with this pipeline."""
        return self._together is not None and self._together.has_others

    def _any(self, *flags: bool) -> list[bool]:
        """Return whether each flag is set in this pipeline or in one that is in step with it. Collective for these."""
        return [*flags] if self._in_step is None else self._in_step.any(flags)

    def _may_take_extra(self) -> bool:
        """Return whether a snapshot may be taken that replicas that are not in step with this one do not take.

        Pipelines in step with this one call this together.

        This loses the last but one snapshot, which is needed as long as another pipeline has not completed the last
        one. Other replicas can start from the last one if they have exchanged no values since.
        """
        last, together = self._snapshots.ordered[-1], self._together
        if together is None:
            return True
        can = self._log.can_begin_at(last.number)
        if together.has_others:
            can = can and not self._log.has_met_since(last.number) and together.all_have(last.period)
        return not any(self._any(not can))

    def _report(self) -> None:
        """Let the other pipelines know if the last snapshot has been completed."""
        last, together = self._snapshots.ordered[-1], self._together
        with self._log.lock:
            if together is not None and last.period > together.reported and self._log.can_begin_at(last.number):
                together.reported = last.period

    def verify(self, num_steps: int, unfinished: Collection[int]) -> None:
        """Compute the present step a second time and compare, if this step is to be verified.

        Pipelines in step with this one call this together.

        Args:
            num_steps: The number of optimizer steps so far.
            unfinished: See :meth:`between_passes`.

        Raises:
            ComputedWrongly: If a stage computes differently the second time.
            RuntimeError: See :meth:`_waits_and_is_large`.
        """
        if self._verified_from is None:
            return
        if self._waits_and_is_large(unfinished, is_regular=True, is_verification=True)[0]:
            self._warn_of_kept_output()  # what follows uses values that have not been verified
            return
        self._num_further_points += 1
        self._count(num_steps)
        self._verify(self._verified_from)

    def _count(self, num_steps: int) -> None:
        """Note how many steps optimizers have made; all steps since the last call count as one update."""
        self._num_updates += num_steps > self._num_steps
        self._num_steps = num_steps

    def _is_next_verified(self, num_steps: int) -> bool:
        """Return whether the step that begins now is to be computed a second time."""
        every, num_updates = self._settings.verify_every_n_steps, self._num_updates + (num_steps > self._num_steps)
        return every > 0 and (num_updates + 1) % every == 0

    def _begin(self, snapshot: Snapshot) -> None:
        """Begin a step, or go on with it, just after a snapshot."""
        self._verified_from = snapshot if self._is_next_verified(self._num_steps) else None
        if self._verified_from is not None:
            for remote in self._remotes:
                remote.send(StageCommands.start_journal)

    def _verify(self, begin: Snapshot, *, is_extra: bool = False) -> None:
        self._verified_from = None
        end = self._take_snapshot(is_extra=is_extra)
        self._complete()
        failures, found = self._log.failures, None
        try:
            # On another thread: Ctrl-C is raised when the second computation is over. Until then, the workers have an
            # earlier state than the driver.
            with ThreadPoolExecutor(1, "relay-verify") as thread:
                found = thread.submit(self._compute_again, begin, is_extra=is_extra).result()
        except Exception as error:
            self._log.overcome(failures, error)
        if found is None:
            warnings.warn("A step could not be verified, because a worker was lost meanwhile.", stacklevel=2)
        else:
            check_repeated(self._remotes, *found)
        self._begin(end)

    def _compute_again(self, begin: Snapshot, *, is_extra: bool) -> tuple[list[Comparison], list[NotRepeated]] | None:
        """Make the stages go back to a snapshot, repeat the log since then, and compare.

        Returns:
            The comparison of each stage, and the values that this process received and that were different; ``None`` if
            workers have been replaced meanwhile.
        """
        with self._log.lock:
            # Workers exchange values with other pipelines in the second computation, too. If workers have been
            # replaced that had this snapshot, one pipeline may have given up the second computation, so all do.
            if self._together is not None and self._together.have_returned_to(begin, is_extra=is_extra):
                return None
            differences: list[NotRepeated] = []
            for remote, address in zip(self._remotes, self._snapshots.addresses(begin), strict=True):
                remote.ask_unlogged(StageCommands.start_journal, (begin.number, address))
            self._log.run_again(begin.number, differences)
            asked, comparisons = [remote.ask_unlogged(StageCommands.compare) for remote in self._remotes], []
            for each in asked:
                wait_for_any(each, self._log.failures.first)
                if not each.done():
                    raise PeerFailed("another process has failed while a step was verified")
                comparisons.append(each.result())
            return comparisons, differences

    def _take_snapshot(self, *, is_extra: bool = False) -> Snapshot:
        """Order a snapshot, which each worker writes when it reaches this order.

        Pipelines in step with this one call this together.
        """
        self._complete()
        self._any(True)  # the pipelines in step with this one have completed the last snapshot, too
        self._steps_at_snapshot = self._num_steps
        with self._log.lock:  # otherwise a repair could start between the order and the mark
            self._forget()
            period = self._num_steps + self._num_further_points
            ordered = self._snapshots.order(next(reversed(self._usable()), None), period, is_extra=is_extra)
            addresses = self._snapshots.addresses(ordered)
            self._answers = [
                remote.ask(StageCommands.snapshot, ordered.number, address)
                for remote, address in zip(self._remotes, addresses, strict=True)
            ]
            self._log.mark(ordered.number)
        return ordered

    def _complete(self) -> None:
        """Wait until the last snapshot is complete."""
        for answer in self._answers:
            answer.wait()

    def _forget(self) -> None:
        """Drop the part of the log before the last usable snapshot."""
        if usable := self._usable():
            self._log.forget_before(usable[-1].number)

    def _usable(self) -> list[Snapshot]:
        """Return the snapshots from which new workers can start, in order.

        Every worker has completed such a snapshot, and every question before it has been answered. New workers that
        have started from an earlier snapshot write the later ones again.
        """
        return [each for each in self._snapshots.ordered if self._log.can_begin_at(each.number)]

    def _kill(self) -> None:
        for remote in self._remotes:
            remote.process.kill()

    def _replace(self, failures: Failures, lost: str) -> Replacement:
        """Start new workers from the last usable snapshot, and repeat the log since then."""
        usable = self._usable()
        if not usable:
            raise RuntimeError("the first snapshot was not complete")
        begin, num_rounds = usable[-1], 0
        if self._together is not None:
            begin = self._together.agree(lost, usable, self._log.failures, failures)
            num_rounds = self._together.round
        slots = [InSlot(address, begin.number) for address in self._snapshots.addresses(begin)]
        self.transport.connect(self._restart(failures, slots, num_rounds))
        return Replacement(time.perf_counter(), self._log.run_again(begin.number))
