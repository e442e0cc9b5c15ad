"""``PipelineMonitor``: what it refuses, and what it does where there is one stage, no logger, or no Pillow."""

import csv
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import RandomDataset
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy, Schedule
from strategies.lightning.compat import LightningModule
from trainer import PipelineMonitor, Trainer
from trainer.report.run_folder import read_run


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequential_module(batch).square().mean()

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), 0.1)


class Gan(Net):
    """Two optimizers, of which the model steps each in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(32, 32)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        for optimizer, sign in zip(optimizers, (-1.0, 1.0), strict=True):
            loss = sign * self.sequential_module(self.generator(batch)).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.generator.parameters(), 0.1), optim.SGD(self.sequential_module.parameters(), 0.1)


class Logs(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def fit(
    monitor: PipelineMonitor,
    folder: Path,
    strategy: Any,
    make: type[pl.Trainer] = Trainer,
    model: type[Net] = Net,
    **arguments: Any,
) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = make(**{"strategy": strategy, "callbacks": [monitor], **settings, **arguments})
    trainer.fit(model(), DataLoader(RandomDataset(32, 64), batch_size=8))
    return trainer


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "2"])
def test_every_n_steps_is_a_positive_number(number: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"every_n_steps must be a whole number of at least 1, got"):
        PipelineMonitor(every_n_steps=number)


def test_trace_steps_are_numbers_of_steps() -> None:
    with pytest.raises(MisconfigurationException, match="trace_steps must be a list of numbers of steps, got 3"):
        PipelineMonitor(trace_steps=cast(Any, 3))
    with pytest.raises(MisconfigurationException, match="trace_steps must be whole numbers of at least 0, got -1"):
        PipelineMonitor(trace_steps=[3, -1])


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"the strategy is SingleDeviceStrategy\. Set strategy='rpc_seq"
    ):
        fit(PipelineMonitor(), tmp_path, "single_device")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_stage_and_no_logger(tmp_path: Path, schedule: str) -> None:
    monitor = PipelineMonitor(every_n_steps=2, trace_steps=[2], dirpath=tmp_path / "own")
    fit(monitor, tmp_path, RPCSequentialStrategy(microbatches=2, schedule=schedule))
    assert {path.name for path in (tmp_path / "own" / "pipeline").iterdir()} == {
        "events.jsonl",
        "step-1.svg",
        "step-2.trace.json",
    }
    trace = json.loads((tmp_path / "own" / "pipeline" / "step-2.trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"0F0", "0F1", "0B0", "0B1", "optimizer"} <= names


def test_backward_passes_at_once_are_measured_and_not_predicted(tmp_path: Path) -> None:
    strategy = RPCSequentialStrategy(microbatches=2, schedule=Schedule(pipelined_backward=False))
    fit(PipelineMonitor(2), tmp_path, strategy, make=pl.Trainer)  # Lightning's own Trainer will do
    (picture,) = (tmp_path / "pipeline").glob("*.svg")
    assert "measured" in picture.read_text() and "predicted" not in picture.read_text()


class Fails(pl.Callback):
    """Raises an error in the third step."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise KeyError("on purpose")


def test_a_run_that_fails_leaves_nothing_for_the_next_one(tmp_path: Path) -> None:
    monitor = PipelineMonitor(every_n_steps=1)
    with pytest.raises(KeyError, match="on purpose"):
        fit(monitor, tmp_path / "1", RPCSequentialStrategy(microbatches=2), callbacks=[monitor, Fails()])
    fit(monitor, tmp_path / "2", RPCSequentialStrategy(microbatches=2), max_steps=1)
    assert [path.name for path in (tmp_path / "2" / "pipeline").glob("step-*")] == ["step-0.svg"]
    assert [event["event"] for event in events(tmp_path / "1")] == ["start", "error"]
    assert events(tmp_path / "1")[1]["error"] == "KeyError: 'on purpose'" and events(tmp_path / "1")[1]["step"] == 2
    assert [event["event"] for event in events(tmp_path / "2")] == ["start", "end"]  # no restart of the first one


def events(folder: Path, part: str = "") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "pipeline" / part / "events.jsonl").read_text().splitlines()]


