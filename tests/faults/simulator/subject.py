"""The subject: a small run, which faults disturb, and which then continues from its last checkpoint."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import DDPStrategy, Recovery, RPCSequentialStrategy, ZeROStrategy
from strategies.checkpoint.save_and_load import is_sharded, load_sharded, sharded_tensors
from tests.faults.simulator.cases import ANY_MOMENT, NUM_BATCHES, SANITY, SAVE_EVERY, TWO_HOSTS, Case, Fault, Shape
from tests.faults.simulator.launched import train_in_ranks
from tests.faults.simulator.oracle import Error, Outcome, Results
from tests.faults.simulator.traps import WIDTH, Position, Trapped, TrappedAdam, Traps, disk_is_free_again
from trainer import Trainer

NUM_LAYERS = 8
ROWS = 6
"""Rows of a batch."""

_STRATEGIES: dict[str, Any] = {"ddp": DDPStrategy, "zero": ZeROStrategy}


class Net(pl.LightningModule):
    """A model whose layers, optimizer and hooks are traps."""

    def __init__(self, traps: Traps) -> None:
        super().__init__()
        self.traps = traps
        self.sequential_module = nn.Sequential(*(Trapped(traps) for _ in range(NUM_LAYERS)))
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[tuple[int, float]] = []

    def _loss(self, batch: list[Tensor]) -> Tensor:
        return (self.head(self.sequential_module(batch[0])) - batch[1]).square().mean()

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"sequential_module.*.linear": "colwise_gather_output"}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        makes_nan = self.traps.spring("forward")
        loss = self._loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False, batch_size=ROWS, sync_dist=True)
        return loss * torch.nan if makes_nan else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append((batch_idx, outputs["loss"].item()))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.traps.spring(SANITY if self.trainer.sanity_checking else "validation")
        self.log("val_loss", self._loss(batch), batch_size=ROWS, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.traps.spring(self.traps.position.get()[1])

    def configure_optimizers(self) -> Any:
        self.traps.spring("start")
        return TrappedAdam(self.parameters(), self.traps)


class TellsPosition(Callback):
    """Tells all processes where the driver is; it runs before the callback that saves."""

    def __init__(self, traps: Traps) -> None:
        self.traps = traps

    def _tell(self, batch: int, phase: str) -> None:
        self.traps.position.set(batch, phase)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._tell(batch_idx, "train")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._tell(batch_idx, "checkpoint")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._tell(self.traps.position.get()[0], "sanity" if trainer.sanity_checking else "validate")

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._tell(-1, "begin")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._tell(NUM_BATCHES, "teardown")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.traps.position.get()[1] == "teardown":
            self.traps.spring("teardown")


class Hears(Callback):
    """Writes down every call of a hook, with the batch."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def _writing_down(name: str) -> Any:
    def hook(self: Hears, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"{name} {trainer.fit_loop.epoch_loop.batch_idx}")

    return hook


_AROUND = ("on_save_checkpoint", "on_load_checkpoint", "on_exception", "on_fit_start", "on_fit_end")
for _name in [name for name in vars(Callback) if name.startswith("on_") and name not in _AROUND] + ["setup"]:
    setattr(Hears, _name, _writing_down(_name))


