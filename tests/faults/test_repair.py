"""``max_restarts``: a run that loses workers ends as one that loses none, to the last bit.

Compared are losses, weights, buffers, optimizer states, schedules, metrics, the CSV log, every call of every hook of a
callback, the counters of the loops, the checkpoints, and the random numbers that come next.
"""

import csv
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import repair_job
from harness import run
from parity import accelerator, on_cpus
from pytorch_lightning.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from pytorch_lightning.profilers import PyTorchProfiler
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from repair_job import (
    BlockNet,
    Clipper,
    Halver,
    Hasty,
    Kills,
    ManualNet,
    Meddler,
    Net,
    Scaler,
    SlowAgainNet,
    SometimesNet,
    StreamNet,
    TwoListsNet,
)
from torch import Tensor

from strategies import Rebalance, Recovery, RPCSequentialStrategy
from strategies.common.errors import WorkerLost
from strategies.pipeline.recovery.verification import ComputedWrongly
from trainer import PipelineMonitor, Trainer

EVERY_STEP: Kills = {
    0: ["forward-0"],
    3: ["backward-1"],
    6: ["step-0"],
    8: ["snapshot-1"],
    12: ["forward-0", "forward-1"],
}
EVERY_THIRD: Kills = {1: ["step-1"], 5: ["backward-0"], 13: ["forward-1"]}
BETWEEN: Kills = {
    1: ["on_train_batch_end-0"],
    2: ["on_train_batch_end-1"],
    6: ["on_validation_start-1"],
    10: ["on_validation_batch_start-0"],
    13: ["on_validation_batch_start-0", "on_train_epoch_end-1", "on_train_end-0"],
}
VALIDATION: Kills = {0: ["sanity-0", "sanity-1"], 6: ["validation-1"], 13: ["validation-0"]}
SAVING: Kills = {
    2: ["state_dict-0"],
    5: ["on_save_checkpoint-1"],
    6: ["on_save_checkpoint-0"],
    8: ["state_dict-1", "on_save_checkpoint-0"],
    13: ["on_save_checkpoint-0", "on_save_checkpoint-1"],
}
"""While the state of a stage is collected for a checkpoint, and before it is fetched or written."""
WHILE_SAVING: Kills = {5: ["on_save_checkpoint-1"]}
"""When the state of a stage has been collected, and before it is fetched or written."""
AGAIN: Kills = {5: ["forward-0", "forward-1", "backward-0"], 9: ["forward-1", "snapshot-0"]}
"""In a batch in which another worker has been lost: the second one while the first is repaired."""
TEARDOWN: Kills = {13: ["at-end-0", "at-end-1"]}
"""While weights and optimizer states return to the driver."""

Case = tuple[dict[str, Any], Sequence[tuple[Kills, int]]]
"""Arguments of a fit; and which workers are killed, with ``snapshot_every_n_steps``."""

BOTH = [(EVERY_STEP, 1), (EVERY_THIRD, 3)]
EACH_BATCH: dict[str, Any] = {"accumulate_grad_batches": 1}
MANUAL: dict[str, Any] = {"net": ManualNet, "accumulate_grad_batches": 1, "gradient_clip_val": None}

MOVING: Case = ({"callbacks": lambda: [Meddler()], **EACH_BATCH}, BOTH)
"""On CPUs only: layers do not move between GPUs."""

