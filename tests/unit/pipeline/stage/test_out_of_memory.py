"""An error for lack of memory says what the stage did, its memory, and what helps, the smallest change first."""

from dataclasses import replace

import pytest
import torch
from pytorch_lightning.utilities.memory import is_oom_error
from torch import nn

from strategies.pipeline.stage.out_of_memory import (
    EXPANDABLE,
    DeviceMemory,
    Situation,
    changes,
    explained,
    explaining,
    is_float32,
)

GIB = 2**30
FULL = DeviceMemory(38 * GIB, 39 * GIB, GIB // 2, 40 * GIB)
IN_FORWARD = Situation("F3", 4, microbatches=8, recomputed=7, num_kept=8, is_float32=True)


def kinds(at: Situation, memory: DeviceMemory = FULL) -> list[str]:
    words = {
        EXPANDABLE: "allocator",
        "checkpoint='always'": "recompute",
        "microbatches=": "microbatches",
        "schedule='1f1b'": "1f1b",
        "balance": "balance",
        "zero_stage": "shard",
        "bf16": "bf16",
        "more stages": "stages",
    }
    return [next(kind for word, kind in words.items() if word in change) for change in changes(at, memory)]


def test_changes_are_ranked() -> None:
    assert kinds(IN_FORWARD) == ["recompute", "microbatches", "1f1b", "balance", "shard", "bf16"]
    assert kinds(replace(IN_FORWARD, recomputed=8, num_kept=3, is_float32=False)) == [
        "microbatches",
        "balance",
        "shard",
    ]
    assert kinds(replace(IN_FORWARD, trains=False)) == ["microbatches", "balance", "bf16"]
    assert kinds(Situation("the optimizer step", 1)) == ["shard"]
    assert kinds(Situation("F0", 1, microbatches=0, trains=False)) == ["stages"]


def test_fragmented_memory_needs_another_allocator_first() -> None:
    fragmented = replace(FULL, allocated_bytes=30 * GIB)
    assert kinds(IN_FORWARD, fragmented)[0] == "allocator"
    assert "9.00 GiB are reserved, but no tensor uses them" in changes(IN_FORWARD, fragmented)[0]
    assert not replace(FULL, allocated_bytes=36 * GIB).is_fragmented


def test_the_error_keeps_the_text_that_the_batch_size_finder_looks_for() -> None:
    found = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    error = explained(found, "stage 1 (layers 3 to 6: Linear)", FULL, IN_FORWARD)
    assert is_oom_error(error) and type(error) is torch.OutOfMemoryError
    expected = (
        "CUDA out of memory. Tried to allocate 2.00 GiB.\nstage 1 (layers 3 to 6: Linear) is out of memory in F3: "
        "38.00 GiB allocated, 39.00 GiB reserved, 0.50 GiB free of 40.00 GiB. What helps, the smallest change first: "
        "(1) let checkpoint='always' recompute all 8 micro-batches instead of 7"
    )
    assert str(error).startswith(expected)
    assert "microbatches=16 instead of 8" in str(error)


def test_only_errors_for_lack_of_memory_are_explained() -> None:
    layers = nn.Sequential(nn.Linear(2, 2))
    cpu = torch.device("cpu")
    with (
        pytest.raises(
            torch.OutOfMemoryError, match=r"no memory\nstage 0 is out of memory in the optimizer step: .*GiB"
        ),
        explaining("stage 0", layers, cpu, "the optimizer step"),
    ):
        raise torch.OutOfMemoryError("no memory")
    with pytest.raises(KeyError, match="other"), explaining("stage 0", layers, cpu, "the optimizer step"):
        raise KeyError("other")
    assert is_float32(layers) and not is_float32(layers.double())


def test_memory_of_the_cpu_is_that_of_the_process() -> None:
    memory = DeviceMemory.of(torch.device("cpu"))
    assert 0 < memory.allocated_bytes == memory.reserved_bytes < memory.total_bytes and not memory.is_fragmented
