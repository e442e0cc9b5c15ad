"""A user's script: what Lightning and PyTorch can do, trained by two pipelines of two stages and by what it equals.

Run as ``python replicas_features_job.py RESULTS``; Lightning starts the second driver by running this script once more.

``CASES`` equal one process on both shares of each batch. ``SAME_SHARES`` are told from one process by random numbers or
rounding; they equal two pipelines of one stage each, to the last bit.
"""

import contextlib
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parity_parts import Draws
from parity_scaler import Exact, Explodes
from replicas_job import REPLICAS, WIDTH, ManualNet, Net, fit
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError
from torchmetrics.classification import BinaryAccuracy

from strategies import RPCSequentialStrategy

F1B = {"schedule": "1f1b"}
SIZES = ((4, 4), (3, 1), (2, 5))
"""Rows of each batch, for each replica; they are split into three micro-batches."""


class Scaled(Net):
    """In the second batch, the gradient of the first layer explodes, in the second replica only."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        layers = [nn.Linear(WIDTH, WIDTH), Explodes(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        self.sequential_module = nn.Sequential(*layers, nn.Linear(WIDTH, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y, numbers = batch
        factor = torch.where(numbers == 11, 1e4, 1.0)[:, None]
        return super().training_step([x * factor, y, numbers], batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(self.trainer.precision_plugin.scaler.get_scale())


class Sometimes(nn.Module):
    """Has two layers that are used for some rows only: one for those above 50, and one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, :1] > 50
        return x.tanh() + marked * self.linear(x.tanh()) if marked.any() else x.tanh()


class Unused(Net):
    """Parameters on every process that are used in one replica only, and only in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Identity()
        self.sequential_module[0] = Sometimes()
        self.sequential_module[5] = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sometimes(), nn.Linear(WIDTH, 2))
        self.beside = Sometimes()

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = torch.where(batch[2][:, None] % 16 == 11, 100.0, batch[0])
        return super().loss([x, batch[1] + self.beside(x)[:, :2]])


class Frozen(Net):
    """Only the last stage trains, in the second epoch only the first; clipped by hand, by a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[:3].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.sequential_module[:3].requires_grad_(True)
            self.sequential_module[3:].requires_grad_(False)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        one_process = partial(torch.nn.utils.clip_grad_norm_, list(self.parameters()))
        clip = getattr(self.trainer.strategy, "clip_grad_norm_", one_process)
        self.losses.append(clip(0.1, 3.0).item())


class Blocked(ManualNet):
    """Says itself when gradients are to be averaged; looks at those of the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.agrees: list[bool] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        strategy, last = self.trainer.strategy, batch_idx % 2 == 1
        alone = not isinstance(strategy, RPCSequentialStrategy)
        with contextlib.nullcontext() if alone or last else strategy.block_backward_sync():
            loss = self.loss(batch)
            self.log("train", loss, on_epoch=True, on_step=True, sync_dist=True)
            self.manual_backward(loss)
        if last:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_after_backward(self) -> None:
        grads = self.all_gather(self.behind.weight.grad)
        self.agrees.append(self.trainer.world_size == 1 or torch.equal(*grads))


class Measured(Net):
    """Logs in several ways, over both replicas; looks at the driver's gradients."""

    on_after_backward = Blocked.on_after_backward

    def __init__(self) -> None:
        super().__init__()
        self.agrees: list[bool] = []
        self.error, self.accuracy = MeanSquaredError().set_dtype(torch.float64), BinaryAccuracy()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        y = self.behind(self.sequential_module(self.before(batch[0])))
        loss = mse_loss(y, batch[1])
        self.error.update(y, batch[1])
        self.accuracy(y[:, 0], batch[1][:, 0] > 0)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"error": self.error, "accuracy": self.accuracy}, on_step=False, on_epoch=True)
        for kind in ("sum", "max", "min"):
            value = getattr(y.detach(), kind)()
            self.log(kind, value, on_step=False, on_epoch=True, reduce_fx=kind, sync_dist=True)
        return {"loss": loss, "y": y}


