"""What people do with models of ``transformers`` in a LightningModule, under a pipeline; and what is refused."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import OWN_SERVER, run
from model_families import FAMILIES, SIZES, Family, text, workers_import_transformers
from parity import compare, fit, one_device
from pytorch_lightning import Callback, LightningModule
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy

BY_NAME = {family.name: family for family in FAMILIES}
ALBERT = Family("ALBERT", "AlbertForMaskedLM", "")


class Trained(LightningModule):
    """Trains a model on its own loss.

    Args:
        family: Of the model.
        change: Changes the model once it has been made.
    """

    def __init__(self, family: Family, change: Callable[[Any], object] = id) -> None:
        super().__init__()
        self.model = family.make()
        change(self.model)
        self.losses: list[float] = []
        self.seen: list[Tensor] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Generates(Trained):
    """Generates text in a validation step."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        self.seen.append(self.model.generate(**given, use_cache=False, max_new_tokens=4, do_sample=False))


class Taught(Trained):
    """Learns from another model too, which is not pipelined."""

    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self.teacher = (
            replace(family, settings={**family.settings, "num_hidden_layers": 2}).make().requires_grad_(False)
        )

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            expected = self.teacher(**batch).logits
        output = self.model(**batch)
        loss: Tensor = output.loss + mse_loss(output.logits, expected)
        return loss


class TeachesItself(Trained):
    """Calls the pipelined model under ``no_grad`` before it trains it."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            expected = self.model(**batch).logits.flip(0)
        output = self.model(**batch)
        loss: Tensor = output.loss + mse_loss(output.logits, expected)
        return loss


class Caches(Trained):
    """Asks for a cache although it trains."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=True).loss
        return loss


class Adds(Trained):
    """Adds to the hidden state between two blocks."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.model.transformer.wte(batch["input_ids"])
        for block in self.model.transformer.h:
            hidden = block(hidden) + 0.1
        return hidden.square().mean()


def switch_on_layerdrop(model: Any) -> None:
    model.model.decoder.layerdrop = 0.1


def trained(family: Family, kind: Callable[[Family], Trained], strategy: Any, devices: int) -> Any:
    batches = [family.batch(rows, length) for rows, length in SIZES]
    data = partial(DataLoader, batches, batch_size=None)
    val = partial(DataLoader, batches[:1], batch_size=None) if kind is Generates else None
    return fit(partial(kind, family), strategy, devices, train=data, val=val, max_epochs=1)


EQUAL: dict[str, tuple[str, Any, str, str | list[str] | None]] = {
    "generate, decoder": ("Llama", Generates, "1f1b", None),
    "generate, encoder": ("T5 encoder", Generates, "gpipe", "model.encoder.block"),
    "gradient checkpointing": (
        "Llama",
        partial(Trained, change=lambda model: model.gradient_checkpointing_enable()),
        "1f1b",
        None,
    ),
    "gradient checkpointing, gpipe": (
        "BERT",
        partial(Trained, change=lambda model: model.gradient_checkpointing_enable({"use_reentrant": True})),
        "gpipe",
        None,
    ),
    "gradient checkpointing, both halves": (
        "T5 encoder",
        partial(Trained, change=lambda model: model.gradient_checkpointing_enable()),
        "1f1b",
        None,
    ),
    "gradient checkpointing, both halves, gpipe": (
        "T5 encoder",
        partial(Trained, change=lambda model: model.gradient_checkpointing_enable()),
        "gpipe",
        None,
    ),
    "eager attention": (
        "GPT-2",
        partial(Trained, change=lambda model: model.set_attn_implementation("eager")),
        "gpipe",
        None,
    ),
    "teacher": ("Llama", Taught, "1f1b", "model.model.layers"),
    "teacher, gpipe": ("Llama", Taught, "gpipe", "model.model.layers"),
    "teacher, pipelined too": ("Llama", Taught, "gpipe", None),
    "teaches itself": ("GPT-2", TeachesItself, "gpipe", None),
}
"""Family, kind of training, schedule and path."""


def equal_one_process() -> dict[str, str]:
    """Returns for each case what differs."""
    workers_import_transformers()
    wrong = {}
    for name, (family, kind, schedule, path) in EQUAL.items():
        single = trained(BY_NAME[family], kind, one_device(), 1)
        strategy = RPCSequentialStrategy(schedule=schedule, microbatches=2, balance="even", module=path)
        try:
            outcome = trained(BY_NAME[family], kind, strategy, 2)
            # The losses of transformers are computed in float32.
            compare(outcome, single, 1e-6)
            assert [t.tolist() for t in outcome.model.seen] == [t.tolist() for t in single.model.seen]
            assert bool(single.model.seen) == (kind is Generates)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    return wrong


@pytest.mark.slow
def test_training_with_everything_around_the_model_is_that_of_one_process() -> None:
    assert run(equal_one_process, env=OWN_SERVER) == {}


class SavesInFit(Callback):
    """Saves the model and the part of it without a head at the end of the epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert not pl_module.model.config.use_cache

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        save(pl_module.model, self.folder)
        assert not pl_module.model.config.use_cache


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    model.base_model.save_pretrained(folder / "base")


