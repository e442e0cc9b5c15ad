"""Time of a training step on two cores: Relay, ``torch.distributed.pipelining``, torchgpipe, one process, alternating.

Every contestant has its own processes with one thread each, and works only during its turn. A step is a batch from a
loader, forward and backward passes of all micro-batches, and AdamW.

The limit for two processes is not half the time of one process, because on shared hardware each process slows down
while the other works. The benchmark therefore also times one process while a second process is busy. Half of that time,
plus the bubble of the schedule, is the time of a pipeline without overhead.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

from benchmarks.contestants import (
    PROCESSES,
    TORCH_SCHEDULES,
    Busy,
    GPipeLibrary,
    OneProcess,
    Relay,
    Shape,
    TorchPipelining,
)
from benchmarks.plots import boxes, plot
from benchmarks.processes import ContestantError, ContestantProcesses
from benchmarks.report import Effort, Section, Table, quartiles, ratios, spread
from benchmarks.timeline import Span, bubble, gantt
from strategies.pipeline.schedule.tables import v_half
from strategies.planning.simulator import simulate

ROUNDS, PAIR_ROUNDS = 3, 10
"""Rounds of all contestants, and further rounds of the contestants that are compared closely (:func:`pair_names`)."""

WARM_UP = 2
"""Number of steps in which the losses of all contestants are compared."""

LOSS_TOLERANCE = 1e-4
MICROBATCHES, TRACED = (4, 8, 16), 8
SAME_SCHEDULE = {
    "Relay, gpipe": "torch, ScheduleGPipe",
    "Relay, 1f1b": "torch, Schedule1F1B",
    "Relay, interleaved": "torch, ScheduleInterleaved1F1B",
    "Relay, zbv": "torch, ScheduleZBVZeroBubble",
}
PAIRS = ("Relay, gpipe", "Relay, 1f1b")
"""Contestants of Relay that have further rounds with the same schedule of torch."""
AUTO = ("Relay, auto", "Relay, auto, own micro-batches")
"""Contestants of Relay that have further rounds with torch's fastest schedule, and with one process next to a busy
process."""
ONLY_TRACED = ("Relay, zb-h1", "Relay, v-half", "torchgpipe, two threads", "fairscale.nn, two threads")
"""Contestants that take part with :data:`TRACED` micro-batches only, because nothing is compared with them."""

RELAY = {
    **{f"Relay, {name}": (name, False) for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "auto")},
    "Relay, auto, own micro-batches": ("auto", True),
}
LARGE_VOCABULARY = 32_000
FEW: Any = {"relay": ("Relay, gpipe", "Relay, zbv", "Relay, auto"), "torch": ("ScheduleGPipe",)}
"""The contestants of a tiny run."""
BESIDE, TWO_THREADS = "one process beside a busy one", "one process with two threads"

LIBRARIES = (
    ("torchgpipe", "GPipe", "`pip install -e '.[bench]'`"),
    (
        "fairscale.nn",
        "Pipe",
        "a descendant of torchgpipe; available as source only, so not in the extra, but takes part if installed",
    ),
)

ELSEWHERE = {
    "DeepSpeed pipeline": "not tried: available as source only; builds operators at their first use",
    "PiPPy": "has become torch.distributed.pipelining, which takes part",
}


def bubble_of(name: str, microbatches: int) -> float | None:
    """Return the idle share of the schedule on two processes if the passes of all stages take equal time."""
    m, p = microbatches, PROCESSES
    if "Zero" in name or "zbv" in name or "auto" in name:
        return 0.0
    if "zb-h1" in name:
        return (p - 1) / (3 * m + p - 1)
    if "nterleaved" in name:
        return (p - 1) / (2 * m + p - 1)
    if "v-half" in name:
        return simulate(v_half(p, m)).bubble_fraction
    if name.startswith(("Relay", "torch,")) or (name.endswith("two threads") and name != TWO_THREADS):
        return (p - 1) / (m + p - 1)
    return None


class Contest:
    """Runs the contestants alternately and collects their results."""

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        *,
        relay: Iterable[str] = tuple(RELAY),
        torch: Iterable[str] = tuple(TORCH_SCHEDULES),
        libraries: bool = True,
    ) -> None:
        self.absent: dict[str, str] = {}
        self.differ: list[str] = []
        self.found: list[str] = []
        self.go = multiprocessing.get_context("spawn").Event()
        self.contestants: dict[str, ContestantProcesses] = {"one process": ContestantProcesses(OneProcess, shape)}
        self.busy = ContestantProcesses(Busy, shape, self.go)
        for name in relay:
            self.contestants[name] = ContestantProcesses(Relay, shape, *RELAY[name])
        for schedule in torch:
            store = str(folder / f"{schedule}-{shape.vocabulary}")
            self.contestants[f"torch, {schedule}"] = ContestantProcesses(
                TorchPipelining, shape, schedule, store, count=PROCESSES
            )
        for module, name, how in LIBRARIES if libraries else ():
            if find_spec(module.split(".")[0]) is None:
                self.absent[module] = f"not installed ({how})"
            else:
                self.contestants[f"{module}, two threads"] = ContestantProcesses(GPipeLibrary, shape, module, name)

    def attempt(self, name: str, microbatches: int, action: Callable[[ContestantProcesses], Any]) -> Any:
        """Run an action of a contestant; if it fails, remove the contestant and return ``None``."""
        try:
            return action(self.contestants[name])
        except ContestantError as error:
            self.absent[name] = f"with {microbatches} micro-batches: {error}"
            del self.contestants[name]
            return None

    def rounds(self, microbatches: int, rounds: int, pair_rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each contestant's steps: rounds of all contestants, then of :func:`pair_names`."""
        taking_part = [name for name in self.contestants if microbatches == TRACED or name not in ONLY_TRACED]
        for name in taking_part:
            prepared = self.attempt(name, microbatches, lambda processes: processes.call("prepare", microbatches))
            if "auto" in name and prepared is not None:
                self.found.append(f"{name}, given {microbatches} micro-batches: {prepared[0]}")
        self.busy.call("prepare", microbatches)
        self.check_losses(microbatches, taking_part)
        self.busy.call("step")
        self.contestants["one process"].call("step", 2)
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            now = {
                name: self.attempt(name, microbatches, lambda processes: processes.timed("step"))
                for name in taking_part
                if name in self.contestants
            }
            one = self.contestants["one process"]
            now[TWO_THREADS] = one.timed("step", 2)
            now[BESIDE] = self.beside_a_busy_one(one)
            for name, seconds in now.items():
                times.setdefault(name, []).append(seconds)
        paired = [name for name in pair_names(times) if name in self.contestants]
        for number in range(pair_rounds):
            for name in paired[:: -1 if number % 2 else 1]:
                if name in self.contestants:
                    times[name].append(self.attempt(name, microbatches, lambda processes: processes.timed("step")))
            times[BESIDE].append(self.beside_a_busy_one(one))
        return {name: seconds for name, seconds in times.items() if None not in seconds}

    def check_losses(self, microbatches: int, taking_part: Iterable[str]) -> None:
        """Compare the losses of the first steps, to check that all contestants do the same work."""
        for _ in range(WARM_UP):
            losses = {
                name: self.attempt(name, microbatches, lambda processes: processes.call("step"))
                for name in taking_part
                if name in self.contestants
            }
            (expected,) = losses["one process"]
            for name, members in losses.items():
                found = [loss for loss in members or [] if loss is not None]
                if any(abs(loss - expected) > LOSS_TOLERANCE * expected for loss in found):
                    self.differ.append(f"{name} with {microbatches} micro-batches: {found} instead of {expected:.6f}")

    def beside_a_busy_one(self, one: ContestantProcesses) -> float:
        self.go.set()
        self.busy.command("keep_busy")
        sleep(0.05)
        try:
            return one.timed("step", 1)
        finally:
            self.go.clear()
            self.busy.replies()

    def traces(self, microbatches: int) -> dict[str, list[Span]]:
        """Return the spans of one step of each pipeline."""
        found: dict[str, list[Span]] = {}
        for name in [name for name in self.contestants if name.startswith(("Relay", "torch,"))]:
            members = self.attempt(name, microbatches, lambda processes: processes.call("trace"))
            if members is not None:
                found[name] = [span for spans in members for span in spans]
        return found

    def end(self) -> None:
        self.go.clear()
        for processes in [*self.contestants.values(), self.busy]:
            with suppress(ContestantError):
                processes.end()


