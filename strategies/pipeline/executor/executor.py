"""Run the passes of a pipeline on all stages. The driver leads, and runs the last chunk of layers itself.

    fill_drain.py       a forward part, then a backward part ─────────────┐
                                                                          ├──▶ Executor ──▶ workers' and driver's stage
    per_microbatch.py   forward and backward pass of each micro-batch ────┘

The two front ends decide when an action of the driver runs and what happens to its output. The executor contains what
every pass needs: it brings all stages to the same state, feeds the first chunk, runs the driver's stage, and raises
errors.

Index letters: ``m`` micro-batch, ``i`` stage.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from strategies.common.joined_lists import layers_now, lists_of
from strategies.common.stage_layers import StageLayers
from strategies.pipeline.control.client import Failures, NotCopyable, RemoteStage, leading
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.replicas import Averaging
from strategies.pipeline.schedule.program import Program, Programs
from strategies.pipeline.stage.edges import Edges, Mailbox
from strategies.pipeline.stage.layers import PassContext, num_recomputed
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.side_outputs import Placeholders, WithSideOutputs
from strategies.pipeline.stage.stage import DriverCode, Stage
from strategies.pipeline.state.mirror import Mirror
from strategies.pipeline.transport.ties import TiedParameters


@dataclass(frozen=True)
class PipelineParts:
    """The parts of a pipeline that an :class:`Executor` uses.

    Attributes:
        module: The whole module. The executor sends its modes and ``requires_grad`` flags to the stages.
        stages: The parts of ``module``.
        stage: The last stage, in this process.
        programs: The operations of each process in a pass.
        edges: The driver's ends of all edges.
        ties: The tied parameters of the driver; ``None`` if no two processes share a parameter.
        remotes: The stages on workers, in order.
        failures: Failures of all stages.
        settings: How to run.
        next_seed: Returns the seed of the next pass, given whether it trains.
        num_updates: Returns how often optimizers or user code may have changed parameters.
        averaging: Averages the gradients of this process over the replicas; ``None`` if there is one pipeline.
        between_passes: Called before a pass, unless another pass runs or waits for its backward part.
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


@dataclass(frozen=True)
class Ends:
    """The driver's connections to a list of layers.

    Attributes:
        layers: The layers.
        last_chunk: Number of the chunk whose output the driver's code receives.
        inputs: Sends inputs of micro-batches to the first chunk.
        input_grads: Receives the gradients of the inputs.
        outputs: Receives the outputs of the last chunk.
        output_grads: Sends the gradients of the outputs.
    """

    layers: Sequence[nn.Module]
    last_chunk: int
    inputs: Mailbox
    input_grads: Mailbox
    outputs: Mailbox
    output_grads: Mailbox


