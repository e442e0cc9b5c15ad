"""Small models of many families of ``transformers``, and batches for each: the rows of the table in docs/models.md."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strategies.launch.fork_server import OwnForkServer
from strategies.launch.workers import WORKER_MODULES, environment_of_worker

SIZES = ((5, 9), (4, 7))
"""Rows and length of each batch; the second one is shorter, as under dynamic padding."""

_VOCABULARY = 64
_SMALL: dict[str, Any] = {
    **{"vocab_size": _VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1},
    "eos_token_id": 2,
}
_NO_DROPOUT = dict.fromkeys(
    (
        *("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "classifier_dropout"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("dropout_rate", "feat_proj_dropout", "final_dropout", "drop_path_rate", "summary_last_dropout"),
        *("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "embedding_dropout", "classifier_dropout_prob"),
    ),
    0.0,
)
"""Without randomness, whose numbers in a pipeline are not those of one process."""

Batch = dict[str, Tensor]


def text(rows: int, length: int) -> Batch:
    """Token numbers ``[rows, length]``, padded on the right of every other row, and a label for every token."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, _VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(0, rows, 2):
        mask[row, length - 1 - row // 2 :] = 0
    ids = torch.where(mask.bool(), ids, 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def classes(rows: int, length: int) -> Batch:
    """Texts with a class each."""
    return {**text(rows, length), "labels": torch.arange(rows) % 2}


def to_text(rows: int, length: int) -> Batch:
    """Texts with the texts that they become."""
    return {**text(rows, length), "labels": text(rows, length + 2)["labels"]}


def images(rows: int, length: int) -> Batch:
    """Images ``[rows, 3, 16, 16]`` with a class each."""
    pixels = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(length))
    return {"pixel_values": pixels, "labels": torch.arange(rows) % 2}


def waves(rows: int, length: int) -> Batch:
    """Sound ``[rows, 16 * length]``, shorter in every other row."""
    mask = text(rows, length)["attention_mask"].repeat_interleave(16, dim=1)
    sound = torch.randn(mask.shape, generator=torch.Generator().manual_seed(length)) * mask
    return {"input_values": sound, "attention_mask": mask}


def speech(rows: int, length: int) -> Batch:
    """Spectra ``[rows, 8, 24]`` with the texts that are spoken."""
    spectra = torch.randn(rows, 8, 24, generator=torch.Generator().manual_seed(length))
    return {"input_features": spectra, "labels": text(rows, length)["labels"]}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: As in the table.
        model: Name of the model's class.
        path: The list that is pipelined, as a path in that model.
        settings: Values of the configuration besides small sizes and no dropout.
        batch: Makes a batch from a number of rows and a length.
        is_found: Whether the path is found, so that it need not be given.
        microbatches: Number of micro-batches.
        splits: Whether ``schedule="gpipe"`` can split its batches; otherwise a message says to use 1F1B.
        tolerance: Relative and absolute, for every parameter; larger where the model computes a part in float32.
    """

    name: str
    model: str
    path: str
    settings: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[int, int], Batch] = text
    is_found: bool = True
    microbatches: int = 3
    splits: bool = True
    tolerance: float = 1e-9

    def make(self) -> Any:
        """Returns a model with the same weights each time."""
        torch.manual_seed(0)
        kind: Any = getattr(transformers, self.model)
        configuration = _configuration(kind.config_class, self.settings)
        # The default for a mixture of experts multiplies matrices of at most 32 bits.
        configuration._experts_implementation = "eager"
        return kind(configuration)


def _configuration(kind: Any, settings: dict[str, Any]) -> Any:
    """Returns a configuration with the settings, and small sizes and no dropout where the class has such fields."""
    other_names = kind.attribute_map
    known = {*kind().to_dict(), *other_names}
    defaults = {name: value for name, value in (_SMALL | _NO_DROPOUT).items() if name in known}
    return kind(**{other_names.get(name, name): value for name, value in (defaults | settings).items()})


_GROUPED = {"num_key_value_heads": 2}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
_IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 3}
_SOUND = {
    **{"conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False},
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "decoder_start_token_id": 0}
_TWO_SIDES = {
    **{"d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1},
}
_WHISPER = {**_TWO_SIDES, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}

DECODERS = [
    Family("GPT-2", "GPT2LMHeadModel", "transformer.h"),
    Family("Llama", "LlamaForCausalLM", "model.layers", _GROUPED),
    Family("Qwen2", "Qwen2ForCausalLM", "model.layers", _GROUPED),
    Family("Qwen3", "Qwen3ForCausalLM", "model.layers", {**_GROUPED, "head_dim": 8}),
    Family("Gemma 2", "Gemma2ForCausalLM", "model.layers", {**_GROUPED, **_SLIDING, "head_dim": 8}),
    Family("Gemma 3", "Gemma3ForCausalLM", "model.layers", {**_GROUPED, **_SLIDING, "head_dim": 8}),
    Family("Mistral", "MistralForCausalLM", "model.layers", {**_GROUPED, "sliding_window": 4}),
    Family("Phi", "PhiForCausalLM", "model.layers"),
    Family("Phi-3", "Phi3ForCausalLM", "model.layers", _GROUPED),
    Family("GPT-NeoX", "GPTNeoXForCausalLM", "gpt_neox.layers"),
    Family("GPT-J", "GPTJForCausalLM", "transformer.h", {"rotary_dim": 4}, tolerance=1e-6),
    Family("OPT", "OPTForCausalLM", "model.decoder.layers", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("BLOOM", "BloomForCausalLM", "transformer.h", splits=False),
    Family("Falcon", "FalconForCausalLM", "transformer.h"),
    Family("MPT", "MptForCausalLM", "transformer.blocks", {"max_seq_len": 32}),
    Family("StableLM", "StableLmForCausalLM", "model.layers", _GROUPED),
    Family("OLMo 2", "Olmo2ForCausalLM", "model.layers"),
    Family("Cohere", "CohereForCausalLM", "model.layers", _GROUPED),
    Family("Granite", "GraniteForCausalLM", "model.layers", _GROUPED),
    Family("SmolLM3", "SmolLM3ForCausalLM", "model.layers", _GROUPED),
    Family("Mamba", "MambaForCausalLM", "backbone.layers", {"state_size": 4, "time_step_rank": 4}, tolerance=1e-6),
]
EXPERTS = [
    Family("Mixtral", "MixtralForCausalLM", "model.layers", {**_EXPERTS, "num_local_experts": 4}),
    Family(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "model.layers",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    Family("OLMoE", "OlmoeForCausalLM", "model.layers", {**_EXPERTS, "num_experts": 4}),
    Family(
        "gpt-oss",
        "GptOssForCausalLM",
        "model.layers",
        {**_EXPERTS, **_SLIDING, "num_local_experts": 4, "head_dim": 8, "rope_parameters": {"rope_theta": 1e4}},
    ),
    Family(
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        "model.layers",
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
            **{"first_k_dense_replace": 1, "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8},
            **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4},
        },
        tolerance=1e-6,
    ),
]
ENCODERS = [
    Family("BERT", "BertForMaskedLM", "bert.encoder.layer"),
    Family("RoBERTa", "RobertaForSequenceClassification", "roberta.encoder.layer", batch=classes),
    Family("DistilBERT", "DistilBertForMaskedLM", "distilbert.transformer.layer", {"hidden_dim": 48}),
    Family("ELECTRA", "ElectraForSequenceClassification", "electra.encoder.layer", {"embedding_size": 16}, classes),
    Family(
        "DeBERTa-v2",
        "DebertaV2ForMaskedLM",
        "deberta.encoder.layer",
        {
            **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
            **{"norm_rel_ebd": "layer_norm", "share_att_key": True},
        },
    ),
    Family(
        "ModernBERT", "ModernBertForMaskedLM", "model.layers", {"global_attn_every_n_layers": 2, "local_attention": 4}
    ),
    Family("MPNet", "MPNetForMaskedLM", "mpnet.encoder.layer"),
    Family("ESM", "EsmForMaskedLM", "esm.encoder.layer", {"mask_token_id": 3}),
    Family(
        "XLNet",
        "XLNetLMHeadModel",
        "transformer.layer",
        {"d_head": 8, "d_inner": 48, "use_mems_eval": False, "use_mems_train": False},
        splits=False,
    ),
]
VISION_AND_SOUND = [
    Family("ViT", "ViTForImageClassification", "vit.layers", _IMAGES, images),
    Family("DeiT", "DeiTForImageClassification", "deit.layers", _IMAGES, images),
    Family(
        "BEiT",
        "BeitForImageClassification",
        "beit.layers",
        {**_IMAGES, "use_shared_relative_position_bias": True},
        images,
    ),
    Family("DINOv2", "Dinov2ForImageClassification", "dinov2.encoder.layer", _IMAGES, images),
    Family(
        "CLIP vision",
        "CLIPForImageClassification",
        "vision_model.encoder.layers",
        {"vision_config": {**_SMALL, **_IMAGES}},
        images,
    ),
    Family(
        "SigLIP vision",
        "SiglipForImageClassification",
        "vision_model.encoder.layers",
        {"vision_config": {**_SMALL, **_IMAGES}},
        images,
    ),
    Family(
        "Swin",
        "SwinForImageClassification",
        "swin.encoder.layers",
        {**_IMAGES, "patch_size": 2, "embed_dim": 8, "depths": [1] * 3, "num_heads": [2] * 3, "window_size": 2},
        images,
    ),
    Family(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "convnext.encoder.stages",
        {"image_size": 16, "patch_size": 2, "hidden_sizes": [8, 16, 16], "depths": [1] * 3, "num_stages": 3},
        images,
    ),
    Family(
        "ResNet",
        "ResNetForImageClassification",
        "resnet.encoder.stages",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 16], "depths": [1] * 3, "layer_type": "basic"},
        images,
        microbatches=1,
    ),
    Family(
        "SegFormer",
        "SegformerForImageClassification",
        "segformer.stages",
        {
            **{"num_encoder_blocks": 3, "depths": [1] * 3, "sr_ratios": [2, 1, 1], "hidden_sizes": [8, 16, 16]},
            **{"num_attention_heads": [1, 2, 2], "patch_sizes": [3] * 3, "strides": [2] * 3, "mlp_ratios": [2] * 3},
        },
        images,
    ),
    Family("Wav2Vec2", "Wav2Vec2ForCTC", "wav2vec2.encoder.layers", _SOUND, waves, is_found=False),
    Family("HuBERT", "HubertForCTC", "hubert.encoder.layers", _SOUND, waves),
]
BOTH_SIDES = [
    Family("T5 encoder", "T5ForConditionalGeneration", "encoder.block", _T5, to_text, is_found=False),
    Family("T5 decoder", "T5ForConditionalGeneration", "decoder.block", _T5, to_text, is_found=False),
    *(
        Family(f"{name} {side}", model, f"model.{side}.layers", settings, batch, is_found=False)
        for name, model, settings, batch in (
            ("BART", "BartForConditionalGeneration", _TWO_SIDES, to_text),
            ("Marian", "MarianMTModel", _TWO_SIDES, to_text),
            ("Whisper", "WhisperForConditionalGeneration", _WHISPER, speech),
        )
        for side in ("encoder", "decoder")
    ),
]
FAMILIES = [*DECODERS, *EXPERTS, *ENCODERS, *VISION_AND_SOUND, *BOTH_SIDES]


class Trained(LightningModule):
    """Trains a model on all of its logits, in the precision of the model: losses of ``transformers`` are in float32.

    Args:
        make: Makes the model.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()
        self.losses: list[float] = []

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(**batch).logits
        logits = logits.reshape(len(logits), -1, logits.shape[-1])
        targets = torch.arange(logits.shape[1], device=logits.device) % logits.shape[2]
        return cross_entropy(logits.flatten(0, 1), targets.repeat(len(logits)))

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(next(iter(batch.values()))))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def workers_import_transformers() -> None:
    """Starts a fork server whose workers have imported ``transformers``, for tests with many runs.

    Otherwise each worker imports it, which takes longer than a run. Such a test needs ``harness.OWN_SERVER``.
    """
    modules = [*WORKER_MODULES, "transformers.modeling_utils"]
    OwnForkServer.of_this_process(modules, [], environment_of_worker(sys.path, threads=1), sys.path)
