"""A user's script that trains adapters by DDP and by ZeRO, and goes on from checkpoints that hold the adapters alone.

Run as ``python adapters_job.py FOLDER``. Lightning starts the second rank by running it once more. Every rank compares.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from adapter_parts import Adapted, batches
from parity import Outcome, fit
from pytorch_lightning import Callback
from torch.utils.data import DataLoader

from strategies import DDPStrategy, ZeROStrategy

ZERO: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "overlap_with_ddp": True, "parameters_as_bucket_view": True},
]
FILES: list[dict[str, Any]] = [{}, {"state_dict_type": "sharded", "async_save": True}]


class OneTensor(Adapted):
    """Trains one tensor, so that one of two ranks owns nothing."""

    def __init__(self) -> None:
        super().__init__(layers_to_transform=[3], target_modules=["q_proj"])
        for name, parameter in self.trained.items():
            parameter.requires_grad_("lora_B" in name)
        assert len(self.trained) == 1


class SavesFirstEpoch(Callback):
    """Writes a checkpoint after the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def shares() -> DataLoader:
    """Other batches on each rank."""
    return DataLoader(batches((4, 3, 4, 3))[int(os.environ.get("LOCAL_RANK", "0")) :: 2], batch_size=None)


def trained(make: Any, strategy: Any, **arguments: Any) -> Outcome:
    return fit(make, strategy, 2, train=shares, use_distributed_sampler=False, **arguments)


def same_values(actual: Outcome, expected: Outcome) -> None:
    for name, value in expected.parameters.items():
        assert torch.equal(actual.parameters[name], value), name


def main(folder: Path) -> None:
    for make in (Adapted, OneTensor):
        reference = trained(make, DDPStrategy())
        for options in ZERO:
            outcome = trained(make, ZeROStrategy(**options))
            same_values(outcome, reference)
            num_states = torch.tensor(float(len(outcome.trainer.optimizers[0].state)))
            counts = outcome.trainer.strategy.all_gather(num_states)
            assert counts.sum() == len(outcome.model.trained), counts
            assert (make is OneTensor) == (counts.min() == 0), counts
    for number, options in enumerate(FILES):
        make, saves = partial(Adapted, adapters_only=True), SavesFirstEpoch(folder / f"{number}.ckpt")
        whole = trained(make, ZeROStrategy(stage=2, **options), callbacks=[saves])
        resumed = trained(make, ZeROStrategy(stage=2, **options), ckpt_path=str(saves.path))
        assert resumed.model.loaded == [*whole.model.trained]
        same_values(resumed, whole)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
