"""What Lightning and PyTorch can do, over two pipelines of two stages; the trainings are in the job."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import replicas_features_job as job
import torch
from harness import run
from parity import WIDTH
from pytorch_lightning.strategies import SingleDeviceStrategy
from replicas_job import fit
from scripts import Script

from strategies import RPCSequentialStrategy


def launch() -> dict[str, Any]:
    """Runs in the harness's child, since Lightning's launcher starts the running script once more for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.pt"
        assert Script(job.__file__, str(results)).wait(timeout=165) == 0
        seen: dict[str, Any] = torch.load(results)
        return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run(launch, timeout_seconds=175)


def of_one_process(name: str) -> tuple[Any, Any]:
    make, _, settings = job.CASES[name]
    return fit(make, SingleDeviceStrategy("cpu"), 1, **settings())


@pytest.mark.slow
@pytest.mark.parametrize("name", job.CASES)
def test_equals_one_process(seen: dict[str, Any], name: str) -> None:
    model, trainer = of_one_process(name)
    found, metrics = seen[name], {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert found["losses"] == pytest.approx(model.losses, rel=1e-9, abs=1e-12)
    assert found["metrics"] == pytest.approx(metrics, rel=1e-9)
    assert found["state"].keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        ours, theirs = found["state"][key]
        assert torch.equal(ours, theirs), key
        torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-9, msg=f"{key}: {{}}".format)


@pytest.mark.slow
@pytest.mark.parametrize("name", job.SAME_SHARES)
def test_equals_pipelines_of_one_stage(seen: dict[str, Any], name: str) -> None:
    two, one = seen[name]["two"], seen[name]["one"]
    assert two["losses"] == one["losses"] and two["metrics"] == one["metrics"]
    assert two["state"].keys() == one["state"].keys()
    for key, (ours, theirs) in two["state"].items():
        assert torch.equal(ours, theirs) and torch.equal(ours, one["state"][key][0]), key


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ", reduced", ", parameters"])
def test_one_step_is_left_out_by_all(seen: dict[str, Any], more: str) -> None:
    """The scale is halved where a step is left out: the second of each epoch, or the first of three."""
    fused = seen[f"scaler, fused, 1f1b{more}"]["losses"][1::2]
    assert fused == [1024, 512, 512, 1024, 1024, 2048, 1024, 1024, 2048, 2048]
    assert seen[f"scaler{more}"]["losses"][1::2] == [1024, 512, 512, 512, 1024, 1024, 512, 512, 512, 1024]


@pytest.mark.slow
def test_masks_differ_between_replicas(seen: dict[str, Any]) -> None:
    for name in ("dropout", "dropout, 1f1b"):
        masks = seen[name]["masks"]
        rows, columns = masks.shape[1:]
        assert masks.shape[0] == 2 and columns == 6 * WIDTH and rows >= 1
        for ours, theirs in zip(masks[0].split(WIDTH, 1), masks[1].split(WIDTH, 1), strict=True):
            assert not torch.equal(ours, theirs)  # of 6 layers


@pytest.mark.slow
def test_gradients_are_averaged_when_the_hook_sees_them_unless_blocked(seen: dict[str, Any]) -> None:
    for name in ("blocked", "measured, 1f1b"):  # epochs have five batches; the last one makes a step, if not blocked
        last = [False, True, False, True, name != "blocked"]
        assert seen[name]["agrees"] == last * 2, name


def statistics() -> dict[str, torch.Tensor]:
    strategy = RPCSequentialStrategy([6], microbatches=2)
    return dict(fit(job.FirstShare, strategy, 1)[0].state_dict())


@pytest.mark.slow
def test_statistics_are_those_of_the_first_replica(seen: dict[str, Any]) -> None:
    expected = run(statistics)
    for name, values in seen["statistics"]["state"].items():
        assert torch.equal(values[0], values[1])
        torch.testing.assert_close(values[0], expected[name], msg=f"{name}: {{}}".format)
    assert expected["before.num_batches_tracked"] == 10 and expected["sequential_module.1.num_batches_tracked"] == 20


@pytest.mark.slow
def test_what_replicas_tell_each_other(seen: dict[str, Any]) -> None:
    told = seen["collectives"]
    assert 0.9 < told.pop("waited") < 10
    assert told == {
        "broadcast": [["any object", 0], ["any object", 1]],
        "reduced": [[2.0, 8.0], [4.0, 16.0]],
        "not reduced": "no tensor",
        "gathered": [[0], [1]],
        "all": [False, True],
    }
