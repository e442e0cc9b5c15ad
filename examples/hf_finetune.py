"""A causal Hugging Face model, built from its configuration and trained as a pipeline, on characters.

Run it as a script (one epoch), or as `python -m trainer fit --config configs/hf_pipeline.yaml` (four epochs). The
weights are random at the start. To finetune an existing model, build it with
`AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train()` instead, and load your text with its
tokenizer. Without `dtype`, the weights keep the dtype of the file; without `train()`, the model is in evaluation mode.
"""

from typing import Any

import torch
from pytorch_lightning import LightningModule, seed_everything
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from examples.gpt import warmup_cosine
from examples.report import Report
from examples.text import VOCABULARY_SIZE, PythonDocs

SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


class CausalModel(LightningModule):
    """Predicts the next character: maps tokens `[batch, block]` to logits `[batch, block, vocabulary]`.

    Args:
        model_type: The family in `transformers`, such as `llama`, `qwen3` or `gpt_neox`.
        config: Arguments of the family's configuration class.
        block_size: Number of characters in a row.
        learning_rate: The highest learning rate.
        warmup_steps: Number of steps in which the learning rate rises.
    """

    def __init__(
        self,
        model_type: str = "llama",
        config: dict[str, Any] = SIZES,
        block_size: int = 128,
        learning_rate: float = 3e-3,
        warmup_steps: int = 50,
    ):
        super().__init__()
        self.save_hyperparameters()
        sizes = {"vocab_size": VOCABULARY_SIZE, "max_position_embeddings": block_size, **config}
        known = AutoConfig.for_model(model_type)
        if unknown := [name for name in sizes if not hasattr(known, name)]:  # otherwise the model gets default sizes
            raise ValueError(f"the configuration of {model_type} has no {', '.join(unknown)}")
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
        self.example_input_array = torch.zeros(8, block_size, dtype=torch.long)  # to measure the balance

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        num_steps, warmup_steps = self.trainer.estimated_stepping_batches, self.hparams.warmup_steps
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_cosine(t, warmup_steps, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    from strategies import RPCSequentialStrategy
    from trainer import Trainer

    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=RPCSequentialStrategy(balance="by_time", microbatches=4, schedule="1f1b", checkpoint="never"),
        max_epochs=1,
        default_root_dir="runs",
        callbacks=[Report()],
    )
    trainer.fit(CausalModel(), PythonDocs())
