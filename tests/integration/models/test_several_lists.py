"""Models with several lists of layers, which run one after another over the same stages: equal to one process."""

import copy
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import OWN_SERVER, run
from model_families import FAMILIES, SIZES, Trained, workers_import_transformers
from parity import Outcome, accelerator, compare, fit, on_cpus, one_device
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import StochasticWeightAveraging
from sleep_layer import slept
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader
from undisturbed import until_undisturbed
from verifying import verified

from strategies import Rebalance, Recovery, RPCSequentialStrategy
from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.pipeline.schedule.tables import one_f_one_b
from trainer import PipelineMonitor, Trainer

WIDTH, WORDS = 8, 11


class Attention(nn.Module):
    """One block: attention to ``memory``, or to its own input, and a feed-forward part with dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.feed_forward = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
        self.back = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        scores = self.query(x) @ self.key(source).mT / 3
        x = x + scores.masked_fill(~mask[:, None, :], -1e9).softmax(-1) @ self.value(source)
        return x + self.back(self.feed_forward(x))


class Side(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask, memory)
        return self.norm(x)


class Translator(LightningModule):
    """An encoder, and a decoder whose blocks all read the output of the encoder."""

    lists = ("encoder.layers", "decoder.layers")

    def __init__(self, layers: Sequence[int] = (3, 4)) -> None:
        super().__init__()
        self.encoder, self.decoder = (Side(number) for number in layers)
        self.head = nn.Linear(WIDTH, WORDS)
        self.losses: list[float] = []

    def forward(self, tokens: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(tokens, mask)
        return self.head(self.decoder(target, mask, memory) + memory)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self(*batch[:3]).flatten(0, 1), batch[3].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(*batch[:3]).flatten(0, 1), batch[3].flatten()), batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def texts(sizes: Sequence[tuple[int, int]] = ((8, 6), (7, 5), (5, 6))) -> DataLoader:
    """Batches of the given numbers of rows and lengths."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for rows, length in sizes:
        tokens, target, labels = (torch.randint(WORDS, (rows, length), generator=draw) for _ in range(3))
        mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=draw)
        made.append([tokens, mask, target, labels])
    return DataLoader(made, batch_size=None)


SETTINGS: dict[str, Any] = {"train": texts, "val": texts, "max_epochs": 2}


