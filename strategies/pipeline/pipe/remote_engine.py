"""Runs a ``Pipe`` with partitions on other RPC workers: the user's process leads them through passes.

              one RPC a pass and partition: commands                      (control plane, as in the strategy)
    user's process ─────────────┬──────────────────────┐
      inputs ──▶ partition 0 ──▶ partition 1 ──▶ partition 2 ──▶ outputs  (data plane: from inbox to inbox)

Partitions of this process run on the calling thread, in the order of the clock cycles. Each partition on a worker runs
on
a thread of its own, so micro-batches in different processes overlap. The outputs of a pass are results of one autograd
node, whose backward part runs the backward part of every partition.

Index letters: ``m`` micro-batch, ``i`` partition.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer

from strategies.commands.host import Host, close
from strategies.common.activity import Activity
from strategies.common.autograd import with_backward
from strategies.common.stage_layers import StageLayers, locate
from strategies.common.torch_compat import rpc_is_initialized, tree_map_only
from strategies.common.trees import tensors_in
from strategies.optim.restricted import numbers_of, parameters_of, restricted, taken_apart
from strategies.optim.trial import check_divisible
from strategies.pipeline.control.client import Failures, NotCopyable, RemoteStage, StageProcess, leading
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.watch import Watch
from strategies.pipeline.executor.executor import Run
from strategies.pipeline.optim.optimizers import PipelineOptimizers, follow_optimizer
from strategies.pipeline.pipe.local_engine import ForwardPass, clock_cycles
from strategies.pipeline.pipe.routing import Inbox, Letters, MessageKey, Router, Routes, give_up
from strategies.pipeline.pipe.with_device import Partition
from strategies.pipeline.schedule.operations import Operation, Post
from strategies.pipeline.schedule.tables import Action
from strategies.pipeline.stage.calling import call_partition
from strategies.pipeline.stage.microbatch.split import pack_objects, unpack_objects
from strategies.pipeline.stage.skip import Key, skips_of
from strategies.pipeline.stage.stage import Pass, Stage, chunks_of
from strategies.pipeline.state.carriers import Carrier, Shipped, pickled
from strategies.pipeline.state.mirror import Mirror
from strategies.pipeline.state.stage_state import StageState
from strategies.pipeline.state.stand_ins import move_to_meta
from strategies.pipeline.state.state_dict import StateOfStages
from strategies.pipeline.worker.hosted import HostedStage, taken
from strategies.pipeline.worker.setup import StageSetup


class RemoteEngine(NotCopyable):
    """Leads the partitions through passes.

    Args:
        module: The ``Pipe``, which has the layers of the partitions.
        partitions: All partitions.
        deferred_batch_norm: Update running statistics once per pass instead of once per micro-batch.

    Raises:
        ValueError: If a layer cannot be sent to its worker.
    """

    def __init__(self, module: nn.Module, partitions: Sequence[Partition], *, deferred_batch_norm: bool) -> None:
        self._module = weakref.ref(module)
        self._descriptions = [partition.describe(i) for i, partition in enumerate(partitions)]
        carriers = {i: _shipped(p.layers) for i, p in enumerate(partitions) if p.place.worker is not None}
        self._num_passes, self._current, self._letters = 0, -1, Letters()
        self._own_inbox = Inbox()
        inboxes: list[Any] = [
            rpc.RRef(Inbox()) if p.place.worker is None else rpc.remote(p.place.worker, Inbox) for p in partitions
        ]
        own_inbox: Any = rpc.RRef(self._own_inbox)
        self._first, self._last, self._inboxes = inboxes[0], inboxes[-1], inboxes
        self._failures = self._no_failures()
        self._stages: dict[int, Stage] = {}
        self.remotes: dict[int, RemoteStage] = {}
        """The partitions that live elsewhere, by number."""
        hosts = []
        for i, (p, routes) in enumerate(
            zip(partitions, _routes(partitions, inboxes, own_inbox, self._descriptions), strict=True)
        ):
            if p.place.worker is None:
                self._add_local(i, p, routes, deferred_batch_norm)
            else:
                setup = StageSetup(i, str(p.place.device), deferred_batch_norm, call=call_partition)
                hosts.append(rpc.remote(p.place.worker, host_partition, args=(setup, carriers.pop(i), routes)))
                self.remotes[i] = self._remote(p.place.worker, hosts[-1], self._descriptions[i])
        weakref.finalize(self, _close, hosts)
        if timeout_seconds := rpc.get_rpc_timeout():  # zero means no time-out
            watch = Watch(list(self.remotes.values()), timeout_seconds)
            weakref.finalize(self, watch.end)
        for remote in self.remotes.values():
            remote.ask(StageCommands.num_kept).wait()  # raises the error if unpacking has failed
        for i in self.remotes:
            move_to_meta(partitions[i].layers, module, [], stage=self.remotes[i])
        self.followed = FollowedOptimizers([partitions[i].layers for i in self.remotes], list(self.remotes.values()))
        self._mirrors = {i: Mirror(partitions[i].layers, self._descriptions[i]) for i in self.remotes}
        self.state = StateOfStages(
            module, [p.layers for p in partitions], [self.remotes.get(i) for i in range(len(partitions))]
        )

    def run(self, parts: Sequence[Any], this: ForwardPass) -> list[Any]:
        """Run the pass on the inputs of the micro-batches; returns their outputs."""
        parts = [pack_objects(part) for part in parts]
        given = tensors_in(parts)
        module = self._module()
        assert module is not None
        trained = any(p.requires_grad for p in module.parameters())
        grad = torch.is_grad_enabled() and (trained or any(t.requires_grad for t in given))
        inputs = [t for t in given if grad and t.requires_grad]
        number, self._num_passes = self._num_passes, self._num_passes + 1
        todo = Pass(number, len(parts), grad, this.recomputed if grad else 0, False, this.seed, this.context)
        run = Run(todo, self)
        with torch.no_grad(), self._explained(number):
            results = self._forward(parts, todo)
        values, required = [value for value, _ in results], [flags for _, flags in results]
        wanted = [flag for flags in required for flag in flags]
        if any(wanted):
            values = with_backward(values, wanted, inputs, partial(_backward, run, required))
        return [unpack_objects(value) for value in values]

    def _forward(self, parts: Sequence[Any], this: Pass) -> list[tuple[Any, list[bool]]]:
        num, last = len(parts), len(self._inboxes) - 1
        for i, remote in self.remotes.items():
            self._carry_changes(i)
            row = [operation for m in range(num) for operation in _forward_row(m, i)]
            remote.send(StageCommands.run, this, ("forward", num), row)
        for m, part in enumerate(parts):
            flags = [this.grad and tensor.requires_grad for tensor in tensors_in(part)]
            own = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), part)  # a layer may change it in place
            self._letters.send(self._first, MessageKey("F", this.number, m, None), (own, flags))
        for m, i in clock_cycles(num, last + 1):
            if i in self._stages:
                self._stages[i].run(_forward_row(m, i), this)
        self._letters.flush()
        return [self._own_inbox.take(MessageKey("F", this.number, m, None)) for m in range(num)]

    def backward(
        self,
        this: Pass,
        required: Sequence[Sequence[bool]],
        grads: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Run the backward part of a pass on every partition, and wait for all.

        Args:
            this: The pass.
            required: For each micro-batch, whether each of its outputs requires a gradient.
            grads: The gradient of each output of each micro-batch that requires one.
            inputs: Inputs of the first partition that require a gradient.

        Returns:
            The gradients of ``inputs``.
        """
        ahead = iter(grads)
        with self._explained(this.number):
            for m, flags in enumerate(required):
                if any(flags):
                    part = [next(ahead) for flag in flags if flag]
                    self._letters.send(self._last, MessageKey("B", this.number, m, None), part)
            answers = []
            for i, remote in self.remotes.items():
                self._carry_changes(i)  # autograd skips parameters that have been frozen since
                row = [operation for m in reversed(range(this.microbatches)) for operation in _backward_row(m, i)]
                answers.append(remote.ask(StageCommands.run, this, ("backward", this.microbatches), row))
            for m, i in reversed(list(clock_cycles(this.microbatches, len(self._inboxes)))):
                if i in self._stages:
                    self._stages[i].run(_backward_row(m, i), this)
            self._letters.flush()
            for answer in answers:
                answer.wait()
            if not inputs:
                return []
            return [
                grad
                for m in range(this.microbatches)
                for grad in self._own_inbox.take(MessageKey("B", this.number, m, None))
            ]

    def forget(self, number: int) -> None:
        """Drop a pass on every partition, because its backward part can no longer come."""
        for stage in self._stages.values():
            stage.discard(number)
        self._own_inbox.forget(number)
        for remote in self.remotes.values():
            remote.send(StageCommands.discard, number)

    def _carry_changes(self, i: int) -> None:
        self._mirrors[i].carry(self.remotes[i])

    @contextmanager
    def _explained(self, number: int) -> Iterator[None]:
        """Raise the cause of a failure instead of its consequences, and end what is under way of the pass."""
        self._current, failures = number, self._failures
        if failures.any:  # such as in the last step of an optimizer
            self._fail(number)
            failures.raise_cause()
        with leading(failures, list(self.remotes.values()), partial(self._fail, number)):
            yield

    def _fail(self, number: int) -> None:
        self._failures = self._no_failures()  # the next pass starts with none
        for i, remote in self.remotes.items():
            remote.failures = self._failures
            with suppress(RuntimeError):  # it has gone
                rpc.rpc_async(self._inboxes[i].owner(), give_up, args=(self._inboxes[i], number), timeout=0)
        self.forget(number)

    def _no_failures(self) -> Failures:
        """Return an empty list of failures for the next passes; the first failure ends waits of this process."""
        failures, me = Failures(), weakref.ref(self)

        def wake(_: Any) -> None:
            if (placed := me()) is not None:
                for inbox in (placed._own_inbox, *(placed._inboxes[i].local_value() for i in placed._stages)):
                    inbox.give_up(placed._current)

        failures.first.add_done_callback(wake)
        return failures

    def _add_local(self, i: int, partition: Partition, routes: Routes, deferred_batch_norm: bool) -> None:
        device, call = partition.place.device, call_partition
        router = Router(i, routes, device)
        chunks = chunks_of(partition.layers, router.ports(), device, deferred_batch_norm=deferred_batch_norm, call=call)
        self._stages[i] = Stage(chunks, router)

    def _remote(self, worker: str, host: Any, description: str) -> RemoteStage:
        process = StageProcess(
            f"RPC worker {worker}",
            ended=lambda: None,
            doing=lambda: "",
            kill=lambda: None,  # the user has started it
        )
        return RemoteStage(worker, host, description, process, self._failures)


