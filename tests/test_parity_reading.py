"""What hooks and loggers find out about a model whose layers live elsewhere: the truth, or an error."""

import gc
import os
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, batches
from parity_trainers import Make, alike, everywhere
from pytorch_lightning import Callback
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import grad_norm
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

WORKER_PARAMETERS = ("0.weight", "0.bias", "2.weight", "2.bias")
"""Of the first of two stages."""


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda p: p.norm().item(),
    "float": lambda p: float(p.detach().mean()),
    "bool": lambda p: bool(p.isnan().any()),
    "numpy": lambda p: p.detach().numpy().sum().item(),
    "list": lambda p: p.tolist(),
    "copy": lambda p: p.detach().cpu().clone(),
    "data": lambda p: p.data.norm(),
}


class Reader(Callback):
    """Reads parameters in every way and at every time."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.public: list[Any] = []

    def _read(self, moment: str, model: Any) -> None:
        for name, parameter in model.named_parameters():
            for way, read in READS.items():
                key = f"{moment} {name} {way}"
                try:
                    self.values[key] = read(parameter)
                except (RuntimeError, TypeError) as error:
                    self.errors[key] = str(error)

    def _look(self, trainer: Any, model: Any, *args: Any) -> None:
        self.public.append({name: value.norm() for name, value in model.state_dict().items()})
        self.public.append(
            [(n, list(p.shape), p.dtype, p.requires_grad, p.numel()) for n, p in model.named_parameters()]
        )
        self.public.append(model.dtype)

    def setup(self, trainer: Any, model: Any, stage: str) -> None:
        self._read("setup", model)

    def on_train_start(self, trainer: Any, model: Any) -> None:
        self._read("start", model)
        self._look(trainer, model)

    def on_fit_end(self, trainer: Any, model: Any) -> None:
        self._read("end", model)
        self._look(trainer, model)

    on_fit_start = on_train_batch_end = on_train_epoch_end = on_train_end = _look


def read_by_hooks(make: Make) -> dict[str, Any]:
    reader = Reader()
    make(max_epochs=2, callbacks=[reader]).fit(Small(), batches((8, 7, 3)), batches((5, 6), seed=1))
    return {"values": reader.values, "errors": reader.errors, "public": reader.public}


def all_read() -> list[dict[str, Any]]:
    return everywhere(read_by_hooks, stages=[2])


# Graphs, gradients and histograms


class Keeping(Small):
    """Keeps its last loss with its graph, as metrics of ``torchmetrics`` do; shows gradients and weights."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.kept = super().training_step(batch, batch_idx)
        return self.kept

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = outcome(lambda: grad_norm(self, 2))
        add = self.logger.experiment.add_histogram
        named = [(name, partial(add, name, p, self.global_step)) for name, p in self.named_parameters()]
        self.errors = {name: error for name, draw in named if (error := outcome(draw)) is not None}


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (RuntimeError, MisconfigurationException) as error:
        return f"{type(error).__name__}: {error}"


def shown(make: Make) -> dict[str, Any]:
    boards = [TensorBoardLogger(f"{len(os.listdir())}", "board", log_graph=graph) for graph in (False, True)]
    model = Keeping()
    make(max_steps=1, logger=boards[0]).fit(model, batches())
    board = EventAccumulator(boards[0].log_dir, size_guidance={"histograms": 0})
    board.Reload()
    sums = {tag: board.Histograms(tag)[0].histogram_value.sum for tag in board.Tags()["histograms"]}
    reference, norms, errors = weakref.ref(model), model.norms, model.errors
    del model
    gc.collect()
    model = Small()
    model.example_input_array = torch.zeros(4, WIDTH, dtype=torch.float64)
    graph = outcome(lambda: make(max_steps=1, logger=boards[1]).fit(model, batches()))
    return {"collected": reference() is None, "norms": norms, "histograms": sums | errors, "graph": graph}


def all_shown() -> list[dict[str, Any]]:
    return everywhere(shown, stages=[2])


def everything() -> list[Any]:
    return [all_read(), all_shown()]


@pytest.fixture(scope="module")
def found() -> Any:
    return run(everything, allow=("port",), timeout_seconds=170)


@pytest.mark.slow
def test_hooks_that_read_parameters(found: Any) -> None:
    """Names, shapes and ``state_dict`` are whole at any time; a value that is elsewhere is an error, not a number."""
    single, pipeline = found[0]
    alike(pipeline["public"], single["public"])
    assert not single["errors"]
    on_worker = {f"start sequential_module.{name} {way}" for name in WORKER_PARAMETERS for way in READS}
    assert set(pipeline["errors"]) == on_worker
    assert all(re.search("meta|another stage", message) for message in pipeline["errors"].values())
    expected = {key: value for key, value in single["values"].items() if key not in on_worker}
    alike(pipeline["values"], expected)


@pytest.mark.slow
def test_grad_norm_leaves_no_stage_out_silently(found: Any) -> None:
    single, pipeline = found[1]
    assert single["norms"]["grad_2.0_norm_total"] > 0
    assert re.search(r"gradient of parameter 0.weight \[6, 6\] is on another stage", pipeline["norms"])


@pytest.mark.slow
def test_a_model_that_keeps_a_graph_is_collected(found: Any) -> None:
    single, pipeline = found[1]
    assert single["collected"] and pipeline["collected"]


@pytest.mark.slow
def test_histograms_show_no_random_numbers(found: Any) -> None:
    """They are what ``SummaryWriter`` would draw for a tensor without values."""
    single, pipeline = (each["histograms"] for each in found[1])
    assert len(single) == 8
    for name, value in single.items():
        if (short := name.removeprefix("sequential_module.")) in WORKER_PARAMETERS:
            assert f"`SummaryWriter` on parameter {short} " in pipeline[name]
        else:
            assert pipeline[name] == pytest.approx(value, rel=1e-6)


@pytest.mark.slow
def test_the_graph_of_the_model_in_tensorboard(found: Any) -> None:
    single, pipeline = found[1]
    assert single["graph"] is None
    assert pipeline["graph"] is None or pipeline["graph"].startswith("MisconfigurationException: ")
