"""Real limits of a process: what it uses of them, and stages that they refuse."""

import re
import resource

import torch
from harness import run
from torch import nn, optim

from strategies.launch.limits import limits_of_process
from strategies.pipeline.partition.memory import DevicePlacement, check_memory
from strategies.pipeline.partition.sequential import cut

MEBI = 2**20


def under_limits() -> list[tuple[int, str, bool]]:
    assert limits_of_process() == []
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        resource.setrlimit(kind, (2**40, resource.RLIM_INFINITY))
    before = limits_of_process()
    kept = bytearray(256 * MEBI)
    after = limits_of_process()
    found = [
        (limit.size_bytes, limit.words, 250 * MEBI < later.used_bytes - limit.used_bytes < 262 * MEBI)
        for limit, later in zip(before, after, strict=True)
    ]
    return found if kept else []


def test_limits_of_a_process_and_what_of_them_it_uses() -> None:
    assert run(under_limits) == [
        (2**40, "RLIMIT_DATA, `ulimit -d`", True),
        (2**40, "RLIMIT_AS, `ulimit -v`", True),
    ]


def had_of_64_mebi() -> list[bool]:
    """Whether 32 MiB can be had, and 96, with 64 MiB left by the figure."""
    resource.setrlimit(resource.RLIMIT_DATA, (2**40, -1))
    resource.setrlimit(resource.RLIMIT_DATA, (limits_of_process()[0].used_bytes + 64 * MEBI, -1))
    bytearray(32 * MEBI)
    try:
        bytearray(96 * MEBI)
    except MemoryError:
        return [True, False]
    return [True, True]


def test_what_is_used_is_what_the_kernel_counts() -> None:
    assert run(had_of_64_mebi) == [True, False]


class Model(nn.Module):
    """Eight layers of 100 MiB, with an embedding and a buffer outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(25600, 1024, bias=False) for _ in range(8)])
        self.embed = nn.Embedding(256, 1024)
        self.register_buffer("table", torch.empty(MEBI // 4))


def refused(balance: list[int], mebi: int, kind: int, *, states: bool) -> str:
    """What the check says of 8 layers of 100 MiB, if each process may use some MiB more than this one does."""
    limit = {resource.RLIMIT_DATA: "DATA", resource.RLIMIT_AS: "AS"}[kind]
    for each in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        resource.setrlimit(each, (2**40, -1))
    (used,) = [own.used_bytes for own in limits_of_process() if limit in own.words]
    resource.setrlimit(kind, (used + mebi * MEBI, -1))
    with torch.device("meta"):
        model = Model()
    optimizers = [optim.AdamW(model.parameters())] if states else [optim.SGD(model.parameters(), lr=0.1)]
    stages = cut(model.blocks, balance)
    numbers = [*range(len(balance))]
    try:
        check_memory(DevicePlacement.of(model, stages, [torch.device("cpu")] * len(balance), numbers), optimizers)
    except ValueError as error:
        return str(error)
    return ""


def all_rows() -> list[str]:
    data, space = resource.RLIMIT_DATA, resource.RLIMIT_AS
    return [
        refused([4, 4], 850, data, states=False),
        refused([4, 4], 700, data, states=False),
        refused([2, 2, 2, 2], 850, data, states=True),
        refused([1, 7], 1000, space, states=False),
        refused([2] * 4, 300, data, states=True),
    ]


def test_real_limits_of_a_process_refuse_a_stage() -> None:
    fits, sgd, adamw, space, layer = run(all_rows)
    assert fits == adamw == ""
    assert sgd.startswith("Stage 1 (layers 4 to 7: Linear, Linear, Linear, Linear) needs at least 803 MiB (402 MiB of ")
    assert "MiB of gradients), and " in sgd and " for everything else in this process, but a process may use " in sgd
    assert "(RLIMIT_DATA, `ulimit -d`). " in sgd
    # What the process uses may have changed a little since the limit was set.
    assert re.search(r"With (69\d|70\d) MiB for a stage per process, 3 stages are needed at least \(balance=\[3", sgd)
    assert re.search(
        r"\(RLIMIT_AS, `ulimit -v`\)\. With (99\d|1,00\d) MiB for a stage per process, 2 stages suffice", space
    )
    assert "No number of stages suffices: a single layer, or the last layer with the rest of the model" in layer
    assert "divide this layer into several or among processes (tensor_parallel_size)" in layer