class Uneven(Net):
    """Batches of other sizes in each replica; one process takes the mean of the losses of both."""

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        shares = [[[torch.randn(n, w, generator=generator) for w in (WIDTH, 2)] for n in row] for row in SIZES]
        replica = self.trainer.global_rank
        return DataLoader([row if self.trainer.world_size == 1 else row[replica] for row in shares], batch_size=None)

    val_dataloader = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shares = [batch] if isinstance(batch[0], Tensor) else batch
        loss = torch.stack([self.loss(share) for share in shares]).mean()
        self.log("train_step", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def on_train_batch_start(self, *args: Any) -> None:
        pass


class Sparse(Net):
    """Sparse gradients on the first stage: of different rows in each replica."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Identity()
        self.sequential_module[0] = nn.Embedding(40, WIDTH, sparse=True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([batch[2] // 3, batch[1]])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def exact() -> dict[str, Any]:
    return {"precision": None, "plugins": [Exact()]}


Case = tuple[Any, dict[str, Any], Any]
CASES: dict[str, Case] = {
    "scaler": (Scaled, {}, lambda: {**exact(), "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
    "scaler, fused, 1f1b": (partial(Scaled, fused=True), F1B, exact),
    "unused": (Unused, {}, dict),
    "frozen, clipped by hand": (Frozen, {}, dict),
    "blocked": (Blocked, {}, dict),
    "measured, 1f1b": (Measured, F1B, lambda: {"accumulate_grad_batches": 2}),
    "uneven, 1f1b": (Uneven, F1B, lambda: {"accumulate_grad_batches": 2}),
    "sparse, 1f1b": (Sparse, F1B, dict),
}
REDUCED = ("scaler", "scaler, fused, 1f1b", "unused", "frozen, clipped by hand", "uneven, 1f1b", "sparse, 1f1b")
"""Cases that also run with ``zero_stage=2``."""
for name in REDUCED:
    make, options, settings = CASES[name]
    CASES[f"{name}, reduced"] = (make, {**options, "zero_stage": 2}, settings)
for name in ("scaler", "scaler, fused, 1f1b", "sparse, 1f1b"):
    make, options, settings = CASES[name]
    CASES[f"{name}, parameters"] = (make, {**options, "zero_stage": 3}, settings)


class Dropped(Net):
    """Every layer drops out; keeps the masks of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Identity()
        self.sequential_module = nn.Sequential(*[Draws() for _ in range(6)])
        self.masks = torch.empty(0)

    def loss(self, batch: list[Tensor]) -> Tensor:
        y = self.sequential_module(self.before(batch[0]))
        if self.training:
            self.masks = y[:, WIDTH:].detach()
        return mse_loss(self.behind(y[:, :2]), batch[1])


class Normed(Net):
    """BatchNorm on each stage and outside, which a validation uses; what it keeps of the first replica's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.BatchNorm1d(WIDTH)
        for k in (1, 4):
            self.sequential_module[k] = nn.BatchNorm1d(WIDTH, momentum=0.3)


class Untrained(Normed):
    """Weights stay what they are, so that statistics depend on the rows alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class FirstShare(Untrained):
    """Gets what the first of two replicas gets."""

    def train_dataloader(self) -> DataLoader:
        rows = super().train_dataloader().dataset
        assert isinstance(rows, TensorDataset)
        return DataLoader(TensorDataset(*rows[::REPLICAS]), batch_size=4)


BF16 = {"precision": "bf16-mixed"}
SAME_SHARES: dict[str, Case] = {
    "dropout": (Dropped, {}, lambda: BF16),
    "dropout, 1f1b": (Dropped, F1B, lambda: {**BF16, "accumulate_grad_batches": 2}),
    "batch norm": (Normed, {"deferred_batch_norm": True}, dict),
    "batch norm, 1f1b": (Normed, F1B, dict),
}


def outcome(case: Case, stages: int, replicas: int = REPLICAS) -> tuple[dict[str, Any], Any]:
    """What a training came to; tensors have one entry for each replica."""
    make, options, settings = case
    balance = [6 // stages] * stages
    options = {"microbatches": 2 if make in (Normed, Untrained) else 3, **options}  # it needs two rows
    strategy = RPCSequentialStrategy(balance, data_parallel_size=replicas, **options)
    model, trainer = fit(make, strategy, stages * replicas, **settings())
    state = {name: strategy.all_gather(value.detach()) for name, value in model.state_dict().items()}
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"losses": model.losses, "metrics": metrics, "state": state}, model


def collectives(strategy: RPCSequentialStrategy) -> dict[str, Any]:
    """What replicas tell each other, called as Lightning and users call it."""
    rank = strategy.global_rank
    strategy.barrier()
    started = time.monotonic()
    time.sleep(2 * rank)
    strategy.barrier("the second replica comes two seconds later")
    return {
        "waited": time.monotonic() - started,
        "broadcast": [strategy.broadcast(["any object", rank], src) for src in range(REPLICAS)],
        "reduced": [
            strategy.reduce(torch.tensor([1.0 + 2 * rank, 8.0]), reduce_op=kind).tolist() for kind in ("mean", "sum")
        ],
        "not reduced": strategy.reduce("no tensor"),
        "gathered": strategy.all_gather(torch.tensor([rank])).tolist(),
        "all": [strategy.reduce_boolean_decision(rank == 0, all=kind) for kind in (True, False)],
    }


def job() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, case in CASES.items():
        seen[name], model = outcome(case, 2)
        seen[name]["agrees"] = getattr(model, "agrees", None)
    for name, case in SAME_SHARES.items():
        (two, model), (one, _) = outcome(case, 2), outcome(case, 1)
        seen[name] = {"two": two, "one": one}
        if isinstance(model, Dropped):
            seen[name]["masks"] = model.all_gather(model.masks)
    seen["statistics"], model = outcome((Untrained, {}, dict), 2)
    return {**seen, "collectives": collectives(model.trainer.strategy)}


if __name__ == "__main__":
    seen = job()
    if torch.distributed.get_rank() == 0:
        torch.save(seen, Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
