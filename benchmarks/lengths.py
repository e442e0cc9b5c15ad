"""Time of a training step whose rows have many lengths: padded to the longest row, and with ``microbatch_tokens``."""

import io
import logging
import statistics
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from itertools import accumulate, combinations_with_replacement, pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy
import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.report import Effort, Section, Table, quartiles, ratios, spread
from strategies import RPCSequentialStrategy
from strategies.pipeline.control.batch_recording import BatchRecording
from strategies.pipeline.schedule.tables import SCHEDULES, recomputed
from strategies.pipeline.stage.microbatch.by_length import cut_by_costs, split_by_length
from strategies.pipeline.stage.microbatch.split import split_batch
from strategies.pipeline.stage.records import Record
from strategies.planning.measured import transfers
from strategies.planning.search import LayerCosts, ModelCosts, simulated
from strategies.planning.simulator import DriverCosts, with_driver_between
from trainer import Trainer

ROUNDS, STEPS, WARM_UP, ROWS, MICROBATCHES, TOKENS, STAGES = 3, 6, 2, 32, 8, 2048, 2
SHORTEST, LONGEST, WIDTH, BLOCKS, VOCABULARY, CHECKPOINT = 16, 512, 64, 4, 256, "except_last"


class Shape(NamedTuple):
    """The shape of a micro-batch, or of a batch. Attention gets a mask only if there is padding."""

    rows: int
    length: int
    has_padding: bool

    def terms(self) -> list[float]:
        """Return the terms of the linear model of a time: a constant, tokens, attention, and its mask."""
        attention = self.rows * self.length**2
        return [1.0, self.rows * self.length, attention, attention * self.has_padding]


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


class Recorded(NamedTuple):
    """A recorded step: the micro-batches, the records of each process, and the time of the step."""

    shapes: list[Shape]
    rows: list[list[Record]]
    seconds: float


class Net(LightningModule):
    """A small Llama. Notes when each of its batches begins and ends, and records every second one after the warm-up.

    Args:
        warm_up: The number of batches of the warm-up.
    """

    def __init__(self, warm_up: int) -> None:
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
        self.model, self._warm_up = LlamaForCausalLM(config), warm_up
        self.began, self.ended = [0.0][1:], [0.0][1:]
        self.records: list[list[list[Record]]] = []
        self._recording: BatchRecording | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ended.append(perf_counter())
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
            self.records.append([own.records for own in recording.take() or ()])
        if batch_idx >= self._warm_up and (batch_idx - self._warm_up) % 2 == 0:
            self._recording = self.trainer.strategy.pipeline.start_recording(batch_idx)
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


def steps_of(
    options: Mapping[str, Any], data: list[dict[str, Tensor]], warm_up: int
) -> tuple[list[Recorded], list[float]]:
    """Train; return every second step after the warm-up with its records, and the times of the others but the last."""
    strategy = RPCSequentialStrategy("even", **options)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    model = Net(warm_up)
    trainer = Trainer(accelerator="cpu", devices=STAGES, strategy=strategy, max_epochs=1, **off)
    with redirect_stdout(io.StringIO()):
        trainer.fit(model, DataLoader(data, batch_size=None))
    taken = [after - before for before, after in zip(model.began, model.ended[1:], strict=False)]
    recorded = [
        Recorded(shapes_of(batch, options), rows, seconds)
        for batch, rows, seconds in zip(data[warm_up:-1:2], model.records, taken[warm_up::2], strict=True)
    ]
    return recorded, taken[warm_up + 1 :: 2]


