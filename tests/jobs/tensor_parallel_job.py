"""A user's script: models whose layers several pipelines divide, one fit per case.

Run as ``python tensor_parallel_job.py RESULTS STAGES PARTS REPLICAS CASE ...``. Lightning starts the other drivers by
running this script once more.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parity import placed
from pytorch_lightning import LightningModule, seed_everything
from pytorch_lightning.callbacks import LearningRateFinder, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from strategies import RPCSequentialStrategy
from trainer import Trainer

warnings.filterwarnings("always", "the pipelines of tensor_parallel_size have computed")  # scripts ignore others
WORDS, WIDTH, LENGTH, ROWS, GLOBAL_BATCH = 32, 16, 6, 24, 8
SETTINGS: dict[str, Any] = {
    "precision": "64-true",
    "max_epochs": 2,
    "gradient_clip_val": 0.5,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


class Language(LightningModule):
    """A model of words, trained with clipping, a schedule and a logged norm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0], labels=batch[1]).loss
        self.log("train", loss, on_epoch=True, on_step=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.trainer.callback_metrics["train_step"].item())

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "clip_grad_norm_"):
            norm = strategy.clip_grad_norm_(gradient_clip_val)
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        self.log("norm", norm)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation", self.model(batch[0], labels=batch[1]).loss, sync_dist=True)
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    def train_dataloader(self) -> DataLoader:
        """Each replica's share of the same global batches."""
        generator, replicas = torch.Generator().manual_seed(1), self.trainer.world_size
        words = torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)
        rows = TensorDataset(words, words.roll(1, 0))
        share = DistributedSampler(rows, num_replicas=replicas, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=GLOBAL_BATCH // replicas, sampler=share)

    val_dataloader = train_dataloader


class SummedTwice(Language):
    """A plan that gives a layer with whole rows the style of a layer with divided rows."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        plan = {f"model.{name}": style for name, style in self.model.tp_plan.items()}
        return {**plan, "model.model.layers.*.input_layernorm": "replicated_with_grad_allreduce"}


class Distilled(Language):
    """Has a layer that is divided, but left out of checkpoints."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_pre_hook(_put_in)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"teacher": "colwise", **{f"model.{name}": style for name, style in self.model.tp_plan.items()}}


def _leave_out(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in ("weight", "bias"):
        del state[f"{prefix}teacher.{name}"]


def _put_in(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, value in model.teacher.named_parameters():
        state[f"{prefix}teacher.{name}"] = value.detach()


class ClippedByHand(Language):
    """Computes the norm of the parts of its own pipeline."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Penalised(Language):
    """Adds a norm of a weight, of which each pipeline has its part, to the loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.model.model.layers[0].mlp.up_proj.weight.norm()


class WithPlan(Language):
    """A model without a plan of its own: GPT-2, or BERT."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        """The styles of the layers; the heads of GPT-2, which its layers hold side by side, are not divided."""
        if isinstance(self.model, GPT2LMHeadModel):
            start = "model.transformer.h.*"
            return {
                "model.lm_head": "colwise_gather_output",
                f"{start}.attn.c_attn": "colwise_gather_output",
                f"{start}.attn.c_proj": "rowwise_split_input",
                f"{start}.mlp.c_fc": "colwise",
                f"{start}.mlp.c_proj": "rowwise",
            }
        start = "model.bert.encoder.layer.*"
        return {
            **{f"{start}.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
            f"{start}.attention.output.dense": "rowwise",
            f"{start}.intermediate.dense": "colwise",
            f"{start}.output.dense": "rowwise",
        }


def gpt2(dropout: float = 0.0) -> Language:
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 4, "n_head": 4}
    others = {"attn_pdrop": 0.0, "embd_pdrop": dropout, "resid_pdrop": dropout, "bos_token_id": 1, "eos_token_id": 2}
    return WithPlan(GPT2LMHeadModel(GPT2Config(**sizes, **others)))


class OddTypes(WithPlan):
    """With parameters and buffers that are not floating-point numbers, in a layer and outside."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        super().__init__(model)
        for module in (self, layer):
            module.fixed = nn.Parameter(torch.arange(3).to(torch.int16), requires_grad=False)
            module.register_buffer("numbers", torch.arange(3).to(torch.uint16))


def bert() -> Language:
    none = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(**SIZES, **none))
    return OddTypes(model, model.bert.encoder.layer[2])


MODELS: dict[str, Callable[[], Language]] = {
    "llama": lambda: Language(LlamaForCausalLM(LlamaConfig(**GROUPED))),
    "tied": lambda: Language(LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True))),
    "qwen3": lambda: Language(Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=4))),
    "gpt2": gpt2,
    "bert": bert,
    "dropout": lambda: gpt2(0.1),
    "distilled": lambda: Distilled(LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True))),
    "clipped by hand": lambda: ClippedByHand(LlamaForCausalLM(LlamaConfig(**GROUPED))),
    "penalised": lambda: Penalised(LlamaForCausalLM(LlamaConfig(**GROUPED))),
    "summed twice": lambda: SummedTwice(LlamaForCausalLM(LlamaConfig(**GROUPED))),
    "mixtral": lambda: Language(
        MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=4, experts_implementation="eager"))
    ),
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in MODELS},
    "accumulated": ("llama", {"checkpoint": "always"}, {"accumulate_grad_batches": 2}),
    "resumed": ("tied", {"schedule": "1f1b"}, {}),
    "lr_find": (
        "distilled",
        {},
        {"callbacks": [LearningRateFinder(num_training_steps=4, update_attr=False), WeightAveraging()]},
    ),
    "auto": ("llama", {"schedule": "auto", "balance": "by_size"}, {}),
    **{name: ("llama", {"balance": name}, {}) for name in ("by_size", "by_time")},
    "reduced": ("llama", {"schedule": "1f1b", "zero_stage": 2}, {}),
    **{schedule: ("llama", {"schedule": schedule}, {}) for schedule in ("1f1b", "zb-h1")},
    **{name: ("llama", {"schedule": name, "balance": "even"}, {}) for name in ("interleaved", "zbv", "v-half")},
}
"""For each case: the name of the model, options of the strategy, and arguments of the Trainer."""


