"""``max_restarts``: a run that loses workers ends as one that loses none, losses, metrics and weights alike."""

import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faults_job
import pytest
import pytorch_lightning as pl
import torch
from harness import run
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.plugins import TorchCheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanSquaredError

from strategies import RPCSequentialStrategy
from strategies.common.errors import WorkerLost
from strategies.launch.session import Session
from strategies.launch.workers import Workers
from trainer import PipelineMonitor, Trainer

STEPS = 12


class Doomed(nn.Linear):
    """Kills its worker when it has trained on so many micro-batches since the worker began, each time once."""

    def __init__(self, moments: tuple[int, ...]) -> None:
        super().__init__(6, 6)
        self.moments, self.driver, self.calls = moments, os.getpid(), 0
        self.register_buffer("scales", torch.linspace(0.9, 1.1, 6), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += self.training
        for number, moment in enumerate(self.moments):
            done = Path(f"killed-{number}")
            if self.training and self.calls == moment and not done.exists() and os.getpid() != self.driver:
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(rows) * self.scales


class Net(pl.LightningModule):
    """Keeps what would be wrong if something were left out: a schedule, dropout, running statistics, a metric."""

    def __init__(self, moments: tuple[int, ...]) -> None:
        super().__init__()
        layers = [nn.Linear(4, 6), nn.Dropout(0.2), Doomed(moments), nn.BatchNorm1d(6), nn.Linear(6, 1)]
        self.sequential_module = nn.Sequential(*layers)
        self.error = MeanSquaredError()
        self.error.persistent(True)  # what it has of an epoch is saved
        self.losses: dict[int, float] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rows, targets = batch
        outputs = self.sequential_module(rows)
        loss = (outputs - targets).square().mean()
        self.error(outputs.detach(), targets)
        self.losses[self.global_step] = loss.item()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("error", self.error, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.sequential_module(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LoopNet(Net):
    """Loops over its layers itself; they are in an ``nn.ModuleList``."""

    def __init__(self, moments: tuple[int, ...]) -> None:
        super().__init__(moments)
        self.blocks = nn.ModuleList(self._modules.pop("sequential_module"))

    def sequential_module(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Data(pl.LightningDataModule):
    """Divides its rows at random each time that it is set up."""

    def __init__(self, shuffle: bool) -> None:
        super().__init__()
        self.shuffle = shuffle

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(2)
        rows, targets = (torch.randn(42, width, generator=generator, dtype=torch.float64) for width in (4, 1))
        self.rows, self.held_out = random_split(TensorDataset(rows, targets), [34, 8])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, 6, shuffle=self.shuffle)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, 4)


def trained(
    moments: tuple[int, ...],
    max_restarts: int,
    net: type[Net] = Net,
    trainer_class: Any = Trainer,
    shuffle: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """What a fit of two epochs of six steps comes to."""
    for number in range(len(moments)):
        Path(f"killed-{number}").unlink(missing_ok=True)
    torch.manual_seed(1)
    model = net(moments)
    # The last layer but two is on the worker of the second stage of three.
    strategy = RPCSequentialStrategy([2, 1, 2], microbatches=2, max_restarts=max_restarts, **options)
    trainer = trainer_class(
        accelerator="cpu",
        devices=3,
        strategy=strategy,
        precision="64-true",
        max_steps=STEPS,
        callbacks=[
            ModelCheckpoint("saved", every_n_train_steps=4, save_top_k=-1, enable_version_counter=False),
            best := ModelCheckpoint("best", "{epoch}", monitor="val_loss", save_weights_only=True),
            PipelineMonitor(4, dirpath="."),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(model, Data(shuffle))
    kept, best_path = sorted(path.name for path in Path("best").iterdir()), Path(best.best_model_path).name
    shutil.rmtree("best")
    events = [json.loads(line) for line in Path("pipeline", "events.jsonl").read_text().splitlines()]
    shutil.rmtree("pipeline")
    return {
        # Whether one balance is told to be better than another depends on the machine.
        "events": [(event["event"], event["step"]) for event in events if event["event"] != "imbalance"],
        "best": (kept, best_path),
        "losses": model.losses,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "tensors": {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]},
        "restarts": [str(w.message) for w in said if "Restart" in str(w.message)],
    }


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return (
        found["losses"] == expected["losses"]
        and found["best"] == expected["best"]
        and found["metrics"] == expected["metrics"]
        and all(torch.equal(found["tensors"][name], value) for name, value in expected["tensors"].items())
        and list(found["tensors"]) == list(expected["tensors"])
    )


def undisturbed_and_disturbed(moments: tuple[int, ...], max_restarts: int, **options: Any) -> Any:
    return trained((), 0, **options), trained(moments, max_restarts, **options)


@pytest.mark.slow
def test_a_run_that_loses_two_workers() -> None:
    """The first before there is a checkpoint of the user's, the second in the second epoch."""
    expected, found = run(undisturbed_and_disturbed, (5, 29), 2)
    assert equal(found, expected)
    first, second = found["restarts"]
    assert first.startswith("stage 1 (layers 2 to 2: Doomed), process ") and "was killed by signal 9 in F" in first
    assert first.endswith("\nRestart 1 of at most 2, from where it began.")
    assert "Restart 2 of at most 2, from " in second and second.endswith("epoch=1-step=8.ckpt.")
    assert expected["events"] == [("start", 0), ("checkpoint", 3), ("checkpoint", 7), ("checkpoint", 11), ("end", 12)]
    again = [("restart", 0), ("checkpoint", 3), ("checkpoint", 7), ("restart", 7), ("checkpoint", 11), ("end", 12)]
    assert found["events"] == [("start", 0), *again]


def in_other_ways() -> list[Any]:
    return [
        undisturbed_and_disturbed((17,), 1, net=LoopNet, module="blocks", schedule="1f1b"),
        undisturbed_and_disturbed((17,), 1, schedule="1f1b", state_dict_type="sharded", async_save=True),
        undisturbed_and_disturbed((5,), 1, trainer_class=pl.Trainer, shuffle=False),  # where it does not draw batches
    ]


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_other_schedules_checkpoints_and_trainers() -> None:
    for expected, found in run(in_other_ways, timeout_seconds=240):
        assert len(found["restarts"]) == 1 and equal(found, expected)


def killed_at_once() -> float:
    """The first worker is killed as soon as it has been forked."""
    spawn, killed = Workers._spawn, []

    def spawn_and_kill(self: Workers, session: Session, rank: int, deadline: float) -> Any:
        process = spawn(self, session, rank, deadline)
        if not killed:
            killed.append(process.pid)
            process.kill()
        return process

    Workers._spawn = spawn_and_kill
    try:
        return faults_job.train("", "", max_restarts=1)
    finally:
        Workers._spawn = spawn


PHASES = ("spawn", *faults_job.PHASES, "hang")
SOME_PHASES = ("spawn", "backward", "save", "hang")


def at_phases(phases: Sequence[str]) -> dict[str, float]:
    expected, found = faults_job.train("", ""), {}
    for phase in phases:
        if phase == "spawn":
            found[phase] = killed_at_once()
        elif phase == "hang":
            found[phase] = faults_job.train("hang once hang", "backward", 3.0, max_restarts=1)
        else:
            found[phase] = faults_job.train(f"kill once {phase}", phase, max_restarts=1)
    return {phase: loss - expected for phase, loss in found.items()}


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "phases",
    [pytest.param(SOME_PHASES, marks=pytest.mark.slow), pytest.param(PHASES, marks=pytest.mark.nightly)],
    ids=["some phases", "all phases"],
)
def test_a_worker_dies_or_hangs_at_any_phase(phases: Sequence[str]) -> None:
    assert run(at_phases, phases, timeout_seconds=240) == dict.fromkeys(phases, 0.0)


class Recovers(Net):
    """Validates worse once, and better ever after."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("worse", 2.0 if self.global_step == 4 else 1.0 / (1 + self.global_step))


def steps_after_a_stop(moments: tuple[int, ...]) -> tuple[int, int]:
    strategy = RPCSequentialStrategy([2, 1, 2], microbatches=2, max_restarts=1)
    stopping = EarlyStopping("worse", patience=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=strategy,
        precision="64-true",
        min_steps=10,
        max_steps=18,
        val_check_interval=2,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint("saved", every_n_train_steps=2, save_top_k=-1), stopping],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Recovers(moments), Data(shuffle=True))
    shutil.rmtree("saved")
    return trainer.global_step, stopping.stopped_epoch


def stops() -> list[tuple[int, int]]:
    return [steps_after_a_stop(()), steps_after_a_stop((26,))]  # a micro-batch of two is recomputed


@pytest.mark.slow
def test_a_stop_that_has_been_decided_stays() -> None:
    """By the validation after four steps, of which training runs ten at least; a worker is lost in the ninth."""
    before, after = run(stops)
    assert before == after and before[0] < 18


class Clumsy(Net):
    num_fits = 0

    def on_train_start(self) -> None:
        Clumsy.num_fits += 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise ArithmeticError("the user's own")


class Slow(Doomed):
    """Takes long either before a first worker was killed or afterwards."""

    def __init__(self, moments: tuple[int, ...], *, later: bool) -> None:
        super().__init__(moments)
        self.later = later

    def forward(self, rows: Tensor) -> Tensor:
        if Path("killed-0").exists() == self.later:
            time.sleep(0.02)
        return super().forward(rows)


def balances_of_a_restarted_run() -> list[list[int]]:
    found: list[list[int]] = []

    class Changing(Net):
        def __init__(self) -> None:
            super().__init__(())
            last = nn.Sequential(Slow((), later=True), nn.Linear(6, 1))
            self.sequential_module = nn.Sequential(nn.Linear(4, 6), Slow((5,), later=False), nn.Tanh(), nn.Tanh(), last)
            self.example_input_array = torch.rand(6, 4, dtype=torch.float64)

        def on_train_start(self) -> None:
            found.append(self.trainer.strategy.balance)

    strategy = RPCSequentialStrategy(microbatches=2, max_restarts=1, balance_mode="balance_by_time")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision="64-true",
        max_steps=4,
        num_sanity_val_steps=0,
        **quiet,
    )
    trainer.fit(Changing(), Data(shuffle=True))
    return found


@pytest.mark.slow
def test_the_balance_stays() -> None:
    """Times measured anew would give another one."""
    before, after = run(balances_of_a_restarted_run)
    assert before == after and before[0] <= 2


class Elsewhere(TorchCheckpointIO):
    """Writes where nobody looks for it."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, f"{path}.elsewhere", storage_options)


def lost_too_often() -> tuple[str, int, bool]:
    """What is raised, and whether the same process trains after that; the user's own errors are no losses."""
    with pytest.raises(WorkerLost) as lost:
        trained((5, 17), 1)
    with pytest.raises(WorkerLost):  # the counters of the loops would stay where they are
        trained((5,), 1, checkpoint_io=Elsewhere())
    with pytest.raises(ArithmeticError):
        trained((), 1, Clumsy)
    return str(lost.value), Clumsy.num_fits, equal(trained((), 1), trained((), 0))


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_run_that_loses_too_many_workers() -> None:
    lost, num_fits, trains_after = run(lost_too_often, timeout_seconds=140)
    assert ", was killed by signal 9 in F" in lost
    assert num_fits == 1
    assert trains_after


def test_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (-1, 1.0, True, "1"):
        with pytest.raises(MisconfigurationException, match="max_restarts must be a whole number of at least 0, got "):
            RPCSequentialStrategy(max_restarts=wrong)
    for callback in (LearningRateFinder(), BatchSizeFinder(), StochasticWeightAveraging(0.1)):
        plugin = RPCSequentialStrategy(max_restarts=1)
        trainer = Trainer(accelerator="cpu", devices=2, strategy=plugin, logger=False, callbacks=[callback])
        message = f"{type(callback).__name__} (trains within fit and then undoes it|keeps its progress)"
        with pytest.raises(MisconfigurationException, match=message):
            trainer.fit(Net(()))
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(MisconfigurationException, match="on the driver's host, but num_nodes=2"):
        plugin = RPCSequentialStrategy(max_restarts=1)
        Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy=plugin, logger=False)