def train(
    shape: Shape,
    folder: Path,
    saved: str,
    faults: tuple[Fault, ...] = (),
    *,
    timeout_seconds: float = 60.0,
    strikes_after_seconds: float = 0.0,
    checkpoint: Path | None = None,
) -> Results:
    """One run of one epoch, in which it validates twice and saves every other step.

    Args:
        shape: What it is like.
        folder: The folder of the run, which is the same in all processes.
        saved: The name of the folder in that for checkpoints.
        faults: What disturbs it.
        timeout_seconds: The pipeline's ``rpc_timeout_sec``.
        strikes_after_seconds: When a fault at any moment strikes.
        checkpoint: Where it continues.
    """
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    position = Position(str(folder), 0 if shape.launcher else int(os.environ.get("LOCAL_RANK", "0")))
    position.set(-1, "begin")
    traps = Traps(faults, position, os.getpid(), timeout_seconds)
    torch.manual_seed(1)
    model, began = Net(traps), time.time()
    hears = Hears()
    trainer = _trainer(shape, folder / saved, traps, hears)
    generator = torch.Generator().manual_seed(2)
    num_shares = shape.replicas // shape.num_parts
    data = [
        TensorDataset(torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 1, generator=generator))
        for rows in (NUM_BATCHES * ROWS * num_shares, 2 * ROWS * num_shares)
    ]
    loaders = DataLoader(data[0], ROWS, shuffle=True), DataLoader(data[1], ROWS)
    striking = traps.strike_later(strikes_after_seconds) if any(fault.phase == ANY_MOMENT for fault in faults) else None
    error = None
    try:
        trainer.fit(model, *loaders, ckpt_path=checkpoint, weights_only=True)
    except BaseException as raised:  # Lightning ends the process after a signal, by SystemExit
        error = Error(type(raised).__name__, str(raised), "".join(traceback.format_exception(raised)))
    finally:
        disk_is_free_again()
    ended = time.time()
    if striking is not None:
        striking.join()
    is_whole = error is None
    return Results(
        error=error,
        began=began,
        ended=ended,
        losses=model.losses,
        tensors={name: value.detach().clone() for name, value in model.state_dict().items()} if is_whole else {},
        metrics={name: value.item() for name, value in trainer.callback_metrics.items()} if is_whole else {},
        hooks=hears.calls,
    )


