"""A user's script: two pipelines of two stages that train one model, several fits in a row.

Run as ``python replicas_job.py RESULTS [doomed]``; in a doomed job a worker of the second pipeline is killed in
mid-fit. Lightning starts the second driver by running this script once more.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parity import Small
from pytorch_lightning import Callback, seed_everything
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from strategies import RPCSequentialStrategy
from trainer import Trainer

REPLICAS, WIDTH, ROWS, GLOBAL_BATCH = 2, 6, 40, 8
IGNORED = -100
QUIET = {
    "accelerator": "cpu",
    "precision": "64-true",
    "max_epochs": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Net(Small):
    """A pipeline with something before and behind it; ``losses`` are means over the replicas."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        if tied:
            self.sequential_module[3].weight = self.sequential_module[0].weight
        self.rows: list[int] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return mse_loss(self.behind(self.sequential_module(self.before(batch[0]))), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("train", loss, on_epoch=True, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        self.rows += batch[2].tolist()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.trainer.callback_metrics["train_step"].item())

    def train_dataloader(self) -> DataLoader:
        """Each replica's share of the same global batches."""
        generator, replicas = torch.Generator().manual_seed(1), self.trainer.world_size
        made = [torch.randn(ROWS, width, generator=generator) for width in (WIDTH, 2)]
        rows = TensorDataset(*made, torch.arange(ROWS))
        share = DistributedSampler(rows, num_replicas=replicas, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=GLOBAL_BATCH // replicas, sampler=share)

    val_dataloader = train_dataloader


class MeasuredNet(Net):
    """Each replica would measure something else; all must have the same schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.sequential_module(self.before(x)))


class ManualNet(Net):
    """Steps by itself, every second batch, after backward passes that Lightning knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = self.loss(batch)
        self.log("train", loss, on_epoch=True, on_step=True, sync_dist=True)
        loss.backward()
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()


class LossesNet(ManualNet):
    """Adds up the gradients of two losses of each batch; one of them uses a weight of the first stage directly.

    Adds them to those of an earlier step, too, which have been averaged and clipped.
    """

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for kind in range(2):
            loss = self.loss(batch)
            if kind:
                loss = 3 * loss + self.sequential_module[0].weight.square().sum()
            self.log("train", loss, on_epoch=True, on_step=True, sync_dist=True)
            self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
        if batch_idx == 3:
            optimizer.zero_grad()


class TurnsNet(ManualNet):
    """Has two optimizers; the second one steps every second batch, and its gradients add up meanwhile."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.loss(batch)
        self.log("train", loss, on_epoch=True, on_step=True, sync_dist=True)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.1, "norm")
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        second = [*self.sequential_module[0].parameters(), *self.behind.parameters()]
        first = [p for p in self.parameters() if all(p is not own for own in second)]
        return [torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(second, lr=0.1, momentum=0.9)]


class KeepsNet(Net):
    """Adds the gradients of each second step to those of the step before."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class HeldNet(Net):
    """Notes of which parameters, on all stages, this replica has the gradient when the optimizer steps."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.held = [parameter.grad is not None for parameter in self.parameters()]


class LoopNet(Net):
    """Loops over its layers in its own ``forward``; they are in an ``nn.ModuleList``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.sequential_module)
        del self.sequential_module

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.behind(x)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])


