"""The device of each layer of a ``Pipe``, and which layers form a partition.

layer on       cuda:0  cuda:0  cuda:1  cpu  cpu  worker1/cpu  worker1/cpu
partition      └─── 0 ──────┘  └ 1 ─┘  2    3    └────────── 4 ─────────┘
"""

from dataclasses import dataclass

import torch
from torch import nn

from strategies.common.stage_layers import StageLayers
from strategies.common.torch_compat import RemoteDevice
from strategies.pipeline.transport.planes import with_index


@dataclass(frozen=True)
class Place:
    """A device of an RPC worker; ``worker=None`` means the process that runs the ``Pipe``."""

    worker: str | None
    device: torch.device

    def __str__(self) -> str:
        return str(self.device) if self.worker is None else f"{self.worker}/{self.device}"


class WithDevice(nn.Module):
    """Places a layer of a :class:`~strategies.pipeline.pipe.pipe.Pipe` on a device.

    ``Pipe`` moves the layer to the device and uses it without this wrapper, so parameter names do not change.

    Args:
        module: The layer.
        device: A device of this process (``"cuda:1"``), or of another RPC worker (``"worker1/cuda:0"``).

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If ``device`` is not a valid device.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | int) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"WithDevice takes a module, got {type(module).__name__}")
        self._module = module
        self._place = _place(device)

    @property
    def module(self) -> nn.Module:
        """The layer."""
        return self._module

    @property
    def device(self) -> torch.device:
        """The device, in the process of :attr:`worker`."""
        return self._place.device

    @property
    def worker(self) -> str | None:
        """The name of the RPC worker; ``None`` is this process."""
        return self._place.worker

    @property
    def place(self) -> Place:
        """Worker and device."""
        return self._place

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the layer."""
        return self._module(*args, **kwargs)


@dataclass(frozen=True)
class Partition:
    """Consecutive layers at one place.

    Attributes:
        layers: The layers, named as in the whole module.
        place: Worker and device of the layers.
    """

    layers: StageLayers
    place: Place

    def describe(self, number: int) -> str:
        """Return text such as ``partition 1 on worker1/cpu (layers 3 to 5: Block, Block, Linear)``."""
        kinds = ", ".join(type(layer).__name__ for layer in self.layers)
        (span,) = self.layers.spans
        return f"partition {number} on {self.place} (layers {span.start} to {span.stop - 1}: {kinds})"


def partitions_of(module: nn.Sequential, here: str | None) -> list[Partition]:
    """Move layers to the devices of this process that ``WithDevice`` names, and return the partitions.

    Consecutive layers at one place form a partition. On the CPU of this process, however, every layer is a partition,
    as in the original ``Pipe``.

    Args:
        module: The layers.
        here: RPC name of this process, if it has one.

    Raises:
        ValueError: If the parameters of a layer are on several devices, or two partitions share a parameter.
    """
    partitions: list[Partition] = []
    for number, (name, child) in enumerate(module._modules.items()):
        assert child is not None
        layer, place = (child.module, child.place) if isinstance(child, WithDevice) else (child, _place_of(name, child))
        if place.worker is None or place.worker == here:
            place = Place(None, place.device)
            layer.to(place.device)
        joins = partitions and partitions[-1].place == place and place != Place(None, torch.device("cpu"))
        if not joins:
            partitions.append(Partition(StageLayers([range(number, number)]), place))
        layers = partitions[-1].layers
        layers._modules[name] = layer  # add_module refuses a layer that is called "chunks"
        layers.spans = (range(layers.spans[0].start, number + 1),)
    _check_shared(partitions)
    return partitions


def _place(device: torch.device | str | int) -> Place:
    if isinstance(device, int):
        return Place(None, torch.device(device))
    try:
        parsed = RemoteDevice(device)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"device must be like 'cuda:1' or 'worker1/cuda:0', got {device!r}: {error}") from error
    if parsed.rank() is not None:
        raise ValueError(f"device {device!r} gives a rank; give the RPC name of the worker, as in 'worker1/cpu'")
    place = Place(parsed.worker_name(), parsed.device())
    return place if place.worker is not None else Place(None, with_index(place.device))


def _place_of(name: str, layer: nn.Module) -> Place:
    for tensors in (list(layer.parameters()), list(layer.buffers())):
        devices = sorted({str(tensor.device) for tensor in tensors})
        if len(devices) > 1:
            raise ValueError(
                f"layer {name}, a {type(layer).__name__}, has tensors on {', '.join(devices)}, but a layer of Pipe "
                "runs on one device: move it with .to(device), or divide it into several layers"
            )
        if devices:
            return Place(None, tensors[0].device)
    return Place(None, torch.device("cpu"))


def _check_shared(partitions: list[Partition]) -> None:
    owners: dict[nn.Parameter, int] = {}
    for number, partition in enumerate(partitions):
        for name, parameter in partition.layers.named_parameters(remove_duplicate=False):
            other = owners.setdefault(parameter, number)
            place = partitions[other].place
            if other != number and not (place == partition.place and place.worker is None):
                raise ValueError(
                    f"parameter {name} is shared by layers on {place} and on {partition.place}; each would train a "
                    "separate copy. Put the layers on one device of this process, or into one partition"
                )


def layers_of(partitions: list[Partition]) -> dict[str, nn.Module]:
    """Return all layers by name, without ``WithDevice``."""
    return {name: layer for partition in partitions for name, layer in partition.layers.named_children()}
