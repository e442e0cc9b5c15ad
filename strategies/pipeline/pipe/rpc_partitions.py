"""A ``Pipe`` with partitions on RPC workers: a pipeline whose driver is the user's process.

    user's process ── commands ─┬──────────────────────┐
      inputs ──▶ partition 0 ──▶ partition 1 ──▶ partition 2 ──▶ outputs

Each partition on a worker is a stage with a separate thread, so micro-batches in different places overlap. Partitions
on one worker compute one at a time, because a process has one set of random generators. The partitions of the user's
process are chunks of the driver's stage. The schedule is ``gpipe``, for any placement of partitions.

Index letters: ``i`` partition, which is a chunk of the pipeline; ``r`` rank.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc
from torch.utils.weak import WeakTensorKeyDictionary

from strategies.commands.host import Host, close
from strategies.common.activity import Activity
from strategies.common.random_seeds import RandomStateKeeper
from strategies.common.stage_layers import StageLayers
from strategies.common.torch_compat import rpc_is_initialized
from strategies.pipeline.control.client import Failures, NotCopyable, RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.hanging_stages import Watch
from strategies.pipeline.control.lost_workers import StageProcess
from strategies.pipeline.executor.executor import Executor, FillDrain, PipelineParts
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.pipe.followed import FollowedOptimizers
from strategies.pipeline.pipe.local_engine import check_output
from strategies.pipeline.pipe.with_device import Partition
from strategies.pipeline.schedule.program import ProgramPart, Programs, fill_drain_table
from strategies.pipeline.schedule.tables import Placement
from strategies.pipeline.stage.calling import call_partition
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.stage.layers import Before, call_one_by_one
from strategies.pipeline.stage.microbatch.split import pack_objects, unpack_objects
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.stage import Chunk, DriverCode, Stage, chunks_of
from strategies.pipeline.state.carriers import Carrier, Shipped, pickled
from strategies.pipeline.state.stage_state import StageState
from strategies.pipeline.state.stand_ins import check_layouts, move_to_meta
from strategies.pipeline.state.state_dict import StateOfStages
from strategies.pipeline.transport.rpc import Inbox, RpcTransport
from strategies.pipeline.worker.hosted import HostedStage, taken
from strategies.pipeline.worker.setup import StageSetup

_CPU = torch.device("cpu")

_turn = threading.Lock()
"""The lock of the partition that computes in this process. Its thread holds the lock."""


class RpcPartitions(NotCopyable):
    """Runs passes on the partitions.

    Args:
        module: The ``Pipe``, which contains the layers of the partitions.
        partitions: All partitions.
        deferred_batch_norm: Update running statistics once per pass instead of once per micro-batch.

    Raises:
        ValueError: If a layer cannot be sent to its worker.
    """

    def __init__(self, module: nn.Module, partitions: Sequence[Partition], *, deferred_batch_norm: bool) -> None:
        descriptions = [partition.describe(i) for i, partition in enumerate(partitions)]
        elsewhere = [i for i, partition in enumerate(partitions) if partition.place.worker is not None]
        shipped = [_shipped(partitions[i].layers) for i in elsewhere]
        placement = placement_of(partitions)
        inboxes: list[Any] = [rpc.remote(partitions[i].place.worker, Inbox) for i in elsewhere]
        inboxes.append(rpc.RRef(Inbox()))
        failures, hosts = Failures(), []
        self.remotes: list[RemoteStage] = []
        """The partitions on workers, in order."""
        for r, i in enumerate(elsewhere):
            device, worker = str(partitions[i].place.device), partitions[i].place.worker
            call = _CallPartition(descriptions[i])
            setup = StageSetup(i, device, deferred_batch_norm, call=call, placement=placement)
            arguments = (setup, shipped[r], r, inboxes, descriptions[i])
            hosts.append(rpc.remote(worker, host_partition, args=arguments))
            process = StageProcess(
                f"RPC worker {worker}",
                ended=lambda: None,
                doing=lambda: "",
                kill=lambda: None,  # the user started this process
            )
            self.remotes.append(RemoteStage(str(worker), hosts[-1], descriptions[i], process, failures))
        weakref.finalize(self, _close, hosts)
        if timeout_seconds := rpc.get_rpc_timeout():  # zero means no time-out
            watch = Watch(self.remotes, timeout_seconds)
            weakref.finalize(self, watch.end)
        for remote in self.remotes:
            remote.ask(StageCommands.num_kept).wait()  # raises the error if unpacking has failed
        replaced = WeakTensorKeyDictionary()
        for i, remote in zip(elsewhere, self.remotes, strict=True):
            layers = partitions[i].layers
            before = list(layers.parameters())
            move_to_meta(layers, module, [], stage=remote)
            for old, new in zip(before, layers.parameters(), strict=True):
                if old is not new:
                    replaced[old] = new
        self.followed = FollowedOptimizers([partitions[i].layers for i in elsewhere], self.remotes, replaced)
        own = {i: partition for i, partition in enumerate(partitions) if i not in elsewhere}
        transport = RpcTransport(len(elsewhere), inboxes, _CPU)
        edges = Edges(
            len(elsewhere), placement.process_of, transport, {i: partition.place.device for i, partition in own.items()}
        )
        whole = nn.Module()
        whole._modules.update(module._modules)
        self._executor = _PartitionExecutor(
            PipelineParts(
                module=whole,
                stages=[*(partitions[i].layers for i in elsewhere), StageLayers([range(0)])],
                stage=_own_stage(own, descriptions, edges, deferred_batch_norm),
                programs=Programs(partial(fill_drain_table, placement), placement),
                edges=edges,
                ties=None,
                remotes=self.remotes,
                failures=failures,
                settings=Settings(),
                next_seed=lambda grad: 0,
                num_updates=lambda: 0,
            ),
            transport,
        )
        self._batch = FillDrain(self._executor)
        by_number = dict(zip(elsewhere, self.remotes, strict=True))
        self.state = StateOfStages(
            module, [p.layers for p in partitions], [by_number.get(i) for i in range(len(partitions))]
        )

    def run(self, parts: Sequence[Any], this: Pass) -> list[Any]:
        """Run the pass on the inputs of the micro-batches, and return their outputs."""
        outputs = self._batch.run([pack_objects(part) for part in parts], like=this)
        return [unpack_objects(output) for output in outputs]


class _PartitionExecutor(Executor):
    """Runs passes on the partitions. A failure ends only the pass in which it occurs.

    Args:
        parts: The partitions and their connections.
        transport: Transfers values between partitions.
    """

    def __init__(self, parts: PipelineParts, transport: RpcTransport) -> None:
        super().__init__(parts)
        self._transport = transport
        self._begin_without_failures(parts.failures)

    def run(self, part: ProgramPart, this: Pass, code: DriverCode) -> None:
        self._parts.failures.raise_untold()  # an earlier failure would not end the waits of this pass
        super().run(part, this, code)
        if part == "backward":
            self.wait()  # user code may read and change gradients immediately
        self.current = -1  # if another call fails, the backward part of this pass can still follow

    def explained(self) -> AbstractContextManager[None]:
        failures = self._parts.failures
        if failures.any:  # such as in the last step of an optimizer
            self._fail()
            failures.raise_cause()
        return super().explained()

    def _fail(self) -> None:
        self._begin_without_failures(Failures())
        self._transport.give_up(self.current)
        self.discard(self.current)

    def _begin_without_failures(self, failures: Failures) -> None:
        """Start to note failures. The first failure ends the waits of this process."""
        self._parts = replace(self._parts, failures=failures)
        for remote in self.remotes:
            remote.failures = failures
        failures.first.add_done_callback(partial(_wake, weakref.ref(self)))

    def give_up_here(self) -> None:
        """End the waits of this process."""
        self._transport.inbox.give_up(self.current)


def _wake(executor: "weakref.ref[_PartitionExecutor]", _: Any) -> None:
    if (known := executor()) is not None:
        known.give_up_here()


@dataclass(frozen=True)
class _CallPartition:
    """Calls a partition, and checks its output."""

    description: str

    def __call__(self, layers: nn.Sequential, value: Any, before: Before) -> Any:
        output = call_partition(layers, value, before)
        check_output(output, self.description)
        return output


def placement_of(partitions: Sequence[Partition]) -> Placement:
    """Return the process of each chunk: one for each partition on a worker, and the user's process as the last.

    The user's process takes the outputs: if the last partition is on a worker, a chunk without layers follows it.
    """
    num_elsewhere = sum(partition.place.worker is not None for partition in partitions)
    ahead = iter(range(num_elsewhere))
    process_of = [num_elsewhere if partition.place.worker is None else next(ahead) for partition in partitions]
    return Placement((*process_of, num_elsewhere) if process_of[-1] != num_elsewhere else tuple(process_of))


def _own_stage(
    own: dict[int, Partition], descriptions: Sequence[str], edges: Edges, deferred_batch_norm: bool
) -> Stage:
    """Return the stage of the user's process, whose chunks are its partitions."""
    random_state = RandomStateKeeper(*{partition.place.device for partition in own.values()})
    chunks: dict[int, Chunk] = {}
    for i, ports in edges.ports().items():
        partition = own.get(i)
        chunks |= chunks_of(
            StageLayers([range(i, i)]) if partition is None else partition.layers,
            {i: ports},
            _CPU if partition is None else partition.place.device,
            deferred_batch_norm=deferred_batch_norm,
            call=call_one_by_one if partition is None else _CallPartition(descriptions[i]),
            random_state=random_state,
        )
    return Stage(chunks, edges, name="the process of the Pipe")