def trained(make: Callable[[], Any], devices: int, **options: Any) -> Outcome:
    options = {"module": list(make().lists), "microbatches": 3, "balance": "even", **options}
    return fit(make, RPCSequentialStrategy(**options), devices, **SETTINGS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_an_encoder_and_a_decoder(devices: int) -> None:
    run(encoder_and_decoder, devices, timeout_seconds=280)


def encoder_and_decoder(devices: int) -> None:
    compare(trained(Translator, devices), fit(Translator, one_device(), 1, **SETTINGS))


class Frozen(Translator):
    """Without gradients from the first list, whose embedding is frozen too."""

    def __init__(self) -> None:
        super().__init__((4, 4))
        self.encoder.requires_grad_(False)


class Large(Translator):
    def __init__(self) -> None:
        super().__init__((4, 5))


class Direct(Translator):
    """The second list does not use the output of the first, but the loss does."""

    def forward(self, tokens: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(tokens, mask)
        return self.head(self.decoder(target, mask) * memory)


class Distilled(Translator):
    """A frozen teacher and a student under one loss; a validation calls the student alone."""

    lists = ("teacher.layers", "student.layers")

    def __init__(self) -> None:
        super().__init__()
        del self.encoder, self.decoder
        self.teacher, self.student = Side(4).requires_grad_(False), Side(3)

    def forward(self, tokens: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return self.head(self.student(tokens, mask))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        tokens, mask, _, labels = batch
        expected, hidden = self.teacher(tokens, mask), self.student(tokens, mask)
        return cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()) + mse_loss(hidden, expected)


def per_microbatch(names: Sequence[str]) -> None:
    for make, options, devices in PER_MICROBATCH:
        if make.__name__ in names:
            compare(trained(make, devices, **options), fit(make, one_device(), 1, **SETTINGS))


@pytest.mark.timeout(300)
def test_an_encoder_and_a_decoder_under_1f1b() -> None:
    run(per_microbatch, ["Translator"], timeout_seconds=280)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [("Large", "Direct"), ("Frozen", "Tied", "Killed"), ("Distilled",)])
def test_schedules_that_run_a_step_per_microbatch(names: Sequence[str]) -> None:
    run(per_microbatch, names, timeout_seconds=280)


class Bottleneck(nn.Module):
    """A convolutional block of a ResNet, without running statistics."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(2, outside)
        self.conv2, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1), nn.GroupNorm(2, outside)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride)) if inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Four ``nn.Sequential`` in a row, as in torchvision and timm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(Bottleneck(4, 4), Bottleneck(4, 4))
        self.layer2 = nn.Sequential(Bottleneck(4, 6, 2), Bottleneck(6, 6))
        self.layer3 = nn.Sequential(Bottleneck(6, 8, 2))
        self.layer4 = nn.Sequential(Bottleneck(8, 8))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv1(x))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class VGG(nn.Module):
    """``features`` and ``classifier``, with an operation in between."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(24, 8), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class ConvNeXt(nn.Module):
    """``features`` and ``classifier``, with a layer in between; ``features`` has ``nn.Sequential`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        stages = [nn.Sequential(Bottleneck(a, b), Bottleneck(b, b)) for a, b in ((4, 4), (4, 6))]
        self.features = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.GroupNorm(1, 4)), *stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.GroupNorm(1, 6), nn.Flatten(1), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)))


class Stage(nn.Module):
    """A stage of a Swin transformer of timm: a list of blocks inside a layer of an ``nn.Sequential``."""

    def __init__(self, width: int, outside: int) -> None:
        super().__init__()
        self.downsample = nn.Linear(width, outside)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(outside), nn.Linear(outside, outside)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.layers = nn.Conv2d(3, 4, 2, 2), nn.Sequential(Stage(4, 4), Stage(4, 6), Stage(6, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.patch(x).flatten(2).mT)).mean(1))


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class WindowAttention(nn.Module):
    """Cosine attention within windows of ``[rows, height, width, features]``, which may be shifted."""

    def __init__(self, width: int, window: int, shift: int, heads: int = 2) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), 10.0).log())
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 8), nn.ReLU(True), nn.Linear(8, heads, bias=False))
        self.qkv.bias.data[width : 2 * width].zero_()
        places = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        away = places[:, None] - places
        self.register_buffer("index", ((away + window - 1) * torch.tensor([2 * window - 1, 1])).sum(-1))
        steps = torch.arange(1 - window, window) / max(1, window - 1) * 8
        table = torch.cartesian_prod(steps, steps)
        self.register_buffer("table", table.sign() * (table.abs() + 1).log2() / 3)

    def forward(self, x: Tensor) -> Tensor:
        rows, height, width, _ = x.shape
        x = nn.functional.pad(x, (0, 0, 0, -width % self.window, 0, -height % self.window))
        size, shift = x.shape[1:3], [self.shift if self.window < number else 0 for number in x.shape[1:3]]
        x = self.windows(x.roll([-number for number in shift], (1, 2)))
        bias = self.qkv.bias.clone()
        bias[len(bias) // 3 : 2 * len(bias) // 3].zero_()
        qkv = nn.functional.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        normalized = nn.functional.normalize
        scores = normalized(query, dim=-1) @ normalized(key, dim=-1).mT * self.logit_scale.clamp(max=4.6).exp()
        scores = scores + 16 * self.cpb_mlp(self.table)[self.index].permute(2, 0, 1).sigmoid()
        if any(shift):
            scores = scores + self.mask(size, shift, x).repeat(rows, 1, 1)[:, None]
        x = self.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        down, right = (number // self.window for number in size)
        x = x.unflatten(0, (rows, down, right)).unflatten(3, (self.window, self.window)).transpose(2, 3)
        return x.reshape(rows, *size, -1).roll(shift, (1, 2))[:, :height, :width].contiguous()

    def windows(self, x: Tensor) -> Tensor:
        """Return the windows one after another: ``[rows * windows, places, features]``."""
        x = x.unflatten(2, (-1, self.window)).unflatten(1, (-1, self.window)).transpose(2, 3)
        return x.flatten(3, 4).flatten(0, 2)

    def mask(self, size: Sequence[int], shift: Sequence[int], like: Tensor) -> Tensor:
        """Keeps places apart that the shift has brought together."""
        areas = like.new_zeros(size)
        for n, down in enumerate((slice(0, -self.window), slice(-self.window, -shift[0]), slice(-shift[0], None))):
            for k, right in enumerate((slice(0, -self.window), slice(-self.window, -shift[1]), slice(-shift[1], None))):
                areas[down, right] = 3 * n + k
        areas = self.windows(areas[None, ..., None])[..., 0]
        return (areas[:, None] != areas[:, :, None]) * -100.0


class SwinBlock(nn.Module):
    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.attn, self.norm1 = WindowAttention(width, 3, shift), nn.LayerNorm(width)
        self.mlp, self.norm2 = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width)), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.attn(x))
        return x + self.norm2(self.mlp(x))


class PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * width, 2 * width, bias=False), nn.LayerNorm(2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        x = torch.cat([x[:, down::2, right::2] for right in (0, 1) for down in (0, 1)], -1)
        return self.norm(self.reduction(x))


class SwinV2(nn.Module):
    """Stages of blocks with shifted windows and layers that merge patches, all in ``features``, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 4, 1), Permute(0, 2, 3, 1), nn.LayerNorm(4))]
        for width in (4, 8, 16):
            layers += [nn.Sequential(SwinBlock(width, 0), SwinBlock(width, 1)), PatchMerging(width)]
        self.features, self.norm = nn.Sequential(*layers[:-1]), nn.LayerNorm(16)
        self.permute, self.avgpool, self.flatten = Permute(0, 3, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.permute(self.norm(self.features(x)))
        return self.head(self.flatten(self.avgpool(x)))


class Classified(LightningModule):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = make()
        self.losses: list[float] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def images() -> DataLoader:
    draw = torch.Generator().manual_seed(0)
    made = [(torch.randn(n, 3, 12, 12, generator=draw), torch.randint(4, (n,), generator=draw)) for n in (6, 6, 5)]
    return DataLoader(made, batch_size=None)


FOUND: dict[Callable[[], nn.Module], Any] = {
    ResNet: (tuple(f"net.layer{number}" for number in (1, 2, 3, 4)),),
    VGG: (("net.features",), ("net.classifier",)),
    ConvNeXt: (("net.features", "net.avgpool", "net.classifier"),),
    Swin: "net.layers",
    SwinV2: "net.features",
}
"""What ``strategy="rpc_sequential"`` alone pipelines of each model."""


def found_lists(names: Sequence[str], schedule: str, stages: Sequence[int]) -> None:
    settings: dict[str, Any] = {"train": images, "val": images, "max_epochs": 1}
    for make, found in FOUND.items():
        if make.__name__ in names:
            single = fit(partial(Classified, make), one_device(), 1, **settings)
            for devices in stages:
                strategy = RPCSequentialStrategy(schedule=schedule, microbatches=3, balance="even")
                compare(fit(partial(Classified, make), strategy, devices, **settings), single)
                assert strategy._division.where == found, strategy._division.where


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sequences_in_a_row_are_one_list() -> None:
    run(found_lists, [make.__name__ for make in FOUND], "gpipe", (2, 3), timeout_seconds=280)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sequences_in_a_row_under_1f1b() -> None:
    run(found_lists, ["ResNet", "VGG", "ConvNeXt", "SwinV2"], "1f1b", (2,), timeout_seconds=280)


class Tied(Translator):
    """A weight that both lists use, on different stages, and frozen blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.layers[-1].query.weight = self.encoder.layers[0].query.weight
        self.encoder.layers[1].requires_grad_(False)


class Uses(Translator):
    """Reads and loads the weights of one side, in the middle of training; kills a worker; moves layers."""

    kills = moves = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx != 1:
            return
        decoder = {name: 2 * value for name, value in self.decoder.state_dict().items()}
        self.encoder.layers[2].load_state_dict({n: 2 * v for n, v in self.encoder.layers[2].state_dict().items()})
        self.decoder.load_state_dict(decoder)
        strategy = self.trainer.strategy
        if isinstance(strategy, RPCSequentialStrategy) and self.kills and self.current_epoch == 0:
            found = re.search(r"process (\d+)", strategy.pipeline.remotes[0].process.description)
            assert found is not None
            os.kill(int(found[1]), signal.SIGKILL)
        if isinstance(strategy, RPCSequentialStrategy) and self.moves and self.current_epoch == 0:
            strategy.rebalance([1, 2, 3, 1])


class Killed(Uses):
    kills = True


class Moved(Uses):
    moves = True


PER_MICROBATCH: list[tuple[Any, dict[str, Any], int]] = [
    (Translator, {"schedule": "1f1b"}, 3),
    (Large, {"schedule": "interleaved"}, 2),
    (Large, {"schedule": "zb-h1", "checkpoint": "never", "microbatches": 5}, 3),
    (Direct, {"schedule": "1f1b", "checkpoint": "always"}, 2),
    (Frozen, {"schedule": "1f1b", "checkpoint": "never"}, 2),
    (Tied, {"schedule": "1f1b"}, 2),
    (Distilled, {"schedule": "1f1b"}, 3),
    (Distilled, {"schedule": "gpipe"}, 2),
    (Killed, {"schedule": "1f1b", "recovery": Recovery(1)}, 2),
    (Direct, {"recovery": Recovery(verify_every_n_steps=1)}, 2),
    (Direct, {"schedule": "1f1b", "recovery": Recovery(verify_every_n_steps=1)}, 2),
]
"""Models, settings and numbers of stages, most under schedules that run ``training_step`` once per micro-batch."""


def weights_of_one_side() -> None:
    single = fit(Uses, one_device(), 1, **SETTINGS)
    compare(trained(Uses, 2), single)
    if accelerator() == "cpu":
        compare(trained(Moved, 2), single)


def a_lost_worker() -> None:
    compare(trained(Killed, 2, recovery=Recovery(1)), fit(Uses, one_device(), 1, **SETTINGS))


def tied_weights() -> None:
    single = fit(Tied, one_device(), 1, **SETTINGS)
    compare(trained(Tied, 2), single)
    compare(trained(Tied, 3, checkpoint="never"), single)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_that_both_lists_use() -> None:
    run(tied_weights, timeout_seconds=280)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_of_one_side_and_moved_layers() -> None:
    run(weights_of_one_side, timeout_seconds=280)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lost_worker() -> None:
    run(a_lost_worker, timeout_seconds=280)


def checkpoints(folder: str) -> None:
    """Stops after an epoch and resumes, as one process and as a pipeline, with both forms of checkpoint."""
    whole = fit(Translator, one_device(), 1, **SETTINGS)
    for kind in ("full", "sharded"):
        path = f"{folder}/{kind}.ckpt"
        options: dict[str, Any] = {"balance": "even", "microbatches": 3, "state_dict_type": kind}
        first = RPCSequentialStrategy(module=list(Translator.lists), **options)
        fit(Translator, first, 2, **{**SETTINGS, "max_epochs": 1}, callbacks=[Saves(path)])
        second = RPCSequentialStrategy(module=list(Translator.lists), **options)
        resumed = fit(Translator, second, 3, **SETTINGS, ckpt_path=path)
        compare(replace(resumed, losses=whole.losses), whole)
        if kind == "full":
            single = fit(Translator, one_device(), 1, **SETTINGS, ckpt_path=path)
            compare(replace(single, losses=whole.losses), whole)
            assert list(torch.load(path, weights_only=False)["state_dict"]) == list(whole.parameters)


class Saves(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)
        if trainer.strategy._state_dict_type == "full":
            trainer.strategy.rpc_save_model(trainer, self.pickled, self.path + ".pickled")

    @staticmethod
    def pickled(trainer: Any, path: Any) -> None:
        whole = copy.deepcopy(trainer.lightning_module.decoder)
        assert all(not p.is_meta for p in whole.parameters())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checkpoints(tmp_path: Path) -> None:
    run(checkpoints, str(tmp_path), timeout_seconds=280)


def both_halves(names: Sequence[str], schedule: str) -> list[str]:
    workers_import_transformers()
    wrong: list[str] = []
    for family in FAMILIES:
        if family.name.removesuffix(" encoder") not in names or not family.name.endswith("encoder"):
            continue
        other = family.path.replace("encoder", "decoder")
        settings: dict[str, Any] = {"train": partial(loader, family), "val": partial(loader, family), "max_epochs": 1}
        try:
            single = fit(partial(Trained, family.make), one_device(), 1, **settings)
            strategy = RPCSequentialStrategy(schedule=schedule, microbatches=3, balance="even")
            compare(fit(partial(Trained, family.make), strategy, 2, **settings), single, family.tolerance)
            assert strategy._division.where == ((f"model.{family.path}",), (f"model.{other}",))
        except BaseException as error:  # pytest's own included
            wrong.append(f"{family.name}: {type(error).__name__}: {error}")
    return wrong


def loader(family: Any) -> DataLoader:
    return DataLoader([family.batch(rows, length) for rows, length in SIZES], batch_size=None)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_both_halves_of_models_of_transformers(schedule: str) -> None:
    names = ("T5", "BART", "Marian", "Whisper")
    assert run(both_halves, names, schedule, env=OWN_SERVER, timeout_seconds=280) == []


def refused() -> dict[str, str]:
    """Returns the message of each refusal."""
    found = {}
    for name, (options, arguments) in REFUSED.items():
        strategy = RPCSequentialStrategy(**{"module": list(Translator.lists), **options})
        try:
            fit(Late if name == "late" else Translator, strategy, 2, **SETTINGS, **arguments())
        except Exception as error:
            found[name] = str(error)
    return found


class Late(Translator):
    """Builds a list in ``configure_model``, without memory as large layers are."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.encoder = Side(3)


REFUSED: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "order": ({"schedule": "1f1b", "balance": "even", "module": ["decoder.layers", "encoder.layers"]}, dict),
    "zbv": ({"schedule": "zbv"}, dict),
    "table": ({"schedule": one_f_one_b}, dict),
    "averages": (
        {"balance": "even"},
        lambda: {"callbacks": [StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)]},
    ),
    "balance": ({"balance": [2, 2, 2, 1]}, dict),
    "data plane": ({"balance": "even", "data_plane": "simulated"}, dict),
    "late": ({"balance": "even"}, dict),
}

