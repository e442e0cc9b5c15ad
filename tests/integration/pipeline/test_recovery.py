"""Workers that are killed in mid-run: the pipeline goes back to its last snapshot, and training is that of a whole run."""

import copy
import os
import pickle
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strategies.common.errors import WorkerLost
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.driver import ModelCopy, Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.optimizers import follow_optimizer
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.state.remote_operations import OnStages

CPU = torch.device("cpu")
STEPS, ROWS, WIDTH, CLASSES, MICROBATCHES = 6, 8, 6, 5, 3
PHASES = ("forward", "backward", "step", "snapshot")
BALANCES = {"gpipe": [3, 4, 5], "1f1b": [3, 4, 5], "zbv": [2, 2, 2, 2, 2, 2]}

Kill = tuple[str, int]
"""What a worker does when it is to be killed, and its rank."""


def strike(phase: str) -> None:
    """Ends this process if it is a worker that the test wants to end here, once."""
    name, _, rank = Path("/proc/self/comm").read_text().strip().rpartition("-")
    order = Path(f"kill-{phase}-{rank}")
    if name == "relay-worker" and order.exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class Killable(nn.Module):
    """Ends its process where the test says so; keeps a list and a tensor that are no part of its ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.factor = 1.0
        self.seen: dict[str, Tensor] = {"mean": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        strike("forward")
        self.calls.append(len(self.calls))
        self.seen["mean"] = 0.5 * self.seen["mean"] + x.detach().mean()
        if x.requires_grad:
            x.register_hook(lambda grad: strike("backward"))
        return x * self.factor

    def __getstate__(self) -> dict[str, Any]:
        strike("snapshot")
        return self.__dict__


class KillableAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        strike("step")
        return super().step(closure)


class Model(nn.Module):
    """An embedding that is tied to the head, batch norms and dropout; a parameter outside of the layers."""

    def __init__(self) -> None:
        super().__init__()
        head, embedding = nn.Linear(WIDTH, CLASSES, bias=False), nn.Embedding(CLASSES, WIDTH)
        embedding.weight = head.weight
        self.layers = nn.Sequential(
            *(embedding, Killable(), nn.Linear(WIDTH, WIDTH), Killable(), nn.BatchNorm1d(WIDTH)),
            *(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
            *(nn.Dropout(0.2), Killable(), head),
        )
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers(x) * self.scale, y)


@dataclass
class Outcome:
    """What a training came to."""

    losses: dict[int, float] = field(default_factory=dict)
    recovered: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


def batch(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(CLASSES, (ROWS,), generator=generator) for _ in range(2)]


def values_of(computed: Tensor) -> Any:
    """The values of a tensor that a stage has computed."""
    with OnStages():
        return computed.tolist()


class Training:
    """A training of three processes, whose workers are killed.

    Args:
        schedule: The schedule.
        every: After how many steps a snapshot is taken; 0: never.
    """

    def __init__(self, schedule: str, every: int = 1) -> None:
        torch.manual_seed(0)
        self.model, self.every = Model(), every
        self.average = copy.deepcopy(self.model)
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = KillableAdamW(groups, lr=0.01)
        self.pipeline = Pipeline(
            self.model.layers,
            BALANCES[schedule],
            [CPU] * 3,
            Settings(microbatches=MICROBATCHES, schedule=schedule),
            optimizers=[self.optimizer],
            model=self.model,
            copies=[ModelCopy(self.average, self.average.layers)],
        )
        follow_optimizer(self.optimizer, self.pipeline.optimizers)

    def run(self, kills: Mapping[int, list[Kill]]) -> Outcome:
        """Trains; workers are killed in the steps that ``kills`` names."""
        pipeline, outcome, left = self.pipeline, Outcome(), dict(kills)
        pipeline.start()
        with OnStages():
            computed = self.model.layers[2].weight.detach().clone()
        if self.every:
            pipeline.snapshot(0)
        step = 0
        while step < STEPS:
            for phase, rank in left.pop(step, ()):
                Path(f"kill-{phase}-{rank}").touch()
            try:
                outcome.losses[step] = self.step(step)
                with OnStages():
                    computed.lerp_(self.model.layers[2].weight, 0.1)
                step += 1
                if self.every and step % self.every == 0:
                    pipeline.snapshot(step)
                if step == STEPS:
                    pipeline.wait()
            except WorkerLost:
                step = pipeline.recover()
                outcome.recovered.append(step)
        outcome.values = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "computed": values_of(computed),
            "calls": [pickle.loads(remote.call(StageCommands.objects)[0]) for remote in pipeline.remotes],
            "random": torch.get_rng_state(),
        }
        pipeline.finish()
        outcome.values["objects"] = [(m.seen, m.calls) for m in pipeline.stages[-1].modules() if isinstance(m, Killable)]
        return outcome

    def step(self, step: int) -> float:
        """Makes one step and returns its loss. The learning rate and an attribute of a layer on a worker change."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        for layer in (self.model.layers[1], self.model.layers[10]):
            layer.factor = 1.0 + 0.1 * step
        x, y = batch(step)
        self.optimizer.zero_grad()
        if self.pipeline.settings.interleaves:
            parts = list(zip(x.split(3), y.split(3), strict=True))
            codes = [partial(self.model.loss, *part) for part in parts]
            loss = self.pipeline.interleave(codes, [len(y) / ROWS for _, y in parts], PassContext.capture("cpu"))
        else:
            loss = self.model.loss(x, y)
        assert loss is not None
        loss.backward()
        self.optimizer.step()
        with OnStages():
            for average, own in zip(self.average.parameters(), self.model.parameters(), strict=True):
                average.detach().lerp_(own.detach(), 0.25)
        return loss.item()


def same(ours: Any, expected: Any, where: str = "") -> None:
    assert type(ours) is type(expected), where
    if isinstance(expected, Tensor):
        assert ours.dtype == expected.dtype and torch.equal(ours, expected), where
    elif isinstance(expected, Mapping):
        assert list(ours) == list(expected), (where, list(ours), list(expected))
        for key in expected:
            same(ours[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(ours) == len(expected), where
        for k, (own, other) in enumerate(zip(ours, expected, strict=True)):
            same(own, other, f"{where}.{k}")
    else:
        assert ours == expected, (where, ours, expected)


def compare(ours: Outcome, expected: Outcome) -> None:
    same(ours.losses, expected.losses, "losses")
    same(ours.values, expected.values, "values")


def killed_in_each_phase(schedule: str) -> None:
    expected = Training(schedule).run({})
    assert not expected.recovered
    compare(Training(schedule, every=0).run({}), expected)
    kills = {1: [("forward", 0)], 2: [("backward", 1)], 3: [("step", 0)], 4: [("snapshot", 1)]}
    ours = Training(schedule).run(kills)
    compare(ours, expected)
    assert len(ours.recovered) == 4 and ours.recovered[:2] == [1, 2], ours.recovered


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_a_worker_killed_in_each_phase(schedule: str) -> None:
    run(killed_in_each_phase, schedule)
