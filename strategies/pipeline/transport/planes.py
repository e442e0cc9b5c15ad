"""The choice of the data plane: payloads go through host memory, or from device to device.

| name | payloads | for |
|---|---|---|
| ``gloo``, ``auto`` | through host memory | CPUs and GPUs, including GPUs that several stages share |
| ``nccl`` | from GPU to GPU | pipelines with one GPU per stage, if the user requests it |
| ``simulated`` | as under ``nccl``, on CPUs | tests: misuse of tensors in transit is an error |
| ``simulated-serial`` | the same, one transfer or action at a time | tests: the worst case of streams |
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch.distributed import Store

from strategies.common.waiting import Wait
from strategies.pipeline.transport.device import DeviceTransport, Route
from strategies.pipeline.transport.interface import HostTransport, Transport
from strategies.pipeline.transport.link import Links
from strategies.pipeline.transport.nccl import NcclCommunicators
from strategies.pipeline.transport.simulated import SimulatedCommunicators

AUTO, GLOO, NCCL, SIMULATED, SERIAL = "auto", "gloo", "nccl", "simulated", "simulated-serial"

PLANES = (AUTO, GLOO, NCCL, SIMULATED, SERIAL)


def with_index(device: torch.device) -> torch.device:
    """Return the device that ``torch.device("cuda")`` means in this process; return any other device unchanged."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def chosen_plane(plane: str, devices: Sequence[torch.device], hosts: Sequence[Hashable]) -> str:
    """Return the data plane for the stages of a pipeline.

    Args:
        plane: The name of a plane. ``"auto"`` is ``"gloo"``, also on GPUs: ``"nccl"`` has never run
            (``docs/gpu.md``), so it must be requested by name.
        devices: The device of each stage.
        hosts: An identifier of the host of each stage.

    Raises:
        ValueError: If the stages cannot use the plane.
    """
    if plane in (AUTO, GLOO) or len(devices) == 1:
        return GLOO
    places = list(zip(hosts, devices, strict=True))
    on_gpus = all(device.type == "cuda" for device in devices)
    have_own = on_gpus and len(set(places)) == len(places)
    names = [str(device) for device in devices]
    if plane == NCCL and not have_own:
        shared = next((str(device) for host, device in places if places.count((host, device)) > 1), None)
        why = f"stages share {shared}, which NCCL refuses" if on_gpus else "some are not GPUs"
        raise ValueError(
            f"data_plane='nccl' needs a GPU for each stage, but the stages are on {names}: {why}. Use "
            "data_plane='gloo', which sends activations through host memory, or give each stage a GPU."
        )
    if plane == NCCL and not torch.distributed.is_nccl_available():
        raise ValueError(
            "data_plane='nccl' needs a build of torch with NCCL, but this build has none. Use data_plane='gloo', or "
            "install a build for CUDA."
        )
    if plane != NCCL and any(device.type != "cpu" for device in devices):
        raise ValueError(
            f"data_plane={plane!r} simulates devices on CPUs, but the stages are on {names}. Use accelerator='cpu', or "
            "data_plane='auto'."
        )
    return plane


def open_transport(
    plane: str,
    links: Links,
    rank: int,
    device: torch.device,
    routes: Sequence[Route],
    wait: Wait,
    store: Callable[[], Store],
) -> Transport:
    """Open the transport of this process. If the data plane connects devices, all processes call this together.

    Args:
        plane: A result of :func:`chosen_plane`.
        links: The links of this process with other processes.
        rank: The rank of this process.
        device: The device of this process.
        routes: The routes over which processes exchange payloads, the same in all processes.
        wait: Runs a function that blocks until other processes have done something.
        store: Returns the store through which the processes connect.
    """
    if plane == GLOO:
        return HostTransport(links, device, wait)
    if plane == NCCL:
        communicators = NcclCommunicators(rank, device)
        try:
            wait(partial(communicators.connect, routes, store()))
        except BaseException:  # including Ctrl-C: another thread may still wait within NCCL
            communicators.abort()
            raise
        return DeviceTransport(links, rank, device, communicators, wait)
    simulated = SimulatedCommunicators(links.group, rank, routes, wait, one_at_a_time=plane == SERIAL)
    return DeviceTransport(links, rank, device, simulated, wait)
