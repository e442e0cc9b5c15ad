"""Quality of the balance: Relay, torchgpipe's algorithm and the exact optimum; predicted and measured stages.

The optimum comes from a search that shares no code with Relay. The search fills stages from the left up to a limit, and
finds the smallest limit that needs no more than the given number of stages.
"""

import itertools
import random
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.blockpartition import block_partition
from benchmarks.models import VOCABULARY, encoder_layers, gpt_layers
from benchmarks.plots import plot
from benchmarks.report import Effort, Section, Table, quartiles
from benchmarks.stage_memory import step
from benchmarks.timeline import RecordingLayer, spans_of
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.partition.balance import partition_costs
from strategies.pipeline.partition.profiling import layer_seconds, layer_sizes
from strategies.pipeline.partition.sequential import cut

VECTORS, MICROBATCHES, STEPS, STAGES = 2000, 4, 4, 2


def maximum(costs: list[float], lengths: list[int]) -> float:
    """Return the cost of the most expensive part."""
    bounds = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


def optimum(costs: list[float], parts: int) -> float:
    """Return the smallest maximum of all splits into consecutive, non-empty parts."""
    sums = sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)})
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        if _num_parts(costs, sums[middle]) <= parts:
            high = middle
        else:
            low = middle + 1
    return sums[low]


def _num_parts(costs: list[float], limit: float) -> int:
    if max(costs) > limit:
        return len(costs) + 1
    number, filled = 1, 0.0
    for cost in costs:
        if filled + cost > limit:
            number, filled = number + 1, 0.0
        filled += cost
    return number


def random_vectors(number: int) -> list[tuple[list[float], int]]:
    """Return integer costs, so that sums are exact, and a number of parts for each."""
    generator = random.Random(0)
    found = []
    for _ in range(number):
        parts = generator.randint(2, 8)
        length = generator.randint(parts, 40)
        found.append(([float(generator.randint(1, 1000)) for _ in range(length)], parts))
    return found


def vectors_table(number: int) -> tuple[Table, dict[str, list[float]]]:
    """Compare the algorithms on random costs."""
    vectors = random_vectors(number)
    best = [optimum(costs, parts) for costs, parts in vectors]
    rows, found = [], {}
    for name, split in {"Relay (partition_costs)": partition_costs, "torchgpipe's": block_partition}.items():
        began = perf_counter()
        splits = [split(costs, parts) for costs, parts in vectors]
        micros = (perf_counter() - began) / number * 1e6
        over = [maximum(costs, own) / least for (costs, _), own, least in zip(vectors, splits, best, strict=True)]
        worse, empty = sum(ratio > 1 for ratio in over), sum(0 in own for own in splits)
        found[name] = over
        rows.append([name, str(worse), str(empty), f"{sum(over) / number:.4f}", f"{max(over):.3f}", f"{micros:.0f}"])
    columns = ["algorithm", "worse than the optimum", "with an empty stage", "mean ratio", "worst ratio", "µs a split"]
    return Table(columns, rows, f"{number:,} random cost vectors, 2 to 8 stages of up to 40 layers"), found


def same_as_the_library(number: int) -> str:
    """Return a sentence that states whether the reimplementation splits like the installed torchgpipe."""
    from torchgpipe.balance.blockpartition import solve

    vectors = random_vectors(number)
    same = sum([len(part) for part in solve(costs, parts)] == block_partition(costs, parts) for costs, parts in vectors)
    return f"The installed torchgpipe and the reimplementation split {same:,} of {number:,} vectors equally."


