"""What a first ``fit`` does while its fork server imports torch, so that its workers wait for nothing else."""

import gc
import sys
from typing import Any

import pytest
import torch
from harness import OWN_SERVER, run
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel
from torch import nn

from strategies import RPCSequentialStrategy
from strategies.launch.fork_server import OwnForkServer


class Watching(BoringModel):
    """Notes at which of its hooks there is a fork server, and whether Lightning's next checkpoint needs imports."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = None
        self.sequential_module = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))
        self.example_input_array = torch.ones(2, 32)
        self.has_server: dict[str, bool] = {}
        self.has_omegaconf = False

    def forward(self, x: Any) -> Any:
        return self.sequential_module(x)

    def note(self, hook: str) -> None:
        self.has_server[hook] = OwnForkServer._of_this_process is not None

    def prepare_data(self) -> None:
        self.note("prepare_data")

    def setup(self, stage: str) -> None:
        self.note("setup")

    def configure_optimizers(self) -> Any:
        self.note("configure_optimizers")
        return super().configure_optimizers()


def hooks_of_a_fit(**options: Any) -> list[str]:
    """Run a fit; return the hooks that ran beside a fork server."""
    OwnForkServer.discard()
    strategy, model = RPCSequentialStrategy(microbatches=2, **options), Watching()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        fast_dev_run=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return [hook for hook, has_server in model.has_server.items() if has_server]


def hooks_beside_the_server() -> list[list[str]]:
    return [hooks_of_a_fit(), hooks_of_a_fit(balance="by_time")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_server_starts_before_the_users_hooks_unless_layers_are_timed() -> None:
    by_size, by_time = run(hooks_beside_the_server, env=OWN_SERVER)
    assert by_size == ["prepare_data", "setup", "configure_optimizers"]
    assert by_time == ["configure_optimizers"]


def frozen_objects() -> int:
    return gc.get_freeze_count() > 10_000


def look_into_a_fork() -> int:
    import os

    server = OwnForkServer(["numpy"], environment=dict(os.environ), paths=sys.path)
    options: Any = {"environment": os.environ, "paths": sys.path, "timeout_seconds": 100}
    status = server.fork(f"{__name__}:frozen_objects", [], **options).wait(100)
    server.end()
    return status


@pytest.mark.slow
def test_forks_do_not_collect_what_the_server_has_imported() -> None:
    assert run(look_into_a_fork, env=OWN_SERVER) == 1
