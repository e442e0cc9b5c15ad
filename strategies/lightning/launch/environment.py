"""Checks which launcher started the processes of a run, and that their number and order fit the Trainer's arguments."""

import sys
import time
from collections.abc import Sequence

import torch

from strategies.lightning.compat import (
    GPUS_MISSING,
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MisconfigurationException,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

_KNOWN = (TorchElasticEnvironment, SLURMEnvironment, MPIEnvironment, LSFEnvironment, KubeflowEnvironment)
"""The environments whose ranks may become workers."""

_FIRST_SECONDS = 3.0
"""How much later ranks end than rank 0, since a launcher ends all ranks when the first of them ends."""


def check_launch(
    environment: ClusterEnvironment, num_devices: int, num_nodes: int, num_replicas: int, num_parts: int
) -> None:
    """Check that the number of processes agrees with the Trainer's arguments.

    Args:
        environment: Knows whether a launcher has started processes, and how many.
        num_devices: Number of devices of each host.
        num_nodes: Number of hosts.
        num_replicas: Number of replicas among which the devices are divided.
        num_parts: Number of pipelines of each replica.

    Raises:
        MisconfigurationException: If the number does not agree, or if the devices cannot be divided evenly.
    """
    number, num_pipelines = num_devices * num_nodes, num_replicas * num_parts
    given = f"data_parallel_size={num_replicas}" + (f" x tensor_parallel_size={num_parts}" if num_parts > 1 else "")
    if is_external(environment):
        check_num_processes(environment, num_devices, num_nodes)
        if ":" in environment.main_address:
            raise MisconfigurationException(
                f"MASTER_ADDR is the IPv6 address {environment.main_address}; give an IPv4 address or a host name."
            )
    elif num_pipelines > 1 and environment.creates_processes_externally and not _is_ours(environment):
        raise MisconfigurationException(
            f"{given}, but {type(environment).__name__} has started a single process; start all {number} of them."
        )
    elif num_nodes > 1:
        raise MisconfigurationException(
            f"RPCSequentialStrategy starts processes on its own host only, got num_nodes={num_nodes}. Start the ranks "
            f"of all hosts with torchrun (--nnodes={num_nodes} --nproc-per-node={num_devices}) or SLURM."
        )
    if number % num_pipelines:
        raise MisconfigurationException(
            f"{given} replicas cannot divide {number} devices evenly among them; set devices to {num_pipelines} times "
            "the number of stages."
        )


def check_num_processes(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Check that a launcher has started as many processes as the Trainer's arguments say.

    Args:
        environment: Knows how many processes have been started.
        num_devices: Number of devices of each host.
        num_nodes: Number of hosts.

    Raises:
        MisconfigurationException: On rank 0, if the numbers differ.
        SystemExit: On the other ranks, so that the launcher shows the error once.
    """
    number, num_processes = num_devices * num_nodes, environment.world_size()
    if num_processes == number:
        return
    if environment.global_rank() > 0:
        time.sleep(_FIRST_SECONDS)
        sys.exit(1)
    raise MisconfigurationException(
        f"{type(environment).__name__} has started {num_processes} processes, but the Trainer's devices={num_devices} "
        f"on each of num_nodes={num_nodes} hosts make {number}; set devices to the number of processes on each host, "
        "and num_nodes to that of hosts."
    )


def check_visible_gpus(environment: ClusterEnvironment, devices: Sequence[torch.device], num_nodes: int) -> None:
    """Check that a rank that a launcher has started sees all GPUs of its host.

    The first rank of a host uses the first device, the second rank uses the second device, and so on.

    Args:
        environment: Knows how many processes have been started.
        devices: The devices of this host.
        num_nodes: Number of hosts.

    Raises:
        MisconfigurationException: If the rank sees only some of them.
    """
    indices = [device.index or 0 for device in devices if device.type == "cuda"]
    if not indices:
        return
    num_visible, num_local = torch.cuda.device_count(), environment.world_size() // num_nodes
    if max(indices) >= num_visible or len(devices) == num_visible < num_local:
        raise MisconfigurationException(_visible_gpus(num_visible, num_local))


def check_numbering(environment: ClusterEnvironment, num_local: int) -> None:
    """Check that a launcher has numbered the ranks host by host, which determines the stages of a host.

    Args:
        environment: Knows the global and the local rank of this process.
        num_local: Number of ranks of each host.

    Raises:
        MisconfigurationException: If the ranks are numbered in another way, such as round-robin over the hosts.
    """
    rank, local_rank = environment.global_rank(), environment.local_rank()
    if local_rank != rank % num_local:
        raise MisconfigurationException(
            f"{type(environment).__name__} has given the number {local_rank} on its host to rank {rank}, which with "
            f"{num_local} ranks on each host must have the number {rank % num_local}: ranks 0 to {num_local - 1} "
            "belong on the first host, the next ones on the second, and so on, or ranks would share a device. Under "
            "SLURM, use --distribution=block and the same --ntasks-per-node for all hosts."
        )


def explained_gpus(error: MisconfigurationException, num_nodes: int) -> MisconfigurationException:
    """Return the error of a Trainer that asks for more GPUs than its process sees, with advice if a launcher is used.

    Under SLURM, Lightning refuses such devices before it calls the strategy.
    """
    if GPUS_MISSING not in str(error):
        return error
    launchers = [environment for environment in (TorchElasticEnvironment, SLURMEnvironment) if environment.detect()]
    num_local = launchers[0]().world_size() // num_nodes if launchers else 1
    if num_local == 1:
        return error
    return MisconfigurationException(f"{error}\n{_visible_gpus(torch.cuda.device_count(), num_local)}")


def _visible_gpus(num_visible: int, num_local: int) -> str:
    return (
        f"This rank sees {num_visible} GPU{'' if num_visible == 1 else 's'}, but {num_local} ranks of this host need "
        "one each, and each rank must see those of all: rank r of a host uses cuda:r. Under SLURM, use "
        f"--gpus-per-node={num_local} (and --gpu-bind=none) instead of --gpus-per-task=1; under torchrun and others, "
        "set CUDA_VISIBLE_DEVICES to one list for all ranks of a host, or not at all. For stages that share a GPU, "
        f"leave devices out and set RPCSequentialStrategy(parallel_devices=[torch.device('cuda:0')] * {num_local})."
    )


_of_mpi: list[MPIEnvironment] = []
"""The environment of the first Trainer of this process that trained over ranks of MPI."""


def lasting_environment(environment: ClusterEnvironment) -> ClusterEnvironment:
    """Return the environment of an earlier Trainer of this process under MPI; any other environment unchanged.

    Lightning's environment finds address, port and local rank by collective operations of MPI, in which ranks that
    have become workers no longer take part.
    """
    if not isinstance(environment, MPIEnvironment) or environment.world_size() == 1:
        return environment
    if not _of_mpi:
        _of_mpi.append(environment)
    return _of_mpi[0]


def is_external(environment: ClusterEnvironment) -> bool:
    """Return whether a launcher such as torchrun has started several processes."""
    ours = _is_ours(environment)
    return not ours and environment.creates_processes_externally and environment.world_size() > 1


def _is_ours(environment: ClusterEnvironment) -> bool:
    """Return whether Lightning starts the processes; otherwise, a process that it started would look external."""
    return isinstance(environment, LightningEnvironment) and not _counts_ranks_itself(environment)


def _counts_ranks_itself(environment: ClusterEnvironment) -> bool:
    """Return whether an environment is a variant of Lightning's that counts ranks itself, as Ray Train's does."""
    counts = type(environment).world_size is not LightningEnvironment.world_size
    return isinstance(environment, LightningEnvironment) and counts


def check_environment(environment: ClusterEnvironment, known: Sequence[type] = ()) -> None:
    """Check that the ranks of a pipeline may become workers, if something other than Lightning has started them.

    Args:
        environment: Knows what has started the ranks.
        known: Further classes of environments whose ranks may become workers.

    Raises:
        MisconfigurationException: If the environment is not known and counts several ranks.
    """
    is_known = _is_ours(environment) or isinstance(environment, (*_KNOWN, *known))
    if not is_known and (number := environment.world_size()) > 1:
        name = f"{type(environment).__module__}.{type(environment).__qualname__}"
        raise MisconfigurationException(
            f"{name} says that {number} ranks have been started, by something other than torchrun, SLURM, MPI, LSF "
            "or Kubeflow; a pipeline does not know whether they can become its workers. Start the ranks with one of "
            'these, or use strategy="ddp" or "zero", which train in the processes that there are. Under Ray Train, use '
            "the strategies of strategies.ray."
        )
