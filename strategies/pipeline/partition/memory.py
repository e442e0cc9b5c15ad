"""Whether parameters, gradients and optimizer states of each stage fit into memory, from sizes, before anything starts.

    stages ──▶ bytes of each stage ──┬──▶ of each process: its limits (RLIMIT_DATA, RLIMIT_AS)
    optimizers ──▶ bytes of states ──┼──▶ of all processes on this host: what the host and control groups have left
                                     └──▶ of all stages on a GPU: its memory, less the buffers of NCCL

Activations, copies and libraries need more on top. So what is refused cannot work, and what is not refused may still
need too much.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.stage_layers import StageLayers, describe
from strategies.common.trees import tensors_in
from strategies.launch.limits import limits_of_process, room_on_host
from strategies.optim.costs import state_bytes
from strategies.optim.restricted import parameters_of
from strategies.pipeline.partition.balance import partition_costs
from strategies.pipeline.transport.nccl import COMMUNICATOR_BYTES
from strategies.pipeline.transport.ties import find_ties, owned_parameters

_MEBI = 2**20

TWO_SETS = (
    "Gradients count twice, because this schedule makes those of a batch while earlier ones are still there: gradients "
    "are accumulated, or on_before_zero_grad, optimizer_zero_grad or the optimizer's zero_grad is overridden. "
    "schedule='gpipe' needs them once. "
)


@dataclass(frozen=True)
class DevicePlacement:
    """Where the parts of a model are.

    Attributes:
        stages: The layers of each stage; those of the last stage are in this process.
        outside: The modules that are in none of them, in this process.
        devices: Device of each stage.
        on_host: For each process on this host the number of its stage; several times the same with replicas.
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
    """What a process must hold at once.

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
    """Sizes of what training holds beside each parameter.

    Args:
        optimizers: The optimizers, over parameters that may be on the ``meta`` device; none if the run does not train.
        num_shares: Number of replicas that divide the optimizer states among them.
        gradient_sets: Number of gradients that a parameter has at once.
    """

    def __init__(self, optimizers: Sequence[Optimizer], num_shares: int = 1, gradient_sets: int = 1) -> None:
        self._gradient_sets = gradient_sets
        self._stepped = [set(parameters_of(optimizer)) for optimizer in optimizers]
        self._states: dict[Tensor, int] = {}
        for optimizer in optimizers:
            for parameter, size in state_bytes(optimizer).items():
                self._states[parameter] = self._states.get(parameter, 0) + size // num_shares

    def need(self, modules: Iterable[nn.Module], owned: Iterable[Tensor] | None = None) -> Need:
        """Return what a process needs for some modules.

        Args:
            modules: The modules; what is inside them counts only if it is listed too.
            owned: The parameters whose optimizer states are in this process; by default all.
        """
        tensors = _tensors_of(modules)
        states = tensors if owned is None else set(tensors).intersection(owned)
        # Optimizers may take turns, so the gradients of all of them need not exist at once.
        gradients = [sum(nbytes_of(p) for p in tensors if p in own and p.requires_grad) for own in self._stepped]
        return Need(
            sum(map(nbytes_of, tensors)),
            self._gradient_sets * max(gradients, default=0),
            sum(self._states.get(p, 0) for p in states),
        )


def check_memory(
    placement: DevicePlacement,
    optimizers: Sequence[Optimizer] = (),
    *,
    num_shares: int = 1,
    gradient_sets: int = 1,
    num_snapshots: int = 0,
    communicators: Sequence[int] = (),
) -> None:
    """Check that parameters, gradients and optimizer states fit into the memory of processes, host and GPUs.

    Args:
        placement: Where the parts of the model are.
        optimizers: The optimizers; none if the run does not train.
        num_shares: Number of replicas that divide the optimizer states among them.
        gradient_sets: Number of gradients that a parameter has at once.
        num_snapshots: Number of copies of parameters, buffers, gradients and optimizer states that the host holds, too.
        communicators: For each stage, the number of its NCCL communicators, with buffers on its GPU. Default: none.

    Raises:
        ValueError: If they cannot fit, with the smallest sufficient number of stages.
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
    """Return what each stage needs, the last one with the modules ``outside``.

    A tied parameter counts in each stage that uses it, its optimizer states in the one that owns it.
    """
    ties = find_ties(stages, _tensors_of(outside))
    *workers, driver = stages
    needs = [sizes.need(stage.modules(), owned_parameters(i, stage, ties)) for i, stage in enumerate(workers)]
    return [*needs, sizes.need([*driver.modules(), *outside])]


