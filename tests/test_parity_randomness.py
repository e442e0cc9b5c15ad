"""Dropout masks do not depend on the number of stages, and go on over a checkpoint and over a second ``fit``."""

from pathlib import Path
from typing import Any

import torch
from harness import run
from parity import Small, batches, compare, fit
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from strategies import RPCSequentialStrategy
from strategies.pipeline.randomness import Seeds


class Dropped(Small):
    """Dropout on every stage; counts the batches of a run."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Dropout(0.3), nn.Dropout(0.3), nn.Linear(6, 2)]
        self.sequential_module = nn.Sequential(*layers)


class Still(Dropped):
    """Learns nothing, so that a loss differs only by its masks."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(stages: int, checkpoint: str = "except_last", **arguments: Any) -> Any:
    strategy = RPCSequentialStrategy([6 // stages] * stages, microbatches=3, checkpoint=checkpoint)
    return fit(Dropped, strategy, stages, val=batches, **arguments)


def resumed(folder: str) -> None:
    saving = ModelCheckpoint(folder, filename="{step}", save_on_train_epoch_end=True, save_top_k=-1)
    whole = train(2, max_epochs=3, callbacks=[saving], enable_checkpointing=True)
    for stages, step, mode in ((1, 4, "never"), (3, 8, "always")):
        checkpoint = Path(folder) / f"step={step}.ckpt"
        torch.manual_seed(99)  # the seeds are the checkpoint's
        part = train(stages, mode, max_epochs=3, ckpt_path=str(checkpoint), val_check_interval=2)
        part.losses[:0] = whole.losses[: len(whole.losses) - len(part.losses)]
        part.metrics.clear(), whole.metrics.clear()
        compare(part, whole, 1e-6)  # Lightning loads float64 weights into a model that is still float32
    single = fit(Dropped, "auto", 1, max_epochs=4, ckpt_path=str(checkpoint))  # plain Lightning ignores our key
    assert len(single.losses) == 16 - 8


def test_resumed_runs_draw_what_would_have_come_next(tmp_path: Path) -> None:
    run(resumed, str(tmp_path))


def twice() -> list[float]:
    strategy = RPCSequentialStrategy([3, 3], microbatches=3)
    first = fit(Still, strategy, 2, max_epochs=1, train=lambda: batches((8,) * 3, seed=1))
    trainer, model = first.trainer, first.model
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches((8,) * 3, seed=1))
    return model.losses


def test_a_second_fit_goes_on() -> None:
    losses = run(twice)
    assert len(losses) == len(set(losses)) == 6


def test_seeds() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    seeds = Seeds.ahead_of_the_process()
    assert torch.equal(torch.get_rng_state(), state)
    drawn = [seeds.next(training) for training in (True, True, False, True)]
    assert len(set(drawn)) == 4 and all(0 <= seed < 2**63 for seed in drawn)
    again = Seeds.ahead_of_the_process()
    assert [again.next(True) for _ in range(3)] == [drawn[0], drawn[1], drawn[3]]  # others do not count
    resumed = Seeds(0)
    resumed.load_state_dict(seeds.state_dict())
    assert resumed.next(True) == again.next(True) and resumed.next(False) == seeds.next(False)
    torch.rand(1)
    assert Seeds.ahead_of_the_process().next(True) != drawn[0]