CASES: dict[str, Case] = {
    "gpipe": ({}, [({}, 1), *BOTH]),
    "1f1b": ({"schedule": "1f1b", "precision": "bf16-mixed"}, BOTH),
    "interleaved": ({"schedule": "interleaved"}, BOTH),
    "zbv": ({"schedule": "zbv", **EACH_BATCH}, BOTH),
    "between_steps": ({}, [(BETWEEN, 1), (BETWEEN, 4)]),
    "again": ({"schedule": "1f1b", **EACH_BATCH}, [(AGAIN, 1), (AGAIN, 4)]),
    "validation": ({}, [(VALIDATION, 1), (VALIDATION, 4)]),
    "teardown": ({"schedule": "1f1b"}, [(TEARDOWN, 1), ({13: ["at-end-1"]}, 5)]),
    "saving": (EACH_BATCH, [(SAVING, 1), (SAVING, 4)]),
    "saving_sharded": ({"options": {"state_dict_type": "sharded"}, **EACH_BATCH}, [(SAVING, 1), (SAVING, 4)]),
    "saving_in_background": ({"options": {"async_save": True}, "schedule": "1f1b", **EACH_BATCH}, [(SAVING, 1)]),
    "sharded_in_background": (
        {"options": {"state_dict_type": "sharded", "async_save": True}, **EACH_BATCH},
        [(EVERY_STEP, 1), (SAVING, 3)],
    ),
    "slow_again": (
        {"options": {"async_save": True}, "net": SlowAgainNet, **EACH_BATCH},
        [(WHILE_SAVING, 4), ({**WHILE_SAVING, 6: ["forward-0"]}, 4)],  # another one while the collection is repeated
    ),
    "slow_again_sharded": (
        {"options": {"state_dict_type": "sharded"}, "net": SlowAgainNet, **EACH_BATCH},
        [(WHILE_SAVING, 4)],
    ),
    "manual": (MANUAL, BOTH),
    "manual_between": ({**MANUAL, "profiler": "simple"}, [(BETWEEN, 1), (BETWEEN, 4)]),
    "scaler": ({"scaler": True, "gradient_clip_val": 0.1}, BOTH),
    "hang": ({"options": {"rpc_timeout_sec": 5.0}}, [({5: ["hang-1"], 9: ["forward-0"]}, 1)]),
    "plain_trainer": ({"trainer_class": pl.Trainer}, BOTH),
    "blocks": ({"net": BlockNet, "schedule": "1f1b", "options": {"module": "blocks"}}, BOTH),
    "two_lists": ({"net": TwoListsNet, "options": {"module": ["first", "second"]}}, BOTH),
    "two_lists_1f1b": ({"net": TwoListsNet, "schedule": "1f1b", "options": {"module": ["first", "second"]}}, BOTH),
    "generator": ({"net": StreamNet, **EACH_BATCH}, BOTH),
    "changes_some_batches": ({"net": SometimesNet}, [({4: ["backward-0"], 11: ["forward-1"]}, 1)]),
    "gradients_in_step": ({"callbacks": lambda: [Scaler()]}, BOTH),
    "gradients_between": ({"callbacks": lambda: [Halver()]}, [({3: ["forward-0"], 10: ["backward-1"]}, 1)]),
    "weights_between": ({"callbacks": lambda: [Clipper()], **EACH_BATCH}, BOTH),
    **({"moving_layers": MOVING} if accelerator() == "cpu" else {}),
    "averages": (
        {"callbacks": lambda: [EMAWeightAveraging(decay=0.5)], **EACH_BATCH},
        [(EVERY_STEP, 1), ({6: ["on_validation_batch_start-1"], 9: ["step-0"]}, 3)],
    ),
    "stochastic_average": (
        {"callbacks": lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)], **EACH_BATCH},
        [({4: ["backward-0"], 9: ["step-1"]}, 1)],
    ),
}
SLOW = ("gpipe", "1f1b", "between_steps", "validation", "teardown", "saving", "slow_again", "manual", "hang")
"""Those of ``make slow``: each place of a kill, and each way of optimization."""


