"""Runs rows of actions over the stages of a pipeline, led by the driver, which runs the last chunk of layers itself.

    fill_drain.py       one forward and one backward part per batch ──┐
                                                                      ├──▶ Executor ──▶ stages on workers, own stage
    per_microbatch.py   both in turn, per micro-batch ────────────────┘

The two front ends decide when an action of the driver runs and what happens to its output; they share what every
pass needs: bringing all stages to the same state, feeding the first chunk, running the own stage, and raising errors.

Index letters: ``m`` micro-batch, ``i`` stage.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from strategies.common.stage_layers import StageLayers
from strategies.pipeline.control.client import Failures, NotCopyable, RemoteStage, leading
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.replicas import Averaging
from strategies.pipeline.schedule.program import Program, Programs
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.stage.layers import PassContext, num_recomputed
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.side_outputs import Placeholders, WithSideOutputs
from strategies.pipeline.stage.stage import DriverCode, Stage
from strategies.pipeline.state.mirror import Mirror
from strategies.pipeline.transport.ties import TiedParameters


@dataclass(frozen=True)
class PipelineParts:
    """What an :class:`Executor` works with.

    Attributes:
        module: The whole module, whose modes and ``requires_grad`` flags are carried to the stages.
        stages: The parts of ``module``.
        stage: The last stage, on this process.
        programs: What each process does in a pass.
        edges: The driver's ends of all edges.
        ties: The tied parameters of the driver; ``None`` if no two processes share a parameter.
        remotes: The other stages, in order.
        failures: Failures of all stages.
        settings: How to run.
        next_seed: Returns the seed of the next pass, given whether it trains.
        num_updates: Returns how often parameters may have been changed by optimizers or by user code.
        averaging: This process's part in averaging gradients; ``None`` if there is one pipeline only.
        between_passes: Called ahead of a pass, if no pass is under way or waits for its backward part.
    """

    module: nn.Module
    stages: Sequence[StageLayers]
    stage: Stage
    programs: Programs
    edges: Edges
    ties: TiedParameters | None
    remotes: Sequence[RemoteStage]
    failures: Failures
    settings: Settings
    next_seed: Callable[[bool], int]
    num_updates: Callable[[], int]
    averaging: Averaging | None = None
    between_passes: Callable[[], None] = lambda: None


class Executor(NotCopyable):
    """Leads the stages through passes.

    Args:
        parts: The stages, their connections and the settings.
    """

    def __init__(self, parts: PipelineParts) -> None:
        self._parts, self.stage, self.edges, self.remotes = parts, parts.stage, parts.edges, parts.remotes
        self.module, self.settings = parts.module, parts.settings
        self.programs, self.num_stages = parts.programs, len(parts.stages)
        self.last_chunk = len(parts.programs.rank_of) - 1
        """Number of the chunk whose output goes to the driver's code."""
        mail = parts.edges.mail
        self.inputs, self.input_grads = mail["F", 0], mail["B", 0]
        """Inputs of micro-batches, to the first chunk, and their gradients."""
        self.outputs, self.output_grads = mail["F", self.last_chunk + 1], mail["B", self.last_chunk + 1]
        """Outputs of the last chunk, and their gradients."""
        self._told: set[Hashable] = set()
        """The programs of which the stages have their rows."""
        self.mirrors = [
            Mirror(layers, remote.description) for layers, remote in zip(parts.stages, parts.remotes, strict=False)
        ]
        """For each worker, what it was last told about modes, flags and attributes of its layers."""
        self.side_outputs = Placeholders(parts.stages)
        """What stands in place of tensors that layers leave in their attributes."""
        self._children = list(parts.module._modules.values())
        self._num_passes = self._num_backward = self._num_averaged = 0
        self.current = -1
        """Number of the pass that runs, or that ran last."""
        self._shared = self._state_of_ties()
        self.unfinished: set[int] = set()
        """Passes that may have a backward part that has not begun."""

    def begin(
        self, microbatches: int, *, grad: bool, context: PassContext | None = None, gathers: bool = False
    ) -> Pass:
        """Start a pass, and queue for every stage the changes since the last one.

        Args:
            microbatches: Number of micro-batches.
            grad: Whether a backward part may follow.
            context: Settings that forward passes run under; by default those of the calling thread.
            gathers: Whether gradients stay apart from ``.grad`` until they are released.
        """
        if list(self.module._modules.values()) != self._children:
            raise RuntimeError(
                "the pipelined module has other layers than when the pipeline started; layers cannot be replaced "
                "during a run. Change the model before fit, or in configure_model."
            )
        if not self.unfinished:
            self._parts.between_passes()
        self.current = number = self._num_passes
        self._num_passes += 1
        this = Pass(
            number=number,
            microbatches=microbatches,
            grad=grad,
            recomputed=num_recomputed(self.settings.checkpoint, microbatches) if grad else 0,
            at_once=not self.settings.pipelined_backward,
            seed=self._parts.next_seed(grad),
            context=context or PassContext.capture(self.stage.device.type),
            splits=grad and self.programs.training[microbatches].splits,
            gathers=gathers,
            shares=self._ties_have_changed(),
        )
        if grad:
            self.unfinished.add(number)
        self.carry_changes()
        return this

    def note_backward(self, number: int) -> None:
        """The backward part of a pass begins, whose gradients are not averaged yet."""
        self.unfinished.discard(number)
        self._num_backward += 1

    def run(self, part: str, this: Pass, code: DriverCode) -> None:
        """Run a part of a pass on all stages, those on workers at the same time.

        Args:
            part: ``"forward"``, ``"backward"``, or ``"training"`` for both in turn.
            this: The pass.
            code: What this process runs between its actions.
        """
        self.current, name = this.number, (part, this.microbatches)
        program: Program = getattr(self.programs, part)[this.microbatches]
        this = replace(this, limit=program.limit)
        for remote, row in zip(self.remotes, program.operations, strict=False):
            if name not in self._told:
                remote.send(StageCommands.learn, name, row)
            remote.send(StageCommands.run, this, name)
        self._told.add(name)
        self.stage.run(program.operations[-1], this, code)

    @contextmanager
    def in_backward(self, this: Pass, m: int) -> Iterator[None]:
        """Run the body, a backward pass through an output that the last chunk has given away with its graph."""
        with self.own_values(), self.stage.in_backward(this, m, self.last_chunk):
            yield

    def own_values(self) -> AbstractContextManager[None]:
        """Return the context in which layers of the driver have the values that they have stored in attributes."""
        return self.side_outputs.removed_for_layers() if self.side_outputs.known else nullcontext()

    def output(self, this: Pass, m: int) -> Any:
        """Return the output of the last layer for a micro-batch, with packed objects. Every skip has been popped."""
        value = self.outputs.receive(this.number, m)
        if isinstance(value, WithSideOutputs):
            value = self.side_outputs.unwrapped(value)
        return value[0]

    def carry_changes(self) -> None:
        """Queue for every worker what has changed on the driver's copies of its layers."""
        for mirror, remote in zip(self.mirrors, self.remotes, strict=True):
            mirror.carry(remote)

    def _ties_have_changed(self) -> bool:
        """Return whether values of tied parameters may have changed since the last call."""
        before, self._shared = self._shared, self._state_of_ties()
        return self._shared != before

    def _state_of_ties(self) -> tuple[int, list[int]] | None:
        """Changes whenever the value of a tied parameter may have changed."""
        ties = self._parts.ties
        return None if ties is None else (self._parts.num_updates(), ties.versions)

    def average_gradients(self, share: float | None = None) -> None:
        """Average the gradients of every stage over the replicas, if there are several.

        Every stage starts when its own backward passes are done.

        Args:
            share: The share of this replica in the mean; by default the same as that of the others.
        """
        if self._parts.averaging is None:
            return
        self._num_averaged = self._num_backward
        for remote in self.remotes:
            remote.send(StageCommands.average_grads, share)
        with self.explained():
            self._parts.averaging.average(share)

    def complete_gradients(self) -> None:
        """Average what backward passes have computed since the last average."""
        if self._num_backward > self._num_averaged:
            self.average_gradients()

    def wait(self) -> None:
        """Wait until every stage has done what it was told. Passes and optimizer steps do not wait for all stages."""
        for answer in [remote.ask(StageCommands.num_kept) for remote in self.remotes]:
            answer.wait()

    def forget(self, number: int) -> None:
        """Make every stage forget a pass whose backward part can no longer come."""
        self.unfinished.discard(number)
        self.stage.discard(number)
        for remote in self.remotes:
            remote.send(StageCommands.discard, number)

    def explained(self) -> AbstractContextManager[None]:
        """Raise the cause of a failure rather than its consequences, and let no neighbour wait for this process."""
        return leading(self._parts.failures, self.remotes, self._fail)

    def _fail(self) -> None:
        if self.edges.transport is not None:
            self.edges.transport.fail()


