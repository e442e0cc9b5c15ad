"""Models in the manner of torchvision, timm and diffusion models: trained as pipelines as in one process."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import block_loops
import pytest
import torch
from harness import run
from parity import batches, compare, fit, one_device
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy
from trainer import Trainer

LOOPS: list[tuple[str, str | None, str]] = [
    ("TorchvisionViT", None, "gpipe"),
    ("TorchvisionResNet", "model.stages", "1f1b"),
    ("TimmViT", None, "gpipe"),
    ("DiT", None, "1f1b"),
    ("DiT", None, "gpipe"),
    ("UNet", "model.down", "1f1b"),
    ("UNet", "model.up", "gpipe"),
]
"""Class, path if it has to be named, and schedule."""


class Trained(LightningModule):
    """Trains one of the models."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = getattr(block_loops, kind)()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader() -> Any:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % 4) for n in (5, 4)]
    return DataLoader(batches, batch_size=None)


def trained(kind: str, strategy: Any, devices: int) -> Any:
    return fit(partial(Trained, kind), strategy, devices, train=loader, max_epochs=1)


def equal_one_process() -> list[str]:
    """Returns what differs, or is refused."""
    wrong = []
    for kind, path, schedule in LOOPS:
        single = trained(kind, one_device(), 1)
        strategy = RPCSequentialStrategy(schedule=schedule, microbatches=3, balance="even", module=path)
        try:
            compare(trained(kind, strategy, 2), single)
        except Exception as error:
            wrong.append(f"{kind}, {path}, {schedule}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.slow
def test_training_is_that_of_one_process() -> None:
    assert run(equal_one_process) == []


# Blocks that no forward calls, and parts of blocks


class Pair(nn.ModuleList):
    """Two layers, called by :meth:`forward` or by the model; the names of the weights are those of a list."""

    def forward(self, x: Tensor) -> Tensor:
        up, down = self
        return x + torch.tanh(down(up(x)))


class Encoder(LightningModule):
    """Calls its blocks in a method of its own, which ``training_step`` calls.

    Args:
        entries: Makes the list of the blocks.
        loop: Applies the blocks to ``x [rows, 6]``.
    """

    def __init__(self, entries: Callable[[], nn.Module], loop: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(6, 6), entries(), nn.Linear(6, 2)
        self.loop, self.losses = loop, list[float]()

    def encode(self, batch: list[Tensor]) -> Tensor:
        return self.head(self.loop(self.blocks, self.embed(batch.pop(0))))

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.log("num_calls", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
        target = batch[1]
        return mse_loss(self.encode([*batch]), target)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def layers() -> list[nn.Module]:
    return [nn.Linear(6, 6), nn.Linear(6, 6)]


def in_turn(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def part_by_part(blocks: Any, x: Tensor) -> Tensor:
    for up, down in blocks:
        x = x + torch.tanh(down(up(x)))
    return x


def pairs() -> nn.Module:
    return nn.ModuleList(Pair(layers()) for _ in range(4))


def sequence() -> nn.Module:
    return nn.Sequential(*(Pair(layers()) for _ in range(4)))


def split_strategy(schedule: str) -> Any:
    return RPCSequentialStrategy(schedule=schedule, microbatches=3, balance="even", module="blocks")


def blocks_called_by_a_step() -> None:
    make = partial(Encoder, pairs, in_turn)
    single = fit(make, one_device(), 1, max_epochs=1)
    outcome = fit(make, split_strategy("gpipe"), 2, max_epochs=1)
    compare(outcome, single)  # also what was logged
    assert outcome.metrics["num_calls"] == len(single.losses)


def test_blocks_that_training_step_calls_through_a_method_train_as_in_one_process() -> None:
    run(blocks_called_by_a_step)


class PaddedEncoder(LightningModule):
    """An ``nn.TransformerEncoder`` over padded rows, whose loss and metric depend on all positions."""

    def __init__(self, is_nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=is_nested)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, is_padding = batch
        return self.encoder(x, src_key_padding_mask=is_padding).square().mul(x).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=len(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded_rows() -> DataLoader:
    lengths = torch.tensor([[5], [3], [4], [2], [5], [1]])
    return DataLoader([(torch.randn(6, 5, 6), torch.arange(5) >= lengths)] * 2, batch_size=None)


def padded_evaluation() -> None:
    data: dict[str, Any] = {"train": padded_rows, "val": padded_rows, "max_epochs": 1}
    single = fit(partial(PaddedEncoder, False), one_device(), 1, **data)
    for schedule, devices in (("gpipe", 1), ("gpipe", 2), ("1f1b", 2)):
        strategy = RPCSequentialStrategy(schedule=schedule, microbatches=3, balance="even")
        outcome = fit(partial(PaddedEncoder, True), strategy, devices, **data)
        compare(outcome, single)
        assert outcome.model.encoder.use_nested_tensor


def test_an_encoder_of_torch_is_evaluated_without_nested_tensors() -> None:
    run(padded_evaluation)


class LogsInputs(LightningModule):
    """A layer that logs the mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.log("mean_of_inputs", x.mean())
        return self.linear(x)


class LogsInForward(Encoder):
    """Logs a mean over the rows in its own ``forward`` and in that of another LightningModule, before the blocks."""

    def __init__(self) -> None:
        super().__init__(pairs, in_turn)
        self.embed = LogsInputs()
        self.embed.log = self.log  # Lightning lets only the outermost module log

    def encode(self, batch: list[Tensor]) -> Tensor:
        return self(batch[0])

    def forward(self, x: Tensor) -> Tensor:
        self.log("mean", x.mean(), on_step=self.training, on_epoch=True, batch_size=len(x))
        return self.head(in_turn(self.blocks, self.embed(x)))


def logs_of_a_forward() -> None:
    single = fit(LogsInForward, one_device(), 1, val=batches, max_epochs=1)
    assert {"mean_step", "mean_epoch", "mean_of_inputs", "num_calls"} <= single.metrics.keys()
    compare(fit(LogsInForward, split_strategy("gpipe"), 2, val=batches, max_epochs=1), single)
    found = []
    for strategy, devices in ((one_device(), 1), (split_strategy("1f1b"), 2)):
        settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "precision": "64-true"}
        trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, **settings)
        found += trainer.validate(single.model, batches(), verbose=False)
    assert found[0] == pytest.approx(found[1])


def test_what_forward_logs_is_that_of_one_process() -> None:
    run(logs_of_a_forward)


class Context:
    """What a forward keeps for the code after the blocks."""


class KeepsTensors(Encoder):
    """Its ``forward`` uses after the blocks what has been put into objects, containers and a closure before them."""

    def __init__(self) -> None:
        super().__init__(pairs, in_turn)
        self.context, self.lists, self.queue = Context(), defaultdict[str, list[Tensor]](list), deque[Tensor](maxlen=1)
        kept: dict[str, Tensor] = {}
        self.embed.register_forward_hook(lambda module, args, output: kept.update(output=output))
        self.kept = kept.get

    def encode(self, batch: list[Tensor]) -> Tensor:
        return self(batch[0])

    def forward(self, x: Tensor) -> Tensor:
        self.lists.clear()
        x = self.embed(x)
        self.context.penalty = x.square().mean()
        self.lists["embedded"].append(x)
        self.queue.append(x.sin())
        y = self.head(in_turn(self.blocks, x))
        (embedded,) = self.lists["embedded"]
        return y + self.context.penalty + embedded[:, :2] + self.queue[0][:, 2:4] + self.kept("output")[:, 4:]


def kept_before_blocks() -> None:
    compare(
        fit(KeepsTensors, split_strategy("gpipe"), 2, max_epochs=1), fit(KeepsTensors, one_device(), 1, max_epochs=1)
    )


def test_tensors_kept_before_the_blocks_are_those_of_the_whole_batch() -> None:
    run(kept_before_blocks)


def refusals_of_bypasses() -> dict[str, str]:
    """Returns the message for each kind of model and of run."""
    found = {}
    for name, entries, loop in (("parts", pairs, part_by_part), ("sequence", sequence, in_turn)):
        for schedule in ("gpipe", "1f1b", "validate"):
            try:
                if schedule == "validate":
                    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
                    trainer = Trainer(devices=2, strategy=split_strategy("gpipe"), **settings)
                    trainer.validate(Encoder(entries, loop), batches(), verbose=False)
                else:
                    fit(partial(Encoder, entries, loop), split_strategy(schedule), 2, max_epochs=1)
            except RuntimeError as error:
                found[f"{name}, {schedule}"] = str(error)
    return found


def test_a_model_that_never_calls_its_blocks_is_refused_in_the_first_step() -> None:
    found = run(refusals_of_bypasses)
    assert len(found) == 6
    for name, message in found.items():
        calls = "the blocks in 'blocks'" if name.startswith("parts") else "'blocks'"
        assert message.startswith(f"the model has not called {calls}, but computes with parameter 0."), name
        assert ("Move the code that uses the parts of a block" in message) == name.startswith("parts")
        assert ("nn.ModuleList(model.blocks)" in message) == name.startswith("sequence")
