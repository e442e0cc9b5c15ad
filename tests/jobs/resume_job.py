"""Trainings that save checkpoints on their way and are resumed from each of them; with several processes as a script.

Run as ``resume_job.py RESULTS NAME...`` with some of ddp, zero, replicas, between, own_state and single_error;
Lightning starts the other processes by running it again.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from parity_parts import Doubled
from pytorch_lightning import Callback, seed_everything
from resume_parts import Draws, Rows, StatefulLoader
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy
from strategies.lightning.compat import logged_step
from trainer import Trainer

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Net(Doubled, pl.LightningModule):
    """Has dropout; ``seen`` holds (epoch, batch, sample ids, loss, step of loggers, learning rate) of every step.

    ``validated`` holds every validation, ``means`` the mean of each epoch's losses.
    """

    def __init__(self, *, plateau: str | None, dropout: float) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 1))
        self.plateau = plateau
        self.seen: list[tuple[int, int, list[int], float, int, float]] = []
        self.validated: list[tuple[int, int, float]] = []
        self.means: list[float] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_fit_start(self) -> None:
        torch.manual_seed(torch.initial_seed() + 100 * self.trainer.global_rank)

    def loss(self, batch: Any) -> Tensor:
        return (self.sequential_module(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(next(iter(batch.values())) if isinstance(batch, dict) else batch)
        self.log("training", loss, on_epoch=True, on_step=False, batch_size=4, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(self.trainer.callback_metrics["training"].item())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch is None:
            return
        ids = [row for part in (batch.values() if isinstance(batch, dict) else [batch]) for row in part[2].tolist()]
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        loss = outputs["loss"].item()
        self.seen.append((self.trainer.current_epoch, batch_idx, ids, loss, logged_step(self.trainer), rate))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("validation", loss)
        if not self.trainer.sanity_checking:
            self.validated.append((self.trainer.current_epoch, self.trainer.global_step, loss.item()))

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        if self.plateau:
            scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
            settings = {"monitor": "validation", "interval": self.plateau, "strict": self.plateau == "epoch"}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **settings}}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.9), "interval": "step"}}


class Saves(Callback):
    """Saves wherever ``places`` says: a hook and how many calls of it there have been.

    ``before`` holds how many steps and validations there had been then.
    """

    def __init__(self, folder: Path, places: list[tuple[str, int]]) -> None:
        self._folder, self._places, self._calls = folder, places, dict.fromkeys((hook for hook, _ in places), 0)
        self.before: dict[Path, tuple[int, int]] = {}

    def _save(self, trainer: Trainer, model: Net, hook: str) -> None:
        if hook not in self._calls or trainer.sanity_checking:
            return
        self._calls[hook] += 1
        if (hook, self._calls[hook]) in self._places:
            path = self._folder / f"{hook}-{self._calls[hook]}.ckpt"
            # The model's own hook, which notes the step, comes after the callbacks'.
            self.before[path] = (len(model.seen) + (hook == "on_train_batch_end"), len(model.validated))
            trainer.save_checkpoint(path)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer, pl_module, "on_train_epoch_start")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self._save(trainer, pl_module, "on_train_batch_start")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._save(trainer, pl_module, "on_before_optimizer_step")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self._save(trainer, pl_module, "on_train_batch_end")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer, pl_module, "on_validation_end")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer, pl_module, "on_train_epoch_end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer, pl_module, "on_train_end")


def fit(
    loaders: Callable[[], Any],
    *,
    seed: int,
    strategy: Callable[[], Any] | str = "single_device",
    devices: int = 1,
    checkpoint: Path | None = None,
    callbacks: list[Callback] | None = None,
    plateau: str | None = None,
    dropout: float = 0.3,
    trainer: type[pl.Trainer] = Trainer,
    **arguments: Any,
) -> tuple[Net, pl.Trainer]:
    """One run in "another process": model, loaders, trainer and random state are new."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seed_everything(seed, verbose=False)
    model = Net(plateau=plateau, dropout=dropout)
    settings = {"max_epochs": 3, **QUIET, **arguments}
    made = trainer(
        strategy=strategy if isinstance(strategy, str) else strategy(), devices=devices, callbacks=callbacks, **settings
    )
    made.fit(model, loaders(), DataLoader(Rows(8), batch_size=4), ckpt_path=checkpoint, weights_only=True)
    return model, made


