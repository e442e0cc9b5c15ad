"""Tensors that blocks of an ``nn.ModuleList`` leave in attributes follow the rule for layers: right, or refused."""

import re
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, check, fit
from parity_parts import Leaves
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from strategies import RPCSequentialStrategy

SETTINGS: dict[str, Any] = {"module": "blocks", "balance": [2, 2], "microbatches": 2}


class Looped(Small):
    """Four blocks that leave tensors in their attributes, called by the model's own loop."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        self.blocks, self.head = nn.ModuleList(Leaves() for _ in range(4)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Auxiliary(Looped):
    """The loss has a term of the last block, which leads back through all blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:  # ``average`` depends on the number of calls, which is that of micro-batches
            block.constant = torch.zeros(2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]), batch[1]) + 0.1 * self.blocks[-1].aux
        self.log("loss", loss)
        return loss


class Reads(Looped):
    """``training_step`` reads an attribute of every block and keeps what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        for block in self.blocks:
            try:
                self.seen.append("read" if bool(torch.zeros(()) + block.aux >= 0) else "not a mean of squares")
            except RuntimeError as error:
                self.seen.append(str(error))
        return loss


def read_under(**options: Any) -> tuple[list[str], list[Any]]:
    """What came of reading in one step, and what the attributes of the first block are after the run."""
    model = fit(Reads, RPCSequentialStrategy(**SETTINGS, **options), 2, max_steps=1).model
    block = model.blocks[0]
    return model.seen[-4:], [block.aux, block.losses, block.stats, hasattr(block, "made")]


def everything() -> dict[str, tuple[list[str], list[Any]]]:
    check(Auxiliary, stages=(2,), strategy={**SETTINGS, "schedule": "1f1b", "checkpoint": "never"})
    return {
        schedule: read_under(schedule=schedule, checkpoint=mode)
        for schedule, mode in {"1f1b": "never", "gpipe": "except_last"}.items()
    }


@pytest.mark.slow
def test_side_outputs_of_blocks() -> None:
    found = run(everything)
    for schedule, (seen, after) in found.items():
        assert after == [None, [], {"mean": None}, False]
        for number, message in enumerate(seen):
            where = f"layer {number}, a Leaves, leaves tensors in its attribute 'aux' on stage {number // 2}"
            if schedule == "1f1b" and number >= 2:
                assert message == "read"
            else:
                assert re.search(
                    where + (".*once for each micro-batch" if number >= 2 else ".*in another process"), message
                )
