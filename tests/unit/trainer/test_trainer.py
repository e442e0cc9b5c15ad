"""trainer.Trainer: the strategies' names, and otherwise Lightning's Trainer to the letter."""

import inspect
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset, RandomIterableDataset
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from pytorch_lightning.utilities.data import has_len_all_ranks
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from tqdm import tqdm

import strategies
from strategies.common.names import PLUGINS, did_you_mean
from trainer import Trainer

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}


@pytest.mark.parametrize("name", [*sorted(PLUGINS.keys() - {"dp"}), "DDP"])  # that one needs GPUs: test_dp.py
def test_a_name_becomes_the_plug_in(name: str) -> None:
    expected = getattr(strategies, PLUGINS[name.lower()])
    assert type(Trainer(strategy=name, **QUIET).strategy) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", "SingleDeviceStrategy"),
        ("ddp_spawn", "DDPStrategy"),
        ("ddp_find_unused_parameters_true", "DDPStrategy"),
    ],
)
def test_lightnings_names_stay_lightnings(name: str, expected: str) -> None:
    strategy = type(Trainer(strategy=name, **QUIET).strategy)
    assert (strategy.__name__, strategy.__module__.split(".")[0]) == (expected, "pytorch_lightning")


def test_instances_pass_through() -> None:
    own, lightnings = strategies.DDPStrategy(comm_hook="fp16_compress"), pl.strategies.DDPStrategy()
    assert Trainer(strategy=own, **QUIET).strategy is own
    assert Trainer(strategy=lightnings, **QUIET).strategy is lightnings
    # The plug-ins also work without Relay's Trainer.
    assert pl.Trainer(strategy=strategies.DDPStrategy(), **QUIET).strategy.comm_hook == "none"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dpp", "unknown strategy 'dpp'; did you mean 'dp' or 'ddp'"),
        ("rpc_sequental", "unknown strategy 'rpc_sequental'; did you mean 'rpc_sequential'"),
        ("fsdpp", "did you mean 'fsdp'"),
        ("strategies.DDPStrateg", r"did you mean 'strategies.DDPStrategy'"),
        ("?", r"unknown strategy '\?' \(Relay's strategies: ddp, rpc_sequential"),
    ],
)
def test_an_unknown_name_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(strategy=name, **QUIET)


def test_an_unknown_keyword_names_the_nearest() -> None:
    lightnings = r"Trainer\.__init__\(\) got an unexpected keyword argument 'max_epoch'"
    with pytest.raises(TypeError, match=lightnings):
        pl.Trainer(max_epoch=3, **QUIET)
    with pytest.raises(TypeError, match=lightnings + "; did you mean 'max_epochs'"):
        Trainer(max_epoch=3, **QUIET)


def test_the_signature_is_lightnings() -> None:
    assert inspect.signature(Trainer) == inspect.signature(pl.Trainer)
    assert type(Trainer("cpu", "ddp", 1, logger=False).strategy) is strategies.DDPStrategy  # as Lightning, by position


def test_environment_variables_give_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "ddp")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    trainer = Trainer(**QUIET)
    assert type(trainer.strategy) is strategies.DDPStrategy
    assert trainer.max_epochs == 7


def test_it_trains(tmp_path: Any) -> None:
    trainer = Trainer(fast_dev_run=2, enable_progress_bar=False, enable_model_summary=False, **QUIET)
    trainer.fit(BoringModel())
    assert trainer.global_step == 2


def test_every_name_leads_to_a_public_class() -> None:
    assert set(PLUGINS.values()) <= set(strategies.__all__)


def test_did_you_mean() -> None:
    assert did_you_mean("micro_batches", ["balance", "microbatches"]) == "; did you mean 'microbatches'?"
    assert did_you_mean("adamm", ["adam", "Adam", "nadam"]) == "; did you mean 'Adam' or 'adam' or 'nadam'?"
    assert did_you_mean("max_epoch", ["max_epochs", "max_time"]) == "; did you mean 'max_epochs'?"
    assert did_you_mean("fp16", ["none", "fp16_compress"]) == "; did you mean 'fp16_compress'?"
    assert did_you_mean("zzz", ["b", "a"]) == "; valid names: a, b"
    assert did_you_mean("zzz", []) == "; valid names: none"
    assert did_you_mean("zzz", ["b", "a"], or_list=False) == ""
    many = [f"name_{index}" for index in range(30)]
    assert did_you_mean("xx_29", many).startswith("; the nearest of 30 valid names: ")


