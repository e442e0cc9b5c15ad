"""Resuming in the corners: steps asked for early, other samplers, errors, data of unusual kinds; in one process."""

import multiprocessing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import resume_job
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.trainer.states import TrainerStatus
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from resume_job import ENDS, assert_resumable, fit, shuffled
from resume_parts import (
    Counting,
    CountingInside,
    CountsEpochs,
    CountsWhereLoaded,
    Draws,
    RestartsWhereLoaded,
    Rows,
    ShufflesInPlace,
    StateForAnother,
    StatefulLoader,
    StatefulStream,
    StatefulStreamInside,
    Stream,
)
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from strategies import RPCSequentialStrategy
from strategies.planning import plan
from trainer import Trainer
from trainer.resume.loops import _of_every_process

pytestmark = pytest.mark.filterwarnings("ignore")

LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled(10),
    "stream": lambda: DataLoader(Stream(10), batch_size=4),
    "stream with state": lambda: DataLoader(StatefulStream(10), batch_size=4),
    "loader with state": lambda: StatefulLoader(10),
    "of torchdata": lambda: StatefulDataLoader(Rows(10), batch_size=4, shuffle=True),
}


class Asks(resume_job.Net):
    """Does what the recipe for ``OneCycleLR`` does: its loaders are set up before the counters are known."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("name", ["shuffled", "of torchdata", "stream", "stream with state"])
def test_a_model_that_asks_for_the_number_of_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_job, "Net", Asks)
    assert_resumable(tmp_path, LOADERS[name], [*ENDS, ("on_train_epoch_end", 2)], max_steps=9)


def test_a_model_that_asks_for_the_number_of_steps_reads_nothing_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_job, "Net", Asks)
    fit(LOADERS["stream with state"], seed=3, callbacks=[resume_job.Saves(tmp_path, [("on_train_batch_end", 2)])])
    stream = StatefulStream(10)
    path = tmp_path / "on_train_batch_end-2.ckpt"
    fit(lambda: DataLoader(stream, batch_size=4), seed=5, checkpoint=path, max_steps=3, max_epochs=-1)
    assert stream.num_read == 2
    fit(shuffled(10), seed=3, callbacks=[resume_job.Saves(tmp_path, [("on_train_epoch_end", 1)])])
    rest, _ = fit(shuffled(30), seed=5, checkpoint=tmp_path / "on_train_epoch_end-1.ckpt", max_epochs=2)
    assert sorted(row for step in rest.seen for row in step[2]) == list(range(30))


def test_other_samplers_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Lightning puts a ``DistributedSampler`` in under ``ddp``, also for one process."""
    place = tmp_path / "on_train_batch_end-2.ckpt"

    def in_order() -> Any:
        return DataLoader(Rows(10), batch_size=4)

    for first, second in (
        (shuffled(10), _distributed(shuffled(10))),
        (_distributed(shuffled(10)), shuffled(10)),
        (shuffled(10), in_order),
        (_distributed(shuffled(10)), _distributed(in_order)),
    ):
        saves = resume_job.Saves(tmp_path, [("on_train_batch_end", 2)])
        whole, _ = fit(first, seed=3, max_epochs=1, callbacks=[saves])
        rest, _ = fit(second, seed=5, max_epochs=1, checkpoint=place)
        assert [step[2] for step in rest.seen] == [step[2] for step in whole.seen[2:]]

    def weights() -> Any:
        return DataLoader(Rows(10), batch_size=4, sampler=WeightedRandomSampler([1.0] * 10, 10))

    fit(weights, seed=3, callbacks=[resume_job.Saves(tmp_path, [("on_train_batch_end", 2)])])
    with pytest.raises(
        MisconfigurationException, match=r"with BatchSampler of WeightedRandomSampler, and this one has .* of RandomS"
    ):
        fit(shuffled(10), seed=5, checkpoint=place)


def _distributed(loaders: Callable[[], DataLoader]) -> Callable[[], DataLoader]:
    def made() -> DataLoader:
        loader = loaders()
        sampler = DistributedSampler(loader.dataset, 1, 0, shuffle=isinstance(loader.sampler, RandomSampler))
        return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler)

    return made


