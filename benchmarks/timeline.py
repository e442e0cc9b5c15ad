"""Timeline of one step: measured spans of each stage, their bubble, and a Gantt chart.

A stage of Relay reports its current action to ``Stage.note``. A :class:`RecordingLayer`, shipped with the stage,
replaces this method of the class when it first runs in a process, in that process only. Times come from the system's
monotonic clock, which all processes of a machine share.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from strategies.pipeline.stage.stage import Stage

WAITS = "waiting"
COLOURS = {"F": "#4c8dd6", "B": "#58a55c", "I": "#8fd18f", "W": "#e8b04a"}


@dataclass(frozen=True)
class Span:
    """A measured action: ``kind`` is F, B, or a half of a split backward pass, I (input) or W (weights)."""

    process: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


class ActionLog:
    """The actions that the stages of this process have begun, with their start times."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, str]] = []

    def install(self) -> None:
        """Make every stage of this process write to this log."""
        note, run, notes = Stage.note, Stage.run, self.notes

        def note_here(stage: Stage, what: str) -> None:
            notes.append((perf_counter(), what))
            note(stage, what)

        def run_and_note(stage: Stage, *arguments: Any, **options: Any) -> None:
            run(stage, *arguments, **options)
            notes.append((perf_counter(), ""))

        Stage.note = note_here
        Stage.run = run_and_note
        Stage.action_log = self


class RecordingLayer(nn.Module):
    """An identity layer at the start of a stage; its extra state is the action log of its process."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[float, str]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(Stage, "action_log"):
            ActionLog().install()
        return x

    def get_extra_state(self) -> list[tuple[float, str]]:
        log = getattr(Stage, "action_log", None)
        return self.notes if log is None else list(log.notes)

    def set_extra_state(self, notes: list[tuple[float, str]]) -> None:
        self.notes = notes


def spans_of(notes: Sequence[tuple[float, str]], stage: int, since: float) -> list[Span]:
    """Return the actions in the notes of a stage that began after ``since``, without waiting times."""
    spans, began, what = [], 0.0, ""
    for time, note in [*notes, (notes[-1][0] if notes else 0.0, "")]:
        name = re.match(r"(?:recomputing F|([FBW]))(\d+)", note)
        label = "" if name is None or WAITS in note else f"{name[1] or 'B'}{name[2]}"
        if label != what:
            if what and began >= since:
                spans.append(Span(stage, stage, what[0], int(what[1:]), began, time))
            began, what = time, label
    return spans


def bubble(spans: Iterable[Span]) -> float:
    """Return the idle share of all processes, from the start of the first action to the end of the last one."""
    spans = list(spans)
    busy: defaultdict[int, float] = defaultdict(float)
    for span in spans:
        busy[span.process] += span.end - span.start
    length = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - sum(busy.values()) / (length * len(busy))


def gantt(axes: Any, spans: Sequence[Span], title: str) -> None:
    """Draw a row for each process and a bar for each action."""
    origin = min(span.start for span in spans)
    for span in spans:
        start, length = (span.start - origin) * 1000, (span.end - span.start) * 1000
        shade = 1.0 if span.stage == span.process else 0.6  # a process's second stage is paler
        axes.barh(
            span.process, length, left=start, color=COLOURS[span.kind], alpha=shade, edgecolor="white", linewidth=0.4
        )
        axes.text(start + length / 2, span.process, str(span.microbatch), ha="center", va="center", fontsize=5)
    axes.set_yticks(sorted({span.process for span in spans}), labels=None)
    axes.invert_yaxis()
    axes.set_title(f"{title}: {bubble(spans):.1%} idle", fontsize=8)
    axes.set_xlabel("ms", fontsize=7)
    axes.tick_params(labelsize=6)
