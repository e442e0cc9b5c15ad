"""The models that several benchmarks train; nothing of Lightning, which would double the start of each process."""

import torch
from torch import Tensor, nn

VOCABULARY = 128


class Embedding(nn.Module):
    """Token plus position: ``[rows, length]`` to ``[rows, length, width]``."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class CausalLayer(nn.TransformerEncoderLayer):
    """A layer that looks at earlier positions only."""

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x, src_mask=mask, is_causal=True)


def encoder_layers(num_layers: int, width: int, kind: type[nn.Module] = nn.TransformerEncoderLayer) -> nn.Sequential:
    """Transformer layers without dropout, the same weights every time: ``[rows, length, width]`` to the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[kind(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(num_layers)]
    )


def gpt_layers(num_blocks: int, width: int, length: int) -> nn.Sequential:
    """A GPT, the same weights every time: ``[rows, length]`` tokens to logits."""
    blocks = encoder_layers(num_blocks, width, CausalLayer)
    return nn.Sequential(Embedding(length, width), *blocks, nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


def gpt_balance(num_blocks: int, stages: int) -> list[int]:
    """As many blocks for each stage; the embedding goes to the first, norm and logits to the last."""
    if num_blocks % stages:
        raise ValueError(f"{num_blocks} blocks do not divide evenly among {stages} stages; take a multiple of them")
    balance = [num_blocks // stages] * stages
    balance[0] += 1
    balance[-1] += 2
    return balance