MESSAGES = {
    "order": "training_step called 'encoder.layers' before 'decoder.layers', but .* Name them in the order of",
    "zbv": "schedule='zbv' is for one list of layers, but 2 .* 'gpipe', '1f1b', 'interleaved', 'zb-h1'",
    "table": "schedule=.*one_f_one_b.* is for one list of layers",
    "averages": "one nn.Sequential or nn.ModuleList, but 'encoder.layers' and 'decoder.layers' are pipelined together",
    "balance": r"The provided balance \[2, 2, 2, 1\] has \[2, 2\] for list 0 of 2, which has 3 layers",
    "data plane": "2 lists of layers are pipelined one after another under data_plane='gloo' only"
    if accelerator() == "cpu"
    else "data_plane='simulated' simulates devices on CPUs",
    "late": "Late has tensors without memory .* 'encoder.layers' and 'decoder.layers' are pipelined together",
}


@pytest.mark.slow
def test_what_is_refused_is_named() -> None:
    found = run(refused, timeout_seconds=170)
    for name, message in MESSAGES.items():
        assert re.search(message, found.get(name, "not refused")), (name, found.get(name))


def measured(balance: str) -> None:
    compare(trained(Shown, 2, balance=balance), fit(Shown, one_device(), 1, **SETTINGS))