def assert_resumable(folder: Path, loaders: Callable[[], Any], places: list[tuple[str, int]], **arguments: Any) -> None:
    """Asserts that a run resumed from each place sees the samples, losses and validations that the whole run saw.

    It also logs at the same steps, and has the same learning rates.
    """
    saves = Saves(folder, places)
    whole, whole_trainer = fit(loaders, seed=3, callbacks=[saves], **arguments)
    assert len(saves.before) == len(places)
    for path, (steps, validations) in saves.before.items():
        part, trainer = fit(loaders, seed=5, checkpoint=path, **arguments)
        assert [step[2] for step in part.seen] == [step[2] for step in whole.seen[steps:]], path.name
        assert [step[:2] for step in part.seen] == [step[:2] for step in whole.seen[steps:]], path.name
        alike([step[3] for step in part.seen], [step[3] for step in whole.seen[steps:]], path.name)
        assert [step[4:] for step in part.seen] == [step[4:] for step in whole.seen[steps:]], path.name
        assert [v[:2] for v in part.validated] == [v[:2] for v in whole.validated[validations:]], path.name
        alike([v[2] for v in part.validated], [v[2] for v in whole.validated[validations:]], path.name)
        alike(part.means, whole.means[len(whole.means) - len(part.means) :], path.name)
        assert (trainer.current_epoch, trainer.global_step) == (whole_trainer.current_epoch, whole_trainer.global_step)
        for name, value in whole.state_dict().items():
            alike(part.state_dict()[name], value, f"{path.name}: {name}")


def alike(actual: Any, expected: Any, where: str) -> None:
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=f"{where}: {{}}".format)


def shuffled(number: int, **arguments: Any) -> Callable[[], DataLoader]:
    return lambda: DataLoader(Rows(number), batch_size=4, shuffle=True, **arguments)


ENDS = [("on_train_batch_end", 2), ("on_train_batch_end", 5), ("on_train_epoch_end", 1)]
"""With three batches an epoch: within the first, within the second, between both."""


def between(folder: Path) -> dict[str, Any]:
    """The samples of each process: in an epoch that one process began, in one of their own, with another sampler."""
    loaders = partial(DataLoader, Rows(22), batch_size=2, shuffle=True)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "taken over": (loaders, {"checkpoint": folder / "one/on_train_batch_end-2.ckpt"}),
        "begun": (loaders, {}),
        "drawn": (lambda: DataLoader(Rows(22), 2, sampler=Draws(11)), {"use_distributed_sampler": False}),
    }
    seen = {}
    for name, (make, arguments) in cases.items():
        (folder / name).mkdir(exist_ok=True)
        saves = Saves(folder / name, [("on_train_batch_end", 2)])
        model, _ = fit(make, seed=5, strategy="ddp", devices=2, max_epochs=1, callbacks=[saves], **arguments)
        ids: list[Any] = [None, None]
        torch.distributed.all_gather_object(ids, [step[2] for step in model.seen])
        seen[name] = ids
    return seen


class RankLoader(StatefulLoader):
    """Has another state in each process."""

    def __iter__(self) -> Any:
        self.place = self.place or 4 * torch.distributed.get_rank()
        for _ in range(2):
            self.place += 4
            yield torch.utils.data.default_collate([self.rows[self.place % len(self.rows) + i] for i in range(4)])

    def __len__(self) -> int:
        return 2


class SavesAlone(Callback):
    """What ``OnExceptionCheckpoint`` does when only rank 0 knows of an error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("out of luck")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if trainer.global_rank == 0:
            trainer.save_checkpoint(self.path)
        else:
            trainer.strategy.barrier("at the end of rank 0's saving")


def own_state(folder: Path) -> None:
    place = [("on_train_batch_end", 1)]
    assert_resumable(folder, lambda: RankLoader(16), place, strategy="ddp", devices=2, max_epochs=1)


def single_error(folder: Path) -> None:
    common: dict[str, Any] = {"strategy": "ddp", "devices": 2, "max_epochs": 2, "dropout": 0.0}
    whole, _ = fit(shuffled(22), seed=3, **common)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(shuffled(22), seed=3, callbacks=[SavesAlone(folder / "alone.ckpt")], **common)
    rest, _ = fit(shuffled(22), seed=5, checkpoint=folder / "alone.ckpt", **common)
    assert [step[:3] for step in rest.seen] == [step[:3] for step in whole.seen[2:]]


def job(folder: Path, name: str) -> None:
    """The same in each of two processes, which have other samples and random numbers."""
    strategy: Any = name
    devices = 2
    if name == "replicas":
        strategy, devices = partial(RPCSequentialStrategy, [2, 2], microbatches=2, data_parallel_size=2), 4
    common = {"strategy": strategy, "devices": devices, "max_epochs": 2}
    assert_resumable(folder, shuffled(22), ENDS, **common)
    if name != "ddp":
        return
    assert_resumable(folder, shuffled(22, num_workers=2), [("on_train_batch_end", 4)], **common)
    own = {**common, "use_distributed_sampler": False}
    assert_resumable(folder, lambda: DataLoader(Rows(11), batch_size=4, sampler=Draws(11)), ENDS, **own)


if __name__ == "__main__":
    results = Path(sys.argv[1])
    jobs: dict[str, Callable[[Path], Any]] = {"between": between, "single_error": single_error, "own_state": own_state}
    for name in sys.argv[2:]:
        seen = jobs.get(name, partial(job, name=name))(results.parent)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(seen, results)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
