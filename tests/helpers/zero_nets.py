"""Small models for the tests of ZeRO, each with something that could go wrong when state is divided."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from strategies import ZeROStrategy

WIDTH, STEPS_PER_EPOCH, EPOCHS = 128, 10, 2


class Net(pl.LightningModule):
    """A regression in float64 with large parameters, sent separately (128 KiB), and small ones, sent together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen, self.last = nn.Linear(WIDTH, 8).requires_grad_(False), nn.Linear(8, 1)
        self.double()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(self.frozen(x + self.second(x)))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def train_dataloader(self) -> DataLoader:
        """Other batches on each rank, the last one of another size on each."""
        return DataLoader(self.batches(self.trainer.global_rank), batch_size=None)

    def batches(self, rank: int) -> list[list[Tensor]]:
        generator, dtype = torch.Generator().manual_seed(rank), self.first.weight.dtype
        sizes = [6] * (STEPS_PER_EPOCH - 1) + [5 - rank]
        return [[torch.randn(n, width, generator=generator).to(dtype) for width in (WIDTH, 1)] for n in sizes]

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=3e-3)

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps = self.trainer.global_step


class LayerWithoutOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return AdamW([*self.norm.parameters(), *self.second.parameters(), *self.last.parameters()], lr=3e-3)


class Groups(Net):
    """Groups with different settings, whose learning rate and betas change at every step, and states that are read."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2]
        optimizer = AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], lr=3e-3)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS_PER_EPOCH * EPOCHS)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        for parameter in filter(lambda p: p.requires_grad, self.parameters()):
            optimizer.state[parameter].get("exp_avg")


class Float32(Net):
    """Under an optimizer that does not amplify rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.01, momentum=0.9)


class MixedTypes(Net):
    """Parameters of three types under one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first.float()
        self.last.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.float()).double()).tanh()
        return self.last(self.frozen(x + self.second(x)).bfloat16())

    def loss(self, batch: list[Tensor]) -> Tensor:
        return mse_loss(self(batch[0]).double(), batch[1].double())


class Leaky(Net):
    """Each rank leaves out other layers at other steps, and all of them one layer always."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]).double()

    def forward(self, x: Tensor) -> Tensor:
        step = self.trainer.fit_loop.total_batch_idx
        if step % 4 != 3:
            x = self.branches[(step + self.trainer.global_rank) % 2](x)
        return super().forward(x)


class OverriddenZeroGrad(Net):
    """Gradients are zeroed instead of dropped, which accumulation must not take for averages."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeROStrategy):
            strategy.clip_grad_norm_(0.01, norm_type=3.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01, norm_type=3.0)


class Normalised(Net):
    """With running statistics, which differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    val_dataloader = Net.train_dataloader


class Manual(Net):
    """Two optimizers of two kinds: several backward passes for one step, a step with a closure, clipping, toggling."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        wrapped, bare = self.optimizers()[0], self.optimizers(use_pl_optimizer=False)[1]
        self.toggle_optimizer(wrapped)
        wrapped.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(0.5 * self.loss(batch).square())
        self.clip_gradients(wrapped, 0.05, "norm")
        wrapped.step()
        self.untoggle_optimizer(wrapped)

        def closure() -> Tensor:
            bare.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        bare.step(closure)

    def configure_optimizers(self) -> Any:
        ours = [*self.first.parameters(), *self.norm.parameters()]
        theirs = [*self.second.parameters(), *self.last.parameters()]
        return AdamW(ours, lr=3e-3), SGD(theirs, lr=0.01, momentum=0.9, nesterov=True)


class OneBias(Net):
    """Clips the gradients of two optimizers by value, one of which has a single parameter, so one rank owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 0.001, "value")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        others = [p for p in self.parameters() if p is not self.last.bias]
        return AdamW(others, lr=3e-3), AdamW([self.last.bias], lr=3e-3)


class PostHook(Net):
    """A hook after each step limits the weights, then averages them."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = nn.ParameterList([p.detach().clone() for p in self.parameters()]).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.requires_grad]
        optimizer = AdamW(weights, lr=3e-3)

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for p in optimizer.param_groups[0]["params"]:
                    p.clamp_(-0.05, 0.05)
                for average, p in zip(self.averages, self.parameters(), strict=False):
                    average.lerp_(p, 0.1)

        optimizer.register_step_post_hook(hook)
        return optimizer


class CountsSteps(SGD):
    """Divides the learning rate by numbers of steps that belong to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.param_groups[0]["number"] = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        number = self.state.get("number", 0) + 1
        for group in self.param_groups:
            group["number"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(2 * group["number"] - number)
        super().step()
        self.state["number"] = number
        return loss


class Counted(Net):
    def configure_optimizers(self) -> Any:
        return CountsSteps(self.parameters())


class WithoutElements(Net):
    """A parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum()


class InitialState(Net):
    """An optimizer that makes its state before the first step."""

    def configure_optimizers(self) -> Any:
        return Adagrad(self.parameters(), lr=0.01, initial_accumulator_value=0.1)


class Infinite(Float32):
    """One rank, not always the same, gets an infinite gradient at some steps, for one parameter."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        step, rank = self.trainer.fit_loop.total_batch_idx, self.trainer.global_rank
        factor = float("inf") if (step, rank) in {(3, 0), (7, 1)} else 1.0
        return super().loss(batch) + 0.01 * (factor * self.last.bias).sum()


class Thaws(BaseFinetuning):
    """Gives a layer to the optimizer in the second epoch only."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.second)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.second, optimizer, lr=1e-3)


class Thawed(Net):
    """DistributedDataParallel does not average what is thawed later (measured: its ranks differ)."""

    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


class ThawedInOneProcess(Thawed):
    """The mean of the losses of all ranks."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch: list[list[Tensor]], batch_idx: int) -> Any:
        return torch.stack([self.loss(share) for share in batch]).mean()

    def train_dataloader(self) -> DataLoader:
        shares = [self.batches(rank) for rank in range(self.ranks)]
        return DataLoader(list(zip(*shares, strict=True)), batch_size=None)


class Shared(Groups):
    """The same global batches on any number of ranks up to three, and a scheduler for each epoch."""

    def train_dataloader(self) -> DataLoader:
        generator, ranks = torch.Generator().manual_seed(1), self.trainer.world_size
        made = [torch.randn(36, width, generator=generator, dtype=torch.float64) for width in (WIDTH, 1)]
        rows = TensorDataset(*made)
        share = DistributedSampler(rows, num_replicas=ranks, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=12 // ranks, sampler=share)

    def configure_optimizers(self) -> Any:
        (optimizer,), _ = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Modes(Net):
    """An optimizer with other weights for validation and checkpoints than for training."""

    def configure_optimizers(self) -> Any:
        return AdamWScheduleFree(self.parameters(), lr=3e-3, warmup_steps=3)

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()

    def on_validation_epoch_end(self) -> None:
        self.optimizers(use_pl_optimizer=False).train()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    val_dataloader = Net.train_dataloader

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Also after fit."""
        self.trainer.optimizers[0].eval()


class NoOptimizer(Net):
    """Trains by itself, on gradients that are averages."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)

    def configure_optimizers(self) -> None:
        return None