def _trainer(shape: Shape, saved: Path, traps: Traps, hears: Hears) -> Trainer:
    options = dict(shape.options)
    if shape.strategy == "pipeline":
        replicas = {"data_parallel_size": shape.replicas // shape.num_parts}
        recovery = Recovery(
            **{field.name: options.pop(field.name) for field in fields(Recovery) if field.name in options}
        )
        fixed: dict[str, Any] = {"rpc_timeout_sec": traps.timeout_seconds, "balance": "even", "recovery": recovery}
        strategy = RPCSequentialStrategy(**fixed, **replicas, **options)
    else:
        strategy = _STRATEGIES[shape.strategy](**options)
    precision: dict[str, Any] = {"precision": shape.precision}
    if shape.precision == "16-mixed":  # Lightning has no scaler on CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        precision = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    saving = ModelCheckpoint(
        saved, "{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1, enable_version_counter=False
    )
    num_hosts = 2 if shape.launcher == TWO_HOSTS else 1
    return Trainer(
        accelerator="cpu",
        devices=shape.stages * shape.replicas // num_hosts,
        num_nodes=num_hosts,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=shape.accumulate,
        val_check_interval=NUM_BATCHES // 2,
        callbacks=[TellsPosition(traps), hears, saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=int(shape.has_sanity),
        **precision,
    )


def undisturbed(shape: Shape) -> Outcome:
    """The reference: what a run comes to that nothing disturbs."""
    folder = _folder()
    results = train(shape, folder, "saved")
    return Outcome(results, checkpoints=_checkpoints(folder / "saved"))


def disturbed(case: Case, usual_seconds: float) -> Outcome:
    """A run with its faults, and then, unless it went on, one that continues from its last checkpoint.

    Args:
        case: The case.
        usual_seconds: How long an undisturbed run takes.
    """
    folder, disturbs = _folder(), case.faults
    is_damaged = any(fault.kind == "damaged" for fault in disturbs)
    arguments = {"timeout_seconds": case.rpc_timeout_sec}
    if disturbs[0].phase == ANY_MOMENT:
        arguments["strikes_after_seconds"] = disturbs[0].detail * usual_seconds
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return _other_rank(case, folder, arguments)
    status: int | None = None
    left: list[str] = []
    if case.shape.launcher:
        results, left = train_in_ranks(folder, case.shape, {"faults": disturbs, **arguments})
        status = 1
    elif case.ends_driver:
        results, status = _in_own_process(case, folder, arguments)
    else:
        results = train(case.shape, folder, "saved", () if is_damaged else disturbs, **arguments)
    outcome = Outcome(
        results,
        status=status,
        struck=_struck(folder),
        leftovers=_leftovers(folder / "saved"),
        checkpoints=_checkpoints(folder / "saved"),
        left=left,
    )
    if is_damaged:
        damaged = sorted((folder / "saved").iterdir(), key=_step)[-1]
        outcome.damaged_name = damaged.name
        _damage(damaged, disturbs[0].detail)
        outcome.of_damaged = train(case.shape, folder, "saved-damaged", checkpoint=damaged)
        del outcome.checkpoints[damaged.name]
    elif results is not None and results.error is None:
        return outcome
    readable = [name for name, tensors in outcome.checkpoints.items() if not isinstance(tensors, str)]
    last = folder / "saved" / max(readable, key=lambda name: _step(Path(name))) if readable else None
    (folder / "afterwards.part").write_text(str(last or ""))
    (folder / "afterwards.part").replace(folder / "afterwards")
    outcome.afterwards = train(replace(case.shape, launcher=""), folder, "saved-afterwards", checkpoint=last)
    outcome.checkpoints_afterwards = _checkpoints(folder / "saved-afterwards")
    return outcome


def _other_rank(case: Case, folder: Path, arguments: dict[str, Any]) -> Outcome:
    """What the other ranks of DDP, ZeRO or several replicas do: Lightning's launcher has started this process.

    A rank that the fault has struck ends with the error, and rank 0 must name it. As any script that catches an error,
    the others catch it, and each continues from the last checkpoint.
    """
    if not (folder / "afterwards").exists():
        results = train(case.shape, folder, "saved", case.faults, **arguments)
        if results.error is None:
            return Outcome(results)
        deadline = time.monotonic() + 30
        is_own = any(fault.replica and fault.kind != "connection lost" for fault in case.faults)
        while not (folder / "afterwards").exists():
            if is_own or time.monotonic() > deadline:
                raise RuntimeError(f"{results.error.kind}: {results.error.message}")
            time.sleep(0.05)
    last = (folder / "afterwards").read_text()
    results = train(case.shape, folder, "saved-afterwards", checkpoint=Path(last) if last else None)
    if results.error is not None:
        raise RuntimeError(f"{results.error.kind}: {results.error.message}")
    return Outcome(results)


def _in_own_process(case: Case, folder: Path, arguments: dict[str, Any]) -> tuple[Results | None, int]:
    """The run in a fork of this process; its results are missing if it has been killed."""

    def work() -> None:
        results = train(case.shape, folder, "saved", case.faults, **arguments)
        torch.save(results, folder / "results.part")
        (folder / "results.part").replace(folder / "results")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode is not None
    results = None
    with suppress(FileNotFoundError):
        results = torch.load(folder / "results", weights_only=False)
    return results, process.exitcode


def _folder() -> Path:
    folder = Path.cwd() / "run"
    folder.mkdir(exist_ok=True)
    return folder


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step=").removesuffix(".ckpt"))


def _struck(folder: Path) -> dict[int, float]:
    return {int(file.name.removeprefix("struck-")): float(file.read_text()) for file in folder.glob("struck-*")}


def _leftovers(saved: Path) -> list[str]:
    return sorted(path.name for path in saved.glob("*") if not path.name.endswith(".ckpt")) if saved.exists() else []


def _checkpoints(saved: Path) -> dict[str, dict[str, Tensor] | str]:
    """The tensors of each checkpoint, or the error of one that cannot be read."""
    found: dict[str, dict[str, Tensor] | str] = {}
    for path in saved.glob("*.ckpt") if saved.exists() else []:
        try:
            checkpoint = (
                load_sharded(path, weights_only=True)[0] if is_sharded(path) else torch.load(path, weights_only=True)
            )
            found[path.name] = sharded_tensors(checkpoint)
        except Exception as error:
            found[path.name] = f"{type(error).__name__}: {error}"
    return found


def _damage(path: Path, share: float) -> None:
    """Cut off a checkpoint: of a directory, the file with the values of one process, or its list of them."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    file = files[int(share * 1000) % len(files)]
    os.truncate(file, int(share * file.stat().st_size))
