"""Models with several lists of layers, which run one after another over the same stages: equal to one process."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import OWN_SERVER, run
from parity import Outcome, compare, fit, one_device
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy

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
        loss = cross_entropy(self(*batch[:3]).flatten(0, 1), batch[3].flatten())
        self.losses.append(loss.item())
        return loss

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


def test_an_encoder_and_a_decoder() -> None:
    run(encoder_and_decoder, env=OWN_SERVER)


def encoder_and_decoder() -> None:
    single = fit(Translator, one_device(), 1, **SETTINGS)
    for devices in (2, 3):
        compare(trained(Translator, devices), single)