def marked(names: Iterable[str], slow: Sequence[str]) -> list[Any]:
    """Parameters of which some are for ``make slow``, and the others for ``make nightly``."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else pytest.mark.nightly) for name in names]


def disturbed(name: str) -> Any:
    options, cases = CASES[name]
    return repair_job.disturbed(cases, **options)


VERIFIED = {
    "gpipe": ("saving", 1, {}),
    "1f1b": ("saving_in_background", 2, {}),
    "sharded": ("sharded_in_background", 1, {}),
    "manual": ("manual", 1, {}),
    **({"moving_layers": ("moving_layers", 2, {})} if accelerator() == "cpu" else {}),
    "blocks": ("blocks", 1, {}),
    "averages": ("averages", 1, {}),
    "scaler": ("scaler", 1, {}),
    "killed": ("zbv", 2, EVERY_STEP),
    "killed again": ("gpipe", 1, {2: ["step-0"], 8: ["again-1"]}),
}
"""Which case, how often a step is verified, and which workers are killed: in the last case, in a second computation."""
VERIFIED_SLOW = ("gpipe", "1f1b", "manual", "killed", "killed again")


def verified(name: str) -> Any:
    case, every_n_steps, kills = VERIFIED[name]
    return repair_job.verified(every_n_steps, kills, **CASES[case][0])


@pytest.mark.parametrize("name", marked(VERIFIED, VERIFIED_SLOW))
def test_verified_steps_change_nothing(name: str) -> None:
    assert run(verified, name) == []


def not_deterministic() -> str:
    class RandomNet(Net):
        def __init__(self) -> None:
            super().__init__()
            self.sequential_module[1] = Hasty()

    with pytest.raises(ComputedWrongly) as caught:
        repair_job.fit({}, 0, net=RandomNet, options={"recovery": Recovery(verify_every_n_steps=3)}, **EACH_BATCH)
    return str(caught.value)


def test_a_layer_that_is_not_deterministic_is_found() -> None:
    said = run(not_deterministic)
    assert "stage 0 sent stage 1 a different value for micro-batch 0 of pass " in said
    assert "such as the time" in said and "checkpoint" in said


def one_lost_worker() -> Any:
    return repair_job.disturbed([({2: ["forward-0"], 4: ["backward-0"]}, 2)], **EACH_BATCH)


def test_one_lost_worker() -> None:
    """Twice, the first time before the driver has received anything of a pass."""
    ((differing, repairs),) = run(one_lost_worker)
    assert differing == [] and len(repairs) == 2
    for lost in repairs:
        assert lost.startswith("stage 0 (layers 0 to 1: Linear, Killable), process ")
        assert "was killed by signal 9 in " in lost


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", marked(CASES, SLOW))
def test_workers_are_killed_at_any_time(name: str) -> None:
    for (differing, repairs), (kills, _) in zip(run(disturbed, name, timeout_seconds=280), CASES[name][1], strict=True):
        assert differing == []
        assert bool(repairs) == bool(kills) and len(repairs) <= sum(map(len, kills.values()))


def evaluations(schedule: str) -> Any:
    found = repair_job.evaluate(is_disturbed=True, schedule=schedule)
    return repair_job.differences(found, repair_job.evaluate(is_disturbed=False, schedule=schedule)), found["repairs"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_validate_test_and_predict(schedule: str) -> None:
    """Two workers are lost in each, which is what each of them may repair."""
    differing, numbers = run(evaluations, schedule)
    assert differing == [] and all(1 <= number <= 2 for number in numbers)


def resumed(form: str) -> Any:
    return repair_job.resumed({0: ["sanity-1"], 7: ["forward-0"], 12: ["step-1"]}, form)


def resumed_and_verified(form: str) -> Any:
    return repair_job.resumed({}, form, recovery=Recovery(verify_every_n_steps=1))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_run_that_begins_with_a_checkpoint(form: str) -> None:
    """Its stages have read their parts, and new workers cannot read them a second time."""
    differing, repairs = run(resumed, form)
    assert differing == [] and repairs


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_verified_run_that_begins_with_a_checkpoint(form: str) -> None:
    """The stages read their parts a second time before training begins, and not later."""
    assert run(resumed_and_verified, form) == ([], [])


def back_and_verified() -> list[str]:
    return repair_job.verified(1, {}, callbacks=lambda: [repair_job.GoesBack()])


def back_and_repaired() -> list[tuple[list[str], list[str]]]:
    cases: list[tuple[Kills, int]] = [({7: ["forward-0"], 9: ["step-1"]}, 100)]
    return repair_job.disturbed(cases, callbacks=lambda: [repair_job.GoesBack()])


@pytest.mark.slow
def test_a_verified_run_that_goes_back_to_a_checkpoint_and_deletes_it() -> None:
    assert run(back_and_verified) == []


@pytest.mark.slow
def test_a_repaired_run_that_goes_back_to_a_checkpoint_and_deletes_it() -> None:
    ((differing, repairs),) = run(back_and_repaired)
    assert differing == [] and len(repairs) == 2


# Where it ends


def message_of(kind: type[Exception], function: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        function()
    assert raised.type is kind  # not a subclass
    for path in Path().glob("*-forward-0"):
        path.unlink()
    return str(raised.value)


def lost_too_often() -> list[str]:
    """Errors of fits, and what a fit after them differs in."""
    fit, one = repair_job.fit, {"options": {"recovery": Recovery(1)}}
    messages = [
        message_of(WorkerLost, lambda: fit({3: ["forward-0"]}, 0)),
        message_of(WorkerLost, lambda: fit({3: ["forward-0"], 9: ["backward-1"]}, 1, **one)),
        message_of(WorkerLost, lambda: fit({3: ["always-forward-0"]}, 2, options={"recovery": Recovery(3)})),
    ]
    return [*messages, *repair_job.differences(fit({4: ["backward-0"]}, 1, **one), fit({}, 0))]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_more_losses_than_may_be_repaired_end_the_run() -> None:
    """The last one is a batch in which a worker dies each time."""
    none, second, always = run(lost_too_often, timeout_seconds=180)
    for lost in (none, always):
        assert lost.startswith("stage 0 (layers 0 to 1: Linear, Killable), process ")
    assert second.startswith("stage 1 (layers 2 to 5: Dropout, ")
    assert all("was killed by signal 9 in " in lost for lost in (none, second, always))


class Clumsy(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise ArithmeticError("the user's own")


def errors_of_the_user() -> str:
    return message_of(ArithmeticError, lambda: repair_job.fit({}, 1, net=Clumsy))


@pytest.mark.slow
def test_an_error_of_the_user_is_no_loss() -> None:
    assert run(errors_of_the_user) == "the user's own"


# What is told


def monitored() -> Any:
    found = repair_job.fit(
        {2: ["forward-0"], 9: ["step-1"], 13: ["at-end-0"]},
        1,
        callbacks=lambda: [PipelineMonitor(2, dirpath=".")],
        options={"rebalance": Rebalance(every_n_steps=4)},
        **EACH_BATCH,
    )
    rows = [row for row in csv.DictReader(StringIO(found["csv"])) if row["pipeline/step_ms"]]
    events = map(json.loads, Path("pipeline", "events.jsonl").read_text().splitlines())
    return {"rows": rows, "repairs": [event for event in events if event["event"] == "repair"]}


@on_cpus  # where layers can move
@pytest.mark.slow
def test_the_monitor_notes_each_repair() -> None:
    """That in ``teardown`` too."""
    found = run(monitored)
    first, second, third = found["repairs"]
    assert first["step"] == 2 and second["step"] in (9, 10)
    for event, stage in ((first, 0), (second, 1), (third, 0)):
        assert event["lost"].startswith(f"stage {stage} (") and "was killed by signal 9" in event["lost"]
        assert event["seconds"] >= event["restart_seconds"] >= 0 and event["num_messages"] >= 0
    for row in found["rows"]:
        for name in ("stage_0", "stage_1", "driver"):
            assert float(row[f"pipeline/{name}/forward_ms"]) > 0, row


# Settings


class Unused(PyTorchProfiler):
    def __del__(self) -> None:
        """Lightning's raises an error if the profiler has not been started."""


