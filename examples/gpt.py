"""A character GPT as an ordinary LightningModule: its layers form one `nn.Sequential`, under any strategy."""

import math

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from examples.text import VOCABULARY_SIZE, decode, encode


class Embedding(nn.Module):
    """Sum of token and position embedding: maps `[batch, block]` to `[batch, block, width]`."""

    def __init__(self, block_size: int, width: int, dropout: float):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY_SIZE, width)
        self.positions = nn.Parameter(torch.randn(block_size, width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])


class Block(nn.Module):
    """Pre-norm transformer block with causal attention: maps `[batch, block, width]` to the same shape."""

    def __init__(self, width: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self._attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(x))

    def _attention(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # [batch, block, 3, heads, head width]
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.projection(attended.transpose(1, 2).flatten(2))


class GPT(LightningModule):
    """Predicts the next character: maps tokens `[batch, block]` to logits `[batch, block, vocabulary]`."""

    def __init__(
        self,
        block_size: int = 128,
        width: int = 96,
        num_blocks: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.sequential_module = nn.Sequential(
            Embedding(block_size, width, dropout),
            *(Block(width, num_heads, dropout) for _ in range(num_blocks)),
            nn.LayerNorm(width),
            nn.Linear(width, VOCABULARY_SIZE),
        )
        self.example_input_array = torch.zeros(8, block_size, dtype=torch.long)
        self.perplexity = Perplexity()
        self.accuracy = MulticlassAccuracy(VOCABULARY_SIZE, average="micro")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.sequential_module(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, targets = batch
        logits = self(tokens)
        self.perplexity(logits, targets)
        self.accuracy(logits.flatten(0, 1), targets.flatten())
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), targets.flatten()), prog_bar=True, sync_dist=True)
        self.log_dict({"val_perplexity": self.perplexity, "val_accuracy": self.accuracy})

    def configure_optimizers(self) -> dict:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]  # biases and norms: no weight decay
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.hparams.learning_rate,
            weight_decay=self.hparams.weight_decay,
            betas=(0.9, 0.95),
        )
        num_steps = self.trainer.estimated_stepping_batches
        warmup_steps = self.hparams.warmup_steps
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_cosine(t, warmup_steps, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def warmup_cosine(step: int, warmup_steps: int, num_steps: float) -> float:
    """Learning-rate factor: rises linearly for `warmup_steps`, then falls as a cosine to a tenth at `num_steps`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1.0, num_steps - warmup_steps))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def generate(model: GPT, prompt: str, num_characters: int, *, temperature: float = 0.8, seed: int = 0) -> str:
    """Return the prompt and `num_characters` characters, each sampled from the model's softmax at `temperature`."""
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = encode(prompt)
    for _ in range(num_characters):
        context = tokens[-model.hparams.block_size :].to(model.device)
        logits = model(context[None])[0, -1].float().cpu()
        tokens = torch.cat([tokens, torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)])
    model.train(was_training)
    return decode(tokens)
