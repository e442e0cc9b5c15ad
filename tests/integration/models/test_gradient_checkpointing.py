"""``model.gradient_checkpointing_enable()``: the numbers of one process, and no block is recomputed twice."""

import logging
from functools import partial
from typing import Any

import pytest
from adapter_parts import Adapted, Counts, loader
from harness import run
from parity import compare, fit, one_device
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from strategies import RPCSequentialStrategy

MICROBATCHES, BATCHES = 3, 3
NUM_RUNS = 2 * (3 + 3 + 2)
"""Micro-batches of two epochs over batches of 6, 5 and 2 rows."""

NUM_RECOMPUTED = {"never": NUM_RUNS, "except_last": 2 * (2 + 2 + 1), "always": NUM_RUNS}
"""How often a block runs once more. Under ``never`` the blocks recompute themselves; otherwise the stages do.

Under ``except_last`` the last stage of ``1f1b`` recomputes nothing.
"""


class Counted(Adapted):
    """Each block counts its forward passes."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(checkpointing={"use_reentrant": use_reentrant})
        for block in self.blocks:
            block.mlp.act_fn = nn.Sequential(Counts(), block.mlp.act_fn)

    @property
    def blocks(self) -> Any:
        return self.net.base_model.model.model.layers

    @property
    def runs(self) -> list[int]:
        return [block.mlp.act_fn[0].runs for block in self.blocks]


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def trained(cases: list[tuple[str, bool]]) -> None:
    messages, log = Messages(), logging.getLogger("pytorch_lightning.utilities.rank_zero")
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    single = fit(partial(Counted, True), one_device(), 1, train=loader)
    assert single.model.runs == [2 * 2 * BATCHES] * 4
    for mode, use_reentrant in cases:
        messages.texts.clear()
        strategy = RPCSequentialStrategy(checkpoint=mode, schedule="1f1b", microbatches=MICROBATCHES, balance=[2, 2])
        outcome = fit(partial(Counted, use_reentrant), strategy, 2, train=loader)
        compare(outcome, single)
        again = NUM_RECOMPUTED[mode]
        of_last = 0 if mode == "except_last" else again
        assert outcome.model.runs == [NUM_RUNS + again] * 2 + [NUM_RUNS + of_last] * 2, mode
        assert all(block.gradient_checkpointing for block in outcome.model.blocks)
        said = [text for text in messages.texts if "gradient checkpointing" in text]
        assert len(said) == (mode != "never") and all(f"checkpoint={mode!r}" in text for text in said)


@pytest.mark.slow
def test_blocks_that_the_stages_recompute() -> None:
    run(trained, [("except_last", False)])


@pytest.mark.slow
def test_every_mode() -> None:
    recompute_themselves = [("never", True), ("never", False)]
    if "__call__" in vars(GradientCheckpointingLayer):  # transformers before 5.23
        for case in recompute_themselves:
            with pytest.raises(AssertionError, match=r"is called within torch\.utils\.checkpoint"):
                run(trained, [case])
        recompute_themselves = []
    run(trained, [*recompute_themselves, ("always", True)])
