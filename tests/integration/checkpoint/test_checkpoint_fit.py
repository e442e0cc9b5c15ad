"""What does not fit is refused by name and stage, before anything has been loaded on any stage."""

import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from checkpoint_job import Resumed, fit, pipeline
from harness import run
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import MeanMetric

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from strategies.checkpoint.validate import check_fit, stages_by_name
from strategies.optim.restricted import check_optimizer_states
from strategies.pipeline.partition.sequential import cut


class Renames(nn.Module):
    """Takes what an older version saved: its ``weight`` was called ``w``; also has an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = "nothing"
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
        if f"{prefix}w" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), Renames())


def test_a_state_that_fits() -> None:
    module, state = small(), small().state_dict()
    check_fit(module, state)
    check_fit(module, {"0.weight": state["0.weight"]}, strict=False)


def test_what_a_layer_knows_to_do_is_left_to_it() -> None:
    """A name of old, and a BatchNorm of before it counted batches."""
    module, state = small(), small().state_dict()
    old = {("2.w" if name == "2.weight" else name): value for name, value in state.items()}
    del old["1.num_batches_tracked"]
    before = module[1].running_mean, module[2].weight
    check_fit(module, old)
    assert (module[1].running_mean, module[2].weight) == before  # the same objects
    assert "set_extra_state" not in vars(module[2])
    module.load_state_dict(old)


@pytest.mark.parametrize("strict", [True, False])
def test_shapes(strict: bool) -> None:
    module, state = small(), small().state_dict()
    state["0.weight"] = torch.zeros(7, 2)
    state["2._extra_state"] = "something"
    before = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    with pytest.raises(RuntimeError, match=r"nothing of it has been loaded:\n  size mismatch for 0.weight: .*\[7, 2\]"):
        check_fit(module, state, strict=strict)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert module[2].extra == "nothing"


def test_names_and_stages() -> None:
    module, state = small(), small().state_dict()
    del state["1.weight"], state["0.bias"]
    state |= {"0.foreign": torch.ones(1), "behind.weight": torch.ones(1), "2._extra_state": "something"}
    whole = nn.ModuleDict({"layers": module})
    message = (
        "the state dict does not fit ModuleDict, and nothing of it has been loaded:\n"
        "  missing in stage 0 (layers 0 to 0: Linear): layers.0.bias\n"
        "  missing in stage 1 (layers 1 to 2: BatchNorm1d, Renames): layers.1.weight\n"
        "  unexpected in stage 0 (layers 0 to 0: Linear): layers.0.foreign\n"
        "  unexpected keys: layers.behind.weight"
    )
    named = {f"layers.{name}": value for name, value in state.items()}
    with pytest.raises(RuntimeError) as raised:
        check_fit(whole, named, stage_of=stages_by_name(cut(module, [1, 2]), "layers."))
    assert str(raised.value) == message
    assert module[2].extra == "nothing"
    check_fit(whole, named, strict=False)


def adam(*sizes: int) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes]
    optimizer = torch.optim.AdamW(groups)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_optimizers() -> None:
    one, other = adam(2, 1), adam(1, 2)
    check_optimizer_states([one, other], [adam(2, 1).state_dict(), adam(1, 2).state_dict()])
    with pytest.raises(ValueError, match=r"the states of 1 optimizers, but configure_optimizers returned 2"):
        check_optimizer_states([one, other], [one.state_dict()])
    with pytest.raises(ValueError, match=r"optimizer 1, a AdamW, has groups of \[1, 2\] .* is for groups of \[2, 1\]"):
        check_optimizer_states([one, other], [one.state_dict()] * 2)
    foreign = one.state_dict()
    foreign["state"][7] = foreign["state"][0]
    with pytest.raises(ValueError, match=r"optimizer 0, a AdamW, has 3 parameters, .* unexpected entries \[7\]; noth"):
        check_optimizer_states([one], [foreign])


class Older(pl.LightningModule):
    """Reads what it saved under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name.replace("old", "layer"): t for name, t in state.items()}, strict, assign)


@pytest.mark.parametrize("make", [DDPStrategy, ZeROStrategy, RPCSequentialStrategy])
def test_a_load_state_dict_of_its_own(make: Any) -> None:
    strategy, model = make(), Older()
    strategy._lightning_module = model
    strategy.load_model_state_dict({"state_dict": {"old.weight": torch.full((1, 2), 7.0), "old.bias": torch.ones(1)}})
    assert model.layer.weight.tolist() == [[7, 7]]
    with pytest.raises(RuntimeError, match="Missing key"):
        strategy.load_model_state_dict({"state_dict": {}})


