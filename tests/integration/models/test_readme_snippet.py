"""The first snippets of the README and of the page on models run as they stand."""

import re
from typing import Any

import pytest
import torch
from harness import run
from paths import ROOT


def snippet(page: str) -> tuple[list[int], int]:
    """Runs the first snippet of a page; returns the balance, and how often the optimizer has stepped."""
    found = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found
    names: dict[str, object] = {"__name__": "snippet"}
    torch.manual_seed(0)
    exec(compile(found[1], page, "exec"), names)
    trainer: Any = names["trainer"]
    return list(trainer.strategy.balance), trainer.global_step


@pytest.mark.slow
def test_the_readme() -> None:
    """A model of Hugging Face."""
    balance, num_steps = run(snippet, "README.md")
    assert len(balance) == 2 and sum(balance) == 8
    assert num_steps == 4


def test_the_page_on_models() -> None:
    """An ``nn.Sequential`` with an example of its input."""
    balance, num_steps = run(snippet, "docs/train_your_model.md")
    assert len(balance) == 2 and sum(balance) == 5
    assert num_steps == 12
