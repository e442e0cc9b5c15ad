"""Peak memory of each process by number of micro-batches: gpipe with each recomputation mode, and other schedules.

The size of a micro-batch is constant, so the growth is the memory that the schedule keeps for more micro-batches.
"""

import ctypes
import gc
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plots import lines, plot
from benchmarks.report import Effort, Section, Table
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.tables import SCHEDULES
from strategies.pipeline.stage.layers import PassContext
from strategies.planning.simulator import ActionCosts, simulate

STAGES, ROWS, INPUT_WIDTH = 3, 64, 8
MEBI = 2**20
WIDTH = MEBI // 4 // ROWS
"""With this width, an activation of a micro-batch takes 1 MiB."""

ACTIVATIONS = 4
"""Number of activations in each process."""

MODES = {
    "gpipe, never": ("gpipe", "never"),
    "gpipe, except_last": ("gpipe", "except_last"),
    "gpipe, always": ("gpipe", "always"),
    **{f"{name}, never": (name, "never") for name in ("1f1b", "interleaved", "zb-h1", "zbv", "v-half")},
}
MICROBATCHES = (4, 8, 16, 32)


def memory_bytes(pid: int, kind: str) -> int:
    """Return ``VmRSS``, the memory of a process, or ``VmHWM``, its peak since :func:`reset_peaks`."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def reset_peaks(pids: list[int]) -> None:
    """Reset the peaks, and return freed memory of this process to the system, because it would hide later growth."""
    ctypes.CDLL(None).malloc_trim(0)
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def tensor_bytes(*_: Any) -> int:
    """Return the bytes of all tensors that exist in this process. A stage can run this function."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    here = [tensor for tensor in found if not tensor.is_meta]  # the gradient of another one would be fetched
    gradients = [tensor.grad for tensor in here if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in (*here, *gradients)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def growth_mebi(schedule: str, checkpoint: str, microbatches: int) -> list[float]:
    """Return the growth of each process in a step, after a step with two rows per micro-batch."""
    activations = [nn.Tanh() for _ in range(STAGES * ACTIVATIONS)]
    model = nn.Sequential(nn.Linear(INPUT_WIDTH, WIDTH), *activations, nn.Linear(WIDTH, 1))
    settings = Settings(microbatches=microbatches, checkpoint=checkpoint, schedule=schedule)
    num_chunks = settings.programs(STAGES).placement.num_stages
    balance = [STAGES * ACTIVATIONS // num_chunks] * num_chunks
    balance[0] += 1
    balance[-1] += 1
    pipeline = Pipeline(model, balance, [torch.device("cpu")] * STAGES, settings)
    pipeline.start()
    try:
        step(pipeline, model, torch.randn(2 * microbatches, INPUT_WIDTH), schedule, microbatches)
        assert pipeline.workers is not None
        pids = [process.pid for process in pipeline.workers._processes] + [os.getpid()]
        x = torch.randn(ROWS * microbatches, INPUT_WIDTH)
        reset_peaks(pids)
        before = [memory_bytes(pid, "VmRSS") for pid in pids]
        step(pipeline, model, x, schedule, microbatches)
        return [(memory_bytes(pid, "VmHWM") - held) / MEBI for pid, held in zip(pids, before, strict=True)]
    finally:
        pipeline.close()


def promised(schedule: str, microbatches: int) -> list[float]:
    """Return the simulated maximum number of micro-batches that each process holds, with the driver last.

    If a process has two chunks of layers, a micro-batch in one chunk counts as half.
    """
    named = SCHEDULES[schedule]
    chunks = named.chunks[1]
    costs = ActionCosts(activation_bytes=1 / chunks, kept_bytes=0.0)
    simulation = simulate(named.table(STAGES, microbatches, chunks), costs)
    driver = simulation.placement.driver
    return [*simulation.peak_bytes[driver + 1 :], *simulation.peak_bytes[: driver + 1]]


def step(pipeline: Pipeline, model: nn.Sequential, x: Tensor, schedule: str, microbatches: int) -> None:
    """Run forward and backward passes, without an optimizer."""

    def loss_of(part: Tensor) -> Tensor:
        return model(part).square().mean()

    if schedule == "gpipe":
        loss: Tensor | None = loss_of(x)
    else:
        codes = [partial(loss_of, part) for part in x.chunk(microbatches)]
        loss = pipeline.interleave(codes, [1 / microbatches] * microbatches, PassContext.capture("cpu"))
    assert loss is not None
    loss.backward()
    pipeline.wait()


def draw(numbers: tuple[int, ...], grown: dict[str, list[list[float]]], figure: Any) -> None:
    axes = figure.subplots(1, STAGES, sharey=True)
    for i, axis in enumerate(axes):
        stage = {mode: [row[i] for row in rows] for mode, rows in grown.items()}
        lines(axis, numbers, stage, x="micro-batches", y="growth in MiB" if i == 0 else "", log="xy")
        axis.set_title("driver" if i == STAGES - 1 else f"worker {i}", fontsize=8)


def main(effort: Effort) -> Section:
    torch.set_num_threads(1)
    numbers = (2, 4) if effort.tiny else MICROBATCHES
    modes = {name: MODES[name] for name in ("gpipe, always", "zbv, never")} if effort.tiny else MODES
    grown = {mode: [growth_mebi(*options, m) for m in numbers] for mode, options in modes.items()}
    rows = []
    for mode, of_numbers in grown.items():
        kept = [promised(modes[mode][0], m) for m in numbers]
        for i in range(STAGES):
            name = "driver" if i == STAGES - 1 else "worker"
            values = [f"{row[i]:.0f} ({k[i]:g})" for row, k in zip(of_numbers, kept, strict=True)]
            rows.append([f"{mode}, {name}{f' {i}' if name == 'worker' else ''}", *values])
    section = Section(
        "Peak memory of each process",
        f"{STAGES} processes of {ACTIVATIONS} layers each, which keep 1 MiB per micro-batch, and 1 MiB of input; "
        "float32, no optimizer. Growth of the process in MiB in a step of full size; in brackets the maximum number of "
        "micro-batches that the schedule keeps in that process according to the simulator (under `interleaved`, `zbv` "
        "and `v-half` a process has two chunks of layers, each of which counts half).",
        tables=[Table(["", *(f"{m} micro-batches" for m in numbers)], rows)],
        notes=[
            "The driver also merges the outputs of all micro-batches (here one number per row) and holds the batch."
        ],
    )
    plot(section, effort, "stage_memory.png", partial(draw, numbers, grown), size=(9, 3.2))
    return section
