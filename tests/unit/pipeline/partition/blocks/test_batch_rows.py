"""Which tensors have rows, decided by calls with two numbers of rows."""

from typing import Any

import pytest
import torch
from torch import zeros

from strategies.pipeline.partition.blocks.batch_rows import are_rows, decide, kinds_of, num_rows, square_in, with_rows
from strategies.pipeline.stage.microbatch.split import NoChunk


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (zeros(8, 3), zeros(4, 3), True),
        (zeros(8, 3), zeros(8, 3), False),  # 8 positions
        (zeros(1, 5), zeros(1, 5), False),
        (zeros(()), zeros(()), False),
        (zeros(16, 3), zeros(8, 3), None),  # rows times heads
        (zeros(3, 8), zeros(3, 4), None),  # rows in the second dimension
        (zeros(8, 8), zeros(4, 4), None),
        (None, None, False),
        (None, zeros(4, 3), None),
    ],
)
def test_one_tensor(one: Any, other: Any, expected: bool | None) -> None:
    assert decide([one], [other], 8, 4) == [expected]


def test_calls_with_other_numbers_of_tensors_tell_nothing() -> None:
    assert decide([zeros(8), zeros(8)], [zeros(4)], 8, 4) == [None, None]


def test_rows_of_the_arguments_of_a_model() -> None:
    batch = {"ids": zeros(6, 9), "mask": zeros(6, 9), "positions": zeros(1, 9), "scale": zeros(()), "name": "x"}
    assert num_rows(((), batch)) == 6
    assert num_rows(((), {"positions": zeros(1, 9)})) == 1
    assert num_rows(((3,), {})) == 0
    fewer = with_rows(batch, 6, slice(2))
    assert [tuple(leaf.shape) for leaf in fewer.values() if isinstance(leaf, torch.Tensor)] == [
        *((2, 9), (2, 9), (1, 9), ())
    ]


def test_a_decision_holds_for_another_size_of_batch_but_not_for_other_kinds() -> None:
    assert kinds_of([zeros(8, 3), None, zeros(1, 8)], 8) == kinds_of([zeros(5, 3), None, zeros(1, 5)], 5)
    assert kinds_of([zeros(8, 3)], 8) != kinds_of([zeros(8, 3)], 4)
    assert kinds_of([zeros(8, 3), None], 8) != kinds_of([None, zeros(8, 3)], 8)
    assert kinds_of([zeros(8, 3)], 8) != kinds_of([zeros(8, 3).double()], 8)


def test_outputs_of_microbatches_that_can_be_joined() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    assert are_rows(rows.split([3, 2, 1]), [3, 2, 1], [rows])
    assert are_rows(rows.split([4, 2]), [2, 1], [rows[:3]])  # two for each row
    assert not are_rows([zeros(1, 2)] * 3, [2, 2, 2], [rows])
    assert not are_rows([zeros(2, 2)] * 3, [2, 2, 2], [rows])  # equal, so probably the same for all rows
    assert not are_rows([zeros(()), zeros(())], [2, 2], [rows[:4]])
    same = rows[:2].repeat(3, 1)
    assert are_rows([zeros(2, 2)] * 3, [2, 2, 2], [same, same])  # equal, but so are the inputs
    assert not are_rows([zeros(2, 2)] * 3, [2, 2, 2], [same, rows])
    assert not are_rows([zeros(1, 2)] * 3, [2, 2, 2], [same])


def test_fewer_rows_are_a_copy_in_which_the_same_tensor_is_the_same() -> None:
    x = zeros(4, 2)
    first, again, whole = with_rows([x, x, (bias := zeros(3))], 4, slice(2))
    assert first is again and first.shape == (2, 2)
    first.add_(1), whole.add_(1)
    assert not x.any() and not bias.any()


def test_marked_tensors_and_weights_of_the_model_have_no_rows() -> None:
    weight, cls = torch.nn.Parameter(zeros(4, 4)), torch.nn.Parameter(zeros(1, 2))
    given = [zeros(4, 2), NoChunk(zeros(4, 2)), weight, weight.t(), weight[:, :2], cls.expand(4, -1), weight * 2]
    assert num_rows([zeros(3, 2), NoChunk(zeros(4, 2)), NoChunk(zeros(4))]) == 3
    assert square_in([zeros(4, 2), NoChunk(zeros(4, 4))], 4) is None
    fewer = with_rows(given, 4, slice(2), [weight, cls])
    assert [len(tensor) for tensor in fewer] == [2, 4, 4, 4, 4, 2, 2]
