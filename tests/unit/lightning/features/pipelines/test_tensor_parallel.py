"""Which plans and options ``tensor_parallel_size`` accepts, before any process starts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import BatchSizeFinder
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from strategies import RPCSequentialStrategy
from strategies.lightning.features.pipelines.tensor_parallel import TensorParallel, digest, plan_of
from strategies.sharding.divided_layers import PlannedModel
from trainer import Trainer

SMALL: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Planned(nn.Module):
    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.tensor_parallel_plan = lambda: plan


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2"])
def test_a_number_of_parts(size: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"tensor_parallel_size must be a whole number of at least 1"):
        RPCSequentialStrategy(tensor_parallel_size=size)


OPTIONS: dict[str, dict[str, Any]] = {
    "rebalance": {"rebalance": "auto"},
    "gather_on_end=False": {"gather_on_end": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_exclude_each_other(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"{name} does not work with tensor_parallel_size=2 yet"):
        RPCSequentialStrategy(tensor_parallel_size=2, **OPTIONS[name])


def test_devices_that_do_not_divide() -> None:
    message = (
        r"data_parallel_size=1 x tensor_parallel_size=2 replicas cannot divide 3 devices evenly .*set devices to 2"
    )
    with pytest.raises(MisconfigurationException, match=message):
        Trainer(accelerator="cpu", devices=3, strategy=RPCSequentialStrategy(tensor_parallel_size=2))


def test_the_plan_of_a_hugging_face_model() -> None:
    plan = plan_of(Around(LlamaForCausalLM(LlamaConfig(**SMALL))), 2)
    assert plan["model.model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.lm_head"] == "colwise_gather_output"


@pytest.mark.parametrize("size", [2, 4])
def test_each_process_has_its_share_of_the_parameters(size: int) -> None:
    sizes = {**SMALL, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 4}))
    whole = sum(parameter.numel() for parameter in model.parameters())
    PlannedModel(model, plan_of(model, size), size - 1, size)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1.15 * whole / size


@pytest.mark.parametrize("balance", ["by_size", [1, 1]], ids=str)
def test_layers_are_measured_as_parts(balance: Any) -> None:
    options = RPCSequentialStrategy(balance, tensor_parallel_size=2).options
    model = Around(LlamaForCausalLM(LlamaConfig(**SMALL)))
    settings, trainer = options.settings, SimpleNamespace(callbacks=[])
    prepared: Any = SimpleNamespace(model=model, options=options, settings=settings, trainer=trainer, is_fitting=False)
    feature, shape = TensorParallel(2), [8, 8]
    feature.check(prepared)
    query = model.model.model.layers[0].self_attn.q_proj
    with feature.measuring(prepared):
        assert list(query.weight.shape) == ([4, 8] if balance == "by_size" else shape)  # nothing to measure otherwise
    assert list(query.weight.shape) == shape


@pytest.mark.parametrize("is_fitting", [True, False])
def test_a_finder_of_a_batch_size_is_refused(is_fitting: bool) -> None:
    trainer = SimpleNamespace(callbacks=[BatchSizeFinder()])
    prepared: Any = SimpleNamespace(model=nn.Linear(2, 2), trainer=trainer, is_fitting=is_fitting)
    with pytest.raises(
        MisconfigurationException, match=r"Tuner\.scale_batch_size do not work with tensor_parallel_siz"
    ):
        TensorParallel(2).check(prepared)


def test_heads_that_do_not_divide() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1))
    with pytest.raises(MisconfigurationException, match=r"=2 cannot divide num_key_value_heads=1 of model evenly"):
        plan_of(Around(model), 2)


def test_dropout_of_heads_is_told() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1))
    with pytest.warns(UserWarning, match=r"attention_dropout=0\.1 of model: .* the same dropout masks"):
        plan_of(Around(model), 2)


def test_no_plan() -> None:
    with pytest.raises(MisconfigurationException, match=r"but Around has none: .*Define a method tensor_parallel_plan"):
        plan_of(Around(BertModel(BertConfig(**SMALL))), 2)


@pytest.mark.parametrize("plan", [None, {}, ["up"], {"up": 1}], ids=str)
def test_a_plan_that_is_none(plan: Any) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"tensor_parallel_plan\(\) must return a dict that gives names"
    ):
        plan_of(Planned(plan), 2)


def test_digests_of_batches() -> None:
    batch: dict[str, Any] = {"x": torch.arange(6).view(2, 3), "names": ["a"], "y": torch.ones(2, dtype=torch.bfloat16)}
    same = {**batch, "x": batch["x"].clone()}
    assert digest(batch) == digest(same)
    for change in (torch.arange(1, 7).view(2, 3), torch.arange(6).view(3, 2), torch.arange(6.0).view(2, 3)):
        assert digest({**batch, "x": change}) != digest(batch)
    assert digest([torch.zeros(()), torch.zeros(2, 0)]) == digest([torch.zeros(()), torch.zeros(2, 0)])
    assert digest(torch.zeros(2**20)) == digest(torch.zeros(2**20))