class RecordedCosts:
    """The costs of a micro-batch by the records of other steps: linear functions of :meth:`Shape.terms`.

    Args:
        steps: The recorded steps.
        options: The options of the strategy.
    """

    def __init__(self, steps: Sequence[Recorded], options: Mapping[str, Any]) -> None:
        self._schedule = options["schedule"]
        self._at_once = self._schedule == "gpipe"
        found: defaultdict[tuple[str, int], list[tuple[Shape, float]]] = defaultdict(list)
        again, rest = [], []
        for step in steps:
            records = [record for row in step.rows for record in row if record.number == max(_numbers(step.rows))]
            for record in records:
                is_code = record.kind in ("b", "loss", "a")
                shape = _joined(step.shapes) if is_code and self._at_once else step.shapes[record.microbatch]
                stage = 0 if is_code else record.stage
                seconds = (record.end if record.kind == "feed" else record.computed) - record.received
                if record.kind == "B" and self._is_recomputed(step, record):
                    again.append((shape, stage, seconds))
                else:
                    found[record.kind, stage].append((shape, seconds))
                if record.kind in ("F", "B"):
                    found["send", stage].append((shape, record.end - record.computed))
            for record, seconds in transfers(step.rows):
                found["transfer", 0].append((step.shapes[record.microbatch], seconds))
            rest.append(step.seconds - max(r.end for r in records) + min(r.received for r in records))
        self._factors = {key: _fitted(values) for key, values in found.items()}
        for shape, stage, seconds in again:
            found["B", stage].append((shape, seconds - self._seconds("F", stage, shape)))
        self._factors |= {key: _fitted(values) for key, values in found.items()}
        self._rest = statistics.fmean(rest)

    def _is_recomputed(self, step: Recorded, record: Record) -> bool:
        number = len(step.shapes)
        table = SCHEDULES[self._schedule].table(STAGES, number, 1)
        return (record.microbatch, record.stage) in {m for row in table for m in recomputed(row, CHECKPOINT, number)}

    def _seconds(self, kind: str, stage: int, shape: Shape) -> float:
        if (kind, stage) not in self._factors:
            return 0.0
        return max(0.0, float(numpy.dot(shape.terms(), self._factors[kind, stage])))

    def of(self, shape: Shape) -> ModelCosts:
        """Return the costs of a micro-batch."""
        own = BLOCKS // STAGES
        layers = [
            LayerCosts(self._seconds("F", i, shape) / own, self._seconds("B", i, shape) / own, 0.0)
            for i in range(STAGES)
            for _ in range(own)
        ]
        sending = statistics.fmean(self._seconds("send", i, shape) for i in range(STAGES))
        transfer = self._seconds("transfer", 0, shape)
        driver = DriverCosts() if self._at_once else self._driver(shape)
        return ModelCosts(layers, transfer, sending, driver, at_once=self._at_once, checkpoint=CHECKPOINT)

    def _driver(self, shape: Shape) -> DriverCosts:
        before, feed, after, last = (self._seconds(kind, 0, shape) for kind in ("b", "feed", "loss", "a"))
        return DriverCosts(before + feed, after, last)

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Return the predicted time of a step with these micro-batches."""
        table, balance = SCHEDULES[self._schedule].table(STAGES, len(shapes), 1), [BLOCKS // STAGES] * STAGES
        passes = simulated([self.of(shape) for shape in shapes], table, balance)
        if self._at_once:
            passes = with_driver_between(passes, self._driver(_joined(shapes)))
        return passes.total_time + self._rest

    def cut(self, lengths: Sequence[int]) -> list[Shape]:
        """Return the micro-batches of sorted rows, cut by these costs in place of numbers of tokens."""
        number = len(lengths)
        costs = numpy.full((number, number + 1), numpy.inf)
        for first, last in combinations_with_replacement(range(number), 2):
            shape = _cut_out(lengths, first, last + 1)
            if first == last or shape.rows * shape.length <= TOKENS:
                own = self.of(shape)
                work = sum(2 * layer.forward + layer.whole for layer in own.layers) + 2 * STAGES * own.action
                costs[first, last + 1] = work + own.driver.seconds
        ends = [*accumulate(cut_by_costs(costs, STAGES))]
        return [_cut_out(lengths, *bounds) for bounds in pairwise([0, *ends])]


def _numbers(rows: Sequence[Sequence[Record]]) -> list[int]:
    """Return the numbers of the passes."""
    return [record.number for row in rows for record in row]


def _joined(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the batch of these micro-batches."""
    return Shape(
        sum(shape.rows for shape in shapes),
        max(shape.length for shape in shapes),
        any(shape.has_padding for shape in shapes),
    )


