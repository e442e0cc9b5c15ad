"""Which data plane the stages of a pipeline use."""

from typing import Any

import pytest
import torch

from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.transport.planes import chosen_plane, with_index


def devices(*names: str) -> list[torch.device]:
    return [torch.device(name) for name in names]


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        (["cuda:0", "cuda:1"], [0, 0]),
        (["cuda:0", "cuda:0"], [0, 1]),  # on two hosts
        (["cuda:0", "cuda:0"], [0, 0]),
        (["cpu", "cuda:0"], [0, 0]),
        (["cpu", "cpu"], [0, 0]),
        (["cuda:0"], [0]),  # there is nothing to send
    ],
)
@pytest.mark.parametrize("has_nccl", [True, False])
def test_nccl_is_not_chosen_unless_it_is_asked_for(
    monkeypatch: Any, names: list[str], hosts: list[int], has_nccl: bool
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    assert chosen_plane("auto", devices(*names), hosts) == "gloo"
    assert Settings().plane(devices(*names), hosts) == "gloo"


def test_nccl_for_stages_with_a_gpu_each(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert chosen_plane("nccl", devices("cuda:0", "cuda:1", "cuda:2", "cuda:3"), [0] * 4) == "nccl"
    assert chosen_plane("nccl", devices("cuda:0", "cuda:0"), [0, 1]) == "nccl"  # on two hosts
    assert chosen_plane("nccl", devices("cuda:0"), [0]) == "gloo"  # there is nothing to send
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match=r"'nccl' needs a build of torch with NCCL.*'gloo'"):
        chosen_plane("nccl", devices("cuda:0", "cuda:1"), [0, 0])


def test_a_plane_that_was_asked_for() -> None:
    cpus, gpus = devices("cpu", "cpu"), devices("cuda:0", "cuda:1")
    for plane in ("gloo", "simulated", "simulated-serial"):
        assert chosen_plane(plane, cpus, [0, 0]) == plane
    assert chosen_plane("gloo", gpus, [0, 0]) == "gloo"
    assert chosen_plane("simulated", devices("cpu"), [0]) == "gloo"


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
        chosen_plane(plane, devices(*names), [0] * len(names))


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"Unknown data_plane 'nvcl'; did you mean 'nccl'"):
        Settings(data_plane="nvcl")
    for plane in ("nccl", "simulated"):
        with pytest.raises(ValueError, match=rf"{plane}.*pipelined_backward=False.*Leave pipelined_backward out"):
            Settings(data_plane=plane, pipelined_backward=False)
    assert Settings(pipelined_backward=False).plane(devices("cpu", "cpu"), [0, 0]) == "gloo"


def test_the_number_of_communicators_of_each_stage(monkeypatch: Any) -> None:
    """Two for each neighbour in the ring of stages, and two for each process that shares tied parameters."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    layers = [torch.nn.Linear(2, 2) for _ in range(4)]
    names, numbers = devices("cuda:1", "cuda:2", "cuda:3", "cuda:0"), [1, 1, 1, 1]

    def communicators(**settings: Any) -> list[int]:
        return Pipeline(torch.nn.Sequential(*layers), numbers, names, Settings(**settings)).num_communicators

    assert communicators(data_plane="nccl") == [4, 4, 4, 4]
    assert communicators(data_plane="gloo") == [0, 0, 0, 0]
    layers[2].weight = layers[0].weight
    assert communicators(data_plane="nccl") == [6, 4, 6, 4]
    names[:], numbers[:] = devices("cuda:1", "cuda:0"), [2, 2]
    assert communicators(data_plane="nccl") == [6, 6]  # two edges between two processes, and a tie


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert [with_index(device) for device in devices("cuda", "cuda:1", "cpu")] == devices("cuda:3", "cuda:1", "cpu")
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert str(Pipeline(layers, [1, 1], devices("cpu", "cuda"), Settings()).device) == "cuda:3"
