"""Time of a training step whose rows have many lengths: padded to the longest row, and with ``microbatch_tokens``."""

import io
import logging
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.report import Effort, Section, Table, quartiles, ratios, spread
from strategies import RPCSequentialStrategy
from strategies.pipeline.stage.microbatch.by_length import split_by_length
from strategies.pipeline.stage.microbatch.split import split_batch
from trainer import Trainer

ROUNDS, STEPS, WARM_UP, ROWS, MICROBATCHES, TOKENS, STAGES = 3, 4, 2, 32, 8, 2048, 2
SHORTEST, LONGEST, WIDTH, BLOCKS, VOCABULARY = 16, 512, 64, 4, 256
GOAL = 0.6
"""The time of a step, as a share of that with padding."""


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


def seconds(options: Mapping[str, Any], data: list[dict[str, Tensor]], warm_up: int) -> float:
    """Return the median time of a step."""
    strategy = RPCSequentialStrategy("even", **options)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    model = Net()
    trainer = Trainer(accelerator="cpu", devices=STAGES, strategy=strategy, max_epochs=1, **off)
    with redirect_stdout(io.StringIO()):
        trainer.fit(model, DataLoader(data, batch_size=None))
    return quartiles([after - before for before, after in pairwise(model.began[warm_up:])])[1]


def expected(parts: list[Any]) -> float:
    """Return the time that is expected of a batch, in tokens; see :mod:`.by_length`."""
    tokens = [part["input_ids"].numel() for part in parts]
    return sum(tokens) + (STAGES - 1) * max(tokens)


def main(effort: Effort) -> Section:
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rounds, steps, warm_up = effort.rounds_or(ROUNDS), *((2, 1) if effort.tiny else (STEPS, WARM_UP))
    data = batches(steps + warm_up + 1, 8 if effort.tiny else ROWS)
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        for name, options in CONTESTANTS.items():
            times[name].append(seconds(options, data, warm_up))
    padded = sum(expected(split_batch(batch, MICROBATCHES)[0]) for batch in data[warm_up:-1])
    shorter = sum(expected(split_by_length(batch, TOKENS).parts) for batch in data[warm_up:-1])
    used = sum(int(batch["attention_mask"].sum()) for batch in data)
    share = used / sum(batch["attention_mask"].numel() for batch in data)
    rows = []
    for name, values in times.items():
        against = quartiles(ratios(values, times["1f1b, padded"]))[1]
        rows.append([name, *spread(values), f"{against:.2f}"])
    reached = quartiles(ratios(times["1f1b, microbatch_tokens"], times["1f1b, padded"]))[1]
    return Section(
        "Rows of many lengths",
        f"A Llama of {BLOCKS} blocks of width {WIDTH} on {STAGES} stages, one thread per process. {ROWS} rows of "
        f"{SHORTEST} to {LONGEST} tokens (log-normal), of which {share:.0%} are not padding. {MICROBATCHES} "
        f"micro-batches, or as many as {TOKENS} tokens each make. Medians of {steps} steps, in each of {rounds} "
        "interleaved rounds.",
        tables=[Table(["", "seconds a step", "quartiles", "of 1f1b, padded"], rows)],
        notes=[
            f"microbatch_tokens takes {reached:.2f} of the time with padding; the goal is {GOAL}. The cut expects "
            f"{shorter / padded:.2f}, by tokens alone."
        ],
    )
