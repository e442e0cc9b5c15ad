"""Models of images with several lists: Llava, Qwen2-VL, a diffusion transformer and a U-Net equal one process."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from harness import OWN_SERVER, run
from model_families import Trained, workers_import_transformers
from parity import compare, fit, one_device
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from verifying import verified

from strategies import RPCSequentialStrategy

Batch = Mapping[str, Tensor]

TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "use_cache": False,
}
IMAGE = 31
"""The token of a part of an image."""


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=IMAGE, image_seq_length=4
    )
    return LlavaForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text: dict[str, Any] = {**TEXT, "bos_token_id": 1, "eos_token_id": 2}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}
    vision = {"depth": 3, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = Qwen2VLConfig(text_config=text, vision_config=vision)
    config.image_token_id, config.vision_start_token_id, config.vision_end_token_id = IMAGE, 30, 29
    return Qwen2VLForConditionalGeneration(config)


def texts_of_images() -> DataLoader:
    """Each text has one image of four parts."""
    draw, made = torch.Generator().manual_seed(0), []
    for rows, length in ((7, 9), (5, 8)):
        tokens = torch.randint(3, 28, (rows, length), generator=draw)
        tokens[:, 1:5] = IMAGE
        made.append({"input_ids": tokens, "pixel_values": torch.randn(rows, 3, 8, 8, generator=draw)})
    return DataLoader(made, batch_size=None)


def texts_of_grids() -> DataLoader:
    """Each text has one image of four patches, which are rows of one tensor for all images, and become one token."""
    draw, made = torch.Generator().manual_seed(0), []
    for rows, length in ((7, 9), (5, 8)):
        tokens = torch.randint(3, 28, (rows, length), generator=draw)
        tokens[:, 1:4] = torch.tensor([30, IMAGE, 29])
        batch = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int()}
        patches = torch.randn(4 * rows, 3 * 2 * 4 * 4, generator=draw)
        made.append({**batch, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 2]] * rows)})
    return DataLoader(made, batch_size=None)


class Grids(Trained):
    """Splits the patches of images with their texts."""

    def split_batch(self, batch: Batch, num_microbatches: int) -> list[dict[str, Tensor]]:
        parts = {name: value.chunk(num_microbatches) for name, value in batch.items() if name != "pixel_values"}
        sizes = [4 * len(tokens) for tokens in parts["input_ids"]]
        parts["pixel_values"] = batch["pixel_values"].split(sizes)
        return [{name: values[m] for name, values in parts.items()} for m in range(len(sizes))]

    def microbatch_weight(self, microbatch: Batch) -> float:
        return len(microbatch["input_ids"])


class Double(nn.Module):
    """Attends over image and text together, and keeps them apart otherwise, as in Stable Diffusion 3 and Flux."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image, self.text = (nn.Linear(width, width) for _ in range(2))
        self.modulation = nn.Linear(width, 2 * width)

    def forward(self, image: Tensor, text: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.modulation(time)[:, None].chunk(2, -1)
        both = torch.cat([self.image(image), self.text(text)], 1) * (1 + scale) + shift
        both = (both @ both.mT / 4).softmax(-1) @ both
        return image + both[:, : image.shape[1]], text + both[:, image.shape[1] :]


class Single(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation, self.layer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        return hidden + self.layer(torch.tanh(hidden + self.modulation(time)[:, None]))


class Transformer(nn.Module):
    """A diffusion transformer with blocks of two kinds; all of them get the embedding of the time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches, self.words, self.time = nn.Linear(12, width), nn.Embedding(9, width), nn.Linear(1, width)
        self.two, self.one = (nn.ModuleList(kind(width) for _ in range(3)) for kind in (Double, Single))
        self.out = nn.Linear(width, 12)

    def forward(self, image: Tensor, text: Tensor, time: Tensor) -> Tensor:
        rows, length = len(image), 16
        x = image.unfold(2, 2, 2).unfold(3, 2, 2).transpose(1, 2).reshape(rows, length, 12)
        x, words, time = self.patches(x), self.words(text), self.time(time)
        for double in self.two:
            x, words = double(x, words, time)
        x = torch.cat([words, x], 1)
        for single in self.one:
            x = single(x, time)
        return self.out(x[:, words.shape[1] :]).reshape(image.shape)


class Down(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(2, outside)
        self.time = nn.Linear(4, outside)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return torch.nn.functional.silu(self.norm(self.layer(x)) + self.time(time)[:, :, None, None])


class Up(nn.Module):
    def __init__(self, inside: int, outside: int, scale: int) -> None:
        super().__init__()
        self.scale, self.layer = scale, nn.Conv2d(inside, outside, 3, 1, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = torch.cat([x, skip], 1)
        return torch.nn.functional.interpolate(self.layer(x), scale_factor=self.scale).tanh()


class UNet(nn.Module):
    """Each block of the way up gets the output of a block of the way down, which is of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first = nn.Linear(1, 4), nn.Conv2d(3, 4, 1)
        self.down = nn.ModuleList([Down(4, 4, 1), Down(4, 6, 2), Down(6, 8, 2)])
        self.middle = nn.Conv2d(8, 8, 1)
        self.up = nn.ModuleList([Up(16, 6, 2), Up(12, 4, 2), Up(8, 3, 1)])

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        time, x, skips = self.time(time), self.first(image), []
        for down in self.down:
            x = down(x, time)
            skips.append(x)
        x = self.middle(x)
        for up in self.up:
            x = up(x, skips.pop())
        return x


class Diffusion(Trained):
    """Learns to undo noise."""

    def loss(self, batch: Batch) -> Tensor:
        return mse_loss(self.model(**batch), batch["image"].flip(-1))


def noisy(names: tuple[str, ...]) -> DataLoader:
    draw, made = torch.Generator().manual_seed(0), []
    for rows in (7, 5):
        batch = {
            "image": torch.randn(rows, 3, 8, 8, generator=draw),
            "text": torch.randint(9, (rows, 5), generator=draw),
            "time": torch.rand(rows, 1, generator=draw),
        }
        made.append({name: batch[name] for name in names})
    return DataLoader(made, batch_size=None)


Case = tuple[Callable[[], Any], Callable[[], DataLoader], tuple[str, str], list[dict[str, Any]], float]

CASES: dict[str, Case] = {
    "Llava": (
        partial(Trained, llava),
        texts_of_images,
        ("model.vision_tower.encoder.layers", "model.language_model.layers"),
        [{}, {"schedule": "1f1b"}],
        1e-9,
    ),
    "Qwen2-VL": (
        partial(Grids, qwen2_vl),
        texts_of_grids,
        ("model.visual.blocks", "model.language_model.layers"),
        [{"microbatches": 1}, {"schedule": "1f1b"}],
        1e-6,  # rotary embeddings in float32
    ),
    "DiT": (
        partial(Diffusion, Transformer),
        partial(noisy, ("image", "text", "time")),
        ("two", "one"),
        [{}, {"schedule": "1f1b"}],
        1e-9,
    ),
    "U-Net": (
        partial(Diffusion, UNet),
        partial(noisy, ("image", "time")),
        ("down", "up"),
        [{}, {"schedule": "1f1b", "checkpoint": "always"}],
        1e-9,
    ),
}
"""Model, data, lists that are found, settings, and tolerance."""


def equal_one_process(name: str) -> None:
    if name in ("Llava", "Qwen2-VL"):
        workers_import_transformers()
    make, data, lists, choices, tolerance = CASES[name]
    settings: dict[str, Any] = {"train": data, "val": data, "max_epochs": 1}
    single = fit(make, one_device(), 1, **settings)
    for options in choices:
        strategy = RPCSequentialStrategy(**{"microbatches": 3, "balance": "even", **options})
        compare(fit(make, strategy, 2, **settings), single, tolerance)
        assert strategy._division.where == tuple((f"model.{path}",) for path in lists), strategy._division.where


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_images_equals_one_process(name: str) -> None:
    run(equal_one_process, name, env=OWN_SERVER, timeout_seconds=280)


def verdicts(names: Sequence[str]) -> dict[str, Any]:
    if "Llava" in names:
        workers_import_transformers()
    found = {}
    for name in names:
        make, data, _, choices, _ = CASES[name]
        strategy = RPCSequentialStrategy(**{"microbatches": 3, "balance": "even", **choices[1]})
        found[name] = verified(make(), data(), strategy, steps=2)["verdict"]
    return found


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [("Llava", "Qwen2-VL"), ("DiT", "U-Net")])
def test_verify_finds_a_model_of_images_equal(names: Sequence[str]) -> None:
    found = run(verdicts, names, env=OWN_SERVER, timeout_seconds=280)
    assert found == dict.fromkeys(names, "equal to rounding")
