"""Resuming repeats and skips no sample, and equals the run without interruption: in one process."""

import os
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import resume_job
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from resume_job import ENDS, assert_resumable, fit, shuffled
from resume_parts import Draws, DrawsBatches, Rows, StatefulLoader, StatefulStream, Stream
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore")

LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled(10),
    "generator of the loader": lambda: DataLoader(
        Rows(10), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9)
    ),
    "sampler with a generator": lambda: DataLoader(Rows(10), batch_size=4, sampler=Draws(10)),
    "batch sampler with a generator": lambda: DataLoader(Rows(10), batch_sampler=DrawsBatches(10)),
    "weights": lambda: DataLoader(Rows(10), batch_size=4, sampler=WeightedRandomSampler(torch.ones(10), 10)),
    "replacement": lambda: DataLoader(
        Rows(90),
        batch_size=30,
        sampler=RandomSampler(Rows(90), replacement=True, generator=torch.Generator().manual_seed(9)),
    ),
    "distributed": lambda: DataLoader(Rows(20), batch_size=4, sampler=DistributedSampler(Rows(20), 2, 1)),
    "stream": lambda: DataLoader(Stream(10), batch_size=4),
    "stream with state": lambda: DataLoader(StatefulStream(10), batch_size=4),
    "loader with state": lambda: StatefulLoader(10),
    "several": lambda: {"long": shuffled(10)(), "short": shuffled(5)()},
    "as many as the shortest": lambda: CombinedLoader({"a": shuffled(12)(), "b": shuffled(10)()}, "min_size"),
    "several streams": lambda: {"a": DataLoader(Stream(10), batch_size=4), "b": DataLoader(Stream(5), batch_size=4)},
}


OTHERS_LIKE_THESE = (
    "generator of the loader",
    "sampler with a generator",
    "weights",
    "as many as the shortest",
    "several",
)
"""Each shares its way with one that is not marked slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in OTHERS_LIKE_THESE)) for name in LOADERS]
)
def test_no_sample_is_repeated_or_left_out(name: str, tmp_path: Path) -> None:
    assert_resumable(tmp_path, LOADERS[name], ENDS, max_epochs=2 if name != "distributed" else 3)


def test_the_same_trainer_resumes_from_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """It has validated before, and validates again."""
    saves = resume_job.Saves(tmp_path, [("on_train_batch_end", 3)])
    whole, trainer = fit(shuffled(10), seed=3, callbacks=[saves], max_epochs=2)
    part = resume_job.Net(plateau=None, dropout=0.3)
    trainer.fit(
        part, shuffled(10)(), DataLoader(Rows(8), batch_size=4), ckpt_path=tmp_path / "on_train_batch_end-3.ckpt"
    )
    assert part.validated == whole.validated and [step for _, step, _ in part.validated] == [3, 3, 6, 6]
    assert part.seen == whole.seen[3:]


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        ({"val_check_interval": 2}, [("on_train_batch_end", 2), ("on_validation_end", 1)]),
        ({"plateau": "epoch"}, [("on_train_batch_end", 1), ("on_validation_end", 1), ("on_train_epoch_end", 1)]),
        (
            {"plateau": "step", "val_check_interval": 2, "num_rows": 22},
            [
                *(("on_train_batch_start", calls) for calls in (1, 3, 4, 7)),
                *[("on_before_optimizer_step", 3), ("on_train_batch_end", 2), ("on_validation_end", 2)],
            ],
        ),
        ({}, [("on_train_batch_end", 3), ("on_train_batch_start", 3), ("on_train_epoch_start", 2)]),
        ({"accumulate_grad_batches": 2, "num_rows": 18}, [("on_train_batch_end", 2), ("on_train_batch_end", 9)]),
        ({"reload_dataloaders_every_n_epochs": 2}, [("on_train_batch_end", 5)]),
        ({"limit_train_batches": 2}, [("on_train_batch_end", 2), ("on_train_batch_end", 3)]),
        ({"max_steps": 7, "max_epochs": -1}, [("on_train_batch_end", 6), ("on_train_epoch_end", 2)]),
    ],
)
def test_what_was_left_of_a_step_or_an_epoch_is_done(
    arguments: dict[str, Any], places: list[tuple[str, int]], tmp_path: Path
) -> None:
    loaders = shuffled(arguments.pop("num_rows", 10))
    assert_resumable(tmp_path, loaders, places, **arguments)


@pytest.mark.parametrize(
    ("arguments", "rest_of_it"),
    [
        ({}, {"max_steps": 12, "max_epochs": -1}),
        ({}, {"max_epochs": 2}),
        ({"val_check_interval": 2, "plateau": "step"}, {"max_epochs": 2}),
    ],
    ids=str,
)
def test_a_run_that_max_steps_has_ended_goes_on_in_its_epoch(
    arguments: dict[str, Any], rest_of_it: dict[str, int], tmp_path: Path
) -> None:
    whole, _ = fit(shuffled(22), seed=3, max_epochs=2, **arguments)
    part, trainer = fit(shuffled(22), seed=3, max_steps=4, max_epochs=-1, **arguments)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    rest, _ = fit(shuffled(22), seed=5, checkpoint=tmp_path / "after.ckpt", **arguments, **rest_of_it)
    assert part.seen + rest.seen == whole.seen
    assert part.validated + rest.validated == whole.validated


@pytest.mark.parametrize("batches", [2, 3, 4])
def test_a_batch_after_which_the_clock_asked_for_validation_ends_once(batches: int, tmp_path: Path) -> None:
    saves = resume_job.Saves(tmp_path, [("on_validation_end", batches)])
    whole, _ = fit(shuffled(10), seed=3, callbacks=[saves], plateau="step", val_check_interval=timedelta(0))
    (path,) = saves.before
    rest, _ = fit(shuffled(10), seed=5, checkpoint=path, plateau="step", val_check_interval=timedelta(hours=1))
    logged = [[(*step[:2], *step[4:]) for step in model.seen] for model in (rest, whole)]  # only one of them validates
    assert logged[0] == logged[1][batches:]


class Stops(pl.Callback):
    """Stops training in the middle of an epoch, as ``max_time`` does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        trainer.should_stop = trainer.global_step == 4


