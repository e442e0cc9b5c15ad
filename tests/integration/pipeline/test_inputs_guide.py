"""The examples of the page on masks and other inputs run as they stand, and train as in one process."""

import re
from typing import Any

import torch
from parity import compare, fit, one_device
from paths import ROOT
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy

GUIDE = ROOT / "docs" / "inputs.md"


def example(of: str) -> dict[str, Any]:
    """What the code that contains a word defines."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(next(block for block in blocks if of in block), names)
    return names


def sentences() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    made = []
    for rows in (8, 5):
        tokens, tags = (torch.randint(5, (rows, 12), generator=generator) for _ in range(2))
        lengths = torch.randint(1, 13, (rows, 1), generator=generator)
        made.append([tokens, torch.arange(12) < lengths, tags])
    return DataLoader(made, batch_size=None)


def test_lightning_module() -> None:
    tagger = example("LightningModule")["Tagger"]
    single = fit(tagger, one_device(), 1, train=sentences)
    for schedule in ("gpipe", "1f1b"):
        compare(fit(tagger, RPCSequentialStrategy(microbatches=3, schedule=schedule), 1, train=sentences), single)


def test_pipe() -> None:
    names = example("Pipe(")
    assert names["output"].shape == (10, 6, 1)
    assert names["positions"].grad.abs().sum() > 0
    names.clear()  # or the Pipe would live as long as anything that remembers a function of the example
