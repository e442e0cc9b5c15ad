"""``trainer.verify`` with workers and ranks: sound models are never called wrong, faults of a stage are found there."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sound_models
import torch
from harness import OWN_SERVER, run
from model_families import workers_import_transformers
from paths import PYTHONPATH
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from verified_nets import Logging, SumLoss, VerifiedData, VerifiedNet
from verifying import verified

from strategies import DDPStrategy, RPCSequentialStrategy, Schedule, ZeROStrategy
from trainer import verify
from trainer.verification.certificate import DOCUMENTED, EQUAL, WRONG
from trainer.verification.certificate_report import as_dict

pytestmark = pytest.mark.timeout(300)

TWO, FOUR = [4, 3], [2, 2, 2, 1]


class NormOfTheDriver(RPCSequentialStrategy):
    """Computes the norm over the driver's stage alone, as the strategies of peers have done."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, optimizer: Any = None) -> torch.Tensor:
        assert self.pipeline is not None
        own = list(self.pipeline.stages[-1].parameters())
        return torch.nn.utils.clip_grad_norm_(own, max_norm, norm_type)


def certificates(
    cases: Sequence[tuple[str, dict[str, Any]]], kind: type = RPCSequentialStrategy, **arguments: Any
) -> list[Any]:
    """Verifies one model after another, given its extra layer and the settings of the pipeline."""
    found = []
    for extra, settings in cases:
        model = SumLoss() if extra == "root of the loss" else VerifiedNet(extra)
        options = {"microbatches": 3, "balance": TWO, **settings}
        found.append(verified(model, VerifiedData(), kind(**options), **arguments))
    return found


SOUND: list[tuple[str, dict[str, Any], str, str]] = [
    ("none", {}, EQUAL, ""),
    ("none", {"schedule": "1f1b"}, EQUAL, ""),
    ("none", {"schedule": "interleaved", "balance": FOUR}, EQUAL, ""),
    ("none", {"schedule": "zb-h1"}, EQUAL, ""),
    ("none", {"schedule": "zbv", "balance": FOUR}, EQUAL, ""),
    ("none", {"schedule": "v-half", "balance": FOUR}, EQUAL, ""),
    ("none", {"checkpoint": "always"}, EQUAL, ""),
    ("none", {"checkpoint": "never", "schedule": Schedule(pipelined_backward=False)}, EQUAL, ""),
    ("none", {"microbatches": 1}, EQUAL, ""),
    ("counting", {"checkpoint": "never"}, EQUAL, ""),
    ("counting", {}, EQUAL, ""),
    ("root of the loss", {}, EQUAL, ""),
    ("root of the loss", {"schedule": "1f1b"}, DOCUMENTED, "no mean over the rows"),
    ("batch norm", {}, DOCUMENTED, "BatchNorm"),
    ("batch norm", {"schedule": "1f1b"}, DOCUMENTED, "BatchNorm"),
    ("batch norm", {"deferred_batch_norm": True}, DOCUMENTED, "BatchNorm"),
    ("dropout", {}, DOCUMENTED, "random numbers"),
    ("dropout", {"schedule": "1f1b"}, DOCUMENTED, "random numbers"),
    ("dropout", {"schedule": "zbv", "balance": FOUR}, DOCUMENTED, "random numbers"),
]
"""Extra layer, settings, verdict and reason."""


def test_a_sound_model_is_equal() -> None:
    (found,) = run(certificates, [("none", {"schedule": "1f1b"})])
    assert (found["verdict"], found["precision"]) == (EQUAL, "float64")
    assert found["facts"]["runs"] == ["one process", "the strategy"]  # twice the steps of one process
    assert found["compared"]["gradients"] == {**found["compared"]["gradients"], "values": 24}


