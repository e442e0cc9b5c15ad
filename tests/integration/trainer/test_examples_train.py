"""The examples' models learn what the README says, and their checkpoints load without this package."""

import contextlib
import io
import math
import subprocess
import sys

import pytest
from paths import ROOT
from pytorch_lightning import Trainer, seed_everything

from examples.digits import DigitClassifier, Digits
from examples.gpt import GPT, generate
from examples.hf_finetune import CausalModel
from examples.report import Report
from examples.text import PythonDocs

TINY = {"block_size": 16, "width": 16, "num_blocks": 1, "num_heads": 2}


def one_process_trainer(tmp_path, **kwargs):
    kwargs = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **kwargs}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **kwargs)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A tiny GPT after one short epoch: trainer, model, data and what was printed."""
    seed_everything(0, verbose=False)
    data, model = PythonDocs(block_size=16, batch_size=64), GPT(**TINY, learning_rate=1e-2)
    trainer = one_process_trainer(
        tmp_path_factory.mktemp("gpt"),
        max_epochs=1,
        limit_train_batches=120,
        limit_val_batches=10,
        callbacks=[Report(num_characters=20)],
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(model, data)
    return trainer, model, data, printed.getvalue()


def test_gpt_learns(fitted):
    trainer, _, data, _ = fitted
    metrics = trainer.callback_metrics
    assert metrics["val_loss"] < data.unigram_loss - 0.3
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]), rel=1e-3)
    assert 0.25 < metrics["val_accuracy"] < 1
    assert "train_loss" in metrics


def test_gpt_decays_matrices_only(fitted):
    trainer, model, _, _ = fitted
    decayed, others = trainer.optimizers[0].param_groups
    assert decayed["weight_decay"] > 0 == others["weight_decay"]
    assert {p.ndim for p in others["params"]} == {1}
    grouped = [id(p) for group in (decayed, others) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_report_says_what_was_achieved(fitted):
    trainer, model, data, printed = fitted
    assert f" {trainer.callback_metrics['val_loss']:.3f} nats" in printed
    assert f"{data.unigram_loss:.3f}" in printed
    assert "tokens/s" in printed
    assert "balance" not in printed  # one process has none
    assert trainer.checkpoint_callback.best_model_path in printed
    assert printed.endswith(generate(model, 'The "', 20) + "\n")


def test_report_prints_the_balance_of_whatever_strategy_has_one(fitted, capsys):
    trainer, model, _, _ = fitted
    trainer.strategy.balance = [2, 3]
    Report(num_characters=1).on_fit_end(trainer, model)
    del trainer.strategy.balance
    assert "[2, 3]" in capsys.readouterr().out


def test_report_does_without_a_validation(tmp_path, capsys):
    trainer = one_process_trainer(tmp_path, max_steps=1, enable_checkpointing=False, callbacks=[Report()])
    trainer.fit(GPT(**TINY), PythonDocs(block_size=16))
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "loss" not in printed


@pytest.mark.slow
def test_checkpoint_loads_without_relay(fitted):
    trainer, model, _, _ = fitted
    script = (
        "import sys; from examples.gpt import GPT, generate; "
        "model = GPT.load_from_checkpoint(sys.argv[1]); print(generate(model, 'The \"', 20)); "
        "assert not {'strategies', 'trainer'} & set(sys.modules)"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, trainer.checkpoint_callback.best_model_path]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout == generate(model, 'The "', 20) + "\n"


def test_digits_are_classified(tmp_path):
    seed_everything(0, verbose=False)
    data = Digits()
    assert not set(data.train_set.indices) & set(data.validation_set.indices)
    assert len(data.train_set) + len(data.validation_set) == 1797
    trainer = one_process_trainer(tmp_path, max_epochs=3, enable_checkpointing=False)
    trainer.fit(DigitClassifier(), data)
    assert trainer.callback_metrics["val_accuracy"] > 0.95


def test_a_hugging_face_model_learns(tmp_path, capsys):
    seed_everything(0, verbose=False)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    data, model = PythonDocs(block_size=16, batch_size=64), CausalModel("llama", sizes, 16, learning_rate=1e-2)
    limits = {"max_epochs": 1, "limit_train_batches": 120, "limit_val_batches": 10}
    trainer = one_process_trainer(tmp_path, **limits, callbacks=[Report(num_characters=20)])
    trainer.fit(model, data)
    assert trainer.callback_metrics["val_loss"] < data.unigram_loss - 0.3
    assert capsys.readouterr().out.endswith(generate(model, 'The "', 20) + "\n")
    loaded = CausalModel.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert generate(loaded, 'The "', 20) == generate(model, 'The "', 20)
