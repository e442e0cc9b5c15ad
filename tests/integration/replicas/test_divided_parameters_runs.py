"""``zero_stage=3``: replicas that divide the parameters of their stages train what one process trains."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import divided_parameters_job as job
import pytest
import torch
from harness import run
from parity import alike, one_device
from pytorch_lightning import seed_everything
from scripts import Script
from tensor_parallel_job import fit, made, seen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXACT = 1e-9
IN_FLOAT32 = 1e-6
"""Models of ``transformers`` compute losses in single precision."""


def single(case: str, folder: Path, ckpt_path: Path | None = None, **settings: Any) -> dict[str, Any]:
    """One process."""
    name, _, own = job.CASES[case]
    model = made(name)
    seed_everything(0)  # as Lightning does when several processes connect
    model, trainer = fit(model, one_device(), 1, ckpt_path, **{**own, **settings})
    trainer.save_checkpoint(folder / f"{case}.ckpt")
    return {**seen(model, trainer), "validated": trainer.validate(model, verbose=False)[0]}


def compared(stages: int, replicas: int, cases: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name), Path(name) / "single"
        if "resumed" in cases:
            single("resumed", other, max_epochs=1)
            (other / "resumed.ckpt").rename(folder / "before resumed.ckpt")
        assert Script(job.__file__, name, str(stages), str(replicas), *cases).wait(timeout=300) == 0
        results = torch.load(folder / "results.pt")
        for case in cases:
            expected, actual = single(case, other), results[case]
            if case == "resumed":
                expected["losses"] = expected["losses"][-len(actual["losses"]) :]
            for part in ("states", "weights"):
                alike(actual[part], expected[part], EXACT, f"{case} {part}")
            for part in ("losses", "metrics", "validated"):
                alike(actual[part], expected[part], IN_FLOAT32, f"{case} {part}")
            ours, theirs = (torch.load(path / f"{case}.ckpt", weights_only=True) for path in (folder, other))
            for part in ("state_dict", "optimizer_states"):
                alike(ours[part], theirs[part], EXACT, f"{case} checkpoint {part}")


def test_two_replicas_of_two_stages() -> None:
    run(
        compared,
        2,
        2,
        ["llama", "gpipe", "tied", "gpt2", "accumulated", "tokens", "resumed", "lr_find"],
        timeout_seconds=390,
    )


def test_what_is_measured() -> None:
    run(compared, 2, 2, ["auto", "by_time"], timeout_seconds=390)


def with_dropout() -> tuple[Any, Any]:
    with tempfile.TemporaryDirectory() as name:
        cases = ["dropout 0", "dropout 3"]
        assert Script(job.__file__, name, "2", "2", *cases).wait(timeout=300) == 0
        results = torch.load(Path(name) / "results.pt")
        return tuple({part: results[case][part] for part in ("losses", "weights", "states")} for case in cases)


def test_dropout_is_that_of_whole_parameters() -> None:
    whole, divided = run(with_dropout, timeout_seconds=310)
    alike(divided, whole, EXACT, "dropout")


def continued() -> None:
    """One process continues from a checkpoint of replicas that divide parameters."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert Script(job.__file__, name, "2", "2", "half").wait(timeout=200) == 0
        expected = single("resumed", folder / "whole")
        actual = single("resumed", folder / "again", folder / "half.ckpt")
        for part in ("weights", "states"):
            alike(actual[part], expected[part], EXACT, part)


def test_one_process_continues() -> None:
    run(continued, timeout_seconds=300)


def failing(case: str, stages: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        script = Script(job.__file__, name, str(stages), "2", case, stderr=subprocess.PIPE)
        _, said = script.communicate(timeout=100)
        assert script.returncode
        return str(said)


@pytest.mark.parametrize(
    "case, stages, expected",
    [
        ("WithoutTokens", 2, "on this replica they have weights of [5"),
        ("Uneven", 1, "this replica has 2 micro-batches where replica 1 has 1"),
        ("UnevenValidation", 2, "this replica has 2 micro-batches where replica 1 has 1"),
        ("Skipping", 2, "this replica calls layer"),
        ("Scaled", 2, "this replica multiplies its gradients by 1 where replica 1 takes 2"),
        ("Penalised", 2, "a weight is used outside of the forward function of its own module"),
        ("PenalisedLayer", 2, "a weight is used outside of the forward function of its own module"),
        ("ClippedByHand", 2, "another stage of the pipeline, which torch.nn.utils.clip_grad_norm_"),
        ("NotByElement", 2, "MisconfigurationException: Adafactor cannot be used under zero_stage=3"),
        ("ClippedByHand", 1, "of which each has the whole, to different values."),
    ],
)
def test_what_would_be_wrong_is_an_error(case: str, stages: int, expected: str) -> None:
    assert expected in run(failing, case, stages, timeout_seconds=110)


@pytest.mark.nightly
@pytest.mark.parametrize("cases", [["accumulated 1f1b", "bert", "zb-h1"], ["interleaved", "zbv", "v-half"]], ids=str)
def test_more_models_and_schedules(cases: list[str]) -> None:
    run(compared, 2, 2, cases, timeout_seconds=390)


@pytest.mark.nightly
def test_four_replicas_of_one_stage() -> None:
    run(compared, 1, 4, ["gpt2"], timeout_seconds=390)