def smallest_number(costs: Sequence[int], limit: int, *, last: int = 0) -> list[int] | None:
    """Return a balance with as few stages as possible of which none costs more than a limit.

    Args:
        costs: The cost of each layer.
        limit: The limit.
        last: What the last stage costs beside its layers.

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


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor on whichever device; those of its parts, if it is made of others (quantized)."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(nbytes_of(getattr(tensor, name)) for name in names)
    return tensor.nbytes


def held_bytes(placement: DevicePlacement, optimizers: Sequence[Optimizer]) -> dict[torch.device, int]:
    """Return what this process already holds of parameters, buffers, gradients and optimizer states, by device."""
    tensors = _tensors_of(chain(placement.outside, *(stage.modules() for stage in placement.stages)))
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    states = [value for own in optimizers for value in _tensors_in_state(own)]
    held: dict[torch.device, int] = {}
    for tensor in dict.fromkeys([*tensors, *gradients, *states]):
        held[tensor.device] = held.get(tensor.device, 0) + nbytes_of(tensor)
    return held


@dataclass(frozen=True)
class _Lack:
    """What does not fit.

    Attributes:
        words: What needs how much, and how much there is.
        room_bytes: How much there is for a stage in each place.
        place: What a place is.
        way_out: What would help, if that is not another number of stages.
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
            own = beside if i == last else 0  # what a worker needs before it has a stage is not known yet
            if placement.devices[i].type == "cpu" and needs[i].total + own > limit.size_bytes:
                more = f", and {_mebi(own)} for what else is in this process" if own else ""
                yield _Lack(
                    f"{_name(placement, i)} needs at least {needs[i]}{more}, but a process may use "
                    f"{_mebi(limit.size_bytes)} ({limit.words}).",
                    max(0, limit.size_bytes - beside),  # a worker has imported about as much as this process
                    "process",
                )


def _gpus(placement: DevicePlacement, needs: Sequence[Need], communicators: Sequence[int]) -> Iterator[_Lack]:
    """Yield the GPUs into which their stages do not fit."""
    last = len(needs) - 1
    # Once each: other replicas on this host have GPUs of their own.
    on_gpus = [i for i in dict.fromkeys(placement.on_host) if placement.devices[i].type == "cuda"]
    for device in dict.fromkeys(placement.devices[i] for i in on_gpus):
        here = [i for i in on_gpus if placement.devices[i] == device]
        if placement.devices[last] == device:
            room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        else:  # to ask for its free memory takes some hundred MiB of it, for a context of this process
            room = torch.cuda.get_device_properties(device).total_memory
        need, number = sum((needs[i] for i in here), Need()), sum(communicators[i] for i in here)
        buffers = number * COMMUNICATOR_BYTES
        if need.total + buffers > room:
            names = " and ".join(dict.fromkeys(_name(placement, i) for i in here))
            each = f"(data_plane='nccl', at least {_mebi(COMMUNICATOR_BYTES)} each)"
            more = f", and {_mebi(buffers)} for the buffers of {number} NCCL communicators {each}" if number else ""
            words = f"{names} on {device} needs at least {need}{more}, but {_mebi(room)} are free there."
            yield _Lack(words, max(0, room - buffers), "GPU")


def _host(placement: DevicePlacement, needs: Sequence[Need], held: int) -> Iterator[_Lack]:
    """Yield whether the stages of all processes on this host do not fit into its memory together."""
    here = [i for i in placement.on_host if placement.devices[i].type == "cpu"]
    if not here:
        return
    need, size_bytes, words = _of_host(here, needs, held)
    if need.total > size_bytes:
        yield _Lack(
            f"The {len(here)} stages on this host need at least {need} together, but only {words}. More "
            "stages on one host need as much: use several hosts, by torchrun or SLURM and the Trainer's num_nodes.",
            size_bytes,
            "host",
        )


def _snapshots(placement: DevicePlacement, needs: Sequence[Need], held: int, num_snapshots: int) -> Iterator[_Lack]:
    """Yield a lack if the snapshots of all processes do not fit into this host's memory, beside what they copy."""
    here = [i for i in placement.on_host if placement.devices[i].type == "cpu"]
    if not here or not num_snapshots:
        return
    need, size_bytes, words = _of_host(here, needs, held)
    copies = num_snapshots * need.total
    if need.total + copies > size_bytes:
        yield _Lack(
            f"The {len(here)} stages on this host need at least {need} together, and {_mebi(copies)} for "
            f"{num_snapshots} snapshots of the same, but only {words}.",
            size_bytes,
            "host",
            "Set max_restarts=0: the snapshots are those from which lost workers are repaired.",
        )


def _of_host(here: Sequence[int], needs: Sequence[Need], held: int) -> tuple[Need, int, str]:
    """Return what stages on this host need, what they can have, and that in words."""
    room, need = room_on_host(), sum((needs[i] for i in here), Need())
    drivers = sum(i == len(needs) - 1 for i in here)
    size_bytes = room.size_bytes + max(1, drivers) * held
    return need, size_bytes, f"{_mebi(size_bytes)} can be had ({room.words}, with what the model takes already)"


def _way_out(lack: _Lack, smallest: Sequence[int] | None, num_stages: int) -> str:
    instead = "an optimizer with smaller states, such as SGD, or a lower precision, such as precision='bf16-true'"
    if smallest is None:
        return (
            f"No number of stages suffices: a single layer, or the last one with what the model has outside of its "
            f"layers, needs more than the {_mebi(lack.room_bytes)} that a {lack.place} has for a stage. Raise the "
            f"limit, divide that layer into several, or use {instead}."
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
    """Return parameters and buffers of modules, but not of those inside them, each once."""
    found = (chain(module._parameters.values(), module._buffers.values()) for module in modules)
    return [*dict.fromkeys(tensor for tensor in chain.from_iterable(found) if tensor is not None)]


def _tensors_in_state(optimizer: Optimizer) -> list[Tensor]:
    return tensors_in([dict(state) for state in optimizer.state.values() if isinstance(state, dict)])


def _mebi(size_bytes: int) -> str:
    return f"{size_bytes / _MEBI:,.0f} MiB"
