"""Lightning's profilers over stages: the same training, and one trace for each stage, by the same clock."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Outcome, Small, batches, compare, fit, one_device
from pytorch_lightning import Callback
from pytorch_lightning.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from strategies import RPCSequentialStrategy

STAGES, MICROBATCHES = 2, 3


class Model(Small):
    """Its balance is to be found, for which layers are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(6, WIDTH, dtype=torch.float64)


def trained(strategy: Any, stages: int, profiler: Profiler | None) -> Outcome:
    def train() -> Any:
        return batches([6] * 6)

    return fit(Model, strategy, stages, train=train, val=train, profiler=profiler)


def pipeline(schedule: str, profiler: Profiler) -> Outcome:
    return trained(RPCSequentialStrategy(microbatches=MICROBATCHES, schedule=schedule), STAGES, profiler)


def traces(folder: str, step: str) -> dict[str, list[Any]]:
    """For each stage, what is common to its traces of a kind of step, and their events."""
    found: dict[str, list[Any]] = {}
    for path in sorted(Path(folder).glob("*.pt.trace.json")):
        kind = re.fullmatch(rf"fit-table-\[Strategy\]\w+\.{step}(\.stage-0)?\.\d+\.pt\.trace\.json", path.name)
        if kind is not None:
            trace = json.loads(path.read_text())
            events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
            found.setdefault(kind[1] or "driver", []).append((trace["baseTimeNanoseconds"], events))
    return found


def with_torchs_profiler() -> None:
    single = trained(one_device(), 1, None)
    for schedule, named in (("gpipe", True), ("1f1b", False)):
        profiler = PyTorchProfiler(dirpath=schedule, filename="table", record_module_names=named)
        outcome = pipeline(schedule, profiler)
        if schedule == "1f1b":
            outcome.losses = single.losses  # it keeps one for each micro-batch
        compare(outcome, single)
        for step in ("training_step", "validation_step"):
            found = traces(schedule, step)
            assert {stage: len(of_stage) for stage, of_stage in found.items()} == {"driver": 1, ".stage-0": 1}
            (base, driver), (worker_base, worker) = found["driver"][0], found[".stage-0"][0]
            assert base == worker_base
            for m in range(MICROBATCHES):  # each goes through the worker's layers first
                theirs, own = spans(worker, f"F{m}, layer 2"), spans(driver, f"F{m}, layer 3")
                assert 1 <= len(theirs) == len(own)
                assert all(before[1] < after[0] for before, after in zip(theirs, own, strict=True))
            assert any(event["name"] == "aten::linear" for event in worker)
            labels = [event["name"] for event in driver if event["name"].startswith("[pl][module]")]
            assert any("Linear: sequential_module.3" in label for label in labels) == named
            assert not any("sequential_module.0" in label for label in labels)
        assert "aten::" in (Path(schedule) / "fit-table.txt").read_text()


def spans(events: list[Any], name: str) -> list[tuple[float, float]]:
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name and e["cat"] == "user_annotation")


def test_torchs_profiler_traces_every_stage() -> None:
    run(with_torchs_profiler)


def with_the_others() -> None:
    single = trained(one_device(), 1, None)
    for profiler in (
        SimpleProfiler(dirpath=".", filename="simple"),
        AdvancedProfiler(dirpath=".", filename="advanced"),
    ):
        compare(pipeline("gpipe", profiler), single)
        (report,) = Path(".").glob(f"fit-{profiler.filename}*")
        assert "training_step" in report.read_text()


@pytest.mark.slow
def test_the_other_profilers() -> None:
    run(with_the_others)


class Killing(Callback):
    """Ends a worker when only its trace is still to be fetched."""

    def on_train_end(self, trainer: Any, model: Any) -> None:
        trainer.strategy.pipeline.remotes[0].process.kill()


def with_a_worker_that_is_killed() -> str:
    try:
        fit(
            Model,
            RPCSequentialStrategy(microbatches=2),
            3,
            train=lambda: batches([6] * 6),
            callbacks=[Killing()],
            profiler=PyTorchProfiler(dirpath=".", filename="table", schedule=None),
        )
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_no_worker_is_left_if_a_trace_cannot_be_fetched() -> None:
    assert "stage 0 " in run(with_a_worker_that_is_killed)
