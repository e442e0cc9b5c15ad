"""Errors for a stage whose device is out of memory: its activity, its memory, and the smallest change that helps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

_GIB = 2**30
_FRAGMENTED = 0.1
"""Share of all memory that must be reserved, but unused by tensors, to suggest a change of the allocator's settings."""

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device.

    Attributes:
        allocated_bytes: The memory of this process's tensors; on the CPU, all memory of this process.
        reserved_bytes: The memory that this process's allocator has reserved, including ``allocated_bytes``.
        free_bytes: The memory that no process uses.
        total_bytes: All memory of the device.
    """

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """Return the memory of a device."""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return cls(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free, total)
        used, machine = int(psutil.Process().memory_info().rss), psutil.virtual_memory()
        return cls(used, used, machine.available, machine.total)

    @property
    def is_fragmented(self) -> bool:
        """Whether tensors do not use much of the reserved memory."""
        return self.reserved_bytes - self.allocated_bytes > _FRAGMENTED * self.total_bytes

    def __str__(self) -> str:
        named = (
            (self.allocated_bytes, "allocated"),
            (self.reserved_bytes, "reserved"),
            (self.free_bytes, f"free of {self.total_bytes / _GIB:.2f} GiB"),
        )
        return ", ".join(f"{size / _GIB:.2f} GiB {what}" for size, what in named)


@dataclass(frozen=True)
class Situation:
    """What a stage does when its device is out of memory.

    Attributes:
        doing: The current activity, such as ``F3``.
        num_layers: The number of layers of the stage.
        microbatches: Number of micro-batches of the pass; 0 outside of passes.
        recomputed: Number of micro-batches that are recomputed.
        num_kept: Number of micro-batches that wait for their backward pass on this stage.
        trains: Whether a backward pass may follow.
        is_float32: Whether the parameters of the stage are float32, and are not cast.
    """

    doing: str
    num_layers: int
    microbatches: int = 0
    recomputed: int = 0
    num_kept: int = 0
    trains: bool = True
    is_float32: bool = False


def changes(at: Situation, memory: DeviceMemory) -> list[str]:
    """Return changes that help against the lack of memory, the smallest change first."""
    found = []
    if memory.is_fragmented:
        idle = (memory.reserved_bytes - memory.allocated_bytes) / _GIB
        found.append(f"set {EXPANDABLE}, because {idle:.2f} GiB are reserved, but no tensor uses them")
    if at.microbatches and at.trains:
        if at.recomputed < at.microbatches:
            found.append(
                f"let checkpoint='always' recompute all {at.microbatches} micro-batches instead of {at.recomputed}, "
                "which takes up to a third more time"
            )
        found.append(f"use smaller micro-batches (microbatches={2 * at.microbatches} instead of {at.microbatches})")
        if at.microbatches > 2 and at.num_kept >= at.microbatches - 1:
            found.append(
                f"use schedule='1f1b', if it is not in use: a stage then keeps at most one micro-batch for each stage, "
                f"whereas this one keeps {at.num_kept}"
            )
    elif at.microbatches:
        found.append(f"use smaller micro-batches (microbatches={2 * at.microbatches} instead of {at.microbatches})")
    if at.num_layers > 1:
        found.append("move a layer of this stage to another stage (balance)")
    if at.trains:
        found.append("divide optimizer states among replicas (zero_stage=1, with data_parallel_size > 1)")
    if at.is_float32:
        found.append("compute in bfloat16 (precision='bf16-mixed' for activations, 'bf16-true' for parameters as well)")
    if not found:
        found.append("use more stages")
    return found


def explained(error: torch.OutOfMemoryError, stage: str, memory: DeviceMemory, at: Situation) -> torch.OutOfMemoryError:
    """Return an error that adds remedies to the text of ``error``, which Lightning's batch-size finder looks for."""
    return torch.OutOfMemoryError(
        f"{error}\n{stage} is out of memory in {at.doing}: {memory}. What helps, the smallest change first: "
        f"{'; '.join(f'({k}) {change}' for k, change in enumerate(changes(at, memory), start=1))}."
    )


def is_float32(layers: torch.nn.Module) -> bool:
    """Return whether layers have parameters in float32, and autocast is off."""
    return not torch.is_autocast_enabled("cuda") and any(p.dtype is torch.float32 for p in layers.parameters())


@contextmanager
def explaining(stage: str, layers: torch.nn.Sequential, device: torch.device, doing: str) -> Iterator[None]:
    """Explain an error for lack of memory outside of passes.

    Raises:
        torch.OutOfMemoryError: In place of an out-of-memory error that leaves this context.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        at = Situation(doing, len(layers), is_float32=is_float32(layers))
        raise explained(error, stage, DeviceMemory.of(device), at) from error
