"""A model with BatchNorm of every kind, and the references in one process that it is compared with."""

from collections import defaultdict
from typing import Any

import torch
from parity import WIDTH, Small, batches
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

MICROBATCHES = 3


SIZES = (8, 7, 2, 5)
"""Numbers of rows: 3, 3, 2, 3 micro-batches, some of a single row."""


CHANNELS, LENGTH = 4, 3


BEFORE = 5
"""What ``num_batches_tracked`` says at the beginning."""


class Normed(nn.Module):
    """``[rows, CHANNELS, LENGTH]`` to the same, with running statistics that differ from where they usually start."""

    checkpointed = False

    def __init__(self, kind: type[nn.Module] = nn.BatchNorm1d, **options: Any) -> None:
        super().__init__()
        self.norm = kind(CHANNELS, **options)
        self.linear = nn.Linear(LENGTH, LENGTH)
        for name, buffer in self.norm.named_buffers():
            buffer.fill_(BEFORE) if name == "num_batches_tracked" else buffer.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.normed, x, use_reentrant=False) if self.checkpointed else self.normed(x)

    def normed(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x).tanh())


class Checkpointed(Normed):
    """Recomputes itself, whatever the pipeline does. Without it too, BatchNorm then counts both runs in training."""

    checkpointed = True


class Model(Small):
    """BatchNorm of every kind, on each stage however the layers are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, CHANNELS * LENGTH), nn.Unflatten(1, (CHANNELS, LENGTH)), Checkpointed()),
            Normed(momentum=None),
            Normed().eval(),  # stays so, as where the batches are too small for statistics
            Normed(momentum=0.3, affine=False),
            Normed(momentum=None, track_running_stats=False),
            nn.Sequential(Checkpointed(), Normed(nn.InstanceNorm1d, track_running_stats=True)),
            nn.Sequential(Normed(momentum=None), nn.Flatten(), nn.Linear(CHANNELS * LENGTH, 2)),
        )
        self.example_input_array = torch.randn(6, WIDTH)
        self.initial = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def on_train_start(self) -> None:
        """Balancing, starting and a sanity check of the validation are over, and have changed nothing."""
        state = self.state_dict()
        assert len(self.initial) == 7 * 3
        for name, buffer in self.initial.items():
            assert torch.equal(state[name].cpu(), buffer.to(state[name].dtype)), name

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            with torch.no_grad():
                self(batch[0] * 2)  # counts, for BatchNorm
        return self.loss(batch)


class Each(Model):
    """In one process: the micro-batches one after another."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.sequential_module(part) for part in parts(x)])


class Deferred(Model):
    """In one process: the micro-batches, on copies of the statistics, then all that entered a BatchNorm at once."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.modules():
            if isinstance(layer, Normed):
                layer.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        norms = {name: m for name, m in self.sequential_module.named_modules() if isinstance(m, _BatchNorm)}
        entered: dict[nn.Module, list[Tensor]] = defaultdict(list)
        hooks = [
            norm.register_forward_pre_hook(lambda norm, args: entered[norm].append(args[0].detach()))
            for norm in norms.values()
        ]
        copies = {f"{name}.{b}": buffer.clone() for name, m in norms.items() for b, buffer in m.named_buffers()}
        out = torch.cat([functional_call(self.sequential_module, copies, part) for part in parts(x)])
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for norm in norms.values():
                norm(torch.cat(entered[norm]))
        return out


def parts(x: Tensor) -> tuple[Tensor, ...]:
    return x.tensor_split(min(MICROBATCHES, len(x)))


def data() -> DataLoader:
    return batches(SIZES)
