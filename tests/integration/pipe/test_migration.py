"""The code that the migration guide shows runs as it stands."""

import re

import torch
from harness import run
from paths import ROOT
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

GUIDE = ROOT / "docs" / "migration.md"


def code_block(first_words):
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    return next(block for block in blocks if block.startswith(first_words))


def run_script(code):
    """The guide's script with a loader, and its model kept under a name."""
    torch.manual_seed(0)
    inputs = torch.rand(22, 32)
    targets = inputs.sum(1, keepdim=True)
    names = {"__name__": "__main__", "loader": DataLoader(TensorDataset(inputs, targets), batch_size=8)}
    exec(code.replace("trainer.fit(Regression()", "trainer.fit(model := Regression()"), names)
    trainer, layers = names["trainer"], names["model"].sequential_module
    return {
        "steps": trainer.global_step,
        "balance": names["strategy"].balance,
        "states": len(trainer.optimizers[0].state),
        "loss": F.mse_loss(layers(inputs), targets).item(),
        "loss of nothing": F.mse_loss(torch.zeros_like(targets), targets).item(),
    }


def test_script():
    result = run(run_script, code_block("# Today"))
    assert result["steps"] == 9  # three epochs of three batches, the last of 6 rows in 4 micro-batches
    assert result["balance"] == [2, 1]
    assert result["states"] == 4  # weights and biases of both stages
    assert result["loss"] < result["loss of nothing"]


def test_balance_by_hand():
    class Model:
        sequential_module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    imports, *calls = code_block("from strategies.pipeline").strip().splitlines()
    names = {"model": Model, "sample": torch.rand(8, 4)}
    exec(imports, names)
    by_size, by_time = (eval(call, names) for call in calls if call)
    assert by_size == [1, 2] or by_size == [2, 1]
    assert sum(by_time) == 3 and min(by_time) >= 1