def _forward_row(m: int, i: int) -> list[Operation]:
    """Return what partition ``i`` does with a micro-batch; peers are known to its router."""
    return [Post("RECV", "F", m, i, -1), Action("F", m, i), Post("SEND", "F", m, i + 1, -1)]


def _backward_row(m: int, i: int) -> list[Operation]:
    return [Post("RECV", "B", m, i + 1, -1), Action("B", m, i), Post("SEND", "B", m, i, -1)]


def _backward(
    run: Run[RemoteEngine],
    required: Sequence[Sequence[bool]],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
) -> list[Tensor | None]:
    return run.spend().backward(run.this, required, grads, inputs)


_ADVICE = (
    "Let the pipeline follow the optimizer, optimizer = pipe.follow(optimizer), so that its steps reach every process; "
    "for gradients of all partitions call pipe.clip_grad_norm_(optimizer, max_norm), and to clear them zero_grad() of "
    "the optimizer or of the Pipe."
)


class FollowedOptimizers:
    """Optimizers of the user that partitions on workers follow.

    Args:
        elsewhere: For each partition on a worker, its layers, whose parameters are stand-ins in this process.
        remotes: The stages on workers, in the same order.
    """

    def __init__(self, elsewhere: Sequence[StageLayers], remotes: Sequence[RemoteStage]) -> None:
        self._elsewhere, self._remotes = list(elsewhere), list(remotes)
        self.optimizers = PipelineOptimizers([], partial(locate, self._elsewhere, None), lambda: None)
        self.optimizers.connect(self._remotes, [[] for _ in self._remotes])
        for layers in elsewhere:
            for parameter in layers.parameters():
                vars(parameter).update(relay_advice=_ADVICE, relay_is_followed=False)

    def follow(self, optimizer: Optimizer) -> None:
        """Follow an optimizer from now on; see :meth:`~strategies.pipeline.pipe.pipe.Pipe.follow`."""
        if any(isinstance(key, Tensor) and key.is_meta for key in optimizer.state):
            raise ValueError(
                f"this {type(optimizer).__name__} already has a state of parameters that live in another process; let "
                "the Pipe follow it before its first step and before load_state_dict"
            )
        if any(optimizer is own for own in self.optimizers.optimizers):
            raise ValueError(f"the Pipe follows this {type(optimizer).__name__} already")
        owned = [list(layers.parameters()) for layers in self._elsewhere]
        elsewhere = {id(p) for part in owned for p in part}
        check_divisible(optimizer, [*owned, [p for p in parameters_of(optimizer) if id(p) not in elsewhere]])
        parts = [_part(optimizer, layers) for layers in self._elsewhere]
        for remote, (blob, numbers) in zip(self._remotes, parts, strict=True):
            remote.ask(StageCommands.adopt, blob, numbers).wait()
        self.optimizers.add(optimizer, [numbers for _, numbers in parts])
        follow_optimizer(optimizer, self.optimizers)
        for parameter in parameters_of(optimizer):
            if parameter.is_meta:
                vars(parameter)["relay_is_followed"] = True


