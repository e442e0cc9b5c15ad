"""A user's script: models whose parameters the replicas of a stage divide (``zero_stage=3``), one fit per case.

Run as ``python divided_parameters_job.py RESULTS STAGES REPLICAS CASE ...``. Lightning starts the other drivers by
running this script once more.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import LearningRateFinder
from tensor_parallel_job import GROUPED, MODELS, ClippedByHand, Language, fit, made, seen
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from strategies import RPCSequentialStrategy


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**GROUPED))


class Padded(Language):
    """Rows with different numbers of tokens, and a mean over the tokens of the optimizer step.

    In one process, the loss of a batch is the sum over its tokens, divided by the number of tokens of the step, as in
    the Trainer of ``transformers``.
    """

    lengths = (6, 2, 3, 6, 5, 2, 2, 2, 6, 6, 6, 6, 2, 2, 2, 3, 4, 2, 6, 6, 3, 2, 5, 2)

    def total(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum and number."""
        logits, labels = self.model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        known = labels != -100
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), known.sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        (total, number), is_alone = self.total(batch), self.trainer.num_devices == 1
        own = {"batch_size": int(number)} if is_alone else {}
        self.log("train", total / number, on_epoch=True, on_step=True, sync_dist=True, **own)
        if not is_alone:
            return total / number
        parts, rows = self.trainer.accumulate_grad_batches, self.trainer.train_dataloader.batch_size
        first = batch_idx // parts * parts * rows
        return total / sum(length - 1 for length in self.lengths[first : first + parts * rows]) * parts

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("validation", self.total(batch)[0], sync_dist=True, reduce_fx="sum")

    def train_dataloader(self) -> DataLoader:
        plain = super().train_dataloader()
        rows = []
        for (words, _), length in zip(plain.dataset, self.lengths, strict=True):
            rows.append({"input_ids": words, "labels": words.clone()})
            rows[-1]["labels"][length:] = -100
        return DataLoader(rows, batch_size=plain.batch_size, sampler=plain.sampler)

    val_dataloader = train_dataloader


class WithoutTokens(Padded):
    """The last row of each batch has no label that counts."""

    lengths = (6, 6, 6, 6, 6, 6, 6, 1) * 3


class Uneven(Language):
    """The second replica has one row in each training batch."""

    def train_dataloader(self) -> DataLoader:
        rows = super().train_dataloader().dataset
        return DataLoader(rows, batch_size=1 if self.trainer.global_rank else 4)


class UnevenValidation(Language):
    """The second replica has one row in each validation batch."""

    def val_dataloader(self) -> DataLoader:
        rows = super().val_dataloader().dataset
        return DataLoader(rows, batch_size=1 if self.trainer.global_rank else 4)


class Skipping(Language):
    """The replicas call different layers of the driver, which have one shape."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.extra = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        used = self.extra[self.trainer.global_rank](torch.ones(4, dtype=self.dtype)).sum()
        return super().training_step(batch, batch_idx) + 0.1 * used


class Scaled(Language):
    """The replicas multiply their losses by different numbers."""

    def backward(self, loss: Tensor) -> None:
        (loss * (self.trainer.global_rank + 1)).backward()


class Penalised(Language):
    """A penalty on weights of the driver."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        penalty = self.model.lm_head.weight.square().sum()
        return super().training_step(batch, batch_idx) + 0.1 * penalty


class PenalisedLayer(Language):
    """A penalty on weights of a layer on a worker."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * self.model.model.layers[0].mlp.up_proj.weight.square().sum()


class NotByElement(Language):
    """An optimizer that computes with norms of whole matrices."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


WRONG: dict[str, type[Language]] = {
    kind.__name__: kind
    for kind in (
        WithoutTokens,
        Uneven,
        UnevenValidation,
        Skipping,
        Scaled,
        Penalised,
        PenalisedLayer,
        ClippedByHand,
        NotByElement,
    )
}
MODELS.update(
    {name: lambda kind=kind: kind(llama()) for name, kind in WRONG.items()},
    padded=lambda: Padded(MODELS["gpt2"]().model),
)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"schedule": "1f1b"}, {}),
    "gpipe": ("llama", {"schedule": "gpipe"}, {}),
    "tied": ("tied", {"schedule": "1f1b"}, {}),
    "gpt2": ("gpt2", {}, {}),
    **{f"dropout {stage}": ("dropout", {"zero_stage": stage}, {}) for stage in (0, 3)},
    "accumulated": ("llama", {"checkpoint": "always"}, {"accumulate_grad_batches": 2}),
    "accumulated 1f1b": ("gpt2", {"schedule": "1f1b"}, {"accumulate_grad_batches": 2}),
    "tokens": ("padded", {"schedule": "1f1b", "loss_weight": "tokens"}, {"accumulate_grad_batches": 2}),
    "resumed": ("tied", {"schedule": "1f1b"}, {}),
    "half": ("tied", {"schedule": "1f1b"}, {"max_epochs": 1}),
    "lr_find": ("distilled", {}, {"callbacks": [LearningRateFinder(num_training_steps=4, update_attr=False)]}),
    "bert": ("bert", {}, {}),
    "auto": ("llama", {"schedule": "auto", "balance": "by_size"}, {}),
    "by_time": ("llama", {"balance": "by_time"}, {}),
    **{name: (name, {"schedule": "gpipe" if "Layer" in name else "1f1b"}, {}) for name in WRONG},
    "WithoutTokens": ("WithoutTokens", {"schedule": "1f1b", "loss_weight": "tokens", "microbatches": 4}, {}),
    **{schedule: ("llama", {"schedule": schedule}, {}) for schedule in ("zb-h1",)},
    **{name: ("llama", {"schedule": name, "balance": "even"}, {}) for name in ("interleaved", "zbv", "v-half")},
}
"""For each case: the name of the model, options of the strategy, and arguments of the Trainer."""


def main() -> None:
    folder, (stages, replicas), cases = Path(sys.argv[1]), map(int, sys.argv[2:4]), sys.argv[4:]
    results: dict[str, Any] = {}
    for case in cases:
        name, options, settings = CASES[case]
        own = {"balance": [4 // stages] * stages, "microbatches": 2, "checkpoint": "never", **options}
        strategy = RPCSequentialStrategy(**{"zero_stage": 3, **own}, data_parallel_size=replicas)
        before = folder / f"before {case}.ckpt"
        ckpt_path = before if before.exists() else None
        model, trainer = fit(made(name), strategy, stages * replicas, ckpt_path, **settings)
        trainer.save_checkpoint(folder / f"{case}.ckpt")
        results[case] = seen(model, trainer)
        (results[case]["validated"],) = trainer.validate(model, verbose=False)
    if trainer.is_global_zero:
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main()
