"""Means over tokens under ``schedule="1f1b"``: those of one process over all the tokens of an optimizer step."""

import math
from typing import Any

import parity_scaler as scaling
import pytest
import torch
from harness import run
from parity import NUM_LAYERS, WIDTH, Fresh, Small, check, fit
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy

STRATEGY = {"schedule": "1f1b", "microbatches": 3, "loss_weight": "tokens"}
LENGTH, IGNORED = 7, -100
NUM_TOKENS = ((7, 1, 0, 2, 6, 1, 3), (0, 0, 7, 7, 1, 2), (0, 0, 0), (5,), (1, 1, 7, 0, 2))
"""Tokens of each row of each batch: the second batch has a micro-batch without any, and the third one has none."""


def padded(num_tokens: Any = NUM_TOKENS) -> DataLoader:
    generator, made = torch.Generator().manual_seed(0), []
    for numbers in num_tokens:
        x = torch.randn(len(numbers), LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        labels = torch.randint(2, (len(numbers), LENGTH), generator=generator)
        for row, number in enumerate(numbers):
            labels[row, number:] = IGNORED
        made.append({"x": x, "labels": labels})
    return DataLoader(made, batch_size=None)


class Tokens(Small):
    """The mean over the tokens of a micro-batch; in one process, over those of all batches of an optimizer step.

    In one process, the loss is the sum over the tokens of the batch, divided by the number of tokens of the step, as in
    the Trainer of ``transformers``. A mean over no token is not a number, and neither are its gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)

    def mean(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum and number."""
        logits, labels = self(self.before(batch["x"])).flatten(0, 1), batch["labels"].flatten()
        known = labels != IGNORED
        return (cross_entropy(logits, labels.clamp(min=0), reduction="none") * known).sum(), known.sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        total, number = self.mean(batch)
        mean, in_pipeline = total / number, isinstance(self.trainer.strategy, RPCSequentialStrategy)
        if batch_idx != 2:
            own = {} if in_pipeline else {"batch_size": int(number)}
            self.log_dict({"loss": mean, "item": mean.item()}, on_step=True, on_epoch=True, **own)
            self.log("by rows", batch["x"].mean(), on_step=True, on_epoch=True, batch_size=len(batch["x"]))
        returned = {"mean": mean.detach(), "x": batch["x"]}
        if in_pipeline:
            return {"loss": mean, **returned}
        parts = self.trainer.accumulate_grad_batches
        step = NUM_TOKENS[batch_idx // parts * parts :][:parts]
        return {"loss": total / sum(map(sum, step)) * parts, **returned}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["x"], batch["x"])
        self.losses += [outputs["mean"].nan_to_num(-1.0).item()]


class Reads(Tokens):
    """Keeps the norm of a gradient before each step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.before.weight.grad is not None
        self.losses.append(self.before.weight.grad.norm().item())


class Scaler(scaling.Exact):
    """A gradient scaler for batches that are float64 already."""

    def convert_input(self, data: Any) -> Any:
        return data


class Weighs(Tokens):
    """Keeps the tokens elsewhere, and counts them itself."""

    def mean(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return super().mean({"x": batch["x"], "labels": batch["targets"]})

    def microbatch_weight(self, microbatch: dict[str, Tensor]) -> Tensor:
        return (microbatch["targets"] != IGNORED).sum() / 2


def renamed() -> DataLoader:
    return DataLoader([{"x": batch["x"], "targets": batch["labels"]} for batch in padded()], batch_size=None)


class Plain(Small):
    """One mean over tokens for each batch, in whatever process."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, labels = self(batch["x"]).flatten(0, 1), batch["labels"].flatten()
        return cross_entropy(logits, labels, ignore_index=IGNORED)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].item()
        assert math.isnan(loss) == (batch_idx == 2)
        self.losses.append(-1.0 if math.isnan(loss) else loss)


class Negative(Plain):
    """Gives no weight."""

    def microbatch_weight(self, microbatch: Any) -> float:
        return -1.0


def means_over_tokens() -> list[str]:
    check(Reads, strategy=STRATEGY, train=padded, accumulate_grad_batches=2, gradient_clip_val=0.05, stages=[2])
    scaler = {"precision": None, "plugins": Fresh(lambda: [Scaler()])}
    check(Reads, strategy=STRATEGY, train=padded, accumulate_grad_batches=3, stages=[3], **scaler)
    messages = []
    for model, loader in ((Plain, renamed), (Negative, padded)):
        with pytest.raises(MisconfigurationException) as caught:
            fit(model, RPCSequentialStrategy([6], **STRATEGY), 1, train=loader)
        messages.append(str(caught.value))
    return messages


def test_means_over_the_tokens_of_a_step() -> None:
    labels, weight = run(means_over_tokens, timeout_seconds=170)
    assert "integers, in an entry or attribute 'shift_labels' or 'labels'. This dict has 'x', 'targets'." in labels
    assert "Negative.microbatch_weight returned -1.0" in weight


def empty_batches_and_own_weights() -> None:
    check(Plain, strategy=STRATEGY, train=padded)
    check(Weighs, strategy={**STRATEGY, "loss_weight": "rows"}, train=renamed, accumulate_grad_batches=4)


@pytest.mark.slow
def test_batches_without_tokens_and_weights_of_the_model() -> None:
    run(empty_batches_and_own_weights, timeout_seconds=170)


class Causal(Small):
    """A causal model of Hugging Face, whose loss shifts labels; in one process it divides by the tokens of the step."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            vocab_size=11, n_positions=LENGTH, n_embd=8, n_layer=NUM_LAYERS, n_head=2, use_cache=False, **dropouts
        )
        self.model = transformers.GPT2LMHeadModel(config)
        del self.sequential_module

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        given: dict[str, Any] = {}
        parts = self.trainer.accumulate_grad_batches
        if not isinstance(self.trainer.strategy, RPCSequentialStrategy):
            first = batch_idx // parts * parts
            given["num_items_in_batch"] = sum(
                int((made["labels"][:, 1:] != IGNORED).sum()) for made in list(sentences())[first : first + parts]
            )
        loss: Tensor = self.model(**batch, **given).loss
        number = int((batch["labels"][:, 1:] != IGNORED).sum())
        mean = loss * given["num_items_in_batch"] / number if given else loss
        self.log("loss", mean, on_step=True, on_epoch=True, **({"batch_size": number} if given else {}))
        return loss * parts if given else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def sentences() -> DataLoader:
    """Padded batches; a sentence of one word has no token to predict."""
    generator, made = torch.Generator().manual_seed(0), []
    for numbers in ((7, 2, 1, 3), (4, 1, 7, 7, 2), (2, 5, 6)):
        words = torch.randint(11, (len(numbers), LENGTH), generator=generator)
        known = torch.arange(LENGTH) < torch.tensor(numbers)[:, None]
        made.append({"input_ids": words, "attention_mask": known.long(), "labels": words.where(known, IGNORED)})
    return DataLoader(made, batch_size=None)


def causal() -> None:
    strategy = {**STRATEGY, "module": "model.transformer.h"}
    # The loss of transformers is computed in float32.
    check(Causal, strategy=strategy, train=sentences, accumulate_grad_batches=2, tolerance=2e-6)


@pytest.mark.slow
def test_a_causal_model_of_hugging_face() -> None:
    run(causal, timeout_seconds=170)
