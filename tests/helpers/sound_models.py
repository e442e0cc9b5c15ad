"""Sound models of different kinds, each with its batches and settings of a pipeline of two stages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from model_families import FAMILIES, SIZES, Trained
from parity import WIDTH, batches, small_layers
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader
from verified_nets import SumLoss, VerifiedNet

VOCABULARY = 11


class Layers(LightningModule):
    """A sequence of layers ``[rows, WIDTH]`` to ``[rows, 2]``, with an optimizer.

    Args:
        layers: Makes the layers.
        optimizer: Makes the optimizer, given the model.
    """

    def __init__(
        self,
        layers: Callable[[], list[nn.Module]] = small_layers,
        optimizer: Callable[[Any], Any] = lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    ) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.sequential_module = nn.Sequential(*layers())
        self.make_optimizer = optimizer

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.sequential_module(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch[0]))
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


class Manual(Layers):
    """Steps itself, with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, last = self.sequential_module[0], self.sequential_module[5]
        return [torch.optim.SGD(first.parameters(), 0.1), torch.optim.Adam(last.parameters(), 0.01)]


class Recurrent(nn.Module):
    """A recurrent layer that gives its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(-1))[0][:, -1]


class Twice(nn.Module):
    """Two streams, which one stage sends to the next one as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        left, right = x if isinstance(x, tuple) else (x, x)
        return self.left(left).tanh() + right, self.right(right).tanh()


class Joined(nn.Module):
    """The sum of two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.last(x[0] + x[1])


class Text(LightningModule):
    """Predicts tokens; its head shares the weight of the embedding, and its loss is a mean over labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        head.weight = embedding.weight
        self.sequential_module = nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.GELU(), head)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.sequential_module(batch["tokens"])
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def text() -> DataLoader:
    """Batches whose rows have different numbers of labels."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for rows in (7, 6, 5):
        tokens = torch.randint(VOCABULARY, (rows, 4), generator=generator)
        made.append({"tokens": tokens, "labels": tokens.masked_fill(torch.arange(rows)[:, None] < tokens % 3, -100)})
    return DataLoader(made, batch_size=None)


def convolutions() -> list[nn.Module]:
    return [
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(24, 2),
    ]


def groups(model: Any) -> Any:
    """Frozen first layer; no weight decay for vectors; a momentum and a schedule."""
    model.sequential_module[0].requires_grad_(False)
    own = [p for p in model.parameters() if p.requires_grad]
    given = [
        {"params": [p for p in own if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in own if p.ndim < 2]},
    ]
    optimizer = torch.optim.SGD(given, 0.1, momentum=0.9, nesterov=True)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


@dataclass(frozen=True)
class Sound:
    """A sound model.

    Attributes:
        make: Makes the model.
        loader: Makes the batches.
        options: Arguments of the pipeline.
        arguments: Arguments of the Trainer.
        is_equal: Whether the verdict is "equal to rounding"; else "different as documented".
    """

    make: Callable[[], LightningModule]
    loader: Callable[[], Any] = batches
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    is_equal: bool = True


def _family(name: str, **options: Any) -> Sound:
    (family,) = (each for each in FAMILIES if each.name == name)
    given = {} if family.is_found else {"module": f"model.{family.path}"}

    def loader() -> DataLoader:
        return DataLoader([family.batch(rows, length) for rows, length in SIZES], batch_size=None)

    return Sound(partial(Trained, family.make), loader, {**given, **options})


_PARTS = {"schedule": "1f1b"}

SOUND: dict[str, Sound] = {
    **{name: _family(name, **_PARTS) for name in ("GPT-2", "Llama", "Gemma 3", "Mixtral")},
    **{name: _family(name) for name in ("BERT", "ViT", "T5 decoder", "Wav2Vec2")},
    "layers": Sound(partial(VerifiedNet, "none"), options={"schedule": "zb-h1"}),
    "dropout": Sound(partial(VerifiedNet, "dropout"), options=_PARTS, is_equal=False),
    "BatchNorm": Sound(partial(VerifiedNet, "batch norm"), is_equal=False),
    "counts rows": Sound(partial(VerifiedNet, "counting")),
    "no mean over rows": Sound(SumLoss, options=_PARTS, is_equal=False),
    "convolutions": Sound(partial(Layers, convolutions), options=_PARTS),
    "recurrent": Sound(partial(Layers, lambda: [Recurrent(), nn.Tanh(), nn.Linear(WIDTH, 2)]), options=_PARTS),
    "two streams": Sound(partial(Layers, lambda: [Twice(), Twice(), Joined()])),
    "tied, mean over tokens": Sound(
        Text, text, {**_PARTS, "loss_weight": "tokens"}, {"accumulate_grad_batches": 2}, False
    ),
    "clipped": Sound(Layers, options=_PARTS, arguments={"gradient_clip_val": 0.01}),
    "frozen layer, groups": Sound(partial(Layers, optimizer=groups), options=_PARTS),
    "manual optimization": Sound(Manual),
    "T5, both lists": _family("T5 decoder", module=["model.encoder.block", "model.decoder.block"], **_PARTS),
    "Llama, rows by length": _family("Llama", microbatches=8, microbatch_tokens=30, **_PARTS),
}
"""Models, by a description."""
