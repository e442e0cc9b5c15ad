"""When a pass that runs within ``training_step`` holds one set of gradients, and when two."""

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from torch import nn
from torch.optim import SGD, Optimizer

from strategies.lightning.features.per_microbatch import num_gradient_sets


class OwnZeroGrad(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class LooksAtGradients(LightningModule):
    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        pass


class KeepsGradients(LightningModule):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


def test_gradients_are_held_twice_where_that_can_be_seen() -> None:
    optimizer, own = SGD([nn.Parameter(torch.zeros(1))]), OwnZeroGrad([nn.Parameter(torch.zeros(1))])
    replaced_one = SGD([nn.Parameter(torch.zeros(1))])
    vars(replaced_one)["zero_grad"] = lambda set_to_none=True: None

    def sets(
        model: LightningModule, *callbacks: Callback, own: Optimizer = optimizer, accumulated: int = 1, owners: int = 1
    ) -> float:
        settings: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
        trainer = Trainer(callbacks=[*callbacks], accumulate_grad_batches=accumulated, **settings)
        return num_gradient_sets(trainer, model, [own], owners)

    plain = LightningModule()
    assert sets(plain) == sets(plain, ModelCheckpoint()) == sets(plain, LambdaCallback(setup=print)) == 1
    assert sets(plain, GradientAccumulationScheduler({0: 1})) == 1
    assert sets(LooksAtGradients()) == sets(KeepsGradients()) == sets(plain, accumulated=2) == 2
    assert sets(plain, LambdaCallback(on_before_zero_grad=print)) == 2
    assert sets(plain, GradientAccumulationScheduler({0: 1, 4: 2})) == 2
    assert sets(plain, own=own) == sets(plain, own=replaced_one) == 2
    # Replicas divide averaged gradients, but not those that are accumulated.
    assert sets(plain, owners=4) == 1 and sets(KeepsGradients(), owners=4) == sets(plain, own=own, owners=4) == 1.25
    assert sets(KeepsGradients(), accumulated=2, owners=4) == 2