class Shown(Translator):
    def __init__(self) -> None:
        super().__init__()
        tokens = torch.zeros(4, 6, dtype=torch.long)
        self.example_input_array = tokens, tokens == 0, tokens


@pytest.mark.parametrize("balance", ["by_size", pytest.param("by_time", marks=pytest.mark.slow)])
def test_a_measured_balance(balance: str) -> None:
    run(measured, balance)


def chosen(folder: str) -> None:
    single = fit(Shown, one_device(), 1, **SETTINGS)
    for devices, options in ((2, {"microbatches": "auto"}), (3, {"checkpoint": "never"})):
        strategy = RPCSequentialStrategy(module=list(Shown.lists), schedule="auto", **{"microbatches": 3, **options})
        outcome = fit(Shown, strategy, devices, **SETTINGS)
        compare(outcome, single)
        planned = strategy._division._planned
        assert planned is not None and planned.lengths == [3, 4] and planned.num_lists == 2
        assert list(strategy.balance) == planned.balance
    outcome.trainer.save_checkpoint(f"{folder}/last.ckpt")
    state = torch.load(f"{folder}/last.ckpt", weights_only=True)["relay"]["schedule"]
    assert PlannedSchedule.from_state(state) == planned


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_schedule_that_is_found(tmp_path: Path) -> None:
    run(chosen, str(tmp_path), timeout_seconds=280)


