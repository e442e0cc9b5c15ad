"""Each of 40 planted faults is found and attributed, and sound runs are not called wrong; all run in this process."""

import copy
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
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


def test_there_are_forty_faults() -> None:
    assert len(FAULTS) == 40


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("SGD", marks=pytest.mark.slow)])
@pytest.mark.parametrize("extra", ["none", "dropout", "batch norm", "counting", "numpy"])
def test_the_same_run_is_equal(extra: str, optimizer: str, folder: Path) -> None:
    found = certificate(folder, "", extra, optimizer)
    assert (found.verdict, found.origin) == (EQUAL, None)
    assert set(found.largest) >= {"losses", "gradients", "global norm", "parameters", "optimizer states", "checkpoint"}
