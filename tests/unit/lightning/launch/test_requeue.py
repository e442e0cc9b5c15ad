"""SLURM's signal: the checkpoint is saved after the batch, is whole, and training continues from it."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster_models import GLOBAL_BATCH, ROWS, ClusterData, ClusterNet
from lightning_fabric.plugins.environments.lightning import find_free_network_port
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from strategies import DDPStrategy, RPCSequentialStrategy
from strategies.lightning.launch.requeue import RequeueAfterBatch
from trainer import Trainer

NUM_BATCHES = ROWS // GLOBAL_BATCH
VARIABLES = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "relay",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


class WarnedNet(ClusterNet):
    """SLURM's signal reaches it in the forward pass of a batch."""

    def __init__(self, at: tuple[str, int] | None) -> None:
        super().__init__()
        self.at, self.validations = at, 0

    def notice(self, where: str, batch_idx: int) -> None:
        if (where, batch_idx) == self.at:
            self.at = None
            os.kill(os.getpid(), signal.SIGUSR1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.notice("training", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.notice("validation", batch_idx)
            self.validations += 1


class Validated(ClusterData):
    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.fixture
def requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the checkpoints that there were when ``scontrol`` was called, and its arguments."""
    said = tmp_path / "said"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nls {tmp_path} | grep ckpt >> {said}\necho "$@" >> {said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    for name, value in {**VARIABLES, "MASTER_PORT": str(find_free_network_port())}.items():
        monkeypatch.setenv(name, value)
    return said


def fit(folder: Path, strategy: Any, at: tuple[str, int] | None, **settings: Any) -> WarnedNet:
    torch.manual_seed(0)
    model = WarnedNet(at)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        plugins=[SLURMEnvironment()],
        precision="64-true",
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **settings,
    )
    callbacks = list(trainer.callbacks)
    trainer.fit(model, datamodule=Validated(shuffle=True))
    assert trainer.callbacks == callbacks
    return model


@pytest.mark.parametrize("state", [TrainerFn.FITTING, TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.PREDICTING])
def test_several_drivers_do_not_communicate_after_batches_of_an_evaluation(state: TrainerFn) -> None:
    """They may have different numbers of batches. (Without a process group, ``all_reduce`` is an error.)"""
    callback = RequeueAfterBatch(pytest.fail, 2, nullcontext)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_should_accumulate=lambda: False))
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=state), sanity_checking=False, fit_loop=loop)
    callback.note()
    says = nullcontext() if state == TrainerFn.FITTING else pytest.warns(UserWarning, match="a longer time limit")
    with says:
        for hook in (callback.on_validation_batch_end, callback.on_test_batch_end, callback.on_predict_batch_end):
            hook(trainer)
    assert callback.is_due == (state == TrainerFn.FITTING)


@pytest.mark.parametrize("make", [DDPStrategy, RPCSequentialStrategy])
@pytest.mark.parametrize(
    ("at", "accumulated", "done", "async_save"),
    [
        (("training", 4), 1, 5, True),
        (("training", 4), 3, 6, False),
        (("training", NUM_BATCHES - 1), 1, NUM_BATCHES, False),
        (("validation", 3), 1, NUM_BATCHES, False),
    ],
)
def test_the_checkpoint_is_of_a_whole_batch(
    make: Any, at: Any, accumulated: int, done: int, async_save: bool, requeued: Path, tmp_path: Path
) -> None:
    """Also with ``async_save``, it is on disk before SLURM is asked to end the job."""
    other = tmp_path / "other"
    other.mkdir()
    undisturbed = fit(other, make(), None, accumulate_grad_batches=accumulated)
    says = (
        pytest.warns(UserWarning, match="skips the rest of this validation") if at[0] == "validation" else nullcontext()
    )
    with says:
        first = fit(tmp_path, make(async_save=async_save), at, accumulate_grad_batches=accumulated)
    assert requeued.read_text().split("\n")[:2] == ["hpc_ckpt_1.ckpt", "requeue 7"]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == done // accumulated
    again = fit(tmp_path, make(), None, accumulate_grad_batches=accumulated)
    assert undisturbed.validations == first.validations == 2 * NUM_BATCHES
    assert again.validations == (NUM_BATCHES if at[0] == "validation" else 2 * NUM_BATCHES)
    for model in (first, again):
        for value, expected in zip(model.parameters(), undisturbed.parameters(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


def test_a_validation_between_two_accumulated_batches_goes_on(requeued: Path, tmp_path: Path) -> None:
    """A checkpoint within it would lack the gradients so far."""
    other = tmp_path / "other"
    other.mkdir()
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "val_check_interval": 4}
    undisturbed = fit(other, RPCSequentialStrategy(), None, **settings)
    fit(tmp_path, RPCSequentialStrategy(), ("validation", 3), **settings)
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"] == 2
    again = fit(tmp_path, RPCSequentialStrategy(), None, **settings)
    for value, expected in zip(again.parameters(), undisturbed.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
