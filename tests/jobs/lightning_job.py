"""A script with ``import lightning as L`` that trains in several ways: ``lightning_job.py OUTCOMES WAY...``."""

import sys
from typing import Any

import lightning as L
import torch
from lightning_models import Count, Data, Net

from strategies import RPCSequentialStrategy
from trainer import Trainer

WAYS = {
    "one process": lambda **quiet: Trainer(strategy="single_device", devices=1, **quiet),
    "pipeline": lambda **quiet: Trainer(strategy="rpc_sequential", devices=2, **quiet),
    "1f1b under Lightning's Trainer": lambda **quiet: L.Trainer(
        strategy=RPCSequentialStrategy(microbatches=2, schedule="1f1b"), devices=2, **quiet
    ),
    "ddp": lambda **quiet: Trainer(strategy="ddp", devices=2, **quiet),
    "zero": lambda **quiet: Trainer(strategy="zero", devices=2, **quiet),
}


def main(path: str, *ways: str) -> None:
    outcomes: dict[str, Any] = {}
    for way in ways:
        count, model = Count(), Net()
        trainer = WAYS[way](
            accelerator="cpu",
            max_epochs=2,
            callbacks=[count],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        assert isinstance(trainer, L.Trainer)
        trainer.fit(model, Data(batch_size=4 // trainer.world_size))
        outcomes[way] = {
            "loss": trainer.callback_metrics["loss"].item(),
            "parameters": model.state_dict(),
            "steps": count.steps,
        }
    assert not [name for name in sys.modules if name.startswith(("pytorch_lightning", "lightning_fabric"))]
    if trainer.is_global_zero:
        torch.save(outcomes, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