def made(name: str) -> Language:
    seed_everything(0)
    return MODELS[name]()


def fit(
    model: Language, strategy: Any, devices: int, ckpt_path: Any = None, **settings: Any
) -> tuple[Language, Trainer]:
    arguments = placed(strategy, devices, **{**SETTINGS, **settings})
    trainer = Trainer(strategy=strategy, use_distributed_sampler=False, **arguments)
    trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer


def seen(model: Language, trainer: Trainer) -> dict[str, Any]:
    """What must be equal to one process."""
    optimizer = model.optimizers(use_pl_optimizer=False)
    return {
        "losses": torch.tensor(model.losses),
        "metrics": {name: value.double() for name, value in trainer.callback_metrics.items()},
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "states": optimizer.state_dict()["state"],
    }


def main() -> None:
    folder, (stages, parts, replicas), cases = Path(sys.argv[1]), map(int, sys.argv[2:5]), sys.argv[5:]
    results: dict[str, Any] = {}
    for case in cases:
        name, options, settings = CASES[case]
        own = {"balance": [4 // stages] * stages, "microbatches": 2, "checkpoint": "never", **options}
        strategy = RPCSequentialStrategy(**own, data_parallel_size=replicas, tensor_parallel_size=parts)
        before = folder / f"before {case}.ckpt"
        ckpt_path = before if before.exists() else None
        model, trainer = fit(made(name), strategy, stages * parts * replicas, ckpt_path, **settings)
        trainer.save_checkpoint(folder / f"{case}.ckpt")
        results[case] = seen(model, trainer)
        (results[case]["validated"],) = trainer.validate(model, verbose=False)
    if trainer.is_global_zero:
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main()
