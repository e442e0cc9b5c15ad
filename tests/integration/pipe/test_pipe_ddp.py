"""``Pipe`` within DistributedDataParallel: two ranks with half of each batch, against one process, in float64."""

import multiprocessing
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from skip_nets import u_net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from strategies.pipeline import Pipe
from strategies.pipeline.stage.layers import RECOMPUTE_MODES as MODES


def net() -> nn.Sequential:
    model = u_net()
    model[3] = nn.GroupNorm(2, 12)  # BatchNorm would see half of the rows
    return model


def trained(model: nn.Module, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Four steps, one of which accumulates."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    for step in range(4):
        x = torch.rand(12, 2, 8, generator=generator)[rank::ranks]
        output = model(x)
        output = output if isinstance(output, torch.Tensor) else output.local_value()
        output.square().mean().backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def rank_of_two(rank: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/ddp", rank=rank, world_size=2)
    found = {}
    for mode in MODES:
        for arguments in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            pipe = DistributedDataParallel(Pipe(net(), chunks=4, checkpoint=mode), **arguments)
            found[f"{mode} {arguments}"] = trained(pipe, rank, 2)
    dist.destroy_process_group()
    del os.environ["GLOO_SOCKET_IFNAME"]
    return found


def two_ranks() -> dict[str, Any]:
    other = multiprocessing.get_context("spawn").Process(target=rank_of_two, args=(1, os.getcwd()))
    other.start()
    found = rank_of_two(0, os.getcwd())
    other.join()
    assert other.exitcode == 0
    return {**found, "one process": trained(net(), 0, 1)}


@pytest.mark.slow
def test_two_ranks_train_as_one_process():
    found = run(two_ranks, allow=["port"])  # torch keeps that of its default process group after destroying it
    expected = found.pop("one process")
    assert len(found) == 9
    for name, state in found.items():
        assert list(state) == list(expected)
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
