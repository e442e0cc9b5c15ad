"""Parameters that several stages use stay one parameter: gradients summed, one update, saved once."""

from typing import Any

import pytest
import torch
from harness import run
from parity import Small, batches, check, fit
from parity_layers import Unembed
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from strategies import RPCSequentialStrategy, Schedule

WIDTH = 6


class Tied(Small):
    """The weight of the first layer is that of the last one, on the driver."""

    def __init__(self) -> None:
        super().__init__()
        embed = nn.Linear(6, WIDTH)
        middle = [nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.sequential_module = nn.Sequential(embed, *middle, Unembed(embed.weight), nn.Linear(6, 2))


class TiedWorkers(Tied):
    """A weight that stages 0 and 1 of three share, and twice within the first one."""

    def __init__(self) -> None:
        super().__init__()
        embed, second, third, head = (nn.Linear(6, 6) for _ in range(4))
        second.weight = third.weight = embed.weight
        self.sequential_module = nn.Sequential(embed, nn.Tanh(), second, third, nn.Tanh(), head, nn.Linear(6, 2))


class TiedOutside(Tied):
    """The first layer's weight is used by the training step too, and clipped in place by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[5] = nn.Identity()
        self.head = Unembed(self.sequential_module[0].weight)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        hidden = self.sequential_module(batch[0])
        loss = mse_loss(hidden, batch[1]) + self.head(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)


class UsedOutside(Tied):
    """The training step computes with weights of the first layer, which nothing outside of the Sequential registers."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[5] = nn.Identity()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        embed = self.sequential_module[0]
        head = linear(self.sequential_module(batch[0]), embed.weight[:2, :2])
        loss = mse_loss(head, batch[1]) + 0.1 * (batch[0] @ embed.weight.T).square().mean() + 0.01 * embed.bias.norm()
        self.losses.append(loss.item())
        return loss


class UsedByHand(UsedOutside):
    """The same in manual optimization, with two backward passes in a step."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class UsedRegistered(UsedOutside):
    """The way that the error for 1F1B shows: the driver holds the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.bias = self.sequential_module[0].weight, self.sequential_module[0].bias

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.pop()
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


class OneLayerTwice(Small):
    """The same layer object at two places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(6, 6)
        self.sequential_module = nn.Sequential(
            layer, nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6), layer, nn.Linear(6, 2)
        )


class Saved(Callback):
    """Looks at checkpoints in mid-fit, and loads one."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = model.state_dict()
        names = [name for name in state if state[name].data_ptr() == state["sequential_module.0.weight"].data_ptr()]
        weight = model.sequential_module[0].weight
        assert len(names) == sum(p is weight for _, p in model.named_parameters(remove_duplicate=False))
        assert not any(value.is_meta for value in state.values())
        assert len(trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]) == len(list(model.parameters()))
        if batch_idx == 1:
            model.load_state_dict({name: value * 0.9 for name, value in state.items()})


SOME: dict[type[Small], list[int]] = {Tied: [3], TiedWorkers: [3], TiedOutside: [2], OneLayerTwice: [2]}
OTHERS: dict[type[Small], list[int]] = {Tied: [2], TiedWorkers: [2], TiedOutside: [3], OneLayerTwice: [3]}
"""Models, and numbers of stages."""


def rows(cases: dict[type[Small], list[int]]) -> None:
    clipped: dict[str, Any] = {"gradient_clip_val": 0.3, "val": batches, "val_check_interval": 2}
    for model, stages in cases.items():
        outcomes = check(model, stages=stages, accumulate_grad_batches=2, **clipped)
        for outcome in outcomes:
            layers = outcome.model.sequential_module
            shared = layers[0].weight
            assert len({id(p) for p in outcome.model.parameters()}) == len(outcomes[0].parameters)
            same = [name for name, p in outcome.model.named_parameters(remove_duplicate=False) if p is shared]
            assert len(same) >= 2
    check(
        TiedWorkers,
        stages=cases[TiedWorkers],
        callbacks=[Saved()],
        strategy={"checkpoint": "always", "schedule": Schedule(pipelined_backward=False)},
    )
    check(Tied, stages=cases[Tied], callbacks=[Saved()])


def used_outside() -> None:
    with pytest.raises(
        RuntimeError, match=r"values of stage 0 .*'1f1b'.* self\.tied = self\.sequential_module\[0\]\.wei"
    ):
        fit(UsedOutside, RPCSequentialStrategy([3, 4], schedule="1f1b"), 2)
    check(UsedOutside, accumulate_grad_batches=2, gradient_clip_val=0.3, val=batches)
    check(UsedByHand, strategy={"checkpoint": "always"}, stages=[2])
    check(UsedRegistered, strategy={"schedule": "1f1b"}, stages=[3])


@pytest.mark.slow
def test_weights_that_are_used_outside_of_the_pipelined_module() -> None:
    run(used_outside, timeout_seconds=300)


@pytest.mark.parametrize("cases", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_tied_parameters(cases: dict[type[Small], list[int]]) -> None:
    run(rows, cases)