class StepsLate(VerifiedNet):
    """Steps itself, after every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def steps_late() -> tuple[str, Any]:
    """Verifies a model that steps late; returns why one step is refused, and the certificate of three steps."""

    def verify_steps(steps: int) -> Any:
        return verified(StepsLate(), VerifiedData(), RPCSequentialStrategy(microbatches=3), devices=1, steps=steps)

    with pytest.raises(MisconfigurationException) as refused:
        verify_steps(1)
    return str(refused.value), verify_steps(3)


def test_a_run_without_a_step_is_refused_and_one_with_fewer_steps_says_so() -> None:
    refused, found = run(steps_late)
    assert refused == (
        "The model made 0 of 1 optimizer steps, because it does not step after every batch. There is no step to "
        "compare; set steps to at least the number of batches of one optimizer step."
    )
    assert (found["verdict"], found["steps"], found["compared"]["losses"]["values"]) == (EQUAL, 1, 3)
    assert found["notes"] == [
        "The model made 1 of 3 optimizer steps, because it does not step after every batch. A larger number of steps "
        "compares more."
    ]


@pytest.mark.slow
def test_sound_models_are_not_called_wrong() -> None:
    found = run(certificates, [case[:2] for case in SOUND], timeout_seconds=280)
    assert [each["verdict"] for each in found] == [case[2] for case in SOUND]
    for each, (extra, settings, _, reason) in zip(found, SOUND, strict=True):
        assert sum(each["facts"]["steps of runs"]) <= 9  # three times the steps
        assert reason in "".join(each["reasons"]), (extra, settings)


def verdicts(names: Sequence[str]) -> dict[str, Any]:
    """Verifies sound models; returns their certificates."""
    workers_import_transformers()
    found = {}
    for name in names:
        sound = sound_models.SOUND[name]
        strategy = RPCSequentialStrategy(**{"microbatches": 3, "balance": "even", **sound.options})
        found[name] = verified(sound.make(), sound.loader(), strategy, **{"steps": 2, **sound.arguments})
    return found


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.slow if part < 2 else pytest.mark.nightly) for part in range(10)]
)
def test_many_sound_models_are_not_called_wrong(part: int) -> None:
    names = list(sound_models.SOUND)[part::10]
    found = run(verdicts, names, timeout_seconds=280, env=OWN_SERVER)
    wanted = {name: EQUAL if sound_models.SOUND[name].is_equal else DOCUMENTED for name in names}
    assert {name: each["verdict"] for name, each in found.items()} == wanted, found


@pytest.mark.slow
def test_faults_of_a_worker_are_found_on_its_stage() -> None:
    scaled, left_out, late, drawn = run(
        certificates,
        [
            ("scaled", {"schedule": "1f1b"}),
            ("rows left out", {"checkpoint": "never"}),
            ("late", {"checkpoint": "never"}),
            ("numpy", {"schedule": "1f1b"}),
        ],
        timeout_seconds=280,
    )
    assert {each["verdict"] for each in (scaled, left_out, late, drawn)} == {WRONG}
    for each in (scaled, left_out):
        assert (each["origin"]["part"], each["origin"]["step"]) == ("gradients", 0)
        assert (each["origin"]["layer"], each["origin"]["stage"]) == ("sequential_module.2", "stage 0")
    assert "0.5 times" in scaled["origin"]["what"]
    assert "direction" in left_out["origin"]["what"]
    assert late["origin"]["part"] == "losses"
    assert "'sequential_module.3' draws from numpy.random" in drawn["origin"]["advice"]


@pytest.mark.slow
def test_a_norm_over_one_stage_is_found() -> None:
    (found,) = run(certificates, [("none", {"balance": [6, 1]})], NormOfTheDriver)
    assert found["origin"]["part"] == "global norm"
    assert "norm of stage 1 (the driver) alone" in found["origin"]["what"]


# Less than float32: the limits are four times what micro-batches alone change in one process


@pytest.mark.parametrize(
    "precision",
    [pytest.param("bf16-mixed", marks=pytest.mark.slow), pytest.param("bf16-true", marks=pytest.mark.nightly)],
)
def test_bfloat16(precision: str) -> None:
    cases = [
        ("none", {}),
        ("none", {"schedule": "1f1b"}),
        ("dropout", {"schedule": "1f1b"}),
        ("scaled", {"schedule": "1f1b"}),
        ("rows left out", {"checkpoint": "never"}),
    ]
    whole, parts, dropout, *faults = run(partial(certificates, precision=precision), cases, timeout_seconds=280)
    assert [each["verdict"] for each in (whole, parts, dropout)] == [EQUAL, EQUAL, DOCUMENTED]
    for each in (whole, parts, dropout):
        assert each["precision"] == "bfloat16" and each["limit_is_measured"]
        assert each["explained_by_microbatches"] > 0 and each["limit"] < (0.1 if precision == "bf16-mixed" else 0.18)
    for each in faults:
        assert (each["verdict"], each["origin"]["part"]) == (WRONG, "gradients")
        assert each["origin"]["stage"] == "stage 0"
        if precision == "bf16-mixed":  # otherwise the gradients of this layer are within rounding
            assert each["origin"]["layer"] == "sequential_module.2"


# Ranks, and the command


def with_ranks(settings: dict[str, Any]) -> Any:
    """Verifies under DDP or ZeRO, in processes of their own."""
    before = sorted(Path.cwd().rglob("*"))
    stage = settings.pop("stage", None)
    strategy = DDPStrategy(**settings) if stage is None else ZeROStrategy(stage=stage, **settings)
    model = Logging("dropout and batch norm")
    found = verify(model, VerifiedData(), strategy=strategy, accelerator="cpu", devices=2, steps=2)
    assert sorted(Path.cwd().rglob("*")) == before
    return as_dict(found)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"stage": 1}, marks=pytest.mark.nightly),
        pytest.param({"stage": 2, "overlap_with_ddp": True}, marks=pytest.mark.slow),
        pytest.param({"stage": 3}, marks=pytest.mark.nightly),
    ],
)
def test_ranks(settings: dict[str, Any]) -> None:
    found = run(with_ranks, settings, timeout_seconds=280)
    assert (found["verdict"], found["reference"]) == (DOCUMENTED, "one process")  # with the masks of every rank
    assert "first rank" in found["reasons"][0]
    assert ("gradients" in found["compared"]) == ("overlap_with_ddp" not in settings)
    assert found["compared"]["logged values"]["values"] > 50 and not any("Logged" in note for note in found["notes"])


def with_measured_rounding() -> Any:
    """Verifies under ZeRO in bfloat16."""
    strategy = ZeROStrategy(stage=2)
    arguments: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "steps": 2, "precision": "bf16-mixed"}
    return as_dict(verify(VerifiedNet(), VerifiedData(), strategy=strategy, **arguments))


@pytest.mark.nightly
def test_ranks_in_bfloat16() -> None:
    found = run(with_measured_rounding, timeout_seconds=280)
    assert (found["verdict"], found["reference"]) == (EQUAL, "one process")
    assert found["limit_is_measured"] and found["limit"] < 0.1


def with_replicas(extra: str, schedule: str, zero_stage: int) -> Any:
    """Verifies two replicas of two stages."""
    options = {"microbatches": 3, "schedule": schedule, "data_parallel_size": 2, "zero_stage": zero_stage}
    strategy = RPCSequentialStrategy([4, 3], **options)
    return as_dict(verify(Logging(extra), VerifiedData(), strategy=strategy, accelerator="cpu", devices=4, steps=2))


@pytest.mark.timeout(600)  # five runs of four processes
@pytest.mark.parametrize(
    "extra, schedule, zero_stage, reason",
    [
        pytest.param("none", "1f1b", 0, "('largest', 'largest_step', 'largest_epoch')", marks=pytest.mark.slow),
        pytest.param("none", "1f1b", 2, "('largest', 'largest_step', 'largest_epoch')", marks=pytest.mark.nightly),
        pytest.param("none", "1f1b", 3, "('largest', 'largest_step', 'largest_epoch')", marks=pytest.mark.nightly),
        pytest.param("dropout", "gpipe", 0, "", marks=pytest.mark.nightly),
    ],
)
def test_replicas(extra: str, schedule: str, zero_stage: int, reason: str) -> None:
    found = run(with_replicas, extra, schedule, zero_stage, timeout_seconds=580)
    assert found["verdict"] == DOCUMENTED
    assert any(reason in each for each in found["reasons"])
    assert found["compared"]["gradients"] == {**found["compared"]["gradients"], "values": 16}
    assert found["facts"]["balance"] == [4, 3]


CONFIG = """
model:
  class_path: verified_nets.VerifiedNet
  init_args:
    extra: {extra}