def _fitted(values: Sequence[tuple[Shape, float]]) -> Any:
    """Return the factors of the terms by least squares, for variances in proportion to times.

    The sum of the fitted times is then that of the measured ones.
    """
    times = numpy.array([seconds for _, seconds in values])
    terms = numpy.array([shape.terms() for shape, _ in values])
    if not times.any():
        return numpy.zeros(terms.shape[1])
    size = numpy.maximum(terms.max(0), 1.0)
    expected = terms[:, 1] * times.sum() / terms[:, 1].sum()
    for _ in range(3):  # a weight by the measured time itself would give outliers too little weight
        weight = numpy.maximum(expected, times.mean() / 100)[:, None] ** -0.5
        factors = numpy.linalg.lstsq(terms / size * weight, times * weight[:, 0], rcond=None)[0] / size
        expected = terms @ factors
    return factors


def _cut_out(lengths: Sequence[int], first: int, end: int) -> Shape:
    return Shape(end - first, lengths[end - 1], lengths[first] < lengths[end - 1])


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
    data = batches(warm_up + 2 * steps + 1, 8 if effort.tiny else ROWS)
    times, predicted = ({name: list[float]() for name in CONTESTANTS} for _ in range(2))
    timed = data[warm_up + 1 : -1 : 2]
    lengths = [sorted(batch["attention_mask"].sum(1).tolist()) for batch in timed]
    by_costs, cut_by_tokens = [], "1f1b, microbatch_tokens"
    for _ in range(rounds):
        for name, options in CONTESTANTS.items():
            recorded, taken = steps_of(options, data, warm_up)
            costs = RecordedCosts(recorded, options)
            times[name] += taken
            predicted[name] += [costs.seconds(shapes_of(batch, options)) for batch in timed]
            if name == cut_by_tokens:
                by_costs += [costs.seconds(costs.cut(own)) for own in lengths]
    used = sum(int(batch["attention_mask"].sum()) for batch in data)
    share = used / sum(batch["attention_mask"].numel() for batch in data)
    rows, off = [], 0.0
    for name, values in times.items():
        against = quartiles(ratios(values, times["1f1b, padded"]))[1]
        low, middle, high = quartiles(ratios(predicted[name], values))
        off = max(off, abs(middle - 1))
        row = [name, *spread(values), f"{against:.2f}", f"{quartiles(predicted[name])[1]:.3f}"]
        rows.append([*row, f"{middle:.3f} ({low:.3f} to {high:.3f})"])
    reached = quartiles(ratios(times[cut_by_tokens], times["1f1b, padded"]))[1]
    gain = quartiles(ratios(by_costs, predicted[cut_by_tokens]))[1]
    return Section(
        "Rows of many lengths",
        f"A Llama of {BLOCKS} blocks of width {WIDTH} on {STAGES} stages, one thread per process. {ROWS} rows of "
        f"{SHORTEST} to {LONGEST} tokens (log-normal), of which {share:.0%} are not padding. {MICROBATCHES} "
        f"micro-batches, or as many as {TOKENS} tokens each make. Medians of {steps} steps in each of {rounds} "
        f"interleaved rounds. The simulator predicts each step from the records of {steps} other steps of its run.",
        tables=[
            Table(["", "seconds a step", "quartiles", "of 1f1b, padded", "predicted s", "predicted / measured"], rows)
        ],
        notes=[
            f"microbatch_tokens takes {reached:.2f} of the time with padding; the goal is {GOAL}.",
            f"The median of predicted / measured is at most {off:.0%} off; the goal is {MAX_DEVIATION:.0%}.",
            f"Rows cut by the recorded costs, for {STAGES} stages, in place of tokens for any number of stages: at "
            f"best {gain:.3f} of the predicted time.",
        ],
    )
