"""When each stage did what in one step: measured spans, the bubble in them, and a Gantt chart.

A stage of ours tells what it does in ``Activity.doing``, wherever it runs. A layer that is shipped with it listens
there: the first time it is called in a process it replaces that property of the class, in this process only. Times are
those of the system's monotonic clock, which all processes of a machine share.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from strategies.common.activity import Activity
from strategies.pipeline.stage.stage import Stage

WAITS = "waiting"
COLOURS = {"F": "#4c8dd6", "B": "#58a55c", "I": "#8fd18f", "W": "#e8b04a"}


@dataclass(frozen=True)
class Span:
    """One action as it went: ``kind`` F, B, or the halves I (input) and W (weights) of a split backward pass."""

    process: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


class Diary:
    """What the stages of this process began to do, and when; kept on the class that it listens to."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, str]] = []

    def listen(self) -> None:
        """Has every stage of this process write into this diary."""
        plain, run, notes = Activity.doing, Stage.run, self.notes

        def set_doing(activity: Activity, what: str) -> None:
            notes.append((perf_counter(), what))
            assert plain.fset is not None
            plain.fset(activity, what)

        def run_and_note(stage: Stage, *arguments: Any) -> None:
            run(stage, *arguments)
            notes.append((perf_counter(), ""))

        Activity.doing = property(plain.fget, set_doing)
        Stage.run = run_and_note
        Stage.diary = self


class Listens(nn.Module):
    """The first layer of a stage, which changes nothing; its extra state is the diary of its process."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[float, str]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(Stage, "diary"):
            Diary().listen()
        return x

    def get_extra_state(self) -> list[tuple[float, str]]:
        diary = getattr(Stage, "diary", None)
        return self.notes if diary is None else list(diary.notes)

    def set_extra_state(self, notes: list[tuple[float, str]]) -> None:
        self.notes = notes


def spans_of(notes: Sequence[tuple[float, str]], stage: int, since: float) -> list[Span]:
    """The actions that a stage's notes tell of, without its waiting, from a moment on."""
    spans, began, what = [], 0.0, ""
    for time, note in [*notes, (notes[-1][0] if notes else 0.0, "")]:
        name = re.match(r"(?:recomputing F|([FB]))(\d+)", note)
        label = "" if name is None or WAITS in note else f"{name[1] or 'B'}{name[2]}"
        if label != what:
            if what and began >= since:
                spans.append(Span(stage, stage, what[0], int(what[1:]), began, time))
            began, what = time, label
    return spans


def bubble(spans: Iterable[Span]) -> float:
    """The idle share of all processes' time, from the first action's start to the last one's end."""
    spans = list(spans)
    busy: defaultdict[int, float] = defaultdict(float)
    for span in spans:
        busy[span.process] += span.end - span.start
    length = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - sum(busy.values()) / (length * len(busy))


def gantt(axes: Any, spans: Sequence[Span], title: str) -> None:
    """Draws a row for each process, a bar for each action."""
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