def test_a_run_that_stopped_goes_on_in_its_epoch(tmp_path: Path) -> None:
    whole, _ = fit(shuffled(22), seed=3, max_epochs=1)
    part, trainer = fit(shuffled(22), seed=3, callbacks=[Stops()])
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    rest, _ = fit(shuffled(22), seed=5, checkpoint=tmp_path / "after.ckpt", max_epochs=1)
    samples = [[step[:3] for step in model.seen] for model in (part, rest, whole)]  # it validates when it stops
    assert len(samples[0]) == 4 and samples[0] + samples[1] == samples[2]


def test_a_batch_that_is_none(tmp_path: Path) -> None:
    def without_the_second(rows: list[Any]) -> Any:
        return None if rows[0][2] == 4 else default_collate(rows)

    places = [("on_train_batch_end", 3), ("on_before_optimizer_step", 4), ("on_train_epoch_end", 1)]
    loaders = partial(DataLoader, Rows(22), batch_size=4, collate_fn=without_the_second)
    assert_resumable(tmp_path, loaders, places, val_check_interval=2, max_epochs=2)


def test_an_epoch_whose_rest_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def skips(model: pl.LightningModule, batch: Any, batch_idx: int) -> int | None:
        return -1 if (model.current_epoch, batch_idx) == (0, 3) else None

    monkeypatch.setattr(resume_job.Net, "on_train_batch_start", skips)
    places = [("on_train_epoch_end", 1), ("on_train_epoch_start", 2), ("on_train_batch_end", 5)]
    assert_resumable(tmp_path, shuffled(22), places)


