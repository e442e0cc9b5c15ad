"""Which layers count as being of one kind."""

from typing import Any

import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from strategies.common.stage_layers import kinds_of


class Block(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        vars(self).update(attributes)


def num_kinds(*layers: nn.Module) -> int:
    return len(set(kinds_of(layers)))


def test_classes_shapes_and_plain_attributes() -> None:
    assert num_kinds(nn.Linear(2, 3), nn.Linear(2, 3)) == 1
    assert num_kinds(nn.Linear(2, 3), nn.Linear(2, 4), nn.Linear(2, 3, bias=False), nn.GELU(), nn.ReLU()) == 5
    assert num_kinds(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3, stride=2), nn.Conv2d(1, 1, 3, padding=1)) == 3
    assert num_kinds(nn.Sequential(nn.AvgPool1d(2)), nn.Sequential(nn.AvgPool1d(2, stride=1))) == 2
    assert num_kinds(*(Block(kind=kind) for kind in ("sliding", "full", "sliding"))) == 2
    assert num_kinds(Block(window=4), Block(window=None), Block(is_causal=True), Block(is_causal=False)) == 4
    assert num_kinds(Block(sizes=(1, 2)), Block(sizes=(1, 3))) == 2
    frozen = nn.Linear(2, 3)
    frozen.eval().requires_grad_(False)
    assert num_kinds(nn.Linear(2, 3), frozen) == 1
    assert num_kinds(Block(cache=torch.ones(1)), Block(cache=[1]), Block(_private=3)) == 1


def test_numbers_of_layers_do_not_count() -> None:
    assert num_kinds(Block(layer_idx=0), Block(layer_idx=7)) == 1
    assert num_kinds(*(Block(place=3 + i, rate=0.1 * i) for i in range(4))) == 1
    assert num_kinds(nn.ReLU(), *(Block(place=i) for i in range(4)), nn.ReLU()) == 2
    assert num_kinds(*(Block(dilation=2**i) for i in range(4))) == 4
    assert num_kinds(Block(stride=1), Block(stride=2)) == 2


def test_blocks_of_hugging_face() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    assert num_kinds(*llama.model.layers) == 1
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=4, layer_types=types))
    kinds = kinds_of([*gemma.model.layers])
    assert kinds[0] == kinds[1] == kinds[3] != kinds[2]
