"""Training steps that are run again after a worker is lost.

    step           4       5       6       7
    snapshot       ▲               ▲
                                           ✗ a worker is lost
                                   6'      7'

Every process goes back to the last snapshot (here, that before step 6). The steps since then run again, each with the
batch, the random numbers and the attributes of the model that it began with. Callbacks and loggers are told nothing of
steps that are over, and of the lost one what they have not been told before. A step must give the same values each
time, which is checked by the loss.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from strategies.common.errors import WorkerLost
from strategies.common.patching import replaced
from strategies.lightning.checks import as_misconfiguration
from strategies.lightning.compat import (
    DummyLogger,
    LightningModule,
    MisconfigurationException,
    PassThroughProfiler,
    Trainer,
    is_overridden,
    rank_zero_warn,
)
from strategies.lightning.hooks import (
    Undo,
    around_hooks_of_steps,
    around_log,
    around_steps,
    overridden_between_steps,
)
from strategies.lightning.recovery.events import Events
from strategies.lightning.recovery.marks import Mark, Marks
from strategies.lightning.recovery.moment import Moment, Moments
from strategies.lightning.recovery.together import Together
from strategies.lightning.recovery.values import Remembered
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.stage.layers import Seeds

R = TypeVar("R")

_BEFORE_STEPS = 0
"""The number of the snapshot before the first step, if there is a sanity validation; steps are counted from 1."""

_MAX_LOSSES = 3
"""Number of losses within one step that ends the run: the step itself may be the reason."""


_WAY_OUT = (
    "Keep such values in tensors of at most 64 MiB, numbers, strings, lists, sets, dicts or objects of these, or "
    "register a larger tensor as a buffer."
)


class _Unrecoverable(WorkerLost):
    """Raised if a worker is lost and steps cannot run again."""


@dataclass(frozen=True)
class Recovery:
    """A worker was lost, and training went on from a snapshot.

    Attributes:
        time: When, in seconds since 1970.
        lost: Which worker was lost, and how.
        num_repeated: How many steps that were over have run again.
        seconds: How long that took.
    """

    time: float
    lost: str
    num_repeated: int
    seconds: float


@dataclass
class _RepeatableStep:
    """A training step: one batch.

    Attributes:
        run: Runs it.
        name: Epoch and number of the batch, for messages.
        follows: Whether the steps before it and ``begin`` give what it begins with.
        begin: What it begins with.
        batch: The values of the batch.
        snapshot: The number of the snapshot made just before it, if there is one.
        results: The losses that it returned or ran backward, by which a run of it again is checked.
    """

    run: Callable[[], Any]
    name: str
    follows: bool
    begin: Moment
    batch: Remembered
    snapshot: int | None = None
    results: Sequence[Any] = ()


class StepRecovery:
    """Runs the training steps of one ``fit``, makes snapshots, and goes back to the last one when a worker is lost.

    Args:
        every_n_steps: Number of optimizer steps after which a snapshot is made.
        trainer: The Trainer.
        model: The model.
        pipeline: The running pipeline.
        seeds: Source of the layers' random numbers.
        others: Other objects that change in a step, by their names.
        is_collecting: Whether what is logged now is collected, and logged later for the whole batch.
        finish_saving: Waits for a checkpoint that is being written in the background, and raises its error.
        recovered: Called after all stages have gone back to a snapshot.
        together: The other replicas, if there are several.
    """

    def __init__(
        self,
        every_n_steps: int,
        trainer: Trainer,
        model: LightningModule,
        pipeline: Pipeline,
        *,
        seeds: Seeds,
        others: Mapping[str, Any],
        is_collecting: Callable[[], bool],
        finish_saving: Callable[[], None],
        recovered: Callable[[], None],
        together: Together | None = None,
    ) -> None:
        self._every_n_steps = every_n_steps
        self._trainer, self._model, self._pipeline = trainer, model, pipeline
        self._moments, self._marks = Moments(trainer, model, pipeline, seeds, others), Marks(model, pipeline)
        self._is_collecting, self._finish_saving, self._recovered = is_collecting, finish_saving, recovered
        self._events = Events()
        self._steps: list[_RepeatableStep] = []
        self._is_running, self._have_changed_batches = False, False
        self._together = together
        self._num_steps = self._num_gates = 0
        self._last_global_step = 0
        self._epoch: int | None = None
        self._mark_after: Mark | None = None
        self._may_be_meddled_with = self._is_meddled_with = False
        self._has_warned = self._has_warned_of_changes = False
        self._losses: list[Tensor] = []
        self._undo_hooks: list[Undo] = []
        self._followed: set[int] = set()
        self.recoveries: list[Recovery] = []
        """Those so far."""

    def follow(self) -> Iterator[Undo]:
        """Run the steps of Lightning's loops from now on; return what ends that."""
        yield from around_steps(self._trainer, self._run)
        yield replaced(self._pipeline, "on_call", self._events.note)
        yield self._unfollow_callbacks

    def _unfollow_callbacks(self) -> None:
        for undo in reversed(self._undo_hooks):
            undo()
        self._undo_hooks.clear()
        self._followed.clear()

    def note(self) -> None:
        """Count the return of ``training_step`` as an event."""
        self._events.note()

    # A step

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a training step, again if need be."""
        follows = self._is_unchanged(with_gradients=self._adds_to_gradients(args))
        is_changed = bool(self._steps or self._mark_after is not None) and not follows
        if (
            is_changed
            and self._steps
            and (self._mark_after is None or self._mark_after.balance == list(self._pipeline.balance))
        ):
            self._is_meddled_with = True  # for good; before the strategy moves layers, it waits by itself
        self._mark_after = None  # it would keep states of optimizers that the step replaces
        is_due = self._is_due(args) or not follows
        step = self._step(function, args, follows)
        changes_batch = self._moments.batch(args, copies=False).changed
        self._num_steps += 1
        self._events.begin_step()
        self._steps.append(step)

        def attempt(lost: str) -> Any:
            if lost:
                self._stop_profiling()
                self._repeat_from_snapshot(step.begin, self._steps[:-1], lost)
                step.batch.restore()
            if is_due and step.snapshot is None:
                self._snapshot(step)
                if is_changed:
                    self._pipeline.wait()  # going back to the snapshot before would lose what has been changed since
            result = self._run_once(step.run)
            if self._is_meddled_with or self._ends_interval():
                self._pipeline.wait()
            if self._ends_interval():
                self._pass_gate()  # what follows, with no step after it, is not disturbed by a loss in another replica
            return result

        self._is_running = True
        try:
            result = self._repeated(attempt, f"{step.name} has lost workers")
        finally:
            self._is_running = False
        step.results = self._results_of(result)
        self._have_changed_batches |= bool(changes_batch())
        self._mark_after = self._marks.now(reads_values=self._may_be_meddled_with)
        self._warn_of_what_changes(step)
        return result

    def note_loss(self, loss: Tensor) -> None:
        """The backward pass of a loss begins."""
        self._losses.append(loss.detach().clone())

    def _results_of(self, result: Any) -> Sequence[Any]:
        """Return what tells whether a step has given the same when it is run again.

        Without a loss, which only manual optimization can do without, these are the weights and gradients here.
        """
        losses, self._losses = self._losses, []
        loss = result.get("loss") if isinstance(result, Mapping) else None
        if isinstance(loss, Tensor):
            losses.append(loss.detach().clone())
        return losses or [self._marks.values()]

    def _repeated(self, attempt: Callable[[str], R], what: str) -> R:
        """Call ``attempt`` until no worker is lost, with the last loss or ``""``; return its result."""
        lost, num_losses = "", 0
        while True:
            try:
                with nullcontext() if self._together is None else self._together.listening():
                    return attempt(lost)
            except _Unrecoverable as error:
                raise WorkerLost(str(error)) from error.__cause__ or error.__context__
            except WorkerLost as error:
                num_losses += 1
                if self._trainer.received_sigterm:
                    raise
                if num_losses == _MAX_LOSSES:
                    raise WorkerLost(f"{error}\n{what} {num_losses} times.") from error
                lost = str(error)

    def _step(self, function: Callable[..., Any], args: Sequence[Any], follows: bool) -> _RepeatableStep:
        trainer: Any = self._trainer
        name = f"Batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}"
        batch = self._moments.batch(args, copies=self._have_changed_batches or not self._steps)
        return _RepeatableStep(partial(function, *args), name, follows, self._moments.now(), batch)

    def _stop_profiling(self) -> None:
        """Tell the profiler that a step of an optimizer under manual optimization has ended, by an error."""
        progress = self._trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        if progress.ready > progress.completed:
            cast(Any, self._trainer).profiler.stop("optimizer_step")

    def _run_once(self, run: Callable[[], Any], *, is_repeated: bool = False) -> Any:
        self._follow_callbacks()
        self._losses = []
        trainer: Any = self._trainer
        with ExitStack() as within:
            loggers, silence_ends = trainer.loggers, None
            if loggers and (is_repeated or self._events.has_heard):
                trainer.loggers = [DummyLogger() for _ in loggers]
                silence_ends = partial(setattr, trainer, "loggers", loggers)
                within.callback(silence_ends)
            if is_repeated:
                within.callback(setattr, trainer, "profiler", trainer.profiler)
                trainer.profiler = PassThroughProfiler()
            within.callback(self._events.end_run)
            self._events.begin_run(is_repeated=is_repeated, on_end_of_silence=silence_ends)
            within.callback(around_log(self._model, self._log))
            return run()

    def _log(self, log: Callable[[], None]) -> None:
        """``self.log`` of the model within a step."""
        if self._is_collecting():
            log()
        else:
            self._tell(log)

    def _follow_callbacks(self) -> None:
        for callback in cast(Any, self._trainer).callbacks:
            if id(callback) not in self._followed:
                self._followed.add(id(callback))
                self._undo_hooks += around_hooks_of_steps(callback, self._call_hook)

    def _call_hook(self, name: str, hook: Callable[..., None], *args: Any) -> None:
        """Call a hook of a callback between the training step and the step of the optimizer."""

        def call() -> None:
            before = self._marks.in_step()
            hook(*args)
            if self._marks.in_step() != before:
                raise MisconfigurationException(
                    f"{name} changes gradients or weights, but snapshot_every_n_steps={self._every_n_steps}: when a "
                    "worker is lost, steps run again without callbacks that have already been called. Do this in the "
                    "hook of the same name of the LightningModule, or leave snapshot_every_n_steps out."
                )

        self._tell(call)

    def _tell(self, tell: Callable[[], None]) -> None:
        """Run an event of the step, unless an earlier run of the step has delivered it."""

        def tell_and_check() -> None:
            before = self._num_gates
            try:
                tell()
            except WorkerLost as error:
                if self._num_gates > before:
                    raise _Unrecoverable(
                        f"{error}\nA callback had already exchanged values with the other replicas, which do not "
                        "repeat the exchange, so the step cannot be run again."
                    ) from error
                raise
            self._num_gates = before  # nobody hears of this event again, in no replica

        self._events(tell_and_check)

    # Snapshots

    def _begin(self) -> None:
        """Make the snapshot to which the run goes back if a worker is lost in the sanity validation."""
        self._moments.look_again()
        with as_misconfiguration():
            self._pipeline.snapshot(_BEFORE_STEPS, with_grads=True)
        self._mark_after = self._marks.now(reads_values=False)

    def _is_due(self, args: Sequence[Any]) -> bool:
        """Return whether a snapshot is to be made before the step that begins."""
        trainer: Any = self._trainer
        epoch, before = trainer.current_epoch, self._epoch
        self._epoch = epoch
        if epoch != before:
            self._moments.look_again()
            self._may_be_meddled_with = overridden_between_steps(trainer, self._model)
        if epoch != before or not self._steps or self._pipeline.last_snapshot is None:
            return True
        return trainer.global_step - self._last_global_step >= self._every_n_steps and self._begins_gradients(args)

    def _begins_gradients(self, args: Sequence[Any]) -> bool:
        """Return whether the step that begins clears the gradients, or manages them itself (manual optimization)."""
        if not self._model.automatic_optimization:
            return True
        _, batch_idx, *_ = args
        return bool(batch_idx % self._trainer.accumulate_grad_batches == 0)

    def _adds_to_gradients(self, args: Sequence[Any]) -> bool:
        """Return whether the step that begins may use the gradients that there are."""
        clears = self._model.automatic_optimization and not is_overridden("optimizer_zero_grad", self._model)
        return not (clears and self._begins_gradients(args))

    def _snapshot(self, step: _RepeatableStep) -> None:
        model, trainer = self._model, cast(Any, self._trainer)
        loop = trainer.fit_loop.epoch_loop
        is_first = loop.batch_idx % trainer.accumulate_grad_batches == 0
        clears = model.automatic_optimization and is_first and not is_overridden("optimizer_zero_grad", model)
        number = self._num_steps  # the same in all replicas
        with as_misconfiguration():
            self._pipeline.snapshot(number, with_grads=not clears)
        step.snapshot, self._last_global_step = number, trainer.global_step
        numbered = [place for place, each in enumerate(self._steps) if each.snapshot is not None]
        del self._steps[: numbered[-2] if len(numbered) > 1 else numbered[0]]
        if not self._has_warned:
            self._has_warned = True
            self._warn()

    def _warn(self) -> None:
        unknown = [f"{name} {why}" for name, why in self._moments.taken_as_unchanged.items()]
        if unknown:
            rank_zero_warn(
                f"snapshot_every_n_steps={self._every_n_steps}: when a worker is lost, training steps run again. "
                f"Training steps are assumed not to change these attributes: {'; '.join(unknown)}."
            )

    def _warn_of_what_changes(self, step: _RepeatableStep) -> None:
        """Say after the first step whether it has changed what cannot be restored, so that no loss can be repaired."""
        if self._has_warned_of_changes:
            return
        self._has_warned_of_changes = True
        if changed := [*step.begin.changed(), *step.batch.changed()]:
            rank_zero_warn(
                f"snapshot_every_n_steps={self._every_n_steps}: if a worker is lost, training will end as it does "
                "without snapshots, because the first step has changed something that cannot be restored: "
                f"{', '.join(changed)}. "
                f"{_WAY_OUT}"
            )

    def _is_unchanged(self, *, with_gradients: bool) -> bool:
        """Return whether all is as the last training step has left it."""
        before = self._mark_after
        return before is not None and before.equals(
            self._marks.now(reads_values=before.has_values), with_gradients=with_gradients
        )

    def _ends_interval(self) -> bool:
        """Return whether the weights are read before the next step, or the run ends."""
        trainer = self._trainer
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return bool(is_last or 0 <= trainer.max_steps <= trainer.global_step)

    # Recovery

    def settle(self, *, together: bool = False) -> None:
        """Wait until every stage has done all steps; if a worker was lost, go back and run steps again.

        Called before something looks at the weights: a validation, a checkpoint, the end of the run.

        Args:
            together: Whether all replicas call this, so that none goes on before all stages of all have done the steps.
        """

        def wait() -> None:
            self._pipeline.wait()
            if together:
                self._pass_gate()

        if self._can_settle():
            self._between_steps(lambda _: None, wait)

    def meet(self) -> None:
        """Wait until all replicas are about to do a collective operation, which no replica leaves before its end."""
        if self._can_settle():
            self._between_steps(lambda _: None, self._pass_gate)
        else:
            self._pass_gate()

    def _pass_gate(self) -> None:
        if self._together is not None:
            self._together.pass_gate()
            self._num_gates += 1

    def read(self, function: Callable[[], R]) -> R:
        """Call a function that reads the state of stages, again if a worker is lost."""
        return self._between_steps(lambda _: None, function) if self._can_settle() else function()

    def evaluate(self, function: Callable[..., R], *args: Any) -> R:
        """Run ``validation_step``, again if a worker is lost."""
        if self._trainer.sanity_checking and self._mark_after is None and not torch.is_inference_mode_enabled():
            self._begin()
        if not self._can_settle():
            return function(*args)
        assert self._mark_after is not None
        if not self._mark_after.has_values and self._is_unchanged(with_gradients=False):
            self._mark_after = self._marks.now(reads_values=True)  # validation_step may change values through .data
        now, batch = self._moments.now(), self._moments.batch(args, copies=False)
        self._events.begin_step()

        def check(lost: str) -> Moment:
            if batch.changed():
                raise _Unrecoverable(f"{lost}\nvalidation_step changes its batch in place, so it cannot run again.")
            return now

        def run() -> R:
            batch.restore()
            return cast(R, self._run_once(partial(function, *args)))

        return self._between_steps(check, run)

    def _can_settle(self) -> bool:
        return self._mark_after is not None and not self._is_running and not torch.is_inference_mode_enabled()

    def _between_steps(self, moment: Callable[[str], Moment | None], run: Callable[[], R]) -> R:
        """Run code that does not train; if a worker is lost while it runs, restore the current state of training.

        Args:
            moment: Called with what was lost. Returns the moment to go back to, or ``None`` if that is now; raises an
                error if nobody can.
            run: What to run.
        """
        now: Moment | None = None

        def attempt(lost: str) -> R:
            nonlocal now
            if lost:
                if now is None:
                    self._check_unchanged(lost)
                    now = moment(lost) or self._moments.now()
                has_gradients = self._has_gradients()
                self._repeat_from_snapshot(now, self._steps, lost)
                if not has_gradients:  # Lightning clears them before a validation
                    for optimizer in self._pipeline.optimizers.optimizers:
                        optimizer.zero_grad()
                self._mark_after = self._marks.now(reads_values=self._may_be_meddled_with)
            return run()

        before, self._is_running = self._is_running, True
        try:
            return self._repeated(attempt, "What followed the last training step has lost workers")
        finally:
            self._is_running = before

    def _check_unchanged(self, lost: str) -> None:
        if not self._is_unchanged(with_gradients=False):
            raise _Unrecoverable(
                f"{lost}\nThe weights have been changed since the last training step, and no snapshot has "
                "their present values."
            )

    def _has_gradients(self) -> bool:
        here = [p for p in self._model.parameters() if p.requires_grad and not p.is_meta]
        return not here or any(p.grad is not None for p in here)

    def _repeat_from_snapshot(self, until: Moment, steps: Sequence[_RepeatableStep], lost: str) -> None:
        """Go back to the last snapshot, and run steps again.

        Args:
            until: The moment at which training goes on.
            steps: The steps before it, as far as they are known: all of them, or all but the last.
            lost: Which worker was lost.

        Raises:
            WorkerLost: If that cannot be done, or another worker is lost.
        """
        begin, together = time.perf_counter(), self._together
        if together is not None:
            lost = together.announce(lost)
        try:
            self._finish_saving()
        except Exception as error:
            raise _Unrecoverable(f"{lost}\nThe checkpoint that was being written is incomplete ({error}).") from error
        try:
            number = self._pipeline.recover(together)
        except Exception as error:  # also one that a layer raises when it is unpickled
            raise _Unrecoverable(f"{lost}\nNo new workers could take over: {type(error).__name__}: {error}") from error
        is_before_all = number == _BEFORE_STEPS
        place = 0 if is_before_all else [step.snapshot for step in self._steps].index(number)
        since, repeated = self._steps[place:], steps[place:]
        for step in since[0 if is_before_all else 1 :]:
            step.snapshot = None
        self._check(since, lost, follow_snapshot=is_before_all)
        self._recovered()
        for step in repeated:
            step.begin.restore()
            step.batch.restore()
            with torch.enable_grad():
                found = self._results_of(self._run_once(step.run, is_repeated=True))
            if not _same(found, step.results):
                different = _difference(found, step.results)
                raise _Unrecoverable(
                    f"{lost}\n{step.name} was run again from the last snapshot, and gave {different}, so training "
                    "cannot go on from there. Either training_step depends on something other than the model, the "
                    "batch and the random states of torch, Python and NumPy, or the weights were changed outside "
                    "training steps."
                )
        until.restore()
        again = f"{len(repeated)} steps run again" if len(repeated) != 1 else "one step run again"
        seconds = time.perf_counter() - begin
        self.recoveries.append(Recovery(time.time(), lost, len(repeated), seconds))
        rank_zero_warn(f"{lost}\nTraining goes on from a snapshot ({again}, {seconds:.1f} s).")

    def _check(self, steps: Sequence[_RepeatableStep], lost: str, *, follow_snapshot: bool) -> None:
        """Raise an error if something has changed since a snapshot that cannot be restored.

        Args:
            steps: The steps since then.
            lost: Which worker was lost.
            follow_snapshot: Whether the snapshot was made some time before the first of them, and not just before it.
        """
        changed = [name for step in steps[:1] for name in step.begin.changed()]
        changed += [name for step in steps for name in step.batch.changed()]
        changed += [
            f"the weights (changed outside training_step, before {step.name})"
            for step in steps[0 if follow_snapshot else 1 :]
            if not step.follows
        ]
        if changed:
            raise _Unrecoverable(
                f"{lost}\nTraining cannot go on from the last snapshot, because the following has changed since "
                f"then, or may have, and cannot be restored: {', '.join(dict.fromkeys(changed))}. {_WAY_OUT}"
            )


def _same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(_equal, found, expected))


def _equal(found: Any, expected: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return not isinstance(found, Tensor) and not isinstance(expected, Tensor) and bool(found == expected)
    return torch.equal(found, expected) or bool((found.isnan() & expected.isnan()).all())


def _difference(found: Sequence[Any], expected: Sequence[Any]) -> str:
    tensors = [next((value for value in values if isinstance(value, Tensor)), None) for values in (found, expected)]
    if None in tensors:
        return "other weights or gradients"
    return f"the loss {found} instead of {expected}"
