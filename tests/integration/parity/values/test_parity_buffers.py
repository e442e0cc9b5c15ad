"""Buffers of dtypes and layouts that torch treats differently train on stages as in one process."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Outcome, Small, alike, batches, check, compare, fit, on_cpus, one_device, small_layers
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from strategies.pipeline.recovery.repairs import Recovery
from strategies.rpc_sequential import RPCSequentialStrategy

KILL = Path("kill")


class Coded(nn.Module):
    """Multiplies by numbers that it keeps in unsigned dtypes, and counts in such a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn):
            self.register_buffer(f"small_{dtype}".replace(".", "_"), torch.arange(1, 7).to(dtype))
        self.register_buffer("large", torch.arange(12_000).reshape(2000, WIDTH).to(torch.uint16))
        self.register_buffer("count", torch.zeros(2, dtype=torch.uint32))

    def forward(self, x: Tensor) -> Tensor:
        if KILL.exists():
            KILL.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.count = (self.count.long() + len(x)).to(torch.uint32)
        factor = sum(buffer.to(x.dtype).sum() for name, buffer in self.named_buffers() if name != "count")
        return x * (factor / 1e8).tanh()


class CodedModel(Small):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(Coded(), *small_layers())


class Moves(Callback):
    """Moves layers to another stage after the second batch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.strategy.rebalance([1, 3, 3])


class Kills(Callback):
    """Ends a worker after the fifth batch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            KILL.touch()


def unsigned_buffers() -> None:
    single = fit(CodedModel, one_device(), 1)
    expected, single.buffers = single.buffers, {}
    for disturbance in (Moves(), Kills()):
        options: Any = {"microbatches": 3, "checkpoint": "never", "recovery": Recovery(max_restarts=1)}
        pipelined = fit(CodedModel, RPCSequentialStrategy([3, 3, 1], **options), 3, callbacks=[disturbance])
        assert not KILL.exists()
        buffers, pipelined.buffers = pipelined.buffers, {}
        assert buffers.keys() == expected.keys()
        for name, buffer in buffers.items():
            assert buffer.dtype is expected[name].dtype and torch.equal(buffer, expected[name]), name
        compare(pipelined, single)


class Rotary(nn.Module):
    """Turns pairs of features. Counts its calls in a buffer if ``counts``."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("frequencies", torch.linspace(0.1, 1, WIDTH // 2), persistent=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.scale += 1
        first, second = x.chunk(2, -1)
        sine, cosine = self.frequencies.sin(), self.frequencies.cos()
        return self.scale * torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


class Turns(nn.Linear):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__(WIDTH, WIDTH)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.rotary(x)).tanh()


class TurnsEverywhere(Small):
    """Layers of all stages use one module with buffers."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        rotary = Rotary(counts)
        layers = [Turns(rotary), nn.Tanh(), Turns(rotary), nn.LayerNorm(WIDTH), Turns(rotary)]
        self.sequential_module = nn.Sequential(*layers, nn.Linear(WIDTH, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


class Rescales(Callback):
    """Changes a shared buffer in three ways, and moves layers to another stage."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rotary = model.sequential_module[4].rotary
        if batch_idx == 0:
            rotary.scale.mul_(0.5)
        elif batch_idx == 1:
            rotary.scale = rotary.scale * 3
        elif batch_idx == 2:
            model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        elif isinstance(trainer.strategy, RPCSequentialStrategy):
            trainer.strategy.rebalance([1, *trainer.strategy.balance[1:-1], 5 - sum(trainer.strategy.balance[1:-1])])


def shared_buffers(schedule: str) -> None:
    outcomes = check(TurnsEverywhere, strategy={"schedule": schedule}, callbacks=[Rescales()], val=batches)
    for outcome in outcomes:
        turns = [layer for layer in outcome.model.sequential_module if isinstance(layer, Turns)]
        assert all(layer.rotary is turns[0].rotary for layer in turns)
        assert len({id(buffer) for layer in turns for buffer in layer.buffers()}) == 2
    with pytest.raises(RuntimeError, match=r"buffer 0\.rotary\.scale .* shared with layers of this process.* separate"):
        fit(partial(TurnsEverywhere, counts=True), RPCSequentialStrategy([3, 3], schedule=schedule), 2)


class TurnsOnWorkers(TurnsEverywhere):
    """Only layers of workers use the module."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[4] = nn.Tanh()


class Assigns(Callback):
    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        rotary = model.sequential_module[0].rotary
        rotary.scale = torch.full((1,), 1.0 / (1 + trainer.global_step), dtype=rotary.scale.dtype)


def shared_buffers_of_workers() -> None:
    single = fit(TurnsOnWorkers, one_device(), 1, callbacks=[Assigns()])
    for schedule in ("gpipe", "1f1b"):
        strategy = RPCSequentialStrategy([1, 2, 3], schedule=schedule)
        compare(fit(TurnsOnWorkers, strategy, 3, callbacks=[Assigns()]), single)


class NamedTwice(TurnsOnWorkers):
    """A layer has a second name, under which its buffers are read."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = self.sequential_module[0].rotary
        self.rotary.counts = True


class Reads(Callback):
    def __init__(self) -> None:
        self.read: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        names = ("rotary.scale", "sequential_module.0.rotary.scale")
        self.read.append([model.rotary.scale.item(), *(model.state_dict()[name].item() for name in names)])


def buffers_with_two_names() -> None:
    one, reads = Reads(), Reads()
    single = fit(NamedTwice, one_device(), 1, callbacks=[one])
    pipelined = fit(NamedTwice, RPCSequentialStrategy([3, 3], microbatches=1), 2, callbacks=[reads])
    compare(pipelined, single)
    assert reads.read == one.read and one.read[0] != one.read[-1]


def test_buffers_of_a_layer_with_two_names() -> None:
    run(buffers_with_two_names)


def test_buffers_of_a_module_that_two_workers_use() -> None:
    run(shared_buffers_of_workers)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_buffers_of_a_module_that_all_stages_use(schedule: str) -> None:
    run(shared_buffers, schedule)


class Graph(Small):
    """Mixes the rows of its output by a sparse matrix, a buffer outside of the layers that stages hold."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        mixing = torch.eye(8) + torch.eye(8).roll(1, 0)
        self.register_buffer("mixing", mixing.to_sparse() if layout == "coo" else mixing.to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return self.mixing.to(x.dtype) @ super().forward(x)


def sparse_buffers(layout: str) -> None:
    def trained(strategy: Any, devices: int) -> Outcome:
        outcome = fit(partial(Graph, layout), strategy, devices, train=partial(batches, [8] * 3), callbacks=[Saves()])
        assert torch.equal(outcome.buffers.pop("mixing").to_dense(), Graph(layout).mixing.to_dense().double())
        outcome.model = torch.load("saved.ckpt", weights_only=True)["state_dict"]
        return outcome

    single = trained(one_device(), 1)
    pipelined = trained(RPCSequentialStrategy([3, 3], microbatches=1, async_save=True), 2)
    compare(pipelined, single)
    assert torch.equal(pipelined.model.pop("mixing").to_dense(), single.model.pop("mixing").to_dense())
    alike(pipelined.model, single.model)


class Saves(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint("saved.ckpt")


@on_cpus
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_buffer_outside_of_the_stages(layout: str) -> None:
    run(sparse_buffers, layout)


@on_cpus
@pytest.mark.slow
def test_unsigned_integers_and_eight_bit_floats_follow_their_layer() -> None:
    """To a worker, to another one, to the one that replaces it after its end, and back."""
    run(unsigned_buffers)