def configurations_saved_in_fit() -> None:
    with tempfile.TemporaryDirectory() as name:
        before, within = Path(name) / "before", Path(name) / "within"
        make = partial(Trained, BY_NAME["Llama"], partial(save, folder=before))
        strategy = RPCSequentialStrategy(schedule="1f1b", microbatches=2, balance="even")
        data = partial(DataLoader, [text(4, 7)], batch_size=None)
        outcome = fit(make, strategy, 2, train=data, max_epochs=1, precision=32, callbacks=[SavesInFit(within)])
        written = sorted(path.relative_to(before) for path in before.rglob("*.json"))
        assert {"config.json", "generation_config.json", "base/config.json"} <= {str(path) for path in written}
        for path in written:
            assert (within / path).read_text() == (before / path).read_text(), path
        saved = load_file(within / "model.safetensors")
        for key, value in saved.items():
            assert torch.equal(value, outcome.parameters[f"model.{key}"]), key


def test_configurations_saved_within_fit_are_those_of_the_user() -> None:
    run(configurations_saved_in_fit, env=OWN_SERVER)


REFUSED: dict[str, tuple[Family, Any, str | None, str]] = {
    "LayerDrop": (
        BY_NAME["OPT"],
        partial(Trained, change=switch_on_layerdrop),
        None,
        r"model\.model\.decoder skips blocks at random in training \(layerdrop is 0\.1\).*layerdrop = 0",
    ),
    "LayerDrop of the configuration": (
        replace(BY_NAME["HuBERT"], settings={**BY_NAME["HuBERT"].settings, "layerdrop": 0.2}),
        Trained,
        None,
        r"model\.hubert\.encoder skips blocks at random in training \(config\.layerdrop is 0\.2\)",
    ),
    "one block for all layers": (ALBERT, Trained, None, "has no nn.Sequential or nn.ModuleList with at least 2 layers"),
    "two models": (
        BY_NAME["Llama"],
        Taught,
        None,
        r"training_step called 'teacher\.model\.layers' under no_grad, .* Use schedule='gpipe'",
    ),
    "a cache": (
        BY_NAME["Llama"],
        Caches,
        None,
        r"block model\.model\.layers\.0 gets a key-value cache as argument '(past_key_values|cache)' .*use_cache=False",
    ),
    "arithmetic": (
        BY_NAME["GPT-2"],
        Adds,
        "model.transformer.h",
        r"uses the output of block model\.transformer\.h\.0 in add, .* Move the operation into a block",
    ),
    "a pass under no_grad and 1f1b": (
        BY_NAME["GPT-2"],
        TeachesItself,
        None,
        r"called the pipelined module under no_grad, .* Use schedule='gpipe'",
    ),
}
"""Family, kind of training, path and the message."""


def messages() -> dict[str, str]:
    """Returns the message of each error."""
    found = {}
    for name, (family, kind, path, _) in REFUSED.items():
        strategy = RPCSequentialStrategy(schedule="1f1b", microbatches=2, balance="even", module=path)
        try:
            trained(family, kind, strategy, 2)
        except Exception as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    found: dict[str, str] = run(messages)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str, refusals: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match=REFUSED[name][3]):
        raise RuntimeError(refusals.get(name, "not refused"))
