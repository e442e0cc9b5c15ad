"""DataParallelStrategy: where it is refused, and what it makes of what its replicas give.

Replicas need GPUs. On the CPU, ``DataParallel`` runs the model itself on the whole batch; ``InParts`` has it run the
model on one part of the rows after the other instead, which is all that replicas do to results.
"""

import subprocess
import sys
from importlib import import_module
from operator import is_
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from harness import run
from paths import ROOT
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from strategies import DataParallelStrategy, StrategyPlugin
from strategies.data_parallel.dp import ReplicaResult, _UngatheredReplicas, merged
from trainer import Trainer
from trainer.cli import main

ON_CPU = (
    "strategy='dp' splits a batch over several GPUs in one process; on CPU use strategy='ddp', which has a process for "
    "each of devices=2"
)
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "precision": "64-true",
    "max_epochs": 2,
}


# Where it is refused


def test_on_cpu_the_other_strategy_is_named() -> None:
    with pytest.raises(MisconfigurationException, match=ON_CPU):
        Trainer(strategy="dp", accelerator="cpu", devices=2, logger=False)
    with pytest.raises(MisconfigurationException, match=ON_CPU):
        pl.Trainer(strategy=DataParallelStrategy(), accelerator="cpu", devices=2, logger=False)


@pytest.mark.parametrize("strategy", ["dp", "{class_path: strategies.DataParallelStrategy}"])
def test_on_cpu_the_command_line_says_it_in_one_line(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything leaves its seed in the environment
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(yaml_for(strategy, tmp_path))])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {ON_CPU}"


@pytest.mark.slow
def test_on_cpu_the_command_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "trainer", "fit", "--config", str(yaml_for("dp", tmp_path))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, f"error: {ON_CPU}")


def yaml_for(strategy: str, folder: Path) -> Path:
    """The configuration of DDP's experiment, with another strategy."""
    text, file = (ROOT / "configs/ddp.yaml").read_text(), folder / "dp.yaml"
    block = "  strategy:\n    class_path: strategies.DDPStrategy\n"
    assert block in text
    file.write_text(text.replace(block, f"  strategy: {strategy}\n"))
    return file


def test_one_gpu_is_too_few() -> None:
    strategy = DataParallelStrategy(parallel_devices=[torch.device("cuda", 0)])
    with pytest.raises(MisconfigurationException, match="over several GPUs in one process, got 1; give the Trainer"):
        strategy._configure_launcher()


def test_several_processes_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    strategy = DataParallelStrategy(parallel_devices=[torch.device("cuda", i) for i in range(2)])
    strategy.cluster_environment = TorchElasticEnvironment()
    with pytest.raises(MisconfigurationException, match="is for one process, but several have been started"):
        strategy._configure_launcher()


def test_fulfils_the_contract_itself() -> None:
    for member in StrategyPlugin.__abstractmethods__ - {"root_device"}:
        if member in vars(StrategyPlugin):
            assert vars(DataParallelStrategy)[member].__doc__


# What it makes of what replicas give


def test_a_step_may_use_the_parameters_of_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(import_module("torch.nn.parallel.replicate"), "_broadcast_coalesced_reshape", copied)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    whole = nn.Sequential(model, torch.jit.script(nn.Linear(3, 3)))  # torch leaves it without parameters
    replicas = _UngatheredReplicas(whole).replicate(whole, [0, 1])
    for replica in (own[0] for own in replicas):
        assert [name for name, _ in replica.named_parameters()] == [name for name, _ in model.named_parameters()]
        torch.stack([parameter.pow(2).sum() for parameter in replica.parameters()]).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.equal(4 * parameter)


class OnCPU(DataParallelStrategy):
    """Is not refused on the CPU."""

    def _check_devices(self) -> None:
        pass


class InParts(OnCPU):
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        assert self._replicas is not None
        self._replicas = _InParts(self._replicas.module)


class _InParts(_UngatheredReplicas):
    def forward(self, name: str, autocast: Any, batch: list[Tensor], *others: Any) -> list[ReplicaResult]:
        parts = zip(*(tensor.tensor_split(2) for tensor in batch), strict=True)
        return self.gather([self.module(name, autocast, list(part), *others) for part in parts], None)


