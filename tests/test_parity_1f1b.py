from typing import Any

from harness import run
from parity import Small, batches, check
from torch.nn.functional import mse_loss


class Once(Small):
    """Keeps the loss of each batch, however often ``training_step`` is run for it."""

    def training_step(self, batch, batch_idx):
        return mse_loss(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


def plain():
    check(Once, strategy={"schedule": "1f1b", "microbatches": 4}, val=batches)
    check(
        Once,
        strategy={"schedule": "1f1b", "microbatches": 16, "checkpoint": "always"},
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
    )


def test_plain():
    run(plain, timeout_seconds=100)