def fastest_of_torch(times: dict[str, list[float]]) -> str | None:
    """Return the schedule of torch that was fastest in the rounds of all contestants."""
    number = len(times["one process"])
    of_torch = [name for name, seconds in times.items() if name.startswith("torch,") and None not in seconds]
    return min(of_torch, key=lambda name: median(times[name][:number]), default=None)


def pair_names(times: dict[str, list[float]]) -> list[str]:
    """Return the contestants that have further rounds, given the seconds of the first rounds."""
    same = [name for pair in PAIRS for name in (pair, SAME_SCHEDULE[pair])]
    fastest = fastest_of_torch(times)
    names = dict.fromkeys([*same, *AUTO, *([] if fastest is None else [fastest])])
    return [name for name in names if name in times]


def table_of(times: dict[str, list[float]], microbatches: int, spans: dict[str, list[Span]]) -> Table:
    """Return a table with one row per contestant."""
    one, beside = times["one process"], times[BESIDE]
    columns = ["step", "median s", "quartiles", "rounds", "of one process", "of its limit", "of torch's same"]
    columns += ["of torch's fastest"]
    fastest = fastest_of_torch(times)
    columns += ["bubble, theory", "measured"] if spans else []
    rows = []
    for name, seconds in times.items():
        idle, peer = bubble_of(name, microbatches), times.get(SAME_SCHEDULE.get(name, ""))
        limits = [] if idle is None else [time / PROCESSES / (1 - idle) for time in beside]
        with_all = seconds[: len(one)]
        row = [name, *spread(seconds), str(len(seconds)), f"{quartiles(ratios(with_all, one))[1]:.3f}"]
        row.append(_of_pair(seconds, limits) if limits else "")
        row.append(_of_pair(seconds, peer) if peer else "")
        row.append(_of_pair(seconds, times[fastest]) if fastest else "")
        if spans:
            row += ["" if idle is None else f"{idle:.1%}", f"{bubble(spans[name]):.1%}" if name in spans else ""]
        rows.append(row)
    return Table(columns, rows, f"{microbatches} micro-batches")


