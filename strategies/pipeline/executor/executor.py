"""Run the passes of a pipeline on all stages. The driver leads, and runs the last chunk of layers itself.

    FillDrain       a forward part, then a backward part (fill and drain, ``gpipe``) ──┐
                                                                                      ├──▶ Executor ──▶ stages
    PerMicrobatch   forward and backward pass of each micro-batch ────────────────────┘

The two front ends decide when an action of the driver runs and what happens to its output. The executor contains what
every pass needs: it brings all stages to the same state, feeds the first chunk, runs the driver's stage, and raises
errors. :class:`~strategies.pipeline.executor.per_microbatch.PerMicrobatch` has its own file.

Index letters: ``m`` micro-batch, ``i`` stage.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.autograd import with_backward
from strategies.common.joined_lists import layers_now, lists_of
from strategies.common.stage_layers import StageLayers
from strategies.pipeline.control.client import Failures, NotCopyable, RemoteStage, leading
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.replicas import Averaging
from strategies.pipeline.schedule.operations import Result, Row, UserCode
from strategies.pipeline.schedule.program import ProgramPart, Programs
from strategies.pipeline.schedule.tables import Action
from strategies.pipeline.stage.edges import Edges, Mailbox, tensors_of
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.microbatch.split import NoChunk, merge, pack_objects, split, unpack_objects, without_rows
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.side_outputs import Placeholders, WithSideOutputs, with_graph
from strategies.pipeline.stage.stage import DriverCode, Stage
from strategies.pipeline.state.mirror import Mirror
from strategies.pipeline.transport.ties import TiedParameters
from strategies.sharding.gathered_layers import Event


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
        between_passes: Called before each pass with the numbers of the passes that wait for their backward part.
        agree: Checks that the replicas do the same next, if they divide parameters.
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
    between_passes: Callable[[Collection[int]], None] = lambda unfinished: None
    agree: Callable[[Event, float], None] = lambda event, value: None


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
        self.programs = parts.programs
        self.agree = parts.agree
        ends = [*parts.programs.placement.firsts, len(parts.programs.rank_of)]
        mail = parts.edges.mail
        self.ends = [
            Ends(layers, stop - 1, mail["F", first], mail["B", first], mail["F", stop], mail["B", stop])
            for layers, (first, stop) in zip(lists_of(parts.module), pairwise(ends), strict=True)
        ]
        """The driver's connections to each list of layers."""
        self.mirrors = [
            Mirror(layers, remote.description, [buffer for buffer in layers.buffers() if not buffer.is_meta])
            for layers, remote in zip(parts.stages, parts.remotes, strict=False)
        ]
        """For each worker, the modes, flags and attributes of its layers that were last sent to it."""
        self.side_outputs = Placeholders(parts.stages)
        """The stand-ins for tensors that layers store in their attributes."""
        self._layers_now = layers_now(parts.module)
        self._layers = self._layers_now()
        self._num_passes = self._num_backward = self._num_averaged = 0
        self.current = -1
        """Number of the pass of which a part has begun last; -1 between parts of passes of a ``Pipe``, where a failure
        ends none."""
        self._shared = self._state_of_ties()
        self.unfinished: set[int] = set()
        """Passes whose backward part has not begun but may follow. Under ``1f1b``, a call of ``backward`` begins it."""

    def begin(
        self,
        microbatches: int,
        *,
        grad: bool,
        context: PassContext | None = None,
        gathers: bool = False,
        list_number: int = 0,
        like: Pass | None = None,
    ) -> Pass:
        """Start a pass. Call :meth:`send_changes` before its first row.

        Args:
            microbatches: Number of micro-batches.
            grad: Whether a backward part may follow.
            context: Settings for the forward passes; by default those of ``like``, or of the calling thread.
            gathers: Whether gradients are kept separate from ``.grad`` until they are released.
            list_number: The list of layers that the pass runs through; 0 if it runs through all lists.
            like: A pass with the seed, the checkpoint and the context to use; by default, the seed is the next one of
                the pipeline, and the checkpoint that of the settings.
        """
        if self._layers_now() != self._layers:
            raise RuntimeError(
                "the layers of the pipelined module are not those with which the pipeline started; layers cannot be "
                "replaced during a run. Change the model before fit, or in configure_model."
            )
        self.agree(Event.PASS, microbatches)
        self._parts.between_passes(self.unfinished)
        self.current = number = self._num_passes
        self._num_passes += 1
        if like is not None:
            checkpoint, seed, context = like.checkpoint, like.seed, context or like.context
        else:
            checkpoint, seed = self.settings.checkpoint, self._parts.next_seed(grad)
            context = context or PassContext.capture(self.stage.device.type)
        this = Pass(
            number=number,
            microbatches=microbatches,
            grad=grad,
            checkpoint=checkpoint if grad else "never",
            at_once=not self.settings.pipelined_backward,
            seed=seed,
            context=context,
            splits=grad and self.programs["training", microbatches, 0].splits,
            gathers=gathers,
            ties_changed=self._ties_have_changed(),
            list_number=list_number,
        )
        if grad:
            self.unfinished.add(number)
        return this

    def note_backward(self, number: int) -> None:
        """Note that the backward part of a pass begins. Its gradients are not averaged yet."""
        self.current = number
        if self._parts.averaging is not None:
            self._parts.averaging.before_backward()
        self.unfinished.discard(number)
        self._num_backward += 1

    def run(self, part: ProgramPart, this: Pass, code: DriverCode) -> None:
        """Run a part of a pass on all stages at the same time.

        Args:
            part: ``"forward"``, ``"backward"``, or ``"training"`` for both, interleaved.
            this: The pass.
            code: The code that this process runs between its actions.

        Raises:
            RuntimeError: If a buffer that this process shares with a worker changes. Each of them would change its own.
        """
        program = self.programs[part, this.microbatches, this.list_number]
        for remote, row in zip(self.remotes, program.of_workers, strict=True):
            remote.send(StageCommands.run, this, row)
        self.stage.run(program.rows[-1], this, code)
        for mirror in self.mirrors:
            for name, _ in mirror.shared_changes():
                raise RuntimeError(
                    f"buffer {name} of {mirror.description} is shared with layers of this process, and has changed "
                    "during a pass, which the other process does not see. Give each layer a separate buffer, choose a "
                    "balance that puts all its users on one stage, or change it between two batches."
                )

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

    def send_changes(self) -> None:
        """Queue for every worker the changes of the driver's copies of its layers."""
        self.send_buffers()
        for mirror, remote in zip(self.mirrors, self.remotes, strict=True):
            mirror.send_changes(remote)

    @contextmanager
    def unchanged_layers(self) -> Iterator[None]:
        """Context for a training pass. The code of its first micro-batch has already run up to the call.

        Raises:
            RuntimeError: If user code changes layers of a worker within it. Micro-batches have then run with other
                values than in one process.
        """
        self.send_changes()
        yield
        if changed := [mirror.description for mirror in self.mirrors if mirror.has_changed()]:
            raise RuntimeError(
                f"training_step has changed a mode, requires_grad, a buffer or an attribute of layers of "
                f"{', '.join(changed)} after the first micro-batch had entered them, so not all micro-batches have run "
                "with the same values. Make the change in on_train_batch_start or on_train_batch_end, or use "
                "schedule='gpipe'."
            )

    def send_buffers(self) -> None:
        """Queue for every worker the tensors that have been assigned to buffers of the driver's copies."""
        for mirror, remote in zip(self.mirrors, self.remotes, strict=True):
            mirror.send_buffers(remote)
        for mirror in self.mirrors:
            mirror.restore_stand_ins()

    def _ties_have_changed(self) -> bool:
        """Return whether values of tied parameters may have changed since the last call."""
        before, self._shared = self._shared, self._state_of_ties()
        return self._shared != before

    def _state_of_ties(self) -> tuple[int, list[int]] | None:
        """Return a value that differs whenever the value of a tied parameter may have changed."""
        ties = self._parts.ties
        return None if ties is None else (self._parts.num_updates(), ties.versions)

    def average_gradients(self) -> None:
        """Average the gradients of every stage over the replicas, if there are several.

        Every stage starts when its backward passes are done.
        """
        if self._parts.averaging is None:
            return
        self._num_averaged = self._num_backward
        with self.explained():
            self.agree(Event.AVERAGE, 0.0)
            for remote in self.remotes:
                remote.send(StageCommands.average_grads)
            self._parts.averaging.average()

    def complete_gradients(self) -> None:
        """Average the gradients that backward passes have computed since the last average."""
        if self._num_backward > self._num_averaged:
            self.average_gradients()

    def wait(self) -> None:
        """Wait until every stage has run its commands. Passes and optimizer steps do not wait for all stages."""
        for answer in [remote.ask(StageCommands.num_kept) for remote in self.remotes]:
            answer.wait()

    def discard(self, number: int) -> None:
        """Make every stage discard a pass whose backward part can no longer follow."""
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


