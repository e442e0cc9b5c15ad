"""Weights of micro-batches: which labels are tokens, what a model's own weights may be, and sums over batches."""

import warnings
from collections import UserDict
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from strategies import RPCSequentialStrategy
from strategies.lightning.features.loss_weights import LossWeights, has_own_weights, warn_of_ignored_labels

LABELS = torch.tensor([[5, -100, 1, 0], [-100, -100, -100, -100], [-100, 2, 3, -100]])
"""Per row 3, 0 and 2 tokens; 2, 0 and 2 after a shift."""


class Holds(LightningModule):
    """A module around a model."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


class Weighs(LightningModule):
    """Weights micro-batches by its own method."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def microbatch_weight(self, microbatch: Any) -> Any:
        return self.weight


@dataclass
class Sample:
    x: Tensor
    labels: Tensor


def rows_of(labels: Tensor = LABELS, name: str = "labels") -> list[dict[str, Tensor]]:
    return [{"x": torch.zeros(1), name: row[None]} for row in labels]


def tokens(model: LightningModule, microbatches: list[Any]) -> list[float]:
    return LossWeights(model).of(microbatches)


def test_labels_that_are_not_ignored() -> None:
    model = Holds(nn.Linear(2, 2))
    assert tokens(model, rows_of()) == [3, 0, 2]
    assert tokens(model, [UserDict(row) for row in rows_of()]) == [3, 0, 2]
    assert tokens(model, [Sample(row["x"], row["labels"]) for row in rows_of()]) == [3, 0, 2]
    assert tokens(model, rows_of(LABELS[:, 0])) == [1, 0, 0]  # a label per row


def test_shifted_labels_come_first() -> None:
    both = [{**row, "shift_labels": row["labels"][:, :2]} for row in rows_of()]
    assert tokens(Holds(hugging_face("LlamaForCausalLM")), both) == [1, 0, 1]


