"""Time of a training step and bytes held per rank: ZeRO and comparable methods in two processes.

    DDP + AdamW                         every rank has the whole state and computes the whole step
    DDP + ZeroRedundancyOptimizer       torch's ZeRO, stage 1
    FSDP2 (fully_shard)                 parameters are divided as well: gathered for each pass of each layer
    Relay, stage 1 and 2                with each option
    Relay, stage 3                      parameters are divided as by FSDP2; the optimizer steps plain rows

All methods train in the same two processes, alternating step by step, so that other load on the machine slows all of
them down equally. CPU time (of all threads of one rank) depends less on other load than the time of a step, but does
not show the gain from overlapping communication with computation.
"""

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.models import encoder_layers
from benchmarks.report import Effort, Section, Table, quartiles, ratios, spread
from strategies.sharding.model import ShardedModel
from strategies.sharding.optimizers import ShardedOptimizers
from strategies.sharding.row_optimizers import RowOptimizers

RANKS, ROWS, LENGTH = 2, 2, 64
NUM_LAYERS, WIDTH = 12, 512
ROUNDS, WARM_UP = 9, 2
BUCKET_BYTES = 4 * 2**20  # the strategy's default
LEARNING_RATE = 1e-4

Step = Callable[[torch.Tensor], None]
Make = Callable[[], nn.Sequential]


def plain_step(model: nn.Module, optimizer: Optimizer) -> Step:
    """Return the function that runs a step of a wrapped model."""

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def ddp(make_model: Make) -> tuple[nn.Module, Any, Step]:
    model = DistributedDataParallel(make_model())
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    return model, optimizer, plain_step(model, optimizer)


def torchs_zero(make_model: Make, *, as_view: bool) -> tuple[nn.Module, Any, Step]:
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, parameters_as_bucket_view=as_view, lr=LEARNING_RATE)
    return model, optimizer.optim, plain_step(model, optimizer)


def fsdp2(make_model: Make) -> tuple[nn.Module, Any, Step]:
    model = make_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    return model, optimizer, plain_step(model, optimizer)


def relay(make_model: Make, stage: int, *, overlap: bool, as_view: bool) -> tuple[nn.Module, Any, Step]:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    sharded = ShardedOptimizers(
        [optimizer],
        dict(model.named_parameters()),
        dist.new_group(),
        whole_gradients=stage == 1,
        step_in_backward=overlap,
        parameters_as_bucket_view=as_view,
        find_unused_parameters=False,
        bucket_bytes=BUCKET_BYTES,
    )
    optimizer.register_step_post_hook(lambda stepped, args, kwargs: sharded.after_step(stepped))

    def step(x: torch.Tensor) -> None:
        def closure() -> None:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            sharded.reducer.follow(loss, communicate=True)
            loss.backward()

        optimizer.step(closure)

    return model, optimizer, step


def relay_by_rows(make_model: Make) -> tuple[nn.Module, Any, Step]:
    group = dist.new_group()
    sharded = ShardedModel(make_model(), group, group, device=torch.device("cpu"), find_unused=False)
    model = sharded.model
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    optimizers = RowOptimizers([optimizer], sharded, group)
    optimizer.register_step_post_hook(lambda stepped, args, kwargs: optimizers.after_step(stepped))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with sharded.training_step():
            loss = model(x).square().mean()
        optimizers.follow(loss, communicate=True)
        loss.backward()
        sharded.after_backward()
        optimizer.step()

    return model, optimizer, step


VARIANTS: dict[str, Callable[[Make], tuple[nn.Module, Any, Step]]] = {
    "DDP + AdamW": ddp,
    "DDP + ZeroRedundancyOptimizer": lambda make: torchs_zero(make, as_view=False),
    "DDP + ZeroRedundancyOptimizer, bucket views": lambda make: torchs_zero(make, as_view=True),
    "FSDP2": fsdp2,
    "Relay, stage 1": lambda make: relay(make, 1, overlap=False, as_view=False),
    "Relay, stage 1, bucket views": lambda make: relay(make, 1, overlap=False, as_view=True),
    "Relay, stage 1, overlap": lambda make: relay(make, 1, overlap=True, as_view=False),
    "Relay, stage 2": lambda make: relay(make, 2, overlap=False, as_view=False),
    "Relay, stage 2, overlap": lambda make: relay(make, 2, overlap=True, as_view=False),
    "Relay, stage 2, overlap, bucket views": lambda make: relay(make, 2, overlap=True, as_view=True),
    "Relay, stage 3": relay_by_rows,
}


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of this rank's moments, without step counters."""
    return sum(own_bytes(value) for state in optimizer.state.values() for value in state.values() if value.ndim)


