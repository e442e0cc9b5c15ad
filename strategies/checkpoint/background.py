"""Write checkpoints at once, or write a copy in host memory on a thread while training continues."""

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from strategies.common.torch_compat import tree_leaves
from strategies.pipeline.state.remote_tensor import RemoteBuffer, RemoteParameter
from strategies.pipeline.state.shelved import is_shelved


def snapshot(checkpoint: dict[str, Any], private: Iterable[Tensor] = ()) -> dict[str, Any]:
    """Return a deep copy of a checkpoint in host memory. Tensors that share memory also share memory in the copy.

    Args:
        checkpoint: The checkpoint.
        private: Tensors of the checkpoint that nothing else refers to. They are not copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in private}
    for leaf in tree_leaves(checkpoint):
        if not isinstance(leaf, Tensor) or id(leaf) in memo:
            continue
        if leaf.is_meta and (is_shelved(leaf) or not isinstance(leaf, RemoteParameter | RemoteBuffer)):
            # There are no values to copy, or the stage that holds them copies them.
            memo[id(leaf)] = leaf
        elif not leaf.is_meta and (
            leaf.device.type != "cpu" or leaf.grad_fn is not None or leaf.layout is not torch.strided
        ):
            memo[id(leaf)] = leaf.detach().to("cpu", copy=True)
    return copy.deepcopy(checkpoint, memo)


class Writer:
    """Writes checkpoints in the foreground: :meth:`save` returns when the checkpoint is written."""

    in_background = False
    """Whether training continues before a checkpoint is written, so that :meth:`save` must get a copy."""

    def save(self, write: Callable[[], None]) -> None:
        """Call ``write``, which writes one checkpoint."""
        write()

    def after_saving(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the checkpoint being written is complete; do not call it if writing fails."""
        action()

    def settle(self) -> None:
        """Wait until nothing is being written, and leave errors for :meth:`wait`."""

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            Exception: The first error of a write since the last call.
        """

    def end(self) -> None:
        """Like :meth:`wait`, and release what the writer holds."""


class BackgroundWriter(Writer):
    """Writes checkpoints on the thread ``relay-save``, one at a time."""

    in_background = True

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="relay-save")
        self._saving: Future[None] | None = None
        self._actions: list[Future[None]] = []

    def save(self, write: Callable[[], None]) -> None:
        """Wait for the previous checkpoint, then have the thread call ``write``.

        Raises:
            Exception: The error of the previous checkpoint. ``write`` is then not called.
        """
        self.wait()
        self._saving = self._executor.submit(write)

    def after_saving(self, action: Callable[[], None]) -> None:
        saving = self._saving

        def act() -> None:
            if saving is None or saving.exception() is None:
                action()

        self._actions.append(self._executor.submit(act))

    def settle(self) -> None:
        for future in self._futures():
            future.exception()

    def wait(self) -> None:
        self.settle()
        futures, self._saving, self._actions = self._futures(), None, []
        for future in futures:
            future.result()

    def end(self) -> None:
        """Like :meth:`wait`, and end the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def _futures(self) -> list[Future[None]]:
        return [*([self._saving] if self._saving is not None else []), *self._actions]
