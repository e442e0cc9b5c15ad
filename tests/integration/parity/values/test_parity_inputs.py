"""What goes through the layers beside the rows of a batch: skip connections, tensors that all rows share, objects."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, batches, check, on_cpus
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from strategies.pipeline import Namespace, NoChunk, pop, skippable, stash

UNEVEN = (8, 7, 2, 5)


class Once(Small):
    """Keeps the loss of each batch, however often ``training_step`` is run for it."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


def data() -> Any:
    return batches(UNEVEN)


# Skip connections


@skippable(stash=["skip", "scale"])
class Stashes(nn.Linear):
    """Stashes what it computes, also what it hands on, and ``None``."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        yield stash("scale", None if len(x) % 2 else x.detach().abs())
        yield stash("skip", y)
        return y


@skippable(pop=["skip", "scale"])
class Pops(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        scale = yield pop("scale")
        return super().forward(x.tanh()) + skip * (1 if scale is None else 1 + 0 * scale)


class SkipNet(Once):
    """Of seven layers. On three stages the outer skips jump over the second one, which the inner ones enter and leave.

    0 Stashes  1 Stashes  2 LayerNorm  │ 3 Linear  4 Pops │ 5 Pops  6 Linear
        │          └────────────────────────────────┘          │
        └──────────────────────────────────────────────────────┘
    """

    def __init__(self) -> None:
        outer, inner = Namespace(), Namespace()
        layers = [Stashes().isolate(outer), Stashes().isolate(inner), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
        super().__init__([*layers, Pops().isolate(inner), Pops().isolate(outer), nn.Linear(WIDTH, 2)])
        self.example_input_array = torch.randn(6, WIDTH)


# Tensors that all rows share, and objects


class Keys:
    """What layers computed so far, and how often they did."""

    def __init__(self, prefix: Tensor) -> None:
        self.keys = [prefix]
        self.layers = {"ran": 0}


class UsesObject(nn.Linear):
    """Adds to an object and uses all that is in it, and tensors without a row for each sample."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        given["keys"].keys.append(super().forward(given["x"]))
        given["keys"].layers["ran"] += 1
        assert len(given["keys"].keys) == 1 + given["keys"].layers["ran"]
        x = sum(given["keys"].keys) * given["shared"][0] + given["shared"][1]
        return {**given, "x": x.tanh()}


class Ends(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2)

    def forward(self, given: dict[str, Any]) -> Tensor:
        assert given["keys"].layers["ran"] == 4
        return super().forward(given["x"])


class Given(Once):
    """Gives the layers a mask of the batch and a parameter, both of one row for all, and an object with another one."""

    def __init__(self) -> None:
        super().__init__([*(UsesObject() for _ in range(4)), Ends()])
        self.shift = nn.Parameter(torch.randn(1, WIDTH))
        self.prefix = nn.Parameter(torch.randn(1, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shared = batch["mask"], NoChunk(self.shift * 2)
        return mse_loss(self({"x": batch["x"], "shared": shared, "keys": Keys(self.prefix)}), batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.log("val_loss", self.training_step(batch, batch_idx), batch_size=len(batch["x"]))


def masked() -> DataLoader:
    mask = NoChunk(torch.linspace(0, 1, WIDTH)[None])
    return DataLoader([{"x": x, "y": y, "mask": mask} for x, y in batches(UNEVEN)], batch_size=None)


CLIPPED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_epochs": 1}


def skips() -> None:
    check(SkipNet, train=data, val=data, strategy={"checkpoint": "always"}, stages=[3], **CLIPPED)


def test_skip_connections_between_stages() -> None:
    run(skips, timeout_seconds=240)


def rows() -> None:
    one_f_one_b = {"schedule": "1f1b"}
    check(SkipNet, train=data, strategy={**one_f_one_b, "balance": "by_size"}, stages=[2])
    check(SkipNet, train=data, strategy={"checkpoint": "never", "balance": "by_time"})
    check(Given, train=masked, val=masked, strategy={"checkpoint": "always"}, stages=[3], **CLIPPED)
    check(Given, train=masked, strategy={**one_f_one_b, "checkpoint": "always"}, stages=[2])
    check(Given, train=masked, strategy=one_f_one_b, stages=[3])


@pytest.mark.slow
def test_both_schedules_with_skips_shared_tensors_and_objects() -> None:
    run(rows, timeout_seconds=400)


# Packed sequences


class Packs(nn.Linear):
    """Returns a sequence of one to three vectors for each row."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> PackedSequence:
        padded, lengths = super().forward(x).view(len(x), 3, WIDTH), 1 + x.argmax(1) % 3
        return pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)


class Unpacks(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2)

    def forward(self, packed: PackedSequence) -> Tensor:
        padded, _ = pad_packed_sequence(super().forward(packed)[0], batch_first=True)
        return padded.sum(1)


def packed() -> None:
    for schedule in ("gpipe", "zb-h1"):
        check(lambda: Once([Packs(), Unpacks()]), train=data, stages=[2], strategy={"schedule": schedule})


@on_cpus  # a PackedSequence has tensors that must not be on a GPU
def test_packed_sequences_between_stages() -> None:
    run(packed)
