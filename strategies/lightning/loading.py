"""What Relay's Trainer has every strategy load as ours do: weights as they were saved, and checkpoints in parts."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from pytorch_lightning.plugins.precision import DoublePrecision
from pytorch_lightning.strategies import Strategy

from strategies.checkpoint import shards
from strategies.checkpoint.io import careful, local_path


def load_as_ours(strategy: Strategy) -> None:
    """Has any strategy load weights in the precision in which they train, and what has been written in parts.

    Under ``precision="64-true"`` Lightning loads a checkpoint into float32 weights, and makes float64 of them later.
    """
    own, kind = vars(strategy), type(strategy)
    # Can be pickled, for strategies that spawn.
    own["load_model_state_dict"] = partial(_convert_and_load, strategy, partial(kind.load_model_state_dict, strategy))
    if kind.load_checkpoint is Strategy.load_checkpoint:  # others have directories of their own
        own["load_checkpoint"] = partial(_load_checkpoint, partial(kind.load_checkpoint, strategy))


def convert(strategy: Strategy) -> None:
    """Brings the model to the precision in which it trains, if nobody has yet."""
    model = strategy.lightning_module
    if model is None or not isinstance(strategy.precision_plugin, DoublePrecision):
        return
    # In mid-run, where a tuner may load too, it has been done, and cannot be done to layers of other processes.
    if any(
        tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
        for tensor in chain(model.parameters(), model.buffers())
    ):
        strategy.precision_plugin.convert_module(model)


def _convert_and_load(
    strategy: Strategy, load: Callable[..., None], checkpoint: Mapping[str, Any], strict: bool = True
) -> None:
    convert(strategy)
    load(checkpoint, strict)


def _load_checkpoint(
    load: Callable[..., dict[str, Any]], checkpoint_path: Any, weights_only: bool | None = None
) -> dict[str, Any]:
    path = local_path(checkpoint_path)
    if path is not None and shards.is_sharded(path):
        return shards.load(path, weights_only=weights_only)[0]
    return load(checkpoint_path, careful(checkpoint_path, weights_only))
