"""A Hugging Face model with adapters of ``peft``, its data, and how many forward passes its blocks have run.

For use within a child of the harness.
"""

from typing import Any

import torch
from parity import Small
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 40
Batch = dict[str, Tensor]


class Counts(nn.Module):
    """Counts its forward passes, and brings the number home from a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += self.training
        return x

    def get_extra_state(self) -> int:
        return self.runs

    def set_extra_state(self, state: int) -> None:
        self.runs = state


def base_model(num_blocks: int = 4) -> LlamaForCausalLM:
    """A Llama with random weights, the same ones in every call."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_blocks,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config)
    torch.set_rng_state(state)
    return model


def adapted_model(*, checkpointing: dict[str, Any] | None = None, **options: Any) -> PeftModel:
    """The model with LoRA on a frozen base; its adapters are not zero at the start, so that each has a gradient.

    Args:
        checkpointing: Arguments of ``torch.utils.checkpoint``, to switch gradient checkpointing on.
        options: Of ``LoraConfig``.
    """
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    base = base_model()
    if checkpointing is not None:
        base.gradient_checkpointing_enable(checkpointing)
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))


class Adapted(Small):
    """Trains adapters; the optimizer is given all parameters, of which most are frozen.

    Args:
        adapters_only: Whether a checkpoint holds the adapters alone.
        options: Of :func:`adapted_model`.
    """

    def __init__(self, *, adapters_only: bool = False, **options: Any) -> None:
        super().__init__()
        del self.sequential_module
        self.net, self.adapters_only = adapted_model(**options), adapters_only
        self.strict_loading = not adapters_only
        self.loaded: list[str] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.next_token_loss(batch)
        self.log("train_loss", loss)
        return loss

    def next_token_loss(self, batch: Batch) -> Tensor:
        """The loss of the model itself, which would compute it in float32."""
        logits = self.net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.next_token_loss(batch), batch_size=len(batch["labels"]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.adapters_only:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value for name, value in state.items() if "lora_" in name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = list(checkpoint["state_dict"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are not frozen, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


def batches(sizes: tuple[int, ...] = (6, 5, 2)) -> list[Batch]:
    """Batches of padded rows of tokens; padded places count in the loss, so micro-batches weigh by their rows."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for rows in sizes:
        ids = torch.randint(0, VOCABULARY, (rows, 8), generator=generator)
        lengths = torch.randint(3, 9, (rows, 1), generator=generator)
        made.append({"input_ids": ids, "attention_mask": (torch.arange(8) < lengths).long(), "labels": ids})
    return made


def loader(sizes: tuple[int, ...] = (6, 5, 2)) -> DataLoader:
    """A loader of :func:`batches`."""
    return DataLoader(batches(sizes), batch_size=None)
