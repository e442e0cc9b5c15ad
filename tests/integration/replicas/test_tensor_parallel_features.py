"""Sharded checkpoints and random states of pipelines that divide layers."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel_features_job
import tensor_parallel_job as job
import torch
from harness import run
from parity import alike
from pytorch_lightning import seed_everything
from pytorch_lightning.strategies import SingleDeviceStrategy
from scripts import Script

from strategies import RPCSequentialStrategy
from strategies.checkpoint.save_and_load import load_sharded

EXACT = 1e-9


def single(name: str, strategy: Any, path: Path) -> dict[str, Any]:
    model = job.made(name)
    seed_everything(0)  # as the first pipeline
    model, trainer = job.fit(model, strategy, 1)
    trainer.save_checkpoint(path)
    return job.seen(model, trainer)


def compared() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "single.ckpt"
        assert Script(tensor_parallel_features_job.__file__, name).wait(timeout=200) == 0
        results = torch.load(folder / "results.pt")
        dropout = RPCSequentialStrategy(microbatches=2, checkpoint="never")
        for case, model, strategy in (
            ("seeded apart", "dropout", dropout),  # one stage, whose masks are the same
            ("sharded", "tied", SingleDeviceStrategy("cpu")),
        ):
            expected, actual = single(model, strategy, path), results[case]
            for part in ("weights", "states"):
                alike(actual[part], expected[part], EXACT, f"{case} {part}")
        saved, whole = load_sharded(folder / "second" / "epoch=1.ckpt")[0], torch.load(path, weights_only=True)
        for part in ("state_dict", "optimizer_states"):
            alike(saved[part], whole[part], EXACT, f"checkpoint {part}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sharded_checkpoints_and_random_states_are_those_of_one_process() -> None:
    run(compared, timeout_seconds=290)
