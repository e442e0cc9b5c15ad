"""Splitting a batch into micro-batches and merging what comes out: sizes, nesting, and what cannot be split."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from strategies.pipeline import NoChunk
from strategies.pipeline.stage.microbatch.split import merge, split, without_rows


@given(rows=st.integers(0, 40), microbatches=st.integers(1, 12))
def test_parts_are_in_order_and_as_even_as_can_be(rows: int, microbatches: int) -> None:
    batch = torch.arange(rows * 2).view(rows, 2)
    parts = split(batch, microbatches)
    sizes = [part.shape[0] for part in parts]
    assert len(parts) == max(1, min(rows, microbatches))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(merge(parts), batch)


def test_an_indivisible_batch_is_not_chunked() -> None:
    # chunk(4) would give three parts of two rows.
    assert [part.tolist() for part in split(torch.arange(6), 4)] == [[0, 1], [2, 3], [4], [5]]


def test_fewer_rows_than_microbatches() -> None:
    assert [part.tolist() for part in split(torch.arange(3), 8)] == [[0], [1], [2]]


def test_an_empty_batch_is_one_empty_part() -> None:
    (part,) = split(torch.empty(0, 5), 4)
    assert part.shape == (0, 5)
    assert merge([part]).shape == (0, 5)


def test_parts_are_views() -> None:
    batch = torch.zeros(4, 3)
    split(batch, 2)[1].fill_(7)
    assert batch[:, 0].tolist() == [0, 0, 7, 7]


def test_nested_values() -> None:
    scale = torch.tensor(3.0)
    value = {"x": (torch.arange(5), None), "rest": [torch.arange(10).view(5, 2), scale, "word", 7]}
    first, second = split(value, 2)
    assert first["x"][0].tolist() == [0, 1, 2] and second["x"][0].tolist() == [3, 4]
    assert second["rest"][0].tolist() == [[6, 7], [8, 9]]
    for part in (first, second):
        assert isinstance(part["x"], tuple) and isinstance(part["rest"], list)
        assert part["x"][1] is None
        assert part["rest"][1] is scale  # without a dimension there is nothing to split
        assert part["rest"][2:] == ["word", 7]


def test_merge_is_the_inverse() -> None:
    value = OrderedDict(x=(torch.randn(7, 2), None), mask=torch.randn(7) > 0, word="word")
    merged = merge(split(value, 3))
    assert type(merged) is OrderedDict and list(merged) == list(value)
    assert torch.equal(merged["x"][0], value["x"][0]) and merged["x"][1] is None
    assert torch.equal(merged["mask"], value["mask"]) and merged["word"] == "word"


def test_one_part_is_returned_as_it_is() -> None:
    only = (torch.tensor(1.5), "anything")
    assert merge([only]) is only


@pytest.mark.parametrize("value", [None, 3, (torch.tensor(1.0), "word"), {}, ()])
def test_nothing_to_split(value: Any) -> None:
    with pytest.raises(ValueError, match="got no tensor with a batch dimension, so there is nothing to split"):
        split(value, 2)


def test_tensors_of_different_length() -> None:
    for value, message in [
        (
            (torch.zeros(4), [torch.zeros(3, 4), torch.zeros(4, 3)]),
            r"input\[0\] has 4 rows, but input\[1\]\[0\] of shape \[3, 4\] has 3\. .* all rows share in NoChunk \(from",
        ),
        (
            {"positions": torch.zeros(1, 6), "mask": torch.zeros(1, 1, 6, 6), "x": torch.zeros(8, 6)},
            r"input\['x'\] has 8 rows, but input\['positions'\] of shape \[1, 6\] has 1, input\['mask'\] of shape "
            r"\[1, 1, 6, 6\] has 1\.",
        ),
    ]:
        with pytest.raises(
            ValueError, match=rf"split .* along its first dimension, which must be the batch: {message}"
        ):
            split(value, 2)


def test_what_is_marked_is_not_split() -> None:
    mask, x = torch.zeros(1, 6), torch.zeros(4, 6)
    for part in split((NoChunk(mask), {"x": x}, [NoChunk(x)]), 2):
        assert type(part[0]) is type(part[2][0]) is torch.Tensor
        assert (part[0].shape, part[1]["x"].shape, part[2][0].shape) == ((1, 6), (2, 6), (4, 6))
        assert part[0].data_ptr() == mask.data_ptr()


def test_outputs_without_a_batch_dimension() -> None:
    with pytest.raises(ValueError, match=r"without a batch dimension, .* reduce it in training_step"):
        merge([torch.tensor(1.0), torch.tensor(2.0)])


WEIGHT = nn.Parameter(torch.randn(6, 4))


@pytest.mark.parametrize(
    ("output", "shape"),
    [
        (lambda x: WEIGHT, [6, 4]),
        (lambda x: torch.zeros(3, 4), None),  # as of a new head, or a mask of ones
        (lambda x: WEIGHT[:1].expand(3, -1), None),
        (lambda x: x.repeat_interleave(5, dim=0), None),  # such as one row per token
        (lambda x: x[:, :0], None),
        (lambda x: x.sum(0), [4]),
        (lambda x: x.sum(), []),
        (lambda x: x[None].expand(5, -1, -1), [5, 3, 4]),
        (lambda x: x[None].expand(6, -1, -1), [6, 3, 4]),
        (lambda x: torch.arange(6.0), [6]),
    ],
)
def test_outputs_without_rows_are_found(output: Callable[[Tensor], Tensor], shape: list[int] | None) -> None:
    value = torch.randn(9, 4), NoChunk(torch.arange(6.0))
    inputs = split(value, 3)
    found = without_rows([{"x": x, "other": output(x)} for x, _ in inputs], value, inputs, set())
    assert found == (None if shape is None else f"output['other'] of shape {shape} for a micro-batch of 3 rows")


def test_micro_batches_of_different_sizes_tell_the_rows() -> None:
    inputs = split(torch.randn(5, 3), 2)
    assert without_rows([part.repeat_interleave(2, 0) for part in inputs], torch.zeros(5, 3), inputs, set()) is None
    assert without_rows([torch.randn(6, 3)] * 2, torch.zeros(5, 3), inputs, set()) is not None


def test_selected_rows_are_known_by_their_varying_number() -> None:
    value, varying = torch.zeros(6, 3), set[str]()
    inputs = split(value, 2)
    assert without_rows([torch.zeros(4, 2), torch.zeros(4, 2)], value, inputs, varying) is not None
    assert (
        without_rows([torch.zeros(4, 3, 2), torch.zeros(5, 3, 2)], value, inputs, varying) is not None
    )  # [length, b, …]
    assert without_rows([torch.zeros(4, 2), torch.zeros(5, 2)], value, inputs, varying) is None
    assert without_rows([torch.zeros(4, 2), torch.zeros(4, 2)], value, inputs, varying) is None


@pytest.mark.parametrize(
    "parts",
    [
        [(torch.zeros(1),), [torch.zeros(1)]],
        [(torch.zeros(1),), (torch.zeros(1), torch.zeros(1))],
        [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}],
    ],
)
def test_outputs_nested_differently(parts: list[Any]) -> None:
    with pytest.raises(ValueError, match="returned differently nested outputs"):
        merge(parts)


@pytest.mark.parametrize("parts", [["a", "b"], [1, 1, 2], [None, torch.zeros(2)]])
def test_outputs_that_are_not_tensors_must_agree(parts: list[Any]) -> None:
    kind = type(parts[0]).__name__
    with pytest.raises(ValueError, match=f"returned a different {kind} for each micro-batch"):
        merge(parts)
