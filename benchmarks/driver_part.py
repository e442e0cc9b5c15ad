"""A GPT with a large vocabulary on two stages: the step under the balance that Relay finds, and every other balance.

The embedding, the head and the loss run on the driver, which also runs the last stage. Each run is a short ``fit`` with
separate processes. The balances alternate, in a different order each round, because the speed of a machine varies.
"""

import gc
import logging
import random
import warnings
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.models import encoder_layers
from benchmarks.report import Effort, Section, Table
from strategies import RPCSequentialStrategy
from trainer import Trainer

ROUNDS, STEPS, MICROBATCHES = 3, 3, 8


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a batch of ``[rows, length]`` tokens."""

    blocks: int = 8
    vocabulary: int = 32_000
    width: int = 512
    length: int = 64
    rows: int = MICROBATCHES


class Gpt(LightningModule):
    """Embedding, an ``nn.ModuleList`` of blocks, norm, head and loss. It keeps the time at which each step begins."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(encoder_layers(shape.blocks, shape.width))
        self.embed, self.norm = nn.Embedding(shape.vocabulary, shape.width), nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.example_input_array = torch.zeros(shape.rows, shape.length + 1, dtype=torch.long)
        self.began: list[float] = []

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(hidden))
        return {"loss": cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began.append(perf_counter())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run(shape: Shape, steps: int, **settings: Any) -> tuple[list[int], list[float]]:
    """Train a few steps.

    Returns:
        The balance in use, and the seconds of each step except the first.
    """
    torch.manual_seed(0)
    model = Gpt(shape)
    strategy = RPCSequentialStrategy(module="blocks", microbatches=MICROBATCHES, **settings)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps + 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(shape.vocabulary, ((steps + 2) * shape.rows, shape.length + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(tokens, batch_size=shape.rows))
    found = strategy.balance
    assert isinstance(found, list)
    began = model.began
    del model, trainer, strategy  # in reference cycles, with all weights and gradients
    gc.collect()
    return found, [after - before for before, after in pairwise(began[1:])]


def contest(shape: Shape, schedule: str, rounds: int, steps: int) -> Table:
    """Measure every balance under one schedule, and mark the balances that Relay finds."""
    found: dict[str, list[int]] = {}
    for way in ("by_time", "by_size"):
        found[way], _ = run(shape, 1, schedule=schedule, balance=way)
    balances = [[first, shape.blocks - first] for first in range(1, shape.blocks)]
    seconds: dict[str, list[float]] = {str(balance): [] for balance in balances}
    generator = random.Random(0)
    for _ in range(rounds):
        for balance in generator.sample(balances, len(balances)):
            _, times = run(shape, steps, schedule=schedule, balance=balance)
            seconds[str(balance)].append(min(times))
    best = min(median(times) for times in seconds.values())
    rows = []
    for balance in balances:
        times = seconds[str(balance)]
        marks = ", ".join(mode for mode, own in found.items() if own == balance)
        rows.append([f"{balance}", f"{median(times):.2f}", f"{min(times):.2f} to {max(times):.2f}"])
        rows[-1] += [f"{median(times) / best:.3f}", marks]
    columns = ["balance", "s a step", "range over rounds", "of the best", "found"]
    return Table(columns, rows, f"{schedule}: median over {rounds} rounds of the fastest of {steps} steps")


def main(effort: Effort) -> Section:
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    shape = Shape(blocks=2, vocabulary=100, width=64, length=8) if effort.tiny else Shape()
    rounds, steps = effort.rounds_or(ROUNDS), 1 if effort.tiny else STEPS
    schedules = ("1f1b",) if effort.tiny else ("1f1b", "gpipe")
    return Section(
        "Balance with a large vocabulary",
        f"A GPT of {shape.blocks} blocks of width {shape.width} in an nn.ModuleList with a vocabulary of "
        f"{shape.vocabulary:,}, on 2 processes of one thread each; {MICROBATCHES} micro-batches of "
        f"{shape.rows // MICROBATCHES} x {shape.length} tokens, recomputation but for the last, SGD. Embedding, head "
        'and loss run on the driver, with the last stage. "found" marks what by_time and by_size find; '
        "by size, bytes are balanced and not the time of a step.",
        tables=[contest(shape, schedule, rounds, steps) for schedule in schedules],
        notes=["Another load on the machine lengthens single runs, so the range over rounds belongs to each figure."],
    )
