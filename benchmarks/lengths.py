"""Time of a training step whose rows have many lengths: padded to the longest row, and with ``microbatch_tokens``."""

import io
import logging
import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import accumulate, combinations_with_replacement, pairwise
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins import Precision
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.processes import ContestantProcesses
from benchmarks.report import Effort, Section, Table, quartiles, ratios, spread
from strategies import RPCSequentialStrategy
from strategies.lightning.partitioning import measuring
from strategies.pipeline.partition.model_costs import Example, costs_of
from strategies.pipeline.schedule.tables import SCHEDULES
from strategies.pipeline.stage.microbatch.by_length import cut_by_costs, split_by_length
from strategies.pipeline.stage.microbatch.split import split_batch
from strategies.planning.action_costs import ACTION_SECONDS, ByAction, model_costs
from strategies.planning.search import LayerCosts, ModelCosts, simulated
from strategies.planning.simulator import DriverCosts, with_driver_between
from trainer import Trainer

ROUNDS, STEPS, WARM_UP, ROWS, MICROBATCHES, TOKENS, STAGES = 3, 4, 2, 32, 8, 2048, 2
SHORTEST, LONGEST, WIDTH, BLOCKS, VOCABULARY = 16, 512, 64, 4, 256


class Shape(NamedTuple):
    """The shape of a micro-batch. Attention gets a mask only if there is padding."""

    rows: int
    length: int
    has_padding: bool

    def microbatch(self) -> dict[str, Tensor]:
        """Return such a micro-batch, with at most one column of padding in half of its rows."""
        ids = torch.randint(VOCABULARY, (self.rows, self.length))
        mask = torch.ones_like(ids)
        mask[self.rows // 2 :, -1] = not self.has_padding
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def terms(self) -> list[float]:
        """Return the terms of the linear model of the time: a constant, tokens, attention, and its mask."""
        attention = self.rows * self.length**2
        return [1.0, self.rows * self.length, attention, attention * self.has_padding]


SHAPES = (
    *(Shape(1, length, has_padding=False) for length in (32, 512)),
    *(Shape(rows, length, has_padding=True) for rows, length in ((8, 32), (4, 128), (16, 128), (8, 256), (4, 512))),
)
"""The micro-batches on which costs are measured."""
GOAL = 0.6
"""The time of a step, as a share of that with padding."""
MAX_DEVIATION = 0.1
"""The goal of the prediction."""


def batches(number: int, rows: int) -> list[dict[str, Tensor]]:
    """Batches of rows whose lengths are log-normal."""
    draw, found = torch.Generator().manual_seed(0), []
    for _ in range(number):
        drawn = torch.randn(rows, generator=draw).mul(0.8).add(4.5).exp()
        lengths = drawn.clamp(SHORTEST, LONGEST).long()
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(VOCABULARY, mask.shape, generator=draw) * mask
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


class Net(LightningModule):
    """A small Llama; notes when each of its batches begins."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
        )
        self.model, self.began = LlamaForCausalLM(config), [0.0][1:]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began.append(perf_counter())

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


CONTESTANTS: dict[str, dict[str, Any]] = {
    "gpipe, padded": {"schedule": "gpipe", "microbatches": MICROBATCHES},
    "1f1b, padded": {"schedule": "1f1b", "microbatches": MICROBATCHES, "loss_weight": "tokens"},
    "1f1b, microbatch_tokens": {"schedule": "1f1b", "microbatch_tokens": TOKENS, "loss_weight": "tokens"},
}


def seconds(options: Mapping[str, Any], data: list[dict[str, Tensor]], warm_up: int) -> list[float]:
    """Return the time of each step but the first ones."""
    strategy = RPCSequentialStrategy("even", **options)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    model = Net()
    trainer = Trainer(accelerator="cpu", devices=STAGES, strategy=strategy, max_epochs=1, **off)
    with redirect_stdout(io.StringIO()):
        trainer.fit(model, DataLoader(data, batch_size=None))
    return [after - before for before, after in pairwise(model.began[warm_up:])]


class Busy:
    """The process that keeps the second core busy, as the other stage does, until the event is cleared."""

    def __init__(self, number: int, go: Any) -> None:
        torch.set_num_threads(1)
        self.net, self.go = Net(), go

    def keep_busy(self) -> None:
        while self.go.is_set():
            self.net.model(**SHAPES[-1].microbatch()).loss.backward()

    def close(self) -> None: ...


class MeasuredCosts:
    """The costs of a micro-batch: each of its times is a linear function of :meth:`Shape.terms`, by least squares.

    Args:
        go: Set while another process is to keep the second core busy.
        busy: That process.
        shapes: The micro-batches that are measured.
    """

    def __init__(self, go: Any, busy: ContestantProcesses, shapes: Sequence[Shape]) -> None:
        go.set()
        busy.command("keep_busy")
        sleep(0.05)
        try:
            found = [self._measured(Net(), shape.microbatch()) for shape in shapes]
        finally:
            go.clear()
            busy.replies()
        times = numpy.array([self._times(each) for each in found])
        shares = 1 / times.sum(1, keepdims=True)  # a small micro-batch counts as much as a large one
        terms = numpy.array([shape.terms() for shape in shapes])
        self._factors = numpy.linalg.lstsq(terms * shares, times * shares, rcond=None)[0]

    def of(self, shape: Shape) -> ModelCosts:
        """Return the costs of a micro-batch."""
        times = (numpy.array(shape.terms()) @ self._factors).clip(min=0).tolist()
        forward, backward, transfers = (times[k * BLOCKS : (k + 1) * BLOCKS] for k in range(3))
        layers = [LayerCosts(f, b, 0.0) for f, b in zip(forward, backward, strict=True)]
        driver = DriverCosts(*times[3 * BLOCKS :])
        return ModelCosts(layers, transfers, ACTION_SECONDS, driver, checkpoint="except_last")

    def seconds(self, shapes: Sequence[Shape], schedule: str) -> float:
        """Return the predicted time of a step with these micro-batches."""
        each = [self.of(shape) for shape in shapes]
        table, balance = SCHEDULES[schedule].table(STAGES, len(shapes), 1), [BLOCKS // STAGES] * STAGES
        if schedule != "gpipe":
            return simulated(each, table, balance).total_time
        passes = simulated([replace(own, driver=DriverCosts(), at_once=True) for own in each], table, balance)
        return with_driver_between(passes, each[0].driver.of_batch(len(each))).total_time

    def cut(self, lengths: Sequence[int]) -> list[Shape]:
        """Return the micro-batches of sorted rows, cut by these costs in place of numbers of tokens."""
        number = len(lengths)
        costs = numpy.full((number, number + 1), numpy.inf)
        for first, last in combinations_with_replacement(range(number), 2):
            shape = self._cut_out(lengths, first, last + 1)
            if first == last or shape.rows * shape.length <= TOKENS:
                own = self.of(shape)
                work = sum(
                    2 * layer.forward + layer.whole + 2 * ACTION_SECONDS / BLOCKS * STAGES for layer in own.layers
                )
                costs[first, last + 1] = work + own.driver.seconds
        ends = [*accumulate(cut_by_costs(costs, STAGES))]
        return [self._cut_out(lengths, *bounds) for bounds in pairwise([0, *ends])]

    @staticmethod
    def _cut_out(lengths: Sequence[int], first: int, end: int) -> Shape:
        return Shape(end - first, lengths[end - 1], lengths[first] < lengths[end - 1])

    @staticmethod
    def _measured(net: Net, part: dict[str, Tensor]) -> ModelCosts:
        example, cpu = Example(net.model, part), torch.device("cpu")
        with measuring(net, STAGES, Precision()):
            return model_costs(costs_of(net, net.model.model.layers, example, ByAction(), cpu))

    @staticmethod
    def _times(costs: ModelCosts) -> list[float]:
        forward, backward = ([getattr(layer, name) for layer in costs.layers] for name in ("forward", "whole"))
        driver = costs.driver
        return [*forward, *backward, *costs.transfers, driver.before, driver.after, driver.before_backward]


def shapes_of(batch: dict[str, Tensor], options: Mapping[str, Any]) -> list[Shape]:
    """Return the micro-batches of a batch."""
    tokens = options.get("microbatch_tokens")
    parts = split_by_length(batch, tokens).parts if tokens else split_batch(batch, options["microbatches"])[0]
    masks = [part["attention_mask"] for part in parts]
    return [Shape(*mask.shape, has_padding=not mask.all()) for mask in masks]


def main(effort: Effort) -> Section:
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rounds, steps, warm_up = effort.rounds_or(ROUNDS), *((2, 1) if effort.tiny else (STEPS, WARM_UP))
    data = batches(steps + warm_up + 1, 8 if effort.tiny else ROWS)
    times, predicted = ({name: list[float]() for name in CONTESTANTS} for _ in range(2))
    go, by_costs = multiprocessing.get_context("spawn").Event(), []
    busy, shapes = ContestantProcesses(Busy, go), SHAPES[:4] if effort.tiny else SHAPES
    try:
        for _ in range(rounds):
            costs, timed = MeasuredCosts(go, busy, shapes), data[warm_up:-1]
            for name, options in CONTESTANTS.items():
                times[name] += seconds(options, data, warm_up)
                predicted[name] += [costs.seconds(shapes_of(batch, options), options["schedule"]) for batch in timed]
            lengths = [sorted(batch["attention_mask"].sum(1).tolist()) for batch in timed]
            by_costs += [costs.seconds(costs.cut(own), "1f1b") for own in lengths]
    finally:
        busy.end()
    used = sum(int(batch["attention_mask"].sum()) for batch in data)
    share = used / sum(batch["attention_mask"].numel() for batch in data)
    rows, off = [], 0.0
    for name, values in times.items():
        against = quartiles(ratios(values, times["1f1b, padded"]))[1]
        low, middle, high = quartiles(ratios(predicted[name], values))
        off = max(off, abs(middle - 1))
        row = [name, *spread(values), f"{against:.2f}", f"{quartiles(predicted[name])[1]:.3f}"]
        rows.append([*row, f"{middle:.3f} ({low:.3f} to {high:.3f})"])
    ours = "1f1b, microbatch_tokens"
    reached, gain = (
        quartiles(ratios(a, b))[1] for a, b in ((times[ours], times["1f1b, padded"]), (by_costs, predicted[ours]))
    )
    return Section(
        "Rows of many lengths",
        f"A Llama of {BLOCKS} blocks of width {WIDTH} on {STAGES} stages, one thread per process. {ROWS} rows of "
        f"{SHORTEST} to {LONGEST} tokens (log-normal), of which {share:.0%} are not padding. {MICROBATCHES} "
        f"micro-batches, or as many as {TOKENS} tokens each make. Medians of {steps} steps in each of {rounds} "
        f"interleaved rounds. The simulator predicts each step from costs that are measured in every round on "
        f"{len(shapes)} micro-batches, beside a busy process.",
        tables=[
            Table(["", "seconds a step", "quartiles", "of 1f1b, padded", "predicted s", "predicted / measured"], rows)
        ],
        notes=[
            f"microbatch_tokens takes {reached:.2f} of the time with padding; the goal is {GOAL}.",
            f"The median of predicted / measured is at most {off:.0%} off; the goal is {MAX_DEVIATION:.0%}.",
            f"Rows cut by the measured costs, for {STAGES} stages, in place of tokens for any number of stages: "
            f"{gain:.3f} of the predicted time.",
        ],
    )
