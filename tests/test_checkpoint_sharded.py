"""``state_dict_type="sharded"``: every stage writes and reads its own part."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_job import Resumed, fit, pipeline, single
from harness import run
from parity_trainers import alike


class Tied(Resumed):
    """A weight on the first stage and on the second, and one on the first and on the driver; a buffer made late."""

    def __init__(self) -> None:
        super().__init__()
        first, *_ = layers = self.sequential_module
        layers[3].weight = first.weight


def in_parts() -> dict[str, Any]:
    """Two stages, then three, then one process; each goes on from what the one before saved in parts."""
    first, second, third = (Path(f"{k}.ckpt") for k in range(3))
    sharded = {"state_dict_type": "sharded"}
    seen = [fit(pipeline(2, **sharded, async_save=True), 1, callbacks=[saver(first)])]
    assert sorted(path.suffix for path in first.rglob("__*")) == [".distcp"] * 2
    seen.append(fit(pipeline(3, **sharded), 2, ckpt_path=first, callbacks=[saver(second)]))
    assert sorted(path.suffix for path in second.rglob("__*")) == [".distcp"] * 3
    command = [sys.executable, "-m", "strategies.consolidate", str(second), str(third)]
    subprocess.run(command, check=True, timeout=60, env={"PYTHONPATH": str(Path(__file__).parents[1])})
    seen.append(fit(single(), 3, ckpt_path=third))
    losses = [loss for each in seen for loss in each["losses"]]
    return {
        "last": {**seen[-1], "losses": losses},
        "whole": fit(single(), 3),
        "file": torch.load(third, weights_only=True),
    }


def saver(path: Path) -> Any:
    from pytorch_lightning import Callback

    class Saver(Callback):
        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            pass

        def on_train_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(path)

    return Saver()


def test_in_parts() -> None:
    seen = run(in_parts)
    alike(seen["last"], seen["whole"])
