"""DDPStrategy: what its constructor refuses, and one rich run on two processes against one process."""

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import ddp_job
import pytest
import pytorch_lightning as pl
import torch
from harness import run
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from scripts import Script

from strategies import DDPStrategy, StrategyPlugin
from trainer import Trainer


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"comm_hook": "fp16"},
            ValueError,
            "unknown comm_hook 'fp16'; did you mean 'fp16_compress'",
        ),
        ({"comm_hook": "zip"}, ValueError, "valid names: .*bf16_compress.*none"),
        (
            {"find_unused_parameter": True},
            TypeError,
            "no argument 'find_unused_parameter'; did you mean 'find_unused_pa",
        ),
        ({"comm_hok": "none"}, TypeError, "did you mean 'comm_hook'"),
        ({"module": None}, TypeError, "no argument 'module'"),
        ({"comm_hook": "powersgd", "ddp_comm_hook": print}, ValueError, "are both given"),
        ({"powersgd_rank": 2}, ValueError, "need comm_hook='powersgd', got 'none'"),
        ({"comm_hook": "powersgd", "powersgd_rank": 0}, ValueError, "powersgd_rank must be at least 1, got 0"),
        ({"comm_hook": "powersgd", "powersgd_start_step": 1}, ValueError, "powersgd_start_step must be .* 2, got 1"),
    ],
)
def test_constructor_refuses(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DDPStrategy(**kwargs)


def test_lightning_and_torch_arguments_pass() -> None:
    strategy = DDPStrategy(find_unused_parameters=True, process_group_backend="gloo", static_graph=False)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "static_graph": False}
    assert strategy.process_group_backend == "gloo"


@pytest.mark.parametrize(
    ("backend", "hook", "works"),
    [("gloo", "bf16_compress", "none, fp16_compress, powersgd"), ("mpi", "fp16_compress", "none")],
)
def test_a_hook_that_the_backend_cannot_do_is_refused_before_a_process_starts(
    backend: str, hook: str, works: str
) -> None:
    strategy = DDPStrategy(comm_hook=hook, process_group_backend=backend)
    message = f"comm_hook='{hook}' does not work on the backend '{backend}'; on {backend} use one of: {works}$"
    with pytest.raises(MisconfigurationException, match=message):
        Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    assert strategy.launcher is None


def test_fulfils_the_contract_itself() -> None:
    for member in StrategyPlugin.__abstractmethods__ - {"root_device"}:
        if member in vars(StrategyPlugin):
            assert vars(DDPStrategy)[member].__doc__


@pytest.fixture(scope="module")
def two_processes() -> dict[str, Any]:
    return run(launch, timeout_seconds=150)