class Executor(NotCopyable):
    """Runs passes on all stages.

    Args:
        parts: The stages, their connections and the settings.
    """

    def __init__(self, parts: PipelineParts) -> None:
        self._parts, self.stage, self.edges, self.remotes = parts, parts.stage, parts.edges, parts.remotes
        self.module, self.settings = parts.module, parts.settings
        self.programs, self.num_stages = parts.programs, len(parts.stages)
        ends = [*parts.programs.placement.firsts, len(parts.programs.rank_of)]
        mail = parts.edges.mail
        self.ends = [
            Ends(layers, stop - 1, mail["F", first], mail["B", first], mail["F", stop], mail["B", stop])
            for layers, (first, stop) in zip(lists_of(parts.module), pairwise(ends), strict=True)
        ]
        """The driver's connections to each list of layers."""
        self._told: dict[Hashable, Program] = {}
        """The programs whose rows have been sent to the stages, by their names."""
        self.mirrors = [
            Mirror(layers, remote.description) for layers, remote in zip(parts.stages, parts.remotes, strict=False)
        ]
        """For each worker, the modes, flags and attributes of its layers that were last sent to it."""
        self.side_outputs = Placeholders(parts.stages)
        """The stand-ins for tensors that layers store in their attributes."""
        self._layers_now = layers_now(parts.module)
        self._layers = self._layers_now()
        self._num_passes = self._num_backward = self._num_averaged = 0
        self.current = -1
        """Number of the current or most recent pass."""
        self._shared = self._state_of_ties()
        self.unfinished: set[int] = set()
        """Passes whose backward part may follow but has not begun."""

    def begin(
        self,
        microbatches: int,
        *,
        grad: bool,
        context: PassContext | None = None,
        gathers: bool = False,
        list_number: int = 0,
    ) -> Pass:
        """Start a pass, and queue for every stage the changes since the last pass.

        Args:
            microbatches: Number of micro-batches.
            grad: Whether a backward part may follow.
            context: Settings for the forward passes; by default those of the calling thread.
            gathers: Whether gradients are kept separate from ``.grad`` until they are released.
            list_number: The list of layers that the pass runs through; 0 if it runs through all lists.
        """
        if self._layers_now() != self._layers:
            raise RuntimeError(
                "the layers of the pipelined module are not those with which the pipeline started; layers cannot be "
                "replaced during a run. Change the model before fit, or in configure_model."
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
            list_number=list_number,
        )
        if grad:
            self.unfinished.add(number)
        self.carry_changes()
        return this

    def note_backward(self, number: int) -> None:
        """Record that the backward part of a pass begins. Its gradients are not averaged yet."""
        if self._parts.averaging is not None:
            self._parts.averaging.before_backward()
        self.unfinished.discard(number)
        self._num_backward += 1

    def run(self, part: str, this: Pass, code: DriverCode) -> None:
        """Run a part of a pass on all stages at the same time.

        Args:
            part: ``"forward"``, ``"backward"``, or ``"training"`` for both, interleaved.
            this: The pass.
            code: The code that this process runs between its actions.
        """
        self.current, name = this.number, (part, this.microbatches, this.list_number)
        program = self._told.get(name) or self.programs.of(*name)
        this = replace(this, limit=program.limit)
        for remote, row in zip(self.remotes, program.operations, strict=False):
            if name not in self._told:
                remote.send(StageCommands.learn, name, row)
            remote.send(StageCommands.run, this, name)
        self._told[name] = program
        self.stage.run(program.operations[-1], this, code)

    @contextmanager
    def in_backward(self, this: Pass, m: int) -> Iterator[None]:
        """Context for a backward pass through an output that the last chunk has returned with its graph."""
        with self.own_values(), self.stage.in_backward(this, m, self.ends[-1].last_chunk):
            yield

    def own_values(self) -> AbstractContextManager[None]:
        """Return the context in which the attributes of the driver's layers have the values that the layers stored."""
        return self.side_outputs.removed_for_layers() if self.side_outputs.known else nullcontext()

    def output(self, this: Pass, m: int, list_number: int) -> Any:
        """Return the output of a list for a micro-batch, with packed objects. All skips have been popped."""
        value = self.ends[list_number].outputs.receive(this.number, m)
        if isinstance(value, WithSideOutputs):
            value = self.side_outputs.unwrapped(value)
        return value[0]

    def carry_changes(self) -> None:
        """Queue for every worker the changes of the driver's copies of its layers."""
        for mirror, remote in zip(self.mirrors, self.remotes, strict=True):
            mirror.carry(remote)

    def _ties_have_changed(self) -> bool:
        """Return whether values of tied parameters may have changed since the last call."""
        before, self._shared = self._shared, self._state_of_ties()
        return self._shared != before

    def _state_of_ties(self) -> tuple[int, list[int]] | None:
        """Return a value that differs whenever the value of a tied parameter may have changed."""
        ties = self._parts.ties
        return None if ties is None else (self._parts.num_updates(), ties.versions)

    def average_gradients(self, share: float | None = None) -> None:
        """Average the gradients of every stage over the replicas, if there are several.

        Every stage starts when its backward passes are done.

        Args:
            share: The weight of this replica in the mean; by default all replicas have the same weight.
        """
        if self._parts.averaging is None:
            return
        self._num_averaged = self._num_backward
        for remote in self.remotes:
            remote.send(StageCommands.average_grads, share)
        with self.explained():
            self._parts.averaging.average(share)

    def complete_gradients(self) -> None:
        """Average the gradients that backward passes have computed since the last average."""
        if self._num_backward > self._num_averaged:
            self.average_gradients()

    def wait(self) -> None:
        """Wait until every stage has run its commands. Passes and optimizer steps do not wait for all stages."""
        for answer in [remote.ask(StageCommands.num_kept) for remote in self.remotes]:
            answer.wait()

    def forget(self, number: int) -> None:
        """Make every stage forget a pass whose backward part can no longer follow."""
        self.unfinished.discard(number)
        self.stage.discard(number)
        for remote in self.remotes:
            remote.send(StageCommands.discard, number)

    def explained(self) -> AbstractContextManager[None]:
        """Context that raises the cause of a failure rather than its consequences, and notifies waiting neighbours."""
        return leading(self._parts.failures, self.remotes, self._fail)

    def _fail(self) -> None:
        if self.edges.transport is not None:
            self.edges.transport.fail()


class Leader(Protocol):
    """Runs passes on stages."""

    def forget(self, number: int) -> None: ...


AnyLeader = TypeVar("AnyLeader", bound=Leader)


class PendingPass(Generic[AnyLeader]):
    """A pass from its forward part until its backward part has run or can no longer follow.

    An output of the pipeline refers to this object. The object has only a weak reference to the pipeline, so an output
    that the user keeps does not keep the pipeline alive.

    Args:
        this: The pass.
        leader: Forgets the pass if its backward part can no longer follow.
    """

    def __init__(self, this: Pass, leader: AnyLeader) -> None:
        self.this = this
        self._leader = weakref.ref(leader)
        self._is_spent = False

    def spend(self) -> AnyLeader:
        """Start the backward part, after which the pass cannot be differentiated again; return the leader.

        Raises:
            RuntimeError: If the backward part has already run, or if the pipeline has ended.
        """
        leader = self._leader()
        if leader is None:
            raise RuntimeError("the pipeline that computed this value has ended, so it cannot run a backward pass")
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
