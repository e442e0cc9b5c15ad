"""Rows of parameters and of optimizer states: which rank has which, and the shapes of parts and wholes."""

from typing import Any

import pytest
import torch

from strategies.checkpoint.divided_rows import divided_states
from strategies.optim.restricted import is_by_element
from strategies.sharding.rows import own_rows, rows_of, whole_shape


@pytest.mark.parametrize("num_rows", range(9))
@pytest.mark.parametrize("size", range(1, 6))
def test_rows_are_those_of_chunk(num_rows: int, size: int) -> None:
    chunks = torch.arange(num_rows).chunk(size)
    expected = [chunk.tolist() for chunk in chunks if len(chunk)]
    assert [list(rows) for rank in range(size) if (rows := rows_of(num_rows, rank, size))] == expected


@pytest.mark.parametrize("is_flat", [False, True])
def test_parts_make_up_the_whole(is_flat: bool) -> None:
    shape = torch.Size([5, 3])
    value = torch.arange(15.0)
    whole = value if is_flat else value.reshape(shape)
    parts = [own_rows(whole, shape, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat(parts), whole)
    for rank, part in enumerate(parts):
        rows = len(rows_of(5, rank, 3))
        assert is_by_element(part, (rows, 3))
        assert whole_shape(part, shape, rows) == whole.shape


def test_what_has_no_entry_for_each_element() -> None:
    assert not is_by_element(torch.tensor(1.0), (1,))
    assert not is_by_element(torch.ones(5), (5, 3))
    assert is_by_element(torch.ones(1), (1,))


@pytest.mark.parametrize(
    ("num_entries", "expected"),
    [
        ([{(0, "mean"): 2, (0, "step"): 0}, {(0, "mean"): 1, (0, "step"): 1}], {(0, "mean")}),  # 3 rows on 2 ranks
        ([{(0, "mean"): 1, (1, "mean"): 4, (0, "step"): 1, (1, "step"): 0}] * 2, {(0, "mean"), (1, "mean")}),
        ([{(0, "mean"): 1}, {}], {(0, "mean")}),  # a parameter of one row
        ([{(0, "kept"): 1, (1, "kept"): 0, (2, "kept"): 4}] * 2, {(0, "kept"), (2, "kept")}),
    ],
)
def test_all_ranks_decide_together_which_states_are_rows(num_entries: Any, expected: set[tuple[int, str]]) -> None:
    assert divided_states(num_entries) == expected
