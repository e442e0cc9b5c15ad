"""``state_dict`` and ``load_state_dict`` of a module whose layers are in several processes."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn

from strategies.common.stage_layers import StageLayers, layer_of
from strategies.common.torch_compat import (
    metadata_being_loaded,
    set_state_dict_hooks,
    state_dict_hooks,
    with_metadata,
)
from strategies.common.trees import on_cpu
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.parts import Part, PartKind
from strategies.pipeline.control.shelf import ShelvedPart, captured
from strategies.pipeline.state.mirror import set_attributes, set_extra_states
from strategies.pipeline.state.shelved import shelved_tensors
from strategies.pipeline.state.stand_ins import replace_buffers


class StateOfStages:
    """Extends ``state_dict`` and ``load_state_dict`` of a module to all stages, with the keys of one process.

    Args:
        module: The whole module, or the module of one of several lists of layers.
        stages: The layers of each stage.
        remotes: The stage on a worker for each part; ``None``, or a missing entry, means this process.
        number: Number of the module on the stages: 0 for the model, ``k`` for its ``k``-th copy.
        start: The start of the names of the layers of ``module`` on the stages, such as ``encoder.layers.``.
        send_buffers: Sends tensors that were assigned to buffers of the driver's layers to the stages.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[nn.Sequential],
        remotes: Sequence[RemoteStage | None],
        number: int = 0,
        start: str = "",
        send_buffers: Callable[[], None] = lambda: None,
    ) -> None:
        self._module, self._number, self._start, self._send_buffers = module, number, start, send_buffers
        all_remotes = [*remotes, *[None] * (len(stages) - len(remotes))]
        own = [(layers, remote) for layers, remote in zip(stages, all_remotes, strict=True) if _names(layers, start)]
        self._stages, self._remotes = [layers for layers, _ in own], [remote for _, remote in own]
        self._is_reversed = not start and list(stages[0]._modules)[:1] != list(module._modules)[:1]
        self._reads_late, self._scatters = False, True
        self._handles: list[Any] = [
            module.register_state_dict_post_hook(partial(self._gather)),  # torch sets an attribute on it
            module.register_load_state_dict_pre_hook(partial(self._scatter)),
        ]

    def end(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    def whole(self) -> nn.Module:
        """Return the module as in one process: the layers of this stage, and copies of the layers of remote stages."""
        assert all(f"{name}." != self._start for layers in self._stages for name in layers._modules), "no container"
        self._send_buffers()
        module, last = self._module, self._stages[-1]
        here: list[Any] = [*last.modules(), *(p for p in module.parameters() if not p.is_meta)]
        memo: dict[int, Any] = {id(own): own for own in here}
        whole = copy(module)
        for name in ("forward", "load_state_dict"):  # set by the pipeline
            vars(whole).pop(name, None)
        hooks = [dict(hooks) for hooks in state_dict_hooks(module)]
        for own, handle in zip(hooks, self._handles, strict=True):
            del own[handle.id]
        set_state_dict_hooks(whole, *map(OrderedDict, hooks))
        whole._modules = {}
        for layers, remote in zip(self._stages, self._remotes, strict=True):
            if remote is None:
                continue
            tensors = captured(remote, PartKind.TENSORS)
            for name, p in layers.named_parameters():
                memo.setdefault(id(p), nn.Parameter(tensors[name], requires_grad=p.requires_grad))
            memo.update({id(buffer): buffer for buffer in layers.buffers()})  # shared until they are replaced
            own_copy = StageLayers()
            own_copy._modules.update({n: deepcopy(layer, memo) for n, layer in layers._modules.items()})
            replace_buffers(own_copy, tensors)
            set_attributes(own_copy, dict(enumerate(captured(remote, PartKind.ATTRIBUTES))))
            set_extra_states(own_copy, captured(remote, PartKind.EXTRA_STATE))
            whole._modules.update(self._named_here(own_copy))
        whole._modules.update(self._named_here(last))
        return whole

    def _named_here(self, layers: nn.Sequential) -> dict[str, nn.Module | None]:
        """Return the layers of a stage that are in the module, by their names there."""
        return {name[len(self._start) :]: layers._modules[name] for name in _names(layers, self._start)}

    @contextmanager
    def staying_here(self) -> Iterator[None]:
        """Context in which loading a state dict sends nothing to remote stages."""
        self._scatters = False
        try:
            yield
        finally:
            self._scatters = True

    @contextmanager
    def reading_late(self) -> Iterator[None]:
        """Context in which a state dict fetches values of remote stages when they are read."""
        self._reads_late = True
        try:
            yield
        finally:
            self._reads_late = False

    def _gather(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace entries for layers on workers with the workers' entries, stage by stage. Tied parameters stay tied.

        Takes all entries that a worker returns, since a layer may have created or removed a buffer. Parameters must be
        complete.
        """
        self._send_buffers()
        start = self._start
        here = {start + name[len(prefix) :]: state.pop(name) for name in list(state) if name.startswith(prefix)}
        for name in [name for name in here if all(layer_of(name, each._modules) is None for each in self._stages)]:
            state[prefix + name[len(start) :]] = here.pop(name)  # of the container itself
        for layers, remote in zip(self._stages, self._remotes, strict=True):
            own = {name: value for name, value in here.items() if layer_of(name, layers._modules) is not None}
            if remote is not None:
                parameters = dict(layers.named_parameters(remove_duplicate=False))
                given = self._given(layers, remote, [name for name in parameters if name in own])
                owned_here = [name for name, p in parameters.items() if not p.is_meta]  # tied parameters
                own = {**given, **{name: own[name] for name in owned_here if name in own}}
            state.update({prefix + name[len(start) :]: value for name, value in own.items()})
        if self._is_reversed:
            places = {name: place for place, name in enumerate(module._modules)}
            own_keys = [name for name in state if name.startswith(prefix)]
            own_keys.sort(key=lambda name: places.get(name[len(prefix) :].partition(".")[0], -1))
            state.update({name: state.pop(name) for name in own_keys})
        first: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = state[prefix + first.setdefault(parameter, name)]

    def _given(self, layers: nn.Sequential, remote: RemoteStage, wanted: Sequence[str]) -> dict[str, Any]:
        """Return the entries of a stage for its layers in the module.

        Raises:
            RuntimeError: If a wanted entry is missing, or an entry belongs to other layers.
        """
        part = ShelvedPart.of(remote, Part(PartKind.STATE_DICT, self._number))
        given: dict[str, Any] = part.tree
        missing = [name for name in wanted if name not in given]
        foreign = [name for name in given if layer_of(name, layers._modules) is None]
        if missing or foreign:
            raise RuntimeError(
                f"{remote.description} returned a state that does not match its layers: missing {missing}, "
                f"unexpected {foreign}. It cannot be saved in a checkpoint."
            )
        part.tree = {name: entry for name, entry in given.items() if name.startswith(self._start)}
        return dict(shelved_tensors(part) if self._reads_late else part.values())

    def _scatter(self, module: nn.Module, state: dict[str, Any], prefix: str, *strictness_and_errors: Any) -> None:
        """Send each worker its part of the state dict that is being loaded, which its layers may be about to migrate.

        So the part has all entries under the names of the layers, and the versions of the modules that wrote them.
        """
        if not self._scatters:
            return
        self._send_buffers()
        named = dict(module.named_parameters(remove_duplicate=False))
        last = {parameter: name for name, parameter in named.items() if prefix + name in state}
        for name, parameter in named.items():  # as in one process, the last value of a tied parameter counts
            if prefix + name in state:
                state[prefix + name] = state[prefix + last[parameter]]
        start = self._start
        keys = {start + key[len(prefix) :]: key for key in state if key.startswith(prefix)}
        metadata = {(start + name).removesuffix("."): own for name, own in metadata_being_loaded(prefix).items()}
        for layers, remote in zip(self._stages, self._remotes, strict=True):
            if remote is None:
                continue
            own = {name: key for name, key in keys.items() if layer_of(name, layers._modules) is not None}
            given = with_metadata(on_cpu({name: state[key] for name, key in own.items()}), metadata)
            content = (_names(layers, start), given)
            remote.ask(StageCommands.place, Part(PartKind.STATE_DICT, self._number), content).wait()
            entries = layers.state_dict()
            for name, key in own.items():
                has_stand_in = name not in entries or getattr(entries[name], "is_meta", False)
                if isinstance(state[key], Tensor) and has_stand_in:  # layers may give another entry to a parameter
                    state[key] = state[key].to("meta")


def _names(layers: nn.Sequential, start: str) -> list[str]:
    """Return the names of the layers whose names begin with ``start``, or of the layer with this name."""
    return [name for name in layers._modules if f"{name}.".startswith(start)]
