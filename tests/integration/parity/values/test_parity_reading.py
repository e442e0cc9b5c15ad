"""What hooks and loggers find out about a model whose layers live elsewhere: what they find out in one process."""

import copy
import gc
import io
import os
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, alike, batches, fit
from parity_trainers import Make, everywhere
from pytorch_lightning import Callback
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import grad_norm
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from strategies import RPCSequentialStrategy

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda p: p.norm().item(),
    "float": lambda p: float(p.detach().mean()),
    "bool": lambda p: bool(p.isnan().any()),
    "numpy": lambda p: p.detach().numpy().sum().item(),
    "list": lambda p: p.tolist(),
    "copy": lambda p: p.detach().cpu().clone(),
    "data": lambda p: p.data.norm(),
}


GRADIENT_READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda grad: grad.norm().item(),
    "data": lambda grad: grad.detach().data.norm(1).item(),
    "finite": lambda grad: bool(grad.isfinite().all()),
    "cosine": lambda grad: torch.nn.functional.cosine_similarity(grad.flatten(), grad.flatten() + 1, dim=0).item(),
}


class Reader(Callback):
    """Reads parameters and gradients in every way and at every time, but changes none."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.public: list[Any] = []
        self.first: dict[str, Tensor] = {}

    def _read(self, moment: str, model: Any) -> None:
        for name, parameter in model.named_parameters():
            for way, read in READS.items():
                self.values[f"{moment} {name} {way}"] = read(parameter)
            grad = parameter.grad
            for way, read in GRADIENT_READS.items():
                self.values[f"{moment} {name} gradient {way}"] = None if grad is None else read(grad)

    def _look(self, trainer: Any, model: Any, *args: Any) -> None:
        self.public.append({name: value.norm() for name, value in model.state_dict().items()})
        self.public.append(
            [(n, list(p.shape), p.dtype, p.requires_grad, p.numel()) for n, p in model.named_parameters()]
        )
        self.public.append(model.dtype)

    def setup(self, trainer: Any, model: Any, stage: str) -> None:
        self._read("setup", model)

    def on_train_start(self, trainer: Any, model: Any) -> None:
        self._read("start", model)
        self._look(trainer, model)
        self.first = {name: p.detach() for name, p in model.named_parameters()}

    def on_after_backward(self, trainer: Any, model: Any) -> None:
        self._read(f"after backward {trainer.global_step}", model)

    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        self.values[f"norms {trainer.global_step}"] = grad_norm(model, 2)

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        self._look(trainer, model)
        self._read(f"epoch {trainer.current_epoch}", model)
        model.log("weight", sum(p.detach().pow(2).sum() for p in model.parameters()))
        self.public.append({name: view.norm().item() for name, view in self.first.items()})  # as it is now
        optimizer = trainer.optimizers[0]
        self.public.append({n: {k: v.norm() for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()})
        file = io.BytesIO()
        torch.save([model.sequential_module[0].state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        self.public.append(torch.load(file, weights_only=True))
        self.public.append(copy.deepcopy(model.sequential_module[0]).weight.tolist())

    def on_fit_end(self, trainer: Any, model: Any) -> None:
        self._read("end", model)
        self._look(trainer, model)

    on_fit_start = on_train_batch_end = on_train_end = _look


def read_by_hooks(make: Make) -> dict[str, Any]:
    reader = Reader()
    trainer = make(max_epochs=2, callbacks=[reader])
    trainer.fit(Small(), batches((8, 7, 3)), batches((5, 6), seed=1))
    return {"values": reader.values, "public": reader.public, "metrics": trainer.callback_metrics}


def all_read() -> list[dict[str, Any]]:
    return everywhere(read_by_hooks, stages=[2])


# Graphs, gradients and histograms


class Keeping(Small):
    """Keeps its last loss with its graph, as metrics of ``torchmetrics`` do; shows gradients and weights."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.kept = super().training_step(batch, batch_idx)
        return self.kept

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        add = self.logger.experiment.add_histogram
        for name, parameter in self.named_parameters():
            add(name, parameter, self.global_step)
            add(f"{name}.grad", parameter.grad, self.global_step)
            add(f"{name}.numpy", parameter.detach().cpu().numpy(), self.global_step)


