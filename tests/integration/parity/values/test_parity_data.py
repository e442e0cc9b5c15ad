"""Batches of every shape and nesting train the same in one process and as pipelines of two and three stages."""

from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Fresh, Small, batches, check
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

MICROBATCHES = 3
VOCABULARY, HIDDEN = 11, 6


# Numbers of rows: always 3 micro-batches, if there are so many rows


class NotesSizes(Small):
    """Notes how many rows each step got."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = {"training": [], "validation": []}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.sizes["training"].append(len(batch[0]))
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.sizes["validation"].append(len(batch[0]))
        super().validation_step(batch, batch_idx)


def rows(number: int, size: int) -> DataLoader:
    """A loader as users write it: its last batch is smaller."""
    generator = torch.Generator().manual_seed(number)
    columns = [torch.randn(number, width, generator=generator) for width in (WIDTH, 2)]
    return DataLoader(TensorDataset(*columns), batch_size=size)


def numbers_of_rows() -> list[list[dict[str, list[int]]]]:
    last_smaller = check(NotesSizes, train=lambda: rows(18, 8), val=lambda: rows(40, 19))
    fewer_than_microbatches = check(NotesSizes, train=lambda: batches((7, 2, 1, 4)), val=lambda: batches((1, 9)))
    return [[outcome.model.sizes for outcome in each] for each in (last_smaller, fewer_than_microbatches)]


def test_any_number_of_rows() -> None:
    """Batches that do not divide evenly, few rows, a smaller last batch, and larger ones in validation."""
    for outcomes, training, validation in zip(
        run(numbers_of_rows), ([8, 8, 2], [7, 2, 1, 4]), ([19, 19, 2], [1, 9]), strict=True
    ):
        assert len(outcomes) == 3
        for sizes in outcomes:  # no row was left out to make the rest divisible
            assert sizes["training"] == 2 * training
            assert sizes["validation"][2:] == 2 * validation  # after the two batches of the sanity check


# Lengths, and how often a shape is described


class Mixes(nn.Module):
    """Looks at the tokens before: ``[rows, length, HIDDEN]`` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(1)
        return x + self.linear(x.cumsum(1) / positions).tanh()


