"""The driver of a pipeline starts the workers, sends each its stage, and keeps the last stage.

    input ──▶ worker: stage 0 ──▶ worker: stage 1 ──▶ driver: last stage ──▶ output

Under some schedules each stage has several chunks of layers, and values pass through all stages several times.

Between :meth:`Pipeline.start` and :meth:`Pipeline.close`, a call of the ``nn.Sequential`` runs the pipeline. For an
``nn.ModuleList``, the call of its last block runs it (:mod:`strategies.pipeline.partition.blocks`).
"""

import gc
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, rpc
from torch.optim import Optimizer
from torchmetrics import Metric

from strategies.common.joined_lists import lengths_of, parts_of
from strategies.common.patching import replaced
from strategies.common.random_seeds import Seeds
from strategies.common.stage_layers import StageLayers, describe, kinds_of, locate
from strategies.common.torch_compat import convert_tensors, replacing_conversion, without_torch_function
from strategies.common.waiting import Wait
from strategies.launch.allocator import keep_freed_memory
from strategies.launch.ranks import Ranks, World
from strategies.launch.rendezvous import store_at
from strategies.launch.rounds import Rounds
from strategies.launch.session import Peers, Session, environment_variables, join_data_plane, variables_of_nccl
from strategies.launch.workers import Workers, share_of_threads
from strategies.optim.restricted import numbers_of, parameters_of
from strategies.optim.trial import check_divisible
from strategies.pipeline.construction.without_memory import Construction
from strategies.pipeline.control.batch_recording import BatchRecording
from strategies.pipeline.control.client import (
    Failures,
    InterruptibleWait,
    NotCopyable,
    RemoteStage,
)
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.hanging_stages import Watch, abort_waits
from strategies.pipeline.control.lost_workers import StageProcess, cause_of
from strategies.pipeline.executor.executor import Executor, FillDrain, PipelineParts
from strategies.pipeline.executor.per_microbatch import PerMicrobatch, ReleaseFactors, UserStep
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.optimizers import PipelineOptimizers
from strategies.pipeline.optim.replicas import Averaging, Replicas, SharedSteps, connected
from strategies.pipeline.partition.blocks.calls import PlannedCalls, call_blocks
from strategies.pipeline.partition.blocks.deferred_blocks import DeferredBlocks, FindRows
from strategies.pipeline.partition.bypass import BypassCheck
from strategies.pipeline.partition.sequential import Pipelined, cut
from strategies.pipeline.recovery.recovery import Recoverer
from strategies.pipeline.recovery.repairs import Recovery, Repair
from strategies.pipeline.recovery.together import NUM_FLAGS, InStep
from strategies.pipeline.stage.action_recorder import ActionRecorder
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.stage.layers import PassContext, call_one_by_one, refuse_checkpoint_around
from strategies.pipeline.stage.microbatch.split import NoChunk
from strategies.pipeline.stage.records import ProcessRecords
from strategies.pipeline.stage.side_outputs import SideOutputs
from strategies.pipeline.stage.stage import Stage, chunks_of
from strategies.pipeline.state.carriers import InSlot, Parcel, pickled
from strategies.pipeline.state.remote_operations import Holder
from strategies.pipeline.state.returning import PartOfModule, bring_back
from strategies.pipeline.state.snapshots import check_snapshots
from strategies.pipeline.state.stage_state import StageState
from strategies.pipeline.state.stand_ins import check_layouts, move_to_meta, refuse_lost_values, without_layers
from strategies.pipeline.state.state_dict import StateOfStages
from strategies.pipeline.transport.device import num_communicators, routes_of
from strategies.pipeline.transport.interface import Transport
from strategies.pipeline.transport.link import ORDERS, Links, Sender
from strategies.pipeline.transport.planes import AUTO, GLOO, NCCL, open_transport, with_index
from strategies.pipeline.transport.slots import NUM_SLOTS, Slot, SlotAddress
from strategies.pipeline.transport.storages import send_storages
from strategies.pipeline.transport.ties import TiedParameters, find_ties, owned_parameters
from strategies.pipeline.worker.process import host
from strategies.pipeline.worker.setup import StageSetup
from strategies.sharding import divided_layers
from strategies.sharding.divided_layers import DividedModel, TensorGroup
from strategies.sharding.gathered_layers import ReplicaGroup, agree

_END_SECONDS = 5.0
"""How long a worker may take to end before it is killed."""


class StepInProgress(RuntimeError):
    """Layers cannot move while an output waits for its backward pass."""


@dataclass(frozen=True)
class ModelCopy:
    """A copy of the model whose layers are placed like the model's layers, such as an average of its weights.

    Attributes:
        model: The copy.
        module: The pipelined module of the copy.
    """

    model: nn.Module
    module: Pipelined


@dataclass(frozen=True)
class _RunningParts:
    """The state of a pipeline between :meth:`Pipeline.start` and :meth:`Pipeline.close`."""

    executor: Executor
    fill_drain: FillDrain
    per_microbatch: PerMicrobatch | None
    """``None`` if the schedule only runs whole batches."""
    states: list[StateOfStages]
    """The state of each list of layers of the model."""
    copies: list[StateOfStages]
    """The states of the copies of the model."""
    recoverer: Recoverer | None
    """Replaces lost workers and verifies steps; ``None`` if nothing does."""
    ending: ExitStack
    """Ends the pipeline, in the reverse order of its start."""


class _Connections(NamedTuple):
    """The connected workers of a pipeline."""

    transport: Transport | None
    remotes: Sequence[RemoteStage]


