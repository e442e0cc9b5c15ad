"""``rebalance="auto"``: a stage that becomes slow in mid-run is relieved, and training is the same as without it."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from parity import Outcome, Small, batches, compare, fit, on_cpus
from pytorch_lightning import Callback
from sleeping import Sleepy
from undisturbed import until_undisturbed

from benchmarks.messages import told
from benchmarks.rebalance import run as disturbed
from strategies import Rebalance, RPCSequentialStrategy
from trainer import PipelineMonitor, Trainer

BATCHES = 8


class BecomesSlow(Callback):
    """Makes a process slow in the middle of epoch 1; notes the balance of each batch.

    Args:
        file: Layers are slow once it exists.
        stops: Whether to stop at the end of the first epoch in which the balance is another one than at first.
    """

    def __init__(self, file: Path, stops: bool = False) -> None:
        self.file, self.stops = file, stops
        self.balances: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.balances.append(trainer.strategy.balance)
        if (trainer.current_epoch, batch_idx) == (1, 2):
            self.file.touch()

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        trainer.should_stop = self.stops and self.balances[-1] != self.balances[0]


def trained(
    name: str, slow: int, max_epochs: int, stops: bool = False, **strategy: Any
) -> tuple[Outcome, list[list[int]], list[str]]:
    file = Path(f"slow-{name}").absolute()
    becomes_slow, monitor = BecomesSlow(file, stops), PipelineMonitor(4, dirpath=name)
    with told("RPCSequentialStrategy: balance") as lines:
        outcome = fit(
            partial(Sleepy, slow, file),
            RPCSequentialStrategy(microbatches=4, balance=[5, 6], **strategy),
            2,
            train=lambda: batches([8] * BATCHES),
            max_epochs=max_epochs,
            callbacks=[becomes_slow, monitor],
        )
    return outcome, becomes_slow.balances, lines


MOST_EPOCHS = 5
"""Layers move after epoch 1, or one or two epochs later if other work kept the machine busy in recorded batches."""


def relieved(schedule: str, slow: int) -> None:
    outcome, balances, lines = trained("with", slow, MOST_EPOCHS, True, schedule=schedule, rebalance="auto")
    after, num_before = balances[-1], len(balances) - BATCHES
    relieving = [[3, 8], [4, 7]] if slow == 0 else [[6, 5], [7, 4], [8, 3]]
    assert num_before >= 2 * BATCHES and after in relieving, balances
    assert balances == [[5, 6]] * num_before + [after] * BATCHES and outcome.trainer.strategy.balance == after
    (line,) = lines
    start = f"RPCSequentialStrategy: balance {after} instead of [5, 6]: layer"
    assert line.startswith(start) and "passes predicted in" in line
    events = [json.loads(each) for each in Path("with/pipeline/events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "rebalance")
    assert (event["balance"], event["before"], event["step"]) == (after, [5, 6], num_before)
    sizes = [len(process["layers"]) for process in event["processes"]]
    assert sizes == after
    without, _, _ = trained("without", slow, len(balances) // BATCHES, schedule=schedule)
    compare(outcome, without, 0.0)


@on_cpus
@pytest.mark.alone
@pytest.mark.parametrize(
    ("schedule", "slow"),
    [pytest.param("1f1b", 0, marks=pytest.mark.slow), pytest.param("gpipe", 1, marks=pytest.mark.nightly)],
    ids=["1f1b", "gpipe"],
)
def test_a_slow_process_is_relieved_at_the_end_of_an_epoch(schedule: str, slow: int) -> None:
    run(relieved, schedule, slow)


class KeepsOutput(Callback):
    """Keeps an output without a backward pass for a while, such as to log a generated image."""

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.kept = model(batch[0])
        if batch_idx == 15:
            del self.kept


def moved_within_an_epoch(schedule: str, *callbacks: Callback) -> tuple[list[list[int]], list[str]]:
    with told("RPCSequentialStrategy: balance") as lines:
        outcome = fit(
            partial(Sleepy, 0),
            RPCSequentialStrategy(
                microbatches=4,
                balance=[5, 6],
                schedule=schedule,
                rebalance=Rebalance(every_n_steps=10, threshold=0.05),
            ),
            2,
            train=lambda: batches([8] * 22),
            max_epochs=1,
            callbacks=[noting := BecomesSlow(Path("never")), *callbacks],
        )
    return [*noting.balances, outcome.trainer.strategy.balance], lines


class Fails(Callback):
    """Raises an error while a batch is recorded."""

    def on_before_zero_grad(self, trainer: Any, model: Any, optimizer: Any) -> None:
        if trainer.global_step == 2:
            raise KeyError("on purpose")


def evaluated_after_an_error() -> None:
    strategy = RPCSequentialStrategy(microbatches=2, balance=[3, 3], rebalance=Rebalance(every_n_steps=3))
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=[Fails()], **settings)
    model = Small()
    with pytest.raises(KeyError, match="on purpose"):
        trainer.fit(model, batches([8] * 5))
    trainer.validate(model, batches([8]), verbose=False)


@on_cpus
@pytest.mark.slow
def test_every_n_steps() -> None:
    """Slow from the first batch on; layers move after ten batches, and stay where they are after twenty."""

    def check(found: tuple[list[list[int]], list[str]]) -> None:
        balances, lines = found
        assert balances[:10] == [[5, 6]] * 10, found
        assert balances[10][0] in (3, 4) and balances[-1][0] in (3, 4) and 1 <= len(lines) <= 2, found

    balances, _ = until_undisturbed(lambda: run(moved_within_an_epoch, "1f1b"), check)
    assert balances[:10] == [[5, 6]] * 10


def moved_after_an_output_was_dropped() -> tuple[list[list[int]], list[str]]:
    with pytest.warns(UserWarning, match=r"The balance stays \[5, 6\] for now: .* kept for something else, detach it"):
        return moved_within_an_epoch("gpipe", KeepsOutput())


@on_cpus
@pytest.mark.slow
def test_layers_do_not_move_while_an_output_is_kept() -> None:
    def check(found: tuple[list[list[int]], list[str]]) -> None:
        balances, lines = found
        assert balances[:20] == [[5, 6]] * 20, found
        assert balances[-1] != [5, 6] and len(lines) == 1, found

    until_undisturbed(lambda: run(moved_after_an_output_was_dropped), check)


def test_a_recording_that_an_error_ends_is_forgotten() -> None:
    run(evaluated_after_an_error)


MOST_WAITED = 0.1
"""If others use the driver's core for a larger share of the time, the driver may be as slow as the disturbed stage."""


def beside_a_busy_process() -> None:
    """Runs again, up to three times, if others used the driver's core."""
    without = disturbed("1f1b", None, width=256, batches=12, epochs=3, busy=2)
    assert without.balances == [[6, 6]] * 36
    for _ in range(3):
        own = disturbed("1f1b", "auto", width=256, batches=12, epochs=3, busy=2)
        assert own.losses == without.losses
        for parameter, other in zip(own.parameters, without.parameters, strict=True):
            assert torch.equal(parameter, other)
        if own.balances[24][0] < min(6, own.balances[23][0]):
            return
        assert own.waited > MOST_WAITED, (own.waited, own.balances)
    raise AssertionError("others used the driver's core in each of three runs, in which no layer moved")


@on_cpus
@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each stage needs a core")
def test_a_stage_beside_a_busy_process_is_relieved_at_the_end_of_the_epoch() -> None:
    run(beside_a_busy_process, timeout_seconds=170)