def test_a_run_does_not_show_what_an_earlier_one_left(tmp_path: Path) -> None:
    """A run that begins anew puts it away; one that goes on, at a later step, keeps it."""
    strategy = partial(RPCSequentialStrategy, microbatches=2)
    fit(PipelineMonitor(1, trace_steps=[3]), tmp_path, strategy(), max_steps=4)
    (tmp_path / "pipeline" / "notes.txt").touch()  # of the user
    trainer = fit(PipelineMonitor(1), tmp_path, strategy(), max_steps=2)
    run = read_run(tmp_path)
    assert list(run.pictures) == [0, 1] and [event["event"] for event in run.events] == ["start", "end"]
    names = {"events.jsonl", "step-3.trace.json", *(f"step-{i}.svg" for i in range(4))}
    assert {path.name for path in (tmp_path / "pipeline" / "earlier-1").iterdir()} == names
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(cast(Any, trainer).model, DataLoader(RandomDataset(32, 64), batch_size=8))
    run = read_run(tmp_path)
    assert list(run.pictures) == [0, 1, 2]
    assert [event["event"] for event in run.events] == ["start", "end"] * 2
    fit(PipelineMonitor(), tmp_path, strategy(), max_steps=1)
    assert list(read_run(tmp_path).pictures) == []
    assert {path.name for path in (tmp_path / "pipeline").iterdir() if not path.name.startswith("earlier")} == {
        "events.jsonl",
        "notes.txt",
    }
    assert len(list((tmp_path / "pipeline" / "earlier-2").iterdir())) == 4


@pytest.mark.parametrize(("model", "accumulated"), [(Gan, 1), (Logs, 2)])
def test_steps_are_those_of_lightnings_own_logs(tmp_path: Path, model: type[Net], accumulated: int) -> None:
    """Whatever the number of optimizers, and with accumulated batches."""
    trainer = fit(
        PipelineMonitor(2),
        tmp_path,
        RPCSequentialStrategy(microbatches=2),
        model=model,
        max_steps=-1,
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        logger=CSVLogger(tmp_path, name="own"),
        log_every_n_steps=1,
    )
    folder, num = Path(cast(str, trainer.log_dir)), 8 // accumulated
    with (folder / "metrics.csv").open() as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    assert [int(row["step"]) for row in rows if "loss" in row] == [*range(num)]
    recorded = [*range(1, num, 2)]
    assert [int(row["step"]) for row in rows if "pipeline/step_ms" in row] == recorded
    assert list(read_run(folder).pictures) == recorded
    assert [(event["event"], event["step"]) for event in events(folder)] == [("start", 0), ("end", num)]


def test_events(tmp_path: Path) -> None:
    begin = time.time()
    saved = pl.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    strategy = RPCSequentialStrategy([1, 2], microbatches=2, schedule=Schedule("interleaved", chunks=2))
    fit(monitor := PipelineMonitor(), tmp_path, strategy, enable_checkpointing=True, callbacks=[monitor, saved])
    fit(monitor, tmp_path, RPCSequentialStrategy(microbatches=4))
    noted, later = events(tmp_path, "earlier-1"), events(tmp_path)
    assert [(event["event"], event["step"]) for event in noted] == [("start", 0), ("checkpoint", 1), ("end", 3)]
    assert [(event["event"], event["step"]) for event in later] == [("start", 0), ("end", 3)]
    first, second = noted[0], later[0]
    assert first["balance"] == [1, 2] and first["schedule"] == "interleaved" and first["microbatches"] == 2
    assert second["balance"] == [3] and second["schedule"] == "gpipe" and second["microbatches"] == 4
    assert first["processes"] == [
        {
            "name": "driver",
            "layers": [
                {"place": 0, "name": "0", "class": "Linear", "parameters": 264},
                {"place": 1, "name": "1", "class": "Tanh", "parameters": 0},
                {"place": 2, "name": "2", "class": "Linear", "parameters": 9},
            ],
        }
    ]
    times = [event["time"] for event in (*noted, *later)]
    assert times == sorted(times) and begin <= times[0] and times[-1] <= time.time()


def test_without_pillow_tensorboard_gets_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    logger = TensorBoardLogger(tmp_path, name="board")
    with pytest.warns(UserWarning, match="no pictures in TensorBoard, because Pillow is not installed") as warned:
        fit(PipelineMonitor(1), tmp_path, RPCSequentialStrategy(microbatches=2), logger=logger)
    assert sum("Pillow" in str(warning.message) for warning in warned) == 1
    assert len(list((Path(logger.log_dir) / "pipeline").glob("*.svg"))) == 3
