"""The summary of a pipelined model: what one process shows, and the stage of each layer."""

import logging
import warnings
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
from harness import run
from parity import WIDTH, Small, batches, small_layers
from pytorch_lightning.callbacks import ModelSummary, RichModelSummary
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from strategies import RPCSequentialStrategy
from trainer import Trainer


class Whole(Small):
    """Layers in layers, a frozen one, one in evaluation mode, and things outside the pipelined part."""

    def __init__(self, example: Any = None) -> None:
        super().__init__()
        relu = nn.ReLU()
        self.body = nn.ModuleDict({"layers": nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), relu)), "bias": None})
        self.body["layers"].extend([nn.BatchNorm1d(WIDTH), nn.Identity(), relu, nn.Linear(WIDTH, WIDTH)])
        self.body["bias"] = nn.LayerNorm(WIDTH)
        self.head, self.criterion = nn.Linear(WIDTH, 2), nn.MSELoss()
        self.scale = nn.Parameter(torch.ones(()))
        del self.sequential_module
        self.body["layers"][4].requires_grad_(False)
        self.body["layers"][1].eval()
        self.example_input_array = example

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.head(self.body["bias"](self.body["layers"](x))) * self.scale * factor


PLACES = {
    "body": "stages 0-2",
    "body.layers": "stages 0-2",
    "body.layers.0": "stage 0",
    "body.layers.0.0": "stage 0",
    "body.layers.0.1": "stages 0, 2",
    "body.layers.1": "stage 0",
    "body.layers.2": "stage 1",
    "body.layers.4": "stage 2",
    "body.bias": "driver",
    "head": "driver",
    "criterion": "driver",
    "other params": "driver",
}


class Kept(ModelSummary):
    """Keeps what it is to show."""

    shown: ClassVar[list[tuple[Any, ...]]] = []

    @staticmethod
    def summarize(summary_data: Any, *totals: Any, total_flops: int, **kwargs: Any) -> None:
        Kept.shown.append((dict(summary_data), *totals, total_flops))
        ModelSummary.summarize(summary_data, *totals, total_flops=total_flops, **kwargs)


def summarise(strategy: Any, devices: int, make: Any = pl.Trainer, example: Any = None) -> dict[str, Any]:
    """Trains a step with the summaries as callbacks; what they showed, and the training loss."""
    torch.manual_seed(0)
    Kept.shown.clear()
    log, said = logging.getLogger("pytorch_lightning.callbacks.model_summary"), StringIO()
    log.addHandler(handler := logging.StreamHandler(said))
    callbacks = [Kept(), Kept(-1), RichModelSummary(3)]
    example = torch.zeros(7, WIDTH) if example is None else example
    model = Whole(example)
    trainer = make(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with redirect_stdout(StringIO()) as printed:
        trainer.fit(model, batches([6]))
    log.removeHandler(handler)
    assert not any("_summary" in vars(callback) for callback in callbacks)
    return {"shown": list(Kept.shown), "rich": printed.getvalue(), "plain": said.getvalue(), "losses": model.losses}


def everywhere() -> tuple[dict[str, Any], dict[str, Any]]:
    warnings.filterwarnings("error", message=".*model summary")
    strategy = RPCSequentialStrategy([2, 1, 2], microbatches=1, module="body.layers")
    return summarise(SingleDeviceStrategy("cpu"), 1), summarise(strategy, 3)


def test_the_whole_model_and_its_stages() -> None:
    single, pipeline = run(everywhere, env={"COLUMNS": "200"})
    for (columns, *totals), (expected, *expected_totals) in zip(pipeline["shown"], single["shown"], strict=True):
        assert totals == expected_totals
        assert columns.pop("Where") == [PLACES[name] for name in columns["Name"]]
        assert columns == expected
    (_, *totals), (deep, *_) = single["shown"]
    assert totals[-1] == 2 * 7 * (2 * WIDTH * WIDTH + WIDTH * 2)  # FLOPs, so it is known that the example was run
    assert "eval" in deep["Mode"] and "[7, 6]" in deep["In sizes"]
    assert pipeline["losses"] == pytest.approx(single["losses"], rel=1e-6)

    table = pipeline["plain"].splitlines()
    assert any(line.rstrip().endswith("| Where") for line in table)
    for lines in (table, pipeline["rich"].splitlines()):
        (row,) = [line for line in lines if "body.layers.4 " in line]
        assert "stage 2" in row
    assert "stage" not in single["rich"] + single["plain"]


# One stage starts no process


@pytest.mark.parametrize(
    "example", [(torch.zeros(7, WIDTH), 2.0), {"x": torch.zeros(7, WIDTH), "factor": 2.0}], ids=["tuple", "dict"]
)
def test_examples_of_several_arguments(example: Any) -> None:
    strategy = RPCSequentialStrategy(module="body.layers")
    columns = summarise(strategy, 1, Trainer, example)["shown"][0][0]
    assert columns["Out sizes"][columns["Name"].index("head")] == "[7, 2]"
    assert columns["Where"][0] == "stage 0"


class NeedsValues(nn.Module):
    """A layer that needs values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() < 1e9 else -x


def test_a_model_that_needs_values() -> None:
    class Model(Small):
        def __init__(self) -> None:
            super().__init__()
            self.sequential_module = nn.Sequential(*small_layers(), NeedsValues())
            self.example_input_array = torch.zeros(7, WIDTH)

    model = Model().float()
    Kept.shown.clear()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=RPCSequentialStrategy(microbatches=1),
        max_steps=2,
        callbacks=[Kept(2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with pytest.warns(UserWarning, match=r"lacks sizes and FLOPs.* Model.forward on the meta device.* RuntimeError: "):
        trainer.fit(model, batches([6, 6]))
    ((columns, *totals),) = Kept.shown
    assert totals[-1] == 0 and set(columns["FLOPs"]) == {"0  "}
    assert columns["Out sizes"][-1] == "?" and columns["Where"][-1] == "stage 0"
    assert len(model.losses) == 2 and not any(p.is_meta for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_summary_of_the_users_own_is_left_alone() -> None:
    class Own(Kept):
        def _summary(self, trainer: Any, pl_module: Any) -> Any:
            return pl.utilities.model_summary.summarize(pl_module, max_depth=1)

    Kept.shown.clear()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=RPCSequentialStrategy(),
        fast_dev_run=True,
        callbacks=[Own()],
        enable_progress_bar=False,
    )
    trainer.fit(Small(), batches([6]))
    ((columns, *_),) = Kept.shown
    assert "Where" not in columns
