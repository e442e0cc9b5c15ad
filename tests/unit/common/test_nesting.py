"""Descriptions of nested structures, and structures with values in place of markers."""

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from strategies.common.nesting import Unusual, filled, structure_of

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Place:
    """The place of a value."""

    number: int


def described(value: Any) -> Any:
    return structure_of(value, lambda tensor: (tensor.shape, tensor.dtype))


ALIKE = [
    (torch.zeros(2, 3), torch.ones(2, 3)),
    ((torch.zeros(2), {"a": [1, None]}), (torch.ones(2), {"a": [1, None]})),
    (math.nan, math.nan),
]
DIFFERENT = [
    torch.zeros(2),
    torch.zeros(2, 1),
    torch.zeros(2, dtype=torch.float64),
    torch.nn.Parameter(torch.zeros(2)),
    (torch.zeros(2),),
    [torch.zeros(2)],
    (torch.zeros(2), None),
    *(0, 0.0, -0.0, False, None, "0", b"0", 1, True, 1.0),
    *({"a": 1}, {"a": True}, {"b": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {1: 1}, {True: 1}),
    *((), [], {}),
]


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=["tensors", "nested", "not a number"])
def test_values_that_differ_in_their_tensors_only_have_one_description(one: Any, other: Any) -> None:
    assert described(one) == described(other)


def test_all_other_values_have_descriptions_of_their_own() -> None:
    assert len({described(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_tensors_are_described_in_the_order_of_leaves() -> None:
    a, b, c = (torch.zeros(n) for n in range(3))
    seen: list[Tensor] = []
    structure_of(({"z": a, "a": [b]}, c), lambda tensor: seen.append(tensor))
    assert [id(tensor) for tensor in seen] == [id(a), id(b), id(c)]


@pytest.mark.parametrize(
    "value",
    [Pair(1, 2), OrderedDict(a=1), {Place(0): 1}, Place(0), {1, 2}, torch.Size([1])],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_have_no_description(value: Any) -> None:
    with pytest.raises(Unusual):
        described((value,))


@pytest.mark.parametrize(
    "template",
    [
        Place(1),
        (Place(0), [Place(1), None, 2.5], {"a": Place(1), "b": "text"}),
        Pair(Place(0), [Place(1)]),
        OrderedDict(a=Place(1), b=(Place(0),)),
        (Pair(Place(1), None), {3: torch.Size([1]), 4: Place(0)}),
    ],
    ids=["alone", "plain", "namedtuple", "ordered", "mixed"],
)
def test_markers_are_replaced_in_all_containers(template: Any) -> None:
    values = ["zero", "one"]

    def expected(node: Any) -> Any:
        if isinstance(node, Place):
            return values[node.number]
        if isinstance(node, Pair):
            return Pair(*map(expected, node))
        if isinstance(node, dict):
            return type(node)((key, expected(part)) for key, part in node.items())
        if type(node) in (tuple, list):
            return type(node)(map(expected, node))
        return node

    found = filled(template, Place, lambda place: values[place.number])
    assert found == expected(template)
    assert type(found) is type(expected(template))