class ListsNet(LoopNet):
    """Has two lists; the second one comes after an operation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ModuleList(self.blocks[:3]), nn.ModuleList(self.blocks[3:])
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = before = self.before(x)
        for block in self.first:
            x = block(x)
        x = x.tanh() + before
        for block in self.second:
            x = block(x)
        return self.behind(x)


class TokenNet(Net):
    """A mean over tokens, of which the replicas have different numbers, and the second one has none in one batch.

    One process divides the sum over the tokens of a batch by the number of tokens of the optimizer step.
    """

    def sum_and_number(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.behind(self.sequential_module(self.before(batch["x"])))
        losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return losses.sum(), (batch["labels"] != IGNORED).sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        total, number = self.sum_and_number(batch)
        in_pipeline = isinstance(self.trainer.strategy, RPCSequentialStrategy)
        own = {} if in_pipeline else {"batch_size": int(number)}
        self.log("train", total / number, on_epoch=True, on_step=True, sync_dist=True, **own)
        if number:
            self.log("with tokens", total / number, on_epoch=True, on_step=False, sync_dist=True, **own)
        if in_pipeline:
            return total / number
        num_batches = self.trainer.accumulate_grad_batches
        first = batch_idx // num_batches * num_batches * GLOBAL_BATCH
        step = self.tokens[first : first + num_batches * GLOBAL_BATCH]
        return total / sum(step) * num_batches

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("validation", self.sum_and_number(batch)[0], reduce_fx="sum", sync_dist=True)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        generator, replicas = torch.Generator().manual_seed(1), self.trainer.world_size
        self.tokens = [row * 7 % 6 if row % 2 == 0 else 0 if 8 <= row < 16 else 1 for row in range(ROWS)]
        rows = []
        for number in self.tokens:
            labels = torch.randint(2, (5,), generator=generator)
            labels[number:] = IGNORED
            rows.append({"x": torch.randn(5, WIDTH, generator=generator), "labels": labels})
        share = DistributedSampler(rows, num_replicas=replicas, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=GLOBAL_BATCH // replicas, sampler=share)

    val_dataloader = train_dataloader


class Saves(Callback):
    """Saves in mid-fit, while other stages have their states."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        trainer.save_checkpoint(self.path)


class Doomed(Net):
    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            os.kill(self.trainer.strategy.pipeline.workers._processes[0].pid, signal.SIGKILL)


