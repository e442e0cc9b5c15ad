"""Random state in checkpoints: every kind of generator comes back from what ``weights_only`` loads."""

import io
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainer.resume.random_state import (
    RandomStateReader,
    generator_state,
    plain,
    preserved_random_state,
    random_state,
    set_generator_state,
    set_random_state,
)


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(plain(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def draws() -> list[Any]:
    return [torch.rand(3).tolist(), random.gauss(0, 1), np.random.randn(), random.random()]


def test_of_the_process() -> None:
    random.gauss(0, 1)  # leaves a second number behind
    state = saved_and_loaded(random_state())
    first = draws()
    assert draws() != first
    set_random_state(state)
    assert draws() == first


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda own: torch.rand(3, generator=own).tolist()),
        (random.Random(1), lambda own: own.random()),
        (np.random.RandomState(1), lambda own: own.rand()),
        (np.random.default_rng(1), lambda own: own.random()),
        (np.random.Generator(np.random.MT19937(1)), lambda own: own.random()),
        (np.random.Generator(np.random.Philox(1)), lambda own: own.random()),
    ],
)
def test_of_a_generator(generator: Any, draw: Callable[[Any], Any]) -> None:
    state = saved_and_loaded(generator_state(generator))
    first = draw(generator)
    assert draw(generator) != first
    set_generator_state(generator, state)
    assert draw(generator) == first


def test_what_is_done_in_between_leaves_no_trace() -> None:
    before = saved_and_loaded(random_state())
    with pytest.raises(KeyError), preserved_random_state():
        draws()
        raise KeyError
    expected = draws()
    set_random_state(before)
    assert draws() == expected


def test_the_reader_reads_what_changes() -> None:
    # Numbers that randn and gauss leave behind are not among the words that are compared.
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: random.random(),
        lambda: np.random.rand(),
        lambda: torch.rand(1),
        lambda: np.random.randn(),
        lambda: np.random.randn(),
        lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1),
        lambda: np.random.seed(1),
        lambda: random.seed(1),
        lambda: np.random.set_state(np.random.RandomState(5).get_state()),
    ]
    reader = RandomStateReader()
    for change in [*changes, *reversed(changes)]:
        change()
        assert plain_lists(reader.read()) == plain_lists(random_state())


def plain_lists(state: dict[str, Any]) -> Any:
    return plain(state | {"torch": state["torch"].tolist()})


def test_the_reader_keeps_what_does_not_change() -> None:
    np.random.seed(0)
    reader = RandomStateReader()
    first = reader.read()
    torch.rand(1)
    second = reader.read()
    assert second["python"] is first["python"] and second["numpy"] is first["numpy"]
    assert not torch.equal(second["torch"], first["torch"])


def test_the_reader_reads_any_generator_of_numpy() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.Philox(1))
        reader = RandomStateReader()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's get_state returns no tuple here
            first = plain_lists(reader.read())
            np.random.rand()
            assert plain_lists(reader.read()) == plain_lists(random_state()) != first
    finally:
        np.random.set_bit_generator(before)
