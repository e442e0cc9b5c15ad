"""``snapshot_every_n_steps``: a fit that loses workers ends as one that loses none, to the last bit.

Compared are losses, weights, buffers, optimizer states, schedules, metrics, the CSV log, every call of every hook of a
callback, the counters of the loops, the checkpoints, and the random numbers that come next.
"""

import csv
import itertools
import json
import time
import warnings
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import recovery_job
import torch
from harness import run
from pytorch_lightning.callbacks import Callback, EMAWeightAveraging
from pytorch_lightning.profilers import PyTorchProfiler
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from recovery_job import BlockNet, Clipper, Halver, Killable, Kills, ManualNet, Meddler, Net, SometimesNet
from torch import Tensor

from strategies import RPCSequentialStrategy
from strategies.common.errors import WorkerLost
from trainer import PipelineMonitor, Trainer

EVERY_STEP: Kills = {
    0: ["forward-0"],
    3: ["backward-1"],
    6: ["step-0"],
    8: ["snapshot-1"],
    12: ["forward-0", "forward-1"],
}
EVERY_THIRD: Kills = {1: ["step-1"], 5: ["backward-0"], 13: ["forward-1"]}
BEFORE_MEDDLING: Kills = {0: ["step-1"], 5: ["backward-0"], 13: ["forward-1"]}
"""Batch 1 is the last one before the first change by a callback: a loss that is noticed after it is not repaired."""
BETWEEN: Kills = {
    1: ["on_train_batch_end-0"],
    2: ["on_train_batch_end-1"],
    6: ["on_validation_start-1"],
    10: ["on_validation_batch_start-0"],
    13: ["on_validation_batch_start-0", "on_train_epoch_end-1", "on_train_end-0"],
}
SAVING: Kills = {
    2: ["state_dict-0"],
    5: ["on_save_checkpoint-1"],
    6: ["on_save_checkpoint-0"],
    8: ["state_dict-1", "on_save_checkpoint-0"],
    13: ["on_save_checkpoint-0", "on_save_checkpoint-1"],
}
"""While the state of a stage is collected for a checkpoint, and before it is fetched or written."""
AFTER_FIRST: Kills = {2: ["step-1"], 6: ["step-0"], 8: ["backward-1"], 11: ["step-0", "step-1"]}
"""Losses that are noticed late, but for the waiting for each step that a change between steps brings about."""
SPARED: Kills = {2: ["forward-0"], 5: ["backward-1"], 11: ["forward-0", "forward-1"]}
"""While no checkpoint is being written in the background."""

Case = tuple[dict[str, Any], Sequence[tuple[Kills, int]]]