def _part(optimizer: Optimizer, layers: nn.Module) -> tuple[bytes, list[int]]:
    """Return the part of an optimizer for some layers, with parameters given by name, and the parameters' numbers."""
    owned = list(layers.parameters())
    names = {id(parameter): name for name, parameter in layers.named_parameters()}
    cls, attributes = taken_apart(restricted(optimizer, owned))
    groups = attributes["param_groups"]
    attributes["param_groups"] = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in groups]
    return cloudpickle.dumps((cls, attributes)), numbers_of(optimizer, owned)


def host_partition(setup: StageSetup, carrier: Carrier, routes: Routes) -> Host[HostedStage]:
    """Receive a partition; ``rpc.remote`` calls this on the worker of the partition."""
    activity = Activity()

    def create() -> HostedStage:
        router = Router(setup.index, routes, torch.device(setup.device), activity.wait)
        return HostedStage(setup, taken(carrier, activity), router, activity)

    return Host(create, StageCommands, name=routes.description, activity=activity).start()


def _close(hosts: Sequence[Any]) -> None:
    if rpc_is_initialized():
        for host in hosts:
            with suppress(RuntimeError):  # the worker has ended, and its threads with it
                rpc.rpc_async(host.owner(), close, args=(host,), timeout=0)


def _shipped(layers: StageLayers) -> Shipped:
    state = StageState.capture(layers, list(layers.parameters()))
    return Shipped(pickled(state, layers, None, streams=False).blob)


def _routes(
    partitions: Sequence[Partition], inboxes: Sequence[Any], own_inbox: Any, descriptions: Sequence[str]
) -> list[Routes]:
    """Return the routes of each partition: values go to the next one, skips directly from stashing to popping
    partition.
    """
    stashed_by: dict[Key, int] = {}
    sources: list[dict[Key | None, Any]] = [{None: inbox} for inbox in (own_inbox, *inboxes[:-1])]
    targets: list[dict[Key | None, Any]] = [{None: inbox} for inbox in (*inboxes[1:], own_inbox)]
    for i, partition in enumerate(partitions):
        stashed, popped = skips_of(partition.layers)
        stashed_by.update(dict.fromkeys(stashed, i))
        for key in popped:
            if (origin := stashed_by[key]) != i:
                sources[i][key] = inboxes[origin]
                targets[origin][key] = inboxes[i]
    return [
        Routes(own, *ends, description)
        for own, ends, description in zip(inboxes, zip(sources, targets, strict=True), descriptions, strict=True)
    ]
