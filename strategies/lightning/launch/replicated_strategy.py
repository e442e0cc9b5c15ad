"""A strategy whose ranks are pipelines. A pipeline uses several devices, and its driver is one process for Lightning.

    pipeline    0           1           2           3            data_parallel_size=2, tensor_parallel_size=2
    replica     0           0           1           1            divides the data: Lightning's world
    part        0           1           0           1            divides the layers: the same data

The process group has all pipelines. The pipelines of one replica train on the same batches.
"""

from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, TypeVar, cast

import torch

from strategies.launch.ranks import World
from strategies.launch.rendezvous import LOOPBACK, interface_to
from strategies.launch.session import Peers, environment_variables
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
    """Makes Lightning start one process per pipeline, and reports the replicas as Lightning's world.

    With one pipeline, no process is started and there is no process group. Under torchrun, SLURM and similar launchers
    there is one process per device of each pipeline; Lightning sees the first process of each pipeline.

    Args:
        num_replicas: Number of replicas.
        num_parts: Number of pipelines of each replica, which divide its layers.
        arguments: Arguments of ``ParallelStrategy``.
        replaces_workers: Whether ranks of torchrun or SLURM start a new worker in place of a killed worker.
    """

    averages_gradients: bool  # as in StrategyPlugin
    known_environments: Sequence[type] = ()
    """Further classes of environments whose ranks may become workers."""

    def __init__(self, num_replicas: int, num_parts: int, *arguments: Any, replaces_workers: bool = False) -> None:
        super().__init__(*arguments)
        self._num_replicas, self._num_parts, self._replaces_workers = num_replicas, num_parts, replaces_workers
        self.num_pipelines = num_replicas * num_parts
        self._rendezvous_directory: str | None = None
        self._own_groups: tuple[Any, Any] | None = None
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
    def pipeline_number(self) -> int:
        """The number of this pipeline, which is the rank of its driver in the process group."""
        if self.world is not None:
            return self.world.pipeline_of(self.world.rank)
        return super().global_rank if self.num_pipelines > 1 else 0

    @property
    def global_rank(self) -> int:
        """The number of this replica."""
        return self.pipeline_number // self._num_parts

    @property
    def part(self) -> int:
        """The number of this pipeline among those of its replica."""
        return self.pipeline_number % self._num_parts

    @property
    def group_place(self) -> tuple[int, int]:
        """The rank of this process in the process group, and the number of its ranks."""
        return self.pipeline_number, self.num_pipelines

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the driver of the first pipeline."""
        return self.pipeline_number == 0 and (self.world is None or self.world.is_driver)

    @property
    def local_rank(self) -> int:
        """The number of this pipeline among the pipelines whose drivers are on this host."""
        if self.world is not None and self.world.is_driver:
            first = self.node_rank * self.world.num_local
            return sum(self.world.place_of(rank) == 0 for rank in range(first, self.world.rank))
        return super().local_rank if self.num_pipelines > 1 or self.world is not None else 0

    @property
    def node_rank(self) -> int:
        return super().node_rank if self.num_pipelines > 1 or self.world is not None else 0

    @property
    def devices(self) -> list[torch.device]:
        """The devices of this pipeline, one per stage; the last one belongs to this process.

        The driver uses the first device of its pipeline, as users of Lightning expect. Workers use the remaining
        devices.
        """
        assert self.parallel_devices is not None
        local, number = self.parallel_devices, len(self.parallel_devices) * self.num_nodes // self.num_pipelines
        ranks: Sequence[int] = range(self.pipeline_number * number, (self.pipeline_number + 1) * number)
        if self.world is not None:
            ranks = [self.world.driver, *self.world.workers]
        own = [local[rank % len(local)] for rank in ranks]
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
        check_launch(environment, num_local, self.num_nodes, self._num_replicas, self._num_parts)
        if is_external(environment):
            check_numbering(environment, num_local)
            self.world = World(
                address=environment.main_address,
                port=environment.main_port,
                rank=environment.global_rank(),
                size=environment.world_size(),
                num_stages=num_local * self.num_nodes // self.num_pipelines,
                num_local=num_local,
                num_parts=self._num_parts,
            )
            self._launcher = self._launcher_of(self.world)
        elif self.num_pipelines > 1:
            self._launcher = SubprocessScriptLauncher(environment, self.num_pipelines, self.num_nodes)

    def _launcher_of(self, world: World) -> Launcher:
        return RanksLauncher(world, replace_workers=self._replaces_workers)

    def set_world_ranks(self) -> None:
        """Set the rank of this pipeline. Lightning calls this when the Trainer is built."""
        environment = self.cluster_environment
        if self.num_pipelines == 1 or environment is None:
            return
        if self.world is None:
            if is_external(environment):
                return  # the Trainer is being built, and a rank may turn out to be a worker
            environment.set_global_rank(self.local_rank)
            environment.set_world_size(self.num_pipelines)
        cast(Any, rank_zero_only).rank = self.pipeline_number

    def setup_environment(self) -> None:
        """Connect the pipelines."""
        self.set_world_ranks()
        super().setup_environment()
        if self.num_pipelines == 1:
            return
        assert self.cluster_environment is not None
        reset_seed()
        if distributed_is_initialized() and (size := torch.distributed.get_world_size()) != self.num_pipelines:
            raise MisconfigurationException(
                f"The default process group has {size} ranks, but there are {self.num_pipelines} pipelines: leave it "
                "to the strategy to initialise it, and destroy it after other trainings."
            )
        _, interface = interface_to(self.world.address) if self.world is not None else ("", "")
        with environment_variables(**{"GLOO_SOCKET_IFNAME": interface} if interface else {}):
            init_dist_connection(self.cluster_environment, "gloo", *self.group_place)

    def replicas(self, timeout_seconds: float, *, zero_stage: int) -> Replicas | None:
        """Return the description of the replicas for the stages. Collective: every pipeline calls this."""
        if not self.is_distributed:
            return None
        url, address = self._meet()
        name = "stage" if self._num_parts == 1 else f"part-{self.part}-stage"
        place = self.global_rank, self.world_size
        return Replicas(*place, url, timeout_seconds, address, name, zero_stage=zero_stage)

    def layer_peers(self, timeout_seconds: float) -> Peers | None:
        """Return the description of the pipelines of this replica. Collective: every pipeline calls this."""
        if self._num_parts == 1:
            return None
        url, address = self._meet()
        return Peers(self.part, self._num_parts, url, timeout_seconds, address, f"replica-{self.global_rank}-stage")

    def _meet(self) -> tuple[str, str]:
        """Return the URL at which the pipelines connect in this run, and an address that all of them can reach."""
        address = LOOPBACK if self.world is None else self.world.address
        if self.rendezvous:
            return self.rendezvous, address
        if self.world is not None:
            self.rendezvous = self.broadcast(self.world.rendezvous())
        else:
            # Stored before the broadcast, which raises if another replica has failed: teardown removes the directory.
            self._rendezvous_directory = mkdtemp(prefix="relay-") if self.is_global_zero else None
            self._rendezvous_directory = self.broadcast(self._rendezvous_directory)
            self.rendezvous = f"file://{self._rendezvous_directory}"
        return self.rendezvous, address

    def stages_on_host(self) -> list[int]:
        """Return the stage number of each process on this host, for all pipelines, including the drivers."""
        if self.world is None:
            return [*range(len(self.devices))] * self.num_pipelines
        num_stages, num_local = self.world.num_stages, self.world.num_local
        first = self.world.rank // num_local * num_local
        return [(self.world.place_of(rank) - 1) % num_stages for rank in range(first, first + num_local)]

    def barrier(self, name: str | None = None) -> None:
        """Wait for all pipelines."""
        if distributed_is_initialized() and self.num_pipelines > 1:
            torch.distributed.barrier()

    def broadcast(self, obj: _Value, src: int = 0) -> _Value:
        """Return the object that pipeline ``src`` has passed."""
        if not (distributed_is_initialized() and self.num_pipelines > 1):
            return obj
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the pipelines with the same part of the layers; ``None`` if this is the default group.

        The first use of this group or of the other one is collective.
        """
        return None if self._num_parts == 1 else self._groups()[0]

    @property
    def tensor_parallel_group(self) -> Any:
        """The process group of the pipelines of this replica, which divide its layers."""
        return self._groups()[1]

    def _groups(self) -> tuple[Any, Any]:
        if self._own_groups is None:
            replicas, parts = range(self._num_replicas), range(self._num_parts)
            new_group, number = torch.distributed.new_group, self._num_parts
            of_parts = [new_group([replica * number + part for replica in replicas]) for part in parts]
            of_replicas = [new_group([replica * number + part for part in parts]) for replica in replicas]
            self._own_groups = of_parts[self.part], of_replicas[self.global_rank]
        return self._own_groups

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum of a tensor over the replicas. Objects that are not tensors stay unchanged."""
        if isinstance(tensor, torch.Tensor) and self.is_distributed:
            return sync_ddp_if_available(tensor, group or self.data_parallel_group, reduce_op=reduce_op)
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all replicas, stacked."""
        if not self.is_distributed:
            return tensor
        return super().all_gather(tensor, group or self.data_parallel_group, sync_grads)

    def teardown(self) -> None:
        """Remove the rendezvous of the replicas. The process group stays for the next ``fit`` or ``test``."""
        if self._rendezvous_directory is not None and self.is_global_zero:
            rmtree(Path(self._rendezvous_directory), ignore_errors=True)
        self._rendezvous_directory, self.rendezvous = None, ""
        super().teardown()
