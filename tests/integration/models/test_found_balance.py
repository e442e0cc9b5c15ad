"""A model of Hugging Face whose balance is measured trains as in one process, as if nothing had run before."""

from typing import Any

import pytest
import torch
from harness import run
from parity import Small, check
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 400


class Model(Small):
    """The driver's tables are larger than a block, and there is no example input."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        self.net = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=6,
                num_attention_heads=2,
                max_position_embeddings=32,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


def tokens() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(VOCABULARY, (rows, 12), generator=generator) for rows in (6, 5)]
    return DataLoader(batches, batch_size=None)


def a_measured_balance() -> None:
    strategy = {"schedule": "1f1b", "balance": "by_size"}
    # Llama's norms and loss compute in float32.
    _, outcome = check(Model, train=tokens, strategy=strategy, stages=[2], tolerance=1e-5)
    assert outcome.trainer.strategy.balance == [4, 2]


@pytest.mark.slow
def test_a_measured_balance() -> None:
    run(a_measured_balance, timeout_seconds=120)
