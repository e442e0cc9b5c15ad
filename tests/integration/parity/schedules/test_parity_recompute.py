"""What is recomputed, on every stage: how often, to what end (memory, in bytes), and that it changes no number."""

import platform
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Outcome, Small, batches, check, compare, fit, on_cpus
from parity_layers import MeasuresMemory
from procfs import MEBI
from torch import Tensor, nn
from torch.nn.functional import mse_loss, normalize
from torch.utils.checkpoint import checkpoint

from strategies import RPCSequentialStrategy
from strategies.pipeline import is_checkpointing, is_recomputing

MICROBATCHES = 3
SIZES, VALIDATION = (8, 7, 2), (9, 1)
"""Numbers of rows: 3, 3, 2 micro-batches, and 3, 1 in validation."""

RECOMPUTED = {"never": 0, "except_last": 2 + 2 + 1, "always": 3 + 3 + 2}
"""How many micro-batches of an epoch are recomputed."""

STAGES = {"never": [2], "except_last": [2, 3], "always": [3]}
"""The numbers of stages of the pipelines that count."""


class Notes(nn.Linear):
    """Notes where and how often it ran, and brings that home: a worker's layer has no other way to tell."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.runs = {"training": 0, "evaluation": 0, "checkpointing": 0, "recomputing": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.runs["training" if self.training else "evaluation"] += 1
        self.runs["checkpointing"] += is_checkpointing()
        self.runs["recomputing"] += is_recomputing()
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return self.runs

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.runs = state


class Checkpoints(nn.Module):
    """Recomputes its own inner layers, whatever the pipeline does."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(Notes(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Recomputes(Small):
    """Layers that note their runs on every stage of two or three, two of them in layers that recompute themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(
            Notes(WIDTH, WIDTH),
            Checkpoints(use_reentrant=False),
            Notes(WIDTH, WIDTH),
            Checkpoints(use_reentrant=True),
            nn.Tanh(),
            Notes(WIDTH, 2),
        )

    @property
    def runs(self) -> list[dict[str, int]]:
        """Of the layers 0, 2 and 5, then of those within 1 and 3."""
        layers = self.sequential_module
        return [layer.runs for layer in (layers[0], layers[2], layers[5], layers[1].inner[0], layers[3].inner[0])]


def data() -> dict[str, Any]:
    return {"train": lambda: batches(SIZES), "val": lambda: batches(VALIDATION), "num_sanity_val_steps": 0}


def counted() -> dict[str, list[list[dict[str, int]]]]:
    """By mode, then for one process and the pipelines, how often layers ran."""
    return {
        mode: [o.model.runs for o in check(Recomputes, stages=stages, strategy={"checkpoint": mode}, **data())]
        for mode, stages in STAGES.items()
    }


@pytest.fixture(scope="module")
def runs() -> dict[str, list[list[dict[str, int]]]]:
    made: dict[str, list[list[dict[str, int]]]] = run(counted, timeout_seconds=200)
    return made


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_number_of_forward_passes(runs: dict[str, list[list[dict[str, int]]]], mode: str) -> None:
    """In two epochs a layer runs once a micro-batch, and once more if that is recomputed; in evaluation just once.

    A layer within one that recomputes itself runs once more, as it does in one process. ``is_checkpointing()`` holds in
    the first run of a micro-batch that is recomputed, ``is_recomputing()`` in the second one.
    """
    single, *pipelines = runs[mode]
    microbatches, recomputed, evaluated = 2 * (3 + 3 + 2), 2 * RECOMPUTED[mode], 2 * (3 + 1)
    once = {"training": 2 * 3, "evaluation": 2 * 2, "checkpointing": 0, "recomputing": 0}
    assert single == [once] * 3 + [{**once, "training": 2 * 2 * 3}] * 2
    once = {"training": microbatches + recomputed, "evaluation": evaluated}
    once |= {"checkpointing": recomputed, "recomputing": recomputed}
    assert pipelines == [[once] * 3 + [{**once, "training": microbatches + recomputed + microbatches}] * 2] * len(
        STAGES[mode]
    )


class NotesOnce(Recomputes):
    """Notes the loss of each batch, since ``training_step`` runs once per micro-batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


def counted_under_1f1b() -> list[tuple[list[int], list[dict[str, int]]]]:
    """For pipelines of two and three stages, the balance, and how often layers ran."""
    _, *pipelines = check(NotesOnce, strategy={"schedule": "1f1b"}, **data())
    return [(outcome.trainer.strategy.balance, outcome.model.runs) for outcome in pipelines]


def test_the_last_stage_recomputes_nothing_under_1f1b() -> None:
    """There, each backward pass follows its forward pass at once."""
    for balance, found in run(counted_under_1f1b, timeout_seconds=200):
        for place, runs in zip((0, 2, 5, 1, 3), found, strict=True):
            again = 0 if place >= sum(balance[:-1]) else 2 * RECOMPUTED["except_last"]
            assert runs["checkpointing"] == runs["recomputing"] == again, (balance, place)
            inner = 2 if place in (1, 3) else 1
            assert runs["training"] == 2 * (3 + 3 + 2) * inner + again, (balance, place)