class OwnIterator(DataLoader):
    """A loader that goes through its batches in a generator of its own."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class WithState:
    """Three batches an epoch, which go on where a state says."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.place % len(self), len(self)):
            self.place += 1
            yield torch.full((2, 32), float(self.place))

    def __len__(self) -> int:
        return 3

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


LOADERS: dict[str, Callable[[], Any]] = {
    "by index": lambda: DataLoader(RandomDataset(32, 4), shuffle=True),
    "own iterator": lambda: OwnIterator(RandomDataset(32, 4)),
    "stream": lambda: DataLoader(RandomIterableDataset(32, 4)),
    "several": lambda: CombinedLoader([DataLoader(RandomDataset(32, 4)), OwnIterator(RandomDataset(32, 4))]),
}


class FirstLoader(BoringModel):
    """Trains on the batches of the first of several loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0] if isinstance(batch, list) else batch, batch_idx)


class Copies(pl.Callback):
    """Copies the other callbacks, and through them the Trainer, in the middle of an epoch."""

    copies: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.current_epoch == 1:
            self.copies = deepcopy([callback for callback in trainer.callbacks if callback is not self])


def fitted(loader: Callable[[], Any], *callbacks: pl.Callback, **kwargs: Any) -> Trainer:
    trainer = Trainer(
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=0,
        enable_model_summary=False,
        callbacks=[TQDMProgressBar(refresh_rate=0), *callbacks],
        **{**QUIET, **kwargs},
    )
    trainer.fit(FirstLoader(), loader())
    return trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOADERS)
def test_it_can_be_pickled_and_copied(name: str) -> None:
    copying = Copies()
    trainer = fitted(LOADERS[name], copying)
    assert copying.copies.pop(0).trainer.current_epoch == 1
    for copy in (pickle.loads(pickle.dumps(trainer)), deepcopy(trainer), deepcopy(trainer.callbacks)[0].trainer):
        assert (copy.global_step, copy.current_epoch) == (6, 2)
        assert [type(loader) for loader in copy.fit_loop._combined_loader.flattened] == [
            type(loader) for loader in trainer.fit_loop._combined_loader.flattened
        ]
    copy.fit_loop.max_epochs = 3
    copy.fit(FirstLoader(), LOADERS[name]())
    assert copy.global_step == 9


@pytest.mark.filterwarnings("ignore")
def test_ddp_on_one_device_leaves_no_thread_and_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread of its own
    before = set(threading.enumerate())
    with mock.patch.dict(os.environ):
        trainer = fitted(LOADERS["by index"], strategy="ddp")
        torch.distributed.destroy_process_group()
    assert set(threading.enumerate()) <= before
    assert pickle.loads(pickle.dumps(trainer)).global_step == deepcopy(trainer).global_step == 6


class NamedDevices(CPUAccelerator):
    """One whose devices are no ``torch.device``."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        return ["place"] * devices


def test_an_accelerator_may_have_devices_of_its_own() -> None:
    trainer = Trainer(**{**QUIET, "accelerator": NamedDevices(), "devices": 2, "strategy": "ddp"})
    assert trainer.strategy.parallel_devices == ["place", "place"]


