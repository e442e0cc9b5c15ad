"""A tiny configuration of any class of ``transformers``, and batches for its model.

Sizes are recognised by the names of the arguments of a configuration, such as ``num_hidden_layers``. No rule here is
about one family. A family that needs one is reported as not built.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from model_families import text
from torch import Tensor

_WIDTH = 32
_HEADS = 4
_LAYERS = 4
_VOCABULARY = 64  # as in `model_families`

_UNCHANGED = re.compile(
    r"label|version|bits|kernel|stride|padding|group_size|period|interval|_every_|_freq|_step$|chunk"
)
"""Numbers that are no size, or of which others depend in ways that no rule knows."""

_RULES: list[tuple[str, Callable[[int], int]]] = [
    (r"vocab", lambda size: min(size, _VOCABULARY)),
    (r"expert.*per_tok|top_?k$|selected_experts|active_experts", lambda number: min(number, 2)),
    (r"experts|n_routed", lambda number: min(number, 4)),
    (r"topk_group", lambda number: 1),
    (r"^n_groups?$|num_groups?$|ngroups$", lambda number: min(number, 2)),
    (r"mamba.*heads", lambda number: 2 * _WIDTH // 8),
    (r"head_?dim|d_head|d_kv$|head_size|qk_.*dim$|v_head", lambda size: min(size, _WIDTH // _HEADS)),
    (r"heads?$|n_head|heads_kv|num_kv$", lambda number: min(number, _HEADS)),
    (r"layers?$|depth$|num_blocks$|num_hidden|n_layer", lambda number: min(number, _LAYERS)),
    (r"position|max_seq|n_ctx|context_length|max_length|max_source|max_target", lambda number: min(number, 64)),
    (r"image_size|img_size|input_size|crop", lambda size: min(size, 64)),
    (r"patch_size", lambda size: min(size, 8)),
    (r"window", lambda size: min(size, 2)),
    (r"rank|lora", lambda size: min(size, 8)),
    (r"state_size|d_state|conv_dim$", lambda size: min(size, 16)),
    (r"rotary_dim|rope_dim", lambda size: min(size, 4)),
    (r"mel|num_channels|frames", lambda size: min(size, 16)),
    (r"intermediate|ffn|inner|d_ff|mlp_dim|feed_forward|fc_dim", lambda size: min(size, 2 * _WIDTH)),
    (r"embd|embed|hidden|d_model|dim$|width|size$|dims$|channels|filters", lambda size: min(size, _WIDTH)),
]
"""The first rule whose expression is found in the name of a number gives the size."""

_FIXED: dict[str, Any] = {
    **{"use_cache": False, "apply_spec_augment": False},
    **{"vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    "head_dim": _WIDTH // _HEADS,
}
"""Arguments whose default may be ``None``, which leaves out what a batch needs."""

_RANDOM = re.compile(r"drop|mask_time_prob|mask_feature_prob|jitter|noise")
"""Probabilities of what is random in training, so that a pipeline has other numbers than one process."""


def configuration(kind: type) -> Any:
    """Returns a configuration of a class, with small sizes and nothing random in training."""
    found = kind(**_arguments(kind))
    found.classifier_dropout = 0.0  # heads take 0.1 if a configuration does not have it
    return found


def _arguments(kind: type) -> dict[str, Any]:
    parameters = inspect.signature(kind).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    arguments = {name: small for name, value in defaults.items() if (small := _small(name, value, defaults)) != value}
    parts: Mapping[str, Any] = getattr(kind, "sub_configs", {})
    if parts:
        whole = kind()
        for name in parts:
            if (part := getattr(whole, name, None)) is not None:
                arguments[name] = {**_arguments(type(part)), "model_type": part.model_type}
    return arguments


def _small(name: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    """Returns what stands for an argument in a tiny configuration."""
    name = name.lower()
    if name in _FIXED:
        return _FIXED[name]
    if name.endswith(("token_id", "token_index")):
        return _VOCABULARY - 1 - value % 3 if type(value) is int and value > 2 else value  # in no text
    if isinstance(value, float):
        return 0.0 if _RANDOM.search(name) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_small_list(name, list(value), defaults))
    if type(value) is not int or _UNCHANGED.search(name):
        return value
    if re.search(r"key_value|kv", name) and "head" in name and value not in _others(name, defaults):
        return min(value, 2)
    return next((rule(value) for expression, rule in _RULES if re.search(expression, name)), value)


def _others(name: str, defaults: Mapping[str, Any]) -> list[Any]:
    """Returns the other numbers of heads: with as many heads for keys as for queries, both stay the same."""
    return [value for other, value in defaults.items() if "head" in other and other != name]


def _small_list(name: str, values: list[Any], defaults: Mapping[str, Any]) -> list[Any]:
    """Returns a list with an entry for each layer, or sizes in their proportions: one may have to divide another."""
    layers = [value for other, value in defaults.items() if re.search(r"layers?$|n_layer", other)]
    if len(values) > _LAYERS and len(values) in layers:
        return [values[number * len(values) // _LAYERS] for number in range(_LAYERS)]
    if not values or not all(type(value) is int for value in values) or _UNCHANGED.search(name):
        return values
    if re.search(r"depths|layers|blocks|head", name):
        return [min(value, 2) for value in values]
    if re.search(r"image_size|patch_size|window", name):
        return [_small(name, value, defaults) for value in values]
    if re.search(r"size|dim|channels|width|hidden", name) and values[0] > 0:
        return [max(1, value * 16 // values[0]) for value in values]
    return values


def batch(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    """Returns a batch for a model, by the name of its main input."""
    main, config = model.main_input_name, model.config
    words = text(rows, length)
    decoder = {"decoder_input_ids": words["input_ids"]} if config.is_encoder_decoder else {}
    generator = torch.Generator().manual_seed(length)
    if main == "input_ids":
        return {"input_ids": words["input_ids"], "attention_mask": words["attention_mask"], **decoder}
    if main == "pixel_values":
        size = _found(config, "image_size", 64)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {main: torch.randn(rows, _found(config, "num_channels", 3), height, width, generator=generator)}
    if main == "input_values":
        return {main: torch.randn(rows, 400 + 320 * length, generator=generator), **decoder}
    if main == "input_features":
        spectra = torch.randn(rows, 16 * length, _found(config, "num_mel_bins", 16), generator=generator)
        if (frames := _found(config, "max_source_positions", None)) is not None:
            spectra = torch.randn(rows, _found(config, "num_mel_bins", 16), 2 * frames, generator=generator)
        return {main: spectra, **decoder}
    raise NotImplementedError(f"no batch is known for a model whose main input is {main}")


def _found(config: Any, name: str, default: Any) -> Any:
    """Returns an attribute of a configuration or of a part of it."""
    for each in _parts(config):
        if (value := getattr(each, name, None)) is not None:
            return value
    return default


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(type(config), "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)
