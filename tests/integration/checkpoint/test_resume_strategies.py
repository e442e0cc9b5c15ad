"""Resuming under pipelines, DDP and replicas, and from one number of processes to another."""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import resume_job
import torch
from harness import run
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from resume_job import ENDS, assert_resumable, fit, shuffled
from resume_parts import Draws, Rows
from scripts import Script
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline(schedule: str) -> None:
    run(pipeline, schedule, timeout_seconds=170)


def pipeline(schedule: str) -> None:
    strategy = partial(RPCSequentialStrategy, [2, 2], microbatches=2, schedule=schedule)
    common: dict[str, Any] = {"strategy": strategy, "devices": 2, "max_epochs": 2}
    with tempfile.TemporaryDirectory() as folder:
        others = [("on_validation_end", 1), ("on_before_optimizer_step", 5)]
        assert_resumable(Path(folder), shuffled(10), [*ENDS, *others], **common)
        places = [("on_train_batch_end", 3)]
        assert_resumable(Path(folder), shuffled(14, num_workers=2), places, accumulate_grad_batches=3, **common)


@pytest.mark.slow
def test_from_one_process_to_a_pipeline_and_back_in_one_epoch() -> None:
    run(to_a_pipeline_and_back, timeout_seconds=120)


def to_a_pipeline_and_back() -> None:
    common: dict[str, Any] = {"dropout": 0.0, "max_epochs": 2}  # masks are drawn per layer there, per process here
    pipeline = {"strategy": partial(RPCSequentialStrategy, [2, 2], microbatches=2), "devices": 2}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = (resume_job.Saves(folder, [("on_train_batch_end", calls)]) for calls in (8, 2))
        whole, _ = fit(shuffled(22), seed=3, callbacks=[first], **common)
        path = folder / "on_train_batch_end-8.ckpt"
        part, _ = fit(shuffled(22), seed=5, checkpoint=path, callbacks=[second], **common, **pipeline)
        rest, _ = fit(shuffled(22), seed=6, checkpoint=folder / "on_train_batch_end-2.ckpt", **common)
    for model, steps in ((part, 8), (rest, 10)):
        assert [step[:3] for step in model.seen] == [step[:3] for step in whole.seen[steps:]]
        resume_job.alike([step[3] for step in model.seen], [step[3] for step in whole.seen[steps:]], "losses")
        for key, value in whole.state_dict().items():
            resume_job.alike(model.state_dict()[key], value, key)


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("names", [("ddp", "zero", "own_state", "single_error"), ("replicas",)], ids="/".join)
def test_two_processes_with_samples_and_random_numbers_of_their_own(names: Sequence[str]) -> None:
    run(two_processes, names, timeout_seconds=240)


def two_processes(names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        launch(Path(folder), *names)


@pytest.mark.slow
def test_another_number_of_processes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """From one process to two and back within one epoch: every batch of both has the samples of one's."""
    whole = run(in_one_process, tmp_path)
    seen = run(launch, tmp_path, "between", timeout_seconds=120)
    run(back_in_one_process, tmp_path, whole, seen)


ONE = {"seed": 3, "max_epochs": 1}


def in_one_process(folder: Path) -> list[list[int]]:
    (folder / "one").mkdir()
    saves = resume_job.Saves(folder / "one", [("on_train_batch_end", 2)])
    return [step[2] for step in fit(shuffled(22), callbacks=[saves], **ONE)[0].seen]


def back_in_one_process(folder: Path, whole: list[list[int]], seen: Any) -> None:
    together = [sorted(first + second) for first, second in zip(*seen["taken over"], strict=True)]
    assert together == [sorted(ids) for ids in whole[2:]]
    rest, _ = fit(shuffled(22), checkpoint=folder / "taken over/on_train_batch_end-2.ckpt", **ONE)
    assert [step[2] for step in rest.seen] == whole[4:]
    rest, _ = fit(shuffled(22), checkpoint=folder / "begun/on_train_batch_end-2.ckpt", **ONE)
    begun = [row for rank in seen["begun"] for ids in rank[:2] for row in ids]
    assert sorted(begun + [row for step in rest.seen for row in step[2]]) == list(range(22))
    drawn = folder / "drawn/on_train_batch_end-2.ckpt"
    with pytest.raises(MisconfigurationException, match="in 2 processes, of samplers whose order cannot be divided"):
        fit(lambda: DataLoader(Rows(22), batch_size=4, sampler=Draws(22)), checkpoint=drawn, **ONE)


def launch(folder: Path, *names: str) -> Any:
    """Runs in the harness's child, which has trained nothing yet, and so can be forked."""
    num_copies = 1 + names.count("single_error")
    assert Script(resume_job.__file__, str(folder / "results"), *names, num_copies=num_copies).wait(timeout=230) == 0
    return torch.load(folder / "results")
