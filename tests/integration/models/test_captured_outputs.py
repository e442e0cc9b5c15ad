"""What ``transformers`` captures by hooks in the blocks comes back: router logits, hidden states, attention weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from model_families import workers_import_transformers
from parity import compare, fit
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    SegformerConfig,
    SegformerForImageClassification,
    SegformerForSemanticSegmentation,
    VideoPrismForVideoClassification,
    VideoPrismVisionConfig,
)

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


class Images(LightningModule):
    """A model of images or videos whose loss depends on every hidden state, and on their order."""

    def __init__(self, make: Callable[[], PreTrainedModel], num_states: int) -> None:
        super().__init__()
        self.model, self.num_states = make(), num_states
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch, output_hidden_states=True)
        assert len(output.hidden_states) == self.num_states
        states = [(number + 1) * state.square().mean() for number, state in enumerate(output.hidden_states)]
        return (output.logits - 1).square().mean() + 0.1 * sum(states)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Segmentation(Images):
    """A model that uses every hidden state itself."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.model(**batch).logits - 1).square().mean()


def segformer(kind: type[PreTrainedModel] = SegformerForImageClassification) -> PreTrainedModel:
    """A model whose hooks do not capture the input of the first block, which is the image."""
    return kind(
        SegformerConfig(
            **{"num_encoder_blocks": 3, "depths": [1] * 3, "sr_ratios": [2, 1, 1], "hidden_sizes": [8, 16, 16]},
            **{"num_attention_heads": [1, 2, 2], "patch_sizes": [3] * 3, "strides": [2] * 3, "mlp_ratios": [2] * 3},
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0},
            **{"drop_path_rate": 0.0, "decoder_hidden_size": 16, "num_labels": 4},
        )
    )


def videoprism() -> PreTrainedModel:
    """A model with two lists of blocks whose hooks fill the same hidden states."""
    configuration = VideoPrismVisionConfig(
        **{"image_size": 8, "num_frames": 4, "tubelet_size": [1, 4, 4], "hidden_size": 16, "hidden_act": "gelu"},
        **{"num_attention_heads": 2, "intermediate_size": 24, "num_spatial_layers": 3, "num_temporal_layers": 2},
        **{"num_auxiliary_layers": 1, "num_labels": 4, "qkv_bias": False},
    )
    model = VideoPrismForVideoClassification(configuration)
    configuration._attn_implementation = "sdpa"  # the default computes a part in float32
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None  # not supported by "sdpa"
    return model


def drawn(name: str, *shape: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    made = [{name: torch.randn(rows, *shape, generator=generator, dtype=torch.float64)} for rows in (6, 5)]
    return DataLoader(made, batch_size=None)


IMAGES = partial(drawn, "pixel_values", 3, 16, 16)
VIDEOS = partial(drawn, "pixel_values_videos", 4, 3, 8, 8)
SPATIAL, TEMPORAL = (f"model.vision_model.{name}_layers" for name in ("spatial", "temporal"))


def equals_one_process(make: Callable[[], LightningModule], train: Any, options: Sequence[dict[str, Any]]) -> None:
    workers_import_transformers()
    single = fit(make, "auto", 1, train=train)
    for each in options:
        compare(fit(make, RPCSequentialStrategy(balance="even", microbatches=3, **each), 2, train=train), single)


def test_hidden_states_without_the_input_of_the_first_block() -> None:
    options = [{}, {"schedule": "1f1b"}]
    run(equals_one_process, partial(Images, segformer, 3), IMAGES, options, timeout_seconds=240)


def test_a_model_that_uses_hidden_states_without_the_input_of_the_first_block() -> None:
    """Under ``1f1b``, BatchNorm in the head gets one micro-batch at a time, so there is one schedule here."""
    make = partial(Segmentation, partial(segformer, SegformerForSemanticSegmentation), 3)
    run(equals_one_process, make, IMAGES, [{}], timeout_seconds=240)


def test_hidden_states_of_two_lists_include_the_input_of_the_first_list_only() -> None:
    options = [{"schedule": "1f1b", "module": module} for module in (None, SPATIAL, TEMPORAL)]
    run(equals_one_process, partial(Images, videoprism, 6), VIDEOS, options, timeout_seconds=240)
