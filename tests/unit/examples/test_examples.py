"""The examples do what the README says: held-out text, models that learn, configurations that differ in one block."""

import math
import sys
from collections import Counter

import pytest
import torch
import yaml
from paths import ROOT
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.cli import LightningCLI

from examples.gpt import GPT, generate, warmup_cosine
from examples.hf_finetune import CausalModel
from examples.report import Report
from examples.text import PythonDocs, decode, encode, python_documentation, unigram_loss

CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
OF_THE_GPT = [path for path in CONFIGS if path.stem != "hf_pipeline"]
TINY = {"block_size": 16, "width": 16, "num_blocks": 1, "num_heads": 2}


def one_process_trainer(tmp_path, **kwargs):
    kwargs = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **kwargs}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **kwargs)


# Text


def test_tokens_are_ascii_codes():
    assert encode("A…\n").tolist() == [65, 63, 10]
    assert decode(encode('"with" statement\n')) == '"with" statement\n'


def test_validation_text_is_real_and_unseen():
    data = PythonDocs()
    train, validation = decode(data.train_tokens), decode(data.validation_tokens)
    assert len(train) > 250_000
    assert len(validation) == pytest.approx(0.1 * (len(train) + len(validation)), rel=0.01)
    assert train + validation == decode(encode(python_documentation()))
    assert 'The "with" statement' in train + validation
    # The two at the ends are cut by the split.
    unseen = [p for p in validation.split("\n\n")[1:] if p]
    assert len(unseen) > 50
    assert not set(unseen) & set(train.split("\n\n"))


def test_batches_hold_consecutive_blocks_and_their_next_tokens():
    data = PythonDocs(block_size=10, batch_size=4)
    tokens, targets = next(iter(data.val_dataloader()))
    assert torch.equal(tokens.flatten(), data.validation_tokens[:40])
    assert torch.equal(targets.flatten(), data.validation_tokens[1:41])


def test_training_order_is_shuffled_and_seeded():
    first, again, other = (next(iter(PythonDocs(seed=seed).train_dataloader()))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_unigram_loss_against_a_hand_count():
    # "aab" counts a: 2 + 1, b: 1 + 1, each of the other 126 characters: 1; together 131.
    expected = -(math.log(3 / 131) + math.log(2 / 131) + math.log(1 / 131)) / 3
    assert unigram_loss(encode("aab"), encode("abc")) == pytest.approx(expected, rel=1e-5)


def test_unigram_loss_of_the_data_module():
    data = PythonDocs()
    counts = Counter(decode(data.train_tokens))
    total = sum(counts.values()) + 128
    losses = [-math.log((counts[character] + 1) / total) for character in decode(data.validation_tokens)]
    assert data.unigram_loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


# Character GPT


def test_gpt_does_not_look_ahead():
    seed_everything(0, verbose=False)
    model = GPT(**TINY).eval()
    tokens = encode("0123456789abcdef")[None]
    changed = tokens.clone()
    changed[0, 9] = 120
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.allclose(before[:9], after[:9], atol=1e-6)
    assert not torch.allclose(before[9:], after[9:], atol=1e-3)


def test_learning_rate_warms_up_then_falls():
    factors = [warmup_cosine(step, 4, 24) for step in range(30)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[14] == pytest.approx(0.55)
    assert factors[4:25] == sorted(factors[4:25], reverse=True)
    assert factors[24:] == [pytest.approx(0.1)] * 6


def test_generate_samples_from_the_model():
    model = GPT(**TINY, dropout=0.5)
    assert generate(model, "ab", 30) == generate(model, "ab", 30) != generate(model, "ab", 30, seed=1)
    assert model.training
    with torch.no_grad():
        model.sequential_module[-1].bias[ord("x")] = 100.0
    assert generate(model, "ab", 30) == "ab" + 30 * "x"  # past the block size, too


# Digits


# Configurations and scripts


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_the_experiment(path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["python -m trainer"])
    cli = LightningCLI(
        run=False,
        args=["--config", str(path)],
        parser_kwargs={"parser_mode": "omegaconf"},
        save_config_callback=None,
    )
    assert isinstance(cli.model, CausalModel if path.stem == "hf_pipeline" else GPT)
    assert cli.datamodule.hparams.block_size == cli.model.hparams.block_size
    assert any(isinstance(callback, Report) for callback in cli.trainer.callbacks)


def test_configs_differ_in_the_strategy_only():
    assert {path.stem for path in OF_THE_GPT} == {"single", "ddp", "zero", "pipeline"}
    experiments = [yaml.safe_load(path.read_text()) for path in OF_THE_GPT]
    strategies = [experiment["trainer"].pop("strategy") for experiment in experiments]
    assert all(experiment == experiments[0] for experiment in experiments)
    assert len({str(strategy) for strategy in strategies}) == len(OF_THE_GPT)


def test_the_hugging_face_config_has_the_text_of_the_others() -> None:
    ours, theirs = (
        yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text()) for name in ("hf_pipeline", "pipeline")
    )
    assert ours["data"] == theirs["data"]


def test_scripts_differ_in_one_argument():
    single, pipeline = ((ROOT / "examples" / f"train_{name}.py").read_text() for name in ("single", "pipeline"))
    differing = [pair for pair in zip(single.splitlines(), pipeline.splitlines(), strict=True) if pair[0] != pair[1]]
    assert [(a.strip(), b.strip()) for a, b in differing] == [
        ('strategy="single_device",', 'strategy="rpc_sequential",')
    ]
    assert "__main__" not in pipeline
