"""A strategy whose ranks are replicas. A replica uses several devices and is one rank for Lightning."""

from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, TypeVar, cast

import torch

from strategies.launch.ranks import World
from strategies.launch.rendezvous import LOOPBACK, interface_to
from strategies.launch.session import environment_variables
from strategies.lightning.compat import (
    Launcher,
    MisconfigurationException,
    ParallelStrategy,
    SubprocessScriptLauncher,
    distributed_is_initialized,
    init_dist_connection,
    rank_zero_only,
    reset_seed,
    sync_ddp_if_available,
)
from strategies.lightning.launch.environment import (
    check_environment,
    check_launch,
    check_numbering,
    check_visible_gpus,
    is_external,
    lasting_environment,
)
from strategies.lightning.launch.rank_launcher import RanksLauncher
from strategies.pipeline.optim.replicas import Replicas

_Value = TypeVar("_Value")


class ReplicatedStrategy(ParallelStrategy):
    """Makes Lightning start one process per replica, and reports the replicas as Lightning's world.

    With one replica, no process is started and there is no process group. Under torchrun, SLURM and similar launchers
    there is one process per device of each replica; Lightning sees the first process of each replica.

    Args:
        num_replicas: Number of replicas.
        arguments: Arguments of ``ParallelStrategy``.
        replaces_workers: Whether ranks of torchrun or SLURM start a new worker in place of a killed worker.
    """

    averages_gradients: bool  # as in StrategyPlugin
    known_environments: Sequence[type] = ()
    """Further classes of environments whose ranks may become workers."""

    def __init__(self, num_replicas: int, *arguments: Any, replaces_workers: bool = False) -> None:
        super().__init__(*arguments)
        self._num_replicas, self._replaces_workers = num_replicas, replaces_workers
        self._rendezvous_directory: str | None = None
        self.rendezvous = ""
        """The URL at which the replicas connect in this run, the same in all replicas."""
        self.num_nodes = 1  # the Trainer sets the value that the user gave
        self.world: World | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether there are several replicas, so that samplers divide the data."""
        return self._num_replicas > 1

    @property
    def world_size(self) -> int:
        return self._num_replicas

    @property
    def global_rank(self) -> int:
        """The number of this replica."""
        if self.world is not None:
            return self.world.rank // self.world.num_stages
        return super().global_rank if self.is_distributed else 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the driver of the first replica."""
        return self.global_rank == 0 and (self.world is None or self.world.is_driver)

    @property
    def local_rank(self) -> int:
        """The number of this replica among the replicas whose drivers are on this host."""
        if self.world is not None and self.world.is_driver:
            return self.global_rank - -(-self.node_rank * self.world.num_local // self.world.num_stages)
        return super().local_rank if self.is_distributed or self.world is not None else 0

    @property
    def node_rank(self) -> int:
        return super().node_rank if self.is_distributed or self.world is not None else 0

    @property
    def devices(self) -> list[torch.device]:
        """The devices of this replica, one per stage; the last one belongs to this process.

        The driver uses the first device of its replica, as users of Lightning expect. Workers use the remaining
        devices.
        """
        assert self.parallel_devices is not None
        local, number = self.parallel_devices, len(self.parallel_devices) * self.num_nodes // self._num_replicas
        own = [local[(self.global_rank * number + place) % len(local)] for place in range(number)]
        return [*own[1:], own[0]]

    @property
    def root_device(self) -> torch.device:
        """The device of this process, which holds the last stage."""
        return self.devices[-1]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        # Called when the Trainer is built: the devices are known, and no process has been started.
        assert self.cluster_environment is not None
        self.cluster_environment = environment = lasting_environment(self.cluster_environment)
        num_local = len(self.parallel_devices or ())
        check_environment(environment, self.known_environments)
        if is_external(environment):
            check_visible_gpus(environment, self.parallel_devices or (), self.num_nodes)
        check_launch(environment, num_local, self.num_nodes, self._num_replicas)
        if is_external(environment):
            check_numbering(environment, num_local)
            self.world = World(
                address=environment.main_address,
                port=environment.main_port,
                rank=environment.global_rank(),
                size=environment.world_size(),
                num_stages=num_local * self.num_nodes // self._num_replicas,
                num_local=num_local,
            )
            self._launcher = self._launcher_of(self.world)
        elif self.is_distributed:
            self._launcher = SubprocessScriptLauncher(environment, self._num_replicas, self.num_nodes)

    def _launcher_of(self, world: World) -> Launcher:
        return RanksLauncher(world, replace_workers=self._replaces_workers)

    def set_world_ranks(self) -> None:
        """Set the rank of this replica. Lightning calls this when the Trainer is built."""
        environment = self.cluster_environment
        if not self.is_distributed or environment is None:
            return
        if self.world is None:
            if is_external(environment):
                return  # the Trainer is being built, and a rank may turn out to be a worker
            environment.set_global_rank(self.local_rank)
            environment.set_world_size(self._num_replicas)
        cast(Any, rank_zero_only).rank = self.global_rank

    def setup_environment(self) -> None:
        """Connect the replicas."""
        self.set_world_ranks()
        super().setup_environment()
        if not self.is_distributed:
            return
        assert self.cluster_environment is not None
        reset_seed()
        if distributed_is_initialized() and (size := torch.distributed.get_world_size()) != self._num_replicas:
            raise MisconfigurationException(
                f"The default process group has {size} ranks, but there are {self._num_replicas} replicas: leave it to "
                "the strategy to initialise it, and destroy it after other trainings."
            )
        _, interface = interface_to(self.world.address) if self.world is not None else ("", "")
        with environment_variables(**{"GLOO_SOCKET_IFNAME": interface} if interface else {}):
            init_dist_connection(self.cluster_environment, "gloo", self.global_rank, self._num_replicas)

    def replicas(self, timeout_seconds: float, *, zero_stage: int) -> Replicas | None:
        """Return the description of the replicas for the stages. Collective: every replica calls this."""
        if not self.is_distributed:
            return None
        if self.world is not None:
            self.rendezvous, address = self.broadcast(self.world.rendezvous()), self.world.address
        else:
            # Stored before the broadcast, which raises if another replica has failed: teardown removes the directory.
            self._rendezvous_directory = mkdtemp(prefix="relay-") if self.is_global_zero else None
            self._rendezvous_directory = self.broadcast(self._rendezvous_directory)
            self.rendezvous, address = f"file://{self._rendezvous_directory}", LOOPBACK
        return Replicas(self.global_rank, self.world_size, self.rendezvous, timeout_seconds, address, zero_stage)

    def stages_on_host(self) -> list[int]:
        """Return the stage number of each process on this host, for all replicas, including the drivers."""
        if self.world is None:
            return [*range(len(self.devices))] * self._num_replicas
        num_stages, num_local = self.world.num_stages, self.world.num_local
        first = self.world.rank // num_local * num_local
        return [(rank - 1) % num_stages for rank in range(first, first + num_local)]

    def barrier(self, name: str | None = None) -> None:
        """Wait for all replicas."""
        if distributed_is_initialized() and self.is_distributed:
            torch.distributed.barrier()

    def broadcast(self, obj: _Value, src: int = 0) -> _Value:
        """Return the object that replica ``src`` has passed."""
        if not (distributed_is_initialized() and self.is_distributed):
            return obj
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum of a tensor over the replicas. Objects that are not tensors stay unchanged."""
        if isinstance(tensor, torch.Tensor) and self.is_distributed:
            return sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    def teardown(self) -> None:
        """Remove the rendezvous of the replicas. The process group stays for the next ``fit`` or ``test``."""
        if self._rendezvous_directory is not None and self.is_global_zero:
            rmtree(Path(self._rendezvous_directory), ignore_errors=True)
        self._rendezvous_directory = None
        super().teardown()
