"""The random states of a DataLoader's workers, sent with every batch and given to the workers of a resumed run.

Worker ``b % num_workers`` makes batch ``b`` of a pass. A run that continues with batch ``k`` starts new workers, and
worker 0 makes batch ``k``. Worker ``w`` therefore takes the role of worker ``(k + w) % num_workers``.
"""

import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from strategies.common.torch_compat import numpy_seed_of_worker
from trainer.resume.random_state import plain, random_state, set_random_state


class CollateAndReport:
    """A ``collate_fn`` that returns each batch with the worker's random state after it.

    The state is sent as bytes, because tensors would go through shared memory. It is empty if the worker has drawn no
    random number since the batch before.

    Args:
        collate_fn: The user's ``collate_fn``.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn, self._reported = collate_fn, b""

    def __call__(self, samples: Any) -> tuple[Any, bytes]:
        batch, state = self._collate_fn(samples), random_state()
        report = pickle.dumps({**state, "torch": state["torch"].numpy().tobytes()})
        if report == self._reported:
            return batch, b""
        self._reported = report
        return batch, report


def read_report(report: bytes | dict[str, Any]) -> dict[str, Any]:
    """Return the random state of a report as plain types and tensors, as which a checkpoint holds it already."""
    if isinstance(report, dict):
        return report
    state = pickle.loads(report)
    return plain({**state, "torch": torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8)})


class StartWorker:
    """A ``worker_init_fn`` that gives each worker its role.

    Args:
        worker_init_fn: The user's ``worker_init_fn``, called with the role.
        shift: The role of worker 0.
        num_workers: Number of workers.
        states: The random state of each role; a role without one starts as in a new run.
    """

    def __init__(
        self, worker_init_fn: Callable[[int], None] | None, shift: int, num_workers: int, states: Mapping[int, Any]
    ) -> None:
        self._worker_init_fn, self._shift, self._num_workers = worker_init_fn, shift, num_workers
        self._states = states

    def __call__(self, worker: int) -> None:
        role = (worker + self._shift) % self._num_workers
        base_seed = torch.initial_seed() - worker
        torch.manual_seed(base_seed + role)
        random.seed(base_seed + role)
        np.random.seed(numpy_seed_of_worker(base_seed, role))
        if self._worker_init_fn is not None:
            self._worker_init_fn(role)
        if role in self._states:
            set_random_state(self._states[role])