class RaisesAtStart(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        raise ValueError("the first error")


class SavesAtStart(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


EVERY_SECOND = {("shuffled", 1), ("shuffled", 2), ("stream", 0), ("stream with state", 1), ("loader with state", 2)}
PLACES = [("on_train_batch_start", 5), ("on_train_batch_end", 5), ("on_train_epoch_end", 1)]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=[pytest.mark.slow] * ((name, number) not in EVERY_SECOND))
        for name in ("shuffled", "stream", "stream with state", "loader with state")
        for number, place in enumerate(PLACES)
    ],
)
def test_before_training_goes_on(name: str, place: tuple[str, int], tmp_path: Path) -> None:
    saves = resume_job.Saves(tmp_path, [place])
    whole, _ = fit(LOADERS[name], seed=3, callbacks=[saves])
    ((path, (steps, _)),) = saves.before.items()
    with pytest.raises(ValueError, match="the first error"):
        fit(LOADERS[name], seed=5, checkpoint=path, callbacks=[RaisesAtStart()])
    fit(LOADERS[name], seed=6, checkpoint=path, callbacks=[SavesAtStart(tmp_path / "again.ckpt")])
    rest, _ = fit(LOADERS[name], seed=7, checkpoint=tmp_path / "again.ckpt")
    assert rest.seen == whole.seen[steps:]


