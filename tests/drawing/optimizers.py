"""Trains a small model with an optimizer of ``pytorch_optimizer`` in one process and as pipelines of two stages."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytorch_optimizer
import torch
from parity import Outcome, Small, batches, compare, fit
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import nn

from strategies import RPCSequentialStrategy
from tests.drawing.judgement import EQUAL, NOT_BUILT, Finding, in_words, kind_of

_WIDTHS = (5, 16, 64)
_STEPS = (6, 30)

_DRAWN: list[tuple[str, type, Callable[[Random, Any], Any]]] = [
    (r"^(maximize|differentiable|capturable)$", bool, lambda generator, value: value),
    ("", bool, lambda generator, value: value ^ (generator.random() < 0.25)),
    (r"interval|gap|frequency|period|every|_steps$|merge_time", int, lambda generator, value: generator.randint(1, 6)),
    (r"rank|top_k|basis", int, lambda generator, value: generator.choice((value, 2, 8, 48))),
    (r"probability", float, lambda generator, value: generator.choice((value, 0.05))),
]
"""Which options are drawn: an expression for the name, the type of the default, and the value."""


class Optimized(Small):
    """Linear layers of drawn widths, with biases and a norm."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], widths: list[int]) -> None:
        super().__init__()
        self.make = make
        layers: list[nn.Module] = []
        for width, next_width in pairwise([6, *widths, 2]):
            layers += [nn.Linear(width, next_width), nn.Tanh(), nn.LayerNorm(next_width)]
        self.sequential_module = nn.Sequential(*layers[:-2])

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def examine(name: str, seed: int) -> list[Finding]:
    """Trains both ways; runs in a process of the harness."""
    generator = Random(f"{name} {seed}")
    kind = pytorch_optimizer.load_optimizer(name)
    widths = [generator.choice(_WIDTHS) for _ in range(3)]
    steps = generator.randint(*_STEPS)
    settings = {"train": partial(batches, (8, 5) * (steps // 2)), "max_epochs": 1}
    told = ""
    for options in (_options(kind, generator), {}):
        words = f"{kind.__name__}({', '.join(f'{key}={value}' for key, value in options.items())}), widths {widths}"
        make = partial(Optimized, partial(kind, **options), widths)
        try:
            single = fit(make, SingleDeviceStrategy("cpu"), 1, **settings)
            if not all(map(np.isfinite, single.losses)):
                raise ValueError("the losses are not finite in one process")
            break
        except Exception as error:  # options that exclude each other, or an optimizer that needs more than parameters
            told = in_words(error)
    else:
        return [Finding(NOT_BUILT, words, told)]
    findings = []
    for schedule in ("gpipe", "1f1b"):
        # One micro-batch, so that gradients are equal to the last digit: an optimizer may amplify a difference.
        strategy = RPCSequentialStrategy(schedule=schedule, microbatches=1, balance="even")
        text = f"{schedule}, {words}, {steps // 2 * 2} steps"
        try:
            compare(_without_empty_states(fit(make, strategy, 2, **settings)), _without_empty_states(single))
            findings.append(Finding(EQUAL, text))
        except BaseException as error:  # pytest's own included
            findings.append(Finding(kind_of(error), text, in_words(error)))
    return findings


def _without_empty_states(outcome: Outcome) -> Outcome:
    """Leaves out the entries of parameters that an optimizer has looked up and keeps nothing of."""
    for state in outcome.optimizers:
        state["state"] = {key: value for key, value in state["state"].items() if value}
    return outcome


def _options(kind: Any, generator: Random) -> dict[str, Any]:
    """Returns options that differ from their defaults."""
    options: dict[str, Any] = {}
    for option in inspect.signature(kind).parameters.values():
        for expression, type_, drawn in _DRAWN:
            if type(option.default) is type_ and re.search(expression, option.name):
                options[option.name] = drawn(generator, option.default)
                break
    parameters = inspect.signature(kind).parameters
    return {name: value for name, value in options.items() if value != parameters[name].default}
