"""Saving while training goes on: a snapshot in host memory, written by a thread."""

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def snapshot(checkpoint: dict[str, Any], private: Iterable[Tensor] = ()) -> dict[str, Any]:
    """A copy of a checkpoint in host memory that no training step changes; tensors that share memory still do.

    Args:
        checkpoint: What is to be saved.
        private: Tensors in it that nobody else knows, and which need no copy.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in private}
    for leaf in tree_leaves(checkpoint):
        if (
            isinstance(leaf, Tensor)
            and id(leaf) not in memo
            and (leaf.device.type != "cpu" or leaf.grad_fn is not None)
        ):
            memo[id(leaf)] = leaf.detach().to("cpu", copy=True)
    return copy.deepcopy(checkpoint, memo)


class Background:
    """A thread that writes checkpoints, one at a time."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="relay-save")
        self._saving: Future[None] | None = None
        self._others: list[Future[None]] = []

    def save(self, write: Callable[[], None]) -> None:
        """Begins to write.

        Raises:
            Exception: What went wrong with the one before, for which this waits; nothing is begun then.
        """
        self.wait()
        self._saving = self._executor.submit(write)

    def after_saving(self, action: Callable[[], None]) -> None:
        """Does something when the checkpoint that is being written is there; never, if that fails."""
        saving = self._saving

        def act() -> None:
            if saving is None or saving.exception() is None:
                action()

        self._others.append(self._executor.submit(act))

    def settle(self) -> None:
        """Returns when nothing is being done any more."""
        for future in self._futures():
            future.exception()

    def wait(self) -> None:
        """Returns when nothing is being done any more.

        Raises:
            Exception: The first thing that went wrong since the last call.
        """
        self.settle()
        futures, self._saving, self._others = self._futures(), None, []
        for future in futures:
            future.result()

    def end(self) -> None:
        """Like :meth:`wait`, and ends the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def _futures(self) -> list[Future[None]]:
        return [*([self._saving] if self._saving is not None else []), *self._others]