class FailsToTransfer(resume_job.Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and self.global_step == 4:
            raise RuntimeError("out of memory")
        return batch


class SavesOnException(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("name", "afterwards"),
    [
        ("shuffled", False),
        ("stream", True),
        ("stream with state", False),
        ("loader with state", True),
        pytest.param("shuffled", True, marks=pytest.mark.slow),
        pytest.param("stream", False, marks=pytest.mark.slow),
        pytest.param("stream with state", True, marks=pytest.mark.slow),
        pytest.param("loader with state", False, marks=pytest.mark.slow),
    ],
)
def test_a_batch_whose_transfer_fails(
    name: str, afterwards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders = LOADERS[name]
    path = tmp_path / "failed.ckpt"
    whole, _ = fit(loaders, seed=3)
    monkeypatch.setattr(resume_job, "Net", FailsToTransfer)
    trainers: list[Any] = []

    class Keeps(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            trainers.append(trainer)

    with pytest.raises(RuntimeError, match="out of memory"):
        fit(loaders, seed=3, callbacks=[Keeps() if afterwards else SavesOnException(path)])
    if afterwards:
        trainers[0].save_checkpoint(path)
    monkeypatch.undo()
    rest, _ = fit(loaders, seed=5, checkpoint=path)
    assert [step[:3] for step in rest.seen] == [step[:3] for step in whole.seen[4:]]


def test_numbers_of_samplers_and_lengths_of_any_kind(tmp_path: Path) -> None:
    class Cools(Draws):
        heat = np.float64(1)

        def __iter__(self) -> Any:
            self.heat = self.heat * np.float64(0.5)
            return super().__iter__()

    class NoLength(Rows):
        def __len__(self) -> int:
            raise AttributeError("number")

    assert_resumable(tmp_path, lambda: DataLoader(Rows(10), batch_size=4, sampler=Cools(10)), ENDS, max_epochs=2)
    assert_resumable(tmp_path, lambda: DataLoader(NoLength(10), batch_size=4, sampler=Draws(10)), ENDS, max_epochs=2)


@pytest.mark.parametrize("buckets", [False, True])
def test_a_sampler_that_shuffles_in_place(buckets: bool, tmp_path: Path) -> None:
    def loaders() -> Any:
        return DataLoader(Rows(10), batch_size=4, sampler=ShufflesInPlace(10, buckets=buckets))

    assert_resumable(tmp_path, loaders, ENDS, max_epochs=3)


def test_the_state_of_processes_that_have_ended() -> None:
    """After ``ddp_spawn``, ``save_checkpoint`` is called in a process that has no others any more."""
    trainer = resume_job.Trainer(strategy="ddp_spawn", devices=2, **resume_job.QUIET)
    assert trainer.world_size == 2
    assert _of_every_process(trainer, {"loaders": None}) == [{"loaders": None}]
    trainer.state.status = TrainerStatus.INTERRUPTED  # by the error of one rank, which has ended the process group
    assert _of_every_process(trainer, {"loaders": None}) == [{"loaders": None}] * 2


@pytest.mark.parametrize("data", [RestartsWhereLoaded, CountsWhereLoaded, StateForAnother])
def test_streams_of_other_libraries(data: Any, tmp_path: Path) -> None:
    assert_resumable(tmp_path, lambda: DataLoader(data(10), batch_size=4), ENDS)


def test_a_stream_that_counts_epochs(tmp_path: Path) -> None:
    places = [("on_train_epoch_end", number) for number in (1, 2)]
    assert_resumable(tmp_path, lambda: DataLoader(CountsEpochs(10), batch_size=4), places)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("data", [Counting, CountingInside])
def test_a_stream_that_counts(data: Any, num_workers: int, tmp_path: Path) -> None:
    assert_resumable(tmp_path, lambda: DataLoader(data(10), batch_size=4, num_workers=num_workers), ENDS)


SECOND_PASS = [("on_train_batch_end", 4), ("on_train_epoch_start", 3), ("on_train_epoch_end", 2)]
FIRST_PASS = [("on_train_batch_end", 2), ("on_train_epoch_start", 2), ("on_train_epoch_end", 1)]
"""With two batches an epoch: after its last batch, and after it."""


@pytest.mark.parametrize(
    "data", [Counting, CountingInside, RestartsWhereLoaded, CountsWhereLoaded, StatefulStream, StatefulStreamInside]
)
def test_the_pass_after_one_that_ended_early(data: Any, tmp_path: Path) -> None:
    def loaders() -> Any:
        return DataLoader(data(26), batch_size=4)

    places = [("on_train_batch_end", 3), *SECOND_PASS]
    places += FIRST_PASS if data is not StatefulStreamInside else []
    assert_resumable(tmp_path, loaders, places, limit_train_batches=2)


class CountingSized(CountingInside):
    """Has a length, so Lightning does not ask for one batch more than there are."""

    def __len__(self) -> int:
        return len(self.rows)


class StatefulStreamSized(StatefulStreamInside):
    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Any:
        if self.place == len(self.rows):
            self.epoch, self.place = self.epoch + 1, 0
        return super().__iter__()


@pytest.mark.parametrize("data", [CountingSized, StatefulStreamSized])
def test_the_pass_after_a_whole_one_of_known_length(data: Any, tmp_path: Path) -> None:
    assert_resumable(tmp_path, lambda: DataLoader(data(8), batch_size=4), [*FIRST_PASS, *SECOND_PASS])


@pytest.mark.parametrize("data", [CountingInside, StatefulStreamInside])
def test_a_first_pass_that_ended_early_does_not_tell_where_the_next_one_begins(data: Any, tmp_path: Path) -> None:
    def loaders() -> Any:
        return DataLoader(data(26), batch_size=4)

    saves = resume_job.Saves(tmp_path, [("on_train_epoch_end", 1), ("on_train_epoch_end", 2)])
    whole, _ = fit(loaders, seed=3, limit_train_batches=2, callbacks=[saves])
    after_first, after_second = saves.before
    with pytest.warns(UserWarning, match=f"did not read all samples of {data.__name__}, and it is not known"):
        rest, _ = fit(loaders, seed=5, limit_train_batches=2, checkpoint=after_first)
    assert [step[2] for step in rest.seen[:2]] == [step[2] for step in whole.seen[:2]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loaders, seed=5, limit_train_batches=2, checkpoint=after_second)
    assert not any("did not read all samples" in str(warning.message) for warning in caught)


def test_a_stream_that_has_nothing_after_it_was_loaded(tmp_path: Path) -> None:
    class Ends(RestartsWhereLoaded):
        def load_state_dict(self, state: Any) -> None:
            self.begins = {"place": len(self.rows)}

    fit(
        lambda: DataLoader(Ends(10), batch_size=4),
        seed=3,
        callbacks=[resume_job.Saves(tmp_path, [("on_train_epoch_end", 1)])],
    )
    with pytest.raises(MisconfigurationException, match=r"Ends has no batch in the epoch after .* later epochs begin"):
        fit(lambda: DataLoader(Ends(10), batch_size=4), seed=5, checkpoint=tmp_path / "on_train_epoch_end-1.ckpt")


class Fails(pl.Callback):
    """Ends the first fit: in its second batch, or at the end of an epoch."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _fail(self) -> None:
        self.where = "nowhere"
        raise RuntimeError("the first fit")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "batch" and batch_idx == 1:
            self._fail()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.where == "end":
            self._fail()


@pytest.mark.parametrize("where", ["batch", "end"])
@pytest.mark.parametrize(
    "place",
    [("on_train_epoch_start", 3), ("on_train_epoch_end", 1), ("on_train_batch_end", 5), ("on_validation_end", 2)],
)
def test_a_fit_after_one_that_failed_is_resumed(where: str, place: tuple[str, int], tmp_path: Path) -> None:
    saves, model = resume_job.Saves(tmp_path, [place]), resume_job.Net(plateau=None, dropout=0.3)
    trainer = Trainer(callbacks=[Fails(where), saves], max_epochs=3, **resume_job.QUIET)
    loaders = LOADERS["shuffled"]
    pl.seed_everything(3, verbose=False)
    with pytest.raises(RuntimeError, match="the first fit"):
        trainer.fit(model, loaders(), DataLoader(Rows(8), batch_size=4))
    trainer.fit(model, loaders(), DataLoader(Rows(8), batch_size=4))
    ((path, (steps, _)),) = saves.before.items()
    rest, _ = fit(loaders, seed=5, checkpoint=path)
    assert rest.seen and [step[:3] for step in rest.seen] == [step[:3] for step in model.seen[steps:]]
    assert rest.trainer.fit_loop.epoch_progress.total.completed == trainer.fit_loop.epoch_progress.total.completed


PERSISTENT = shuffled(10, num_workers=2, persistent_workers=True)


def fit_two_epochs(loader: DataLoader, validation: DataLoader | None = None, **arguments: Any) -> resume_job.Net:
    """Trains with one loader, and asserts that each epoch trains on every row once and that all workers have ended."""
    before, model = set(multiprocessing.active_children()), resume_job.Net(plateau=None, dropout=0.3)
    Trainer(**resume_job.QUIET, max_epochs=2, **arguments).fit(model, loader, validation)
    assert [sorted(row for step in model.seen[first:][:3] for row in step[2]) for first in (0, 3)] == [[*range(10)]] * 2
    assert not set(multiprocessing.active_children()) - before
    return model


def test_a_loader_with_persistent_workers_that_was_read_before() -> None:
    loader = PERSISTENT()
    next(iter(loader))
    fit_two_epochs(loader)


def test_a_loader_with_persistent_workers_that_was_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BUDGET_SECONDS", 0.01)
    loader, trainer = PERSISTENT(), Trainer(strategy=RPCSequentialStrategy(), **resume_job.QUIET)
    trainer.plan(resume_job.Net(plateau=None, dropout=0.3), loader, microbatches=2, schedules="gpipe")
    fit_two_epochs(loader)


@pytest.mark.parametrize("sanity_steps", [0, 2])
def test_a_loader_with_persistent_workers_that_also_validates(sanity_steps: int) -> None:
    loader = PERSISTENT()
    model = fit_two_epochs(loader, loader, num_sanity_val_steps=sanity_steps)
    assert [step for _, step, _ in model.validated] == [3] * 3 + [6] * 3


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_a_loader_with_persistent_workers_that_a_callback_reads(hook: str) -> None:
    batches: list[Any] = []

    def read(trainer: Any, *rest: Any) -> None:
        batches.append(next(iter(trainer.train_dataloader)))

    fit_two_epochs(PERSISTENT(), callbacks=[LambdaCallback(**{hook: read})])
    assert batches and all([part.shape for part in batch] == [(4, 4), (4, 1), (4,)] for batch in batches)


def test_a_loader_with_persistent_workers_that_was_read_before_is_resumed(tmp_path: Path) -> None:
    def loaders() -> Any:
        loader = PERSISTENT()
        next(iter(loader))
        return loader

    assert_resumable(tmp_path, loaders, ENDS, max_epochs=2)


def test_a_loader_with_persistent_workers_that_is_reloaded_is_resumed(tmp_path: Path) -> None:
    assert_resumable(tmp_path, PERSISTENT, ENDS[1:], max_epochs=2, reload_dataloaders_every_n_epochs=1)


def test_persistent_workers_serve_all_epochs() -> None:
    before, workers = set(multiprocessing.active_children()), set[Any]()

    def note(*_: Any) -> None:
        workers.update(multiprocessing.active_children())

    fit_two_epochs(PERSISTENT(), callbacks=[LambdaCallback(on_train_batch_end=note)])
    assert len(workers - before) == 2


def test_persistent_workers_end_with_a_run_that_fails() -> None:
    class LacksARow(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise RuntimeError("row 7 is missing")
            return super().__getitem__(index)

    before = set(multiprocessing.active_children())
    with pytest.raises(RuntimeError, match="row 7 is missing") as raised:
        fit(lambda: DataLoader(LacksARow(10), num_workers=2, persistent_workers=True), seed=3)
    assert raised.tb is not None  # refers to the iterator
    assert not set(multiprocessing.active_children()) - before