class Sleeping(nn.Module):
    """A block of a known time, which may read the output of the other list."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.line, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return slept(self.line(x if memory is None else x + memory), *(len(x) * each for each in self.seconds))


class Slow(LightningModule):
    """Two lists of blocks whose times do not depend on the load of the machine, with code before, between and after."""

    lists = ("encoder", "decoder")

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = (Sleeping(0.004, 0.004), Sleeping(0.008, 0.012), Sleeping(0.006, 0.008))
        self.encoder = nn.ModuleList(Sleeping(0.012, 0.02) for _ in range(4))
        self.decoder = nn.ModuleList(Sleeping(0.02, 0.04) for _ in range(3))
        self.seconds: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.before(batch)
        for block in self.encoder:
            x = block(x)
        memory, x = self.between(x), batch
        for block in self.decoder:
            x = block(x, memory)
        return self.after(x).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begin = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds.append(time.perf_counter() - self.begin)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def predicted_and_measured(schedule: str) -> tuple[float, float]:
    def strategy(**options: Any) -> RPCSequentialStrategy:
        return RPCSequentialStrategy(module=list(Slow.lists), checkpoint="never", **options)

    batches = DataLoader([torch.ones(8, WIDTH)] * 4, batch_size=None)
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    row = Trainer(strategy=strategy(), **settings).plan(Slow(), batches, microbatches=4, schedules=[schedule]).best
    model = Slow()
    own = strategy(balance=row.balance, schedule=schedule, microbatches=4)
    Trainer(strategy=own, max_epochs=1, enable_progress_bar=False, **settings).fit(model, batches)
    assert row.seconds is not None
    return row.seconds, min(model.seconds[1:])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_time_of_a_step_is_the_predicted_one(schedule: str) -> None:
    def is_predicted(found: tuple[float, float]) -> None:
        predicted, seconds = found
        assert predicted == pytest.approx(seconds, rel=0.1)

    until_undisturbed(lambda: run(predicted_and_measured, schedule, timeout_seconds=90), is_predicted)


class SleepingBlock(Attention):
    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        return slept(super().forward(x, mask, memory), 0.01, 0.02)


class Sleepy(Translator):
    """Blocks that take time, of which the driver has too few at first."""

    def __init__(self) -> None:
        super().__init__((4, 4))
        for side in (self.encoder, self.decoder):
            side.layers = nn.ModuleList(SleepingBlock() for _ in range(4))


def moved_by_itself(schedule: str) -> list[int]:
    options: dict[str, Any] = {"module": list(Sleepy.lists), "schedule": schedule, "microbatches": 3}
    strategy = RPCSequentialStrategy([3, 1, 3, 1], rebalance=Rebalance(every_n_steps=3, threshold=0.02), **options)
    compare(fit(Sleepy, strategy, 2, **SETTINGS), fit(Sleepy, one_device(), 1, **SETTINGS))
    return list(strategy.balance)


@on_cpus
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_layers_of_both_lists_move_by_themselves(schedule: str) -> None:
    def check_moved(balance: list[int]) -> None:
        assert balance != [3, 1, 3, 1] and balance[0] + balance[2] < 6, balance

    balance = until_undisturbed(lambda: run(moved_by_itself, schedule, timeout_seconds=90), check_moved)
    assert sum(balance[:2]) == sum(balance[2:]) == 4


class Squares(Translator):
    """Adds the squares of the weights of both lists to the loss, which the driver computes with values of stages."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        parts = self.encoder.layers[0].query, self.decoder.layers[0].query
        return loss + 0.01 * torch.stack([part.weight.square().sum() for part in parts]).sum()


