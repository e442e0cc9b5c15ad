"""What Relay changes in models of Hugging Face for the duration of a run."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from strategies.common.transformers_compat import switch_off_cache


@pytest.mark.parametrize("part", ["", "transformer"])
def test_saved_configurations_have_the_flags_of_the_user(part: str, tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=5, n_positions=4))
    saves = model.get_submodule(part)
    saves.save_pretrained(tmp_path / "before")
    undo = switch_off_cache(model)
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(twin.transformer.wpe.weight)
    assert not model.config.use_cache
    saves.save_pretrained(tmp_path / "within")
    twin.save_pretrained(tmp_path / "twin")
    assert not model.config.use_cache
    for function in undo:
        function()
    assert model.config.use_cache and "save_pretrained" not in vars(saves)
    files = {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "within").iterdir()}
    assert not load_file(tmp_path / "twin" / "model.safetensors")["transformer.wpe.weight"].any()