class PendingPass:
    """A pass from its forward part until its backward part has run or can no longer follow.

    An output of the pipeline refers to this object. The object has only a weak reference to the pipeline, so an output
    that the user keeps does not keep the pipeline alive.

    Args:
        this: The pass.
        executor: Runs the pass, and discards it if its backward part can no longer follow.
    """

    def __init__(self, this: Pass, executor: Executor) -> None:
        self.this = this
        self._executor = weakref.ref(executor)
        self._is_spent = False

    def spend(self) -> Executor:
        """Start the backward part, after which the pass cannot be differentiated again; return the executor.

        Raises:
            RuntimeError: If the backward part has already run, or if the pipeline has ended.
        """
        executor = self._executor()
        if executor is None:
            raise RuntimeError("the pipeline that computed this value has ended, so it cannot run a backward pass")
        if self._is_spent:
            raise RuntimeError(
                "the backward pass of this batch has already run through the pipeline, whose stages keep nothing for "
                "a second one (retain_graph=True has no effect on them); add the losses up and call backward once"
            )
        self._is_spent = True
        return executor

    def __del__(self) -> None:
        executor = self._executor()
        if executor is not None and self.this.grad and not self._is_spent:
            executor.discard(self.this.number)


class FillDrain:
    """Runs a batch in two parts, or forward only. Replaces the ``forward`` of the pipelined module.

    The outputs of all micro-batches are the outputs of one autograd node. When the loss is differentiated, this node
    runs the backward part on every stage. The driver runs its part inside the node and does not wait for the workers,
    whose work overlaps with what the driver does next::

        split ─▶ F0 F1 F2 F3 ─▶ merge ─▶ output ─▶ the user's loss ─▶ backward() ─▶ B3 B2 B1 B0
                 └ FillDrain.run ┘                                                  └ backward ┘

    Args:
        executor: Runs the passes on all stages.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._evaluates_whole = False
        """Whether evaluations run the whole batch at once, because one had an output without rows."""
        self._varying: set[str] = set()
        """The names of outputs with another number of entries in each micro-batch."""

    def __call__(self, input: Any) -> Any:
        """Take the input of the ``forward`` of an ``nn.Sequential`` and return its output.

        Raises:
            ValueError: If an output of a training pass does not have rows. An evaluation then runs the whole batch as
                one micro-batch.
        """
        evaluates = not torch.is_grad_enabled() and not self._executor.module.training
        given = pack_objects(input, NoChunk)
        inputs = split(given, 1 if evaluates and self._evaluates_whole else self._executor.settings.microbatches)
        outputs = self.run(inputs)
        found = without_rows(outputs, given, inputs, self._varying) if len(inputs) > 1 else None
        if found is not None and evaluates:
            self._evaluates_whole = True
            outputs = self.run(split(given, 1))
        elif found is not None:
            raise ValueError(
                f"the pipelined module returned {found}, which does not have one row per sample, or this is not clear, "
                "so it cannot be joined over micro-batches. Return tensors whose first dimension is the batch, and use "
                "what all rows share in training_step without the module returning it; or use schedule='1f1b'."
            )
        return unpack_objects(merge(outputs))

    def run_blocks(self, value: Any, microbatches: int | None = None, list_number: int = 0) -> Any:
        """Take a value of deferred calls and return the output of the blocks, whose rows the caller knows.

        Args:
            value: The value.
            microbatches: The number of micro-batches; by default the one in the settings.
            list_number: The list of blocks that the value goes through.
        """
        parts = split(pack_objects(value, NoChunk), microbatches or self._executor.settings.microbatches)
        return unpack_objects(merge(self.run(parts, list_number)))

    def run(self, parts: Sequence[Any], list_number: int = 0, *, like: Pass | None = None) -> list[Any]:
        """Run the forward part of a pass, and the backward part when the outputs are differentiated.

        Args:
            parts: The input of each micro-batch, with packed objects.
            list_number: The list of layers that the inputs go through.
            like: See :meth:`Executor.begin`.

        Returns:
            The output of each micro-batch, with packed objects.
        """
        executor, given = self._executor, [tensor for part in parts for tensor in tensors_of(part)]
        grad = torch.is_grad_enabled() and (
            any(t.requires_grad for t in given)
            or any(p.requires_grad for layer in executor.ends[list_number].layers for p in layer.parameters())
        )
        inputs = [t for t in given if grad and t.requires_grad]
        with torch.no_grad(), executor.explained():
            this = executor.begin(len(parts), grad=grad, list_number=list_number, like=like)
            executor.send_changes()
            outputs = self._forward(parts, this)
        required = [[t.requires_grad for t in tensors_of(output)] for output in outputs]
        run = PendingPass(this, executor)
        wanted = [flag for flags in required for flag in flags]
        return with_backward(outputs, wanted, inputs, partial(_backward, run, required)) if any(wanted) else outputs

    def _forward(self, parts: Sequence[Any], this: Pass) -> list[Any]:
        """Run the forward part of a pass, and return the output of each micro-batch."""
        executor = self._executor
        if (recorder := executor.stage.recorder) is not None and this.list_number and recorder.pass_of_code >= 0:
            recorder.end("b", 0, self._first(this.list_number), this.number)
        code = _BatchCode(executor, this, parts)
        executor.run("forward", this, code)
        if executor.stage.recorder is not None:
            executor.stage.recorder.begin(pass_of_code=this.number)  # the user's code runs until the backward part
        if executor.side_outputs.known:
            executor.side_outputs.restore()
            executor.side_outputs.insert(partial(_is_of_one_process, this))
        return code.results

    def backward(
        self,
        this: Pass,
        required: Sequence[Sequence[bool]],
        grads: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Run the backward part of a pass on every stage.

        Args:
            this: The pass.
            required: For each micro-batch, whether each tensor of its output requires a gradient; a guess for
                recomputed micro-batches.
            grads: The gradients of the tensors that require one, in order; ``None`` for tensors that the loss did not
                use.
            inputs: The tensors of the micro-batches' inputs that require a gradient.

        Returns:
            The gradients of ``inputs``.
        """
        executor, ahead = self._executor, iter(grads)
        ends = executor.ends[this.list_number]
        executor.note_backward(this.number)
        if (recorder := executor.stage.recorder) is not None and recorder.pass_of_code >= 0:
            last = this.microbatches - 1
            if recorder.pass_of_code == this.number:
                recorder.end("loss", last, ends.last_chunk, this.number)
            elif this.list_number + 1 < len(executor.ends):
                recorder.end("a", last, self._first(this.list_number + 1), recorder.pass_of_code)
        with executor.explained():
            for m, flags in enumerate(required):
                ends.output_grads.send([next(ahead) for flag in flags if flag], this.number, m)
            executor.send_changes()  # autograd computes no gradients for parameters that were frozen since
            code = _BatchCode(executor, this, answered=bool(inputs))
            executor.run("backward", this, code)
        if recorder is not None and this.list_number:
            recorder.begin(pass_of_code=this.number)  # the backward pass of the code before this list
        return [grad for m in sorted(code.received) for grad in code.received[m]]

    def _first(self, list_number: int) -> int:
        """Return the first chunk of a list of layers."""
        return self._executor.programs.placement.firsts[list_number]


