"""Trains a small model of ``transformers``, unmodified, in one process and as pipelines of two stages."""

import random
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from model_families import Trained, workers_import_transformers
from parity import Outcome, compare, fit
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy
from tests.drawing import tiny
from tests.drawing.judgement import EQUAL, NOT_BUILT, Finding, in_words, kind_of

SIZES = ((5, 9), (4, 7), (6, 8))
"""Rows and length of each batch."""

MOST_PARAMETERS = 3_000_000
EXACT, SINGLE = 1e-9, 1e-6
"""Tolerances, relative and absolute: without and with operations in float32 in the model."""


class Watched(Trained):
    """Notes which modules are called, and what a pipeline cannot repeat to the last digits.

    That is random numbers, and operations in float32.
    """

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.draws, self.computes_in_float32 = False, False
        self.called: set[str] = set()

    def on_train_start(self) -> None:
        for name, module in self.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.called.add(name))

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        before = _random_states()
        with _Dtypes() as dtypes:
            loss = super().training_step(batch, batch_idx)
        self.draws |= _random_states() != before
        self.computes_in_float32 |= not dtypes.isdisjoint({torch.float32, torch.bfloat16, torch.float16})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Plain(Trained):
    """The same without notes, which a pipeline trains."""

    configure_optimizers = Watched.configure_optimizers


class _Dtypes(TorchDispatchMode):
    """Collects the types of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __enter__(self) -> Any:
        super().__enter__()
        return self.found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found.update(each.dtype for each in tree_leaves(result) if isinstance(each, Tensor))
        return result


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def examine(name: str, seed: int) -> list[Finding]:
    """Trains a model both ways; runs in a process of the harness, with a fork server of its own."""
    try:
        make = partial(_model, name)
        batches = [tiny.batch(make(), rows, length) for rows, length in SIZES]
        microbatches = 3 if _rows_are_independent(make(), batches[0]) else 1
        settings = {"train": lambda: DataLoader(batches, batch_size=None), "max_epochs": 2}
        single = fit(partial(Watched, make), SingleDeviceStrategy("cpu"), 1, **settings)
        if single.model.draws:
            raise ValueError("it draws random numbers in training, and a pipeline draws others")
        _check_that_it_trains(single)
    except Exception as error:
        return [Finding(NOT_BUILT, told=in_words(error))]
    workers_import_transformers()
    generator = random.Random(f"{name} {seed}")
    return [_as_pipeline(make, schedule, microbatches, single, settings, generator) for schedule in ("gpipe", "1f1b")]


def _as_pipeline(
    make: Any, schedule: str, microbatches: int, single: Outcome, settings: dict[str, Any], generator: random.Random
) -> Finding:
    """Trains two stages.

    If the strategy asks which of several lists to pipeline, one is drawn from those that the batches reach: a model of
    texts and images does not call its layers for images with texts alone.
    """
    options, module = f"{schedule}, micro-batches: {microbatches}", None
    while True:
        strategy = RPCSequentialStrategy(schedule=schedule, microbatches=microbatches, balance="even", module=module)
        try:
            outcome = fit(partial(Plain, make), strategy, 2, **settings)
            where = strategy._division.where
            paths = [where] if isinstance(where, str) else [path for paths in where for path in paths]
            assert all(_is_called(path, single) for path in paths), f"a part of {where} is never called"
            return Finding(EQUAL, options, _compared(outcome, single))
        except BaseException as error:  # pytest's own included
            candidates = re.findall(r"'([\w.]+)' \(\d+ ", str(error)) if "several lists of layers" in str(error) else []
            candidates = [candidate for candidate in candidates if _is_called(candidate, single)]
            if not candidates or module is not None:
                return Finding(kind_of(error), options, in_words(error))
            module = generator.choice(candidates)
            options += f", {module}"


def _is_called(path: str, single: Outcome) -> bool:
    """Whether one process has called the layers at a path."""
    return any(name.startswith(f"{path}.") for name in single.model.called)


def _compared(outcome: Outcome, single: Outcome) -> str:
    """Compares everything; a model that computes in float32 may differ by as much as such numbers do."""
    try:
        compare(outcome, single, EXACT)
    except AssertionError:
        if not single.model.computes_in_float32:
            raise
        compare(outcome, single, SINGLE)
        return f"to {SINGLE}: the model computes in float32"
    return ""


def _model(name: str) -> Any:
    """Returns a model with the same weights each time."""
    torch.manual_seed(0)
    kind: Any = getattr(transformers, name)
    configuration = tiny.configuration(kind.config_class)
    configuration._experts_implementation = "eager"  # the default multiplies matrices of at most 32 bits
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(configuration).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the smallest model has {size:,} parameters, more than {MOST_PARAMETERS:,}")
    return kind(configuration).train()


def _rows_are_independent(model: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    """Whether each row of the logits depends on the same row of the batch alone, in training: not with BatchNorm."""
    model.double()
    rows = len(next(iter(batch.values()))) // 2
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    with torch.no_grad():
        some = model(**{key: value[:rows] for key, value in batch.items()}).logits
        return torch.allclose(model(**batch).logits[:rows], some, rtol=SINGLE, atol=SINGLE)


def _check_that_it_trains(single: Outcome) -> None:
    if not all(map(np.isfinite, single.losses)):
        raise ValueError(f"its losses are not finite in one process: {single.losses}")
    if single.losses[0] == single.losses[len(SIZES)]:
        raise ValueError("its losses do not change in one process")