def test_an_exception_in_the_middle_of_a_step(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 7:
                raise RuntimeError("out of luck")

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "failed.ckpt")

    for loaders in (shuffled(22), LOADERS["stream"]):
        whole, _ = fit(loaders, seed=3)
        with pytest.raises(RuntimeError, match="out of luck"):
            fit(loaders, seed=3, callbacks=[Fails()])
        rest, _ = fit(loaders, seed=5, checkpoint=tmp_path / "failed.ckpt")
        assert rest.seen == whole.seen[7:]


class SavesOnException(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def test_a_job_that_is_terminated_after_validation(tmp_path: Path) -> None:
    class Terminates(SavesOnException):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    arguments: dict[str, Any] = {"plateau": "step", "val_check_interval": 2, "max_epochs": 2}
    whole, _ = fit(shuffled(22), seed=3, **arguments)
    with pytest.raises(SystemExit):
        fit(shuffled(22), seed=3, callbacks=[Terminates(tmp_path / "terminated.ckpt")], **arguments)
    rest, _ = fit(shuffled(22), seed=5, checkpoint=tmp_path / "terminated.ckpt", **arguments)
    assert (rest.seen, rest.validated) == (whole.seen[4:], whole.validated[4:])


@pytest.mark.parametrize("batches", [3, 4])
def test_a_logger_that_fails_after_a_batch(batches: int, tmp_path: Path) -> None:
    class Fails(DummyLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if step == batches - 1 and "rate" in metrics:
                raise RuntimeError("out of disk")

    class LogsRate(SavesOnException):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            pl_module.log("rate", trainer.optimizers[0].param_groups[0]["lr"])

    arguments: dict[str, Any] = {"plateau": "step", "val_check_interval": 2, "max_epochs": 2}
    whole, _ = fit(shuffled(22), seed=3, **arguments)
    logs = {"logger": Fails(), "log_every_n_steps": 1, "callbacks": [LogsRate(tmp_path / "failed.ckpt")]}
    with pytest.raises(RuntimeError, match="out of disk"):
        fit(shuffled(22), seed=3, **logs, **arguments)
    rest, _ = fit(shuffled(22), seed=5, checkpoint=tmp_path / "failed.ckpt", **arguments)
    assert (rest.seen, rest.validated) == (whole.seen[batches:], whole.validated[2:])


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_end"])
def test_a_run_resumed_at_the_start_of_an_epoch_is_resumed_again(hook: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"plateau": "step", "val_check_interval": 2}
    first = resume_job.Saves(tmp_path, [("on_train_epoch_start", 2)])
    whole, _ = fit(shuffled(10), seed=3, callbacks=[first], **arguments)
    second = resume_job.Saves(tmp_path, [(hook, 1)])
    fit(shuffled(10), seed=4, callbacks=[second], checkpoint=tmp_path / "on_train_epoch_start-2.ckpt", **arguments)
    ((path, (steps, _)),) = second.before.items()
    rest, _ = fit(shuffled(10), seed=5, checkpoint=path, **arguments)
    assert rest.seen == whole.seen[3 + steps :]


def test_model_checkpoint_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    every = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    whole, _ = fit(shuffled(10), seed=3, callbacks=[every], enable_checkpointing=True)
    same = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="again-{step}")
    rest, _ = fit(
        shuffled(10), seed=5, checkpoint=tmp_path / "step=3.ckpt", callbacks=[same], enable_checkpointing=True
    )
    assert rest.seen == whole.seen[3:]
    assert rest.validated == whole.validated  # the first validation was still to come


class Counted(Rows):
    """Rows that remember which have been read."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def test_nothing_is_read_in_vain(tmp_path: Path) -> None:
    fit(shuffled(22), seed=3, callbacks=[resume_job.Saves(tmp_path, [("on_train_batch_end", 4)])], max_epochs=1)
    rows = Counted(22)
    rest, _ = fit(
        lambda: DataLoader(rows, batch_size=4, shuffle=True),
        seed=5,
        checkpoint=tmp_path / "on_train_batch_end-4.ckpt",
        max_epochs=1,
    )
    assert rows.read == [row for step in rest.seen for row in step[2]]
    assert len(rows.read) == 6


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        (shuffled(30), "after 2 batches of a loader with 3 batches, 4 rows in each, 10 samples, and this one has 8 b"),
        (
            lambda: DataLoader(Rows(10), batch_size=5),
            "this one has 2 batches, 5 rows in each, 10 samples, so some .*from the end of an",
        ),
        (LOADERS["several"], "written with 1 loaders for training, now there are 2. Resume with the loaders of that"),
    ],
)
def test_other_data_in_the_middle_of_an_epoch_is_refused(
    loaders: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    fit(shuffled(10), seed=3, callbacks=[resume_job.Saves(tmp_path, [("on_train_batch_end", 2)])])
    with pytest.raises(MisconfigurationException, match=message):
        fit(loaders, seed=5, checkpoint=tmp_path / "on_train_batch_end-2.ckpt")


def test_other_data_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    fit(shuffled(10), seed=3, callbacks=[resume_job.Saves(tmp_path, [("on_train_epoch_end", 1)])])
    rest, _ = fit(shuffled(30), seed=5, checkpoint=tmp_path / "on_train_epoch_end-1.ckpt", max_epochs=2)
    assert sorted(row for step in rest.seen for row in step[2]) == list(range(30))


def test_checkpoints_go_from_and_to_lightnings_trainer(tmp_path: Path) -> None:
    place = [("on_train_batch_end", 2)]
    path = tmp_path / "on_train_batch_end-2.ckpt"
    for first, second in ((pl.Trainer, resume_job.Trainer), (resume_job.Trainer, pl.Trainer)):
        whole, _ = fit(shuffled(10), seed=3, callbacks=[resume_job.Saves(tmp_path, place)], trainer=first)
        assert ("relay" in torch.load(path, weights_only=True)) == (first is resume_job.Trainer)
        rest, trainer = fit(shuffled(10), seed=5, checkpoint=path, trainer=second)
        # As Lightning does: with the counters that were, in another order.
        assert [step[:2] for step in rest.seen] == [step[:2] for step in whole.seen[2:]]
        assert trainer.current_epoch == 3


def test_no_warning_of_what_is_resumed(tmp_path: Path) -> None:
    fit(shuffled(10), seed=3, callbacks=[resume_job.Saves(tmp_path, [("on_train_batch_end", 2)])])
    for trainer in (resume_job.Trainer, pl.Trainer):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(shuffled(10), seed=5, checkpoint=tmp_path / "on_train_batch_end-2.ckpt", trainer=trainer)
        warned = any("your dataloader is not resumable" in str(warning.message) for warning in caught)
        assert warned == (trainer is pl.Trainer)


def test_weights_alone_hold_no_state(tmp_path: Path) -> None:
    _, trainer = fit(shuffled(10), seed=3)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "relay" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_loaders_of_torchdata(tmp_path: Path) -> None:
    for make in (
        lambda: StatefulDataLoader(Rows(10), batch_size=4, shuffle=True),
        lambda: StatefulDataLoader(StatefulStream(10), batch_size=4),
    ):
        assert_resumable(tmp_path, make, [*ENDS, ("on_train_batch_end", 3)], max_epochs=2)


@pytest.mark.parametrize("trainer", [pl.Trainer, resume_job.Trainer])
def test_a_loader_with_state_under_either_trainer(trainer: type[pl.Trainer], tmp_path: Path) -> None:
    class Sized(StatefulLoader):  # Lightning reads one batch ahead, and counts it, where there is no length
        def __len__(self) -> int:
            return 3

    saves = resume_job.Saves(tmp_path, ENDS)
    whole, _ = fit(lambda: Sized(10), seed=3, callbacks=[saves], trainer=trainer)
    for path, (steps, _) in saves.before.items():
        rest, _ = fit(lambda: Sized(10), seed=5, checkpoint=path, trainer=trainer)
        assert [step[:3] for step in rest.seen] == [step[:3] for step in whole.seen[steps:]]