def launch() -> dict[str, Any]:
    """Runs in the harness's child, since Lightning's launcher starts the running script once more for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.pt"
        assert start_job(str(results)).wait(timeout=140) == 0
        seen: dict[str, Any] = torch.load(results)
        results.unlink()
        seen["checkpoints"] = {file.stem: torch.load(file, weights_only=True) for file in Path(folder).iterdir()}
        return seen


def start_job(*arguments: str, **kwargs: Any) -> Script:
    return Script(ddp_job.__file__, *arguments, **kwargs)


@pytest.mark.slow
def test_no_rank_survives_a_killed_rank_0() -> None:
    # The harness fails where a process is left.
    assert "rank 1: rank 0 is gone, so this process ends as well" in run(doomed, timeout_seconds=90)


def doomed() -> str:
    job = start_job("unused", "doomed", stderr=subprocess.PIPE)
    _, said = job.communicate(timeout=80)  # rank 1 holds the other end of the pipe
    assert job.returncode == -signal.SIGKILL
    return str(said)


def one_process(net: type[ddp_job.Net], **kwargs: Any) -> tuple[list[float], torch.Tensor]:
    model = net()
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=ddp_job.EPOCHS, **ddp_job.QUIET, **kwargs)
    trainer.fit(model)
    return model.losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_two_processes_equal_one(two_processes: dict[str, Any], tmp_path: Path) -> None:
    cases: dict[str, tuple[type[ddp_job.Net], dict[str, Any], float]] = {
        # float64: only the order of the sums differs.
        "none": (ddp_job.Net, {}, 1e-12),
        "accumulate": (ddp_job.Net, {"accumulate_grad_batches": 2}, 1e-12),
        "manual": (ddp_job.ManualNet, {}, 1e-12),
        "clipped": (ddp_job.ClippedNet, {}, 1e-12),
        # fp16 rounds a gradient to 11 bits: 5e-4 of its size, in each of six steps.
        "fp16_compress": (ddp_job.Net, {}, 3e-3),
    }
    for name, (net, kwargs, tolerance) in cases.items():
        losses, weights = one_process(net, default_root_dir=tmp_path, **kwargs)
        seen = two_processes[name]
        assert seen["losses"] == pytest.approx(losses, rel=tolerance), name
        assert torch.equal(*seen["weights"]), name  # the ranks agree to the last bit
        torch.testing.assert_close(seen["weights"][0], weights, rtol=tolerance, atol=tolerance)


def test_the_hooks_are_really_in_use(two_processes: dict[str, Any]) -> None:
    plain = two_processes["none"]
    fp16, powersgd, own = (two_processes[name] for name in ("fp16_compress", "powersgd", "user's own hook"))
    assert fp16["losses"][0] == plain["losses"][0]
    assert fp16["losses"][1] != plain["losses"][1]
    # PowerSGD leaves its first two steps as they are; the third loss still sees only those.
    assert powersgd["losses"][:3] == plain["losses"][:3]
    assert powersgd["losses"][3] != plain["losses"][3]
    assert torch.equal(*powersgd["weights"])
    assert powersgd["losses"][-1] < powersgd["losses"][0]
    # Lightning would have passed over this one on CPU.
    assert not torch.equal(*own["weights"])


def test_nothing_deprecated_is_used(two_processes: dict[str, Any]) -> None:
    assert not two_processes["none"]["deprecated"]


def test_post_optimizer_step_follows_every_step(two_processes: dict[str, Any]) -> None:
    counts = {name: two_processes[name]["counts"] for name in ("none", "accumulate", "manual")}
    assert counts == {
        "none": {0: ddp_job.STEPS},
        "accumulate": {0: 4},  # 3 batches per epoch: one step after two of them, one at the end
        "manual": {0: ddp_job.STEPS, 1: ddp_job.STEPS},  # the second one is stepped bare
    }
    assert all(left == 0 for name in counts for left in two_processes[name]["hooks_left"])


def test_one_complete_checkpoint(two_processes: dict[str, Any]) -> None:
    assert len(two_processes["checkpoints"]) == 7
    for name, checkpoint in two_processes["checkpoints"].items():
        weights = torch.nn.utils.parameters_to_vector(checkpoint["state_dict"].values())
        if name != "user's own hook":
            assert torch.equal(weights, two_processes[name]["weights"][0]), name
        assert all(len(state["state"]) for state in checkpoint["optimizer_states"])


class OneDevice(StrategyPlugin, SingleDeviceStrategy):
    """The contract on one device, for what needs no second process."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))
        self.steps: list[type] = []

    def setup_environment(self) -> None:
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)

    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)

    def post_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps.append(type(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        super().teardown()


class KeepsItsOptimizer(ddp_job.Net):
    """Hands out the same optimizer at every fit."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return [self.optimizer, self.optimizer][:1]


def test_a_second_fit_with_the_same_optimizer_is_not_counted_twice(tmp_path: Path) -> None:
    strategy, model = OneDevice(), KeepsItsOptimizer()
    trainer = Trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path, **ddp_job.QUIET)
    trainer.fit(model)
    assert strategy.steps == [torch.optim.SGD] * 3
    assert not model.optimizer._optimizer_step_post_hooks
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    assert strategy.steps == [torch.optim.SGD] * 6
    model.optimizer.step()  # the strategy is done with it
    assert len(strategy.steps) == 6


def test_assigning_other_optimizers_moves_the_hook() -> None:
    strategy = OneDevice()
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]) for _ in range(2))
    strategy.optimizers = [first]
    strategy.optimizers = [second, second]
    first.step()
    second.step()
    assert strategy.steps == [torch.optim.SGD]
    assert len(strategy.optimizers) == len(strategy._lightning_optimizers) == 2


def test_the_hook_goes_when_the_fit_fails(tmp_path: Path) -> None:
    class Breaks(KeepsItsOptimizer):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("broken step")

    strategy, model = OneDevice(), Breaks()
    trainer = Trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path, **ddp_job.QUIET)
    with pytest.raises(RuntimeError, match="broken step"):
        trainer.fit(model)
    assert not model.optimizer._optimizer_step_post_hooks
    assert os.environ.get("LOCAL_RANK") is None
