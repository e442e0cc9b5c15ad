"""Runs rows of actions over the stages of a pipeline, led by the driver, which runs the last chunk of layers itself.

    whole_batch.py      one forward and one backward part per batch ──┐
                                                                      ├──▶ Executor ──▶ stages on workers, own stage
    per_microbatch.py   both in turn, per micro-batch ────────────────┘

The two front ends decide when an action of the driver runs and what happens to its output; they share what every
pass needs: bringing all stages to the same state, feeding the first chunk, running the own stage, and raising errors.

Index letters: ``m`` micro-batch, ``i`` stage.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from strategies.common.stage_layers import StageLayers
from strategies.pipeline.control.client import Failures, NotCopyable, RemoteStage, leading
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.replicas import Averaging
from strategies.pipeline.schedule.operations import Operation
from strategies.pipeline.schedule.timetable import Timetables
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.stage.layers import PassContext, num_recomputed
from strategies.pipeline.stage.side_outputs import Placeholders, WithSideOutputs
from strategies.pipeline.stage.stage import Mailbox, Pass, Stage
from strategies.pipeline.state.mirror import Mirror
from strategies.pipeline.transport.channel import Sender
from strategies.pipeline.transport.interface import Transport
from strategies.pipeline.transport.ties import Tie, TiedParameters


class Connections:
    """The driver's ends of all channels.

    Args:
        edges: The ends of edges between chunks, and between chunks and the driver's code.
        transport: What carries values to other processes; ``None`` if there are none.
        ties: Tied parameters; ``None`` if no two processes share a parameter.

    Attributes:
        feed: Inputs of micro-batches, to the first chunk.
        fed_back: Gradients of those inputs, from the first chunk.
        outputs: Outputs of the last chunk.
        output_grads: Gradients of those outputs.
        posting: Posts sends and receives in the order of a row; ``None`` if those of an action run with it.
        senders: Channels that carry values of every pass.
    """

    def __init__(self, edges: Edges, transport: Transport | None = None, ties: TiedParameters | None = None) -> None:
        self.transport, self.ties = transport, ties
        self.posting = edges if transport is not None and transport.is_ordered else None
        code, last = edges.sources[0], edges.targets[len(edges.rank_of)]
        assert isinstance(code.values, Mailbox | Sender)
        assert isinstance(last.values, Mailbox) and isinstance(last.grads, Mailbox)
        self.feed, self.fed_back, self.outputs, self.output_grads = code.values, code.grads, last.values, last.grads
        self.ports, self.senders = edges.ports(), edges.senders

    @classmethod
    def of_one_process(cls, num_chunks: int) -> "Connections":
        """Connections of a driver without workers."""
        return cls(Edges(0, [0] * num_chunks, None))

    @classmethod
    def to_workers(
        cls,
        transport: Transport,
        rank_of: Sequence[int],
        ties: Sequence[Tie],
        parameters: Mapping[str, nn.Parameter],
    ) -> "Connections":
        """Connections of a driver with workers.

        Args:
            transport: What carries the values.
            rank_of: The stage of each chunk.
            ties: All ties of the pipeline.
            parameters: Those of the whole module, by name.
        """
        driver = rank_of[-1]
        tied = TiedParameters(driver, ties, parameters, transport) if ties else None
        return cls(Edges(driver, rank_of, transport), transport, tied)


@dataclass(frozen=True)
class PipelineParts:
    """What an :class:`Executor` works with.

    Attributes:
        module: The whole module, whose modes and ``requires_grad`` flags are carried to the stages.
        stages: The parts of ``module``.
        stage: The last stage, on this process.
        timetables: What each process does in a pass.
        connections: The driver's ends of all channels.
        remotes: The other stages, in order.
        failures: Failures of all stages.
        settings: How to run.
        next_seed: Returns the seed of the next pass, given whether it trains.
        num_updates: Returns how often parameters may have been changed by optimizers or by user code.
        averaging: This process's part in averaging gradients; ``None`` if there is one pipeline only.
        mirrors: Those of the workers that these have taken over from; none if the stages come from the driver.
    """

    module: nn.Module
    stages: Sequence[StageLayers]
    stage: Stage
    timetables: Timetables
    connections: Connections
    remotes: Sequence[RemoteStage]
    failures: Failures
    settings: Settings
    next_seed: Callable[[bool], int]
    num_updates: Callable[[], int]
    averaging: Averaging | None = None
    mirrors: Sequence[Mirror] = ()


class Executor(NotCopyable):
    """Leads the stages through passes.

    Args:
        parts: The stages, their connections and the settings.
    """

    def __init__(self, parts: PipelineParts) -> None:
        self._parts, self.stage, self.connections, self.remotes = parts, parts.stage, parts.connections, parts.remotes
        self.module, self.settings = parts.module, parts.settings
        self.timetables, self.num_stages = parts.timetables, len(parts.stages)
        self.last_chunk = len(parts.timetables.rank_of) - 1
        """Number of the chunk whose output goes to the driver's code."""
        self.bundles_inputs = parts.connections.posting is None and not isinstance(parts.connections.feed, Mailbox)
        """Whether :meth:`feed` may send several inputs in one message."""
        self.mirrors = list(parts.mirrors) or [
            Mirror(layers, remote.description) for layers, remote in zip(parts.stages, parts.remotes, strict=False)
        ]
        """For each worker, what it was last told about modes, flags and attributes of its layers."""
        self.side_outputs = Placeholders(parts.stages)
        """What stands in place of tensors that layers leave in their attributes."""
        self._children = list(parts.module._modules.values())
        self._num_passes = self._num_backward = self._num_averaged = 0
        self._shared = self._state_of_ties()

    def begin(
        self, microbatches: int, *, grad: bool, context: PassContext | None = None, limit: int | None = None
    ) -> Pass:
        """Start a pass, and queue for every stage the changes since the last one.

        Args:
            microbatches: Number of micro-batches.
            grad: Whether a backward part may follow.
            context: Settings that forward passes run under; by default those of the calling thread.
            limit: How many values on one channel may be under way; ``None``: no limit.
        """
        if list(self.module._modules.values()) != self._children:
            raise RuntimeError(
                "the pipelined module has other layers than when the pipeline started; layers cannot be replaced "
                "during a run. Change the model before fit, or in configure_model."
            )
        for sender in self.connections.senders:
            sender.flush()  # what earlier passes sent has arrived: their results are here
        number, self._num_passes = self._num_passes, self._num_passes + 1
        this = Pass(
            number=number,
            microbatches=microbatches,
            grad=grad,
            recomputed=num_recomputed(self.settings.checkpoint, microbatches) if grad else 0,
            at_once=not self.settings.pipelined_backward,
            seed=self._parts.next_seed(grad),
            context=context or PassContext.capture(self.stage.device.type),
            limit=limit,
            splits=grad and self.timetables.training[microbatches].splits,
        )
        self._share_ties(number)
        self.carry_changes()
        return this

    def note_backward(self) -> None:
        """Count a pass whose gradients are not averaged yet."""
        self._num_backward += 1

    def feed(
        self, parts: Sequence[Any], this: Pass, m: int, requires_grad: list[bool], *, begun: int | None = None
    ) -> int:
        """Send the inputs of micro-batches to the first chunk, as many as one message takes; return their number.

        Args:
            parts: The inputs of consecutive micro-batches.
            this: The pass.
            m: Index of the first one.
            requires_grad: For each tensor of an input, whether it requires a gradient.
            begun: Index of the last micro-batch whose code has begun, under which the time is recorded; by default
                ``m``.
        """
        feed, recorder, num_fed = self.connections.feed, self.stage.recorder, 1
        if recorder is not None:
            recorder.begin()
            recorder.computed()
        if isinstance(feed, Mailbox):
            feed.send((parts[0], {}), this.number, m, requires_grad=requires_grad)  # no skip before the first layer
        else:
            num_fed = feed.send_inputs(parts, this.number, m, requires_grad)
        if recorder is not None:
            recorder.end("feed", m if begun is None else begun, number=this.number)
        return num_fed

    def run(self, operations: Iterable[Operation], this: Pass, *, with_graph: bool = False) -> None:
        """Run actions of the driver's stage, with the sends and receives between them if they have an order.

        For ``with_graph`` see :meth:`~strategies.pipeline.stage.stage.Stage.run`.
        """
        with self._own_values():
            self.stage.run(operations, this, with_graph=with_graph)

    @contextmanager
    def in_backward(self, this: Pass, m: int) -> Iterator[None]:
        """Run the body, a backward pass through an output that the last chunk has given away with its graph."""
        with self._own_values(), self.stage.in_backward(this, m, self.last_chunk):
            yield

    def _own_values(self) -> AbstractContextManager[None]:
        return self.side_outputs.removed_for_layers() if self.side_outputs.known else nullcontext()

    def output(self, this: Pass, m: int) -> Any:
        """Return the output of the last layer for a micro-batch, with packed objects. Every skip has been popped."""
        value = self.connections.outputs.receive(this.number, m)
        if isinstance(value, WithSideOutputs):
            value = self.side_outputs.unwrapped(value)
        return value[0]

    def move_tied_gradients(self, this: Pass) -> None:
        """Move the gradients of tied parameters to the process that owns them."""
        if self.connections.ties is not None:
            self.connections.ties.move_gradients(this.number)

    def carry_changes(self) -> None:
        """Queue for every worker what has changed on the driver's copies of its layers."""
        for mirror, remote in zip(self.mirrors, self.remotes, strict=True):
            mirror.carry(remote)

    def _share_ties(self, number: int) -> None:
        """Update copies of tied parameters, if values may have changed since the last time."""
        if self.connections.ties is None:
            return
        before, self._shared = self._shared, self._state_of_ties()
        if self._shared != before:
            for remote in self.remotes:
                remote.send(StageCommands.share_values, number)
            self.connections.ties.share_values(number)

    def forget_shared_values(self) -> None:
        """Share the values of tied parameters ahead of the next pass in any case."""
        self._shared = None

    def _state_of_ties(self) -> tuple[int, list[int]] | None:
        """Changes whenever the value of a tied parameter may have changed."""
        ties = self.connections.ties
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

    def forget(self, number: int) -> None:
        """Make every stage forget a pass whose backward part can no longer come."""
        self.stage.discard(number)
        for remote in self.remotes:
            remote.send(StageCommands.discard, number)

    def explained(self) -> AbstractContextManager[None]:
        """Raise the cause of a failure rather than its consequences, and let no neighbour wait for this process."""
        return leading(self._parts.failures, self.remotes, self._fail)

    def _fail(self) -> None:
        if self.connections.transport is not None:
            self.connections.transport.fail()


class Leader(Protocol):
    """Leads stages through passes."""

    def forget(self, number: int) -> None: ...


AnyLeader = TypeVar("AnyLeader", bound=Leader)


class Run(Generic[AnyLeader]):
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
