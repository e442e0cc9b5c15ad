"""``data_parallel_size``: two pipelines of two stages train what one process trains on both shares of each batch."""

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import replicas_job
import torch
from harness import run
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from scripts import Script

from strategies import RPCSequentialStrategy
from strategies.checkpoint import save_and_load
from trainer import Trainer

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2"])
def test_a_number_of_replicas(size: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"data_parallel_size must be a whole number of at least 1"):
        RPCSequentialStrategy(data_parallel_size=size)


def test_devices_that_do_not_divide() -> None:
    message = r"data_parallel_size=2 replicas cannot divide 3 devices evenly .*set devices to 2 times the number of st"
    with pytest.raises(MisconfigurationException, match=message):
        Trainer(accelerator="cpu", devices=3, strategy=RPCSequentialStrategy(data_parallel_size=2))


def test_one_replica_divides_nothing() -> None:
    with pytest.raises(MisconfigurationException, match=r"there is only one: set data_parallel_size to 2 or more"):
        RPCSequentialStrategy(zero_stage=1)


@pytest.mark.parametrize("stage", [-1, 4, True, 1.0, "1", None])
def test_a_zero_stage(stage: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"zero_stage must be 0, 1, 2 or 3, got "):
        RPCSequentialStrategy(data_parallel_size=2, zero_stage=stage)


def start_job(*arguments: str, **kwargs: Any) -> Script:
    return Script(replicas_job.__file__, *arguments, **kwargs)


def launch() -> dict[str, Any]:
    """Runs in the harness's child, since Lightning's launcher starts the running script once more for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.pt"
        assert start_job(str(results)).wait(timeout=280) == 0
        seen: dict[str, Any] = torch.load(results)
        results.unlink()
        seen["checkpoints"] = {file.stem: torch.load(file, weights_only=True) for file in Path(folder).glob("*.ckpt")}
        seen["resumed"] = {
            "full": torch.load(Path(folder) / "2 full", weights_only=True),
            "sharded": save_and_load.load_sharded(Path(folder) / "2 sharded")[0],
        }
        return seen


@pytest.fixture(scope="module")
def replicas() -> dict[str, Any]:
    return run(launch, timeout_seconds=290)


@pytest.mark.slow
def test_two_times_two_processes_equal_one(replicas: dict[str, Any]) -> None:
    for name, (make, _, settings) in replicas_job.CASES.items():
        model, trainer = replicas_job.fit(make, SingleDeviceStrategy("cpu"), 1, **settings)
        seen = replicas[name]
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        assert seen["losses"] == pytest.approx(model.losses, rel=1e-9), name
        assert seen["metrics"] == pytest.approx(metrics, rel=1e-9), name
        assert torch.equal(*seen["weights"]), name  # the replicas agree to the last bit
        torch.testing.assert_close(seen["weights"][0], weights, rtol=1e-9, atol=1e-9)
        gathered = replicas["checkpoints"][f"{name} 0"]["optimizer_states"]
        for optimizer, state in zip(trainer.optimizers, gathered, strict=True):
            torch.testing.assert_close(state["state"], optimizer.state_dict()["state"], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_one_complete_checkpoint(replicas: dict[str, Any]) -> None:
    assert set(replicas["checkpoints"]) == {f"{name} 0" for name in replicas_job.CASES}
    for name, (make, *_) in replicas_job.CASES.items():
        checkpoint, model = replicas["checkpoints"][f"{name} 0"], make().double()
        model.load_state_dict(checkpoint["state_dict"])
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        assert torch.equal(weights, replicas[name]["weights"][0]), name
        number = sum(len(state["state"]) for state in checkpoint["optimizer_states"])
        assert number == len(list(model.parameters()))


@pytest.mark.slow
def test_replicas_divide_states(replicas: dict[str, Any]) -> None:
    for name, (make, *_) in replicas_job.CASES.items():
        states, number = replicas[name]["states"].tolist(), len(list(make().parameters()))
        if name.startswith(("divided", "reduced")):
            assert sum(states) == number and max(states) < number, name
        else:
            assert states == [number, number], name


@pytest.mark.slow
def test_replicas_divide_gradients(replicas: dict[str, Any]) -> None:
    first, second = replicas["reduced"]["held"]
    assert first.numel() == len(list(replicas_job.Net().parameters())) and torch.equal(first, ~second)
    assert 0 < first.sum() < first.numel()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_divided_states_go_on(form: str, replicas: dict[str, Any]) -> None:
    """Saved in mid-fit by 2x2 processes that divide states, loaded by 2x2 processes that divide gradients too."""
    uninterrupted, resumed = replicas["checkpoints"]["gpipe 0"], replicas["resumed"][form]
    for name, value in uninterrupted["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], value, rtol=1e-9, atol=1e-9)
    (whole,), (gathered,) = uninterrupted["optimizer_states"], resumed["optimizer_states"]
    assert list(gathered["state"]) == list(whole["state"])
    for number, state in whole["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(gathered["state"][number][key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_sampler_divides_the_data(replicas: dict[str, Any]) -> None:
    first, second = (set(rows.tolist()) for rows in replicas["one stage"]["rows"])
    assert first | second == set(range(replicas_job.ROWS)) and not first & second
    assert torch.equal(*replicas["one stage"]["weights"])


def doomed() -> tuple[str, float]:
    started = time.monotonic()
    job = start_job("unused", "doomed", stderr=subprocess.PIPE)
    _, said = job.communicate(timeout=100)
    assert job.returncode
    return str(said), time.monotonic() - started


@pytest.mark.slow
def test_a_killed_worker_ends_every_replica() -> None:
    """The harness fails where a process is left."""
    said, seconds = run(doomed, timeout_seconds=120)
    assert "stage 0 (layers 0 to 2: Linear, Tanh, LayerNorm), process " in said
    assert ", was killed by signal 9 " in said
    assert seconds < 60  # rpc_timeout_sec: nobody waited for it
