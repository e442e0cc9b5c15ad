"""What ``training_step`` logs, returns and gets under ``schedule="1f1b"``: as if it had been run once for the batch."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, accelerator, batches, check, fit
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, MeanMetric, MeanSquaredError

from strategies import RPCSequentialStrategy

STRATEGY = {"schedule": "1f1b", "microbatches": 3}
UNEVEN = (8, 5, 2, 7)
"""Numbers of rows; 3, 3, 2 and 3 micro-batches of different sizes."""


def data() -> DataLoader:
    return batches(UNEVEN)


class Logs(Small):
    """Logs in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.rows = Accuracy(task="binary"), MeanSquaredError().set_dtype(torch.float64)
        self.updated = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        size, loss = len(y), mse_loss(y, batch[1])
        self.log("loss", loss, True, on_step=True, on_epoch=True)  # the third is prog_bar
        self.log("default", loss)
        self.log_dict({"epoch": loss * 2, "number": 3, "float": loss.item()}, on_epoch=True)
        self.log("explicit", loss, on_epoch=True, on_step=True, batch_size=size)
        for kind in ("sum", "max", "min"):
            value = getattr(y.detach(), kind)()
            self.log(kind, value, on_step=True, on_epoch=True, reduce_fx=kind)
            self.log(kind.upper(), value, on_step=True, on_epoch=True, reduce_fx=kind.upper())
            self.log(f"torch.{kind}", value, on_step=True, on_epoch=True, reduce_fx=getattr(torch, kind))
        self.accuracy(y[:, 0], batch[1][:, 0] > 0)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.rows.update(y[:, 0], batch[1][:, 0])
        self.log("rows", self.rows, on_epoch=True, on_step=False)
        self.updated.update(y.detach().mean(1))
        return {"loss": loss, "mean": y.mean(), "y": y, "number": 2.0, "rows": [size], "text": "kept", "index": y[0, 0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert list(outputs) == ["loss", "mean", "y", "number", "rows", "text", "index"]
        self.losses += [outputs["loss"].item(), outputs["mean"].item(), *outputs["y"].flatten().tolist()]
        assert outputs["number"] == pytest.approx(2.0) and outputs["text"] == "kept"
        num_rows = len(batch[0])
        last = num_rows // min(num_rows, 3) if isinstance(self.trainer.strategy, RPCSequentialStrategy) else num_rows
        assert outputs["rows"] == [last]  # of the last micro-batch
        step = {name: value for name, value in self.trainer.callback_metrics.items() if not name.endswith("_epoch")}
        self.losses += [value.item() for value in step.values()]
        shown = self.trainer.progress_bar_callback.get_metrics(self.trainer, self) if batch_idx else {"loss_step": 0}
        self.losses.append(float(shown["loss_step"]))

    def on_train_epoch_end(self) -> None:
        self.losses.append(self.updated.compute().item())
        assert self.updated.weight == sum(UNEVEN) * (self.current_epoch + 1)  # every sample once


def logged() -> list[dict[str, float]]:
    arguments = {"enable_progress_bar": True, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    tolerance = 1e-9 if accelerator() == "cpu" else 1e-6  # torchmetrics adds in float32, on a GPU in another order
    settings: dict[str, Any] = {"strategy": STRATEGY, "train": data, "val": data, "tolerance": tolerance}
    return [outcome.metrics for outcome in check(Logs, **settings, **arguments)]


def test_everything_logged_and_returned() -> None:
    single, *_ = run(logged, timeout_seconds=150)
    steps_and_epochs = {f"{name}_{when}" for name in ("loss", "explicit", "accuracy") for when in ("step", "epoch")}
    assert steps_and_epochs | {"default", "epoch", "number", "float", "rows", "val_loss"} <= single.keys()
    assert single["loss_step"] != single["loss_epoch"] and 0 < single["accuracy_epoch"] < 1


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    names: list[str]
    kind: str = "all"


class Structured(Small):
    """Gets dataclasses, with words; its micro-batches are told from what it notes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, ...]] = []

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        assert isinstance(batch, Sample) and batch.kind == "all" and len(batch.names) == len(batch.x)
        self.seen.append(tuple(batch.names))
        loss = mse_loss(self(batch.x), batch.y)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.x))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


class Decides(Structured):
    """Splits its batches itself: the first row alone."""

    def split_batch(self, batch: Sample, num_microbatches: int) -> Any:
        self.asked = num_microbatches
        for rows in (slice(0, 1), slice(1, None)):
            yield Sample(batch.x[rows], batch.y[rows], batch.names[rows])


def structured() -> DataLoader:
    made = [Sample(x, y, [f"row {k}" for k in range(len(x))]) for x, y in batches((4, 3))]
    return DataLoader(made, batch_size=None)


def splits() -> list[Any]:
    plain = check(Structured, strategy=STRATEGY, train=structured, stages=[2], max_epochs=1)
    decided = check(Decides, strategy=STRATEGY, train=structured, stages=[2], max_epochs=1)
    assert decided[1].model.asked == 3 and not hasattr(decided[0].model, "asked")
    return [outcome.model.seen for outcome in (*plain, decided[1])]


def test_batches_of_any_structure_and_the_model_s_own_way_to_split_them() -> None:
    single, plain, decided = run(splits)
    rows = [tuple(f"row {k}" for k in range(n)) for n in (4, 3)]
    assert single == rows
    assert plain == [("row 0", "row 1"), ("row 2",), ("row 3",), ("row 0",), ("row 1",), ("row 2",)]
    assert decided == [part for row in rows for part in (row[:1], row[1:])]


class Mixed(Small):
    """A dict for one micro-batch, ``None`` for another, a constant loss for a third."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse_loss(self(batch[0]), batch[1])
        kind = int(batch[1][0, 0])
        self.log(f"kind {kind}", float(kind), on_step=True, on_epoch=False)
        return (None, {"loss": loss, "only": 1.0}, {"loss": torch.tensor(5.0), "y": batch[0]})[kind]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert list(outputs) == ["loss", "only", "y"] and outputs["only"] == 1.0 and len(outputs["y"]) == 2
        self.losses.append(outputs["loss"].item())


def mixed() -> tuple[list[float], dict[str, float]]:
    def train() -> Any:
        made = [[torch.ones(6, WIDTH), torch.tensor([[k, k] for k in kinds])] for kinds in ((1, 1, 2, 2, 0, 0),) * 2]
        return DataLoader([[x, y.double()] for x, y in made], batch_size=None)

    outcome = fit(Mixed, RPCSequentialStrategy([6], **STRATEGY), 1, train=train, max_epochs=1)
    return outcome.losses, outcome.metrics


def test_micro_batches_that_return_different_things() -> None:
    losses, metrics = run(mixed)
    assert metrics == {"kind 0": 0.0, "kind 1": 1.0, "kind 2": 2.0}
    assert all(loss > 5 / 3 for loss in losses) and losses[1] < losses[0]  # a third of it is constant


class Wrong(Small):
    """Goes wrong in one of several ways."""

    way = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        if self.way == "twice":
            return (self(x) + self(x)).mean()
        if self.way == "never":
            return self.sequential_module[5].weight.mean()
        if self.way == "skips":
            return None
        if self.way == "no_grad":
            with torch.no_grad():
                return self(x).mean()
        if self.way == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self(x).mean()
        y = self(x)
        loss = y.mean()
        return {"number": 3, "no loss": {"y": y}, "rows": y.mean(1), "detached": loss.detach()}.get(self.way, loss)


class TakesTheBatch(Wrong):
    def training_step(self, dataloader_iter: Any) -> Any:
        (x, *_), _, _ = next(dataloader_iter)
        return self(x).mean()


def ways() -> dict[str, str]:
    def wrong(way: str, train: Any = data, **arguments: Any) -> str:
        class Model(TakesTheBatch if way == "iterator" else Wrong):
            def __init__(self) -> None:
                super().__init__()
                self.way = way
                self.automatic_optimization = way != "manual from the start"
                if way == "splits into nothing":
                    self.split_batch = lambda batch, num_microbatches: []

        with pytest.raises(Exception) as caught:  # which one is what is looked at
            fit(Model, RPCSequentialStrategy([6], **STRATEGY), 1, train=train, **arguments)
        return f"{type(caught.value).__name__}: {caught.value}"

    kinds = ("twice", "never", "skips", "no_grad", "autocast", "manual from the start", "iterator", "number", "no loss")
    found = {way: wrong(way) for way in (*kinds, "rows", "detached", "splits into nothing")}
    ragged = DataLoader([{"x": torch.zeros(4, WIDTH), "y": torch.zeros(3)}], batch_size=None)
    return {**found, "ragged": wrong("", lambda: ragged)}


MESSAGES = {
    "twice": "RuntimeError: training_step called the pipelined module twice; .*schedule='gpipe'",
    "never": "RuntimeError: training_step did not call the pipelined module .*schedule='gpipe'",
    "skips": "RuntimeError: training_step did not call the pipelined module .*schedule='gpipe'",
    "no_grad": "RuntimeError: training_step called the pipelined module under no_grad, .*schedule='gpipe'",
    "autocast": "RuntimeError: training_step called the pipelined module under autocast .*schedule='gpipe'",
    "manual from the start": "MisconfigurationException: .*manual optimization would step .* Use schedule='gpipe'",
    "iterator": r"MisconfigurationException: .*training_step\(dataloader_iter\) takes the batch .* schedule='gpipe'",
    "number": "MisconfigurationException: .*`training_step` must return a Tensor, a dict, or None",
    "no loss": "MisconfigurationException: .*the 'loss' key needs to be present",
    "rows": r"RuntimeError: training_step returned a loss of shape \[3\]; it must be a single number",
    "detached": "RuntimeError: the loss that training_step returns does not depend on any trainable parameter",
    "splits into nothing": "MisconfigurationException: Model.split_batch returned no micro-batch",
    "ragged": r"MisconfigurationException: .*batch\['x'\] has 4, batch\['y'\] has 3",
}


def test_what_cannot_be_done_is_said() -> None:
    found = run(ways)
    assert found.keys() == MESSAGES.keys()
    for way, message in found.items():
        assert re.match(MESSAGES[way], message, re.DOTALL), (way, message)
