"""Checkpoints in Lightning's terms: the ``CheckpointIO``, saving callbacks, and loading for every strategy."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, cast
from zipfile import is_zipfile

import torch

from strategies.checkpoint.background import Writer
from strategies.checkpoint.save_and_load import (
    STATE_DICT_TYPES,
    check_not_cut_off,
    is_sharded,
    load_sharded,
    local_path,
    save_file,
)
from strategies.common.names import did_you_mean
from strategies.lightning.compat import (
    DoublePrecision,
    MisconfigurationException,
    ModelCheckpoint,
    Strategy,
    TorchCheckpointIO,
    Trainer,
    TrainerFn,
)
from strategies.lightning.hooks import before_file_exists


def check_state_dict_type(state_dict_type: str, checkpoint_io: object | None) -> None:
    """Check the form in which checkpoints are written.

    Raises:
        MisconfigurationException: If the form is unknown, or if it does not use the user's ``CheckpointIO``.
    """
    if state_dict_type not in STATE_DICT_TYPES:
        raise MisconfigurationException(
            f"Unknown state_dict_type {state_dict_type!r}{did_you_mean(str(state_dict_type), STATE_DICT_TYPES)}"
        )
    if state_dict_type == "sharded" and checkpoint_io is not None:
        raise MisconfigurationException(
            f'state_dict_type="sharded" does not write through a CheckpointIO; leave out {checkpoint_io!r}.'
        )


class AtomicCheckpointIO(TorchCheckpointIO):
    """A ``TorchCheckpointIO`` that replaces a local file in one step, once the new file is on the disk.

    It writes the checkpoint straight to the file, whereas Lightning first makes two copies of it in memory. Lightning
    writes to other filesystems (``s3://``, ...).
    """

    _maps_files = False

    @contextmanager
    def mapping_files(self) -> Iterator[None]:
        """Context in which tensors of a local checkpoint stay in the file until they are read."""
        self._maps_files = True
        try:
            yield
        finally:
            self._maps_files = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``, and return when the file is on the disk."""
        local = local_path(path)
        if storage_options is not None or local is None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save_file(checkpoint, local)

    def load_checkpoint(
        self,
        path: str | Any,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; tensors and plain types only, unless ``weights_only`` is ``False``."""
        local = local_path(path)
        if local is not None and local.is_file():
            check_not_cut_off(local)
        if self._maps_files and local is not None and is_zipfile(local):
            return cast(dict[str, Any], torch.load(local, map_location="cpu", weights_only=weights_only, mmap=True))
        return super().load_checkpoint(path, map_location, _weights_only(path, weights_only))


def _weights_only(path: str | Any, weights_only: bool | None) -> bool | None:
    """Return ``weights_only`` for Lightning, whose default reads files from the web without restriction."""
    return True if weights_only is None and str(path).startswith("http") else weights_only


# Callbacks that save


def check_links(trainer: Trainer) -> None:
    """Check that no callback makes a link to a checkpoint that is still being written in the background.

    Raises:
        MisconfigurationException: If a ``ModelCheckpoint`` of this ``fit`` has ``save_last="link"``.
    """
    if any(callback.save_last == "link" for callback in _model_checkpoints(trainer)):
        raise MisconfigurationException(
            'ModelCheckpoint(save_last="link") links to a checkpoint that async_save=True may still be writing. Use '
            "save_last=True."
        )


def wait_before_naming(trainer: Trainer, writer: Writer) -> list[Callable[[], None]]:
    """Make each ``ModelCheckpoint`` wait for the checkpoint being written before it looks for a free file name.

    This costs no extra time, because the next save waits for that checkpoint anyway.

    Returns:
        Functions that undo this.
    """
    return [before_file_exists(callback, writer.settle) for callback in _model_checkpoints(trainer)]


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    return [own for own in trainer.checkpoint_callbacks if isinstance(own, ModelCheckpoint)]


# Loading


def load_as_relay(strategy: Strategy) -> None:
    """Make any strategy load weights in the precision in which it trains, and read sharded checkpoints.

    Under ``precision="64-true"`` Lightning loads a checkpoint into float32 weights and converts them to float64
    afterwards, which rounds them.
    """
    own, cls = vars(strategy), type(strategy)
    # Partials can be pickled, for strategies that spawn processes.
    own["load_model_state_dict"] = partial(_convert_and_load, strategy, partial(cls.load_model_state_dict, strategy))
    if cls.load_checkpoint is Strategy.load_checkpoint:  # strategies that override it have their own formats
        own["load_checkpoint"] = partial(_load_checkpoint, partial(cls.load_checkpoint, strategy))


def convert_model(strategy: Strategy) -> None:
    """Convert the model to the precision in which it trains, unless it has that precision already."""
    model = strategy.lightning_module
    if model is None or not isinstance(strategy.precision_plugin, DoublePrecision):
        return
    # A tuner may load in the middle of a run. The model has its precision by then, and layers of other processes could
    # not be converted here.
    if any(
        tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
        for tensor in chain(model.parameters(), model.buffers())
    ):
        strategy.precision_plugin.convert_module(model)


def _convert_and_load(
    strategy: Strategy, load: Callable[..., None], checkpoint: Mapping[str, Any], strict: bool = True
) -> None:
    convert_model(strategy)
    load(checkpoint, strict)


def _load_checkpoint(
    load: Callable[..., dict[str, Any]], checkpoint_path: Any, weights_only: bool | None = None
) -> dict[str, Any]:
    path = local_path(checkpoint_path)
    if path is not None and is_sharded(path):
        return load_sharded(path, weights_only=weights_only)[0]
    return load(checkpoint_path, _weights_only(checkpoint_path, weights_only))