def monitored(folder: str) -> None:
    for schedule, make in (("gpipe", Squares), ("1f1b", Translator)):
        own = f"{folder}/{schedule}"
        monitor = PipelineMonitor(every_n_steps=1, trace_steps=[1], dirpath=own)
        strategy = RPCSequentialStrategy("even", module=list(make.lists), schedule=schedule, microbatches=3)
        compare(fit(make, strategy, 2, **SETTINGS, callbacks=[monitor]), fit(make, one_device(), 1, **SETTINGS))
        files = {path.name for path in Path(own).rglob("*")}
        assert {"step-1.trace.json", "events.jsonl", "step-1.svg"} <= files
        picture = next(Path(own).rglob("step-1.svg")).read_text()
        places = [picture.index(f">{name}<") for name in ("0F0", "2F0", "2B0", "0B0")]
        assert len(set(places)) == 4
        trace = json.loads(next(Path(own).rglob("step-1.trace.json")).read_text())["traceEvents"]
        assert {"2b0", "2a2"} <= {event["name"] for event in trace}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_monitor_and_weights_of_stages_in_the_loss(tmp_path: Path) -> None:
    run(monitored, str(tmp_path), timeout_seconds=280)


# Verified by ``trainer.verify``


class WorkerFault(nn.Module):
    """The identity, whose backward pass halves the gradient in a worker's process."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.driver and x.requires_grad:
            x = x.clone()
            x.register_hook(lambda grad: grad * 0.5)
        return x


class WrongDecoder(Trained):
    """T5 with a fault in the first block of the decoder."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        dense = self.model.decoder.block[0].layer[-1].DenseReluDense
        dense.wi = nn.Sequential(dense.wi, WorkerFault())


