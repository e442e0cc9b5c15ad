"""The way of a batch through the pipeline, as the driver leads it: split, forward pass, merge; later the way back.

The output of a pass is one node of autograd. When the loss calls it back, every stage runs its backward part; the
driver runs its own inside that node and does not wait for the others, whose work overlaps with what it does next.

Index letters: ``m`` micro-batch, ``i`` stage.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.autograd import with_backward
from strategies.common.torch_compat import tree_flatten, tree_leaves, tree_unflatten
from strategies.pipeline.control.client import Failures, NotCopied, RemoteStage, in_pass
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.executor.ports import Ports
from strategies.pipeline.executor.run import Run
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.executor.suspended import Steps
from strategies.pipeline.microbatch.chunks import NoChunk, plain
from strategies.pipeline.microbatch.packing import pack_objects, unpack_objects
from strategies.pipeline.microbatch.split import has_rows, merge, split
from strategies.pipeline.schedule.tables import SCHEDULES, Action
from strategies.pipeline.stage.context import PassContext
from strategies.pipeline.stage.recompute import num_recomputed
from strategies.pipeline.stage.side_outputs import Marks, with_graph
from strategies.pipeline.stage.stage import Pass, Stage
from strategies.pipeline.state.mirror import Mirror
from strategies.pipeline.transport.channel import Announcement, Sender


class Passes(NotCopied):
    """Leads the stages through passes.

    Args:
        module: The whole module, whose ``training`` and ``requires_grad`` flags are carried to the stages.
        stages: The parts of ``module``.
        stage: The last stage, on this process.
        ports: Its connections.
        remotes: The other stages, in order.
        failures: What went wrong with them.
        settings: How to run.
        next_seed: Gives a pass the seed of its random numbers, told whether it trains.
        num_steps: Tells how often optimizers have stepped.
        start_again: Replaces a pipeline in which something failed by a new one; returns what leads that.
    """

    def __init__(
        self,
        module: nn.Sequential,
        stages: Sequence[nn.Sequential],
        stage: Stage,
        ports: Ports,
        remotes: Sequence[RemoteStage],
        failures: Failures,
        settings: Settings,
        next_seed: Callable[[bool], int],
        num_steps: Callable[[], int],
        start_again: Callable[[], "Passes"],
    ) -> None:
        self._module, self._stages, self.stage, self.ports = module, stages, stage, ports
        self.remotes, self._failures, self._settings, self._next_seed = remotes, failures, settings, next_seed
        self._num_steps, self._start_again = num_steps, start_again
        self._shared = num_steps(), ports.ties.versions
        self._num_passes = 0
        self.num_backward = 0
        """How many backward passes there were."""
        self._evaluates = False
        """Whether the last pass had no backward part."""
        self._announcing: PassContext | None = None
        """What passes that are announced on the data plane run under; ``None`` if stages wait for commands."""
        self._children = list(module._modules.values())
        self.mirrors = [Mirror(layers, remote.description) for layers, remote in zip(stages, remotes, strict=False)]
        """What the layers on workers were like when they were last told."""
        self.side_outputs = Marks(stages)
        """What stands for tensors that layers leave in their attributes."""
        self.steps = Steps(len(stages) + 1, stage.device)
        """Code that is suspended where it calls the module; see :mod:`strategies.pipeline.executor.interleaved`."""

    def __call__(self, input: Any) -> Any:
        """Takes and returns what the module's own forward pass does."""
        if (step := self.steps.current) is not None:
            return step.call(input)
        if self._failures.raised:
            return self._start_again()(input)
        input = pack_objects(input, NoChunk)
        given = [leaf for leaf in tree_leaves(input) if isinstance(leaf, Tensor)]
        grad = torch.is_grad_enabled() and (
            any(t.requires_grad for t in given) or any(p.requires_grad for p in self._module.parameters())
        )
        wanting = [t for t in given if grad and t.requires_grad]
        inputs = [plain(t) for t in wanting]
        with torch.no_grad(), self.explained():
            run, output, wanted = self._forward(input, [grad and t.requires_grad for t in given], grad)
        run.inputs_split = [has_rows(t) for t in wanting]
        if not any(wanted):
            return unpack_objects(output)
        leaves, spec = tree_flatten(output)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        outputs = with_backward([leaves[place] for place in places], wanted, inputs, run.backward)
        for place, tensor in zip(places, outputs, strict=True):
            leaves[place] = tensor
        return unpack_objects(tree_unflatten(leaves, spec))

    def _forward(self, x: Any, fed_flags: list[bool], grad: bool) -> tuple["Run[Passes]", Any, list[bool]]:
        """Returns the run, the merged output, and for each tensor of it whether it wants a gradient."""
        parts = split(x, self._settings.microbatches)
        run = self.begin(len(parts), grad)
        this = run.this
        self._tell(this)
        self.side_outputs.reveal()
        results, fed, ahead = [], 0, 2 * len(self._stages)
        for action in self._actions(len(self.remotes), this)[0]:
            while fed < min(len(parts), action.microbatch + ahead):
                self.feed(parts[fed], this, fed, fed_flags)
                fed += 1
            self.run_stage([action], this)
            results.append(self.output(this, action.microbatch))
        if isinstance(self.ports.feed, Sender):
            self.ports.feed.release()  # the outputs were computed from all of it
        self.side_outputs.show(partial(_is_of_whole_batch, this))
        tensors = [[leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] for result in results]
        output = merge(results)
        wanted = [any(t.requires_grad for t in column) for column in zip(*tensors, strict=True)]
        columns = [column for column, flag in zip(zip(*tensors, strict=True), wanted, strict=True) if flag]
        run.rows = [[t.shape[0] for t in column] for column in columns]
        run.flags = [[t.requires_grad for t in column] for column in columns]
        return run, output, wanted

    def _tell(self, this: Pass) -> None:
        """Tells the stages on workers to run the forward part of a pass.

        A command does, over the control plane. Where passes without a backward part follow each other, a command has
        the stages take such passes from the data plane, each announced ahead of its inputs, until there is another
        command for any of them.
        """
        follows_another, self._evaluates = self._evaluates, not this.grad
        if this.grad or not follows_another or not self.remotes:
            for i, remote in enumerate(self.remotes):
                remote.start(StageCommands.forward, this, *self._actions(i, this))
            return
        if self._announcing != this.context or any(remote.has_queued for remote in self.remotes):
            for remote in self.remotes:
                remote.start_until(self.end_announcements, StageCommands.evaluate, this.context)
            self._announcing = this.context
        for remote in self.remotes:
            remote.version += 1
        assert isinstance(self.ports.feed, Sender)
        self.ports.feed.announce(Announcement(this.number, this.microbatches, this.seed))

    def end_announcements(self) -> None:
        """Has the stages on workers take commands again."""
        if self._announcing is not None:
            assert isinstance(self.ports.feed, Sender)
            self.ports.feed.end_passes()
            self._announcing = None

    def backward(
        self, run: "Run[Passes]", grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Runs the backward part of a pass on every stage.

        Args:
            run: The pass.
            grads: The gradient of each output that wants one; ``None`` where the loss did not use it.
            inputs: The pipeline's inputs that want a gradient.

        Returns:
            The gradients of ``inputs``.
        """
        this = run.this
        self.num_backward += 1
        with self.explained():
            columns = [
                [None] * this.microbatches if grad is None else grad.split(rows)
                for grad, rows in zip(grads, run.rows, strict=True)
            ]
            for m in range(this.microbatches):
                parts = [column[m] for column, flags in zip(columns, run.flags, strict=True) if flags[m]]
                self.ports.output_grads.send(parts, this.number, m)
            for i, remote in enumerate(self.remotes):
                self._carry_changes(i)  # autograd leaves out what wants no gradient by now
                remote.start(StageCommands.backward, this.number)
            actions = self._actions(len(self.remotes), this)[1]
            self.run_stage(actions, this)
            self.ports.ties.move_gradients(this.number)
            if not inputs:
                return []
            received = {a.microbatch: self.ports.fed_back.receive(this.number, a.microbatch) for a in actions}
        merged = [
            _joined([received[m][k] for m in range(this.microbatches)], original, is_split)
            for k, (original, is_split) in enumerate(zip(inputs, run.inputs_split, strict=True))
        ]
        return merged

    def feed(self, part: Any, this: Pass, m: int, requires_grad: list[bool]) -> None:
        """Sends a micro-batch to stage 0; no skip waits before the first layer."""
        self.ports.feed.send((part, {}), this.number, m, requires_grad=requires_grad)

    def output(self, this: Pass, m: int) -> Any:
        """What the last layer returned for a micro-batch; every skip has been popped by then."""
        value, _ = self.side_outputs.taken(self.ports.outputs.receive(this.number, m))
        return value

    def begin(self, microbatches: int, grad: bool, context: PassContext | None = None) -> "Run[Passes]":
        """Begins a pass: what has to be the same everywhere is, once the stages do what they are told next."""
        if list(self._module._modules.values()) != self._children:
            raise RuntimeError(
                "the pipelined module has got other layers since the pipeline started, which cannot change it in "
                "mid-run. Change the model before fit, or in configure_model."
            )
        for sender in self.ports.senders:
            sender.flush()  # what earlier passes sent has arrived: their results are here
        number, self._num_passes = self._num_passes, self._num_passes + 1
        this = Pass(
            number=number,
            microbatches=microbatches,
            grad=grad,
            recomputed=num_recomputed(self._settings.checkpoint, microbatches) if grad else 0,
            at_once=not self._settings.pipelined_backward,
            seed=self._next_seed(grad),
            context=context or PassContext.capture(self.stage.device.type),
        )
        self._share_ties(number)
        for i in range(len(self.remotes)):
            self._carry_changes(i)
        return Run(this, self)

    def run_stage(self, actions: Sequence[Action], this: Pass) -> None:
        """Runs actions of the stage on this process."""
        with self.side_outputs.hidden_from_layers():
            self.stage.run(actions, this)

    def actions(self, i: int, this: Pass) -> list[Action]:
        """What stage ``i`` does in a whole pass."""
        return SCHEDULES[self._settings.schedule](len(self._stages), this.microbatches)[i]

    def _actions(self, i: int, this: Pass) -> tuple[list[Action], list[Action]]:
        """What stage ``i`` does in the forward part and in the backward part of a pass."""
        return _in_two_parts(self._settings.schedule, len(self._stages), this.microbatches)[i]

    def _share_ties(self, number: int) -> None:
        """Brings copies of tied parameters up to date, if the values may have changed since the last time."""
        ties = self.ports.ties
        now = self._num_steps(), ties.versions
        if now != self._shared and ties.any:
            for remote in self.remotes:
                remote.queue(StageCommands.share_values, number)
            ties.share_values(number)
        self._shared = now

    def _carry_changes(self, i: int) -> None:
        """Carries what has changed on the driver to stage ``i``, together with the next call."""
        self.mirrors[i].carry(self.remotes[i])

    def forget(self, number: int) -> None:
        """Has every stage forget a pass whose backward part can no longer come."""
        self.stage.discard(number)
        for remote in self.remotes:
            remote.queue(StageCommands.discard, number)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises the cause of a failure instead of its consequences, and lets no neighbour wait for this process."""
        if self._failures.any:
            self._failures.raise_cause()
        with self._failures.explained(), in_pass(self.remotes):
            try:
                yield
            except BaseException:  # Ctrl-C too must leave no stage waiting
                self._announcing = None  # what fails takes no more passes
                for sender in (*self.ports.senders, *self.ports.ties.senders):
                    sender.fail()
                raise


def _is_of_whole_batch(this: Pass, value: Any) -> bool:
    """Whether a side output is that of one process, of which no gradient is asked."""
    return this.microbatches == 1 and not (this.grad and (this.recomputed or with_graph(value)))


@cache
def _in_two_parts(schedule: str, stages: int, microbatches: int) -> list[tuple[list[Action], list[Action]]]:
    rows = SCHEDULES[schedule](stages, microbatches)
    return [([a for a in row if a.kind == "F"], [a for a in row if a.kind == "B"]) for row in rows]


def _joined(grads: Sequence[Tensor | None], original: Tensor, is_split: bool) -> Tensor | None:
    """Joins the gradients of the micro-batches; where there is none it is zero.

    Args:
        grads: One a micro-batch.
        original: The input that they belong to.
        is_split: Whether each micro-batch got rows of it, and not all of it.
    """
    known = [grad for grad in grads if grad is not None]
    if not known:
        return None
    if not is_split:
        return torch.stack(known).sum(0)
    parts = original.tensor_split(len(grads))
    filled = [torch.zeros_like(part) if grad is None else grad for part, grad in zip(parts, grads, strict=True)]
    return torch.cat(filled)
