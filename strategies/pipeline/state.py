"""``state_dict`` and ``load_state_dict`` of a module whose layers live on several processes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from strategies.pipeline.remote import RemoteStage


def follow_state_dict(
    module: nn.Sequential, stages: Sequence[nn.Sequential], remotes: Sequence[RemoteStage]
) -> list[Any]:
    """Makes both give and take the values of every stage, under the names of one process.

    Args:
        module: The whole module.
        stages: Its parts.
        remotes: Where the first of them live; the others live here.

    Returns:
        Handles whose ``remove`` ends this.
    """
    return [
        module.register_state_dict_post_hook(partial(_gather, remotes)),
        module.register_load_state_dict_pre_hook(partial(_scatter, stages, remotes)),
    ]


def _gather(
    remotes: Sequence[RemoteStage], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Replaces the meta tensors in a state dict by the workers' values, stage by stage; ties stay tied."""
    for remote in remotes:
        for name, value in remote.call("module_state").items():
            here = state.get(prefix + name)
            if not isinstance(here, Tensor) or here.is_meta:
                state[prefix + name] = value
    first: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state:
            state[prefix + name] = state[prefix + first.setdefault(parameter, name)]


def _scatter(
    stages: Sequence[nn.Sequential],
    remotes: Sequence[RemoteStage],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *strictness_and_errors: Any,
) -> None:
    """Sends the workers their part of a state dict that is being loaded."""
    named = dict(module.named_parameters(remove_duplicate=False))
    last = {parameter: name for name, parameter in named.items() if prefix + name in state}
    for name, parameter in named.items():  # as in one process, the last value of a tied parameter stays
        if prefix + name in state:
            state[prefix + name] = state[prefix + last[parameter]]
    for layers, remote in zip(stages, remotes, strict=False):
        own = {name: tensor for name, tensor in layers.state_dict().items() if prefix + name in state}
        remote.call("load_module_state", {name: state[prefix + name] for name in own})
        for name, here in own.items():
            if isinstance(here, Tensor) and here.is_meta:
                state[prefix + name] = state[prefix + name].to("meta")