class Tokens(Small):
    """A language model in miniature: whole numbers go in, scores of every token come out."""

    def __init__(self) -> None:
        super().__init__()
        ends = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.sequential_module = nn.Sequential(ends[0], Mixes(), nn.LayerNorm(HIDDEN), Mixes(), ends[1])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self(batch[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss


SHAPES = [(7, 5), (7, 9), (4, 5), (7, 5), (2, 13), (7, 9)]
"""Rows and length of each batch."""


def tokens() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    return DataLoader([torch.randint(VOCABULARY, s, generator=generator) for s in SHAPES], batch_size=None)


class CountDescriptions(Callback):
    """Counts the values and the descriptions of shapes that go out of and come into the driver."""

    def on_train_start(self, trainer: Any, model: Any) -> None:
        self.counts = {"feed": 0, "inputs": 0, "input_grads": 0}
        self.values = dict(self.counts)
        self.stages = trainer.num_devices
        if self.stages > 1 and trainer.world_size == 1:
            edges = trainer.strategy.pipeline._running.executor.edges
            to, last = edges._senders, len(edges.rank_of) - 1
            for name, sender in {"feed": to["F", 0], "input_grads": to["B", last]}.items():
                sender._look_up = partial(self.sent, name, sender._look_up)
            receiver = edges._receivers["F", last]
            receiver._next = partial(self.taken, receiver._next)
            link, self.arrivals = receiver._link, receiver._link._arrivals[receiver._channel]
            link._receive_layout = partial(self.described, link._receive_layout)

    def sent(self, name: str, look_up: Any, value: Any) -> Any:
        known, tensors, description = look_up(value)
        self.values[name] += 1
        self.counts[name] += bool(description)
        return known, tensors, description

    def taken(self, take: Any, *place: int) -> Any:
        self.values["inputs"] += 1
        return take(*place)

    def described(self, receive: Any, arrivals: Any, *rest: int) -> None:
        self.counts["inputs"] += arrivals is self.arrivals
        receive(arrivals, *rest)


def lengths() -> list[tuple[dict[str, int], dict[str, int]]]:
    outcomes = check(Tokens, train=tokens, callbacks=Fresh(lambda: [CountDescriptions()]))
    counters = [outcome.trainer.callbacks[0] for outcome in outcomes[1:]]
    return [(counter.counts, counter.values) for counter in counters]


@pytest.mark.slow
def test_lengths_that_change_and_shapes_described_once() -> None:
    """One description for each shape that a micro-batch has, over two epochs, on each channel of the driver."""
    parts = [(len(part), length) for n, length in SHAPES for part in torch.arange(n).tensor_split(min(n, MICROBATCHES))]
    assert len(set(parts)) == 6
    for counts, values in run(lengths):
        assert counts == {"feed": 6, "inputs": 6, "input_grads": 6}
        assert values == dict.fromkeys(counts, 2 * len(parts))


# What passes between stages, and into the step


class Opens(nn.Module):
    """Makes of a batch what can pass between stages: nested, whole numbers, nothing, a constant without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(WIDTH, HIDDEN)

    def forward(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        assert batch["name"] == "a batch" and batch["nothing"] is None
        kept = batch["kinds"] % 3 > 0
        x = self.linear(batch["features"][0])
        return x, (batch["kinds"], kept), None, {"constant": x.detach() * 2, "drift": self.embedding(batch["kinds"])}


class Passes(nn.Module):
    """Changes two of the parts, and hands on the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, (kinds, kept), nothing, more = given
        assert nothing is None
        assert kinds.dtype == torch.long and kept.dtype == torch.bool
        x = self.linear(x).tanh() * kept.unsqueeze(1) + more["constant"]
        return x, (kinds + 1, kept), nothing, {**more, "drift": more["drift"] * kinds.unsqueeze(1)}


class Closes(nn.Module):
    """Makes one output of all parts, beside whole numbers and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 2)

    def forward(self, given: tuple[Any, ...]) -> dict[str, Any]:
        x, (kinds, kept), nothing, more = given
        y = self.linear(x + more["drift"] + more["constant"])
        return {"y": y, "kinds": (kinds, nothing), "best": y.argmax(1), "kept": kept}


class Nested(Small):
    """Its batches and what its layers pass on are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(Opens(), Passes(), Passes(), Closes())
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        out = self(batch["inputs"])
        kinds, nothing = out["kinds"]
        assert nothing is None and out["best"].shape == kinds.shape
        assert torch.equal(kinds, batch["inputs"]["kinds"] + 2)
        loss = mse_loss(out["y"][out["kept"]], batch["targets"][0][out["kept"]])
        self.losses.append(loss.item())
        self.seen.append(out["best"].tolist())
        return loss


def nested() -> DataLoader:
    generator = torch.Generator().manual_seed(0)

    def batch(size: int) -> dict[str, Any]:
        kinds = torch.randint(VOCABULARY, (size,), generator=generator)
        kinds[0] = 1  # at least one row counts
        features = [torch.randn(size, WIDTH, generator=generator)]
        inputs = {"features": features, "kinds": kinds, "name": "a batch", "nothing": None}
        return {"inputs": inputs, "targets": [torch.randn(size, 2, generator=generator)]}

    return DataLoader([batch(size) for size in (8, 7, 2)], batch_size=None)


def nested_values() -> list[list[list[int]]]:
    return [outcome.model.seen for outcome in check(Nested, train=nested)]


@pytest.mark.slow
def test_nested_batches_and_tuples_between_stages() -> None:
    """With integers, booleans, a tensor without gradient and ``None`` from stage to stage, two of three recomputed."""
    single, *pipelines = run(nested_values)
    assert len(single) == 6
    assert pipelines == [single, single]