@cache
def hugging_face(name: str) -> Any:
    """A tiny model of that class, with parameters that have no values."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    encoder_decoder = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    settings: dict[str, dict[str, Any]] = {
        "GPT2": {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2},
        "T5": {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
        "Bart": {"vocab_size": 11, "d_model": 8, **encoder_decoder, **heads},
    }
    cls = getattr(transformers, name)
    family = next((family for family in settings if name.startswith(family)), "")
    with torch.device("meta"):
        return cls(cls.config_class(**settings.get(family, {**small, "num_hidden_layers": 1})))


SHIFTS = {
    "GPT2LMHeadModel": True,
    "LlamaForCausalLM": True,
    "LlamaForTokenClassification": False,
    "BertLMHeadModel": True,
    "BertForMaskedLM": False,
    "BertForTokenClassification": False,
    "BertModel": False,  # has no labels
    "T5ForConditionalGeneration": False,  # its decoder gets shifted inputs
    "DistilBertForMaskedLM": False,  # computes the loss itself
}


@pytest.mark.parametrize("name", SHIFTS)
def test_labels_are_shifted_where_the_model_shifts_them(name: str) -> None:
    expected = [2, 0, 2] if SHIFTS[name] else [3, 0, 2]
    assert tokens(Holds(nn.Linear(2, 2), hugging_face(name)), rows_of()) == expected


def test_a_model_of_peft_is_looked_into() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(hugging_face("LlamaForCausalLM"), peft.LoraConfig(target_modules=["q_proj"]))
    assert tokens(Holds(adapted), rows_of()) == [2, 0, 2]


def own_loss() -> Any:
    model = hugging_face("LlamaForCausalLM")
    model = type(model)(model.config)
    model.loss_function = lambda **kwargs: None
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: [own_loss()], "LlamaForCausalLM"),
        (lambda: [hugging_face("BertForPreTraining")], "BertForPreTraining"),
        (
            lambda: [hugging_face("LlamaForCausalLM"), hugging_face("BertForMaskedLM")],
            "LlamaForCausalLM, BertForMaskedLM",
        ),
    ],
)
def test_whether_labels_are_shifted_cannot_be_told(make: Any, named: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"cannot tell whether .* within {named}. .*microbatch_weight"):
        tokens(Holds(*make()), rows_of())


@pytest.mark.parametrize(
    ("microbatch", "message"),
    [
        ({"x": torch.zeros(2), "y": 1}, "This dict has 'x', 'y'."),
        ([torch.zeros(2), torch.zeros(2)], "This list has neither."),
        (torch.zeros(2), "This Tensor has neither."),
        ({"labels": torch.zeros(2)}, "In this dict, 'labels' is of type torch.float32."),
        ({"labels": [torch.zeros(2)]}, "In this dict, 'labels' is of type list."),
    ],
)
def test_no_labels(microbatch: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        tokens(Holds(), [microbatch])
    assert message in str(caught.value)
    assert "entry or attribute 'shift_labels' or 'labels'" in str(caught.value)
    assert "microbatch_weight(microbatch)" in str(caught.value)


@pytest.mark.parametrize("weight", [3, 2.5, torch.tensor(4), torch.tensor([0.5]), 0])
def test_the_weight_of_the_model(weight: Any) -> None:
    assert has_own_weights(Weighs(weight)) and not has_own_weights(Holds())
    assert LossWeights(Weighs(weight)).of([{}, {}]) == [float(weight)] * 2


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), None, "3", True, torch.zeros(2), torch.tensor(-1)])
def test_no_weight(weight: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"Weighs.microbatch_weight returned .* a finite number of "):
        LossWeights(Weighs(weight)).of([{}])


def test_a_setting_without_effect() -> None:
    with pytest.raises(MisconfigurationException, match=r"loss_weight='tokens' .* under schedule='gpipe' .*'1f1b'"):
        RPCSequentialStrategy(loss_weight="tokens")
    wrong: Any
    for wrong in ("token", 3):
        with pytest.raises(MisconfigurationException, match="loss_weight must be one of 'rows', 'tokens', got"):
            RPCSequentialStrategy(loss_weight=wrong)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=3))
def test_gradients_are_means_over_all_tokens(steps: list[list[int]]) -> None:
    """After each batch ``.grad`` is the mean over the batches of the step so far, whose gradients are 1, 2, ..."""
    weights, divisor = LossWeights(Holds()), 4
    for step in steps:
        weights.begin_step()
        grad, seen = 0.0, []
        for gradient, weight in enumerate(step, start=1):
            factors = weights.added(weight, divisor)
            grad = factors.kept * grad + factors.added * gradient / divisor  # Lightning divides the loss
            seen.append((gradient, weight))
            total = sum(weight for _, weight in seen)
            if total:
                assert grad == pytest.approx(sum(g * w for g, w in seen) / total)
            else:  # Lightning's mean
                assert grad == pytest.approx(sum(g for g, _ in seen) / divisor)


def test_values_over_replicas() -> None:
    weights = LossWeights(Holds(), lambda numbers: [number + 6 for number in numbers], 2)
    assert weights.over_replicas([2.0, 3.0]) == [4.0, 4.5]


@pytest.mark.parametrize(
    ("padded", "sizes", "warns"), [([2, 0], [2, 2], True), ([1, 1], [2, 2], False), ([0, 0], [2, 1], False)]
)
def test_labels_that_micro_batches_have_in_different_numbers(padded: list[int], sizes: list[int], warns: bool) -> None:
    parts = []
    for number, size in zip(padded, sizes, strict=True):
        labels = torch.ones(size, 4, dtype=torch.long)
        labels[0, :number] = -100
        parts.append({"labels": labels})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_ignored_labels(parts, sizes)
        warn_of_ignored_labels([{"x": torch.ones(2)}], [2])
    assert [("loss_weight='tokens'" in str(w.message)) for w in said] == [True] * warns


REPLICAS = [([3.0, 1.0], [2.0, 6.0]), ([1.0, 1.0], [1.0, 1.0]), ([0.0, 0.0], [2.0, 1.0]), ([0.0], [0.0])]


@pytest.mark.parametrize("of_replicas", REPLICAS, ids=["uneven", "even", "one", "none"])
def test_factors_of_replicas(of_replicas: tuple[list[float], ...]) -> None:
    """Their mean is that of all tokens; without any, all replicas count the same."""
    total = sum(map(sum, of_replicas))
    for weights in of_replicas:
        counted = LossWeights(Holds(), lambda numbers: [total, 1.0], 2)
        assert counted.of_batch(weights) == (total, 2 * sum(weights) / total if total else 1.0)
    assert LossWeights(Holds()).of_batch([2.0, 0.0]) == (2.0, 1.0)


def test_a_microbatch_without_weight_in_one_replica_is_an_error_in_all() -> None:
    for own in ([3.0, 0.0], [2.0, 6.0]):
        counted = LossWeights(Holds(), lambda numbers: [11.0, 1.0], 2, same_passes=True)
        with pytest.raises(MisconfigurationException, match=r"counts nothing in the loss \(on this replica .* of \["):
            counted.of_batch(own)
