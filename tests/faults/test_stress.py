"""Pipelines of random sizes, whose layers take random times: none of them stands still, and all compute the same.

One process runs them one after another, without Lightning. A case is known by its seed.
"""

import random
import time
from typing import Any

import pytest
import torch
from harness import run
from torch import Tensor, nn

from strategies.pipeline.control.parts import PartKind
from strategies.pipeline.control.shelf import captured
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.stage.layers import PassContext

NUM_CASES = 6
WIDTH = 5


class Dawdling(nn.Module):
    """A layer that takes its time now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear, self.seed = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), seed
        self.moments = random.Random(seed)

    def forward(self, x: Tensor) -> Tensor:
        if self.moments.random() < 0.2:
            time.sleep(self.moments.random() * 0.01)
        return self.linear(x).tanh()


def batches(rnd: random.Random) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rnd.randrange(1 << 30))
    shapes = [(rnd.randint(1, 9), *[rnd.randint(1, 4)] * rnd.randint(0, 1), WIDTH) for _ in range(rnd.randint(2, 6))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def gradients(layers: nn.Sequential) -> list[Tensor]:
    grads = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    return grads


def expected(layers: nn.Sequential, inputs: list[Tensor]) -> list[list[Tensor]]:
    seen = []
    for x in inputs:
        layers(x).square().mean().backward()
        seen.append(gradients(layers))
    return seen


def step_1f1b(pipeline: Pipeline, x: Tensor, microbatches: int) -> None:
    parts = list(x.tensor_split(min(microbatches, len(x))))
    codes = [lambda part=part: pipeline.module(part).square().mean() for part in parts]
    loss = pipeline.interleave(codes, [len(part) / len(x) for part in parts], PassContext.capture("cpu"))
    assert loss is not None
    loss.backward()


def many_cases() -> dict[str, Any]:
    passes, worst = 0, 0.0
    torch.manual_seed(0)
    for case in range(NUM_CASES):
        rnd = random.Random(case)
        stages, schedule = rnd.randint(2, 4), rnd.choice(["gpipe", "1f1b"])
        microbatches = rnd.randint(1, 7)
        layers = nn.Sequential(*[Dawdling(rnd.randrange(1000)) for _ in range(stages + rnd.randint(0, 2))])
        balance = [1] * (stages - 1) + [len(layers) - stages + 1]
        rnd.shuffle(balance)
        settings = Settings(
            microbatches=microbatches,
            schedule=schedule,
            checkpoint=rnd.choice(["always", "except_last", "never"]),
            rpc_timeout_sec=10.0,
        )
        inputs = [x for _ in range(6) for x in batches(rnd)]
        wanted = expected(layers, inputs)
        pipeline = Pipeline(layers, balance, [torch.device("cpu")] * stages, settings)
        pipeline.start()
        for x, grads in zip(inputs, wanted, strict=True):
            if schedule == "gpipe":
                layers(x).square().mean().backward()
            else:
                step_1f1b(pipeline, x, microbatches)
            pipeline.wait()
            seen: dict[str, Any] = {}
            for remote in pipeline.remotes:
                seen |= captured(remote, PartKind.GRADS)
            seen |= {name: p.grad for name, p in layers.named_parameters() if not p.is_meta}
            for (name, _), grad in zip(layers.named_parameters(), grads, strict=True):
                error = (seen[name] - grad).abs().max().item()
                worst = max(worst, error)
                assert error < 1e-9, (case, name, error)
            layers.zero_grad()
            passes += 1
        pipeline.close()
    return {"passes": passes, "worst": worst}


@pytest.mark.slow
@pytest.mark.timeout(260)
def test_random_pipelines() -> None:
    seen = run(many_cases, timeout_seconds=240)
    assert seen["passes"] >= 100, seen
