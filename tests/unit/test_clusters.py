"""The files on the page on clusters: shell and YAML are valid, and have what their programs require."""

import re
import subprocess
from typing import Any

import yaml
from paths import ROOT

PAGE = (ROOT / "docs" / "clusters.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def document(kind: str) -> Any:
    (found,) = (each for each in map(yaml.safe_load, blocks("yaml")) if each.get("kind", "SkyPilot") == kind)
    return found


def check_shell(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_script_of_slurm() -> None:
    (script,) = blocks("bash")
    check_shell(script)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert len(options) == script.count("#SBATCH")
    assert f"--trainer.devices={options['ntasks-per-node']}" in script
    assert f"--trainer.num_nodes={options['nodes']}" in script
    assert re.fullmatch(r"SIGUSR1@\d+", options["signal"]) and options["requeue"] == ""


def test_the_job_of_the_kubeflow_trainer() -> None:
    job = document("TrainJob")
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1" and job["metadata"]["name"]
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"] and trainer["args"][:3] == ["-m", "trainer", "fit"]
    assert f"--trainer.devices={trainer['numProcPerNode']}" in trainer["args"]
    assert f"--trainer.num_nodes={trainer['numNodes']}" in trainer["args"]


def test_the_job_of_the_training_operator() -> None:
    job = document("PyTorchJob")
    assert job["apiVersion"] == "kubeflow.org/v1" and job["metadata"]["name"]
    assert isinstance(job["spec"]["nprocPerNode"], str)  # a number is refused
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    num_nodes = sum(each["replicas"] for each in replicas.values())
    for each in replicas.values():
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        assert container["command"][:4] == ["torchrun", "-m", "trainer", "fit"]
        assert f"--trainer.num_nodes={num_nodes}" in container["command"]


def test_the_file_of_skypilot() -> None:
    task = document("SkyPilot")
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "setup", "run"}
    check_shell(task["run"])
    assert "--nnodes=$SKYPILOT_NUM_NODES --node-rank=$SKYPILOT_NODE_RANK" in task["run"]


def test_the_configuration_exists() -> None:
    assert "configs/pipeline.yaml" in PAGE and (ROOT / "configs" / "pipeline.yaml").exists()