class Net(pl.LightningModule):
    """Logs in every way; returns a dict, and from ``predict_step`` rows; the last batch has 7 rows, 4 and 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        assert batch[0].device == self.device
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"rows": float(len(batch[0])), "halved": loss.detach() / 2}, batch_size=len(batch[0]))
        return {"loss": loss, "errors": (self.net(batch[0]) - batch[1]).detach(), "name": "step"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["errors"].shape == batch[1].shape and outputs["name"] == "step"
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def loader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(23, 4, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=8)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def outcome(strategy: Any, **kwargs: Any) -> dict[str, Any]:
    """Everything that a fit, a test and a prediction leave."""
    model, trainer = Net(), Trainer(strategy=strategy, **{"accelerator": "cpu", "devices": 1, **QUIET, **kwargs})
    trainer.fit(model)
    metrics = dict(trainer.callback_metrics)
    trainer.test(model, verbose=False)
    return {
        "losses": model.losses,
        "weights": dict(model.state_dict()),
        "metrics": {**metrics, **trainer.callback_metrics},
        "predictions": torch.cat(trainer.predict(model)),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
    }


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}], ids=str)
@pytest.mark.parametrize("strategy", [OnCPU, InParts])
def test_means_over_rows_are_those_of_one_process(
    strategy: type[DataParallelStrategy], options: dict[str, Any]
) -> None:
    expected, actual = outcome("single_device", **options), outcome(strategy(), **options)
    rows = [one["metrics"].pop("rows") for one in (expected, actual)]  # as the last step saw them
    assert rows == [7, pytest.approx((4 * 4 + 3 * 3) / 7 if strategy is InParts else 7)]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert len(expected["losses"]) == 6 and expected["losses"][-1] < expected["losses"][0]


def test_one_process_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    expected = outcome("single_device")
    trainer = Trainer(strategy=InParts(), accelerator="cpu", devices=1, **{**QUIET, "max_epochs": 1})
    trainer.fit(Net())
    trainer.save_checkpoint(tmp_path / "dp.ckpt")
    model = Net()
    Trainer(strategy="single_device", accelerator="cpu", devices=1, **QUIET).fit(model, ckpt_path=tmp_path / "dp.ckpt")
    assert model.losses == pytest.approx(expected["losses"][3:], rel=1e-12)
    torch.testing.assert_close(dict(model.state_dict()), expected["weights"], rtol=1e-12, atol=1e-12)


class LogsByRows(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log(f"of {len(batch[0])} rows", 1.0)
        return self.loss(batch)


def logs_by_rows() -> None:
    data = TensorDataset(torch.randn(7, 4), torch.randn(7, 2))
    trainer = pl.Trainer(strategy=InParts(), accelerator="cpu", devices=1, **QUIET)
    with pytest.raises(ValueError, match=r"under different names, \['of 3 rows', 'of 4 rows'\]"):
        trainer.fit(LogsByRows(), DataLoader(data, 7))


def test_logged_under_different_names() -> None:
    run(logs_by_rows)


class Logs(OnCPU):
    """A step whose replicas have logged what a test gives."""

    def __init__(self, *logged: list[tuple[str, Any, dict[str, Any]]]) -> None:
        super().__init__(parallel_devices=[torch.device("cpu")] * len(logged))
        self._lightning_module = Net()
        self.came: list[tuple[str, Any, dict[str, Any]]] = []
        self._lightning_module.log = lambda name, value, **options: self.came.append((name, value, options))
        results = [ReplicaResult(2, own, torch.tensor(1.0)) for own in logged]
        self._replicas = lambda *_: results


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([("a", 1.0, {})], [("a", 1.0, {}), ("b", 1.0, {})], r"under different names, \['b'\] or none; log the same"),
        ([("a", 1.0, {}), ("b", 1.0, {})], [("b", 1.0, {}), ("a", 1.0, {})], r"under different names, \['a', 'b'\]; "),
        ([("a", 1.0, {"batch_size": 2})], [("a", 1.0, {})], "'a' with different options, batch_size; give the same"),
        ([("a", 1.0, {"batch_size": None})], [("a", 1.0, {"batch_size": 2})], "'a' with different options, batch_size"),
        ([("a", 1.0, {"on_step": True})], [("a", 1.0, {"on_step": False})], "'a' with different options, on_step"),
        ([("a", 1.0, {})], [("a", 1.0, {"reduce_fx": "sum"})], "got reduce_fx='sum' for 'a'"),
    ],
)
def test_replicas_that_log_differently(first: Any, second: Any, message: str) -> None:
    strategy = Logs(first, second)
    with pytest.raises(ValueError, match=message):
        strategy.training_step(torch.ones(4, 2), 0)
    assert not strategy.came


def test_batch_sizes_of_replicas_are_added() -> None:
    strategy = Logs([("a", 1.0, {"batch_size": 3, "on_step": True})], [("a", 3.0, {"batch_size": 2, "on_step": True})])
    strategy.training_step(torch.ones(4, 2), 0)
    assert strategy.came == [("a", 2.0, {"batch_size": 5, "on_step": True})]


def test_merged_takes_means_of_scalars_and_rows_of_tensors() -> None:
    cpu = torch.device("cpu")
    values = [
        {"loss": torch.tensor(1.0), "rows": torch.zeros(3, 2), "n": 4, "flag": True, "text": "a", "none": None},
        {"loss": torch.tensor(5.0), "rows": torch.ones(1, 2), "n": 8, "flag": True, "text": "b", "none": None},
    ]
    result = merged(values, [3, 1], cpu)
    assert result["loss"] == 2.0 and result["n"] == 5.0
    assert result["rows"].tolist() == [[0, 0]] * 3 + [[1, 1]]
    assert (result["flag"], result["text"], result["none"]) == (True, "a", None)
    assert merged(values[:1], [3], cpu) == values[0]
    with pytest.raises(ValueError, match="gave results of different structure"):
        merged([torch.ones(1), None], [1, 1], cpu)


def test_lists_with_an_entry_for_each_row_are_joined_in_predict_step() -> None:
    cpu, boxes = torch.device("cpu"), [torch.ones(2, 4), torch.ones(0, 4), torch.ones(1, 4), torch.ones(4, 4)]
    lists = [
        {"label": [3, 7, 1], "text": ["a", "b", "c"], "box": boxes[:3], "nested": [[1, 2], [], [3]], "n": ([4], [4.0])},
        {"label": [9], "text": ["d"], "box": boxes[3:], "nested": [[5]], "n": ([8], [8.0])},
    ]
    joined = merged(lists, [3, 1], cpu, joins_lists=True)
    assert all(map(is_, joined.pop("box"), boxes))
    assert joined == {
        **{"label": [3, 7, 1, 9], "text": ["a", "b", "c", "d"], "nested": [[1, 2], [], [3], [5]], "n": ([5.0], [5.0])}
    }
    assert merged([[1.0, 2.0], [3.0, 6.0]], [2, 2], cpu) == [2.0, 4.0]
    with pytest.raises(ValueError, match=r"as many entries as rows, 2, and with tensors of so many rows"):
        merged([[torch.ones(2, 3), torch.ones(2, 5)]] * 2, [2, 2], cpu, joins_lists=True)
    tensors = merged([(torch.ones(2, 3), torch.ones(2, 5))] * 2, [2, 2], cpu, joins_lists=True)
    assert [tensor.shape for tensor in tensors] == [(4, 3), (4, 5)]


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Measured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()


class Summed(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("sum", 1.0, reduce_fx="sum")
        return self.loss(batch)


class Words(Net):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(["some", "words"], batch_size=2)


@pytest.mark.parametrize(
    ("net", "error", "message"),
    [
        (Manual, MisconfigurationException, r"cannot step optimizers itself \(manual optimization\)"),
        (Measured, MisconfigurationException, "cannot update the torchmetrics mean on copies of the model"),
        (Summed, ValueError, "logs means over the rows of a batch, got reduce_fx='sum' for 'sum'"),
        (Words, TypeError, "cannot split a batch of type list: it takes tensors"),
    ],
)
def test_what_replicas_cannot_do_is_refused(net: type[Net], error: type[Exception], message: str) -> None:
    trainer = Trainer(strategy=OnCPU(), accelerator="cpu", devices=1, limit_val_batches=0, **QUIET)
    model = net()
    with pytest.raises(error, match=message):
        trainer.fit(model)
    assert "log" not in vars(model)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_as_one() -> None:
    expected = run(outcome_on_gpus, "single_device", 1, "64-true")
    actual = run(outcome_on_gpus, "dp", 2, "64-true")
    for one in (expected, actual):
        one["metrics"].pop("rows")
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    mixed = run(outcome_on_gpus, "dp", 2, "bf16-mixed")
    assert mixed["losses"] == pytest.approx(run(outcome_on_gpus, "single_device", 1, "bf16-mixed")["losses"], rel=2e-2)


def outcome_on_gpus(strategy: str, devices: int, precision: str) -> dict[str, Any]:
    return outcome(strategy, accelerator="gpu", devices=devices, precision=precision)