class Sparse(Small):
    """Logs the sparse gradient of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[0] = nn.Embedding(WIDTH, WIDTH, sparse=True)
        self.read: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x.argmax(1))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad = self.sequential_module[0].weight.grad
        self.read.append((grad.is_sparse, grad.to_dense(), grad_norm(self, 2)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sparse_read(make: Make) -> Any:
    model = Sparse()
    make(max_epochs=1).fit(model, batches())
    return model.read


def all_sparse() -> list[Any]:
    return everywhere(sparse_read, stages=[2])


def histogram(tensor: Tensor) -> Any:
    """What ``wandb.watch`` logs of a tensor: the operations of its ``log_tensor_stats`` (wandb 0.31)."""
    flat = tensor.detach().clone().reshape(-1)
    if not isinstance(flat, torch.FloatTensor | torch.DoubleTensor):
        flat = flat.type(torch.FloatTensor)
    flat = flat[torch.isfinite(flat)]
    low, high = flat.min().item(), flat.max().item()
    counts = flat.histc(bins=64, min=low, max=high).cpu().clone().detach()
    return counts.tolist(), torch.linspace(low, high, steps=65).tolist()


def watched(make: Make) -> dict[str, Any]:
    """``WandbLogger.watch(log="parameters")``, whose hook on the model is called when the model is."""
    model, logged = Small(), []

    def log(module: Any, inputs: Any, output: Any) -> None:
        logged.extend((name, histogram(parameter.data.cpu())) for name, parameter in module.named_parameters())

    model.register_forward_hook(log)
    make(max_steps=2).fit(model, batches())
    model = Small()
    model.on_train_start = lambda: model.sequential_module[0].weight.register_hook(print)
    hook = outcome(lambda: make(max_steps=2).fit(model, batches()))
    return {"parameters": logged, "hook": hook}


class ClippedByHand(Small):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        for parameter in reversed(list(self.parameters())):
            parameter.grad.mul_(1.0 / total)


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (RuntimeError, MisconfigurationException) as error:
        return f"{type(error).__name__}: {error}"


def all_refused() -> dict[str, str | None]:
    def fit_one(model: Any, schedule: str = "gpipe") -> str | None:
        strategy = RPCSequentialStrategy([3, 3], microbatches=2, schedule=schedule)
        return outcome(lambda: fit(lambda: model, strategy, 2, max_steps=1) and None)

    reads = Small()
    reads.forward = lambda x: reads.sequential_module(x) * float(reads.sequential_module[0].weight.detach().norm() > 0)
    return {
        "clipped": fit_one(ClippedByHand()),
        "1f1b": fit_one(reads, "1f1b"),
        "gpipe": fit_one(reads),
    }


def shown(make: Make) -> dict[str, Any]:
    boards = [TensorBoardLogger(f"{len(os.listdir())}", "board", log_graph=graph) for graph in (False, True)]
    model = Keeping()
    make(max_steps=1, logger=boards[0]).fit(model, batches())
    board = EventAccumulator(boards[0].log_dir, size_guidance={"histograms": 0})
    board.Reload()
    sums = {tag: board.Histograms(tag)[0].histogram_value.sum for tag in board.Tags()["histograms"]}
    reference = weakref.ref(model)
    del model
    gc.collect()
    model = Small()
    model.example_input_array = torch.zeros(4, WIDTH, dtype=torch.float64)
    graph = outcome(lambda: make(max_steps=1, logger=boards[1]).fit(model, batches()))
    return {"collected": reference() is None, "histograms": sums, "graph": graph}


def all_shown() -> list[dict[str, Any]]:
    return everywhere(shown, stages=[2])


def everything() -> list[Any]:
    return [all_read(), all_shown(), everywhere(watched, stages=[2]), all_refused(), all_sparse()]


@pytest.fixture(scope="module")
def found() -> Any:
    return run(everything, allow=("port",), timeout_seconds=170)


def test_hooks_that_read_parameters_and_gradients(found: Any) -> None:
    """At any time, in mid-fit too, and whatever they make of them: norms, copies, files, averages."""
    single, pipeline = found[0]
    assert sum("after backward" in key for key in single["values"]) > 100
    assert single["values"]["norms 0"]["grad_2.0_norm_total"] > 0
    for what in ("public", "values", "metrics"):
        alike(pipeline[what], single[what])


def test_sparse_gradients(found: Any) -> None:
    single, pipeline = found[4]
    assert all(is_sparse for is_sparse, *_ in single)
    alike(pipeline, single)


def test_parameters_watched_by_weights_and_biases(found: Any) -> None:
    single, pipeline = found[2]
    assert len(single["parameters"]) == 2 * 8 and single["hook"] is None
    alike(pipeline["parameters"], single["parameters"])
    assert re.search(r"`register_hook` on parameter 0.weight .* stage 0 .*on_before_optimizer_step", pipeline["hook"])


def test_what_would_leave_stages_out_is_refused(found: Any) -> None:
    refused = found[3]
    assert re.search(r"`mul_` on the gradient of parameter .*strategy.clip_grad_norm_\(", refused["clipped"])
    assert re.search(r"values of stage 0 .* cannot be read while .*'1f1b'.*on_train_batch_end", refused["1f1b"])
    assert refused["gpipe"] is None


def test_a_model_that_keeps_a_graph_is_collected(found: Any) -> None:
    single, pipeline = found[1]
    assert single["collected"] and pipeline["collected"]


def test_histograms_of_parameters_and_gradients(found: Any) -> None:
    single, pipeline = (each["histograms"] for each in found[1])
    assert len(single) == 3 * 8
    assert pipeline == pytest.approx(single, rel=1e-6)


def test_the_graph_of_the_model_in_tensorboard(found: Any) -> None:
    single, pipeline = found[1]
    assert single["graph"] is None
    assert pipeline["graph"] is None or pipeline["graph"].startswith("MisconfigurationException: ")
