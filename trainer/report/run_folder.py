"""Read the folder of a run: curves, pictures, events, checkpoints, settings."""

import csv
import json
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Curve = list[tuple[float, float]]
"""Points ``(step, value)``, in the order in which they were logged."""

_NOT_CURVES = ("epoch", "step", "hp_metric")  # hp_metric: a TensorBoardLogger writes -1
_PROCESS = r"stage \d+|driver"
_METRICS, _BOARD = "metrics.csv", "events.out.tfevents.*"


class UnusableFolder(ValueError):
    """Raised if a folder contains nothing that a report could show."""


@dataclass
class ReportedRun:
    """The content of a run's folder.

    Attributes:
        folder: The folder.
        curves: The logged values of each name, including values that are not finite.
        pictures: Timetables by step, in the order of steps.
        events: The events that ``PipelineMonitor`` recorded, in order.
        checkpoints: Names of checkpoints, and their sizes in bytes.
        settings: Texts of YAML files, by their paths in the folder.
        notes: What could not be read, one sentence each.
    """

    folder: Path
    curves: dict[str, Curve] = field(default_factory=dict)
    pictures: dict[int, Path] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[tuple[str, int]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def pipeline(self) -> dict[str, Any] | None:
        """The newest description of the pipeline: balance, layers, and, if known, schedule and micro-batches."""
        described: dict[str, Any] = {}
        for event in self.events:
            if "processes" in event:
                described |= event
        return described or None

    @property
    def processes(self) -> list[str]:
        """The names of the processes, the driver last."""
        found = {parts[1].replace("_", " ") for name in self.curves if len(parts := name.split("/")) == 3}
        if self.pipeline is not None:
            found |= {process["name"] for process in self.pipeline["processes"]}
        stages = [name for name in found if re.fullmatch(_PROCESS, name) and name != "driver"]
        return [*sorted(stages, key=lambda name: int(name.split()[1])), *(found & {"driver"})]


def read_run(folder: Path) -> ReportedRun:
    """Read a folder.

    Raises:
        UnusableFolder: If it does not exist, is a file, or has neither metrics nor the folder of a PipelineMonitor.
    """
    if not folder.exists():
        raise UnusableFolder(f"there is no folder {folder}")
    if not folder.is_dir():
        raise UnusableFolder(f"{folder} is a file; give the folder of the run, such as {folder.parent}")
    run = ReportedRun(folder)
    boards = sorted(folder.glob(_BOARD))
    if (folder / _METRICS).exists():
        _read_csv(run, folder / _METRICS)
    if boards:
        try:
            run.curves = {**_from_board(folder), **run.curves}
        except ImportError:
            run.notes.append("The event files of TensorBoard were not read: pip install tensorboard.")
    found = [(re.fullmatch(r"step-(\d+)\.svg", path.name), path) for path in folder.glob("pipeline/step-*.svg")]
    run.pictures = dict(sorted((int(match[1]), path) for match, path in found if match))
    _read_events(run)
    if not (run.curves or run.pictures or run.events):
        raise UnusableFolder(_why_nothing(folder, bool(boards)))
    _read_checkpoints(run)
    for path in sorted({*folder.glob("*.yaml"), *folder.glob("checkpoints/*.yaml")}):
        text = path.read_text(errors="replace")
        if text.strip() not in ("", "{}"):
            run.settings[str(path.relative_to(folder))] = text
    return run


def _read_csv(run: ReportedRun, path: Path) -> None:
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise UnusableFolder(f"{path} is not a CSV file: {error}") from error
    wrong = []  # rows; the last row may be partly written if the run continues
    for i, row in enumerate(rows):
        step = _number(row.get("step"))
        if step is None or not math.isfinite(step):
            wrong.append(i + 1)
            continue
        for name, text in row.items():
            if name not in _NOT_CURVES and isinstance(name, str) and (value := _number(text)) is not None:
                run.curves.setdefault(name, []).append((step, value))
    if wrong and len(wrong) == len(rows):
        raise UnusableFolder(f"{path} has no number in the column 'step' of any row; a CSVLogger writes one")
    if wrong:
        run.notes.append(f"Rows of {_METRICS} without the number of a step: {len(wrong)}, the first is row {wrong[0]}.")


def _from_board(folder: Path) -> dict[str, Curve]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 1}).Reload()
    return {
        name: [(event.step, event.value) for event in board.Scalars(name)]
        for name in board.Tags()["scalars"]
        if name not in _NOT_CURVES
    }


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None  # an empty cell, a text


def _why_nothing(folder: Path, has_board: bool) -> str:
    if has_board:
        return f"{folder} has event files of TensorBoard without scalars, or tensorboard is not installed"
    if (folder / _METRICS).exists():
        return f"{folder / _METRICS} has no values yet; a CSVLogger writes them every flush_logs_every_n_steps steps"
    near: list[Path] = []
    for name in (_METRICS, _BOARD):
        near += [*folder.glob(f"*/{name}"), *folder.glob(f"*/*/{name}"), *folder.resolve().parent.glob(name)]
    hint = ": log with a CSVLogger or a TensorBoardLogger"
    if near:
        newest = max(near, key=lambda path: path.stat().st_mtime).parent
        hint = f"; {newest} has some" + (", the newest near it" if len({path.parent for path in near}) > 1 else "")
    return f"{folder} has no metrics ({_METRICS} or {_BOARD}){hint}"


def _read_events(run: ReportedRun) -> None:
    path = run.folder / "pipeline" / "events.jsonl"
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            event = json.loads(line)
            _check_event(event)
            run.events.append(event)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            run.notes.append(f"Line {number} of pipeline/events.jsonl could not be read.")


def _check_event(event: dict[str, Any]) -> None:
    """Raise an error if a line is not what ``PipelineMonitor`` writes."""
    right = isinstance(event["event"], str) and math.isfinite(event["step"])
    time.localtime(event["time"])  # a time that can be shown
    if "processes" in event:
        layers = [layer for process in event["processes"] for layer in process["layers"]]
        right &= "balance" in event and len(event["processes"]) > 0
        right &= all(re.fullmatch(_PROCESS, process["name"]) is not None for process in event["processes"])
        right &= all(isinstance(layer["class"], str) and layer["parameters"] >= 0 for layer in layers)
        right &= all(isinstance(layer["place"], int) and "name" in layer for layer in layers)
    if not right:
        raise ValueError


def _read_checkpoints(run: ReportedRun) -> None:
    for path in sorted((run.folder / "checkpoints").glob("*")):
        if path.is_dir():
            run.checkpoints.append((path.name, sum(f.stat().st_size for f in path.rglob("*") if f.is_file())))
        elif path.suffix == ".ckpt":
            run.checkpoints.append((path.name, path.stat().st_size))
