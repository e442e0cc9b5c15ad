"""``tensor_parallel_size``: pipelines that divide single layers train what one process trains."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel_job as job
import torch
from harness import run
from parity import alike, one_device
from paths import environment
from pytorch_lightning import seed_everything
from scripts import Script

from strategies import RPCSequentialStrategy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

IN_FLOAT32 = 1e-6
"""Models of ``transformers`` compute losses, and routers of experts, in single precision."""


def single(case: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """One process; with dropout, a pipeline of one stage, whose masks are the same."""
    name, _, own = job.CASES[case]
    strategy: Any = one_device()
    if case == "dropout":
        strategy = RPCSequentialStrategy(microbatches=2, checkpoint="never")
    made = job.made(name)
    seed_everything(0)  # as Lightning does when several processes connect
    model, trainer = job.fit(made, strategy, 1, **{**own, **settings})
    trainer.save_checkpoint(folder / f"{case}.ckpt")
    return {**job.seen(model, trainer), "validated": trainer.validate(model, verbose=False)[0]}


def compared(stages: int, parts: int, replicas: int, cases: Sequence[str], by_torchrun: bool = False) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name), Path(name) / "single"
        if "resumed" in cases:
            single("resumed", other, max_epochs=1)
            (other / "resumed.ckpt").rename(folder / "before resumed.ckpt")
        arguments = [job.__file__, name, *map(str, (stages, parts, replicas)), *cases]
        if by_torchrun:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            subprocess.run(
                [*launch, str(stages * parts * replicas), *arguments], env=environment(), check=True, timeout=300
            )
        else:
            assert Script(*arguments).wait(timeout=300) == 0
        results = torch.load(folder / "results.pt")
        for case in cases:
            expected, actual = single(case, other), results[case]
            exact = 1e-9 if case != "mixtral" else IN_FLOAT32
            if case == "resumed":
                expected["losses"] = expected["losses"][-len(actual["losses"]) :]
            if case != "reduced":  # replicas keep their share of the states; the checkpoint has all
                alike(actual["states"], expected["states"], exact, f"{case} states")
            alike(actual["weights"], expected["weights"], exact, f"{case} weights")
            for part in ("losses", "metrics", "validated"):
                alike(actual[part], expected[part], IN_FLOAT32, f"{case} {part}")
            ours, theirs = (torch.load(path / f"{case}.ckpt", weights_only=True) for path in (folder, other))
            alike(ours["state_dict"], theirs["state_dict"], exact, f"{case} checkpoint")
            alike(ours["optimizer_states"], theirs["optimizer_states"], exact, f"{case} checkpoint")


def test_two_parts_of_two_stages() -> None:
    run(
        compared,
        2,
        2,
        1,
        ["llama", "tied", "qwen3", "gpt2", "bert", "accumulated", "resumed", "lr_find"],
        timeout_seconds=390,
    )


DIFFERENT_LOSSES = "have computed different losses from one batch"


def told(case: str, fails: bool = True) -> str:
    with tempfile.TemporaryDirectory() as name:
        script = Script(job.__file__, name, "1", "2", "1", case, stderr=subprocess.PIPE)
        _, said = script.communicate(timeout=100)
        assert bool(script.returncode) == fails, said
        return str(said)


def test_a_loss_that_depends_on_a_part() -> None:
    assert DIFFERENT_LOSSES in run(told, "penalised", False, timeout_seconds=110)
    assert DIFFERENT_LOSSES not in run(told, "llama", False, timeout_seconds=110)


def test_a_norm_of_parts() -> None:
    said = run(told, "clipped by hand", timeout_seconds=110)
    assert "of which each has the whole, to different values." in said


def test_a_plan_that_sums_whole_gradients() -> None:
    said = run(told, "summed twice", timeout_seconds=110)
    assert (
        "gives a LlamaRMSNorm the style 'replicated_with_grad_allreduce', which is for a layer whose input is" in said
    )


@pytest.mark.nightly
@pytest.mark.parametrize("cases", [["mixtral", "dropout", "1f1b"], ["zb-h1", "interleaved", "zbv", "v-half"]], ids=str)
def test_more_models_and_schedules(cases: list[str]) -> None:
    run(compared, 2, 2, 1, cases, timeout_seconds=390)


@pytest.mark.nightly
def test_measured_balances_and_schedules() -> None:
    run(compared, 2, 2, 1, ["auto", "by_size", "by_time"], timeout_seconds=390)


@pytest.mark.nightly
def test_parts_and_replicas() -> None:
    run(compared, 2, 2, 2, ["llama", "reduced"], timeout_seconds=390)


@pytest.mark.nightly
def test_ranks_of_torchrun() -> None:
    run(compared, 2, 2, 1, ["llama", "1f1b"], True, timeout_seconds=390, allow=("tmp",))  # of torchrun


@pytest.mark.nightly
def test_four_parts_of_one_stage() -> None:
    run(compared, 1, 4, 1, ["gpt2", "dropout"], timeout_seconds=390)
