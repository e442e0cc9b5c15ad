"""Check before any process starts that parameters, gradients and optimizer states of each stage fit into memory.

    stages ──▶ bytes of each stage ──┬──▶ per process: the limits of the process (RLIMIT_DATA, RLIMIT_AS)
    optimizers ──▶ bytes of states ──┼──▶ all processes on this host: free memory of the host and of control groups
                                     └──▶ all stages on a GPU: the memory of the GPU, less the buffers of NCCL

Activations, copies and libraries need additional memory. A configuration that is refused therefore cannot work, but one
that is not refused may still need too much memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.stage_layers import StageLayers, describe
from strategies.common.torch_compat import indices_of_sparse, values_of_sparse
from strategies.common.trees import tensors_in
from strategies.launch.limits import limits_of_process, room_on_host
from strategies.optim.costs import state_bytes
from strategies.optim.restricted import parameters_of
from strategies.pipeline.partition.balance import partition_costs
from strategies.pipeline.transport.nccl import COMMUNICATOR_BYTES
from strategies.pipeline.transport.ties import find_ties, owned_parameters

_MEBI = 2**20

TWO_SETS = (
    "Gradients count twice, because this schedule computes those of a batch while earlier gradients still exist: "
    "gradients accumulate, or on_before_zero_grad, optimizer_zero_grad or the optimizer's zero_grad is overridden. "
    "schedule='gpipe' needs them once. "
)


@dataclass(frozen=True)
class DevicePlacement:
    """The placement of the parts of a model.

    Attributes:
        stages: The layers of each stage. The last stage is in this process.
        outside: The modules outside of all stages, in this process.
        devices: Device of each stage.
        on_host: For each process on this host, the number of its stage. With replicas, a number occurs several times.
    """

    stages: Sequence[StageLayers]
    outside: Sequence[nn.Module]
    devices: Sequence[torch.device]
    on_host: Sequence[int]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        stages: Sequence[StageLayers],
        devices: Sequence[torch.device],
        on_host: Sequence[int],
    ) -> "DevicePlacement":
        """Return the placement of a model with these stages."""
        inside = {module for stage in stages for module in stage.modules()}
        return cls(stages, [module for module in model.modules() if module not in inside], devices, on_host)


@dataclass(frozen=True)
class Need:
    """The memory that a process needs at the same time.

    Attributes:
        parameters: Bytes of parameters and buffers.
        gradients: Bytes of gradients.
        states: Bytes of optimizer states.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.parameters + self.gradients + self.states

    def __add__(self, other: "Need") -> "Need":
        return Need(self.parameters + other.parameters, self.gradients + other.gradients, self.states + other.states)

    def __str__(self) -> str:
        parts = [f"{_mebi(self.parameters)} of parameters"]
        parts += [f"{_mebi(self.gradients)} of gradients"] if self.gradients else []
        parts += [f"{_mebi(self.states)} of optimizer states"] if self.states else []
        return f"{_mebi(self.total)} ({', '.join(parts)})" if len(parts) > 1 else parts[0]


