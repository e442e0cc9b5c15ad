"""Draws cases from a seed; what there is to draw, the packages themselves say."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import islice
from random import Random

from tests.drawing.judgement import Case

TRANSFORMERS, PYTORCH_OPTIMIZER = "transformers", "pytorch_optimizer"
PACKAGES = (TRANSFORMERS, PYTORCH_OPTIMIZER)

_HEADS = (
    *("CAUSAL_LM", "MASKED_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "SEQ_TO_SEQ_CAUSAL_LM"),
    *("SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT"),
)
"""The mappings of ``transformers`` from families to models that return logits."""


def draw(package: str, seed: int, count: int) -> list[Case]:
    """Returns different classes of a package, drawn from a seed; the first ones stay the same with a greater count."""
    found = {TRANSFORMERS: _families, PYTORCH_OPTIMIZER: _optimizers}[package](Random(f"{package} {seed}"))
    return [Case(package, name, seed) for name in islice(found, count)]


def named(name: str, seed: int) -> Case:
    """Returns the case of one class, with the options that it has in a drawing with this seed."""
    return Case(TRANSFORMERS if name in set().union(*_models().values()) else PYTORCH_OPTIMIZER, name, seed)


def _families(generator: Random) -> Iterator[str]:
    """Yields a model of each family whose class declares which of its modules must not be split."""
    transformers = importlib.import_module(TRANSFORMERS)
    models = _models()
    families = sorted(models)
    generator.shuffle(families)
    # Some families share their models with another one.
    for name in dict.fromkeys(generator.choice(models[family]) for family in families):
        try:
            declared = getattr(transformers, name)._no_split_modules
        except (ImportError, AttributeError):  # a family that needs another package
            continue
        if declared:
            yield name


def _models() -> dict[str, list[str]]:
    """Returns the names of the models of each family."""
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    models: dict[str, list[str]] = {}
    for head in _HEADS:
        for family, names in getattr(mappings, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            models.setdefault(family, []).extend([names] if isinstance(names, str) else names)
    return models


def _optimizers(generator: Random) -> Iterator[str]:
    names: list[str] = sorted(importlib.import_module(PYTORCH_OPTIMIZER).get_supported_optimizers())
    generator.shuffle(names)
    yield from names