def convolutions() -> nn.Sequential:
    """Return a VGG-like model: early layers take time, late layers have many parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for out, repeats in ((32, 2), (64, 2), (128, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, 10))


def models(*, tiny: bool) -> dict[str, tuple[nn.Sequential, Tensor]]:
    """Return three models, each with a micro-batch."""
    width, rows = (64, 2) if tiny else (256, 8)
    wide = 4 * width
    narrowing = [nn.Linear(wide // 2**k, wide // 2 ** (k + 1)) for k in range(4)]
    return {
        "GPT": (gpt_layers(2 if tiny else 6, width, 32), torch.randint(VOCABULARY, (rows, 32))),
        "convolutions": (convolutions(), torch.randn(rows, 3, 32, 32)),
        "transformer, then narrowing layers": (
            nn.Sequential(*encoder_layers(2, width), nn.Linear(width, wide), *narrowing),
            torch.randn(rows, 32, width),
        ),
    }


def measured_stages(model: nn.Sequential, balance: list[int], sample: Tensor, steps: int) -> list[float]:
    """Return the median milliseconds of forward plus backward pass of a micro-batch on each stage of a pipeline."""
    stages = cut(model, balance)
    listeners = [RecordingLayer() for _ in stages]
    whole = nn.Sequential(*(layer for own, stage in zip(listeners, stages, strict=True) for layer in (own, *stage)))
    settings = Settings(microbatches=MICROBATCHES, checkpoint="never")
    devices = [torch.device("cpu")] * len(balance)
    pipeline = Pipeline(whole, [length + 1 for length in balance], devices, settings)
    pipeline.start()
    x = torch.cat([sample] * MICROBATCHES)
    try:
        step(pipeline, whole, x, "gpipe", MICROBATCHES)
        began = perf_counter()
        for _ in range(steps):
            step(pipeline, whole, x, "gpipe", MICROBATCHES)
    finally:
        pipeline.close()
    notes = [*(own.notes for own in listeners[:-1]), listeners[-1].get_extra_state()]
    found = []
    for i, own in enumerate(notes):
        spans = spans_of(own, i, began)
        passes = [[span.end - span.start for span in spans if span.kind == kind] for kind in "FB"]
        found.append(sum(quartiles(seconds)[1] for seconds in passes if seconds) * 1000)
    return found


def models_table(*, tiny: bool, steps: int) -> Table:
    """Balance each model in several ways and measure the stages."""
    rows = []
    for name, (model, sample) in models(tiny=tiny).items():
        measured = layer_seconds(model, sample, timeout_seconds=0.2 if tiny else 1.0, device=None)
        seconds = [sum(passes) for passes in measured]
        sizes = layer_sizes(model, sample, chunks=1, param_scale=4.0, device=None)
        splits = {
            "by_time": partition_costs(seconds, STAGES),
            "by_size": partition_costs(sizes, STAGES),
            "torchgpipe's, by time": block_partition(seconds, STAGES),
        }
        for how, lengths in splits.items():
            row = [f"{name}, {how}", " ".join(map(str, lengths))]
            row.append(f"{maximum(seconds, lengths) / optimum(seconds, STAGES):.3f}")
            bounds = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
            ideal = [sum(seconds[a:b]) * 1000 for a, b in itertools.pairwise(bounds)]
            row.append(" ".join(f"{ms:.1f}" for ms in ideal))
            own = measured_stages(model, lengths, sample, steps) if 0 not in lengths else []
            row.append(" ".join(f"{ms:.1f}" for ms in own) or "a stage is empty")
            rows.append(row)
    columns = ["model, balanced", "layers", "slowest stage / optimum", "predicted ms a stage", "measured ms"]
    return Table(columns, rows, f"Three models on {STAGES} stages; ms are those of a micro-batch, forward and backward")


def draw(found: dict[str, list[float]], figure: Any) -> None:
    axes = figure.subplots()
    axes.hist(list(found.values()), bins=30, label=list(found))
    axes.set_yscale("log")
    axes.set_xlabel("slowest stage / optimum")
    axes.set_ylabel("cost vectors")
    axes.legend(fontsize=7)


def main(effort: Effort) -> Section:
    torch.set_num_threads(1)
    table, found = vectors_table(100 if effort.tiny else VECTORS)
    section = Section(
        "Balance",
        "The measure of a split is its most expensive stage. torchgpipe's algorithm is reimplemented from its "
        "description (block partitions of Bárány and Grinberg); the optimum comes from another method than Relay's. "
        "Predictions are measurements of one process alone; two stages that compute at the same time slow each other "
        "down.",
        tables=[table, models_table(tiny=effort.tiny, steps=1 if effort.tiny else STEPS * effort.rounds_or(1))],
    )
    if find_spec("torchgpipe") is not None:
        section.notes.append(same_as_the_library(100 if effort.tiny else VECTORS))
    plot(section, effort, "balance.png", partial(draw, found), size=(6, 3.2))
    return section
