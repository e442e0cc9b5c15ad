"""A user's script under DDP on two processes: several fits in a row, what rank 0 saw written to the file named.

Run as ``python ddp_job.py RESULTS [doomed]``; a doomed job kills its rank 0 in mid-fit. Lightning starts the second
process by running this script once more.
"""

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.rank_zero import LightningDeprecationWarning
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from strategies import DDPStrategy
from trainer import Trainer

WIDTH, ROWS, GLOBAL_BATCH, EPOCHS = 32, 20, 8, 2  # the last batch of an epoch has 4 rows
STEPS = EPOCHS * 3


class Net(pl.LightningModule):
    """A regression in float64; ``losses`` are those of each step, averaged over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
        self.double()
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def train_dataloader(self) -> DataLoader:
        """Each rank's share of the same global batches, in order; Lightning's own sampler would shuffle."""
        generator, ranks = torch.Generator().manual_seed(1), self.trainer.world_size
        inputs = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        rows = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
        share = DistributedSampler(rows, num_replicas=ranks, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=GLOBAL_BATCH // ranks, sampler=share)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ManualNet(Net):
    """Two optimizers: one stepped through Lightning's wrapper, one bare."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        wrapped, bare = self.optimizers()[0], self.optimizers(use_pl_optimizer=False)[1]
        loss = self.loss(batch)
        for optimizer in (wrapped, bare):
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in (wrapped, bare):
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, _, last = self.net
        return [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (first, last)]


class ClippedNet(Net):
    """Clips by what the strategy has for it, or in one process by torch's function."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, DDPStrategy):
            strategy.clip_grad_norm_(0.01)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class DoomedNet(Net):
    """Rank 0 is killed, as by the system when memory runs out, while rank 1 is busy with its own work."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return loss


class CountingDDP(DDPStrategy):
    """Counts the calls of ``post_optimizer_step`` per optimizer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.counts: dict[int, int] = {}

    def post_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        index = [id(own) for own in self.optimizers].index(id(optimizer))
        self.counts[index] = self.counts.get(index, 0) + 1


QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
}


def job(folder: Path) -> dict[str, Any]:
    """One fit per setting; under DDP each rank takes half of each global batch, so the mean gradient is the same."""
    seen: dict[str, Any] = {}
    settings: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
        "none": (Net, {}, {}),
        "fp16_compress": (Net, {"comm_hook": "fp16_compress"}, {}),
        "powersgd": (Net, {"comm_hook": "powersgd", "powersgd_start_step": 2}, {}),
        "user's own hook": (Net, {"ddp_comm_hook": no_communication}, {}),
        "accumulate": (Net, {}, {"accumulate_grad_batches": 2}),
        "manual": (ManualNet, {}, {}),
        "clipped": (ClippedNet, {}, {}),
    }
    for name, (net, strategy_kwargs, trainer_kwargs) in settings.items():
        strategy, model = CountingDDP(**strategy_kwargs), net()
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=EPOCHS, **QUIET, **trainer_kwargs)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", LightningDeprecationWarning)
            trainer.fit(model)
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        seen[name] = {
            "losses": model.losses,
            "weights": strategy.all_gather(weights),  # [ranks, parameters]
            "counts": strategy.counts,
            "deprecated": [str(w.message) for w in heard if issubclass(w.category, LightningDeprecationWarning)],
            "hooks_left": [len(optimizer._optimizer_step_post_hooks) for optimizer in strategy.optimizers],
        }
    return seen


def no_communication(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Each rank keeps its own gradients, so a hook that is not registered would show."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


if __name__ == "__main__":
    results = Path(sys.argv[1])
    if sys.argv[2:] == ["doomed"]:
        Trainer(strategy="ddp", accelerator="cpu", devices=2, **QUIET).fit(DoomedNet())
    seen = job(results.parent)
    if torch.distributed.get_rank() == 0:
        torch.save(seen, results)
    torch.distributed.destroy_process_group()