class Normalises(nn.Linear):
    """Divides by an estimate of the largest singular value, of which each forward pass improves a vector in place."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("vector", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.vector.copy_(normalize(self.weight.T @ (self.weight @ self.vector), dim=0))
        return super().forward(x) / (self.weight @ self.vector.clone()).norm()


class Smooths(nn.Linear):
    """Replaces a buffer by a mean of past outputs in each forward pass in training mode, and adds it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        return y + self.mean


class ChangesBuffers(Recomputes):
    """Layers whose outputs depend on buffers that every forward pass changes, in place and by replacement."""

    def __init__(self) -> None:
        super().__init__()
        layers = (Normalises(), nn.Tanh(), Smooths(), Smooths(), Normalises(), Notes(WIDTH, 2))
        self.sequential_module = nn.Sequential(*layers)

    def on_train_epoch_start(self) -> None:
        self.sequential_module[2].train(self.current_epoch > 0)


def with_changed_buffers(schedule: str) -> dict[str, Outcome]:
    """By mode, the outcome of a pipeline of two stages."""
    return {
        mode: fit(
            ChangesBuffers,
            RPCSequentialStrategy([3, 3], microbatches=3, checkpoint=mode, schedule=schedule),
            2,
            max_epochs=3,
            **data(),
        )
        for mode in RECOMPUTED
    }


def equal_with_changed_buffers() -> None:
    for schedule in ("gpipe", "1f1b"):
        never, *others = with_changed_buffers(schedule).values()
        for outcome in others:
            compare(outcome, never, 0.0)


def test_a_recomputation_has_the_buffers_of_the_forward_pass_and_changes_none() -> None:
    run(equal_with_changed_buffers, timeout_seconds=200)


# Memory

ROWS, MANY = 64, 16
"""Rows of a micro-batch, and micro-batches of a step."""

ACTIVATION_BYTES = MEBI
NUM_ACTIVATIONS = 16
"""What a stage keeps of a micro-batch is 16 activations of 1 MiB; of 16 micro-batches, 256 MiB."""


class Large(Small):
    def __init__(self) -> None:
        super().__init__()
        width = ACTIVATION_BYTES // 4 // ROWS
        widens, narrows = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        activations = [nn.Tanh() for _ in range(NUM_ACTIVATIONS)]  # each keeps its output
        measures = MeasuresMemory(ROWS)
        self.sequential_module = nn.Sequential(measures, widens, *activations, narrows, nn.Linear(WIDTH, 2))


def large() -> Any:
    """First a small batch: what torch imports and allocates in a first step is not to be measured."""
    return batches((MANY, ROWS * MANY, ROWS * MANY))


def peaks() -> dict[str, tuple[int, dict[str, Tensor]]]:
    """By mode, the growth of the worker's memory in bytes, and the parameters."""

    def trained(mode: str) -> Outcome:
        strategy = RPCSequentialStrategy([NUM_ACTIVATIONS + 3, 1], microbatches=MANY, checkpoint=mode)
        return fit(Large, strategy, 2, train=large, precision="32-true", max_epochs=1)

    outcomes = {mode: trained(mode) for mode in RECOMPUTED}
    return {mode: (o.model.sequential_module[0].growth, o.parameters) for mode, o in outcomes.items()}


@on_cpus
@pytest.mark.slow
def test_recomputing_saves_the_memory_of_a_worker() -> None:
    """It holds the activations of one micro-batch instead of those of all.

    Measured are the most bytes that the worker's process has ever held, over what it held before the first large
    batch. Beside the 16 MiB of activations there are gradients and values that are sent. The limit here is a quarter of
    what is needed without recomputing.
    """
    made = run(peaks)
    growth = {mode: bytes_ for mode, (bytes_, _) in made.items()}
    print({mode: f"{bytes_ / MEBI:.1f} MiB" for mode, bytes_ in growth.items()})
    all_bytes = MANY * NUM_ACTIVATIONS * ACTIVATION_BYTES
    assert all_bytes <= growth["never"] < 1.25 * all_bytes
    for mode in ("except_last", "always"):
        assert NUM_ACTIVATIONS * ACTIVATION_BYTES <= growth[mode] < all_bytes / 4
        for name, expected in made["never"][1].items():
            assert torch.equal(made[mode][1][name], expected), name


class Long(Small):
    """Stage 0 keeps the small inputs of 64 micro-batches, and computes 1 MiB at a time."""

    def __init__(self) -> None:
        super().__init__()
        width = ACTIVATION_BYTES // 4 // ROWS
        widens, narrows = nn.Linear(WIDTH, width), nn.Linear(width, 2)
        self.sequential_module = nn.Sequential(MeasuresMemory(ROWS), widens, *(nn.Tanh() for _ in range(4)), narrows)


def growth_of_long() -> int:
    strategy = RPCSequentialStrategy([4, 3], microbatches=64, checkpoint="always")
    outcome = fit(Long, strategy, 2, train=lambda: batches((64, ROWS * 64)), precision="32-true", max_epochs=1)
    return int(outcome.model.sequential_module[0].growth)


@on_cpus
@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the worker's settings are those of glibc")
def test_what_is_kept_leaves_no_holes_in_the_heap() -> None:
    """The memory of a freed activation is used for the next micro-batch, although the stage has kept an input since."""
    growth = run(growth_of_long)
    print(f"{growth / MEBI:.1f} MiB")
    assert growth < 32 * MEBI
