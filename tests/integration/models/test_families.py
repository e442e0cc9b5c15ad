"""Models of ``transformers``, unmodified: every parameter after training as a pipeline is that of one process."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from harness import OWN_SERVER, run
from model_families import FAMILIES, SIZES, Family, Trained, workers_import_transformers
from parity import compare, fit, one_device
from paths import ROOT
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy

FEW = ("Gemma 3", "T5 decoder")


def loader(family: Family) -> Any:
    return DataLoader([family.batch(rows, length) for rows, length in SIZES], batch_size=None)


def equal_one_process(names: Sequence[str], stages: Sequence[int], *schedules: Sequence[str]) -> list[str]:
    """Trains each family in one process and as pipelines; returns what differs, or is refused.

    Args:
        names: The families.
        stages: The number of stages of each.
        schedules: Those of the first family, of the second one and so on, then of the next ones in the same turn.
    """
    workers_import_transformers()
    wrong: list[str] = []
    families = [family for family in FAMILIES if family.name in names]
    for number, (family, devices) in enumerate(zip(families, stages, strict=True)):
        data = partial(loader, family)
        settings: dict[str, Any] = {"train": data, "val": data, "max_epochs": 1}
        single = fit(partial(Trained, family.make), one_device(), 1, **settings)
        path = f"model.{family.path}"
        for schedule in schedules[number % len(schedules)]:
            strategy = RPCSequentialStrategy(
                schedule=schedule,
                microbatches=family.microbatches,
                balance="even",
                module=None if family.is_found else path,
            )
            is_refused = schedule == "gpipe" and not family.splits
            refusal = pytest.raises(RuntimeError, match=r"has one row per sample.*schedule='1f1b'")
            try:
                with refusal if is_refused else nullcontext():
                    outcome = fit(partial(Trained, family.make), strategy, devices, **settings)
                    assert strategy._division.where == path, f"pipelines {strategy._division.where}"
                    compare(outcome, single, family.tolerance)
            except BaseException as error:  # pytest's own included
                wrong.append(f"{family.name}, {schedule}, {devices} stages: {type(error).__name__}: {error}")
    return wrong


def test_the_table_lists_these_families() -> None:
    page = (ROOT / "docs" / "models.md").read_text().split("\n## Families of ")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| `(\w+)` \| `([\w.]+)`(, named)? \|", page, re.MULTILINE)
    expected = [(f.name, f.model, f.path, "" if f.is_found else ", named") for f in FAMILIES]
    assert rows == expected


def test_a_few_families() -> None:
    assert run(equal_one_process, FEW, (3, 2), ["1f1b"], env=OWN_SERVER) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_chunks_and_split_backward_passes() -> None:
    """Products with a transposed weight and tied embeddings (GPT-2), experts, and convolutions."""
    schedules = ("zb-h1", "zbv", "v-half")
    names = ("GPT-2", "Mixtral", "ViT")
    assert run(equal_one_process, names, (2, 2, 2), schedules, env=OWN_SERVER, timeout_seconds=280) == []


NAMES = [family.name for family in FAMILIES]
STAGES = [2 + number // 2 % 2 for number in range(len(NAMES))]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_all_families() -> None:
    """Each under one of two schedules."""
    assert run(equal_one_process, NAMES, STAGES, ["1f1b"], ["gpipe"], env=OWN_SERVER, timeout_seconds=380) == []


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_all_families_under_the_other_schedule() -> None:
    assert run(equal_one_process, NAMES, STAGES, ["gpipe"], ["1f1b"], env=OWN_SERVER, timeout_seconds=380) == []
