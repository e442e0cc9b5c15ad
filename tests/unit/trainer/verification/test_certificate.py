"""Each of 40 planted faults is found and attributed, and sound runs are not called wrong; all run in this process."""

import copy
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import alike, batches
from pytorch_lightning import LightningDataModule
from verified_nets import FAULTS, PlantedStrategy, VerifiedData, VerifiedNet

from trainer import Trainer
from trainer.verification.certificate import EQUAL, WRONG, Certificate, ReferenceRuns, certify
from trainer.verification.compare import rounding_of
from trainer.verification.observed_run import ObservedRun
from trainer.verification.process import (
    DrawnBatches,
    Execution,
    VerifiedJob,
    draw_batches,
    read_job,
    run_execution,
    trainer_of_run,
    write_job,
)

STEPS = 3


class SeveralLoaders(VerifiedNet):
    """Notes the batches of each loader."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch)
        return sum(self.loss(own) for own in batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.seen.append([dataloader_idx, batch])
        return super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.seen.append([dataloader_idx, batch])
        return super().predict_step(batch, batch_idx)


class ListsOfLoaders(LightningDataModule):
    """Lists of loaders of different lengths."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def loaders(self, seed: int) -> list[Any]:
        return [batches((8, 7, 5)[i:], seed=seed + i) for i in range(self.number)]

    def train_dataloader(self) -> list[Any]:
        return self.loaders(10)

    def val_dataloader(self) -> list[Any]:
        return self.loaders(20)

    def predict_dataloader(self) -> list[Any]:
        return self.loaders(30)


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def job(model: Any, **settings: Any) -> VerifiedJob:
    return VerifiedJob(
        Trainer, model, VerifiedData(), {"accelerator": "cpu", "precision": "64-true"}, STEPS, **settings
    )


@cache
def drawn(folder: Path) -> DrawnBatches:
    own = job(VerifiedNet())
    return draw_batches(trainer_of_run(folder, own, Execution("drawing"), []), own)


def ran(folder: Path, model: Any, execution: Execution) -> ObservedRun:
    return run_execution(folder, job(model), execution, copy.deepcopy(drawn(folder)))


@cache
def reference(folder: Path, kind: type, extra: str, optimizer: str) -> ObservedRun:
    return ran(folder, kind(extra, optimizer), Execution("one process"))


def certificate(folder: Path, fault: str, extra: str, optimizer: str) -> Certificate:
    one = reference(folder, VerifiedNet, extra, optimizer)
    own = Execution("the strategy", (PlantedStrategy, {"fault": fault}))
    actual = ran(folder, VerifiedNet(extra, optimizer), own)
    return certify(actual, ReferenceRuns(one), rounding_of("64-true", one.narrowest))


QUICK = (
    *("gradient of a layer scaled", "all gradients scaled", "micro-batch left out of the backward pass"),
    *("only the last micro-batch trains", "norm of one stage", "weight missing in the optimizer"),
    *("hyperparameters one step late", "stale copy of a tied weight", "buffer not carried", "optimizer state lost"),
)
"""Faults of every kind; the others are marked slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAULTS]
)
def test_a_planted_fault_is_found_and_attributed(name: str, folder: Path) -> None:
    fault = FAULTS[name]
    found = certificate(folder, name, fault.extra, fault.optimizer)
    assert found.verdict == WRONG and found.origin is not None
    assert (found.origin.part, found.origin.layer, found.origin.step) == (fault.part, fault.layer, fault.step)
    assert fault.what in found.origin.what
    assert found.origin.advice


def test_a_model_with_parametrized_layers_is_sent_to_its_process(tmp_path: Path) -> None:
    model = VerifiedNet()
    torch.nn.utils.parametrizations.weight_norm(model.sequential_module[4])
    write_job(tmp_path, job(model))
    sent = read_job(tmp_path).model
    assert torch.equal(sent.sequential_module[4].weight, model.sequential_module[4].weight)
    assert sent.state_dict().keys() == model.state_dict().keys()


def test_a_model_with_unsigned_buffers_is_sent_to_its_process(tmp_path: Path) -> None:
    model = VerifiedNet()
    model.register_buffer("codes", torch.tensor([3, 4], dtype=torch.uint16))
    write_job(tmp_path, job(model))
    codes = read_job(tmp_path).model.codes
    assert codes.dtype is torch.uint16 and codes.tolist() == [3, 4]


@pytest.mark.parametrize("number", [1, 2])
def test_batches_of_lists_of_loaders_are_those_of_fit_and_predict(number: int, folder: Path) -> None:
    model, of_lightning, data = SeveralLoaders(), SeveralLoaders(), ListsOfLoaders(number)
    own = VerifiedJob(Trainer, model, data, {"accelerator": "cpu", "precision": "64-true"}, STEPS)
    drawing = Execution("drawing of lists")
    drawn = draw_batches(trainer_of_run(folder, own, drawing, []), own)
    found = run_execution(folder, own, Execution("one process with lists"), drawn)
    limits = {"limit_val_batches": 1, "limit_predict_batches": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = Trainer(accelerator="cpu", precision="64-true", logger=False, enable_checkpointing=False, **limits)
    trainer.fit(of_lightning, datamodule=ListsOfLoaders(number))
    trainer.predict(of_lightning, datamodule=ListsOfLoaders(number))
    alike(model.seen, of_lightning.seen)
    assert len(model.seen) == STEPS + 2 * number
    outputs = [name for name in found.validation if name.startswith("output")]
    assert outputs == ["output", "output of loader 1"][:number]


def test_there_are_forty_faults() -> None:
    assert len(FAULTS) == 40


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("SGD", marks=pytest.mark.slow)])
@pytest.mark.parametrize("extra", ["none", "dropout", "batch norm", "counting", "numpy"])
def test_the_same_run_is_equal(extra: str, optimizer: str, folder: Path) -> None:
    found = certificate(folder, "", extra, optimizer)
    assert (found.verdict, found.origin) == (EQUAL, None)
    assert set(found.largest) >= {"losses", "gradients", "global norm", "parameters", "optimizer states", "checkpoint"}
