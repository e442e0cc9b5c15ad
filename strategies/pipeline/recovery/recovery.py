"""Replaces lost workers of a running pipeline: takes snapshots, and repeats the driver's log with new workers."""

from collections.abc import Callable, Sequence

from strategies.launch.rounds import Rounds
from strategies.pipeline.control.client import Failures, RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.recovery.links import LoggedTransport
from strategies.pipeline.recovery.log import Log
from strategies.pipeline.recovery.repairs import RecoverySettings, Repair, Repairs
from strategies.pipeline.recovery.together import Together
from strategies.pipeline.state.carriers import InSlot
from strategies.pipeline.state.snapshots import Snapshots, Whole
from strategies.pipeline.transport.interface import Transport

MOST_LOGGED_BYTES = 2**28
"""The size of the log beyond which a snapshot is taken before it is due."""

Restart = Callable[[Failures, Sequence[InSlot], int], Transport]
"""Starts new workers from the states in slots, and returns the transport that connects the driver with them.

The arguments are the failures of the new session, the slots, and how often the replicas have replaced their workers."""


class Recovery:
    """Replaces lost workers of a pipeline, from :meth:`start` to :meth:`end`.

    Args:
        settings: How many losses are repaired, and how often snapshots are taken.
        failures: The failures of the first session.
        transport: The transport that connects the driver with the first workers.
        remotes: The stages on workers.
        restart: Starts new workers.
        done: The repairs so far. Each repair adds an entry.
        rounds: The store through which the drivers of all replicas agree, if there are several.
    """

    def __init__(
        self,
        settings: RecoverySettings,
        failures: Failures,
        transport: Transport,
        remotes: Sequence[RemoteStage],
        restart: Restart,
        done: list[Repair],
        rounds: Rounds | None = None,
    ) -> None:
        self._settings, self._remotes, self._restart = settings, remotes, restart
        self._log = Log(failures)
        self.transport = LoggedTransport(self._log, transport)
        """The transport of the driver's stage, which stays the same in all sessions."""
        self._snapshots = Snapshots(len(remotes))
        self._repairs = Repairs(settings.max_restarts, self._log, self._kill, self._replace, done)
        self._together = Together(rounds, failures) if rounds is not None else None
        self._num_steps = 0

    def start(self) -> None:
        """Take the first snapshot, and replace lost workers from now on."""
        for remote in self._remotes:
            remote.keep_log(self._log)
        self._repairs.start()
        if self._together is not None:
            self._together.start()
        self._take_snapshot()
        self._wait()

    def end_together(self) -> None:
        """Wait until no other replica needs the workers of this one to replace its own workers."""
        if self._together is not None:
            self._together.end_together(self._log.failures)

    def end(self) -> None:
        """Stop replacing workers. Call this after :meth:`start`, even if that has failed."""
        if self._together is not None:
            self._together.give_up()
        self._repairs.end()
        if self._together is not None:
            self._together.end()

    def close(self) -> None:
        """Release the memory; call this when no worker writes any more."""
        self._snapshots.close()

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the snapshots take on all processes, and the log."""
        return self._snapshots.size_bytes + self._log.size_bytes

    def between_passes(self, num_steps: int) -> None:
        """Take a snapshot if it is due. No pass is under way, and none waits for its backward part.

        Args:
            num_steps: How many steps of optimizers there have been so far.
        """
        is_due = num_steps - self._num_steps >= self._settings.snapshot_every_n_steps
        # In all replicas, snapshots with one number must be of one step. A replica may need its last but one snapshot,
        # because another replica lacks the last one until it has averaged the gradients of the next step.
        is_large = self._log.size_bytes > MOST_LOGGED_BYTES and self._together is None
        if is_due or is_large:
            self._num_steps = num_steps
            self._take_snapshot()
        elif self._together is None:
            self._forget()

    def _take_snapshot(self) -> None:
        snapshots = self._snapshots
        if snapshots.is_under_way or self._usable()[-1:] != snapshots.whole()[-1:]:
            self._wait()
        with self._log.lock:  # otherwise new workers could begin without the mark
            self._forget()
            ordered = snapshots.order()
            for remote, slot in zip(self._remotes, snapshots.slots[ordered.place], strict=True):
                remote.send(StageCommands.snapshot, ordered.number, slot.address)
            self._log.mark(ordered.number)

    def _forget(self) -> None:
        """Drop the part of the log from before the last usable snapshot."""
        if usable := self._usable():
            self._log.forget_before(usable[-1].number)

    def _usable(self) -> list[Whole]:
        """Return the snapshots from which new workers can start.

        Every worker has such a snapshot, and every question asked before it has been answered.
        """
        return [each for each in self._snapshots.whole() if self._log.can_begin_at(each.number)]

    def _wait(self) -> None:
        for answer in [remote.ask(StageCommands.num_kept) for remote in self._remotes]:
            answer.wait()

    def _kill(self) -> None:
        for remote in self._remotes:
            remote.process.kill()

    def _replace(self, failures: Failures, lost: str) -> int:
        """Start new workers from the last usable snapshot, and repeat the log since then."""
        usable = {whole.number: whole for whole in self._usable()}
        if not usable:
            raise RuntimeError("the first snapshot was not complete")
        number, num_rounds = max(usable), 0
        if self._together is not None:
            number = self._together.agree(lost, list(usable), self._log.failures, failures)
            num_rounds = self._together.round
        slots = [InSlot(slot.address, number) for slot in self._snapshots.slots[usable[number].place]]
        self.transport.connect(self._restart(failures, slots, num_rounds))
        return self._log.run_again(number)
