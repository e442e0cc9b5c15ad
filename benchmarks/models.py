"""The models of several benchmarks, without Lightning, whose import would double the start-up time of each process."""

import torch
from torch import Tensor, nn

VOCABULARY = 128


class Embedding(nn.Module):
    """Sum of token and position embedding: maps ``[rows, length]`` to ``[rows, length, width]``."""

    def __init__(self, length: int, width: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class CausalLayer(nn.TransformerEncoderLayer):
    """An encoder layer with a causal mask."""

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x, src_mask=mask, is_causal=True)


def encoder_layers(num_layers: int, width: int, kind: type[nn.Module] = nn.TransformerEncoderLayer) -> nn.Sequential:
    """Return transformer layers without dropout, with the same weights at each call: ``[rows, length, width]``."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[kind(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(num_layers)]
    )


def gpt_layers(num_blocks: int, width: int, length: int, vocabulary: int = VOCABULARY) -> nn.Sequential:
    """Return a GPT with the same weights at each call: maps tokens ``[rows, length]`` to logits."""
    blocks = encoder_layers(num_blocks, width, CausalLayer)
    around = Embedding(length, width, vocabulary), nn.LayerNorm(width), nn.Linear(width, vocabulary)
    return nn.Sequential(around[0], *blocks, *around[1:])


def gpt_balance(num_blocks: int, stages: int) -> list[int]:
    """Give each stage the same number of blocks, the first stage the embedding, and the last stage norm and logits."""
    if num_blocks % stages:
        raise ValueError(f"{num_blocks} blocks do not divide evenly among {stages} stages; use a multiple of {stages}")
    balance = [num_blocks // stages] * stages
    balance[0] += 1
    balance[-1] += 2
    return balance