class Leader(Protocol):
    """Leads stages through passes."""

    def forget(self, number: int) -> None: ...


AnyLeader = TypeVar("AnyLeader", bound=Leader)


class PendingPass(Generic[AnyLeader]):
    """A pass from its forward part until its backward part has run or can no longer come.

    An output of the pipeline refers to this object, so the object refers to the pipeline weakly: an output that the
    user keeps does not keep the pipeline.

    Args:
        this: The pass.
        leader: Told to forget the pass if its backward part can no longer come.
    """

    def __init__(self, this: Pass, leader: AnyLeader) -> None:
        self.this = this
        self._leader = weakref.ref(leader)
        self._is_spent = False

    def spend(self) -> AnyLeader:
        """Start the backward part, for which nothing is kept any more afterwards; return the leader.

        Raises:
            RuntimeError: If the backward part has run before, or the pipeline has ended.
        """
        leader = self._leader()
        if leader is None:
            raise RuntimeError("the pipeline that computed this has ended, so it has no backward pass any more")
        if self._is_spent:
            raise RuntimeError(
                "the backward pass of this batch has already run through the pipeline, whose stages keep nothing for "
                "a second one (retain_graph=True has no effect on them); add the losses up and call backward once"
            )
        self._is_spent = True
        return leader

    def __del__(self) -> None:
        leader = self._leader()
        if leader is not None and self.this.grad and not self._is_spent:
            leader.forget(self.this.number)
