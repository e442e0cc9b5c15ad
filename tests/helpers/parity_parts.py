"""Layers, optimizers and a look at gradients for the parity tests. Workers import this, so it needs torch only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.optim import SGD, AdamW, Optimizer

from strategies.pipeline.control.parts import PartKind
from strategies.pipeline.control.shelf import captured


class Branches(nn.Module):
    """Layers next to each other: branch ``k`` maps ``[rows, k, in]`` to ``[rows, k, out]`` and sees no other."""

    def __init__(self, names: Sequence[str], make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: make() for name in names})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x[:, k]) for k, branch in enumerate(self.branches.values())], 1)


class NanGradient(nn.Module):
    """The identity, whose backward pass makes NaN: the root's slope at zero is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.0 * (0.0 * x).sqrt()


class Leaves(nn.Linear):
    """Leaves its result in attributes of many kinds; ``constant`` stays, ``average`` goes on from call to call."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.aux, self.calls, self.losses, self.stats = None, 0, [], {"mean": None}
        self.constant, self.names = torch.ones(2), ["a", "b"]
        self.average = torch.zeros(6)
        self.share, self.running = [self.weight], (torch.zeros(1),)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.calls += 1
        self.aux = y.pow(2).mean()
        self.losses.append(self.aux)
        self.stats["mean"] = (y.mean(),)
        self.made = (y.max(), [1, 2])
        if self.training and torch.is_grad_enabled():
            self.average.mul_(0.5).add_(0.5)
        return y + 0.1 * self.average.sum() * self.constant.sum()


class Draws(nn.Module):
    """A linear layer with dropout, which appends its mask to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 6 + n]`` to ``[rows, 6 + n + 6]``: the last columns are the mask of this layer."""
        mask = dropout(torch.ones_like(x[:, :6]), 0.4, self.training)
        return torch.cat([self.linear(x[:, :6]) * mask, x[:, 6:], mask], 1)


class Doubled:
    """For a LightningModule in float64 under ``precision="32-true"``, whose optimizers step within ``training_step``.

    With ``precision="64-true"`` float64 is the default type there, so that the state which optimizers make of numbers
    (how many steps there were) has that type in one process; on workers it is float32.
    """

    def setup(self: Any, stage: str) -> None:
        self.double()

    def on_before_batch_transfer(self, batch: Sequence[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [tensor.double() for tensor in batch]


class Traced(Optimizer):
    """Writes what each step used into the state of each parameter: learning rate, then betas or momentum."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            used = [float(group["lr"]), *group.get("betas", [group.get("momentum")])]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("trace", []).extend(used)
        return result


class TracedSGD(Traced, SGD):
    pass


class TracedAdamW(Traced, AdamW):
    pass


def gradients(model: Any) -> dict[str, Tensor | None]:
    """A copy of the gradient of each parameter of a LightningModule in training, wherever it lives."""
    found = {name: None if p.is_meta else p.grad for name, p in model.named_parameters()}
    pipeline = getattr(model.trainer.strategy, "pipeline", None)  # one process has none
    for remote in [] if pipeline is None else pipeline.remotes:
        found.update({f"sequential_module.{name}": grad for name, grad in captured(remote, PartKind.GRADS).items()})
    return {name: None if grad is None else grad.clone() for name, grad in found.items()}


def assert_same_gradients(
    actual: Sequence[Mapping[str, Tensor | None]], expected: Sequence[Mapping[str, Tensor | None]]
) -> None:
    """Compares what :func:`gradients` gave at several moments, also where there is none."""
    assert len(actual) == len(expected) > 0
    for moment, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert {name for name, grad in ours.items() if grad is None} == {
            name for name, grad in theirs.items() if grad is None
        }, moment
        for name, grad in theirs.items():
            if grad is not None:
                where = f"gradient of {name} at moment {moment}: {{}}".format
                torch.testing.assert_close(ours[name].cpu(), grad.cpu(), rtol=1e-9, atol=1e-9, msg=where)


class Lamb(Optimizer):
    """Adam's direction, scaled for each parameter by the ratio of two norms (You et al., 2020, algorithm 2).

    As in its users' implementations, the gradients of all parameters are clipped by their common norm first.
    """

    def __init__(self, params: Any, lr: float = 0.01, *, max_grad_norm: float | None = 1.0) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        limit = self.defaults["max_grad_norm"]
        if limit is not None:
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], limit)
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                mean = state["mean"].lerp_(p.grad, 1 - beta1) / (1 - beta1 ** state["step"])
                square = state["square"].lerp_(p.grad.square(), 1 - beta2) / (1 - beta2 ** state["step"])
                update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p
                ratio = p.norm() / update.norm() if p.norm() > 0 and update.norm() > 0 else 1.0
                p.sub_(rate * ratio * update)
        return loss
