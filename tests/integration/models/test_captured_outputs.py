"""What ``transformers`` captures by hooks in the blocks comes back: router logits, hidden states, attention weights."""

from typing import Any

import pytest
import torch
from harness import run
from parity import compare, fit
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from strategies import RPCSequentialStrategy

NUM_BLOCKS = 3


class Mixture(LightningModule):
    """A mixture of experts whose loss depends on everything that is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=50,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=NUM_BLOCKS,
                num_attention_heads=2,
                num_key_value_heads=1,
                num_local_experts=3,
                output_router_logits=True,
                attn_implementation="eager",
                experts_implementation="eager",  # the others do not take float64
            )
        )
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch, output_hidden_states=True, output_attentions=True)
        assert len(output.router_logits) == len(output.attentions) == NUM_BLOCKS
        assert len(output.hidden_states) == NUM_BLOCKS + 1
        assert output.aux_loss.item() > 0
        some = [*(state[:, 1] for state in output.hidden_states), *(a[:, :, -1] for a in output.attentions)]
        return output.loss + sum(0.1 * one.square().mean() for one in some)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def padded() -> Any:
    generator = torch.Generator().manual_seed(0)
    made = []
    for rows in (6, 5):
        ids = torch.randint(0, 50, (rows, 7), generator=generator)
        mask = (torch.arange(7) < torch.arange(7, 7 - rows, -1)[:, None]).long()
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    same = torch.randint(0, 50, (1, 7), generator=generator).repeat(6, 1)  # the micro-batches are equal
    made.append({"input_ids": same, "attention_mask": torch.ones_like(same), "labels": same})
    return DataLoader(made, batch_size=None)


def captured(options: dict[str, Any]) -> None:
    single = fit(Mixture, "auto", 1, train=padded)
    compare(fit(Mixture, RPCSequentialStrategy(balance="even", **options), 2, train=padded), single)


@pytest.mark.parametrize(
    "options", [{"microbatches": 3}, pytest.param({"schedule": "1f1b", "microbatches": 1}, marks=pytest.mark.slow)]
)
def test_a_loss_of_captured_outputs_is_that_of_one_process(options: dict[str, Any]) -> None:
    """Under ``1f1b`` each micro-batch has an auxiliary loss of its own, so there is one micro-batch here."""
    run(captured, options, timeout_seconds=240)
