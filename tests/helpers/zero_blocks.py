"""Models of blocks for the tests of ZeRO stage 3, whose rows do not divide evenly among ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from zero_nets import WIDTH, Net, Normalised

from strategies import ZeROStrategy

ODD = 13


class Block(nn.Module):
    """A residual block with a parameter of one row and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(ODD), nn.Linear(ODD, ODD)
        self.scale = nn.Parameter(torch.ones(1))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.ones_(self.fixed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(self.norm(x)).tanh() * self.fixed[0]


class Blocks(Normalised):
    """Blocks of which two share a weight, layers outside of them of which two share one, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(WIDTH, ODD), nn.ModuleList([Block() for _ in range(4)])
        self.blocks[2].linear.weight = self.blocks[0].linear.weight
        self.out, self.again = nn.Linear(ODD, WIDTH, bias=False), nn.Linear(ODD, WIDTH)
        self.again.weight = self.out.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x)
        for block in self.blocks:
            hidden = block(hidden)
        return super().forward(self.out(hidden) + self.again(hidden))

    def on_validation_epoch_end(self) -> None:
        """Outside of a step the model can be called, and its parameters can be read and changed."""
        self.log("called", self(torch.ones(2, WIDTH, dtype=torch.float64)).mean())
        whole = getattr(self.out.weight.detach(), "full_tensor", self.out.weight.detach)()
        self.log("norm", whole.norm())
        with torch.no_grad():
            self.blocks[1].linear.weight.mul_(0.99)
            self.out.weight.mul_(0.99)


class BuiltLate(Blocks):
    """The same, built in ``configure_model``."""

    def __init__(self, device: str = "cpu") -> None:
        nn.Module.__init__(self)
        super(Net, self).__init__()
        self.steps, self.given, self.first = 0, device, None

    def configure_model(self) -> None:
        if self.first is None:
            with torch.device(self.given):
                made = Blocks()
            for name, module in made.named_children():
                setattr(self, name, module)


class LeavesOutBlock(Blocks):
    """Leaves out one block at some steps and another block at all steps, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList([Block(), Block()]).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.trainer.fit_loop.total_batch_idx % 3 != 2:
            x = x + self.more[0](x[:, :ODD]).sum(1, keepdim=True)
        return super().forward(x)

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)


class ClipsByLargest(Blocks):
    """Clips by the largest absolute value of all gradients, also of parameters of which only one rank has a row."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeROStrategy):
            strategy.clip_grad_norm_(0.001, norm_type=float("inf"))
        else:
            nn.utils.clip_grad_norm_(self.parameters(), 0.001, norm_type=float("inf"))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


class StepOfOneEntry(SGD):
    """Keeps the number of steps of each parameter in a tensor of the shape [1], as that of a row of a vector."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["step"] = state.get("step", torch.zeros(1)) + 1
                state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.1)
                p.sub_(state["mean"], alpha=self.param_groups[0]["lr"] / state["step"].item())
        return loss


class StepsOfOneEntry(Blocks):
    """Also for vectors of which each of two ranks has one element, or one has two."""

    def __init__(self) -> None:
        super().__init__()
        self.two, self.three = (nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.two.sum() + (self.three * self.three.new_tensor([1.0, 2.0, 3.0])).sum()

    def configure_optimizers(self) -> Any:
        return StepOfOneEntry(self.parameters(), lr=0.1)


# What is refused


class OtherBlocks(Blocks):
    """Each rank runs other blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return Net.forward(self, x + self.blocks[1 + 2 * self.trainer.global_rank](x[:, :ODD]).sum(1, keepdim=True))


class OneLeftOut(Blocks):
    """A parameter gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5, dtype=torch.float64))


class Changed(Blocks):
    """With something that cannot be divided by rows, or another optimizer."""

    def __init__(self, change: Callable[[Any], None] = lambda model: None, optimizer: Any = AdamW) -> None:
        super().__init__()
        self.optimizer, self.kept = optimizer, list(self.parameters())
        change(self)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self)


def scalar(model: Any) -> None:
    model.temperature = nn.Parameter(torch.tensor(1.0).double())


def two_types(model: Any) -> None:
    model.blocks[1].linear.float()


def compiled(model: Any) -> None:
    model.blocks[1].compile(backend="eager")


def adafactor(model: Any) -> Any:
    return torch.optim.Adafactor(model.parameters())


def of_kept(model: Any) -> Any:
    return SGD(model.kept, lr=0.1)
