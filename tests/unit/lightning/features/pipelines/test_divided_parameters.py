"""Which options and models ``zero_stage=3`` accepts, before any process starts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn

from strategies import RPCSequentialStrategy
from strategies.lightning.features.pipelines.divided_parameters import DividedParameters

OPTIONS: dict[str, dict[str, Any]] = {
    "tensor_parallel_size=2": {"tensor_parallel_size": 2},
    "rebalance": {"rebalance": "auto"},
    "gather_on_end=False": {"gather_on_end": False},
    "state_dict_type='sharded'": {"state_dict_type": "sharded"},
    "microbatch_tokens=64": {"microbatch_tokens": 64, "schedule": "1f1b"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_exclude_each_other(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"{name} does not work with zero_stage=3 yet. Use zero_stage"):
        RPCSequentialStrategy(data_parallel_size=2, zero_stage=3, **OPTIONS[name])


def test_one_replica_divides_nothing() -> None:
    with pytest.raises(MisconfigurationException, match=r"zero_stage=3 divides .* but there is only one: set data"):
        RPCSequentialStrategy(zero_stage=3)


def compiled() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile()
    return model


MODELS: dict[str, tuple[nn.Module, list[Any]]] = {
    "a model with compiled modules": (compiled(), []),
    "StochasticWeightAveraging": (nn.Linear(2, 2), [StochasticWeightAveraging(0.1)]),
}


def prepared(model: nn.Module, callbacks: list[Any], *, is_fitting: bool = True) -> Any:
    for callback in callbacks:
        callback._average_model = model
    trainer = SimpleNamespace(callbacks=callbacks, state=SimpleNamespace(fn="fit"))
    return SimpleNamespace(model=model, trainer=trainer, is_fitting=is_fitting)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_excludes(name: str) -> None:
    feature = DividedParameters()
    with pytest.raises(MisconfigurationException, match=rf"{name}.* does not work with zero_stage=3 yet"):
        feature.check(prepared(*MODELS[name]))
    feature.check(prepared(*MODELS[name], is_fitting=False))


def test_only_fit_divides_parameters() -> None:
    model = nn.Linear(2, 2)
    assert DividedParameters().arguments(prepared(model, [], is_fitting=False), []) == {}
    assert model.weight.shape == torch.Size([2, 2])
