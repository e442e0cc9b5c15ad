"""Errors that only follow from the failure of another process."""

import pytest
from torch.distributed import DistBackendError

from strategies.common.errors import PeerFailed, PeerSilent, WorkerLost, is_consequence


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (PeerFailed("stage 1 failed"), True),
        (PeerSilent("stage 1"), True),
        (DistBackendError("NCCL communicator was aborted on rank 0."), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9"), True),
        (WorkerLost("stage 1 was killed"), False),
        (ValueError("an error of a layer"), False),
        (BrokenPipeError("Broken pipe"), False),
    ],
)
def test_consequences(error: Exception, follows: bool) -> None:
    assert is_consequence(error) == follows
