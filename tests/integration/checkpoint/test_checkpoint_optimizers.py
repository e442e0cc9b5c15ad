"""Optimizers that keep more than the states of parameters are saved and go on under every strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_job import Resumed, Saves, fit, pipeline, single
from harness import run
from parity import alike
from torch import nn
from torch.optim.lr_scheduler import StepLR

from strategies import DDPStrategy, ZeROStrategy
from strategies.checkpoint import save_and_load
from strategies.optim.restricted import check_optimizer_states, in_order, parameters_of, part_of, restricted


class Counts(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


def counting() -> Counts:
    optimizer = Counts([nn.Parameter(torch.ones(2)) for _ in range(3)], lr=0.1, momentum=0.9)
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_optimizers_that_keep_more_than_states_of_parameters() -> None:
    one = counting()
    state = one.state_dict()
    assert state["state"]["calls"] == 1
    check_optimizer_states([one], [state])
    assert restricted(one, parameters_of(one)[1:2]).state["calls"] == 1
    assert set(part_of(state["state"], [1])) == {1, "calls"}
    mixed = {key: state["state"][key] for key in ("calls", 2, 0, 1)}
    assert list(in_order(mixed)) == [0, 1, 2, "calls"]


def counted() -> dict[str, Any]:
    """Each goes on from what the one before saved."""

    class Model(Resumed):
        def configure_optimizers(self) -> Any:
            return Counts(self.parameters(), lr=0.1, momentum=0.9)

    settings = {
        "pipeline": pipeline(2),
        "sharded": pipeline(3, state_dict_type="sharded"),
        "zero": {"strategy": ZeROStrategy(), "devices": 1},
        "ddp": {"strategy": DDPStrategy(), "devices": 1},
    }
    before, seen = None, {}
    for epochs, (kind, setting) in enumerate(settings.items(), start=1):
        fit(setting, epochs, make=Model, ckpt_path=before, callbacks=[Saves(kind)])
        before = Path(kind)
        checkpoint = (
            save_and_load.load_sharded(before)[0] if kind == "sharded" else torch.load(before, weights_only=True)
        )
        seen[kind] = checkpoint["optimizer_states"][0]["state"]
    torch.distributed.destroy_process_group()
    seen["plain"] = fit(single(), 4, make=Model)["optimizer"]["state"]
    return seen


@pytest.mark.slow
def test_such_an_optimizer_goes_on() -> None:
    seen = run(counted, allow=["process_group", "env"])
    assert [seen[kind]["calls"] for kind in ("pipeline", "sharded", "zero", "ddp")] == [3, 6, 9, 12]
    alike(seen["ddp"], seen["plain"])


def with_a_rate_in_a_tensor() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two stages, then three, then ZeRO; each goes on from the shards of the one before."""

    class Model(Resumed):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01))
            return [optimizer], [{"scheduler": StepLR(optimizer, 2, gamma=0.9), "interval": "step"}]

    sharded: dict[str, Any] = {"state_dict_type": "sharded"}
    settings = {
        "two stages": pipeline(2, **sharded),
        "three stages": pipeline(3, **sharded),
        "zero": {"strategy": ZeROStrategy(**sharded), "devices": 1},
    }
    before, losses = None, []
    for epochs, (kind, setting) in enumerate(settings.items(), start=1):
        last = fit(setting, epochs, make=Model, ckpt_path=before, callbacks=[Saves(kind)])
        losses += last["losses"]
        before = kind
    last["optimizer"] = save_and_load.load_sharded(Path(kind))[0]["optimizer_states"][0]
    torch.distributed.destroy_process_group()
    return {**last, "losses": losses}, fit(single(), len(settings), make=Model)


@pytest.mark.slow
def test_a_rate_in_a_tensor_goes_on_from_shards() -> None:
    last, plain = run(with_a_rate_in_a_tensor, allow=["process_group", "env"])
    alike(last, plain)