def _of_pair(own: list[float], peer: list[float]) -> str:
    """Return median and quartiles of the ratios in the rounds in which both contestants took part."""
    number = min(len(own), len(peer))
    return "{1:.3f} ({0:.3f} to {2:.3f})".format(*quartiles(ratios(own[:number], peer[:number])))


def spent_table(spans: dict[str, list[Span]], microbatches: int) -> Table:
    """Return the time of each kind of work in the traced step, for each process."""
    rows = []
    for name, own in spans.items():
        length = max(span.end for span in own) - min(span.start for span in own)
        for process in range(PROCESSES):
            busy = [
                sum(span.end - span.start for span in own if span.process == process and span.kind in kinds)
                for kinds in ("F", "BIW")
            ]
            cells = [*busy, length - sum(busy), length]
            rows.append([f"{name}, process {process}", *(f"{seconds * 1000:.0f}" for seconds in cells)])
    columns = ["one traced step", "forward, ms", "backward, ms", "idle, ms", "first start to last end, ms"]
    return Table(columns, rows, f"Time of each kind of work with {microbatches} micro-batches")


def draw_steps(all_times: dict[int, dict[str, list[float]]], figure: Any) -> None:
    axes = figure.subplots(1, len(all_times), sharey=True, squeeze=False)[0]
    names = dict.fromkeys(name for times in all_times.values() for name in times)
    for axis, (microbatches, times) in zip(axes, all_times.items(), strict=True):
        boxes(axis, {name: times.get(name, []) for name in names}, x="seconds a step")
        axis.set_title(f"{microbatches} micro-batches", fontsize=8)