class Sizes:
    """Sizes of gradients and optimizer states of each parameter in training.

    Args:
        optimizers: The optimizers, over parameters that may be on the ``meta`` device; empty if the run does not train.
        num_shares: Number of replicas that divide the optimizer states among themselves.
        gradient_sets: Number of gradients of a parameter that exist at the same time.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        num_shares: int = 1,
        gradient_sets: float = 1,
    ) -> None:
        self._gradient_sets = gradient_sets
        self._stepped = [set(parameters_of(optimizer)) for optimizer in optimizers]
        self._states: dict[Tensor, int] = {}
        for optimizer in optimizers:
            for parameter, size in state_bytes(optimizer).items():
                self._states[parameter] = self._states.get(parameter, 0) + size // num_shares

    def need(self, modules: Iterable[nn.Module], owned: Iterable[Tensor] | None = None) -> Need:
        """Return the memory that a process needs for some modules.

        Args:
            modules: The modules. Their submodules count only if they are also listed.
            owned: The parameters whose optimizer states are in this process; by default all.
        """
        tensors = _tensors_of(modules)
        states = tensors if owned is None else set(tensors).intersection(owned)
        # Optimizers may alternate, so the gradients of all of them need not exist at the same time.
        gradients = [sum(nbytes_of(p) for p in tensors if p in own and p.requires_grad) for own in self._stepped]
        return Need(
            sum(map(nbytes_of, tensors)),
            int(self._gradient_sets * max(gradients, default=0)),
            sum(self._states.get(p, 0) for p in states),
        )


def check_memory(
    placement: DevicePlacement,
    optimizers: Sequence[Optimizer] = (),
    *,
    num_shares: int = 1,
    gradient_sets: float = 1,
    num_snapshots: int = 0,
    communicators: Sequence[int] = (),
) -> None:
    """Check that parameters, gradients and optimizer states fit into the memory of processes, host and GPUs.

    Args:
        placement: The placement of the parts of the model.
        optimizers: The optimizers; empty if the run does not train.
        num_shares: Number of replicas that divide the optimizer states among themselves.
        gradient_sets: Number of gradients of a parameter that exist at the same time.
        num_snapshots: Number of snapshots of parameters, buffers, gradients and optimizer states in host memory.
        communicators: For each stage, the number of its NCCL communicators, with buffers on its GPU. Default: none.

    Raises:
        ValueError: If they cannot fit. The message gives the smallest sufficient number of stages.
    """
    sizes, stages = Sizes(optimizers, num_shares, gradient_sets), placement.stages
    needs, outside = needs_of(stages, placement.outside, sizes), sizes.need(placement.outside)
    held = held_bytes(placement, optimizers)
    placed = [(i, layer) for stage in stages for i, layer in zip(chain(*stage.spans), stage, strict=True)]
    layers = [sizes.need(layer.modules()).total for _, layer in sorted(placed, key=itemgetter(0))]
    checks = chain(
        _processes(placement, needs, held.get(torch.device("cpu"), 0)),
        _gpus(placement, needs, communicators or [0] * len(stages)),
        _host(placement, needs, held.get(torch.device("cpu"), 0)),
        _snapshots(placement, needs, held.get(torch.device("cpu"), 0), num_snapshots),
    )
    for lack in checks:
        if lack.way_out:
            raise ValueError(f"{lack.words} {lack.way_out}")
        smallest = smallest_number(layers, lack.room_bytes, last=outside.total)
        twice = TWO_SETS if gradient_sets > 1 and optimizers else ""
        raise ValueError(f"{lack.words} {twice}{_way_out(lack, smallest, len(stages))}")


def needs_of(stages: Sequence[StageLayers], outside: Sequence[nn.Module], sizes: Sizes) -> list[Need]:
    """Return the memory that each stage needs. The last stage includes the modules ``outside``.

    A tied parameter counts in each stage that uses it. Its optimizer states count in the stage that owns it.
    """
    ties = find_ties(stages, _tensors_of(outside))
    *workers, driver = stages
    needs = [sizes.need(stage.modules(), owned_parameters(i, stage, ties)) for i, stage in enumerate(workers)]
    return [*needs, sizes.need([*driver.modules(), *outside])]


def smallest_number(costs: Sequence[int], limit: int, *, last: int = 0) -> list[int] | None:
    """Return a balance with as few stages as possible in which no stage costs more than a limit.

    Args:
        costs: The cost of each layer.
        limit: The limit.
        last: The additional cost of the last stage.

    Returns:
        The number of layers of each stage; ``None`` if even one layer per stage costs too much.
    """
    for number in range(1, len(costs) + 1):
        balance, first = partition_costs(costs, number, last=last), 0
        sums = []
        for size in balance:
            sums.append(sum(costs[first : first + size]))
            first += size
        sums[-1] += last
        if max(sums) <= limit:
            return balance
    return None


_ROWS = Tensor.crow_indices, Tensor.col_indices, Tensor.values
_COLUMNS = Tensor.ccol_indices, Tensor.row_indices, Tensor.values
_SPARSE_PARTS = {
    torch.sparse_coo: (indices_of_sparse, values_of_sparse),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COLUMNS),
}
"""The functions that return the dense tensors of a sparse tensor, by layout."""


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor on any device. For a tensor made of other tensors, add up its parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(nbytes_of(getattr(tensor, name)) for name in names)
    if parts := _SPARSE_PARTS.get(tensor.layout):
        return sum(part(tensor).nbytes for part in parts)
    return tensor.nbytes


def held_bytes(placement: DevicePlacement, optimizers: Sequence[Optimizer]) -> dict[torch.device, int]:
    """Return the bytes of parameters, buffers, gradients and optimizer states already in this process, by device."""
    tensors = _tensors_of(chain(placement.outside, *(stage.modules() for stage in placement.stages)))
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    states = [value for own in optimizers for value in _tensors_in_state(own)]
    held: dict[torch.device, int] = {}
    for tensor in dict.fromkeys([*tensors, *gradients, *states]):
        held[tensor.device] = held.get(tensor.device, 0) + nbytes_of(tensor)
    return held


@dataclass(frozen=True)
class _Lack:
    """A lack of memory.

    Attributes:
        words: What needs how much memory, and how much is available.
        room_bytes: The memory that is available for a stage in each place.
        place: The kind of place, such as a process.
        way_out: The remedy, if a different number of stages does not help.
    """

    words: str
    room_bytes: int
    place: str
    way_out: str = ""


def _processes(placement: DevicePlacement, needs: Sequence[Need], held: int) -> Iterator[_Lack]:
    """Yield the stages that do not fit into a process."""
    last = len(needs) - 1
    for limit in limits_of_process():
        beside = max(0, limit.used_bytes - held)
        for i in sorted(set(placement.on_host)):
            own = beside if i == last else 0  # the needs of a worker without a stage are not known yet
            if placement.devices[i].type == "cpu" and needs[i].total + own > limit.size_bytes:
                more = f", and {_mebi(own)} for everything else in this process" if own else ""
                yield _Lack(
                    f"{_name(placement, i)} needs at least {needs[i]}{more}, but a process may use "
                    f"{_mebi(limit.size_bytes)} ({limit.words}).",
                    max(0, limit.size_bytes - beside),  # a worker has imported about as much as this process
                    "process",
                )


def _gpus(placement: DevicePlacement, needs: Sequence[Need], communicators: Sequence[int]) -> Iterator[_Lack]:
    """Yield the GPUs into which their stages do not fit."""
    last = len(needs) - 1
    # Count each stage once: other replicas on this host use other GPUs.
    on_gpus = [i for i in dict.fromkeys(placement.on_host) if placement.devices[i].type == "cuda"]
    for device in dict.fromkeys(placement.devices[i] for i in on_gpus):
        here = [i for i in on_gpus if placement.devices[i] == device]
        if placement.devices[last] == device:
            room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        else:  # a query of the free memory would create a CUDA context of some hundred MiB in this process
            room = torch.cuda.get_device_properties(device).total_memory
        need, number = sum((needs[i] for i in here), Need()), sum(communicators[i] for i in here)
        buffers = number * COMMUNICATOR_BYTES
        if need.total + buffers > room:
            names = " and ".join(dict.fromkeys(_name(placement, i) for i in here))
            each = f"(data_plane='nccl', at least {_mebi(COMMUNICATOR_BYTES)} each)"
            more = f", and {_mebi(buffers)} for the buffers of {number} NCCL communicators {each}" if number else ""
            words = f"{names} on {device} needs at least {need}{more}, but {_mebi(room)} are free."
            yield _Lack(words, max(0, room - buffers), "GPU")


def _host(placement: DevicePlacement, needs: Sequence[Need], held: int) -> Iterator[_Lack]:
    """Yield a lack if the stages of all processes on this host do not fit into its memory together."""
    here = [i for i in placement.on_host if placement.devices[i].type == "cpu"]
    if not here:
        return
    need, size_bytes, words = _of_host(here, needs, held)
    if need.total > size_bytes:
        yield _Lack(
            f"The {len(here)} stages on this host need at least {need} together, but only {words}. More "
            "stages on one host need as much: use several hosts, with torchrun or SLURM and the Trainer's num_nodes.",
            size_bytes,
            "host",
        )


def _snapshots(placement: DevicePlacement, needs: Sequence[Need], held: int, num_snapshots: int) -> Iterator[_Lack]:
    """Yield a lack if the stages on CPUs and the snapshots of all stages do not fit into this host's memory."""
    if not num_snapshots:
        return
    on_cpus = [i for i in placement.on_host if placement.devices[i].type == "cpu"]
    need, size_bytes, words = _of_host(on_cpus, needs, held)
    copies = num_snapshots * sum((needs[i] for i in placement.on_host), Need()).total
    if need.total + copies > size_bytes:
        what = f"The {len(on_cpus)} stages on this host need at least {need} together, and " if on_cpus else ""
        yield _Lack(
            f"{what}{_mebi(copies)} are needed for {num_snapshots} snapshots of the {len(placement.on_host)} stages on "
            f"this host, but only {words}.",
            size_bytes,
            "host",
            "Leave recovery out, whose snapshots are for replacing lost workers.",
        )


