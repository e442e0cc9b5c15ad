"""Python's generator as bytes."""

import random

import pytest
from torch import device

from strategies.common.random_seeds import PythonGenerator, preserved_random_state


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_state_comes_back_with_the_number_that_gauss_leaves_behind(has_memory: bool) -> None:
    python = PythonGenerator()
    assert python._words is not None, "the memory of CPython's generator is not where it was"
    if not has_memory:  # as under another implementation of Python
        python._words = None
    with preserved_random_state(device("cpu")):
        for num_draws in (0, 1, 700):
            random.seed(num_draws)
            for _ in range(num_draws):
                random.gauss(0, 1)
            as_python_has_it, state = random.getstate(), python.getstate()
            drawn = [random.gauss(0, 1), random.random()]
            random.seed(5)
            python.setstate(state)
            assert random.getstate() == as_python_has_it
            assert [random.gauss(0, 1), random.random()] == drawn
