"""Which data plane the stages of a pipeline use."""

from typing import Any

import pytest
import torch

from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.transport.planes import chosen_plane


def devices(*names: str) -> list[torch.device]:
    return [torch.device(name) for name in names]


@pytest.mark.parametrize(
    ("names", "hosts", "expected"),
    [
        (["cuda:0", "cuda:1"], [0, 0], "nccl"),
        (["cuda:0", "cuda:1", "cuda:2", "cuda:3"], [0, 0, 0, 0], "nccl"),
        (["cuda:0", "cuda:0"], [0, 1], "nccl"),  # on two hosts
        (["cuda:0", "cuda:0"], [0, 0], "gloo"),
        (["cuda:0", "cuda:1", "cuda:0"], [0, 0, 0], "gloo"),
        (["cpu", "cuda:0"], [0, 0], "gloo"),
        (["cpu", "cpu"], [0, 0], "gloo"),
        (["cuda:0"], [0], "gloo"),  # there is nothing to send
    ],
)
def test_automatic_choice(monkeypatch: Any, names: list[str], hosts: list[int], expected: str) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert chosen_plane("auto", devices(*names), hosts, is_ordered=True) == expected
    assert chosen_plane("auto", devices(*names), hosts, is_ordered=False) == "gloo"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert chosen_plane("auto", devices(*names), hosts, is_ordered=True) == "gloo"


def test_a_plane_that_was_asked_for() -> None:
    cpus, gpus = devices("cpu", "cpu"), devices("cuda:0", "cuda:1")
    for plane in ("gloo", "simulated", "simulated-serial"):
        assert chosen_plane(plane, cpus, [0, 0], is_ordered=True) == plane
    assert chosen_plane("gloo", gpus, [0, 0], is_ordered=True) == "gloo"
    assert chosen_plane("nccl", gpus, [0, 0], is_ordered=True) == "nccl"
    assert chosen_plane("simulated", devices("cpu"), [0], is_ordered=True) == "gloo"


@pytest.mark.parametrize(
    ("plane", "names", "message"),
    [
        ("nccl", ["cuda:0", "cuda:1", "cuda:0"], r"\['cuda:0', 'cuda:1', 'cuda:0'\]: stages share cuda:0.*'gloo'"),
        ("nccl", ["cpu", "cuda:0"], r"a GPU for each stage.*some are not GPUs.*data_plane='gloo'"),
        ("simulated", ["cuda:0", "cuda:1"], r"simulates devices on CPUs, but.*cuda:0.*accelerator='cpu'"),
    ],
)
def test_what_cannot_be(plane: str, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen_plane(plane, devices(*names), [0] * len(names), is_ordered=True)


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"Unknown data_plane 'nvcl'; did you mean 'nccl'"):
        Settings(data_plane="nvcl")
    for plane in ("nccl", "simulated"):
        with pytest.raises(ValueError, match=rf"{plane}.*pipelined_backward=False.*Leave pipelined_backward out"):
            Settings(data_plane=plane, pipelined_backward=False)
    assert Settings(pipelined_backward=False).plane(devices("cpu", "cpu"), [0, 0]) == "gloo"
