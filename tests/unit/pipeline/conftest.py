"""Two connected ranks, which are two threads here."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

from strategies.launch.session import Session, join_data_plane


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    session = Session(tmp_path.as_uri(), "token", 2, timeout_seconds=5.0, threads=1, paths=[], driver_pid=0)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: join_data_plane(session, rank), range(2))
    yield first, second
