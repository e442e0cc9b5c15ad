"""Models for what ZeRO refuses, what loops do to parameters in mid-fit, what gradients show, and a rank that dies."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric
from zero_nets import WIDTH, Manual, Net


class Doomed(Net):
    """Rank 0 is killed, as by the system when memory runs out, while all other ranks are busy."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return loss


class Refused(Net):
    """Trains until something is refused."""

    def __init__(self, optimizer: Callable[[Any], Optimizer] = AdamW) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class LeavesOut(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.first(x))))


class Reentrant(Net):
    """The same layer in two checkpoints, each of which runs a separate backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.second, x.requires_grad_(), use_reentrant=True)
        return super().forward(x)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 3, sparse=True)


class EvaluatesTwice(SGD):
    """Works as SGD does where it gets no closure."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        return super().step(closure)


class EvaluatesTwiceLater(EvaluatesTwice):
    """Does so for parameters that are too large for the trial of small copies."""

    def step(self, closure: Any = None) -> Any:
        if max(p.numel() for group in self.param_groups for p in group["params"]) > 9:
            return super().step(closure)
        return SGD.step(self, closure)


class DrawsLater(SGD):
    """Draws random numbers for parameters that are too large for the trial of small copies."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if max(p.numel() for group in self.param_groups for p in group["params"]) > 9:
            torch.rand(1)
        return loss


class MixesSums(Manual):
    """Adds to an average without communication."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))


class BareBackward(Manual):
    """A backward pass of which Lightning knows nothing."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.loss(batch).backward()
        for optimizer in self.optimizers():
            optimizer.step()


class ManualBackward(Manual):
    """What :class:`BareBackward` should come to."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()


class FailedBackward(Manual):
    """What :class:`ManualBackward` does, after passes that have failed on every rank when some gradients were sent."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for fails in (False, True, False):
            if not fails:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
            x = self.norm(self.first(batch[0])).tanh()
            if fails:
                x.register_hook(self.fail)
            try:
                self.manual_backward(mse_loss(self.last(self.frozen(x + self.second(x))), batch[1]))
            except ValueError:
                assert fails
        for optimizer in self.optimizers():
            optimizer.step()

    def fail(self, grad: Tensor) -> None:
        raise ValueError("bad gradient")


class ClipsWhich(Manual):
    """Does not say which optimizer's gradients it wants clipped."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.trainer.strategy.clip_grad_norm_(1.0)


class Watching(Net):
    """Notes at each batch how many gradients there are, and whether they are the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        grads = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        bias = self.last.bias.grad  # also where it is gone, all ranks have to take part
        both = self.trainer.strategy.all_gather(torch.zeros(1).double() if bias is None else bias)
        self.seen.append((len(grads), all(torch.equal(both[0], other) for other in both)))


class OwnStep(Net):
    """Clips within its own step, has a parameter that is not dense, and gives parameters other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64)[:, :WIDTH])  # 128 KiB

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.wide / WIDTH)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        def clipped() -> Any:
            loss = closure()
            torch.nn.utils.clip_grad_value_(self.parameters(), 1e-3)
            return loss

        optimizer.step(closure=clipped)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            for parameter in self.parameters():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)


class AddedGroup(Net):
    """Parameters that want gradients from the start come to the optimizer later."""

    def configure_optimizers(self) -> Any:
        return AdamW([*self.second.parameters(), *self.last.parameters()], lr=3e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            optimizer.add_param_group({"params": [*self.first.parameters(), *self.norm.parameters()], "lr": 1e-3})


class AddedBeforeStep(Net):
    """Parameters come to the optimizer between the backward pass and the step, and all gradients are kept then."""

    configure_optimizers = AddedGroup.configure_optimizers

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.trainer.global_step == 4:
            optimizer.add_param_group({"params": [*self.first.parameters(), *self.norm.parameters()], "lr": 1e-3})

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if self.trainer.global_step != 5:
            optimizer.zero_grad()


class FrozenWhileAccumulating(Net):
    """Freezes a layer between two batches of one step, which still steps it; and thaws the layer later."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.second.requires_grad_(not 3 <= batch_idx < 6)


class SavesMore(Net):
    """Has a persistent metric of each rank's batches. Adds a tensor to its checkpoint, on some ranks only."""

    more = False

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.mean.persistent(True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.mean.update(batch[0])
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.more:
            checkpoint["optimizer_states"][0]["state"]["more"] = torch.zeros(1)
