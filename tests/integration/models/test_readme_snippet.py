"""The README's first snippet runs as it stands: a model of Hugging Face as a pipeline."""

import re
from typing import Any

import pytest
import torch
from harness import run
from paths import ROOT


def snippet() -> tuple[list[int], int]:
    """Runs the snippet; returns the balance, and how often the optimizer has stepped."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    names: dict[str, object] = {"__name__": "snippet"}
    torch.manual_seed(0)
    exec(compile(found[1], "README.md", "exec"), names)
    trainer: Any = names["trainer"]
    return list(trainer.strategy.balance), trainer.global_step


@pytest.mark.slow
def test_the_first_snippet() -> None:
    balance, num_steps = run(snippet)
    assert len(balance) == 2 and sum(balance) == 8
    assert num_steps == 4
