"""Send changes that the user makes to the driver's copies of a worker's layers to the worker, or refuse them.

Relay sends the mode, ``requires_grad``, plain attributes (numbers, flags and strings, such as the rate of a dropout
layer) and tensors that are assigned to buffers. At the end, it copies attributes of the worker's layers back.
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.torch_compat import backward_hooks, forward_hooks, num_changes, without_torch_function
from strategies.common.transformers_compat import is_capturing_hook
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.parts import Part, PartKind
from strategies.pipeline.stage.layers import has_same_entries, plain_attributes_of
from strategies.pipeline.state.objects import ObjectsAtStart

Attributes = dict[int, dict[str, Any]]
"""Plain attributes of some modules, by the place of the module in ``modules()``."""


class Mirror:
    """Compares the driver's copies of a worker's layers with the state that was last sent to the worker.

    Args:
        layers: The driver's copies, which equal the worker's layers at this point.
        description: A description of the stage.
        shared: The buffers that this process uses too, so they have values instead of stand-ins.
    """

    def __init__(self, layers: nn.Sequential, description: str, shared: Collection[Tensor] = ()) -> None:
        self._layers, self.description = layers, description
        kept = {id(buffer) for buffer in shared}
        self._shared = {
            f"{prefix}.{name}" if prefix else name: (module._buffers, name, buffer, num_changes(buffer))
            for prefix, module in layers.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) in kept
        }
        """The shared buffers by path, each with its number of in-place changes when its value was sent last."""
        self._structure, self._parameters = self._structure_now(), list(layers.parameters())
        self._sent, self._objects = plain_attributes(layers), ObjectsAtStart(layers)
        self._buffers = [
            (f"{prefix}.{name}" if prefix else name, module._buffers, name, buffer)
            for prefix, module in layers.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in kept
        ]
        self._assigned: dict[str, Tensor] = {}
        """The values of buffers that were sent last."""
        self._trained, self._seen = self._flags(), _Seen(layers)

    def _flags(self) -> list[bool]:
        with without_torch_function():  # faster: __torch_function__ of stand-ins would take most of the time
            return [parameter.requires_grad for parameter in self._parameters]

    def changes(self) -> tuple[Attributes, list[bool] | None]:
        """Return what has changed since the last call.

        Returns:
            The changed attributes, and ``requires_grad`` of all parameters if that of any parameter has changed.

        Raises:
            RuntimeError: If a module, parameter, buffer or hook has been added, removed or replaced since the start.
        """
        changed: Attributes = {}
        if not self._seen.is_unchanged():
            self._check_structure()
            before, self._sent = self._sent, plain_attributes(self._layers)
            for k, (old, now) in enumerate(zip(before, self._sent, strict=True)):
                if new := {name: value for name, value in now.items() if not _has(old, name, value)}:
                    changed[k] = new
            self._seen = _Seen(self._layers)
        trained, self._trained = self._trained, self._flags()
        return changed, None if trained == self._trained else self._trained

    def has_changed(self) -> bool:
        """Whether :meth:`send_changes` would send other values than it has sent."""
        if self._flags() != self._trained:
            return True
        for path, value in self._assigned_now():
            sent = self._assigned.get(path)
            if sent is None or not torch.allclose(value.cpu(), sent, rtol=0, atol=0, equal_nan=True):
                return True
        return not self._seen.is_unchanged() and any(
            not _has(old, name, value)
            for old, now in zip(self._sent, plain_attributes(self._layers), strict=True)
            for name, value in now.items()
        )

    def _check_structure(self) -> None:
        if self._structure_now() != self._structure:
            raise RuntimeError(
                f"{self.description}, which runs in another process, has another layer, parameter, buffer or hook "
                "than when the pipeline started; such a change cannot be sent there during a run. Change the model "
                "before fit (or in configure_model). Values can change by load_state_dict without assign=True; modes, "
                "requires_grad and plain attributes of layers can change at any time."
            )

    def send_changes(self, remote: RemoteStage) -> None:
        """Send the changes to the stage, with the next command, except those of buffers."""
        attributes, trained = self.changes()
        if attributes:
            remote.send(StageCommands.place, Part(PartKind.ATTRIBUTES), attributes)
        if trained is not None:
            remote.send(StageCommands.place, Part(PartKind.REQUIRES_GRAD), trained)

    def send_buffers(self, remote: RemoteStage) -> None:
        """Send tensors that have been assigned to buffers. Several stages may have the same buffer."""
        self._assigned = {path: value.cpu().clone() for path, value in self._assigned_now()}
        for path, value in self.shared_changes():
            buffers, name, *_ = self._shared[path]
            self._shared[path] = buffers, name, value, num_changes(value)
        if self._assigned:
            remote.send(StageCommands.place, Part(PartKind.TENSORS), self._assigned)

    def restore_stand_ins(self) -> None:
        """Restore the stand-ins of buffers whose values have been sent to all stages."""
        for path, buffers, name, stand_in in self._buffers:
            if path in self._assigned:
                buffers[name] = stand_in

    def _assigned_now(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that have been assigned to buffers, with the names of the buffers."""
        for path, buffers, name, stand_in in self._buffers:
            value = buffers.get(name)
            if value is None or value is stand_in or value.is_meta:
                continue
            if (value.shape, value.dtype) == (stand_in.shape, stand_in.dtype):
                yield path, value.detach()
        yield from self.shared_changes()

    def shared_changes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the shared buffers whose value has changed here since it was sent, with their names.

        A tensor of another shape, such as a longer table of positions, is not a change: each process makes its own.
        """
        for path, (buffers, name, sent, count) in self._shared.items():
            value = buffers.get(name)
            if value is None or (value is sent and num_changes(value) == count):
                continue
            if (value.shape, value.dtype) == (sent.shape, sent.dtype):
                yield path, value

    def _structure_now(self) -> list[Any]:
        return _structure_of(self._layers, {(id(buffers), name) for buffers, name, *_ in self._shared.values()})

    def take_back(
        self, attributes: Sequence[Mapping[str, Any]], objects: tuple[bytes, Mapping[tuple[int, str], Tensor]]
    ) -> None:
        """Copy the worker's attributes to the driver's layers, except attributes that have changed here."""
        self._objects.take(*objects)
        for k, (module, sent, now) in enumerate(zip(self._layers.modules(), self._sent, attributes, strict=True)):
            own = vars(module)
            for name, value in now.items():
                if _has(own, name, sent[name]) if name in sent else self._objects.is_unchanged(k, name):
                    own[name] = value


class _Seen:
    """The attributes, parameters, buffers, children and hooks of modules, to detect quickly that none has changed.

    This object keeps references to them, so that no new object can get the address of one of them.

    Args:
        layers: The modules.
    """

    def __init__(self, layers: nn.Module) -> None:
        held: list[Mapping[Any, Any]] = []
        for module in layers.modules():
            held += (vars(module), module._parameters, module._buffers, module._modules)
            held += (*forward_hooks(module), *backward_hooks(module))
        self._held = [(own, {**own}) for own in held]

    def is_unchanged(self) -> bool:
        """Whether the modules have the same objects under the same names, and so the same plain attributes."""
        return all(has_same_entries(own, before) for own, before in self._held)


def plain_attributes(layers: nn.Module) -> list[dict[str, Any]]:
    """Return the plain attributes of each module, including ``training``, in the order of ``modules()``."""
    return [plain_attributes_of(module) for module in layers.modules()]


def set_attributes(layers: nn.Module, attributes: Attributes) -> None:
    """Set attributes that :meth:`Mirror.changes` returned."""
    modules = list(layers.modules())
    for k, changed in attributes.items():
        vars(modules[k]).update(changed)


def _has(attributes: Mapping[str, Any], name: str, value: Any) -> bool:
    """Return whether an attribute has this value; NaN equals itself."""
    return name in attributes and (attributes[name] is value or bool(attributes[name] == value))


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module adds an extra state to its state dict."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def set_extra_states(layers: nn.Module, states: Mapping[int, Any]) -> None:
    """Set the extra states of modules, by their numbers in ``modules()``.

    ``load_state_dict`` would run the users' code that migrates weights, which are not among these states.
    """
    modules = [*layers.modules()]
    for k, state in states.items():
        if type(modules[k]).set_extra_state is not nn.Module.set_extra_state:  # otherwise torch loads none either
            modules[k].set_extra_state(state)


def _structure_of(layers: nn.Module, shared: Container[tuple[int, str]]) -> list[Any]:
    """Return a value that stays equal as long as modules, tensors and hooks are the same objects.

    Args:
        layers: The modules.
        shared: The buffers that may be replaced, by the identity of their module's dict of buffers, and name.
    """
    structure: list[Any] = []
    for name, module in layers.named_modules(remove_duplicate=False):
        buffers = module._buffers
        tensors = [
            *module._parameters.values(),
            *(buffer for own, buffer in buffers.items() if (id(buffers), own) not in shared),
        ]
        hooks = [
            [handle for handle, hook in kind.items() if not is_capturing_hook(hook)]
            for kind in (*forward_hooks(module), *backward_hooks(module))
        ]
        structure.append((name, id(module), [id(tensor) for tensor in tensors], hooks))
    return structure
