"""Jobs on a SLURM of two hosts, with the batch script of the documentation: they train what one process trains.

Real daemons run in namespaces. What a job leaves on a host (processes, shared memory, temporary files) fails its test.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from paths import PYTHONPATH, ROOT
from slurm_cluster import CAN_HAVE_CLUSTER, NO_CLUSTER, Cluster, Job, slurm_cluster

SECONDS = 300.0
"""Of a job: four interpreters that import torch, on a machine that does other work."""

PIPELINE: dict[str, Any] = {
    "class_path": "strategies.RPCSequentialStrategy",
    "init_args": {"microbatches": 3, "balance": "even"},
}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CAN_HAVE_CLUSTER, reason=NO_CLUSTER),
]


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.setenv("PYTHONWARNINGS", "ignore")
        with slurm_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
            yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    yield running_cluster
    running_cluster.clear()


def pipeline(**options: Any) -> dict[str, Any]:
    return {**PIPELINE, "init_args": {**PIPELINE["init_args"], **options}}


def configuration(folder: Path, strategy: Any, seconds: float = 0.0, shuffle: bool = False) -> Path:
    """Write a configuration whose results will be in a folder. A layer takes some seconds in the first run."""
    folder.mkdir()
    checkpoint = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": {"save_last": True}}
    checkpoint["init_args"]["dirpath"] = str(folder)
    notes = {"class_path": "cluster_models.Notes", "init_args": {"folder": str(folder)}}
    trainer = {
        "accelerator": "cpu",
        "precision": "64-true",
        "max_epochs": 2,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_progress_bar": False,
        "strategy": strategy,
        "callbacks": [checkpoint, notes],
    }
    data = {"class_path": "cluster_models.ClusterData", "init_args": {"shuffle": shuffle}}
    model = {"class_path": "cluster_models.ClusterNet", "init_args": {"seconds": seconds}}
    settings = {"seed_everything": 7, "trainer": trainer, "model": model, "data": data}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def script(config: Path, **options: str) -> str:
    """The script of the documentation with other paths; ``options`` replace those of ``sbatch``."""
    (script,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.DOTALL)
    changes = {"configs/pipeline.yaml": str(config), "/shared/relay": str(config.parent)}
    for name, value in {"cpus_per_task": "1", **options}.items():
        option = name.replace("_", "-")
        (given,) = re.findall(rf"#SBATCH --{option}=\S+", script)
        changes[given] = f"#SBATCH --{option}={value}"
    for before, after in changes.items():
        assert before in script
        script = script.replace(before, after)
    return script


def results(folder: Path) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Epoch, batch and loss of all batches, and the weights after the last one."""
    losses = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    return losses, torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]


def of_one_process(folder: Path, *, shuffle: bool = False) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    config = configuration(folder, "auto", shuffle=shuffle)
    command = [sys.executable, "-m", "trainer", "fit", "--config", str(config), "--trainer.devices=1"]
    variables = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, env=variables, cwd=folder, check=True, timeout=SECONDS)
    return results(folder)


def assert_equal(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    (losses, weights), (expected_losses, expected_weights) = found, expected
    assert [each[:2] for each in losses] == [each[:2] for each in expected_losses]
    assert [each[2] for each in losses] == pytest.approx([each[2] for each in expected_losses], rel=1e-9)
    assert weights.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(pipeline(), id="four stages"),
        pytest.param(pipeline(data_parallel_size=2, schedule="1f1b"), id="two replicas"),
        pytest.param(pipeline(tensor_parallel_size=2), id="two parts"),
        pytest.param(pipeline(data_parallel_size=2, zero_stage=3), id="divided parameters"),
        pytest.param("ddp", id="ddp"),
        pytest.param("zero", id="zero"),
    ],
)
def test_a_job_trains_what_one_process_trains(strategy: Any, cluster: Cluster, tmp_path: Path) -> None:
    config = configuration(tmp_path / "job", strategy)
    job = cluster.submit(script(config))
    assert job.wait(SECONDS) == "COMPLETED", job.said()
    assert cluster.left() == []
    assert_equal(results(tmp_path / "job"), of_one_process(tmp_path / "alone"))


def started(config: Path, cluster: Cluster, num_batches: int, **options: str) -> Job:
    """Start a job, and return when it has trained a number of batches."""
    job = cluster.submit(script(config, **options))
    file = config.parent / "losses"
    job.until(lambda: file.exists() and file.read_text().count("\n") >= num_batches, SECONDS)
    return job