def _of_host(here: Sequence[int], needs: Sequence[Need], held: int) -> tuple[Need, int, str]:
    """Return the memory that the stages on this host need, the available memory, and a description of the latter."""
    room, need = room_on_host(), sum((needs[i] for i in here), Need())
    drivers = sum(i == len(needs) - 1 for i in here)
    size_bytes = room.size_bytes + max(1, drivers) * held
    return need, size_bytes, f"{_mebi(size_bytes)} are available ({room.words}, including what the model takes already)"


def _way_out(lack: _Lack, smallest: Sequence[int] | None, num_stages: int) -> str:
    instead = "an optimizer with smaller states, such as SGD, or a lower precision, such as precision='bf16-true'"
    if smallest is None:
        return (
            f"No number of stages suffices: a single layer, or the last layer with the rest of the model, needs more "
            f"than the {_mebi(lack.room_bytes)} that a {lack.place} has for a stage. Raise the limit, divide this "
            f"layer into several or among processes (tensor_parallel_size), or use {instead}."
        )
    number, enough = len(smallest), "suffice" if len(smallest) <= num_stages else "are needed at least"
    return (
        f"With {_mebi(lack.room_bytes)} for a stage per {lack.place}, {number} stages {enough} "
        f"(balance={list(smallest)}); "
        f"activations need more on top. Set devices and balance, raise the limit, or use {instead}."
    )


def _name(placement: DevicePlacement, i: int) -> str:
    stage = describe(i, placement.stages[i])
    return f"{stage[0].upper()}{stage[1:]}"


def _tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return parameters and buffers of modules, without their submodules, each once."""
    found = (chain(module._parameters.values(), module._buffers.values()) for module in modules)
    return [*dict.fromkeys(tensor for tensor in chain.from_iterable(found) if tensor is not None)]


def _tensors_in_state(optimizer: Optimizer) -> list[Tensor]:
    return tensors_in([dict(state) for state in optimizer.state.values() if isinstance(state, dict)])


def _mebi(size_bytes: int) -> str:
    return f"{size_bytes / _MEBI:,.0f} MiB"
