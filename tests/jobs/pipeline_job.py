"""One training of the example GPT under any strategy, made to be compared digit by digit."""

import logging
import warnings
from typing import Any

import torch
from pytorch_lightning import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from examples.gpt import GPT
from examples.text import PythonDocs
from trainer import Trainer

NUM_STEPS = 20
LEARNING_RATE = 3e-3


class GPTWithLosses(GPT):
    """The GPT; keeps the loss of each step."""

    def __init__(self, **hyperparameters: Any):
        super().__init__(**hyperparameters)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def quiet() -> None:
    """Silences what a reader of a failing test need not see."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def small_gpt() -> GPTWithLosses:
    """A GPT of 6 layers with the same weights each time."""
    seed_everything(1, verbose=False)
    return GPTWithLosses(
        block_size=16, width=16, num_blocks=3, num_heads=2, learning_rate=LEARNING_RATE, warmup_steps=8
    )


def loaders() -> tuple[DataLoader, DataLoader]:
    """Five batches an epoch, four of 6 rows and one of 3; and validation batches that are larger."""
    blocks = PythonDocs(block_size=16).train_dataloader().dataset
    train = Subset(blocks, range(4 * 6 + 3))
    shuffled = DataLoader(train, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(0))
    return shuffled, DataLoader(Subset(blocks, range(1000, 1023)), batch_size=10)


def fit(
    strategy: Any, devices: Any, *, ckpt_path: str | None = None, **arguments: Any
) -> tuple[GPTWithLosses, Trainer]:
    """Trains the small GPT for 20 steps: AdamW with two groups, warm-up, batches of 6, 6, 6, 6, 3 rows."""
    quiet()
    model = small_gpt()
    trainer = Trainer(
        devices=devices,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", "max_steps": NUM_STEPS, "enable_checkpointing": False, **arguments},
    )
    trainer.fit(model, *loaders(), ckpt_path=ckpt_path)
    return model, trainer


def outcome(model: GPTWithLosses, trainer: Trainer) -> dict[str, Any]:
    """What a training came to, as plain types and tensors."""
    return {
        "losses": model.losses,
        "val_loss": trainer.callback_metrics["val_loss"].item(),
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "optimizer": trainer.optimizers[0].state_dict(),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
    }