def _stage_process(processes: Workers | Ranks, i: int) -> StageProcess:
    return StageProcess(
        processes.describe(i),
        ended=lambda: processes.ended(i, wait_seconds=0.5),
        doing=lambda: processes.doing(i),
        kill=lambda: processes.kill(i),
    )


class Pipeline(NotCopyable):
    """Runs layers over several processes, with the last stage in this process.

    Args:
        module: The layers: an ``nn.Sequential``, or an ``nn.ModuleList`` whose blocks the model calls itself.
        balance: Number of layers of each chunk.
        devices: Device of each stage. The last one is the device of this process.
        settings: How to run.
        optimizers: Optimizers of parameters of ``module``. They may have further parameters, which stay here.
        model: The model that contains ``module``. A layer that refers to the model cannot be sent to a worker.
        seeds: Source of the layers' seeds; by default the global generator of this process.
        replicas: The other pipelines, if there are several.
        layer_peers: The pipelines that divide the layers of each stage, if there are several.
        divided: How they divide the layers. Parameters of the model are the parts of this pipeline.
        world: The ranks of this run, if a launcher such as torchrun started the processes.
        copies: Copies of ``model`` to which operations on all stages also apply. They cannot be called while the
            pipeline runs.
        skips_infinite_steps: Whether a gradient scaler looks for infinite gradients; see
            :class:`~strategies.pipeline.optim.optimizers.PipelineOptimizers`.
        is_reversed: Whether the model calls the blocks of an ``nn.ModuleList`` from the last to the first.
        repeating: Context in which the model's code runs a second time for some of the rows of a batch.
        path: Dotted path of ``module`` in ``model``, for messages.
        construction: Computes the values of tensors of ``module`` that have no values yet.
        gathers_on_end: Whether :meth:`close` returns the layers of the workers to this process.
        recovery: Whether lost workers are replaced and steps verified; ``None``: neither.
        together: Connects to the store through which the drivers of all pipelines agree on replacements.
        await_writes: Waits until no worker is writing a checkpoint. Called before new workers replace the present ones.

    Raises:
        ValueError: If lost workers cannot be replaced on this system or over this data plane.
    """

    def __init__(
        self,
        module: Pipelined,
        balance: Sequence[int],
        devices: Sequence[torch.device],
        settings: Settings,
        *,
        optimizers: Sequence[Optimizer] = (),
        model: nn.Module | None = None,
        seeds: Seeds | None = None,
        replicas: Replicas | None = None,
        layer_peers: Peers | None = None,
        divided: DividedModel | None = None,
        world: World | None = None,
        copies: Sequence[ModelCopy] = (),
        skips_infinite_steps: bool = False,
        path: str = "",
        is_reversed: bool = False,
        repeating: Callable[[], AbstractContextManager[Any]] = nullcontext,
        construction: Construction | None = None,
        gathers_on_end: bool = True,
        recovery: Recovery | None = None,
        together: Callable[[], Rounds] | None = None,
        await_writes: Callable[[], None] = lambda: None,
    ) -> None:
        self.module, self._is_reversed = module, is_reversed
        devices = [with_index(device) for device in devices]
        hosts = [None] * len(devices) if world is None else world.hosts
        if recovery is not None and settings.data_plane not in (AUTO, GLOO):
            raise ValueError(
                "lost workers are replaced and steps verified under data_plane='gloo' only, got "
                f"data_plane={settings.data_plane!r}. Use 'gloo' or 'auto', or leave recovery out."
            )
        self._plane = settings.plane(devices, hosts) if recovery is None else GLOO
        num_lists = len(lengths_of(module))
        self.programs = settings.programs(len(devices), ordered=self._plane != GLOO, num_lists=num_lists)
        self._model, self._given_copies = model, copies
        self.stages: list[StageLayers] = []
        """The layers of each stage. The list stays the same object; its items change if layers move between stages."""
        self._divide(balance)
        self.optimizers = PipelineOptimizers(
            optimizers,
            partial(locate, self.stages, model),
            self._prepare_gradients,
            renew=self._renew,
            recorder=self._recorder,
            skips_infinite_steps=skips_infinite_steps,
            divided=divided,
        )
        self.failures = Failures()
        """The failures of all processes since the last start, in the first session and in those that repairs begin."""
        self._devices, self.settings = devices, settings
        self._seeds, self._replicas, self._world = seeds or Seeds.ahead_of_the_process(), replicas, world
        self._layer_peers, self.divided = layer_peers, divided
        self._construction = construction
        self._blocks: DeferredBlocks | None = None
        if isinstance(module, nn.ModuleList):
            self._blocks = DeferredBlocks(
                module, self._run_blocks, path, model, is_reversed=is_reversed, repeating=repeating
            )
        self._bypass = BypassCheck(module, path)
        self._gathers_on_end = gathers_on_end
        self._running: _RunningParts | None = None
        self._workers: Workers | Ranks | None = None
        """The processes of the current session."""
        self._recovery, self._together, self._await_writes = recovery, together, await_writes
        if recovery is not None:
            check_snapshots()
        self.repairs: list[Repair] = []
        """The repairs of lost workers so far."""
        self._recordings: list[BatchRecording] = []

    @property
    def num_communicators(self) -> list[int]:
        """The number of NCCL communicators of each stage."""
        if self._plane != NCCL:
            return [0] * len(self._devices)
        routes = routes_of(self.programs.rank_of, self._ties)
        return [num_communicators(rank, routes) for rank in range(len(self._devices))]

    def _divide(self, balance: Sequence[int]) -> None:
        """Divide the layers of the model and of its copies into stages.

        Raises:
            ValueError: If chunks share modules or tensors that they cannot share.
        """
        module, model = self.module, self._model
        divided = partial(cut, balance=balance, stage_of=self.programs.rank_of, is_reversed=self._is_reversed)
        stages, inside = divided(module), set(module.modules())
        outside = [m for m in model.modules() if m not in inside] if model is not None else []
        self._ties = find_ties(stages, [p for m in outside for p in m._parameters.values() if p is not None])
        self._copies = [(copy, divided(copy.module)) for copy in self._given_copies]
        self.balance, self.stages[:] = list(balance), stages

    # The pipeline while it runs

    def _forward(self, input: Any) -> Any:
        """Run the pipeline. Replaces the module's ``forward`` while the pipeline runs."""
        if not self._bypass.has_run:
            self._bypass.note_call()
        if self.module.training or torch.is_grad_enabled():  # an evaluation has no backward pass
            refuse_checkpoint_around("the pipelined module")
        steps = self._running.per_microbatch.steps if self._running and self._running.per_microbatch else None
        if steps is not None and (step := steps.current) is not None:
            return step.call(input)
        return self._usable().fill_drain(input)

    def _run_blocks(self, value: PlannedCalls, find_rows: FindRows, list_number: int) -> Any:
        """Run the deferred block calls of one micro-batch, or those of a whole batch, which is split if possible."""
        if not self._bypass.has_run:
            self._bypass.note_call()
        running = self._usable()
        steps = running.per_microbatch.steps if running.per_microbatch else None
        if steps is not None and (step := steps.current) is not None:
            return step.call(value, list_number)
        rows = find_rows() if self.settings.microbatches > 1 else None
        if rows is None:
            return running.fill_drain.run_blocks(value, microbatches=1, list_number=list_number)
        table, plan = value
        marked = [
            NoChunk(leaf) if isinstance(leaf, Tensor) and not has_rows else leaf
            for leaf, has_rows in zip(table, rows, strict=True)
        ]
        return running.fill_drain.run_blocks((marked, plan), list_number=list_number)

    @contextmanager
    def step(
        self, repeat: Callable[..., Any] | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Iterator[None]:
        """Context for a step of training or evaluation.

        Args:
            repeat: Runs the code of the step again with fewer rows, to find out which values have rows; ``None`` if
                this is not needed or not possible. See :meth:`DeferredBlocks.step`.
            args: The positional arguments of the step.
            kwargs: The keyword arguments of the step.

        Raises:
            RuntimeError: If no step so far has called the layers, but this step computed with their weights here.
        """
        with nullcontext() if self._bypass.has_run else self._bypass.watching():
            if self._blocks is None or repeat is None:
                yield
            else:
                with self._blocks.step(repeat, args, kwargs or {}):
                    yield

    @contextmanager
    def calls_in_this_process(self) -> Iterator[None]:
        """Context in which the blocks of an ``nn.ModuleList`` in this process run when the model calls them."""
        if self._blocks is not None:
            self._blocks.end()
        try:
            yield
        finally:
            if self._blocks is not None and self._running is not None:
                self._blocks.start()

    def interleave(
        self,
        codes: Sequence[UserStep],
        weights: Sequence[float],
        context: PassContext,
        scale: float = 1.0,
        release_factors: Callable[[], ReleaseFactors] = ReleaseFactors,
        factor: float = 1.0,
    ) -> Tensor | None:
        """Run code once per micro-batch.

        See :meth:`~strategies.pipeline.executor.per_microbatch.PerMicrobatch.run`.
        """
        per_microbatch = self._usable().per_microbatch
        assert per_microbatch is not None, f"schedule={self.settings.schedule!r} runs whole batches"
        return per_microbatch.run(codes, weights, context, scale, release_factors, factor)

    def _usable(self) -> _RunningParts:
        """Return the running pipeline. After an error that the user caught, start a new one with the same state.

        Raises:
            RuntimeError: If the pipeline has ended.
            Exception: The same error again, if the layers of a dead worker are lost, or if there are other pipelines,
                which have not failed.
        """
        running = self._running
        if running is None:
            raise RuntimeError("the pipeline has ended, so this forward function of its module can no longer be called")
        if not self.failures.raised:
            return running
        has_peers = self._replicas is not None or self._layer_peers is not None
        if has_peers or any(remote.has_ended for remote in running.executor.remotes):
            self.failures.raise_cause()
        self._await_writes()
        self._gather(running, with_grads=True)  # after an error, the layers stay with the workers
        self.close(gather=False)
        self.start()
        assert self._running is not None
        return self._running

    def _renew(self) -> None:
        """Start new workers after an error that the user's code has caught, if the pipeline runs."""
        if self._running is not None:
            self._usable()

    @property
    def device(self) -> torch.device:
        """The device of the last stage, in this process."""
        return self._devices[-1]

    def kinds_of_layers(self) -> list[Hashable]:
        """Return the kind of each layer (see ``kinds_of``), in the order in which the pipeline runs the layers."""
        places = (place for stage in self.stages for span in stage.spans for place in span)
        layers = (layer for stage in self.stages for layer in stage)
        return kinds_of([layer for _, layer in sorted(zip(places, layers, strict=True), key=itemgetter(0))])

    @property
    def remotes(self) -> Sequence[RemoteStage]:
        """The stages on workers; empty if the pipeline does not run."""
        return self._running.executor.remotes if self._running is not None else ()

    @property
    def states(self) -> Sequence[StateOfStages]:
        """The objects that gather and load the state of all stages, one for each module that contains layers.

        Empty if the pipeline does not run.
        """
        return self._running.states if self._running is not None else ()

    @contextmanager
    def reading_late(self) -> Iterator[None]:
        """Context in which state dicts of the model and its copies fetch values of remote stages when they are read."""
        with ExitStack() as late:
            for state in [*self._running.states, *self._running.copies] if self._running is not None else ():
                late.enter_context(state.reading_late())
            yield

    @property
    def workers(self) -> Workers | Ranks | None:
        """The processes of the remote stages; ``None`` if there are none."""
        return self._workers if self._running is not None else None

    def average_grads(self) -> None:
        """Average the gradients of every stage over the replicas, if there are several."""
        if self._running is not None:
            self._running.executor.average_gradients()

    def _prepare_gradients(self) -> None:
        """Complete the gradients of every stage, which optimizers are about to use.

        After an error that the user's code has caught, new workers with the same state start first, because the stages
        that have failed would not step.
        """
        if self._running is None:
            return
        running = self._usable()
        self.failures.settle()
        if self._replicas is not None:
            running.executor.complete_gradients()

    def start_recording(self, batch: int) -> BatchRecording:
        """Start to record the actions of every process in a batch, until the recording is stopped.

        Returns the current recording if it is of the same batch. Stops the recording of another batch.

        Args:
            batch: The number of the batch over all epochs.
        """
        for current in self._recordings:
            if not current.is_over:
                if current.batch == batch:
                    return current
                current.stop()
        current = BatchRecording(batch, self.balance, self._stop_recording)
        self._recordings = [*(each for each in self._recordings if not each.is_taken), current]
        self._record()
        return current

    def _record(self) -> None:
        assert self._running is not None
        self._running.executor.stage.recorder = ActionRecorder(self.device)
        for remote in self.remotes:
            remote.ask(StageCommands.record, True)  # the answer is empty

    def _recorder(self) -> ActionRecorder | None:
        return self._running.executor.stage.recorder if self._running is not None else None

    def _stop_recording(self) -> Callable[[], list[ProcessRecords]]:
        assert self._running is not None
        stage = self._running.executor.stage
        recorder, stage.recorder = stage.recorder, None
        answers = [remote.ask(StageCommands.record, False) for remote in self.remotes]
        own = (recorder or ActionRecorder(self.device)).recorded()
        return lambda: [*(answer.wait() for answer in answers), own]

    def wait(self) -> None:
        """Wait until every stage has run its commands. Passes and optimizer steps do not wait for all stages."""
        if self._running is not None:
            self._running.executor.wait()

    def rebalance(self, balance: Sequence[int], check: Callable[[], None] = lambda: None) -> None:
        """Move layers between stages, with their optimizer states and gradients.

        The workers end, as in :meth:`close`, and new workers start. In between, this process holds the whole model.

        Args:
            balance: Number of layers of each chunk.
            check: Called when the layers have been divided and all of them are in this process. May raise a
                ``ValueError``.

        Raises:
            ValueError: If the layers cannot be divided in this way. The pipeline then keeps its balance.
            StepInProgress: If a pass waits for its backward pass.
        """
        running, before = self._usable(), self.balance
        self.verify()
        recorder = running.executor.stage.recorder
        with self.failures.explained():
            running.executor.wait()
        if running.executor.unfinished:
            gc.collect()  # an output that nobody uses may belong to a cycle of objects
        if running.executor.unfinished:
            raise StepInProgress(
                "layers can move between steps only (in hooks such as on_train_batch_end), but an output of the model "
                "that was computed with gradients waits for its backward pass. If the output is kept for something "
                "else, detach it, or compute it under torch.no_grad()."
            )
        for recording in self._recordings:
            if recorder is not None and recorder.has_records:  # the records of a batch that has run
                recording.stop()
            if recording.is_over:
                recording.take()
        self._await_writes()
        try:
            with self.failures.explained():  # notes an error before the workers end, which would seem to be its cause
                self._gather(running, with_grads=True)
        except BaseException as error:
            if not isinstance(error, Exception):  # such as Ctrl-C; after an error, the layers stay with the workers
                self.close(gather=False)
            raise
        self.close(gather=False)
        try:
            self._divide(balance)
            check()
            self.start()
        except ValueError:
            self._divide(before)
            self.start()
            raise

    # Recovery from the loss of workers

    @property
    def log_bytes(self) -> int:
        """The memory of what is repeated if a worker is lost, in bytes."""
        recoverer = self._recoverer
        return recoverer.log_bytes if recoverer is not None else 0

    @property
    def _recoverer(self) -> Recoverer | None:
        return self._running.recoverer if self._running is not None else None

    def _make_recoverer(
        self, connections: _Connections, session_end: ExitStack, threads: int, after_session: ExitStack
    ) -> Recoverer | None:
        """Return the object that replaces lost workers; ``None`` if a lost worker ends the run.

        Args:
            connections: The workers of the first session.
            session_end: Ends the session, and later each session that follows.
            threads: Number of threads with which each process computes.
            after_session: Releases what must outlive the workers.
        """
        if self._recovery is None or not connections.remotes:
            return None
        if isinstance(self._workers, Ranks) and self._recovery.max_restarts:
            check_snapshots(are_replaced=self._workers.are_supervised)
        assert connections.transport is not None
        remotes = connections.remotes  # the function below must not keep the connections of the first session

        def restart(failures: Failures, states: Sequence[InSlot], num_rounds: int) -> Transport:
            session_end.close()
            if self._replicas is not None:
                self._replicas = replace(self._replicas, round=num_rounds)
            if self._layer_peers is not None:
                self._layer_peers = replace(self._layer_peers, round=num_rounds)
            client = partial(_renewed, remotes, failures)
            again = self._start_workers(states, threads, session_end, failures, client=client)
            for recording in self._recordings:
                recording.lose()
            assert again.transport is not None
            return again.transport

        rounds = self._together() if self._together is not None else None
        return Recoverer(
            self._recovery,
            self.failures,
            connections.transport,
            remotes,
            self._slots(after_session),
            restart,
            self.repairs,
            rounds,
            self._in_step(rounds) if rounds is not None else None,
        )

    def _in_step(self, rounds: Rounds) -> InStep | None:
        """Return the pipelines that divide layers or parameters with this one, which have successive numbers."""
        size = self._layer_peers.count if self._layer_peers is not None else rounds.size
        if self.divided is None or size == 1:
            return None

        def any_of(flags: Sequence[bool]) -> list[bool]:
            counts = torch.zeros(NUM_FLAGS, dtype=torch.int64)
            counts[: len(flags)] = torch.tensor(flags)
            return [count > 0 for count in divided_layers.tensor_group().sum(counts).tolist()[: len(flags)]]

        first = rounds.rank // size * size
        return InStep(range(first, first + size), any_of)

    def _slots(self, after_session: ExitStack) -> list[list[SlotAddress]]:
        """Return the two slots of each worker, held by the supervisors of ranks or by this process."""
        if isinstance(self._workers, Ranks):
            return [[SlotAddress(*slot) for slot in slots] for slots in self._workers.slots]
        addresses = []
        for i in range(len(self.stages) - 1):
            held = [Slot.created(f"{i}-{place}") for place in range(NUM_SLOTS)]
            for slot in held:
                after_session.callback(slot.close)
            addresses.append([slot.address for slot in held])
        return addresses

    def _between_passes(self, unfinished: Collection[int]) -> None:
        """Take a snapshot if it is due. The executor calls this between two passes."""
        if (recoverer := self._recoverer) is not None:
            recoverer.between_passes(self.optimizers.num_steps, unfinished)

    def before_evaluation(self) -> None:
        """Prepare a long evaluation between two steps; with several pipelines, all call this at the same point."""
        if self._running is not None and (recoverer := self._running.recoverer) is not None:
            recoverer.before_evaluation(self.optimizers.num_steps, self._running.executor.unfinished)

    def after_loading(self) -> None:
        """Take a snapshot if recovery is on, because stages have read values from files, which may be deleted now.

        Call this between two passes. With several pipelines, all call it at the same point.
        """
        if self._running is not None and (recoverer := self._running.recoverer) is not None:
            recoverer.after_loading(self.optimizers.num_steps, self._running.executor.unfinished)

    def verify(self) -> None:
        """Compute what has run since the last verified step a second time and compare, if that is due.

        Call this between two passes, before values of stages are used, such as for a checkpoint. With several
        pipelines, all call it at the same point.

        Raises:
            ComputedWrongly: If a stage computes differently the second time.
        """
        if self._running is not None and (recoverer := self._running.recoverer) is not None:
            recoverer.verify(self.optimizers.num_steps, self._running.executor.unfinished)

    # Start

    def start(self) -> None:
        """Start the workers, and send each its stage, which stand-ins on the ``meta`` device replace here.

        From then on, a call of the ``nn.Sequential``, or the calls of the blocks of an ``nn.ModuleList``, run the
        pipeline.

        Raises:
            ValueError: If a layer cannot be sent to a worker, or an optimizer cannot be divided over the stages. No
                process has been started at that point.
            RuntimeError: If a worker cannot be started.
        """
        owned = [owned_parameters(i, stage, self._ties) for i, stage in enumerate(self.stages[:-1])]
        elsewhere = {id(p) for part in owned for p in part}
        for optimizer in self.optimizers.optimizers:
            here = [p for p in parameters_of(optimizer) if id(p) not in elsewhere]
            check_divisible(optimizer, [*owned, here])
        states = [self._packed(i, part) for i, part in enumerate(owned)]
        numbers = [[numbers_of(optimizer, part) for optimizer in self.optimizers.optimizers] for part in owned]
        self._warn_of_held_tensors({number for state in states for number in state.built})
        self.failures = Failures()
        holders: list[Holder] = []
        with ExitStack() as ending:
            try:
                self._running = self._start_running(states, numbers, holders, ending)
            except BaseException:
                for i, holder in enumerate(holders):
                    with suppress(Exception):  # of any kind: the first error is raised; this worker has also failed
                        bring_back(holder.stage, self._parts(i), self.optimizers, mirror=None, with_grads=True)
                raise
        for recording in self._recordings:
            if not recording.is_over:  # it recorded the previous workers
                self._record()
                recording.begin_again(self.balance)

    def _warn_of_held_tensors(self, built: set[int]) -> None:
        held = self._construction.held_elsewhere(built) if self._construction is not None else []
        if held:
            warnings.warn(
                f"{len(held)} large tensors that were made in configure_model or init_module, such as one of shape "
                f"{list(held[0].shape)}, are held by objects of the driver that are not modules, lists, tuples or "
                "dicts. They have no values. Register them as buffers of a module, or make them earlier.",
                stacklevel=2,
            )

    def _start_running(
        self, states: Sequence[Parcel], numbers: list[list[list[int]]], holders: list[Holder], ending: ExitStack
    ) -> _RunningParts:
        """Start everything.

        Args:
            states: The state of each stage on a worker.
            numbers: For each of these stages and each optimizer, the numbers of the stage's parameters.
            holders: Gets an entry for each stage whose layers have left this process.
            ending: Ends what has been started, also after an error.
        """
        ending.callback(torch.set_num_threads, torch.get_num_threads())
        num_pipelines = prod(peers.count for peers in (self._replicas, self._layer_peers) if peers is not None)
        num_local = len(self.stages) * num_pipelines
        threads = share_of_threads(num_local) if self._world is None else self._world.num_threads
        torch.set_num_threads(threads)
        keep_freed_memory()
        after_session = ending.enter_context(ExitStack())  # closes clients of stages and slots, which outlive workers
        session_end = ending.enter_context(ExitStack())

        def client(i: int, name: str, host: Any, process: StageProcess) -> RemoteStage:
            remote = RemoteStage(name, host, describe(i, self.stages[i]), process, self.failures)
            after_session.callback(remote.close)
            return remote

        def put_stand_ins(i: int, remote: RemoteStage) -> None:
            holders.append(self._put_stand_ins(i, remote))
            ending.callback(holders[-1].end)

        connections = self._start_workers(
            states, threads, session_end, self.failures, client=client, on_started=put_stand_ins
        )
        recoverer = self._make_recoverer(connections, session_end, threads, after_session)
        remotes = connections.remotes
        averaging: Averaging | None = None
        shared_steps: SharedSteps | None = None
        if self._replicas is not None:
            averaging, shared_steps = self._join_replicas(self._replicas, ending)
        if self._layer_peers is not None:
            divided_layers.connect(TensorGroup(*self._join(self._layer_peers, ending)))
            ending.callback(divided_layers.connect, None)
        for remote in remotes:
            remote.on_use = self._bypass.note_use
        self.optimizers.drop_shipped_states()
        if averaging is not None:
            averaging.share()
        self.optimizers.connect(remotes, numbers, shared_steps=shared_steps)
        ending.callback(self.optimizers.end)
        transport = connections.transport if recoverer is None else recoverer.transport
        executing = self._make_executor(remotes, transport, averaging, holders, ending)
        if self._blocks is None:
            ending.callback(replaced(self.module, "forward", self._forward))
        else:
            self._blocks.start()
            ending.callback(self._blocks.end)
        parts = parts_of(self.module)
        send = executing[0].send_buffers
        of_lists = [StateOfStages(part, self.stages, remotes, start=start, send_buffers=send) for start, part in parts]
        for state in of_lists:
            ending.callback(state.end)
        copies: list[StateOfStages] = []
        for number, (copy, stages) in enumerate(self._copies, start=1):
            ending.enter_context(_copy_on_stages(copy.module, stages[:-1]))
            copies.append(StateOfStages(copy.module, stages, remotes, number))
            ending.callback(copies[-1].end)
        if recoverer is not None:
            ending.callback(recoverer.end)
            recoverer.start()
        return _RunningParts(*executing, of_lists, copies, recoverer, ending=ending.pop_all())

    def _make_executor(
        self,
        remotes: Sequence[RemoteStage],
        transport: Transport | None,
        averaging: Averaging | None,
        holders: Sequence[Holder],
        ending: ExitStack,
    ) -> tuple[Executor, FillDrain, PerMicrobatch | None]:
        """Create the stage of this process, the executor and its front ends."""
        last, rank_of = len(self.stages) - 1, self.programs.rank_of
        edges = Edges(rank_of[-1], rank_of, transport, firsts=self.programs.placement.firsts)
        named = dict(self.module.named_parameters(remove_duplicate=False))
        ties = TiedParameters(rank_of[-1], self._ties, named, transport) if self._ties and transport else None
        stage = Stage(
            chunks_of(
                self.stages[last],
                edges.ports(),
                self.device,
                deferred_batch_norm=self.settings.deferred_batch_norm,
                call=call_one_by_one if self._blocks is None else self._blocks.call,
                side_outputs=SideOutputs.of(last, self.stages[last]),
            ),
            edges,
            ties=ties,
            name=describe(last, self.stages[last]),
        )
        ending.callback(stage.close)
        executor = Executor(
            PipelineParts(
                module=self.module,
                stages=self.stages,
                stage=stage,
                programs=self.programs,
                edges=edges,
                ties=ties,
                remotes=remotes,
                failures=self.failures,
                settings=self.settings,
                next_seed=partial(self._seeds.next, replica=self._replicas.number if self._replicas else 0),
                num_updates=lambda: self.optimizers.num_steps + sum(holder.num_writes for holder in holders),
                averaging=averaging,
                between_passes=self._between_passes,
                agree=agree if self._replicas is not None and self._replicas.zero_stage == 3 else lambda *_: None,
            )
        )
        fill_drain = FillDrain(executor)
        ending.callback(executor.side_outputs.end)
        return (
            executor,
            fill_drain,
            PerMicrobatch(executor, self.parameters_here, self._other_modules()) if self.settings.interleaves else None,
        )

    def _other_modules(self) -> list[nn.Module]:
        """The modules of the model outside of the pipelined module, but no metrics, which only accumulate values."""
        inside = set(self.module.modules())
        modules = self._model.modules() if self._model is not None else ()
        return [module for module in modules if module not in inside and not isinstance(module, Metric)]

    def _put_stand_ins(self, i: int, remote: RemoteStage) -> Holder:
        """Replace the tensors of a stage, which are now on its worker, with stand-ins.

        Buffers that this process uses too, such as those of one rotary embedding in all blocks, keep their values.
        """
        holder, last = Holder(remote), len(self.stages) - 1
        for number, (model, module, stages, optimizers) in enumerate(self._all()):
            named = dict(module.named_parameters(remove_duplicate=False))
            own = [named[tie.names[min(tie.names)][0]] for tie in self._ties if tie.owner == last]
            theirs = {layer for layers in stages[:-1] for layer in layers.modules()}.difference(stages[-1].modules())
            here = (
                layer for layer in model.modules() if layer not in theirs
            )  # a layer may have two names in the model
            keep = [*own, *(buffer for layer in here for buffer in layer.buffers(recurse=False))]
            move_to_meta(stages[i], model, optimizers, keep=keep, stage=remote, module=number, device=self.device)
            holder.take(number, stages[i])
        return holder

    def _parts(self, i: int) -> list[PartOfModule]:
        """The parts of stage ``i`` in this process, for the model and each of its copies."""
        return [PartOfModule(stages[i], model, optimizers) for model, _, stages, optimizers in self._all()]

    def _join(self, peers: Peers, ending: ExitStack) -> tuple[ProcessGroup, Wait]:
        """Connect to the drivers of other pipelines, until the run ends."""
        with self.failures.explained():
            group = peers.join(len(self.stages) - 1, self.failures.raise_untold)
        wait = InterruptibleWait(self.failures, outlives_session=True)
        ending.callback(wait.end)
        return group, wait

    def _join_replicas(self, replicas: Replicas, ending: ExitStack) -> tuple[Averaging, SharedSteps | None]:
        """Connect to the drivers of the other replicas, until the run ends."""
        group, wait = self._join(replicas, ending)
        if replicas.zero_stage == 3:
            divided_layers.connect(ReplicaGroup(group, wait))
            ending.callback(divided_layers.connect, None)
        averaging, shared_steps = connected(
            group,
            replicas.zero_stage,
            self.optimizers.optimizers,
            self.parameters_here,
            self._buffers_here,
            wait=wait,
            follows_autograd=not self.settings.interleaves,  # other passes gather their gradients
        )
        ending.callback(averaging.close)
        return averaging, shared_steps

    def _all(self) -> list[tuple[nn.Module, nn.Module, list[StageLayers], Sequence[Optimizer]]]:
        """The model and its copies, each with its pipelined module, the stages of this module, and its optimizers."""
        own = self._model or self.module, self.module, self.stages, self.optimizers.optimizers
        return [own, *((copy.model, copy.module, stages, ()) for copy, stages in self._copies)]

    def parameters_here(self) -> list[nn.Parameter]:
        """Every parameter whose values are in this process, including parameters that only an optimizer refers to."""
        groups = [group["params"] for optimizer in self.optimizers.optimizers for group in optimizer.param_groups]
        known = {id(p): p for p in chain((self._model or self.module).parameters(), *groups)}
        with without_torch_function():  # faster for stand-ins, because each step calls this
            return [p for p in known.values() if not p.is_meta]

    def _buffers_here(self) -> list[Tensor]:
        """Every buffer whose values are in this process."""
        return [buffer for buffer in (self._model or self.module).buffers() if not buffer.is_meta]

    def _packed(self, i: int, owned: Sequence[nn.Parameter]) -> Parcel:
        layers, copies = self.stages[i], [stages[i] for _, stages in self._copies]
        check_layouts(layers)
        state = StageState.capture(layers, owned, self.optimizers.optimizers, copies)
        return pickled(state, layers, self._model, self._construction)

    def _setup(self, i: int) -> StageSetup:
        return StageSetup(
            index=i,
            device=str(self._devices[i]),
            deferred_batch_norm=self.settings.deferred_batch_norm,
            ties=self._ties,
            replicas=self._replicas,
            layer_peers=self._layer_peers,
            call=call_one_by_one if self._blocks is None else call_blocks,
            reports_side_outputs=True,
            placement=self.programs.placement,
            plane=self._plane,
            is_verified=self._recovery is not None and self._recovery.verify_every_n_steps > 0,
        )

    def _start_workers(
        self,
        states: Sequence[Parcel | InSlot],
        threads: int,
        session_end: ExitStack,
        failures: Failures,
        *,
        client: Callable[[int, str, Any, StageProcess], RemoteStage],
        on_started: Callable[[int, RemoteStage], None] = lambda i, remote: None,
    ) -> _Connections:
        """Start a worker for each stage but the last, place the stage's state on it, and connect all processes.

        Args:
            states: The state of each of these stages.
            threads: Number of threads with which each process computes.
            session_end: Ends what has been started.
            failures: Notes the failures of these workers.
            client: Returns the client of a stage, given its number, and the RPC name, the host and the process of its
                worker.
            on_started: Called with the number and the client of a stage when its worker has the state.
        """
        if not states:
            return _Connections(None, ())
        session, clients = self._start_hosts(states, threads, session_end, client)
        watch = Watch(clients, session.timeout_seconds)
        session_end.callback(watch.end)
        wait = InterruptibleWait(failures)
        session_end.callback(wait.end)
        for remote in clients:
            session_end.callback(remote.disconnect)
        # The first command of each stage: its answer means that the stage has its state.
        have_states = [remote.ask_unlogged(StageCommands.num_kept) for remote in clients]
        with failures.explained():
            links = Links(join_data_plane(session, len(clients), failures.raise_untold))
        store = partial(store_at, f"{session.rendezvous}/devices", session.size)
        routes = routes_of(self.programs.rank_of, self._ties)
        variables = variables_of_nccl(session) if self._plane == NCCL else {}
        with failures.explained(), environment_variables(**variables):
            transport = open_transport(self._plane, links, len(clients), self.device, routes, wait, store)
        session_end.callback(transport.close)
        if self._plane != GLOO:
            failures.first.add_done_callback(partial(_abort, ref(transport)))
            failures.first.add_done_callback(partial(_abort_on_workers, [ref(remote) for remote in clients]))
        for i, (state, remote, has_state) in enumerate(zip(states, clients, have_states, strict=True)):
            with failures.explained():
                state.deliver(partial(send_storages, link=links[i], wait=wait))
            failures.result_of(has_state)
            remote.connect(Sender(links[i], ORDERS))
            on_started(i, remote)
        return _Connections(transport, clients)

    def _start_hosts(
        self,
        states: Sequence[Parcel | InSlot],
        threads: int,
        session_end: ExitStack,
        client: Callable[[int, str, Any, StageProcess], RemoteStage],
    ) -> tuple[Session, list[RemoteStage]]:
        """Start the workers, each of which begins to load its state; see :meth:`_start_workers`."""
        stages = [describe(i, layers) for i, layers in enumerate(self.stages[:-1])]
        processes = self._workers = Workers(stages) if self._world is None else Ranks(self._world)
        started = False
        session_end.callback(lambda: processes.stop(grace_seconds=_END_SECONDS if started else 0.0))
        session = processes.start(timeout_seconds=self.settings.rpc_timeout_sec, threads=threads)
        started = True
        clients: list[RemoteStage] = []
        for i, (stage, state) in enumerate(zip(stages, states, strict=True)):
            name, process = session.name(i), _stage_process(processes, i)
            try:
                hosted = rpc.remote(name, host, args=(self._setup(i), state.carrier(), session), timeout=0)
            except RuntimeError as error:  # RPC may detect that a process has ended before all are connected
                raise cause_of(error, stage, process) from error
            clients.append(client(i, name, hosted, process))
        return session, clients

    # End

    def close(self, *, gather: bool = True, is_failing: bool = False) -> None:
        """End the workers. Can be called at any point of the set-up, and several times.

        The layers of a worker that has died or hangs are lost: they stay on the ``meta`` device.

        Args:
            gather: Wait for the workers, and make the module whole again if ``gathers_on_end`` is set. Otherwise the
                layers of the workers are lost.
            is_failing: Whether the run ends with an error. If it does not, other pipelines may need the workers of this
                pipeline until they have gathered their own layers.

        Raises:
            Exception: With ``gather``, an error of a worker that has not been raised before, such as in the last step;
                or, if layers are lost, the reason.
        """
        try:
            if self._running is not None and gather:
                with self.failures.explained():  # report the failure that caused the loss
                    try:
                        if not is_failing:
                            with self.failures.explained():
                                self.verify()
                    finally:
                        if self._gathers_on_end:
                            self._gather(self._running)
                        else:
                            self._abandon_layers(self._running)
                    if self._running.recoverer is not None and not is_failing:
                        self._running.recoverer.end_together()
        finally:
            running, self._running = self._running, None
            if running is not None:
                running.ending.close()
        if gather:
            self.failures.raise_untold()

    def _gather(self, running: _RunningParts, *, with_grads: bool = False) -> None:
        """Return the layers of the workers to this process, for each worker that can still send them."""
        executor = running.executor
        executor.side_outputs.end()
        lost: BaseException | None = None
        may_interrupt = True
        for i, (mirror, remote) in enumerate(zip(executor.mirrors, executor.remotes, strict=True)):
            while True:
                try:
                    bring_back(remote, self._parts(i), self.optimizers, mirror=mirror, with_grads=with_grads)
                except Exception as error:
                    lost = lost or error
                except BaseException as error:
                    lost = error
                    if may_interrupt:  # the first Ctrl-C is raised when all layers are in this process
                        may_interrupt = False
                        continue
                break
        if lost is not None:
            raise lost

    def _abandon_layers(self, running: _RunningParts) -> None:
        """Wait for the workers, but do not fetch their layers. From now on, reading these layers raises an error."""
        running.executor.side_outputs.end()
        self.wait()
        for remote in running.executor.remotes:
            remote.is_gathered = False
        for _, module, _, _ in self._all():
            for _, part in parts_of(module):
                part.register_state_dict_pre_hook(refuse_lost_values)


def _renewed(
    remotes: Sequence[RemoteStage], failures: Failures, i: int, name: str, host: Any, process: StageProcess
) -> RemoteStage:
    """Return the client of a stage that now runs in another process."""
    remotes[i].renew(name, host, process, failures)
    return remotes[i]


def _abort(transport: "ref[Transport]", _: Any) -> None:
    """End waits for devices after a failure.

    The weak reference lets the transport, which holds an open port, be freed before the failures.
    """
    if (known := transport()) is not None:
        known.abort()


def _abort_on_workers(remotes: Sequence["ref[RemoteStage]"], _: Any) -> None:
    """End the workers' waits for devices after a failure. A waiting worker may not detect the failure otherwise."""
    for known in remotes:
        remote = known()
        if remote is not None and not remote.has_closed:
            with suppress(RuntimeError):  # the process has ended
                remote.begin_beside(abort_waits)


@contextmanager
def _copy_on_stages(module: nn.Module, elsewhere: Sequence[nn.Sequential]) -> Iterator[None]:
    """Context in which a copy of the model with some stages on workers can be moved, but not called."""

    def forward(*args: Any) -> NoReturn:
        raise RuntimeError(
            "this copy of the model, such as the average of its weights, cannot be called while the pipeline runs: its "
            "layers are on several processes, each beside its layer of the model. Call the copy after fit, or copy its "
            "values into the model (parameter.data.copy_) and call the model."
        )

    names = [name for stage in elsewhere for name in stage._modules]

    def apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with without_layers(module, names):  # each stage has moved its part to its device
            return convert_tensors(module, function, recurse)

    own = {"forward": forward, **replacing_conversion(apply)}
    vars(module).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(module)[name]
