"""The balance that is found for a model, and the line that says so."""

import logging
import time
import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from undisturbed import until_undisturbed

from strategies.lightning.finding_blocks import warn_of_compiled_model
from strategies.lightning.partitioning import find_balance
from strategies.pipeline.executor.settings import Settings

WIDTH, VOCABULARY = 16, 2000


class Gpt(pl.LightningModule):
    """Eight alike blocks; with ``vocabulary``, the tables outside them are much larger than a block."""

    def __init__(self, vocabulary: int = VOCABULARY, blocks: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, vocabulary)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Wrapping(pl.LightningModule):
    """A module without ``forward`` around a model of Hugging Face."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def found(model: pl.LightningModule, path: str, given: Any = None, by_time: bool = False, **settings: Any) -> Any:
    return find_balance(
        model,
        model.get_submodule(path),
        path=repr(path),
        num_stages=2,
        num_chunks=2,
        given=given,
        by_time=by_time,
        settings=Settings(**settings),
        device=torch.device("cpu"),
    )


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "pytorch_lightning")
    return caplog


def test_alike_blocks_without_an_example_count_by_parameters(lines: Any) -> None:
    assert found(Gpt(), "blocks") == [7, 1]
    assert found(Gpt(vocabulary=16), "blocks") == [5, 3]
    assert (
        "balance [5, 3]: what the model runs outside 'blocks', on the driver, costs as much as 1.9 blocks" in lines.text
    )
    assert "without an example input only parameters count" in lines.text
    assert found(Gpt(), "blocks", given="even") == [4, 4]
    assert found(Gpt(), "blocks", given=[6, 2]) == [6, 2]


def test_under_gpipe_the_time_of_the_driver_is_not_in_the_stages(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part runs before and after the passes of all stages; under 1f1b it runs between those of its own stage."""
    monkeypatch.setattr("strategies.lightning.partitioning.BUDGET_SECONDS", 0.3)
    model = Gpt()
    model.example_input_array = torch.zeros(8, 64, dtype=torch.long)

    def balance(schedule: str) -> list[int]:
        return found(model, "blocks", by_time=True, schedule=schedule)

    def is_in(sizes: tuple[int, ...], balance: list[int]) -> None:
        assert balance[0] in sizes

    until_undisturbed(partial(balance, "1f1b"), partial(is_in, (7,)))
    for example in (model.example_input_array, None):
        lines.clear()
        model.example_input_array = example
        until_undisturbed(partial(balance, "gpipe"), partial(is_in, (3, 4, 5)))
        assert "not counted: under schedule='gpipe' it runs before and after the passes of the stages" in lines.text


class Slow(nn.Module):
    """Its forward pass takes a known time, its backward pass hardly any."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.003)
        return x * 1


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Slow() for _ in range(12)))
        self.example_input_array = torch.ones(4, 2, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "expected"),
    [
        ("1f1b", "except_last", [4, 8]),  # the last stage recomputes nothing
        ("1f1b", "always", [6, 6]),
        ("1f1b", "never", [6, 6]),
        ("gpipe", "except_last", [6, 6]),
    ],
)
def test_the_time_of_a_stage_includes_what_it_recomputes(
    schedule: str, checkpoint: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.lightning.partitioning.BUDGET_SECONDS", 0.01)
    settings = {"schedule": schedule, "checkpoint": checkpoint, "microbatches": 16}

    def check(balance: list[int]) -> None:
        assert balance == expected

    until_undisturbed(partial(found, Line(), "blocks", by_time=True, **settings), check)


def test_by_size_the_driver_holds_the_activations_of_the_whole_batch_under_gpipe() -> None:
    model = Gpt(vocabulary=24, blocks=12)
    model.example_input_array = torch.zeros(8, 64, dtype=torch.long)
    on_gpipe, on_1f1b = (found(model, "blocks", schedule=schedule) for schedule in ("gpipe", "1f1b"))
    assert on_gpipe[0] > on_1f1b[0] > 6


@pytest.mark.parametrize("by_time", [False, True])
def test_a_model_of_hugging_face_without_an_example(by_time: bool, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.lightning.partitioning.BUDGET_SECONDS", 0.1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = Wrapping(LlamaForCausalLM(config))
    state = torch.get_rng_state()
    balance = found(model, "model.model.layers", by_time=by_time, schedule="1f1b")
    assert sum(balance) == 4 and balance[0] >= 2
    assert "costs as much as" in lines.text and "not measured" not in lines.text
    assert model.model.config.use_cache and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_of_hugging_face_that_needs_another_input() -> None:
    config = BertConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=99)
    model = Wrapping(BertForSequenceClassification(config))

    def refuse(module: nn.Module, args: Any) -> None:
        raise KeyError("bbox")

    model.model.bert.embeddings.register_forward_pre_hook(refuse)
    layers = "model.bert.encoder.layer"
    with pytest.warns(UserWarning, match=r"counts parameters only: .*BertForSequenceClassification .*KeyError: 'bbox'"):
        assert sum(found(model, layers)) == 4
    model.get_submodule(layers)[1].extra = nn.Linear(2, 2)
    with pytest.raises(
        MisconfigurationException, match=r"made from the configuration of Bert.*does not fit \(KeyError"
    ):
        found(model, layers)


def test_an_example_that_does_not_reach_every_block() -> None:
    model = Gpt()
    model.example_input_array = torch.zeros(2, 4, dtype=torch.long)
    model.forward = lambda tokens: model.head(model.blocks[0](model.embed(tokens)))
    with pytest.raises(MisconfigurationException, match=r"Gpt.forward does not call blocks 1, 2, 3, 4, 5, 6, 7"):
        found(model, "blocks")


def test_a_model_that_is_compiled_as_a_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_compiled_model("model.layers")
    with pytest.warns(UserWarning, match="Compile the blocks instead"):
        warn_of_compiled_model("model._orig_mod.layers")
