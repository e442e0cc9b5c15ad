"""Splitting whole batches for code that takes batches: every structure, and what is not clear is said by name."""

import pickle
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from strategies.common.torch_compat import tree_map_only, wrapper_of
from strategies.pipeline import NoChunk
from strategies.pipeline.stage.microbatch.split import split_batch


@given(rows=st.integers(0, 70), microbatches=st.integers(1, 64))
def test_parts_are_in_order_and_as_even_as_can_be(rows: int, microbatches: int) -> None:
    x, words = torch.arange(rows * 2).view(rows, 2), [str(k) for k in range(rows)]
    parts, sizes = split_batch((x, {"words": words}), microbatches)
    assert len(parts) == len(sizes) == max(1, min(rows, microbatches))
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert [len(part) for part, _ in parts] == sizes
    assert torch.equal(torch.cat([part for part, _ in parts]), x)
    assert [word for _, rest in parts for word in rest["words"]] == words


@given(rows=st.integers(1, 9), microbatches=st.integers(1, 12))
def test_sizes_are_those_of_the_pipeline(rows: int, microbatches: int) -> None:
    """Otherwise one number of micro-batches would mean two different things."""
    from strategies.pipeline.stage.microbatch.split import split

    x = torch.arange(rows)
    assert [part.tolist() for part in split_batch(x, microbatches)[0]] == [p.tolist() for p in split(x, microbatches)]


class Pair(NamedTuple):
    x: Tensor
    words: Any = None


@dataclass
class Sample:
    """Has a field that its constructor does not take."""

    x: Tensor
    name: str = "kept"
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.x * 2


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    inner: Any


class Words(UserDict):
    """As the batches of tokenizers are."""


def test_every_structure_comes_back_as_it_was() -> None:
    x, scale = torch.arange(5), torch.tensor(3.0)
    batch = {
        "list": [x, np.arange(10).reshape(5, 2)],
        "tuple": (x, list("abcde")),
        "named": Pair(x, tuple("abcde")),
        "data": Sample(x),
        "frozen": Frozen(x, Frozen(x, [None] * 5)),
        "ordered": OrderedDict(b=x, a=x),
        "words": Words(ids=x),
        "scale": scale,
        "shared": ["one", "of", "four", "words"],
        "empty": [],
        "nothing": None,
        "text": "abcde",
        "number": 5,
        "class": Sample,
    }
    (first, second), sizes = split_batch(batch, 2)
    assert sizes == [3, 2] and list(second) == list(batch)
    assert second["list"][0].tolist() == [3, 4] and second["list"][1].tolist() == [[6, 7], [8, 9]]
    assert isinstance(second["list"], list) and isinstance(second["list"][1], np.ndarray)
    assert isinstance(second["tuple"], tuple) and second["tuple"][1] == ["d", "e"]
    assert isinstance(second["named"], Pair) and second["named"].words == ("d", "e")
    assert isinstance(second["data"], Sample)
    assert second["data"].twice.tolist() == [6, 8] and second["data"].name == "kept"
    assert isinstance(second["frozen"], Frozen)
    assert second["frozen"].inner.x.tolist() == [3, 4] and second["frozen"].inner.inner == [None] * 2
    assert list(second["ordered"]) == ["b", "a"] and isinstance(second["ordered"], OrderedDict)
    assert isinstance(second["words"], Words) and second["words"]["ids"].tolist() == [3, 4]
    for part in (first, second):
        assert part["scale"] is scale
        for name in ("shared", "empty", "nothing", "text", "number", "class"):
            assert part[name] == batch[name]


def test_the_batch_itself_stays_as_it_was() -> None:
    batch = {"data": Sample(torch.arange(4)), "list": [torch.arange(4), ["a"] * 4], "words": Words(x=torch.arange(4))}
    before = pickle.dumps(batch)
    parts, _ = split_batch(batch, 3)
    parts[0]["list"].append(1)
    parts[0]["words"]["new"] = 1
    assert pickle.dumps(batch) == before


def test_parts_are_views() -> None:
    batch = torch.zeros(4, 3)
    split_batch([batch], 2)[0][1][0].fill_(7)
    assert batch[:, 0].tolist() == [0, 0, 7, 7]


def notices_changes_of_other_parts(batch: Any, name: str) -> bool:
    """Whether autograd refuses a saved part after a change of the next part."""
    (first, second), _ = split_batch(batch, 2)
    assert first[name].data_ptr() == batch[name].data_ptr()
    weight = torch.ones(first[name].shape, requires_grad=True)
    loss = (first[name] * weight).sum()
    second[name].zero_()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return True
    return False


def test_a_change_of_one_part_is_no_change_of_others() -> None:
    for x in (torch.ones(4, 3), torch.ones(3, 4).T, torch.ones(4, 1)):
        assert not notices_changes_of_other_parts({"x": x, "y": torch.arange(4)}, "x")
        assert not x[2:].any() and x[:2].all()


