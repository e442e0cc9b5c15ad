"""The random state of a DataLoader's workers: it comes with every batch, and is given to those of a resumed run.

Batch ``b`` of a pass is made by worker ``b % workers``. A run that is resumed after batch ``k`` starts its workers
anew, and its first batch, ``k``, again goes to worker 0: so worker ``w`` takes on the role of ``(k + w) % workers``.
"""

import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state

from trainer.random_state import plain, random_state, set_random_state


class CollateAndReport:
    """``collate_fn`` whose batches come with the random state that the worker is in then.

    As bytes, because tensors would travel through shared memory; empty if nothing has been drawn since the last batch.
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
    """The random state of a report as plain types and tensors; one out of a checkpoint is that already."""
    if isinstance(report, dict):
        return report
    state = pickle.loads(report)
    return plain({**state, "torch": torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8)})


class StartWorker:
    """``worker_init_fn`` that starts each worker in a role.

    Args:
        worker_init_fn: The user's, called with the role.
        shift: The role of worker 0.
        num_workers: How many there are.
        states: The random state of each role; one that had none yet starts as it did the first time.
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
        np.random.seed(_generate_state(base_seed, role))
        if self._worker_init_fn is not None:
            self._worker_init_fn(role)
        if role in self._states:
            set_random_state(self._states[role])
