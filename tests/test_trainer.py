"""trainer.Trainer: the strategies' names, and otherwise Lightning's Trainer to the letter."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel

import strategies
from strategies.names import PLUGINS, did_you_mean
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
    with pytest.raises(TypeError, match="Trainer has no argument 'max_epoch'; did you mean 'max_epochs'"):
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


def test_names_cost_no_import_of_lightning() -> None:
    code = "import sys, strategies, strategies.names; sys.exit(any('lightning' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