def draw_gantt(spans: dict[str, list[Span]], figure: Any) -> None:
    axes = figure.subplots(len(spans), 1, squeeze=False)[:, 0]
    for axis, (name, own) in zip(axes, spans.items(), strict=True):
        gantt(axis, own, name)


def with_large_vocabulary(
    shape: Shape, rounds: int, pair_rounds: int, folder: Path
) -> tuple[Contest, dict[str, list[float]]]:
    """Return a contest in which the head is worth several blocks, and its times."""
    relay = ("Relay, 1f1b", "Relay, auto", "Relay, auto, own micro-batches")
    contest = Contest(replace(shape, vocabulary=LARGE_VOCABULARY), folder, relay=relay, libraries=False)
    try:
        return contest, contest.rounds(TRACED, rounds, pair_rounds)
    finally:
        contest.end()


def main(effort: Effort) -> Section:
    rounds = effort.rounds_or(ROUNDS)
    pair_rounds = 1 if effort.tiny else PAIR_ROUNDS
    shape = Shape(num_blocks=4, width=64, rows=8, length=16) if effort.tiny else Shape()
    numbers = (4,) if effort.tiny else MICROBATCHES
    section = Section(
        "A training step of a pipeline",
        f"GPT of {shape.num_blocks} blocks at width {shape.width}, {shape.rows} rows of {shape.length} tokens, AdamW, "
        f"float32; two processes with one thread each; loader and optimizer step included; {rounds} interleaved rounds "
        f"after {WARM_UP} steps of warm-up, then {pair_rounds} of `gpipe`, `1f1b` and torch's same, of `auto` and "
        "torch's fastest, and of the limit only. "
        f'Relay: `checkpoint="never"`, every stage has finished at the end of a step; all but `auto` with an even '
        "split. Ratios are medians and quartiles over the rounds that both took part in. The limit is half of the time "
        "of one process beside a busy one, plus the bubble of the schedule.",
    )
    all_times: dict[int, dict[str, list[float]]] = {}
    all_spans: dict[int, dict[str, list[Span]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(shape, Path(folder), **(FEW if effort.tiny else {}))
        try:
            for microbatches in numbers:
                all_times[microbatches] = contest.rounds(microbatches, rounds, pair_rounds)
                if microbatches == TRACED or effort.tiny:
                    all_spans[microbatches] = contest.traces(microbatches)
        finally:
            contest.end()
        if not effort.tiny:
            large, of_large = with_large_vocabulary(shape, rounds, pair_rounds, Path(folder))
            contest.differ += large.differ
    section.tables = [table_of(times, m, all_spans.get(m, {})) for m, times in all_times.items()]
    if not effort.tiny:
        table = table_of(of_large, TRACED, {})
        table.heading += f", vocabulary of {LARGE_VOCABULARY}"
        section.tables.append(table)
    section.tables += [spent_table(spans, m) for m, spans in all_spans.items()]
    section.absent = contest.absent | ELSEWHERE
    section.notes = [f"DIFFERENT LOSS, so not the same work: {found}" for found in contest.differ]
    section.notes = section.notes or [
        f"In the warm-up, all contestants had the same loss (to {LOSS_TOLERANCE:g}), so they do the same work."
    ]
    section.notes.append(
        "The bubble is measured in one step, from the start of the first action to the end of the last one; traced "
        "steps are not timed. In theory, a zero-bubble schedule has no bubble."
    )
    section.notes.append(
        "Relay's worker starts with its own settings of the allocator (`strategies/launch/allocator.py`), as for "
        "users; all other processes have the environment of this process."
    )
    section.notes += [f"{found}." for found in [*contest.found, *([] if effort.tiny else large.found)]]
    section.notes.append(
        "`auto` measures when no other contestant works. With its own number of micro-batches it ignores the given "
        "one. Its limit, and that of zero-bubble schedules, has no bubble."
    )
    size = (4 * len(all_times) + 2, 5)
    plot(section, effort, "pipeline_step.png", partial(draw_steps, all_times), size=size)
    for spans in filter(None, all_spans.values()):
        size = (9, 1.5 * len(spans))
        plot(section, effort, "pipeline_step_gantt.png", partial(draw_gantt, spans), size=size)
    return section