def verdicts_of_families(names: Sequence[str]) -> dict[str, Any]:
    workers_import_transformers()
    found = {}
    for family in FAMILIES:
        if family.name.removesuffix(" encoder") in names and family.name.endswith("encoder"):
            for blocks in (None, 1):
                strategy = RPCSequentialStrategy(schedule="1f1b", microbatches=3, balance="even")
                arguments: dict[str, Any] = {"steps": 2, "devices": 2 if blocks is None else 1, "blocks": blocks}
                found[family.name, blocks] = verified(Trained(family.make), loader(family), strategy, **arguments)
    return found


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [("T5", "BART"), ("Marian", "Whisper")])
def test_verify_finds_both_halves_equal(names: Sequence[str]) -> None:
    found = run(verdicts_of_families, names, env=OWN_SERVER, timeout_seconds=280)
    assert [each["verdict"] for each in found.values()] == ["equal to rounding"] * 4
    for (name, blocks), each in found.items():
        assert any("only the first 1 of each were run" in note for note in each["notes"]) == (blocks == 1)
        short = [2, 2] if name.startswith("T5") else [1, 1]  # the first block of T5 differs from the others, and stays
        assert each["facts"]["balance"] == ([2, 2, 2, 2] if blocks is None else short)


def verdicts_of_lists() -> dict[str, str]:
    found = {}
    for make in FOUND:
        strategy = RPCSequentialStrategy(microbatches=3, balance="even")
        found[make.__name__] = verified(Classified(make), images(), strategy, steps=2)["verdict"]
    for kind in (Translator, Frozen, Direct, Tied, Squares, Distilled):
        strategy = RPCSequentialStrategy(microbatches=3, balance="even", module=list(kind.lists))
        found[kind.__name__] = verified(kind(), texts(), strategy, steps=2)["verdict"]
    return found


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_verify_finds_models_of_several_lists_equal() -> None:
    assert set(run(verdicts_of_lists, timeout_seconds=280).values()) == {"equal to rounding"}


def fault_in_the_decoder() -> dict[str, Any]:
    workers_import_transformers()
    (family,) = (each for each in FAMILIES if each.name == "T5 decoder")
    strategy = RPCSequentialStrategy(schedule="1f1b", microbatches=3, balance="even")
    return verified(WrongDecoder(family.make), loader(family), strategy, steps=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_verify_finds_a_fault_in_the_second_list() -> None:
    found = run(fault_in_the_decoder, env=OWN_SERVER, timeout_seconds=280)
    origin = found["origin"]
    assert (found["verdict"], origin["part"], origin["step"]) == ("wrong", "gradients", 0)
    assert origin["layer"] == "model.decoder.block.0.layer.2.DenseReluDense.wi.0"
    assert (origin["stage"], "0.5 times" in origin["what"]) == ("stage 0", True)
