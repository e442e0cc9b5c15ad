"""``state_dict`` and ``load_state_dict`` of a module whose layers live on several processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from strategies.pipeline.remote import RemoteStage


class StateOfStages:
    """Makes both give and take the values of every stage, under the names of one process.

    Args:
        module: The whole module.
        stages: Its parts.
        remotes: Where the first of them live; the others live here.
    """

    def __init__(self, module: nn.Sequential, stages: Sequence[nn.Sequential], remotes: Sequence[RemoteStage]) -> None:
        self._stages, self._remotes = stages, remotes
        self._gathers = self._scatters = True
        self._handles: list[Any] = [
            module.register_state_dict_post_hook(partial(self._gather)),  # torch sets an attribute on it
            module.register_load_state_dict_pre_hook(partial(self._scatter)),
        ]

    def end(self) -> None:
        """Leaves the module as it was."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def staying_here(self) -> Iterator[None]:
        """Within this, what is loaded goes nowhere, and a state dict has tensors without values."""
        self._gathers = self._scatters = False
        try:
            yield
        finally:
            self._gathers = self._scatters = True

    def _gather(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Puts the workers' entries in place of those for their layers, stage by stage; ties stay tied.

        What a worker gives is taken as it is: a layer may have made a buffer, or dropped one. Parameters it must have.
        """
        if not self._gathers:
            return
        here = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
        for layers, remote in zip(self._stages, self._remotes, strict=False):
            given = remote.call("module_state")
            wanted = [name for name, _ in layers.named_parameters(remove_duplicate=False) if prefix + name in here]
            missing = [name for name in wanted if name not in given]
            foreign = [name for name in given if name.partition(".")[0] not in layers._modules]
            if missing or foreign:
                raise RuntimeError(
                    f"{remote.description} gave a state that is not that of its layers: missing {missing}, unexpected "
                    f"{foreign}. No checkpoint can be made of it."
                )
            state.update({prefix + name: value for name, value in given.items()})
        remote_layers = {name for layers in self._stages[: len(self._remotes)] for name in layers._modules}
        own = {name: v for name, v in here.items() if name[len(prefix) :].partition(".")[0] not in remote_layers}
        state.update(own)
        first: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = state[prefix + first.setdefault(parameter, name)]

    def _scatter(self, module: nn.Module, state: dict[str, Any], prefix: str, *strictness_and_errors: Any) -> None:
        """Sends each worker its part of a state dict that is being loaded."""
        if not self._scatters:
            return
        named = dict(module.named_parameters(remove_duplicate=False))
        last = {parameter: name for name, parameter in named.items() if prefix + name in state}
        for name, parameter in named.items():  # as in one process, the last value of a tied parameter stays
            if prefix + name in state:
                state[prefix + name] = state[prefix + last[parameter]]
        for layers, remote in zip(self._stages, self._remotes, strict=False):
            own = {name: tensor for name, tensor in layers.state_dict().items() if prefix + name in state}
            remote.call("load_module_state", {name: state[prefix + name] for name in own})
            for name, here in own.items():
                if isinstance(here, Tensor) and here.is_meta:
                    state[prefix + name] = state[prefix + name].to("meta")
