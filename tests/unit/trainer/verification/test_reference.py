"""Dropout is switched off wherever a model keeps its probability."""

import torch
from torch import nn

from trainer.verification.reference import switch_off_dropout


class Functional(nn.Module):
    """Passes a probability to a function, as models of ``transformers`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.attention_dropout, self.training)


def test_no_layer_draws_random_numbers_afterwards() -> None:
    layers = nn.Sequential(
        nn.Dropout(0.5), Functional(), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    )
    x = torch.ones(2, 3, 8)
    assert not torch.equal(layers(x), layers(x))
    switch_off_dropout(layers)
    assert torch.equal(layers(x), layers(x))