def by_the_time_limit(job: Job) -> None:
    """Set the limit so that SLURM sends the signal of ``--signal`` the next time it looks, which it does every 30 s."""
    hours, minutes, _ = map(int, job.shown("RunTime").split(":"))
    job.cluster.command("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * hours + minutes + 2}")


def by_scancel(job: Job) -> None:
    job.cluster.command("scancel", "--signal=USR1", job.number)


@pytest.mark.parametrize(
    ("strategy", "seconds", "shuffle", "warn"),
    [
        pytest.param(pipeline(), 0.5, True, by_the_time_limit, id="pipeline"),
        pytest.param(pipeline(data_parallel_size=2), 0.1, False, by_scancel, id="two replicas"),
        pytest.param("ddp", 0.3, False, by_scancel, id="ddp"),
    ],
)
def test_a_job_that_nears_its_end_continues_in_mid_epoch(
    strategy: Any, seconds: float, shuffle: bool, warn: Callable[[Job], None], cluster: Cluster, tmp_path: Path
) -> None:
    """SLURM's signal comes in the middle of a step. The job saves and requeues itself, and SLURM starts it again."""
    config = configuration(tmp_path / "job", strategy, seconds, shuffle)
    job = started(config, cluster, 3, signal="SIGUSR1@120")
    warn(job)
    job.until(lambda: job.shown("Restarts") == "1", SECONDS)
    assert job.wait(SECONDS) == "COMPLETED", job.said()
    assert cluster.left() == []
    (losses, weights), alone = results(tmp_path / "job"), of_one_process(tmp_path / "alone", shuffle=shuffle)
    saved = torch.load(tmp_path / "job" / "hpc_ckpt_1.ckpt", weights_only=False)
    assert 0 < saved["global_step"] < len(alone[0]), "the signal came too late"
    # SLURM takes a moment to end the first run: until then, it trains on batches that the second run trains on again.
    num_again = len(alone[0]) - saved["global_step"]
    assert_equal((losses[: saved["global_step"]] + losses[-num_again:], weights), alone)
    assert f"Restored all states from the checkpoint at {tmp_path}/job/hpc_ckpt_1.ckpt" in job.said()


def test_a_cancelled_job_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    job = started(configuration(tmp_path / "job", pipeline(), 0.2), cluster, 3)
    cluster.command("scancel", job.number)
    assert job.wait(30) == "CANCELLED"
    assert cluster.left() == []


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        pytest.param(1, r"process \d+ \(rank 1\) on node1, has ended", id="worker on the driver's host"),
        pytest.param(3, r"process \d+ \(rank 3\) on node2", id="worker on the other host"),
        pytest.param(0, r"its driver, rank 0, is gone", id="driver"),
    ],
)
def test_a_killed_task_ends_the_job(rank: int, says: str, cluster: Cluster, tmp_path: Path) -> None:
    job = started(configuration(tmp_path / "job", pipeline(), 0.2), cluster, 3)
    os.kill(job.task(rank), signal.SIGKILL)
    assert job.wait(30) == "FAILED"
    assert re.search(says, job.said()), job.said()
    assert cluster.left() == []


def test_forgotten_num_nodes_are_one_line(cluster: Cluster, tmp_path: Path) -> None:
    forgotten = script(configuration(tmp_path / "job", pipeline())).replace(" --trainer.num_nodes=2", "")
    job = cluster.submit(forgotten)
    assert job.wait(SECONDS) == "FAILED"
    assert "Traceback" not in job.said()
    assert len(re.findall("^error: SLURMEnvironment has started 4 processes, but", job.said(), re.MULTILINE)) == 1
    assert cluster.left() == []


def test_a_killed_worker_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    """The rank on the other host supervises its worker. SLURM does not notice."""
    strategy = pipeline(recovery={"max_restarts": 1})
    job = started(configuration(tmp_path / "job", strategy, 0.2), cluster, 3)
    os.kill(job.worker(3), signal.SIGKILL)
    assert job.wait(SECONDS) == "COMPLETED", job.said()
    assert "rank 3: its worker was killed by signal 9" in job.said()
    assert cluster.left() == []
    assert_equal(results(tmp_path / "job"), of_one_process(tmp_path / "alone"))
