"""Which errors say that a process group has lost a connection."""

import pytest
import torch.distributed as dist

from strategies.common.errors import WorkerLost
from strategies.launch.rank_monitor import is_lost_connection

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48867"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError(f"Gloo connectFullMesh failed with {GLOO}"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
    ],
)
def test_errors_of_a_process_group(error: Exception) -> None:
    assert is_lost_connection(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/data/gloo/rows.csv"),
        RuntimeError("cannot read /data/gloo/rows.csv:17"),
        ConnectionResetError(104, "Connection reset by peer"),
        ValueError(GLOO),
        WorkerLost(f"stage 1: {GLOO}"),
    ],
)
def test_errors_of_something_else(error: Exception) -> None:
    """The ranks stay, and so does the error: it is the user's, or that of a stage."""
    assert not is_lost_connection(error)
