"""Time of a training step: one process against a pipeline of two with one thread each, in turns.

The pipeline runs under both schedules: gpipe, all forward passes before the first backward pass and one loss for the
batch, and 1f1b, one loss for each micro-batch. CPU seconds are the driver's; they tell what leading costs it.

Two cores can also be used by one process with two threads, as long as the model fits into it; that is timed beside.

The limit for two processes is not half of one: on shared hardware each slows down while the other works. So the same
work is also timed while a second process is busy; half of that is what a pipeline without any overhead would take.
"""

import multiprocessing
import platform
import statistics
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Event
from time import perf_counter, process_time

import torch
from torch import nn

from strategies.pipeline.context import PassContext
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.settings import Settings

WIDTH, NUM_LAYERS, ROWS, LENGTH, MICROBATCHES = 512, 8, 16, 64, 8
ROUNDS = 9


def make_model() -> nn.Sequential:
    """Eight transformer layers of width 512."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer
    return nn.Sequential(
        *[layer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True) for _ in range(NUM_LAYERS)]
    )


def one_process_step(x: torch.Tensor) -> Callable[[], None]:
    """A step on this process, micro-batch by micro-batch like the pipeline."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        for part in x.chunk(MICROBATCHES):
            (model(part).square().mean() / MICROBATCHES).backward()
        optimizer.step()

    return step


def pipeline_steps(x: torch.Tensor) -> tuple[Pipeline, Callable[[], None], Callable[[], None]]:
    """A step on two processes, under gpipe and under 1f1b."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings = Settings(microbatches=MICROBATCHES, checkpoint="never", schedule="1f1b")
    half = NUM_LAYERS // 2
    pipeline = Pipeline(model, [half, half], [torch.device("cpu")] * 2, settings, optimizers=[optimizer])
    pipeline.start()
    parts, weights = x.chunk(MICROBATCHES), [1 / MICROBATCHES] * MICROBATCHES

    def step(forward: Callable[[], torch.Tensor | None]) -> None:
        optimizer.zero_grad()
        pipeline.optimizers.zero_grad_remotes(optimizer, True)
        loss = forward()
        assert loss is not None
        loss.backward()
        optimizer.step()
        pipeline.optimizers.step_remotes(optimizer)

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        return model(part).square().mean()

    def interleaved() -> torch.Tensor | None:
        codes = [partial(loss_of, part) for part in parts]
        return pipeline.interleave(codes, weights, PassContext.capture("cpu"))

    # Called as a module, a pipeline of any schedule runs all forward passes first.
    return pipeline, partial(step, partial(loss_of, x)), partial(step, interleaved)


def keep_busy(stop: Event, go: Event, idle: Event) -> None:
    """The second process of the limit: the same steps while ``go`` is set."""
    torch.set_num_threads(1)
    step = one_process_step(torch.randn(ROWS, LENGTH, WIDTH))
    while not stop.is_set():
        if go.wait(timeout=0.1):
            idle.clear()
            step()
        else:
            idle.set()


def main(rounds: int = ROUNDS) -> None:
    torch.set_num_threads(1)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    context = multiprocessing.get_context("spawn")
    stop, go, idle = context.Event(), context.Event(), context.Event()
    busy = context.Process(target=keep_busy, args=(stop, go, idle), daemon=True)
    busy.start()
    single = one_process_step(x)
    pipeline, gpipe, one_f_one_b = pipeline_steps(x)
    steps = {
        "one process": single,
        "one process with two threads": single,
        "one process beside a busy one": single,
        "pipeline of two, gpipe": gpipe,
        "pipeline of two, 1f1b": one_f_one_b,
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    cpu_times: dict[str, list[float]] = {name: [] for name in steps}
    try:
        for round_number in range(rounds + 2):
            for name, step in steps.items():
                torch.set_num_threads(2 if name.endswith("two threads") else 1)
                if name.endswith("busy one"):
                    go.set()
                started, cpu_started = perf_counter(), process_time()
                step()
                if name.startswith("pipeline"):
                    pipeline.wait()
                seconds, cpu_seconds = perf_counter() - started, process_time() - cpu_started
                if go.is_set():
                    go.clear()
                    idle.clear()
                    idle.wait()
                if round_number >= 2:
                    times[name].append(seconds)
                    cpu_times[name].append(cpu_seconds)
    finally:
        stop.set()
        pipeline.finish()
        busy.join()
    print(f"{NUM_LAYERS} layers of width {WIDTH}, {ROWS} rows of {LENGTH}, {MICROBATCHES} micro-batches, AdamW")
    print(f"torch {torch.__version__}, {platform.machine()}, {rounds} rounds; one thread a process but where said")
    for name, seconds in times.items():
        span, cpu = f"{min(seconds):.3f} to {max(seconds):.3f}", statistics.median(cpu_times[name])
        print(f"{name:<30} median {statistics.median(seconds):.3f} s   {span}   CPU {cpu:.3f} s")
    bound = (MICROBATCHES + 1) / MICROBATCHES / 2
    limit = statistics.median(times["one process beside a busy one"]) * bound
    print(f"limit of GPipe without overhead       {limit:.3f} s   ({bound:.4f} of the line above it: the bubble)")
