"""A user's script: averages of weights under a strategy with several ranks or replicas.

Run as ``python weight_averaging_job.py RESULTS STRATEGY...``, with strategies of the same number of ranks; Lightning
starts the other ranks by running it once more.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from parity_trainers import state_of
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from replicas_job import QUIET, Net

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from trainer import Trainer

STRATEGIES: dict[str, tuple[Any, int]] = {
    "single": ("single_device", 1),
    "ddp": (DDPStrategy, 2),
    "zero 2": (lambda: ZeROStrategy(stage=2, overlap_with_ddp=True), 2),
    "replicas": (lambda: RPCSequentialStrategy([3, 3], 2, data_parallel_size=2, zero_stage=1), 4),
    "parts": (lambda: RPCSequentialStrategy([3, 3], 2, tensor_parallel_size=2), 4),
    "sharded": (lambda: RPCSequentialStrategy([2, 2, 2], 2, state_dict_type="sharded"), 3),
}

CALLBACKS = {
    "mean": lambda: WeightAveraging(),
    "ema": lambda: EMAWeightAveraging(decay=0.7, update_every_n_steps=2),
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2),
}


class Doubled(Net):
    """In float64 before an average is made of it."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.double()

    def tensor_parallel_plan(self) -> dict[str, str]:
        """The styles of the layers; the tied ones are on both stages, and the first one is on the driver."""
        columns = ("before", "sequential_module.0", "sequential_module.3")
        return {**dict.fromkeys(columns, "colwise_gather_output"), "sequential_module.5": "rowwise_split_input"}


def train(name: str, callback: Any, folder: Path, start: Path | None = None) -> dict[str, Any]:
    """Trains, from a checkpoint if there is a ``start``; returns what is to be equal."""
    seed_everything(0, verbose=False)
    strategy, devices = STRATEGIES[name]
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = Trainer(
        devices=devices,
        strategy=strategy() if callable(strategy) else strategy,
        callbacks=[callback, saving],
        **{**QUIET, "enable_checkpointing": True},
    )
    model = Doubled()
    trainer.fit(model, ckpt_path=start)
    return {
        "losses": model.losses,
        "metrics": dict(trainer.callback_metrics),
        "state": state_of(model),
        "average": state_of(callback._average_model),
        "is first": trainer.is_global_zero,
    }


if __name__ == "__main__":
    results = Path(sys.argv[1])
    for name in sys.argv[2:]:
        found, folder = {}, results / name
        for kind, make in CALLBACKS.items():
            found[kind] = train(name, make(), folder / kind)
            if kind == "mean":
                found["resumed"] = train(name, make(), folder / "resumed", folder / kind / "step=4.ckpt")
        if all([outcome.pop("is first") for outcome in found.values()]):
            torch.save(found, results / f"{name}.pt")
