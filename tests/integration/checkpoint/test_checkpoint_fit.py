"""What does not fit is refused by name and stage, before anything has been loaded on any stage."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_job import Resumed, fit, pipeline
from harness import run
from torch import nn


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
        layers = self.trainer.strategy.pipeline.stages[0]
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
        "stage 0 (layers 0 to 3: Linear, Forgets, LayerNorm, Linear) returned a state that does not match its layers: "
        "missing ['1.weight'], unexpected ['of another.weight']. It cannot be saved in a checkpoint."
    )
