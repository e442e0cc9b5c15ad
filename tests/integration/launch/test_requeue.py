"""SLURM's signal: the checkpoint is saved after the batch, is whole, and training continues from it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cluster_models import GLOBAL_BATCH, ROWS, ClusterData, ClusterNet
from harness import run
from lightning_fabric.plugins.environments.lightning import find_free_network_port
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from strategies import DDPStrategy, RPCSequentialStrategy
from strategies.lightning.compat import rank_zero_only
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


@contextmanager
def in_a_job() -> Iterator[Path]:
    """This process is a job of SLURM; a file gets the checkpoints at each call of ``scontrol``, and its arguments."""
    folder = Path.cwd()
    said, program = folder / "said", folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nls {folder} | grep ckpt >> {said}\necho "$@" >> {said}\n')
    program.chmod(0o755)
    path, port = f"{program.parent}:{os.environ['PATH']}", str(find_free_network_port())
    try:
        with mock.patch.dict(os.environ, VARIABLES, PATH=path, MASTER_PORT=port):
            yield said
    finally:
        if torch.distributed.is_initialized():  # by DDP, which leaves it
            torch.distributed.destroy_process_group()


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
def test_several_drivers_do_not_communicate_after_batches_of_an_evaluation(
    state: TrainerFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have different numbers of batches. (Without a process group, ``all_reduce`` is an error.)"""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    callback = RequeueAfterBatch(pytest.fail, 2, nullcontext)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_should_accumulate=lambda: False))
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=state), sanity_checking=False, fit_loop=loop)
    callback.note()
    says = nullcontext() if state == TrainerFn.FITTING else pytest.warns(UserWarning, match="a longer time limit")
    with says:
        for hook in (callback.on_validation_batch_end, callback.on_test_batch_end, callback.on_predict_batch_end):
            hook(trainer)
    assert callback.is_due == (state == TrainerFn.FITTING)


def whole_batch(make: Any, at: tuple[str, int], accumulated: int, done: int, async_save: bool) -> None:
    folder, in_validation = Path.cwd(), at[0] == "validation"
    says = pytest.warns(UserWarning, match="skips the rest of this validation") if in_validation else nullcontext()
    with in_a_job() as said:
        undisturbed = fit(folder / "other", make(), None, accumulate_grad_batches=accumulated)
        with says:
            first = fit(folder, make(async_save=async_save), at, accumulate_grad_batches=accumulated)
        assert said.read_text().split("\n")[:2] == ["hpc_ckpt_1.ckpt", "requeue 7"]
        saved = torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=False)
        assert saved["global_step"] == done // accumulated
        again = fit(folder, make(), None, accumulate_grad_batches=accumulated)
    assert undisturbed.validations == first.validations == 2 * NUM_BATCHES
    assert again.validations == (NUM_BATCHES if in_validation else 2 * NUM_BATCHES)
    for model in (first, again):
        equal(model, undisturbed)


def equal(model: WarnedNet, other: WarnedNet) -> None:
    for value, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


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
def test_the_checkpoint_is_of_a_whole_batch(make: Any, at: Any, accumulated: int, done: int, async_save: bool) -> None:
    """Also with ``async_save``, it is on disk before SLURM is asked to end the job."""
    run(whole_batch, make, at, accumulated, done, async_save)


def between_accumulated_batches() -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "val_check_interval": 4}
    with in_a_job():
        undisturbed = fit(Path("other"), RPCSequentialStrategy(), None, **settings)
        fit(Path.cwd(), RPCSequentialStrategy(), ("validation", 3), **settings)
        assert torch.load("hpc_ckpt_1.ckpt", weights_only=False)["global_step"] == 2
        equal(fit(Path.cwd(), RPCSequentialStrategy(), None, **settings), undisturbed)


def test_a_validation_between_two_accumulated_batches_goes_on() -> None:
    """A checkpoint within it would lack the gradients so far."""
    run(between_accumulated_batches)
