"""The simulator of faults draws every kind of fault, the same for a seed, and its oracle sees whatever is wrong."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.faults.simulator.campaign import Verdict, outstanding
from tests.faults.simulator.cases import (
    ANY_MOMENT,
    DRIVER,
    KINDS,
    LAUNCHERS,
    LINK_DOWN,
    LINK_SLOW,
    NUM_BATCHES,
    OF_LAUNCHED,
    OPTIONS,
    PHASES,
    RANKS,
    RECOVERY,
    SERVER,
    TWO_HOSTS,
    WORKER,
    Case,
    Fault,
    Kind,
    Shape,
    draw,
    first_seed,
)
from tests.faults.simulator.oracle import GOES_ON, Error, Outcome, Results, endings, judge
from tests.faults.simulator.report import markdown

DRAWN = [draw(seed) for seed in range(1500)]
SINGLE = [case for case in DRAWN if case.shape.strategy == "pipeline" and case.shape.replicas == 1]


def test_a_seed_is_a_case() -> None:
    assert [draw(seed) for seed in range(50)] == DRAWN[:50]
    assert len({str(case) for case in DRAWN}) > 1450


def test_everything_in_the_tables_is_drawn() -> None:
    launched = [case for case in DRAWN if case.shape.launcher]
    assert {case.shape.launcher for case in launched} == {*LAUNCHERS} - {""}
    of_launched = [fault for case in launched for fault in case.faults]
    assert {fault.kind for fault in of_launched} == set(OF_LAUNCHED)
    faults = [fault for case in DRAWN for fault in case.faults if not case.shape.launcher]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.phase for fault in faults} == {*PHASES, ANY_MOMENT, RECOVERY, "after"}
    for kind, known in KINDS.items():
        assert {fault.role for fault in faults if fault.kind == kind} == set(known.roles), kind
    shapes = [case.shape for case in DRAWN]
    assert {shape.strategy for shape in shapes} == {"pipeline", *RANKS}
    for name, values in OPTIONS.items():
        drawn = {shape.option(name) for shape in shapes if shape.strategy == "pipeline" and shape.replicas == 1}
        assert drawn - {None} == set(values), name  # some have no effect without another one
    workers = {(case.shape.stages, fault.stage) for case in DRAWN for fault in case.faults if fault.role == WORKER}
    assert workers == {(2, 0), (3, 0), (3, 1)}
    assert {len(case.faults) for case in DRAWN} == {1, 2}


def test_a_new_option_or_kind_leaves_other_draws_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "spare", (0, 1))
    drawn = [draw(case.seed) for case in SINGLE[:300]]
    without = [
        replace(case, shape=replace(case.shape, options=tuple(o for o in case.shape.options if o[0] != "spare")))
        for case in drawn
    ]
    assert without == SINGLE[:300] and {case.shape.option("spare") for case in drawn} == {0, 1}
    monkeypatch.delitem(OPTIONS, "spare")
    monkeypatch.setitem(OPTIONS, "microbatches", (*OPTIONS["microbatches"], 4))
    more = [draw(case.seed) for case in SINGLE[:300]]
    assert all(new == old for new, old in zip(more, SINGLE, strict=False) if new.shape.option("microbatches") != 4)
    monkeypatch.undo()
    monkeypatch.setitem(KINDS, "flood", Kind((DRIVER,), ("forward",), 5))
    others = [draw(case.seed) for case in DRAWN[:300]]
    changed = [new for new, old in zip(others, DRAWN, strict=False) if new != old]
    assert changed and all(case.faults[0].kind == "flood" for case in changed)


def test_what_a_resumed_campaign_runs_again() -> None:
    right, wrong, other = (
        Verdict(seed, str(draw(case)), ["kill"], True, "went on", complaints)
        for seed, case, complaints in ((0, 0, []), (1, 1, ["it took 90.0 s to end"]), (2, 3, list[str]()))
    )
    verdicts = {verdict.seed: verdict for verdict in (right, wrong, other)}
    assert [case.seed for case in outstanding(range(5), verdicts)] == [1, 2, 3, 4]


def test_the_first_seed_of_a_kind() -> None:
    for kind, role in (("kill", SERVER), ("hang", WORKER)):
        case = draw(first_seed(kind, role))
        assert [(fault.kind, fault.role) for fault in case.faults] == [(kind, role)] and case.shape.replicas == 1


SHAPE = Shape("pipeline", 3, 1, "32-true", 1, (("max_restarts", 0),))
REPAIRS = replace(SHAPE, options=(("max_restarts", 1),))
KILLED = Fault("kill", "forward", WORKER, 0, 1, batch=2, skip=0)
LOST = "stage 1 (layers 3 to 5), process 7 on here, was killed by signal 9 in F1"


def results(error: Error | None = None, num_batches: int = NUM_BATCHES, weight: float = 1.0) -> Results:
    tensors = {"a.weight": torch.full((2,), weight), "a.bias": torch.zeros(1)} if error is None else {}
    losses = [(k, k / 2) for k in range(num_batches)]
    return Results(error, 0.0, 12.0, losses, tensors, {} if error else {"loss": 2.0}, hooks(num_batches, error is None))


def hooks(num_batches: int, is_whole: bool) -> list[str]:
    batches = [f"on_train_batch_{name} {k}" for k in range(num_batches) for name in ("start", "end")]
    return ["setup -1", *batches, *(["on_train_end 7"] if is_whole else [])]


def saved(*steps: int) -> dict[str, Any]:
    return {f"step={step}.ckpt": {"state_dict.a.weight": torch.full((2,), float(step))} for step in steps}


REFERENCE = Outcome(results(), checkpoints=saved(2, 4, 6, 8))


def ended(error: Error) -> Outcome:
    """A run that an error ended in batch 3, and one that continued from step 2."""
    return Outcome(
        results(error, 3),
        checkpoints=saved(2),
        struck={0: 10.0},
        afterwards=results(),
        checkpoints_afterwards=saved(4, 6, 8),
    )


def went_on() -> Outcome:
    return Outcome(results(), checkpoints=saved(2, 4, 6, 8), struck={0: 10.0})


def test_what_is_right() -> None:
    assert not judge(Case(0, SHAPE, (KILLED,)), ended(Error("WorkerLost", LOST)), REFERENCE)
    assert not judge(Case(0, REPAIRS, (KILLED,)), went_on(), REFERENCE)
    assert not judge(Case(0, SHAPE, (replace(KILLED, role=SERVER),)), went_on(), REFERENCE)
    killed_driver = Case(0, SHAPE, (replace(KILLED, role=DRIVER, stage=2),))
    outcome = replace(ended(Error("", "")), results=None, status=-9, leftovers=[".relay-0.part"])
    assert killed_driver.ends_driver and not judge(killed_driver, outcome, REFERENCE)


def spoil(change: Callable[[Any], None], outcome: Outcome) -> Outcome:
    spoiled = deepcopy(outcome)
    change(spoiled)
    return spoiled


def set_tensor(checkpoints: Any, step: int) -> None:
    checkpoints[f"step={step}.ckpt"]["state_dict.a.weight"][0] += 1e-6


WRONG: dict[str, tuple[Shape, Outcome, Callable[[Any], Any], str]] = {
    "went on": (SHAPE, went_on(), lambda o: None, "the run went on"),
    "ended": (REPAIRS, ended(Error("WorkerLost", LOST)), lambda o: None, "raised WorkerLost: stage 1"),
    "type": (SHAPE, ended(Error("RuntimeError", LOST)), lambda o: None, "raised RuntimeError: stage 1"),
    "stage": (SHAPE, ended(Error("WorkerLost", LOST.replace("1", "0"))), lambda o: None, "raised WorkerLost: stage 0"),
    "slow": (SHAPE, ended(Error("WorkerLost", LOST)), lambda o: o.struck.update({0: -30.0}), "it took 42.0 s to end"),
    "loss": (
        REPAIRS,
        went_on(),
        lambda o: o.results.losses.__setitem__(3, (3, 1.5000001)),
        "the loss of batch 3 is 1.5000001",
    ),
    "short": (REPAIRS, went_on(), lambda o: o.results.losses.pop(7), "the last batch was 6"),
    "called twice": (
        REPAIRS,
        went_on(),
        lambda o: o.results.hooks.insert(4, "on_train_batch_start 2"),
        "the hook on_train_batch_start 2 was called instead of on_train_batch_end 1",
    ),
    "not called": (
        REPAIRS,
        went_on(),
        lambda o: o.results.hooks.remove("on_train_batch_end 4"),
        "the hook on_train_batch_start 5 was called instead of on_train_batch_end 4",
    ),
    "not called at the end": (
        REPAIRS,
        went_on(),
        lambda o: o.results.hooks.pop(),
        "the hook on_train_end 7 was not called",
    ),
    "called twice by the rerun": (
        SHAPE,
        ended(Error("WorkerLost", LOST)),
        lambda o: o.afterwards.hooks.insert(3, "on_train_batch_start 1"),
        "afterwards, the hook on_train_batch_start 1 was called instead",
    ),
    "weight": (
        REPAIRS,
        went_on(),
        lambda o: o.results.tensors["a.weight"].mul_(2),
        "at the end, 1 of 2 tensors are not",
    ),
    "name": (REPAIRS, went_on(), lambda o: o.results.tensors.pop("a.bias"), "at the end, the names are not the same"),
    "metric": (REPAIRS, went_on(), lambda o: o.results.metrics.update(loss=3.0), "the metrics are {'loss': 3.0}"),
    "lost": (REPAIRS, went_on(), lambda o: o.checkpoints.pop("step=6.ckpt"), "there is no checkpoint step=6"),
    "other": (REPAIRS, went_on(), lambda o: o.checkpoints.update(saved(5)), "there is a checkpoint step=5"),
    "bits": (
        REPAIRS,
        went_on(),
        lambda o: set_tensor(o.checkpoints, 8),
        "in the checkpoint step=8.ckpt, 1 of 1 tensors",
    ),
    "torn": (
        SHAPE,
        ended(Error("WorkerLost", LOST)),
        lambda o: o.checkpoints.update({"step=4.ckpt": "EOFError: "}),
        "the checkpoint step=4.ckpt cannot be read: EOFError",
    ),
    "leftover": (
        REPAIRS,
        went_on(),
        lambda o: o.leftovers.append(".relay-1.part"),
        "left in the folder of checkpoints",
    ),
    "no rerun": (
        SHAPE,
        ended(Error("WorkerLost", LOST)),
        lambda o: setattr(o, "afterwards", None),
        "no run afterwards",
    ),
    "rerun": (
        SHAPE,
        ended(Error("WorkerLost", LOST)),
        lambda o: setattr(o, "afterwards", results(Error("KeyError", "k"))),
        "afterwards raised KeyError: k",
    ),
    "other rerun": (
        SHAPE,
        ended(Error("WorkerLost", LOST)),
        lambda o: setattr(o, "afterwards", results(weight=2.0)),
        "afterwards, at the end, 1 of 2 tensors are not equal",
    ),
    "saved by the rerun": (
        SHAPE,
        ended(Error("WorkerLost", LOST)),
        lambda o: set_tensor(o.checkpoints_afterwards, 4),
        "afterwards, in the checkpoint step=4.ckpt",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong(name: str) -> None:
    shape, outcome, change, message = WRONG[name]
    if outcome.results is not None and outcome.results.error is None and name != "went on":
        assert not judge(Case(0, shape, (KILLED,)), outcome, REFERENCE)
    found = judge(Case(0, shape, (KILLED,)), spoil(change, outcome), REFERENCE)
    assert any(message in complaint for complaint in found), found


def nan(precision: str, is_nan: list[bool], weight: float) -> list[str]:
    shape, fault = replace(SHAPE, precision=precision), replace(KILLED, kind="nan")
    outcome = Outcome(results(weight=weight), checkpoints=saved(2, 4, 6, 8), struck={0: 10.0})
    assert outcome.results is not None
    losses = [(k, torch.nan if is_nan[k] else 1.0) for k in range(NUM_BATCHES)]
    outcome.results = replace(outcome.results, losses=losses)
    return judge(Case(0, shape, (fault,)), outcome, REFERENCE)


def test_a_value_that_is_not_a_number() -> None:
    once, from_then_on = [k == 3 for k in range(NUM_BATCHES)], [k >= 3 for k in range(NUM_BATCHES)]
    assert not nan("32-true", from_then_on, torch.nan) and not nan("16-mixed", once, 1.0)
    assert "0 of 1 weights are NaN" in nan("32-true", from_then_on, 1.0)[0]
    assert "1 weights are NaN" in nan("16-mixed", once, torch.nan)[0]
    assert "the losses of batches [3] are NaN" in nan("32-true", once, torch.nan)[0]


def test_a_value_that_is_not_a_number_in_a_verified_step() -> None:
    fault = replace(KILLED, kind="nan")
    for every_n_steps, may_go_on in ((0, True), (1, False), (2, True)):
        shape = replace(SHAPE, options=(("verify_every_n_steps", every_n_steps),))
        allowed = endings(Case(0, shape, (fault,)))
        assert (GOES_ON in allowed) == may_go_on
        assert any(ending.kinds == ("ComputedWrongly",) for ending in allowed) == bool(every_n_steps)


@pytest.mark.parametrize("option, takes", [("max_restarts", True), ("verify_every_n_steps", True), ("chunks", False)])
def test_a_full_disk_may_fail_a_snapshot(option: str, takes: bool) -> None:
    shape = replace(SHAPE, options=((option, 2),))
    allowed = endings(Case(0, shape, (replace(KILLED, kind="disk full", phase="checkpoint"),)))
    assert any("a snapshot of" in ending.pattern for ending in allowed) == takes


def test_a_link_that_is_down_ends_a_run_and_a_slow_one_does_not() -> None:
    shape = replace(SHAPE, launcher=TWO_HOSTS, options=(("max_restarts", 3),))
    (down,) = endings(Case(0, shape, (replace(KILLED, kind=LINK_DOWN),)))
    assert down.kinds == ("RuntimeError",) and "has heard nothing" in down.pattern
    assert endings(Case(0, shape, (replace(KILLED, kind=LINK_SLOW),))) == [GOES_ON]


def test_ranks_that_have_not_ended_are_wrong() -> None:
    outcome = went_on()
    outcome.left = ["process 1 of the launcher did not end"]
    assert judge(Case(0, SHAPE, (KILLED,)), outcome, went_on())[0] == outcome.left[0]


def test_a_damaged_checkpoint() -> None:
    case = Case(0, SHAPE, (replace(KILLED, kind="damaged", phase="after", role=DRIVER, stage=2),))
    outcome = went_on()
    outcome.struck, outcome.damaged_name = {}, "step=8.ckpt"
    outcome.afterwards, outcome.checkpoints_afterwards = results(), saved(8)
    refused = Error("RuntimeError", "the checkpoint /a/step=8.ckpt is incomplete")
    expected = [
        (results(refused, 0), ""),
        (results(refused, 2), "noticed after 2 batches"),
        (results(Error("OSError", "Invalid argument"), 0), "is OSError: Invalid argument"),
        (results(), "was loaded"),
    ]
    for of_damaged, message in expected:
        outcome.of_damaged = of_damaged
        found = judge(case, outcome, REFERENCE)
        assert (message in found[0]) if message else not found, found


def test_the_report() -> None:
    right = Verdict(3, "two stages", ["kill"], True, "went on", [], commit="abc")
    late = Verdict(
        4, "three stages", ["hang"], True, "WorkerLost: stage 0", ["it took 90.0 s to end"], 90.0, commit="def+"
    )
    text = markdown([right, late])
    assert text.startswith("2 cases (abc, def+), in 2 of which a fault struck; 1 ended wrongly.")
    assert "| kill | 1 | 0 |  |" in text and "| hang | 1 | 1 | 90.0, 90.0 |" in text
    assert "python -m tests.faults.simulator --seed 4" in text and "--seed 3" not in text
