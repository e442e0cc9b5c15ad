"""What fails anywhere in a pipeline is raised on the driver as what it is, and the next run is as good as the first."""

import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from harness import run
from pytorch_lightning.callbacks import OnExceptionCheckpoint
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from undisturbed import until_undisturbed

from strategies import RPCSequentialStrategy
from strategies.common.errors import RemoteTraceback
from trainer import Trainer

NUM_BATCHES, ROWS, MICROBATCHES = 5, 6, 3
GOOD_STEPS = 3
LAST_CALL = (GOOD_STEPS + 1) * MICROBATCHES
"""With ``checkpoint="never"``, the call of a layer for the last micro-batch, F2, of the first step that goes wrong."""

Layers = dict[int, nn.Module]


class Model(pl.LightningModule):
    """A few layers in float64; keeps the loss of each step and when it began."""

    def __init__(self, layers: Layers, num_layers: int, before_loss: Callable[[int], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        plain = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(num_layers)]
        for k, layer in layers.items():  # with the weights of those that they replace
            layer.double().load_state_dict(plain[k].state_dict())
        self.sequential_module = nn.Sequential(*(layers.get(k, layer) for k, layer in enumerate(plain)))
        self.before_loss = before_loss
        self.losses: list[float] = []
        self.began = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.began = time.monotonic()
        output = self.sequential_module(batch)
        self.before_loss(batch_idx)
        loss = (output - 1).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(
    strategy: Any,
    devices: int,
    layers: Layers,
    *,
    num_layers: int = 3,
    before_loss: Callable[[int], None] = lambda batch_idx: None,
    max_steps: int = NUM_BATCHES,
    callbacks: Any = (),
) -> dict[str, Any]:
    """Trains and reports how it ended."""
    model = Model(layers, num_layers, before_loss)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="run",
    )
    rows = torch.randn(NUM_BATCHES * ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ended: dict[str, Any] = {"model": model, "error": None}
    try:
        trainer.fit(model, DataLoader(rows, batch_size=ROWS))
    except BaseException as error:
        ended["error"], ended["seconds"] = error, time.monotonic() - model.began
    return ended


def report(ended: dict[str, Any]) -> dict[str, Any]:
    """The same in plain types and tensors."""
    model, error = ended["model"], ended["error"]
    cause = getattr(error, "__cause__", None)
    return {
        "losses": model.losses,
        "weights": {name: None if p.is_meta else p.detach().clone() for name, p in model.named_parameters()},
        "type": type(error).__name__,
        "message": str(error),
        "cause": str(cause) if isinstance(cause, RemoteTraceback) else None,
        "seconds": ended.get("seconds"),
    }


def every_failure() -> dict[str, Any]:
    """One failure after another in one process; the steps before each show that what came before left no trace.

    The classes of the layers are local, as those of a script or a notebook: they travel by value.
    """
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    class Explosion(Exception):
        pass

    class Fuse(nn.Linear):
        def __init__(self, how: str) -> None:
            super().__init__(4, 4)
            self.how, self.calls = how, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == LAST_CALL and self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.calls == LAST_CALL:
                raise Explosion(f"call {self.calls}")
            return super().forward(x)

    class Stubborn(nn.Linear):
        def __setstate__(self, state: Any) -> None:
            raise Explosion("cannot be unpacked")

    def pipeline(devices: int = 2, **settings: Any) -> tuple[Any, int]:
        balance = [1, *[1] * (devices - 2), 4 - devices]
        strategy = RPCSequentialStrategy(
            balance, microbatches=MICROBATCHES, checkpoint="never", rpc_timeout_sec=30, **settings
        )
        return strategy, devices

    def stop(batch_idx: int) -> None:
        if batch_idx == GOOD_STEPS:
            raise Explosion("in training_step")

    def interrupt(batch_idx: int) -> None:
        if batch_idx == GOOD_STEPS:
            raise KeyboardInterrupt

    reports = {
        "reference": report(fit(SingleDeviceStrategy("cpu"), 1, {})),
        "reference, cut short": report(fit(SingleDeviceStrategy("cpu"), 1, {}, max_steps=GOOD_STEPS)),
    }
    saving = OnExceptionCheckpoint("saved", filename="last")
    on_worker = fit(*pipeline(), {0: Fuse("raise")}, callbacks=[saving])
    reports["worker"] = report(on_worker)
    reports["worker"]["own type"] = type(on_worker["error"]) is Explosion
    reports["saved"] = torch.load("saved/last.ckpt", weights_only=False)["state_dict"]
    reports["driver"] = report(fit(*pipeline(), {2: Fuse("raise")}))
    reports["training_step"] = report(fit(*pipeline(), {}, before_loss=stop))
    reports["unpack"] = report(fit(*pipeline(), {0: Stubborn(4, 4)}))
    reports["interrupt"] = report(fit(*pipeline(), {}, before_loss=interrupt))

    def ended_soon(ended: dict[str, Any]) -> None:
        assert ended["seconds"] < 10

    killed = until_undisturbed(lambda: fit(*pipeline(3), {1: Fuse("kill")}), ended_soon)
    reports["kill"] = report(killed)
    reports["good"] = report(fit(*pipeline(), {}))
    trainer = Trainer(accelerator="cpu", devices=2, strategy=pipeline()[0], logger=False, enable_checkpointing=False)
    try:
        trainer.fit(killed["model"], DataLoader(torch.ones(6, 4, dtype=torch.float64)))
    except Exception as error:
        reports["killed again"] = {"type": type(error).__name__, "message": str(error)}
    return reports


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    reports: dict[str, Any] = run(every_failure, timeout_seconds=170)
    return reports


def assert_trained(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, rtol=1e-9, atol=1e-9)


def test_a_layer_on_a_worker(reports: dict[str, Any]) -> None:
    got = reports["worker"]
    assert got["own type"]  # the class of the script itself, so that ``except`` works
    assert got["message"] == f"call {LAST_CALL}"
    assert "stage 0 (layers 0 to 0: Fuse), process " in got["cause"]
    assert "in F2, layer 0" in got["cause"].splitlines()[0]
    assert "Traceback (most recent call last)" in got["cause"]
    assert 'raise Explosion(f"call {self.calls}")' in got["cause"]
    assert_trained(got, reports["reference, cut short"])


def test_a_checkpoint_after_an_exception_is_complete(reports: dict[str, Any]) -> None:
    weights = reports["reference, cut short"]["weights"]
    assert reports["saved"].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(reports["saved"][name], weight, rtol=1e-9, atol=1e-9)


def test_a_layer_on_the_driver(reports: dict[str, Any]) -> None:
    got = reports["driver"]
    assert (got["type"], got["message"], got["cause"]) == ("Explosion", f"call {LAST_CALL}", None)
    assert_trained(got, reports["reference, cut short"])


def test_the_training_step(reports: dict[str, Any]) -> None:
    got = reports["training_step"]
    assert (got["type"], got["message"]) == ("Explosion", "in training_step")
    assert_trained(got, reports["reference, cut short"])


def test_a_stage_that_cannot_be_unpacked(reports: dict[str, Any]) -> None:
    got = reports["unpack"]
    assert (got["type"], got["message"]) == ("Explosion", "cannot be unpacked")
    assert "unpacking its layers" in got["cause"].splitlines()[0]
    assert got["losses"] == []
    assert all(weight is not None for weight in got["weights"].values())


def test_an_interrupt(reports: dict[str, Any]) -> None:
    got = reports["interrupt"]
    assert got["type"] in ("KeyboardInterrupt", "SystemExit")
    assert_trained(got, reports["reference, cut short"])


def test_a_killed_worker(reports: dict[str, Any]) -> None:
    got = reports["kill"]
    assert got["type"] == "WorkerLost"
    assert got["message"].startswith("stage 1 (layers 1 to 1: Fuse), process ")
    assert got["message"].endswith(f" on {socket.gethostname()}, was killed by signal 9 in F2, layer 1")
    expected = reports["reference, cut short"]
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
    lost = {"sequential_module.1.weight", "sequential_module.1.bias"}
    for name, weight in expected["weights"].items():
        if name in lost:
            assert got["weights"][name] is None
        else:
            torch.testing.assert_close(got["weights"][name], weight, rtol=1e-9, atol=1e-9)


def test_a_model_that_lost_weights_is_refused(reports: dict[str, Any]) -> None:
    assert reports["killed again"]["type"] == "MisconfigurationException"
    assert "2 parameters or buffers of Model have no values" in reports["killed again"]["message"]


def test_after_all_of_them(reports: dict[str, Any]) -> None:
    assert reports["good"]["type"] == "NoneType"
    assert len(reports["good"]["losses"]) == NUM_BATCHES
    assert_trained(reports["good"], reports["reference"])