BOTH = [(EVERY_STEP, 1), (EVERY_THIRD, 3)]
CASES: dict[str, Case] = {
    "gpipe": ({}, [({}, 1), *BOTH]),
    "between_steps": ({}, [(BETWEEN, 1), (BETWEEN, 4)]),
    "1f1b": ({"schedule": "1f1b", "precision": "bf16-mixed"}, BOTH),
    "zbv": ({"schedule": "zbv", "accumulate_grad_batches": 1}, BOTH),
    "scaler": ({"scaler": True, "gradient_clip_val": 0.1}, BOTH),
    "hang": ({"options": {"rpc_timeout_sec": 5.0}}, [({5: ["hang-1"], 9: ["forward-0"]}, 1)]),
    "manual": ({"net": ManualNet, "accumulate_grad_batches": 1, "gradient_clip_val": None}, BOTH),
    "manual_between": (
        {"net": ManualNet, "accumulate_grad_batches": 1, "gradient_clip_val": None, "profiler": "simple"},
        [(BETWEEN, 1), (BETWEEN, 4)],
    ),
    "plain_trainer": ({"trainer_class": pl.Trainer}, BOTH),
    "blocks": ({"net": BlockNet, "schedule": "1f1b", "options": {"module": "blocks"}}, BOTH),
    "sharded": (
        {"options": {"state_dict_type": "sharded", "async_save": True}, "accumulate_grad_batches": 1},
        [(SPARED, 1), (SPARED, 3)],
    ),
    "sanity": ({}, [({0: ["sanity-0", "sanity-1"]}, 1), ({0: ["sanity-1", "snapshot-0", "forward-1"]}, 4)]),
    "saving": ({"accumulate_grad_batches": 1}, [(SAVING, 1), (SAVING, 4)]),
    "saving_sharded": (
        {"options": {"state_dict_type": "sharded"}, "accumulate_grad_batches": 1},
        [(SAVING, 1), (SAVING, 4)],
    ),
    "saving_in_background": (
        {"options": {"async_save": True}, "schedule": "1f1b", "accumulate_grad_batches": 1},
        [(SAVING, 1)],
    ),
    "meddler": ({"callbacks": lambda: [Meddler()], "accumulate_grad_batches": 1}, [BOTH[0], (BEFORE_MEDDLING, 3)]),
    "clipper": (
        {"callbacks": lambda: [Clipper()], "accumulate_grad_batches": 1},
        [(AFTER_FIRST, 1), (AFTER_FIRST, 3)],
    ),
    "gradients_between": ({"callbacks": lambda: [Halver()]}, [({3: ["forward-0"], 10: ["backward-1"]}, 1)]),
    "changes_some_batches": ({"net": SometimesNet}, [({4: ["backward-0"], 11: ["forward-1"]}, 1)]),
    "averages": (
        {"callbacks": lambda: [EMAWeightAveraging(decay=0.5)], "accumulate_grad_batches": 1},
        [({0: ["forward-0"], 3: ["backward-1"], 4: ["step-0"], 12: ["forward-0", "forward-1"]}, 1)],
    ),
}

SOME = ("between_steps", "1f1b", "hang", "manual", "sharded", "sanity", "saving", "saving_sharded", "meddler")
"""Those of ``make slow``: kills within and between steps, a hang, both ways of optimization, checkpoints in parts."""


def disturbed(name: str) -> Any:
    options, cases = CASES[name]
    return recovery_job.disturbed(cases, **options)


def check(name: str) -> None:
    for (differing, recovered, restarts), (kills, _) in zip(
        run(disturbed, name, timeout_seconds=280), CASES[name][1], strict=True
    ):
        assert differing == []
        assert bool(recovered) == bool(kills) and restarts == []


def one_lost_worker() -> Any:
    return recovery_job.disturbed([({4: ["backward-0"]}, 2)], accumulate_grad_batches=1)


def test_one_lost_worker() -> None:
    ((differing, (recovered,), restarts),) = run(one_lost_worker)
    assert differing == [] and restarts == []
    assert recovered.startswith("stage 0 (layers 0 to 1: Linear, Killable), process ")
    assert "was killed by signal 9 in " in recovered and "\nTraining goes on from a snapshot (0 steps" in recovered


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SOME else pytest.mark.nightly) for name in CASES]
)
def test_workers_are_killed_at_any_time(name: str) -> None:
    check(name)


# Where it ends


class Streaming(Net):
    """Has an iterator, of which nobody can tell how far it is."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = itertools.count()


class Clocked(Net):
    """Has another loss each time."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1e-3 * time.perf_counter()


class Deadly(Net):
    """Has a batch in which the first worker always dies."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            Path("kill-forward-0").touch()
        return super().training_step(batch, batch_idx)


class SilentlyClocked(ManualNet, Clocked):
    """Has another loss each time, and returns none."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class Refusing(Killable):
    """Cannot be unpickled any more from some time on."""

    def __setstate__(self, state: Any) -> None:
        if Path("refuse").exists():
            raise ValueError("this layer is not unpickled")
        super().__setstate__(state)


class RefusingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[1] = Refusing()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            Path("refuse").touch()


