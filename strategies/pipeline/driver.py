"""The driver of a pipeline: it starts the workers, ships their stages, and keeps the last stage.

    input ──▶ worker: stage 0 ──▶ worker: stage 1 ──▶ driver: last stage ──▶ output

Between :meth:`Pipeline.start` and :meth:`Pipeline.finish`, calling the ``nn.Sequential`` runs the pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer

from strategies.common.formatting import describe, locate
from strategies.common.torch_compat import convert_tensors, replacing_conversion
from strategies.common.waiting import wait_here
from strategies.launch.ranks import Ranks, World
from strategies.launch.session import Session, join_data_plane
from strategies.launch.workers import Workers, keep_freed_memory, share_of_threads
from strategies.optim.restricted import numbers_of, parameters_of, restricted, taken_apart
from strategies.optim.trial import check_divisible
from strategies.pipeline.control.client import Failures, Patience, RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.watch import Watch
from strategies.pipeline.executor.averages import GradientAverages
from strategies.pipeline.executor.interleaved import Code, interleave
from strategies.pipeline.executor.passes import Passes
from strategies.pipeline.executor.ports import Ports, connected_ports, ports_of_one_stage
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.optimizers import PipelineOptimizers
from strategies.pipeline.optim.replicas import Averaging, Replicas
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.stage.context import PassContext
from strategies.pipeline.stage.randomness import Seeds
from strategies.pipeline.stage.side_outputs import SideOutputs
from strategies.pipeline.stage.stage import Stage
from strategies.pipeline.state.remote_operations import Holder
from strategies.pipeline.state.stand_ins import move_from_meta, move_to_meta, tensors_here, without_layers
from strategies.pipeline.state.state_dict import StateOfStages
from strategies.pipeline.transport.ties import find_ties, owned_parameters
from strategies.pipeline.worker.payload import Cargo, pickled
from strategies.pipeline.worker.process import host

_END_SECONDS = 5.0
"""How long a worker may take to end by itself."""


@dataclass(frozen=True)
class ModelCopy:
    """A copy of the model whose layers are to live where those of the model do, such as an average of its weights.

    Attributes:
        model: The copy.
        module: Its ``nn.Sequential``, with the layers of the pipelined one.
    """

    model: nn.Module
    module: nn.Sequential


class Pipeline:
    """Runs an ``nn.Sequential`` over several processes, the last stage on this one.

    Args:
        module: The layers.
        balance: Number of layers of each stage.
        devices: Device of each stage; the last one is this process's.
        settings: How to run.
        optimizers: Optimizers over parameters of ``module`` (and of others, which stay here).
        model: The model that ``module`` is part of; a layer that refers to it cannot be shipped.
        seeds: Where the layers' random numbers come from; by default the process's own generator.
        replicas: The other pipelines, if there are several.
        world: The ranks of this run, if somebody else has started the processes.
        copies: Copies of ``model`` to which operations on all stages apply; they cannot be called meanwhile.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        devices: Sequence[torch.device],
        settings: Settings,
        *,
        optimizers: Sequence[Optimizer] = (),
        model: nn.Module | None = None,
        seeds: Seeds | None = None,
        replicas: Replicas | None = None,
        world: World | None = None,
        copies: Sequence[ModelCopy] = (),
    ) -> None:
        self.module, self.balance = module, list(balance)
        self.stages = cut(module, balance)
        self.remotes: list[RemoteStage] = []
        self.optimizers = PipelineOptimizers(optimizers, partial(locate, self.stages, model), self._complete_grads)
        self.failures = Failures()
        self._devices, self._settings, self._model = list(devices), settings, model
        inside = set(module.modules())
        outside = [m for m in model.modules() if m not in inside] if model is not None else []
        self._ties = find_ties(self.stages, [p for m in outside for p in m._parameters.values() if p is not None])
        self._seeds, self._replicas, self._world = seeds or Seeds.ahead_of_the_process(), replicas, world
        self._copies = [(copy, cut(copy.module, balance)) for copy in copies]
        self._copying = ExitStack()
        self._holders: list[Holder] = []
        self._averages: GradientAverages | None = None
        self._workers: Workers | Ranks | None = None
        self._stage: Stage | None = None
        self._passes: Passes | None = None
        self._patience: Patience | None = None
        self._watch: Watch | None = None
        self.state: StateOfStages | None = None
        self._threads_before: int | None = None

    def start(self) -> Passes:
        """Starts the workers, ships their stages, and takes over the module's forward pass.

        Returns:
            What stands for the forward pass.

        Raises:
            ValueError: If a layer cannot be shipped, or an optimizer cannot be divided over the stages; no process has
                been started then.
            RuntimeError: If a worker cannot be started.
        """
        owned = [owned_parameters(i, stage, self._ties) for i, stage in enumerate(self.stages[:-1])]
        elsewhere = {id(p) for part in owned for p in part}
        for optimizer in self.optimizers.optimizers:
            here = [p for p in parameters_of(optimizer) if id(p) not in elsewhere]
            check_divisible(optimizer, [*owned, here])
        cargos = [self._cargo(i) for i in range(len(self.stages) - 1)]
        try:
            blobs = [pickled(cargo, cargo.layers, self._model) for cargo in cargos]
            return self._start(blobs, [cargo.numbers for cargo in cargos])
        except BaseException:
            self.abandon()
            raise

    def _start_again(self) -> Passes:
        """After an error that somebody caught, as in one process one can go on after it: with new workers.

        Weights, buffers, gradients and optimizer states are brought back first, and go along.

        Raises:
            Exception: That error once more, if a worker has died and its layers with it, or if other pipelines have not
                failed and go on.
        """
        if self._replicas is not None or any(remote.has_ended for remote in self.remotes):
            self.failures.raise_cause()
        grads = [remote.rescue(StageCommands.grads) for remote in self.remotes]
        self._fetch()
        self.abandon()
        self.failures = Failures()
        passes = self.start()
        for remote, own in zip(self.remotes, grads, strict=True):
            remote.start(StageCommands.load_grads, own)
        return passes

    def _start(self, blobs: Sequence[bytes], numbers: Sequence[list[list[int]]]) -> Passes:
        self._threads_before = torch.get_num_threads()
        num_local = len(self.stages) * (self._replicas.count if self._replicas else 1)
        threads = share_of_threads(num_local) if self._world is None else self._world.num_threads
        torch.set_num_threads(threads)
        keep_freed_memory()
        ports = self._launch(blobs, threads) if blobs else ports_of_one_stage()
        self.optimizers.connect(self.remotes, numbers)
        last = len(self.stages) - 1
        self._stage = ports.stage(
            self.stages[last],
            sum(self.balance[:-1]),
            self._devices[last],
            deferred_batch_norm=self._settings.deferred_batch_norm,
            side_outputs=SideOutputs(last, self.stages[last]),
        )
        self._holders = [Holder(remote) for remote in self.remotes]
        for number, (model, module, stages, optimizers) in enumerate(self._all()):
            named = dict(module.named_parameters(remove_duplicate=False))
            own = [named[tie.names[min(tie.names)][0]] for tie in self._ties if tie.owner == last]
            for layers, remote, holder in zip(stages, self.remotes, self._holders, strict=False):
                move_to_meta(layers, model, optimizers, keep=own, stage=remote, module=number, device=self.device)
                holder.take(number, layers)
        self.optimizers.drop_shipped_states()
        passes = self._passes = vars(self.module)["forward"] = Passes(
            self.module,
            self.stages,
            self._stage,
            ports,
            self.remotes,
            self.failures,
            self._settings,
            partial(self._seeds.next, replica=self._replicas.number if self._replicas else 0),
            lambda: self.optimizers.num_steps + sum(holder.num_writes for holder in self._holders),
            self._start_again,
        )
        self.state = StateOfStages(self.module, self.stages, self.remotes)
        for number, (copy, stages) in enumerate(self._copies, start=1):
            self._copying.callback(StateOfStages(copy.module, stages, self.remotes, number).end)
            self._copying.enter_context(_copy_on_stages(copy.module, sum(self.balance[:-1])))
        if self._replicas is not None:
            group, wait = self._replicas.join(last, self.failures.raise_untold), self._patience or wait_here
            averaging = Averaging(group, lambda: self._here()[0], lambda: self._here()[1], wait=wait)
            averaging.share()
            if self._replicas.divide_states:
                self.optimizers.divide(averaging)
            self._averages = GradientAverages(averaging, self.remotes, passes)
        return passes

    def _all(self) -> list[tuple[nn.Module, nn.Sequential, list[nn.Sequential], Sequence[Optimizer]]]:
        """The model and its copies: each with its ``nn.Sequential``, the stages of that, and its optimizers."""
        own = self._model or self.module, self.module, self.stages, self.optimizers.optimizers
        return [own, *((copy.model, copy.module, stages, ()) for copy, stages in self._copies)]

    @property
    def device(self) -> torch.device:
        """That of the last stage, which lives in this process."""
        return self._devices[-1]

    def average_grads(self) -> None:
        """Averages the gradients of every stage over the replicas, if there are several."""
        if self._averages is not None:
            self._averages.average()

    def _complete_grads(self) -> None:
        if self._averages is not None:
            self._averages.complete()

    def _here(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        return tensors_here(self._model or self.module, self.optimizers.optimizers)

    def interleave(
        self, codes: Sequence[Code], weights: Sequence[float], context: PassContext, scale: float = 1.0
    ) -> Tensor | None:
        """Runs code once per micro-batch; see :func:`~strategies.pipeline.executor.interleaved.interleave`."""
        if self.failures.raised:
            self._start_again()
        assert self._passes is not None
        return interleave(self._passes, self._here()[0], codes, weights, scale, context)

    def wait(self) -> None:
        """Returns when every stage has done what it was told; passes and steps themselves do not wait for all."""
        for remote, answer in [(remote, remote.start(StageCommands.num_kept)) for remote in self.remotes]:
            remote.result(answer)

    def finish(self) -> None:
        """Makes the module whole again and ends the workers; safe at any stage of set-up, and twice.

        The layers of a worker that has died or hangs are lost: they stay on the ``meta`` device.

        Raises:
            Exception: What went wrong on a worker and has not been raised before, such as in the last step; or, if
                something was lost, why.
        """
        try:
            if self.state is not None:
                with self.failures.explained():  # what is lost follows from that
                    self._fetch()
        finally:
            self.abandon()
        self.failures.raise_untold()

    def _fetch(self) -> None:
        """Brings back what the workers hold, from as many of them as can still give it."""
        if self._passes is not None:
            self._passes.side_outputs.end()
        lost: Exception | None = None
        for i, (layers, remote) in enumerate(zip(self.stages, self.remotes, strict=False)):
            try:
                if self._passes is not None:
                    self._passes.mirrors[i].carry_buffers(remote)
                for number, (model, _, stages, optimizers) in enumerate(self._all()):
                    move_from_meta(stages[i], model, optimizers, remote.rescue(StageCommands.tensors, number))
                if self._passes is not None:
                    self._passes.mirrors[i].take_back(remote.rescue(StageCommands.attributes))
                if extra := remote.rescue(StageCommands.extra_state):
                    layers.load_state_dict(extra, strict=False)
                self.optimizers.fetch(remote)
            except Exception as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def abandon(self) -> None:
        """Ends the workers without asking for what they hold, so that their layers stay without values."""
        if self.state is not None:
            self.state.end()
            self.state = None
        self._copying.close()
        for holder in self._holders:
            holder.end()
        vars(self.module).pop("forward", None)
        if self._stage is not None:
            self._stage.close()
            self._stage = None
        if self._passes is not None:
            self._passes.end_announcements()
            self._passes.side_outputs.end()
            self._passes.steps.close()
            self._passes = None
        self._averages = None
        self.optimizers.end()
        for waiting in (self._watch, self._patience):
            if waiting is not None:
                waiting.end()
        self._watch = self._patience = None
        if self._workers is not None:
            self._workers.stop(grace_seconds=_END_SECONDS if self.remotes else 0.0)
            self._workers = None
        for remote in self.remotes:
            remote.close()
        self.remotes.clear()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _cargo(self, i: int) -> Cargo:
        owned = owned_parameters(i, self.stages[i], self._ties)
        return Cargo(
            index=i,
            layers=self.stages[i],
            first_layer=sum(self.balance[:i]),
            device=str(self._devices[i]),
            deferred_batch_norm=self._settings.deferred_batch_norm,
            optimizers=[taken_apart(restricted(optimizer, owned)) for optimizer in self.optimizers.optimizers],
            numbers=[numbers_of(optimizer, owned) for optimizer in self.optimizers.optimizers],
            ties=self._ties,
            replicas=self._replicas,
            notes_side_outputs=True,
            copies=[stages[i] for _, stages in self._copies],
        )

    def _launch(self, blobs: Sequence[bytes], threads: int) -> Ports:
        stages = [describe(i, layers, sum(self.balance[:i])) for i, layers in enumerate(self.stages[:-1])]
        workers = self._workers = Workers(stages) if self._world is None else Ranks(self._world)
        session = workers.start(timeout_seconds=self._settings.rpc_timeout_sec, threads=threads)
        self.remotes.extend(self._ship(i, stages[i], blob, session, workers) for i, blob in enumerate(blobs))
        self._watch = Watch(self.remotes, session.timeout_seconds)
        last, device = len(blobs), self._devices[-1]
        patience = self._patience = Patience(self.failures)
        unpacked = [remote.start(StageCommands.num_kept) for remote in self.remotes]
        with self.failures.explained():
            group = join_data_plane(session, last, self.failures.raise_untold)
        for remote, answer in zip(self.remotes, unpacked, strict=True):
            remote.result(answer)
        named = dict(self.module.named_parameters(remove_duplicate=False))
        return connected_ports(group, device, self._ties, named, patience)

    def _ship(self, i: int, stage: str, blob: bytes, session: Session, workers: Workers | Ranks) -> RemoteStage:
        name = session.name(i)
        return RemoteStage(
            name,
            rpc.remote(name, host, args=(blob, i, session), timeout=0),
            stage,
            process=workers.process(i),
            ended=lambda: workers.ended(i, wait_seconds=0.5),
            doing=lambda: workers.doing(i),
            kill=lambda: workers.kill(i),
            failures=self.failures,
        )


@contextmanager
def _copy_on_stages(module: nn.Sequential, number: int) -> Iterator[None]:
    """Within this, a copy of the model whose first layers live on workers can be moved, but not called."""

    def forward(*args: Any) -> NoReturn:
        raise RuntimeError(
            "this copy of the model, such as the average of its weights, cannot be called while the pipeline runs: its "
            "layers live on several processes, each beside the layer that it is a copy of. Call it after fit, or copy "
            "its values into the model (parameter.data.copy_) and call the model."
        )

    def apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with without_layers(module, number):  # each stage has put its part onto its device
            return convert_tensors(module, function, recurse)

    own = {"forward": forward, **replacing_conversion(apply)}
    vars(module).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(module)[name]
