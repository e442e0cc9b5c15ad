"""What fails in the middle of an interleaved pass is raised as what it is; nobody waits for ever, nothing is left.

Each run makes a good step, then fails in micro-batch 2 of 6 of the second one: every stage is in the midst of forward
and backward passes then. The weights of the first step come back.
"""

import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, batches
from pytorch_lightning import seed_everything
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from undisturbed import until_undisturbed

from strategies import RPCSequentialStrategy
from trainer import Trainer

MICROBATCHES, FAILS_IN = 6, 2
CALL = MICROBATCHES + FAILS_IN + 1
"""Which call of a layer, or which run of ``training_step``, that is."""


class Explosion(Exception):
    pass


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise Explosion("backward")


class Fuse(nn.Linear):
    """Fails once, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.way, self.calls = way, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y = super().forward(x)
        if self.calls != CALL:
            return y
        if self.way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.way == "forward":
            raise Explosion("forward")
        return _Explode.apply(y) if self.way == "backward" else y


class Model(Small):
    def __init__(self, place: Any, way: str) -> None:
        super().__init__()
        self.place, self.way, self.runs = place, way, 0
        self.sequential_module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.before = nn.Linear(WIDTH, WIDTH)
        if isinstance(place, int):
            fuse = Fuse(way)
            fuse.load_state_dict(self.sequential_module[place].state_dict())
            self.sequential_module[place] = fuse
        self.failed_at = 0.0

    def fail(self) -> None:
        self.failed_at = time.monotonic()
        if self.way == "raise":
            raise Explosion(self.place)
        if self.way == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)  # of the main thread, which is not this one
            time.sleep(0.5)  # it must not wait for this
        if self.way == "KeyboardInterrupt":
            raise KeyboardInterrupt

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.runs += 1
        x = self.before(batch[0])
        number = self.runs
        if number == CALL:
            self.failed_at = time.monotonic()
            if self.place == "before":
                self.fail()
        y = self(x)
        if number == CALL and self.place == "after":
            self.fail()
        return mse_loss(y[:, :2], batch[1])


def train(place: Any = None, way: str = "", **arguments: Any) -> tuple[str, str, float, dict[str, Tensor | None]]:
    """How it ended: the type and the message of the error, the seconds that it took, and the weights."""
    seed_everything(0, verbose=False)
    model = Model(place, way)
    strategy = RPCSequentialStrategy(
        [2, 2, 2], microbatches=MICROBATCHES, checkpoint="never", schedule="1f1b", rpc_timeout_sec=40
    )
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(accelerator="cpu", devices=3, strategy=strategy, **dict.fromkeys(quiet, False), **arguments)
    kind, message, seconds = "none", "", 0.0
    try:
        trainer.fit(model, batches((MICROBATCHES,) * 3))
    except BaseException as error:
        kind, message, seconds = type(error).__name__, str(error), time.monotonic() - model.failed_at
    return kind, message, seconds, {name: None if p.is_meta else p.detach() for name, p in model.named_parameters()}


FAILURES: dict[str, tuple[Any, str, tuple[str, ...], str]] = {
    "before the call": ("before", "raise", ("Explosion",), "before"),
    "after the call": ("after", "raise", ("Explosion",), "after"),
    "first stage, forward": (0, "forward", ("Explosion",), "forward"),
    "first stage, backward": (0, "backward", ("Explosion",), "backward"),
    "second stage, forward": (2, "forward", ("Explosion",), "forward"),
    "second stage, backward": (3, "backward", ("Explosion",), "backward"),
    "last stage, forward": (5, "forward", ("Explosion",), "forward"),
    "last stage, backward": (4, "backward", ("Explosion",), "backward"),
    "interrupted before the call": ("before", "interrupt", ("KeyboardInterrupt", "SystemExit"), ""),
    "interrupted after the call": ("after", "interrupt", ("KeyboardInterrupt", "SystemExit"), ""),
    "KeyboardInterrupt after the call": ("after", "KeyboardInterrupt", ("KeyboardInterrupt", "SystemExit"), ""),
    "killed": (2, "kill", ("WorkerLost",), "stage 1 (layers 2 to 3: Fuse, Linear), process "),
}


def fail_in_every_way() -> dict[str, Any]:
    def ended_soon(found: tuple[str, str, float, Any]) -> None:
        assert found[2] < 15  # far below the time-out; a process takes up to 5 s to be ended

    ended = {
        name: until_undisturbed(partial(train, place, way), ended_soon) for name, (place, way, *_) in FAILURES.items()
    }
    return {**ended, "one step": train(max_steps=1), "good": train(max_epochs=1)}


@pytest.mark.slow
def test_failures_in_the_middle_of_a_pass() -> None:
    ended = run(fail_in_every_way, timeout_seconds=175)
    assert ended["good"][0] == ended["one step"][0] == "none"
    expected = ended["one step"][3]
    assert not torch.equal(expected["before.weight"], ended["good"][3]["before.weight"])
    for name, (_, way, kinds, message) in FAILURES.items():
        kind, told, _, weights = ended[name]
        assert kind in kinds and told.startswith(message), (name, kind, told)
        for parameter, value in weights.items():
            if value is None:
                assert way == "kill" and parameter.startswith(("sequential_module.2", "sequential_module.3"))
            else:
                torch.testing.assert_close(value, expected[parameter], msg=f"{name}: {parameter}: {{}}".format)