class MutatingValidation(Net):
    """Changes its batches in place in validation."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        batch[0].add_(1)
        super().validation_step(batch, batch_idx)


class ScalingUncounted(Callback):
    def on_after_backward(self, trainer: Any, model: Any) -> None:
        model.scale.grad.data.mul_(2)


class Scaling(Callback):
    def on_after_backward(self, trainer: Any, model: Any) -> None:
        model.scale.grad.mul_(2)


def message_of(kind: type[Exception], function: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        function()
    assert raised.type is kind  # not a subclass that nobody knows
    Path("kill-forward-0").unlink(missing_ok=True)
    return str(raised.value)


def messages() -> list[str]:
    fit = recovery_job.fit
    return [
        message_of(WorkerLost, lambda: fit({3: ["forward-0"]}, 1, net=Streaming)),
        message_of(WorkerLost, lambda: fit({3: ["forward-0"]}, 4, net=Clocked)),
        message_of(WorkerLost, lambda: fit({}, 1, net=Deadly)),
        message_of(MisconfigurationException, lambda: fit({}, 1, callbacks=lambda: [Scaling()])),
    ]


def more_messages() -> list[str]:
    fit = recovery_job.fit
    manual: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    clipper: dict[str, Any] = {"callbacks": lambda: [Clipper()], "accumulate_grad_batches": 1}
    return [
        message_of(MisconfigurationException, lambda: fit({}, 1, callbacks=lambda: [ScalingUncounted()])),
        message_of(WorkerLost, lambda: fit({3: ["forward-0"]}, 9, net=SilentlyClocked, **manual)),
        message_of(WorkerLost, lambda: fit({4: ["on_train_batch_end-1"]}, 1, **clipper)),
        message_of(WorkerLost, lambda: fit({6: ["on_validation_batch_start-0"]}, 1, net=MutatingValidation)),
        message_of(WorkerLost, lambda: fit({3: ["forward-0"]}, 1, net=RefusingNet)),
    ]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_cannot_be_run_again_ends_the_run() -> None:
    streaming, clocked, deadly, scaling = run(messages, timeout_seconds=180)
    assert streaming.startswith("stage 0 (layers 0 to 1: Linear, Killable), process ")
    assert (
        "the following has changed since then, or may have, and cannot be restored: self.stream. Keep such values in"
        in streaming
    )
    assert "Batch 0 of epoch 0 was run again from the last snapshot, and gave the loss " in clocked
    assert deadly.endswith("\nBatch 2 of epoch 0 has lost workers 3 times.")
    assert scaling.startswith("Scaling.on_after_backward changes gradients or weights, but snapshot_every_n_steps=1: ")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_would_give_other_weights_ends_the_run() -> None:
    scaling, clocked, clipped, validated, refused = run(more_messages, timeout_seconds=180)
    assert scaling.startswith("ScalingUncounted.on_after_backward changes gradients or weights, but snap")
    assert clocked.startswith("stage 0 ") and "was run again from the last snapshot, and gave the loss " in clocked
    assert (
        clipped.startswith("stage 1 ")
        and "the weights (changed outside training_step, before Batch 5 of epoch 0)" in clipped
    )
    assert validated.startswith("stage 0 ") and validated.endswith("its batch in place, so it cannot run again.")
    assert refused.startswith("stage 0 ") and "could take over: ValueError: this layer is not unpickled" in refused


def with_restarts() -> Any:
    """A loss that cannot be repaired falls back to the last checkpoint, and later ones are repaired again."""
    kills: Kills = {3: ["forward-0"], 9: ["forward-1"]}
    options: dict[str, Any] = {"net": Streaming, "accumulate_grad_batches": 1}
    found = recovery_job.fit(kills, 1, options={"max_restarts": 2}, **options)
    expected = recovery_job.fit({}, 0, **options)
    averaged = {"callbacks": lambda: [EMAWeightAveraging(decay=0.5)], "accumulate_grad_batches": 1}
    both: Kills = {4: ["forward-0"], 6: ["on_validation_batch_start-1"], 12: ["backward-0"]}
    mixed = recovery_job.fit(both, 1, options={"max_restarts": 1}, **averaged)
    return [
        (each["restarts"], len(each["recovered"]), recovery_job.differences(each["weights"], whole["weights"]))
        for each, whole in ((found, expected), (mixed, recovery_job.fit({}, 0, **averaged)))
    ]


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_max_restarts_is_for_what_cannot_be_repaired() -> None:
    (restarts, recovered, differing), (mixed_restarts, mixed_recovered, mixed_differing) = run(
        with_restarts, timeout_seconds=240
    )
    assert len(restarts) == 2 and "cannot be restored: self.stream" in restarts[0] and recovered == 0
    assert differing == []
    assert (
        len(mixed_restarts) == 1 and "The weights have been changed since the last training step" in mixed_restarts[0]
    )
    assert mixed_recovered == 2 and mixed_differing == []


def monitored() -> Any:
    found = recovery_job.fit(
        {2: ["forward-0"], 9: ["step-1"]},
        1,
        accumulate_grad_batches=1,
        callbacks=lambda: [PipelineMonitor(2, dirpath=".")],
        options={"rebalance": "auto", "rebalance_every_n_steps": 4},
    )
    rows = [row for row in csv.DictReader(StringIO(found["csv"])) if row["pipeline/step_ms"]]
    events = map(json.loads, Path("pipeline", "events.jsonl").read_text().splitlines())
    return {
        "restarts": found["restarts"],
        "rows": rows,
        "pictures": len(list(Path("pipeline").glob("step-*.svg"))),
        "recoveries": [event for event in events if event["event"] == "recovery"],
    }


@pytest.mark.slow
def test_recorded_steps() -> None:
    """Nothing is reported of a recording that a lost worker has not handed over; others go on."""
    found = run(monitored)
    assert found["restarts"] == []
    first, second = found["recoveries"]
    assert "was killed by signal 9" in first["lost"] and first["step"] == 2 and second["step"] in (9, 10)
    assert first["lost"].startswith("stage 0 (") and second["lost"].startswith("stage 1 (")
    assert first["seconds"] > 0 and first["repeated"] == 0 and second["repeated"] in (0, 1)
    assert 4 <= found["pictures"] == len(found["rows"]) < 7
    for row in found["rows"]:
        for name in ("stage_0", "stage_1", "driver"):
            assert float(row[f"pipeline/{name}/forward_ms"]) > 0, row


def never_repaired() -> list[str]:
    class Large(Net):
        """Has a tensor of more than 64 MiB that changes in every step."""

        def __init__(self) -> None:
            super().__init__()
            self.large = torch.zeros(17 << 20)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.large[0] += 1
            return super().training_step(batch, batch_idx)

    return recovery_job.fit({}, 1, net=Large)["warnings"]


@pytest.mark.slow
def test_what_no_loss_can_be_repaired_with_is_told_at_the_start() -> None:
    said = [line for line in run(never_repaired) if "training will end as it does without snapshots" in line]
    assert (
        len(said) == 1
        and "something that cannot be restored: self.large. Keep such values in tensors of at most" in said[0]
    )


def taken_as_unchanged() -> list[str]:
    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.view = memoryview(b"abc")

    return recovery_job.fit({}, 1, net=Holding)["warnings"]


@pytest.mark.slow
def test_what_is_taken_as_unchanged_is_told() -> None:
    said = [line for line in run(taken_as_unchanged) if "assumed not to change" in line]
    assert len(said) == 1 and said[0].endswith("these attributes: self.view is or holds a builtins.memoryview.")


class Unused(PyTorchProfiler):
    def __del__(self) -> None:
        """Lightning's raises an error if the profiler has not been started."""


class IteratorNet(Net):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        raise AssertionError


def test_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (-1, 1.0, True, "1", None):
        message = "snapshot_every_n_steps must be a whole number of at least 0, got "
        with pytest.raises(MisconfigurationException, match=message):
            RPCSequentialStrategy(snapshot_every_n_steps=wrong)

    def fit(net: type[Net], **options: Any) -> None:
        strategy = RPCSequentialStrategy(snapshot_every_n_steps=1)
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, **options)
        with warnings.catch_warnings(action="ignore"):
            trainer.fit(net(), [[0]])

    with pytest.raises(MisconfigurationException, match=r"training_step\(dataloader_iter\) of IteratorNet fetches"):
        fit(IteratorNet)
    with pytest.raises(
        MisconfigurationException, match=r"snapshot_every_n_steps=1 replaces workers .* PyTorchProfiler"
    ):
        fit(Net, profiler=Unused())
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(MisconfigurationException, match=r"snapshot_every_n_steps=1: .* only Linux has"):
        RPCSequentialStrategy(snapshot_every_n_steps=1)