DIVIDED, REDUCED, PARAMETERS = {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gpipe": (Net, {}, {}),
    "1f1b": (Net, {"schedule": "1f1b"}, {}),
    "accumulated and clipped": (Net, {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "accumulated and clipped, 1f1b": (
        Net,
        {"schedule": "1f1b"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "tied": (partial(Net, tied=True), {"checkpoint": "always"}, {}),
    "manual": (ManualNet, {}, {}),
    "blocks": (LoopNet, {"checkpoint": "always"}, {}),
    "divided, blocks, 1f1b": (LoopNet, {**DIVIDED, "schedule": "1f1b"}, {}),
    "lists": (ListsNet, {"balance": [2, 1, 2, 1]}, {}),
    "divided, lists, 1f1b": (
        ListsNet,
        {**DIVIDED, "schedule": "1f1b", "balance": [2, 1, 2, 1]},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "divided": (Net, DIVIDED, {}),
    "divided, accumulated and clipped, 1f1b": (
        Net,
        {**DIVIDED, "schedule": "1f1b"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "tokens, accumulated and clipped": (
        TokenNet,
        {"schedule": "1f1b", "loss_weight": "tokens"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "zbv, accumulated and clipped": (
        Net,
        {"schedule": "zbv", "balance": [2, 1, 2, 1]},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "divided, interleaved": (Net, {**DIVIDED, "schedule": "interleaved", "balance": [2, 1, 2, 1]}, {}),
    "auto": (MeasuredNet, {"schedule": "auto", "balance": "by_size"}, {}),
    "divided, tied": (partial(Net, tied=True), {**DIVIDED, "checkpoint": "always"}, {}),
    "divided, manual": (ManualNet, DIVIDED, {}),
    "reduced": (HeldNet, REDUCED, {}),
    "reduced, clipped by value": (Net, REDUCED, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "reduced, accumulated and clipped, 1f1b": (
        Net,
        {**REDUCED, "schedule": "1f1b"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "reduced, tied": (partial(Net, tied=True), {**REDUCED, "checkpoint": "always"}, {"gradient_clip_val": 0.1}),
    "reduced, manual": (ManualNet, REDUCED, {}),
    "reduced, several losses": (LossesNet, REDUCED, {}),
    "reduced, two optimizers": (TurnsNet, REDUCED, {}),
    "reduced, kept": (KeepsNet, REDUCED, {"gradient_clip_val": 0.1}),
    "reduced, kept, 1f1b": (KeepsNet, {**REDUCED, "schedule": "1f1b"}, {"gradient_clip_val": 0.1}),
    "reduced, tokens, accumulated and clipped": (
        TokenNet,
        {**REDUCED, "schedule": "1f1b", "loss_weight": "tokens"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "reduced, lists, 1f1b": (ListsNet, {**REDUCED, "schedule": "1f1b", "balance": [2, 1, 2, 1]}, {}),
    "reduced, lists": (ListsNet, {**REDUCED, "balance": [2, 1, 2, 1]}, {"accumulate_grad_batches": 2}),
    "reduced, interleaved": (Net, {**REDUCED, "schedule": "interleaved", "balance": [2, 1, 2, 1]}, {}),
    "reduced, zb-h1": (Net, {**REDUCED, "schedule": "zb-h1"}, {}),
    "reduced, zbv, tied": (
        partial(Net, tied=True),
        {**REDUCED, "schedule": "zbv", "balance": [2, 1, 2, 1]},
        {"gradient_clip_val": 0.1},
    ),
    "reduced, v-half": (Net, {**REDUCED, "schedule": "v-half", "balance": [2, 1, 2, 1]}, {}),
    "parameters, tied": (partial(Net, tied=True), {**PARAMETERS, "checkpoint": "always"}, {"gradient_clip_val": 0.1}),
    "parameters, manual": (ManualNet, PARAMETERS, {}),
    "parameters, two optimizers": (TurnsNet, PARAMETERS, {}),
    "parameters, lists, 1f1b": (
        ListsNet,
        {**PARAMETERS, "schedule": "1f1b", "balance": [2, 1, 2, 1]},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "parameters, clipped by value": (Net, PARAMETERS, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
}


def fit(
    make: Any, strategy: Any, devices: int, *, ckpt_path: Path | str | None = None, **settings: Any
) -> tuple[Any, Trainer]:
    seed_everything(0, verbose=False)
    model = make()
    if int(os.environ.get("LOCAL_RANK", "0")):  # its weights have to become those of the first replica
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    own = {**QUIET, "use_distributed_sampler": False, **settings}
    trainer = Trainer(devices=devices, strategy=strategy, **own)
    trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer


def job(folder: Path) -> dict[str, Any]:
    """One fit for each case, and what both replicas then have: ``[replicas, ...]``."""
    seen: dict[str, Any] = {}
    for name, (make, options, settings) in CASES.items():
        given = {"balance": [3, 3], "microbatches": 3, **options}
        strategy = RPCSequentialStrategy(**given, data_parallel_size=REPLICAS)
        model, trainer = fit(make, strategy, 2 * REPLICAS, **settings)
        assert not any(parameter._backward_hooks for parameter in model.parameters()), name
        path = folder / f"{name} {trainer.global_rank}.ckpt"
        trainer.save_checkpoint(path)
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        seen[name] = {"losses": model.losses, "metrics": metrics, "weights": strategy.all_gather(weights)}
        seen[name]["held"] = strategy.all_gather(torch.tensor(getattr(model, "held", [])))
        seen[name]["states"] = strategy.all_gather(torch.tensor(sum(len(own.state) for own in trainer.optimizers)))
    for form in ("full", "sharded"):
        for epochs, start, divided in ((1, None, DIVIDED), (2, folder / f"1 {form}", REDUCED)):
            options = {**divided, "state_dict_type": form}
            strategy = RPCSequentialStrategy([3, 3], microbatches=3, data_parallel_size=REPLICAS, **options)
            saves = Saves(folder / f"{epochs} {form}")
            fit(Net, strategy, 2 * REPLICAS, callbacks=[saves], max_epochs=epochs, ckpt_path=start)
    strategy = RPCSequentialStrategy(microbatches=2, data_parallel_size=REPLICAS)
    model, _ = fit(Net, strategy, REPLICAS, use_distributed_sampler=True)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    seen["one stage"] = {"rows": strategy.all_gather(torch.tensor(model.rows)), "weights": strategy.all_gather(weights)}
    return seen


if __name__ == "__main__":
    results = Path(sys.argv[1])
    if sys.argv[2:] == ["doomed"]:
        strategy = RPCSequentialStrategy([3, 3], microbatches=3, data_parallel_size=REPLICAS)
        fit(Doomed, strategy, 2 * REPLICAS)
    seen = job(results.parent)
    if torch.distributed.get_rank() == 0:
        torch.save(seen, results)
    torch.distributed.destroy_process_group()