data: verified_nets.VerifiedData
trainer:
  accelerator: cpu
  devices: 2
  default_root_dir: run
  callbacks: verified_nets.Writing
  strategy:
    class_path: strategies.RPCSequentialStrategy
    init_args: {{schedule: 1f1b, microbatches: 3, balance: [4, 3]}}
"""


def command(extra: str) -> tuple[int, str, str]:
    """Runs the command in an empty folder; returns its status, its output and the certificate."""
    Path("config.yaml").write_text(CONFIG.format(extra=extra))
    arguments = ["verify", "--config=config.yaml", "--steps=2", "--json=found.json"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "trainer", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert sorted(path.name for path in Path.cwd().rglob("*")) == ["config.yaml", "found.json"], done.stderr
    return done.returncode, done.stdout, Path("found.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["none", "scaled"])
def test_the_command_writes_a_certificate_and_nothing_else(extra: str) -> None:
    status, said, written = run(command, extra, timeout_seconds=280)
    found = json.loads(written)
    assert (status, found["verdict"]) == ((0, EQUAL) if extra == "none" else (1, WRONG))
    assert f"Verdict: {found['verdict']}" in said
    assert "Callbacks that were left out: Writing." in said


# Ranks that a launcher has started


def torchrun(strategy: str) -> tuple[int, str, str]:
    """Runs the command in two ranks of torchrun; returns its status, what both print, and the certificate."""
    Path("config.yaml").write_text(CONFIG.format(extra="none"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer"]
    arguments = ["verify", "--config=config.yaml", "--steps=2", "--json=found.json"]
    if strategy != "rpc_sequential":
        arguments.append(f"--trainer.strategy={strategy}")
    done = subprocess.run(
        [sys.executable, *launch, *arguments],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=270,
    )
    assert sorted(path.name for path in Path.cwd().rglob("*")) == ["config.yaml", "found.json"], done.stdout
    return done.returncode, done.stdout, Path("found.json").read_text()


@pytest.mark.parametrize(
    "strategy",
    [pytest.param("rpc_sequential", marks=pytest.mark.slow), pytest.param("zero", marks=pytest.mark.nightly)],
)
def test_ranks_of_torchrun(strategy: str) -> None:
    status, said, written = run(torchrun, strategy, timeout_seconds=280, allow=("tmp",))  # torchrun leaves its logs
    assert (status, json.loads(written)["verdict"]) == (0, EQUAL), said
    assert said.count("Verdict: ") == 1


def tasks(extra: str) -> tuple[list[int], str]:
    """Runs the command in two tasks of SLURM; returns the status of each, and what both print."""
    Path("config.yaml").write_text(CONFIG.format(extra=extra))
    variables = {
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "relay", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"},
        **{"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "trainer", "verify", "--config=config.yaml", "--steps=2"],
            env={**os.environ, **variables, "PYTHONPATH": PYTHONPATH, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [each.communicate(timeout=270)[0] for each in started]
    return [each.returncode for each in started], "\n".join(said)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_the_status_is_the_same_in_all_ranks() -> None:
    statuses, said = run(tasks, "scaled", timeout_seconds=280)
    assert statuses == [1, 1], said
    assert said.count("Verdict: wrong") == 1
    assert "gradients of 'sequential_module.2' on stage 0" in said


@pytest.mark.slow
def test_a_model_that_fails_on_a_worker_is_an_error_in_all_ranks() -> None:
    statuses, said = run(tasks, "failing", timeout_seconds=280)
    assert statuses == [1, 1], said
    assert "the model does not train under RPCSequentialStrategy: ArithmeticError: only on workers" in said
