"""The strategies that Ray Train accepts in ``prepare_trainer``; see ``docs/ray.md``. Only this module imports Ray.

Ray starts one actor per rank, and each runs the user's function. Under a pipeline, the actors of the drivers train. In
a call of the Trainer, every other actor runs its worker as a child process, and returns when the driver does:

    rank 0   actor: train function ── fit: driver, last stage ── ray.train.report ──────▶ ── returns
    rank 1   actor: train function ── fit ─┬─ worker, a child process ─────────────────── ┬─ returns
                                           └─ calls ray.train.report({}) as often ──────▶ ┘

All ranks of Ray Train must report equally often, because Ray waits for all of them in each report.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from threading import Thread
from typing import Any, cast

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train.lightning import RayDDPStrategy as AcceptedByRay
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from torch.distributed.constants import default_pg_timeout

from strategies.common.patching import replaced
from strategies.data_parallel.ddp import DDPStrategy
from strategies.data_parallel.zero import ZeROStrategy
from strategies.launch.host_links import explaining_lost_hosts
from strategies.launch.process_ends import ending
from strategies.launch.ranks import World, dismiss, serve_in_child
from strategies.lightning.compat import (
    PACKAGE,
    Launcher,
    MisconfigurationException,
    ParallelStrategy,
    Trainer,
    given_backend_of,
    pl,
)
from strategies.lightning.launch.rank_launcher import RanksLauncher
from strategies.lightning.strategy_plugin import StrategyPlugin
from strategies.rpc_sequential import RPCSequentialStrategy

if not issubclass(AcceptedByRay, pl.strategies.DDPStrategy):
    raise ImportError(
        f"ray.train.lightning uses lightning.pytorch, because it is installed, but strategies use {PACKAGE}, which "
        "this process imported first. Import lightning.pytorch before trainer and strategies, and use no other."
    )

_LOOK_SECONDS = 0.02

_calls = count(1)
"""Numbers the calls of Trainers in this process, the same on all ranks."""

_stores: list[dist.TCPStore] = []
"""The store of all calls, which ends with this process. On rank 0 only."""


class _UnderRay(StrategyPlugin, ParallelStrategy):
    """Takes the devices, and the number of hosts, from Ray."""

    num_nodes: int

    def _configure_launcher(self) -> None:
        # Called when the Trainer is built: devices and environment are known, and no process has been started.
        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            raise MisconfigurationException(
                f"{type(self).__name__} trains in the workers of Ray Train: build the Trainer in the function that a "
                "TorchTrainer runs, with plugins=[ray.train.lightning.RayLightningEnvironment()], got "
                f"{type(self.cluster_environment).__name__}."
            )
        self._check_group()
        context = ray.train.get_context()
        size, num_local = context.get_world_size(), context.get_local_world_size()
        if size % num_local:
            raise MisconfigurationException(
                f"Ray has placed {num_local} of {size} workers on this node; each node must have the same number. Set "
                'ScalingConfig(placement_strategy="STRICT_PACK") for one node, or resources_per_worker such that each '
                "node has room for equally many."
            )
        given, given_nodes = len(self.parallel_devices or ()), self.num_nodes
        if given not in (1, num_local) or given_nodes not in (1, size // num_local):
            raise MisconfigurationException(
                f"The Trainer has devices={given} and num_nodes={given_nodes}, but Ray has started {num_local} workers "
                f'on each of {size // num_local} nodes; use devices="auto" and leave num_nodes out.'
            )
        self.parallel_devices, self.num_nodes = _devices(num_local), size // num_local
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Check that Ray's callback finds a whole checkpoint in the folder of rank 0.

        Raises:
            MisconfigurationException: If it is written in the background, or in parts by several processes.
        """
        model = self.lightning_module
        callbacks = [] if model is None else cast(Any, model.trainer).callbacks
        if any(isinstance(callback, RayTrainReportCallback) for callback in callbacks):
            given = [f"async_save={self._async_save}"] if self._async_save else []
            given += [f"state_dict_type={self._state_dict_type!r}"] if self._state_dict_type != "full" else []
            if given:
                raise MisconfigurationException(
                    "RayTrainReportCallback at once uploads a local folder of each worker, in which "
                    f"{', '.join(given)} leaves no whole checkpoint. Leave this out, or save with ModelCheckpoint "
                    "to a folder that all nodes see, and report metrics to Ray by a callback of your own."
                )
        super().setup_environment()

    def _check_group(self) -> None:
        """Refuse settings of the process group, which Ray starts."""
        backend, timeout = given_backend_of(self), self._timeout
        if backend is not None or timeout != default_pg_timeout:
            raise MisconfigurationException(
                f"Ray starts the process group, so process_group_backend={backend!r} and timeout={timeout} have no "
                "effect; use TorchTrainer(torch_config=TorchConfig(backend=..., timeout_s=...))."
            )
        if (size := ray.train.get_context().get_world_size()) != dist.get_world_size():
            raise MisconfigurationException(
                f"The process group has {dist.get_world_size()} ranks, but Ray has started {size}: a pipeline with "
                "several replicas has been trained in this function before. Use another TorchTrainer."
            )