def held_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of this rank's parameters, gradients and moments after a step."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return sum(map(own_bytes, [*parameters, *gradients])) + state_bytes(optimizer)


def own_bytes(tensor: Any) -> int:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes


def main_of_rank(rank: int, folder: str, rounds: int, num_layers: int, width: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    x = torch.randn(ROWS, LENGTH, width)
    made = {name: make(partial(encoder_layers, num_layers, width)) for name, make in VARIANTS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for number in range(rounds + WARM_UP):
        for name, (_, _, step) in made.items():
            dist.barrier()
            started = perf_counter(), process_time()
            step(x)
            busy = process_time() - started[1]
            dist.barrier()
            if number >= WARM_UP:
                times[name].append((perf_counter() - started[0], busy))
    held = {
        name: torch.tensor([state_bytes(optimizer), held_bytes(model, optimizer)])
        for name, (model, optimizer, _) in made.items()
    }
    for size in held.values():
        dist.all_reduce(size, dist.ReduceOp.MAX)
    check_equal({name: model for name, (model, _, _) in made.items() if name != "FSDP2"})
    if rank == 0:
        outcome = {"times": times, "held": {name: size.tolist() for name, size in held.items()}}
        (Path(folder) / "outcome.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


def check_equal(models: dict[str, nn.Module]) -> None:
    """Check that all models have the same weights."""
    expected, *others = (
        [getattr(p.detach(), "full_tensor", p.detach)() for p in model.parameters()] for model in models.values()
    )
    for other in others:
        for p, q in zip(expected, other, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=0.1 * LEARNING_RATE)


def table_of(times: dict[str, list[list[float]]], held: dict[str, list[int]]) -> Table:
    """Return a table with one row per variant."""
    whole, reference = held["DDP + AdamW"], times["DDP + AdamW"]
    rows = []
    for name, measured in times.items():
        row = [name]
        for kind in (0, 1):
            own = [one[kind] for one in measured]
            row += [*spread(own), f"{quartiles(ratios(own, [one[kind] for one in reference]))[1]:.3f}"]
        for size, of_ddp in zip(held[name], whole, strict=True):
            row += [f"{size / 1e6:.1f}", f"{size / of_ddp:.1%}"]
        rows.append(row)
    columns = ["", "step, s", "quartiles", "of DDP", "CPU s", "quartiles", "of DDP", "MB of state", "share"]
    columns += ["MB held", "share"]
    return Table(columns, rows)


def main(effort: Effort) -> Section:
    rounds = effort.rounds_or(ROUNDS)
    num_layers, width = (2, 64) if effort.tiny else (NUM_LAYERS, WIDTH)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, rounds, num_layers, width)
        ranks = [context.Process(target=main_of_rank, args=(rank, *given)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed; its output is above")
        outcome = json.loads((Path(folder) / "outcome.json").read_text())
    return Section(
        "ZeRO, DDP, torch's ZeRO and FSDP2",
        f"{num_layers} transformer layers of width {width}, {ROWS} rows of {LENGTH} on each of {RANKS} ranks with one "
        f"thread each, AdamW, gloo; {rounds} interleaved rounds after {WARM_UP}; medians, ratios per round. CPU "
        "time is that of all threads of one rank. State, and all that is held after a step (parameters, gradients, "
        "state), are those of the rank with the most.",
        tables=[table_of(outcome["times"], outcome["held"])],
        notes=["All variants except FSDP2 have trained the same weights."],
        absent={"DeepSpeed ZeRO": "not tried: available as source only; builds operators at their first use"},
    )