def test_a_change_of_a_part_itself_is_noticed() -> None:
    part = split_batch(torch.ones(4, 3), 2)[0][0]
    loss = (part * torch.ones(3, requires_grad=True)).sum()
    part[0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_change_through_other_memory_of_the_batch_is_noticed() -> None:
    x, windows = torch.ones(4, 3), torch.ones(8)[:5].unfold(0, 2, 1)  # has as many elements as its memory
    assert notices_changes_of_other_parts({"x": x, "y": x}, "x")
    assert notices_changes_of_other_parts({"x": x, "y": x.detach()[:, 1:]}, "x")
    assert notices_changes_of_other_parts({"x": x, "shared": NoChunk(x[:2])}, "x")
    assert notices_changes_of_other_parts({"x": windows}, "x")
    assert notices_changes_of_other_parts({"x": torch.ones(8, 3)[:4]}, "x")  # of a buffer of the user


def test_other_kinds_of_tensors_stay_as_they_are() -> None:
    required, special = torch.ones(4, 3, requires_grad=True), torch.ones(4, 3).as_subclass(Special)
    with torch.inference_mode():
        inference = torch.ones(4, 3)
    parts, _ = split_batch([required, special, inference, torch.ones(4, dtype=torch.cfloat).conj()], 2)
    assert parts[1][0].grad_fn is not None
    assert type(parts[1][1]) is Special
    assert parts[1][2].is_inference()
    assert parts[1][3].is_conj()


class Special(Tensor):
    """A subclass, such as an image of torchvision."""


def test_a_subclass_without_memory() -> None:
    """Such as a ``DTensor``, which wraps another tensor."""
    parts, _ = split_batch({"x": Wraps(torch.arange(4)), "y": torch.arange(4)}, 2)
    assert parts[1]["x"].inner.tolist() == parts[1]["y"].tolist() == [2, 3]


class Wraps(Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wraps":
        wrapper = wrapper_of(cls, inner.shape, inner.dtype, inner.device)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*tree_map_only(cls, lambda wrapper: wrapper.inner, args), **(kwargs or {})))


def test_words_alone() -> None:
    assert split_batch(["a", "b", "c"], 2) == ([["a", "b"], ["c"]], [2, 1])
    assert split_batch({"text": ("a", "b", "c"), "label": [1, 2, 3]}, 9)[0][2] == {"text": ("c",), "label": [3]}


def test_entries_of_different_length_are_one_for_each_row() -> None:
    tokens = [[1, 2], [3], [4, 5, 6]]
    parts, _ = split_batch({"x": torch.arange(3), "tokens": tokens}, 3)
    assert [part["tokens"] for part in parts] == [[row] for row in tokens]


def test_dicts_one_for_each_row() -> None:
    parts, _ = split_batch([torch.arange(2), [{"id": 7}, {"id": 8}]], 2)
    assert [part[1] for part in parts] == [[{"id": 7}], [{"id": 8}]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(4, 2), "mask": [torch.ones(3)]}, r"batch\['x'\] has 4, batch\['mask'\]\[0\] has 3"),
        (Pair(torch.zeros(4), np.zeros(2)), r"batch\.x has 4, batch\.words has 2"),
        (Frozen(torch.zeros(4), {7: torch.zeros(1)}), r"batch\.x has 4, batch\.inner\[7\] has 1"),
        ([torch.zeros(0), torch.zeros(2)], r"batch\[0\] has 0, batch\[1\] has 2"),
        ({"text": ["a", "b"], "label": (1, 2, 3)}, r"batch\['text'\] has 2, batch\['label'\] has 3"),
        (pack_sequence([torch.zeros(3), torch.zeros(1)]), r"batch\.data has 4, batch\.batch_sizes has 3"),
    ],
)
def test_different_numbers_of_rows_are_an_error_that_names_the_fields(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"not clear how many rows.*{message}.*define split_batch\(self, batch"):
        split_batch(batch, 2)


@pytest.mark.parametrize("batch", ["words", 3, None, {}, {"scale": torch.tensor(1.0)}, Sample, object()])
def test_a_batch_without_rows_is_an_error(batch: Any) -> None:
    with pytest.raises(ValueError, match=rf"type {type(batch).__name__} has nothing with rows.*define split_batch"):
        split_batch(batch, 2)


def test_what_may_be_rows_or_fields_is_an_error() -> None:
    """Pairs of words come out of a loader as two fields, which nothing tells from two rows of two words."""
    pairs = [("a", "b"), ("c", "d")]
    with pytest.raises(
        ValueError, match=r"not clear how to split batch\['pairs'\]: it has 2 entries, one for each row"
    ):
        split_batch({"x": torch.zeros(2), "pairs": pairs}, 2)
    with pytest.raises(ValueError, match="not clear how to split batch: it has 2 entries"):
        split_batch(pairs, 2)
    assert split_batch({"x": torch.zeros(2), "pairs": pairs}, 1)[0][0]["pairs"] == pairs  # nothing to be split
    (_, second), _ = split_batch({"x": torch.zeros(3), "pairs": [("a", "b", "c"), ("d", "e", "f")]}, 2)
    assert second["pairs"] == [("c",), ("f",)]