class _BatchCode:
    """The driver's code between the actions of a pass: sends inputs, receives outputs, receives gradients of inputs.

    Args:
        executor: Runs the passes on all stages.
        this: The pass.
        parts: The input of each micro-batch.
        answered: Whether the gradients of inputs are needed.
    """

    def __init__(self, executor: Executor, this: Pass, parts: Sequence[Any] = (), *, answered: bool = False) -> None:
        self._executor, self._this, self._parts, self._answered = executor, this, parts, answered
        self.results: list[Any] = []
        """The output of each micro-batch."""
        self.received: dict[int, list[Tensor | None]] = {}
        """The gradients of the input of each micro-batch."""

    def run(self, operation: UserCode | Result) -> None:
        executor, this, m = self._executor, self._this, operation.microbatch
        if isinstance(operation, Result):
            self.results.append(executor.output(this, m, this.list_number))
        elif operation.part == "b":  # there are no skips before the first layer
            part = self._parts[m]
            flags = [this.grad and tensor.requires_grad for tensor in tensors_of(part)]
            executor.ends[this.list_number].inputs.send((part, {}), this.number, m, requires_grad=flags)
        elif self._answered:
            self.received[m] = executor.ends[this.list_number].input_grads.receive(this.number, m)

    def joins(self, row: Row, place: int) -> bool:
        return False

    def around(self, action: Action) -> AbstractContextManager[None]:
        return self._executor.own_values()


def _backward(
    run: PendingPass,
    required: Sequence[Sequence[bool]],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
) -> list[Tensor | None]:
    return FillDrain(run.spend()).backward(run.this, required, grads, inputs)


def _is_of_one_process(this: Pass, value: Any) -> bool:
    """Whether a side output equals that of one process, and no gradient flows through it."""
    return this.microbatches == 1 and not (this.grad and (this.checkpoint == "always" or with_graph(value)))
