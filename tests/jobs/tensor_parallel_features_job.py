"""A user's script: sharded checkpoints and random states under pipelines that divide layers.

Run as ``python tensor_parallel_features_job.py RESULTS``. Lightning starts the other driver by running this script once
more.
"""

import os
import sys
from pathlib import Path
from typing import Any

import tensor_parallel_job as job
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint

from strategies import RPCSequentialStrategy

STAGES, PARTS = 2, 2


def strategy(**options: Any) -> RPCSequentialStrategy:
    return RPCSequentialStrategy([2, 2], 2, "never", tensor_parallel_size=PARTS, **options)


def resumed(folder: Path) -> dict[str, Any]:
    """Trains one epoch, and the second one from its checkpoint; both are sharded and written in the background."""

    def fit(name: str, schedule: str, ckpt_path: Path | None = None, **settings: Any) -> Any:
        saving = ModelCheckpoint(folder / name, "{epoch}")
        options = {"schedule": schedule, "state_dict_type": "sharded", "async_save": True}
        settings |= {"callbacks": [saving], "enable_checkpointing": True}
        return job.fit(job.made("tied"), strategy(**options), STAGES * PARTS, ckpt_path, **settings)

    fit("first", "gpipe", max_epochs=1)
    return job.seen(*fit("second", "1f1b", folder / "first" / "epoch=0.ckpt"))


def seeded_apart() -> dict[str, Any]:
    """Trains with dropout where each pipeline has seeded its generators by its own number."""
    model = job.made("dropout")
    seed_everything(int(os.environ.get("LOCAL_RANK", 0)))
    del os.environ["PL_GLOBAL_SEED"]  # with which Lightning would seed all of them
    return job.seen(*job.fit(model, strategy(), STAGES * PARTS))


if __name__ == "__main__":
    results = {"sharded": resumed(Path(sys.argv[1])), "seeded apart": seeded_apart()}
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        torch.save(results, Path(sys.argv[1]) / "results.pt")