def test_layers_without_a_shape_yet() -> None:
    def lazy() -> nn.Sequential:
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), Renames())

    made = lazy()
    made[:2](torch.randn(4, 2))
    state = made.state_dict()
    check_fit(lazy(), state)
    check_fit(lazy(), lazy().state_dict())
    check_fit(module := lazy(), {("2.w" if name == "2.weight" else name): value for name, value in state.items()})
    assert is_lazy(module[0].weight) and is_lazy(module[1].running_mean)
    module.load_state_dict(state)
    assert torch.equal(module[0].weight, made[0].weight)
    with pytest.raises(RuntimeError, match=r"missing keys: 0\.bias"):
        check_fit(module := lazy(), {name: value for name, value in state.items() if name != "0.bias"})
    assert is_lazy(module[0].weight)


def test_what_a_layer_keeps_among_its_attributes() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()
            self.metric.persistent(True)

    one, other = Keeping(), Keeping()
    one.metric.update(5.0)
    with pytest.raises(RuntimeError, match="unexpected keys: foreign"):
        check_fit(other, {**one.state_dict(), "foreign": torch.ones(1)})
    assert other.metric.mean_value == 0
    other.metric.update(3.0)
    assert other.metric.compute() == 3


class Forgets(nn.Linear):
    """Leaves its weight out of what it saves, in any process but that of the script."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.script = os.getpid()
        self.register_state_dict_post_hook(self._forget)

    @staticmethod
    def _forget(layer: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if os.getpid() != layer.script:
            del state[f"{prefix}weight"]
            state["of another.weight"] = torch.ones(1)


class Loads(Resumed):
    """Loads in mid-run: first what does not fit, then what does."""

    def on_train_start(self) -> None:
        self.told: list[str] = []
        before = {name: value.clone() for name, value in self.state_dict().items()}
        bad = {name: value + 1 for name, value in before.items()}
        bad["sequential_module.0.other"] = bad.pop("sequential_module.3.weight")
        within = {name.removeprefix("sequential_module."): v for name, v in bad.items() if "sequential" in name}
        optimizer = self.optimizers(use_pl_optimizer=False)
        for module, state in ((self, bad), (self.sequential_module, within)):
            with pytest.raises(RuntimeError) as raised:
                module.load_state_dict(state)
            self.told.append(str(raised.value))
        with pytest.raises(ValueError) as refused:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {77: {"exp_avg": torch.ones(1)}}})
        self.told.append(str(refused.value))
        after = self.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        good = {name: value + 1 for name, value in before.items()}
        self.load_state_dict(good)
        after = self.state_dict()
        assert all(torch.equal(after[name], value) for name, value in good.items())


class Keeps(Resumed):
    def on_train_start(self) -> None:
        with pytest.raises(RuntimeError) as raised:
            self.state_dict()
        self.told = str(raised.value)

    def on_train_end(self) -> None:  # its state could not be brought back either
        layers = self.trainer.strategy._pipeline.stages[0]
        assert isinstance(layers[1], Forgets)


def refusals() -> dict[str, Any]:
    told: dict[str, Any] = {}
    start = Path("start.ckpt")
    fit(pipeline(2), 1, start)
    checkpoint = torch.load(start, weights_only=True)
    weights = checkpoint["state_dict"]
    weights["sequential_module.9.weight"] = weights.pop("sequential_module.4.weight", torch.ones(1))
    del weights["sequential_module.0.bias"], weights["behind.bias"]
    torch.save(checkpoint, "bad.ckpt")
    models = []

    def kept(make: Any = Resumed) -> Any:
        models.append(make())
        return models[-1]

    with pytest.raises(RuntimeError) as raised:
        fit(pipeline(3), 2, ckpt_path="bad.ckpt", make=kept)
    told["checkpoint"] = str(raised.value)
    torch.manual_seed(0)
    fit(pipeline(3), 1, make=lambda: kept(Loads))
    told["mid-run"] = models[-1].told

    def forgetful() -> Any:
        model = kept(Keeps)
        model.sequential_module[1] = Forgets()
        return model

    fit(pipeline(2), 1, make=forgetful)
    told["gathered"] = models[-1].told
    return told


@pytest.mark.slow
def test_refused_on_every_stage_before_any_is_changed() -> None:
    told = run(refusals)
    assert told["checkpoint"].splitlines()[1:] == [
        "  missing in stage 0 (layers 0 to 0: Linear): sequential_module.0.bias",
        "  missing keys: behind.bias",
        "  unexpected keys: sequential_module.9.weight",
    ]
    first = "  unexpected in stage 0 (layers 0 to 0: Linear): "
    second = "  missing in stage 1 (layers 1 to 3: Tanh, LayerNorm, Linear): "
    model, module, optimizer = told["mid-run"]
    assert model.splitlines()[1:] == [second + "sequential_module.3.weight", first + "sequential_module.0.other"]
    assert module.splitlines()[1:] == [second + "3.weight", first + "0.other"]
    assert "unexpected entries [77]" in optimizer
    assert told["gathered"] == (
        "stage 0 (layers 0 to 3: Linear, Forgets, LayerNorm, Linear) gave a state that is not that of its layers: "
        "missing ['1.weight'], unexpected ['of another.weight']. No checkpoint can be made of it."
    )