def _devices(num_local: int) -> list[torch.device]:
    """Return the device of each rank of this node.

    Raises:
        MisconfigurationException: If this rank does not have its own device.
    """
    own, rank = ray.train.torch.get_device(), ray.train.get_context().get_local_rank()
    if own.type == "cpu":
        return [own] * num_local
    devices = [torch.device(own.type, index) for index in range(num_local)]
    if own != devices[rank]:
        raise MisconfigurationException(
            f"Ray has given {own} to rank {rank} of this node, where Relay expects {devices[rank]}; give each worker "
            'one GPU with ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 1}).'
        )
    return devices


class RayDDPStrategy(_UnderRay, DDPStrategy):
    """:class:`~strategies.data_parallel.ddp.DDPStrategy` in the workers of Ray Train, with the same arguments.

    The number of ranks is that of Ray's workers. The Trainer needs ``devices="auto"`` and
    ``plugins=[ray.train.lightning.RayLightningEnvironment()]``. Backend and time-out of the process group are settings
    of ``ray.train.torch.TorchConfig``.
    """


class RayZeROStrategy(_UnderRay, ZeROStrategy):
    """:class:`~strategies.data_parallel.zero.ZeROStrategy` in the workers of Ray Train; see :class:`RayDDPStrategy`."""


class RayRPCSequentialStrategy(_UnderRay, RPCSequentialStrategy):
    """:class:`~strategies.rpc_sequential.RPCSequentialStrategy` in the workers of Ray Train.

    Each worker of Ray is one stage of one replica. The first rank of each replica is the driver. On the other ranks, a
    call of the Trainer returns ``None`` when the driver's call ends, and the model keeps its values from before the
    call. See :class:`RayDDPStrategy` for the Trainer's arguments, and ``docs/ray.md``.
    """

    known_environments = (RayLightningEnvironment,)

    def _check_group(self) -> None:
        """Accept all settings, because the replicas of a pipeline start their own process group."""

    def _configure_launcher(self) -> None:
        if dist.is_initialized():
            _leave_group_of_ray()
        super()._configure_launcher()

    def _launcher_of(self, world: World) -> Launcher:
        return _ActorLauncher(self, world, replace_workers=self._replaces_workers)


for _strategy in (RayDDPStrategy, RayZeROStrategy, RayRPCSequentialStrategy):
    AcceptedByRay.register(_strategy)  # of the classes that prepare_trainer accepts; its methods are not inherited


@cache
def _leave_group_of_ray() -> None:
    """End the process group that Ray has started over all ranks, and continue at a new port. All ranks call this.

    Metrics and loggers use the group if there is one, and would wait for ranks that serve as workers. The drivers of
    replicas start their own group, which must not find the addresses of the first group in the store.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    address, port = os.environ["MASTER_ADDR"], [0]
    if rank == 0:
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        _stores.append(store)
        port = [store.port]
    dist.broadcast_object_list(port)
    store = dist.TCPStore(address, port[0], is_master=False)
    store.set(f"arrived/{rank}", "")
    store.wait([f"arrived/{other}" for other in range(size)])
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])


class _ActorLauncher(RanksLauncher):
    """Runs the Trainer's loop on drivers, and workers as children of the other actors. All ranks return to the script.

    Args:
        strategy: The strategy.
        world: All ranks, and the number of this rank.
        replace_workers: Whether ranks start a new worker in place of a killed worker.
    """

    def __init__(self, strategy: RPCSequentialStrategy, world: World, *, replace_workers: bool) -> None:
        super().__init__(world, replace_workers=replace_workers)
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function on a driver. On any other rank, serve the driver until it leaves its call.

        Raises:
            RuntimeError: On a rank that is not a driver, if its worker has failed.
        """
        world = replace(self._world, call=next(_calls))
        store = world.store()
        if not world.is_driver:
            return self._serve(world, store)
        self._strategy.world = world
        report, numbers = ray.train.report, count(1)

        def report_on_all_ranks(*report_args: Any, **report_kwargs: Any) -> None:
            store.set(_report_key(world, next(numbers)), "")
            report(*report_args, **report_kwargs)

        undo = replaced(ray.train, "report", report_on_all_ranks)
        try:
            with explaining_lost_hosts():
                result = function(*args, **kwargs)
        except BaseException:
            dismiss(world, store, has_failed=True)
            raise
        finally:
            undo()
        dismiss(world, store)
        return result

    def _serve(self, world: World, store: dist.Store) -> None:
        """Run the worker until the driver dismisses it, and report to Ray as often as the driver does."""
        statuses: list[int] = []
        serving = Thread(target=lambda: statuses.append(serve_in_child(world, replaces=self._replace_workers)))
        serving.daemon = True  # the end of the actor also ends the worker
        serving.start()
        for number in count(1):
            is_serving = True
            while not store.check([_report_key(world, number)]) and is_serving:
                is_serving = serving.is_alive()
                time.sleep(_LOOK_SECONDS)
            if not is_serving:
                break
            ray.train.report({})
        if statuses != [0]:
            how = ending(statuses[0]) if statuses else "could not be started"
            raise RuntimeError(f"rank {world.rank}: its worker {how}; the driver, rank {world.driver}, reports why")


def _report_key(world: World, number: int) -> str:
    """The key that the driver sets before its report ``number`` to Ray in this call."""
    return f"reports/{world.driver}/{number}"