def host_partition(
    setup: StageSetup, carrier: Carrier, rank: int, inboxes: Sequence[Any], description: str
) -> Host[HostedStage]:
    """Receive a partition; ``rpc.remote`` calls this on the worker of the partition.

    Args:
        setup: How the partition runs.
        carrier: Contains the state of the partition.
        rank: The rank of the partition.
        inboxes: The ``RRef`` to the inbox of each rank.
        description: A description of the partition for messages.
    """
    activity = _InTurn()

    def create() -> HostedStage:
        transport = RpcTransport(rank, inboxes, torch.device(setup.device), activity.wait)
        return HostedStage(
            setup, taken(carrier, activity), Edges(rank, setup.placement.process_of, transport), activity
        )

    return Host(create, StageCommands, name=description, activity=activity).start()


class _InTurn(Activity):
    """Lets one partition of the process compute at a time, since all partitions seed and use the same generators."""

    @contextmanager
    def running(self) -> Iterator[None]:
        with _turn, super().running():
            yield

    def wait(self, wait: Callable[[], Any]) -> Any:
        return super().wait(partial(_out_of_turn, wait))

    def idle(self, wait: Callable[[], Any]) -> Any:
        return super().idle(partial(_out_of_turn, wait))


def _out_of_turn(wait: Callable[[], Any]) -> Any:
    _turn.release()
    try:
        return wait()
    finally:
        _turn.acquire()


def _close(hosts: Sequence[Any]) -> None:
    if rpc_is_initialized():
        for host in hosts:
            with suppress(RuntimeError):  # the worker and its threads have ended
                rpc.rpc_async(host.owner(), close, args=(host,), timeout=0)


def _shipped(layers: StageLayers) -> Shipped:
    check_layouts(layers)
    state = StageState.capture(layers, list(layers.parameters()))
    return Shipped(pickled(state, layers, None, small_bytes=sys.maxsize).blob)
