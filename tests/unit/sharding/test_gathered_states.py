"""Gathering divided optimizer states, by two threads that stand for two ranks."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from strategies.launch.session import join_group
from strategies.sharding.gathered_states import gather_states


def test_an_empty_state_replaces_no_other(tmp_path: Path) -> None:
    """Reading ``optimizer.state[p]`` leaves one on a rank that has no state of ``p``."""
    states: list[dict[Any, Any]] = [{2: {}, 0: {"step": 3}, 1: {}}, {0: {}, 1: {"step": 4}, "all": torch.ones(2)}]

    def gathered(rank: int) -> dict[Any, Any]:
        return gather_states(states[rank], join_group(f"{tmp_path.as_uri()}/ranks", rank, 2, 30))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(gathered, range(2))
    assert torch.equal(first.pop("all"), torch.ones(2))
    assert first == {0: {"step": 3}, 1: {"step": 4}, 2: {}} and not second
