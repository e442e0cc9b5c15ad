"""A script that trains under Ray Train, on a cluster of two Ray nodes on this host: ``ray_job.py CASE ...``.

Prints one line of JSON for each case: the last loss that Ray has received and that of a validation after it, the
largest difference between the weights of the last checkpoint and those of one process, and how often the function began
on rank 0.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import Recovery
from strategies.ray import RayDDPStrategy, RayRPCSequentialStrategy, RayZeROStrategy

WIDTH, ROWS, EPOCHS = 8, 32, 4
ONCE = "kill"
"""The file whose existence makes the first layer end its process, once."""

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": RayDDPStrategy, "workers": 2},
    "zero": {"strategy": RayZeROStrategy, "workers": 2},
    "pipeline": {"strategy": RayRPCSequentialStrategy, "workers": 2, "arguments": {"schedule": "1f1b"}},
    "replicas": {
        "strategy": RayRPCSequentialStrategy,
        "workers": 4,
        "arguments": {"data_parallel_size": 2},
        "drivers": 2,
    },
    "replay": {
        "strategy": RayRPCSequentialStrategy,
        "workers": 2,
        "arguments": {"recovery": Recovery(max_restarts=1)},
        "kills": True,
    },
    "restart": {"strategy": RayRPCSequentialStrategy, "workers": 2, "arguments": {}, "kills": True},
    "error": {"strategy": RayRPCSequentialStrategy, "workers": 2, "arguments": {}, "raises": True},
}


class Layer(nn.Linear):
    """The first layer, which a worker computes."""

    def __init__(self, folder: str, raises: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kill_file, self.raises = os.path.join(folder, ONCE), raises

    def forward(self, rows: Tensor) -> Tensor:
        if self.raises:
            raise ZeroDivisionError("the layer does not work")
        if os.path.exists(self.kill_file):
            os.remove(self.kill_file)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(rows)


class Net(pl.LightningModule):
    def __init__(self, folder: str, *, kills: bool = False, raises: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [Layer(folder, raises), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))]
        self.sequential_module = nn.Sequential(*layers).double()
        self.folder, self.kills = folder, kills

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.sequential_module(batch) - 1).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def on_train_epoch_start(self) -> None:
        once = Path(self.folder) / "done"
        if self.kills and self.trainer.current_epoch == 2 and self.trainer.is_global_zero and not once.exists():
            once.touch()
            (Path(self.folder) / ONCE).touch()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", (self.sequential_module(batch) - 1).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def train(config: dict[str, Any]) -> None:
    case, folder = config["case"], config["folder"]
    context = ray.train.get_context()
    if context.get_world_rank() == 0:
        with (Path(folder) / "begun").open("a") as file:
            file.write("x")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=case["strategy"](**({"balance": "even", **case["arguments"]} if "arguments" in case else {})),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer = prepare_trainer(trainer)
    model = Net(folder, kills=case.get("kills", False), raises=case.get("raises", False))
    # Lightning's sampler divides the rows among the ranks that train.
    data = DataLoader(rows(), batch_size=ROWS // case.get("drivers", 1 if "arguments" in case else case["workers"]))
    found = ray.train.get_checkpoint()
    with found.as_directory() if found else tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "checkpoint.ckpt") if found else None
        trainer.fit(model, data, ckpt_path=path)
    trainer.validate(model, data, verbose=False)  # all ranks return from fit
    ray.train.report({})
    if trainer.is_global_zero:
        (Path(folder) / "validation").write_text(str(trainer.callback_metrics["validation"].item()))


def run(name: str, storage: str) -> dict[str, Any]:
    case, folder = CASES[name], tempfile.mkdtemp(dir=storage)
    began = time.monotonic()
    trainer = TorchTrainer(
        train,
        train_loop_config={"case": case, "folder": folder},
        scaling_config=ScalingConfig(num_workers=case["workers"]),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=int("restart" in name))),
    )
    try:
        result = trainer.fit()
    except ray.train.WorkerGroupError as error:
        return {"case": name, "error": str(error)}
    assert result.checkpoint is not None
    alone = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net(folder)
    alone.fit(model, DataLoader(rows(), batch_size=ROWS))
    fitted = dict(alone.callback_metrics)
    (validated,) = alone.validate(model, DataLoader(rows(), batch_size=ROWS), verbose=False)
    saved = torch.load(os.path.join(result.checkpoint.path, "checkpoint.ckpt"), weights_only=False)["state_dict"]
    differences = [(saved[key] - value).abs().max().item() for key, value in model.state_dict().items()]
    return {
        "case": name,
        "losses": [result.metrics["loss"], float((Path(folder) / "validation").read_text())],
        "losses_alone": [fitted["loss"].item(), validated["validation"]],
        "difference": max(differences),
        "begun": len((Path(folder) / "begun").read_text()),
        "seconds": round(time.monotonic() - began, 1),
    }


def main(names: list[str]) -> None:
    node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
    ray.init(address=cluster.address)
    try:
        with tempfile.TemporaryDirectory() as storage:
            for name in names:
                print(json.dumps(run(name, storage)), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
