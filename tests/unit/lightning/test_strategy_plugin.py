"""The teardown of a strategy raises the first error of a run, and no other one."""

from typing import Any

import pytest
import pytorch_lightning as pl

from strategies import DDPStrategy, RPCSequentialStrategy, StrategyPlugin, ZeROStrategy
from strategies.checkpoint.background import BackgroundWriter
from strategies.common.errors import WorkerLost
from trainer import Trainer


def prepared(strategy: Any, devices: int) -> tuple[Trainer, Any]:
    """A strategy as it is within a run, when a checkpoint could not be written in the background."""
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False)
    strategy.accelerator, strategy._writer = trainer.accelerator, BackgroundWriter()

    def write() -> None:
        raise OSError(28, "No space left on device")

    strategy._writer.save(write)
    return trainer, strategy


def test_a_lost_worker_is_the_first_error() -> None:
    """The checkpoint could not be written because of it, so that error is only a warning."""

    def close() -> None:
        raise WorkerLost("stage 0 was killed by signal 9")

    _, strategy = prepared(RPCSequentialStrategy([1, 1], async_save=True), 2)
    strategy._ending.callback(close)
    with pytest.raises(WorkerLost, match="stage 0"), pytest.warns(match="A checkpoint could not be saved .*No space"):
        strategy.teardown()


def test_a_checkpoint_that_could_not_be_written_is_an_error_by_itself() -> None:
    _, strategy = prepared(RPCSequentialStrategy([1, 1], async_save=True), 2)
    with pytest.raises(OSError, match="No space left"):
        strategy.teardown()


@pytest.mark.parametrize("kind", [DDPStrategy, ZeROStrategy, RPCSequentialStrategy])
def test_a_run_that_its_launcher_refuses(kind: type[StrategyPlugin]) -> None:
    """The model has no Trainer then; Lightning tears down the strategy before it raises the launcher's error."""
    trainer = Trainer(accelerator="cpu", devices=2, strategy=kind(), logger=False, enable_checkpointing=False)
    strategy: Any = trainer.strategy
    strategy._lightning_module = pl.LightningModule()
    strategy.teardown()
