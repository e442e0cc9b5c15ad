"""Micro-batches of rows of similar length."""

import random
from collections import UserDict
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from strategies.pipeline.stage.microbatch.by_length import cut, cut_by_costs, split_by_length


def batch_of(lengths: list[int], columns: int | None = None, **more: Any) -> dict[str, Any]:
    width = columns or max(lengths)
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), **more}


def test_rows_of_similar_length_and_no_columns_of_padding() -> None:
    batch = batch_of([9, 2, 3, 8, 2], columns=12, weight=torch.arange(5.0), name=["a", "b", "c", "d", "e"], scale=2)
    found = split_by_length(UserDict(batch), 18)
    shapes = [tuple(part["input_ids"].shape) for part in found.parts]
    assert sorted(found.rows) == [*range(5)] and sum(found.sizes) == 5
    assert all(rows * columns <= 18 for rows, columns in shapes) and shapes[-1][1] == 9
    assert all(type(part) is UserDict and part["scale"] == 2 for part in found.parts)
    start = 0
    for part, size, (rows, columns) in zip(found.parts, found.sizes, shapes, strict=True):
        own = found.rows[start : start + size]
        assert rows == size and part["name"] == ["abcde"[row] for row in own]
        assert part["weight"].tolist() == [float(row) for row in own]
        for name in ("input_ids", "attention_mask", "labels"):
            assert torch.equal(part[name], batch[name][own][:, :columns])
        assert not batch["attention_mask"][own][:, columns:].any() and part["attention_mask"][:, -1].any()
        start += size


def test_encoder_and_decoder_have_lengths_of_their_own() -> None:
    targets = torch.tensor([[1, 2, -100, -100], [1, 2, 3, -100], [5, -100, -100, -100]])
    mask = torch.tensor([[1] * 6, [1] * 5 + [0], [1] * 2 + [0] * 4])
    for part in split_by_length({"input_ids": mask, "attention_mask": mask, "labels": targets}, 100).parts:
        assert (part["labels"] != -100).any(0)[-1] and part["attention_mask"].any(0)[-1]
        assert part["input_ids"].shape == part["attention_mask"].shape
    same = {"input_ids": mask[:, :4], "attention_mask": mask[:, :4], "labels": targets}
    for part in split_by_length(same, 100).parts:  # the mask may belong to the labels
        assert part["labels"].shape == part["input_ids"].shape and part["attention_mask"].any(0)[-1]


def test_an_empty_batch_is_one_empty_part() -> None:
    empty = {name: value[:0] for name, value in batch_of([2, 3]).items()}
    found = split_by_length(empty, 8)
    assert found.sizes == [0] and found.parts == [empty]


def test_rows_that_are_padded_on_the_left_keep_their_columns() -> None:
    batch = batch_of([2, 4, 4, 2])
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    found = split_by_length(batch, 8)
    assert {part["input_ids"].shape[1] for part in found.parts} == {4} and max(found.sizes) <= 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2, 2), "this batch is a Tensor. Let the loader return"),
        ({"x": torch.zeros(2, 2)}, "a dict with the entries 'x'"),
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, "of shape \\[batch, tokens\\]"),
        (batch_of([2, 3], pixels=torch.zeros(2, 3, 5)), "but 'pixels' also has 3 columns"),
    ],
)
def test_batches_without_known_lengths_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_by_length(batch, 8)


def time_of(lengths: list[int], sizes: list[int], limit: int) -> float:
    costs, start = [], 0
    for size in sizes:
        costs.append(size * max(lengths[start : start + size]) + limit / 16)
        start += size
    return sum(costs) + 3 * max(costs)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_takes_less_time(seed: int) -> None:
    draw = random.Random(seed)
    lengths = sorted(draw.choices(range(1, 30), k=9))
    limit = draw.choice([30, 60, 100])
    sizes = cut(numpy.array([lengths]), limit)
    least = min(
        time_of(lengths, found, limit)
        for number in range(9)
        for places in combinations(range(1, 9), number)
        if _fits(lengths, found := [b - a for a, b in zip((0, *places), (*places, 9), strict=True)], limit)
    )
    assert _fits(lengths, sizes, limit) and time_of(lengths, sizes, limit) <= least * 1.02


@pytest.mark.parametrize("seed", range(10))
def test_no_other_cut_by_given_costs_takes_less_time(seed: int) -> None:
    """Such as measured costs, which grow with the rows; a micro-batch of infinite cost is none."""
    draw = random.Random(seed)
    costs = numpy.full((6, 7), numpy.inf)
    for first in range(6):
        costs[first, first + 1] = draw.uniform(1, 3)
    for size in range(2, 7):
        for first in range(7 - size):
            parts = max(costs[first, first + size - 1], costs[first + 1, first + size])
            costs[first, first + size] = parts + draw.uniform(0, 1) if draw.random() < 0.9 else numpy.inf

    def seconds(bounds: tuple[int, ...]) -> float:
        own = [float(costs[first, end]) for first, end in pairwise(bounds)]
        return sum(own) + stages * max(own)

    for stages in (1, 3):
        ends = (0, *accumulate(cut_by_costs(costs, 1 + stages)))
        least = min(seconds((0, *places, 6)) for number in range(6) for places in combinations(range(1, 6), number))
        assert seconds(ends) == pytest.approx(least)


def _fits(lengths: list[int], sizes: list[int], limit: int) -> bool:
    start, fits = 0, True
    for size in sizes:
        fits &= size == 1 or size * max(lengths[start : start + size]) <= limit
        start += size
    return fits


def test_many_rows_are_cut_in_no_time() -> None:
    lengths = torch.randn(512).mul(0.7).add(4).exp().clamp(16, 512).long().sort().values
    found = cut(lengths[None].numpy(), 4096)
    assert sum(found) == 512 and len(found) > 4


def padding(parts: list[Tensor]) -> float:
    return sum(part.numel() for part in parts) / sum(int(part.sum()) for part in parts)


def test_little_is_computed_for_padding() -> None:
    torch.manual_seed(0)
    lengths = torch.randn(64).mul(0.8).add(4.3).exp().clamp(16, 512).long().tolist()
    batch = batch_of(lengths)
    found = split_by_length(batch, 2048)
    assert padding([batch["attention_mask"]]) > 3
    assert padding([part["attention_mask"] for part in found.parts]) < 1.25