def test_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (-1, 1.0, True, "1", None):
        with pytest.raises(MisconfigurationException, match="max_restarts must be a whole number of at least 0, got "):
            RPCSequentialStrategy(recovery=Recovery(wrong))
    for wrong in (0, 1.0, True, "1", None):
        message = "snapshot_every_n_steps must be a whole number of at least 1, got "
        with pytest.raises(MisconfigurationException, match=message):
            RPCSequentialStrategy(recovery=Recovery(1, wrong))
    with pytest.raises(MisconfigurationException, match="snapshot_every_n_steps=2 has no effect with max_restarts=0"):
        RPCSequentialStrategy(recovery=Recovery(snapshot_every_n_steps=2))

    def fit(net: type[Net], **options: Any) -> None:
        strategy = RPCSequentialStrategy(recovery=Recovery(1))
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, **options)
        with warnings.catch_warnings(action="ignore"):
            trainer.fit(net(), [[0]])

    with pytest.raises(MisconfigurationException, match=r"recovery runs steps again, .* PyTorchProfiler"):
        fit(Net, profiler=Unused())
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("sys.platform", "darwin")
        with pytest.raises(MisconfigurationException, match=r"recovery repeats computation .* only Linux has"):
            RPCSequentialStrategy(recovery=Recovery(1))