@pytest.mark.parametrize("cls", [pl.Trainer, Trainer])
def test_profilers_warnings_and_errors_name_lightnings_classes(cls: type[pl.Trainer], tmp_path: Path) -> None:
    trainer = cls(fast_dev_run=2, enable_model_summary=False, profiler="simple", enable_progress_bar=False, **QUIET)
    trainer.fit(BoringModel())
    assert "[_TrainingEpochLoop].train_dataloader_next" in trainer.profiler.recorded_durations
    trainer.fit_loop._combined_loader._iterator = iter(trainer.fit_loop._combined_loader)._iterator
    trainer.fit_loop._combined_loader.limits = 0
    iter(trainer.fit_loop._combined_loader)
    with pytest.warns(UserWarning, match="Total length of `CombinedLoader` across ranks is zero"):
        has_len_all_ranks(trainer.fit_loop._combined_loader, trainer.strategy)
    sequential = CombinedLoader([DataLoader(RandomDataset(32, 4))], "sequential")
    trainer = cls(max_epochs=1, enable_model_summary=False, enable_progress_bar=False, **QUIET)
    with pytest.raises(ValueError, match="`_FitLoop` does not support the `CombinedLoader"):
        trainer.fit(FirstLoader(), sequential)
    assert str(trainer.fit_loop.epoch_loop._results).startswith("_ResultCollection(")


@pytest.mark.parametrize("cls", [pl.Trainer, Trainer])
def test_errors_name_the_strategy_as_the_user_did(cls: type[pl.Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytorch_lightning.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match=r"strategy='ddp'\)` is not compatible with an interactive"):
        cls(strategy="ddp", **{**QUIET, "devices": 2})


class Restarting(pl.Callback):
    """Notes ``fit_loop.restarting`` in every hook of training and validation, and saves in the middle of epoch 1."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[tuple[str, bool]]()

    def _note(self, trainer: pl.Trainer, hook: str) -> None:
        self.seen.append((hook, trainer.fit_loop.restarting))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer, "epoch start")

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self._note(trainer, "batch end")
        if trainer.global_step == 4 and not self.path.exists():
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer, "validation end")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer, "epoch end")


class WithPlateau(BoringModel):
    """Halves its learning rate at the end of every epoch, whatever the metric."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "validation"}}


@pytest.mark.filterwarnings("ignore")
def test_hooks_of_a_resumed_epoch_see_that_it_restarts(tmp_path: Path) -> None:
    def trained(cls: type[pl.Trainer], checkpoint: Path | None) -> tuple[Any, float]:
        callback = Restarting(tmp_path / f"{cls.__module__}.ckpt")
        trainer = cls(
            max_epochs=3, enable_model_summary=False, enable_progress_bar=False, callbacks=[callback], **QUIET
        )
        validation = DataLoader(RandomDataset(32, 1))
        trainer.fit(WithPlateau(), WithState(), validation, ckpt_path=checkpoint)
        return callback.seen, trainer.optimizers[0].param_groups[0]["lr"]

    whole, rate = trained(Trainer, None)
    assert not any(restarting for _, restarting in whole)
    resumed, own = trained(Trainer, tmp_path / "trainer.trainer.ckpt")
    trained(pl.Trainer, None)
    lightnings, _ = trained(pl.Trainer, tmp_path / "pytorch_lightning.trainer.trainer.ckpt")
    assert resumed == lightnings and ("epoch end", True) in resumed
    assert own == rate  # Lightning leaves out the scheduler at the end of the resumed epoch


class CountsCalls(BoringModel):
    """Counts the functions written in Python that each training step calls, the loop's included."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.marks = 0, []

    def on_train_start(self) -> None:
        sys.setprofile(self._follow)

    def on_train_end(self) -> None:
        sys.setprofile(None)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.marks.append(self.count)
        return super().training_step(batch, batch_idx)

    def _follow(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event == "call"


def calls_of_a_step(make: Callable[..., pl.Trainer], tmp_path: Path) -> float:
    model = CountsCalls()
    options = {"max_steps": 20, "limit_val_batches": 0, "enable_progress_bar": False, "enable_model_summary": False}
    try:
        make(default_root_dir=tmp_path, **options, **QUIET).fit(model)
    finally:
        sys.setprofile(None)
    return median(after - before for before, after in pairwise(model.marks[5:]))


def test_a_step_costs_little_more_than_lightnings(tmp_path: Path) -> None:
    """Times are measured by ``python -m benchmarks trainer_overhead``, whose goal is 1.15; calls do not vary."""
    lightnings = calls_of_a_step(pl.Trainer, tmp_path)
    assert lightnings > 0
    assert calls_of_a_step(Trainer, tmp_path) / lightnings <= 1.05
