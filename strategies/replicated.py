"""A strategy whose ranks are replicas: each of them has several devices, and is one rank to Lightning."""

import uuid
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, cast

import torch
from lightning_fabric.utilities.distributed import (
    _distributed_is_initialized,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher
from pytorch_lightning.strategies.strategy import TBroadcast
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from strategies.lifeline import Lifeline
from strategies.pipeline.replicas import Replicas


class ReplicatedStrategy(ParallelStrategy):
    """Lets Lightning start one process for each replica, and answers it for their world.

    With one replica there is nothing to start, and no process group.

    Args:
        num_replicas: How many there are.
        arguments: Those of ``ParallelStrategy``.
    """

    def __init__(self, num_replicas: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._num_replicas = num_replicas
        self._lifeline: Lifeline | None = None
        self._meeting_place: str | None = None

    num_nodes = 1  # the Trainer writes what the user gave

    @property
    def is_distributed(self) -> bool:
        """Whether samplers have to divide the data."""
        return self._num_replicas > 1

    @property
    def world_size(self) -> int:
        return self._num_replicas

    @property
    def global_rank(self) -> int:
        return super().global_rank if self.is_distributed else 0

    @property
    def local_rank(self) -> int:
        return super().local_rank if self.is_distributed else 0

    @property
    def node_rank(self) -> int:
        return super().node_rank if self.is_distributed else 0

    @property
    def devices(self) -> list[torch.device]:
        """Those of this replica, one for each stage; the last one is this process's."""
        assert self.parallel_devices is not None
        number = len(self.parallel_devices) // self._num_replicas
        return self.parallel_devices[self.local_rank * number :][:number]

    @property
    def root_device(self) -> torch.device:
        """This process's device, which is that of the last stage."""
        return self.devices[-1]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        # Called when the Trainer is built: the devices are known, and no process has been started.
        number = len(self.parallel_devices or ())
        if number % self._num_replicas:
            raise MisconfigurationException(
                f"data_parallel_size={self._num_replicas} replicas cannot divide {number} devices evenly among them; "
                f"set devices to {self._num_replicas} times the number of stages."
            )
        if self.is_distributed:
            assert self.cluster_environment is not None
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self._num_replicas, self.num_nodes)

    def setup_environment(self) -> None:
        """Connects the replicas; from then on they end with the first."""
        super().setup_environment()
        if not self.is_distributed:
            return
        assert self.cluster_environment is not None
        reset_seed()
        self.cluster_environment.set_global_rank(self.node_rank * self._num_replicas + self.local_rank)
        self.cluster_environment.set_world_size(self._num_replicas)
        cast(Any, rank_zero_only).rank = self.global_rank
        _init_dist_connection(self.cluster_environment, "gloo")
        self._lifeline = Lifeline(self.broadcast(f"relay/lifeline/{uuid.uuid4().hex}"))

    def replicas(self, timeout_seconds: float) -> Replicas | None:
        """What the stages need to know of the other replicas; every replica asks at the same time."""
        if not self.is_distributed:
            return None
        self._meeting_place = self.broadcast(mkdtemp(prefix="relay-") if self.is_global_zero else None)
        assert self._meeting_place is not None
        return Replicas(self.global_rank, self.world_size, self._meeting_place, timeout_seconds)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all replicas."""
        if _distributed_is_initialized() and self.is_distributed:
            torch.distributed.barrier()

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Returns what replica ``src`` gave."""
        if not (_distributed_is_initialized() and self.is_distributed):
            return obj
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Returns the mean or the sum over the replicas; what is not a tensor, as it is."""
        if isinstance(tensor, torch.Tensor) and self.is_distributed:
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    def teardown(self) -> None:
        """Lets go of the other replicas. The process group stays, for the next ``fit`` or ``test`` of this process."""
        if self._lifeline is not None:
            self._lifeline.end()
            self._lifeline = None
        if self._meeting_place is not None and self.is_global_zero:
            rmtree(Path(self._meeting_place), ignore_errors=True)
        self._meeting_place = None
        super().teardown()
