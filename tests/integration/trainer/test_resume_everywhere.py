"""A run resumes from wherever it was saved, and with loaders whose workers draw random numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resume_job import assert_resumable, shuffled
from resume_parts import DrawsBatches, Rows, StatefulStream, Stream
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled(10),
    "stream": lambda: DataLoader(Stream(10), batch_size=4),
    "stream with state": lambda: DataLoader(StatefulStream(10), batch_size=4),
}


EVERYWHERE = [
    *((hook, calls) for hook in ("on_train_batch_start", "on_train_batch_end") for calls in range(1, 10)),
    *(("on_train_epoch_start", calls) for calls in (1, 2, 3)),
    *(("on_train_epoch_end", calls) for calls in (1, 2, 3)),
    *(("on_validation_end", calls) for calls in (1, 2, 3)),
    ("on_train_end", 1),
]
"""For three epochs of three batches, with one validation in each."""


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"plateau": "epoch"},
    {"val_check_interval": 2, "plateau": "step"},
    {"max_epochs": -1, "max_steps": 10},
]


@pytest.mark.parametrize("half", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("number", range(len(ARGUMENTS)))
@pytest.mark.parametrize("name", LOADERS)
def test_from_wherever_it_was_saved(name: str, number: int, half: int, tmp_path: Path) -> None:
    """Each place with two of the arguments before a merge, and with the other two each night."""
    assert_resumable(tmp_path, LOADERS[name], EVERYWHERE[(number + half) % 2 :: 2], **ARGUMENTS[number])


@pytest.mark.slow
@pytest.mark.parametrize(
    "loaders",
    [
        shuffled(22, num_workers=2),
        shuffled(22, num_workers=3, persistent_workers=True),
        lambda: DataLoader(Rows(22), batch_sampler=DrawsBatches(22), num_workers=2, persistent_workers=True),
        lambda: DataLoader(Stream(22), batch_size=4, num_workers=2),
    ],
)
def test_with_workers_whose_random_numbers_go_on(loaders: Callable[[], Any], tmp_path: Path) -> None:
    places = [("on_train_batch_end", calls) for calls in (1, 3, 8, 12)]
    assert_resumable(tmp_path, loaders, [*places, ("on_train_batch_start", 3), ("on_train_epoch_end", 1)])
