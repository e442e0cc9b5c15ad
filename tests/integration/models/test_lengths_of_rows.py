"""``microbatch_tokens``: micro-batches of rows of similar length train as one process does with the padded batch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from model_families import FAMILIES, Trained, workers_import_transformers
from parity import compare, fit, one_device
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from verifying import verified

from strategies import RPCSequentialStrategy

ROWS, TOKENS, VOCABULARY = 9, 24, 64
BY_NAME = {family.name: family for family in FAMILIES}


def texts(columns_of_labels: int = 0) -> list[dict[str, Tensor]]:
    """Batches of rows of 2 to 14 tokens, padded to 14, some with labels that are shorter than the text."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        lengths = torch.randint(2, 15, (ROWS,), generator=generator)
        mask = (torch.arange(14) < lengths[:, None]).long()
        ids = torch.randint(3, VOCABULARY, (ROWS, 14), generator=generator) * mask
        labels = ids.masked_fill(mask == 0, -100)
        if columns_of_labels:
            short = torch.arange(columns_of_labels) < (lengths[:, None] // 2).clamp(min=1)
            labels = torch.where(short, ids[:, :columns_of_labels], -100).masked_fill(~short, -100)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def loader(batches: Callable[[], list[dict[str, Tensor]]]) -> DataLoader:
    return DataLoader(batches(), batch_size=None)


def with_classes() -> list[dict[str, Tensor]]:
    return [{**batch, "labels": torch.arange(ROWS) % 2} for batch in texts()]


class Labelled(Trained):
    """Trains on its labels, and returns the first token of each row, which tells in which order the rows come back."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self.model(**batch).logits, batch["labels"]
        if not self.model.config.is_encoder_decoder and labels.dim() == 2:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return cross_entropy(logits.flatten(0, -2), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "first": batch["input_ids"][:, 0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert torch.equal(outputs["first"], batch["input_ids"][:, 0])


CASES: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "causal": ("Llama", texts, {"schedule": "1f1b", "loss_weight": "tokens"}),
    "classes": ("RoBERTa", with_classes, {"schedule": "zb-h1"}),
    "to text": ("T5 decoder", partial(texts, 7), {"schedule": "interleaved", "loss_weight": "tokens"}),
}


def trained(name: str) -> None:
    workers_import_transformers()
    family_name, data, options = CASES[name]
    family = BY_NAME[family_name]
    settings: dict[str, Any] = {
        "train": partial(loader, data),
        "max_epochs": 1,
        "accumulate_grad_batches": 2 if name == "classes" else 1,
    }
    make = partial(Labelled, family.make)
    single = fit(make, one_device(), 1, **settings)
    module = None if family.is_found else f"model.{family.path}"
    strategy = RPCSequentialStrategy("even", microbatch_tokens=TOKENS, module=module, **options)
    compare(fit(make, strategy, 2, **settings), single, family.tolerance)


class Dropped(Labelled):
    """Drops values in all of its layers."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2


def masks() -> None:
    workers_import_transformers()
    make, settings = (
        partial(Dropped, BY_NAME["RoBERTa"].make),
        {"train": partial(loader, with_classes), "max_epochs": 1},
    )
    strategies = (RPCSequentialStrategy("even", microbatch_tokens=TOKENS, schedule="1f1b") for _ in range(2))
    one, two = (fit(make, strategy, stages, **settings) for stages, strategy in enumerate(strategies, 1))
    compare(two, one, BY_NAME["RoBERTa"].tolerance)


@pytest.mark.slow
def test_masks_do_not_depend_on_the_number_of_stages() -> None:
    run(masks)


class Packed(Labelled):
    """Gets several texts in one row, which ``position_ids`` tell apart; there is no mask."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        self.model.config.use_cache = False  # with a cache, transformers does not look for several texts

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        return cross_entropy(logits[:, :-1].flatten(0, -2), batch["input_ids"][:, 1:].flatten())


def packed() -> list[dict[str, Tensor]]:
    places = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((5, 9), (14,), (3, 4, 7), (13, 1))]
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCABULARY, (2, 4, 14), generator=generator)
    return [{"input_ids": each, "position_ids": torch.stack(places)} for each in ids]


class WithBoundaries(Packed):
    """Also gets where texts begin and end, as kernels for packed rows want it: a tensor that has no row per sample."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(**batch).logits
        return cross_entropy(logits[:, :-1].flatten(0, -2), batch["input_ids"][:, 1:].flatten())


def with_boundaries() -> list[dict[str, Tensor]]:
    boundaries = torch.tensor([0, 5, 14, 28, 31, 35, 42, 55, 56], dtype=torch.int32)
    return [{**batch, "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries} for batch in packed()]


def trained_with_boundaries() -> str:
    workers_import_transformers()
    make = partial(WithBoundaries, BY_NAME["Llama"].make)
    settings: dict[str, Any] = {"train": partial(loader, with_boundaries), "max_epochs": 1}
    single = fit(make, one_device(), 1, **settings)
    compare(fit(make, RPCSequentialStrategy("even", 2, schedule="gpipe"), 2, **settings), single)
    with pytest.raises(MisconfigurationException) as caught:
        fit(make, RPCSequentialStrategy("even", 2, schedule="1f1b"), 2, **settings)
    return str(caught.value)


@pytest.mark.slow
def test_boundaries_of_packed_texts() -> None:
    """Blocks get them whole under ``gpipe``; schedules that split the batch refuse them by name."""
    assert "batch['position_ids'] has 4, batch['cu_seq_lens_q'] has 9" in run(trained_with_boundaries)


def trained_packed() -> None:
    workers_import_transformers()
    make, settings = partial(Packed, BY_NAME["Llama"].make), {"train": partial(loader, packed), "max_epochs": 1}
    single = fit(make, one_device(), 1, **settings)
    for schedule in ("gpipe", "1f1b"):
        compare(fit(make, RPCSequentialStrategy("even", 2, schedule=schedule), 2, **settings), single)


@pytest.mark.slow
def test_packed_rows() -> None:
    run(trained_packed)


def test_a_causal_model() -> None:
    run(trained, "causal")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classes", "to text"])
def test_other_models(name: str) -> None:
    run(trained, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "gpipe"}, "schedule='gpipe' runs training_step once for the whole batch"),
        ({"schedule": "auto"}, "schedule='auto' has a fixed number of micro-batches"),
        ({"schedule": "1f1b", "microbatches": 4}, "microbatches=4 gives their number"),
        ({"schedule": "1f1b", "tokens": 0}, "microbatch_tokens must be a whole number of at least 1, got 0"),
        ({"schedule": "1f1b", "tokens": 1.5}, "microbatch_tokens must be a whole number of at least 1, got 1.5"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    tokens = options.pop("tokens", 100)
    with pytest.raises(MisconfigurationException, match=message):
        RPCSequentialStrategy(microbatch_tokens=tokens, **options)


class Splits(Labelled):
    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        return [batch]


def refused() -> list[str]:
    workers_import_transformers()
    family, found = BY_NAME["Llama"], []
    unknown = [{**batch, "pixels": torch.zeros(ROWS, 14, 2)} for batch in texts()]
    for make, data in ((Splits, texts), (Labelled, lambda: unknown)):
        strategy = RPCSequentialStrategy("even", microbatch_tokens=TOKENS, schedule="1f1b", loss_weight="tokens")
        with pytest.raises(MisconfigurationException) as caught:
            fit(partial(make, family.make), strategy, 2, train=partial(loader, data), max_epochs=1)
        found.append(str(caught.value))
    return found


def test_who_makes_the_microbatches_is_clear() -> None:
    two, columns = run(refused)
    assert "Splits.split_batch both make the micro-batches" in two
    assert "'pixels' also has 14 columns" in columns and "split_batch(self, batch, num_microbatches)" in columns


def verdicts() -> dict[str, str]:
    workers_import_transformers()
    found = {}
    for name, (family_name, data, options) in CASES.items():
        family = BY_NAME[family_name]
        module = None if family.is_found else f"model.{family.path}"
        strategy = RPCSequentialStrategy("even", microbatch_tokens=TOKENS, module=module, **options)
        found[name] = verified(Labelled(family.make), loader(data), strategy, steps=2)["verdict"]
    return found


class MeanOverColumns(Labelled):
    """Its loss depends on how many columns of padding there are."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(**batch).logits
        return cross_entropy(logits[:, :-1].flatten(0, -2), batch["labels"][:, 1:].flatten()) + logits.square().mean()


def verdict_of_a_mean_over_columns() -> dict[str, Any]:
    workers_import_transformers()
    strategy = RPCSequentialStrategy("even", microbatch_tokens=TOKENS, schedule="1f1b", loss_weight="tokens")
    return verified(MeanOverColumns(BY_NAME["Llama"].make), loader(texts), strategy, steps=2)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_verify_finds_a_loss_that_depends_on_padding() -> None:
    found = run(verdict_of_a_mean_over_columns, timeout_seconds=280)
    assert (found["verdict"], found["origin"]["part"]) == ("wrong", "losses")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_verify_finds_rows_of_similar_length_equal() -> None:
    assert set(run(verdicts, timeout_seconds=280).values()) == {"equal to rounding"}
