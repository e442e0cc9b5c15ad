"""What is changed in mid-run on the driver's copies of a worker's layers: carried to the worker, or refused.

Carried are the mode, ``requires_grad``, plain attributes (numbers, flags, words: a dropout's rate, a temperature) and
tensors that are assigned to buffers. At the end the worker's plain attributes come back, as its tensors do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from strategies.common.torch_compat import backward_hooks, forward_hooks
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import Attributes, StageCommands

_PLAIN = (bool, int, float, str, type(None))


class Mirror:
    """The driver's side.

    Args:
        layers: The driver's copies, which are now like the worker's.
        description: The stage in words.
    """

    def __init__(self, layers: nn.Sequential, description: str) -> None:
        self._layers, self._description = layers, description
        self._structure = _structure_of(layers)
        self._sent = plain_attributes(layers)
        self._buffers = [
            (f"{prefix}.{name}" if prefix else name, module._buffers, name, buffer)
            for prefix, module in layers.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._trained = _trained(layers)

    def changes(self) -> tuple[Attributes, list[bool] | None]:
        """What has changed since the last time: attributes, and ``requires_grad`` of all parameters if any has.

        Raises:
            RuntimeError: If modules, parameters, buffers or hooks are others than at the start.
        """
        if _structure_of(self._layers) != self._structure:
            raise RuntimeError(
                f"{self._description}, which lives in another process, has got another layer, parameter, buffer or "
                "hook since the pipeline started; that cannot be carried there in mid-run. Change the model before fit "
                "(or in configure_model), change values by load_state_dict without assign=True, and modes, "
                "requires_grad or plain attributes of layers at any time."
            )
        before, self._sent = self._sent, plain_attributes(self._layers)
        changed = {
            k: new
            for k, (old, now) in enumerate(zip(before, self._sent, strict=True))
            if (new := {name: value for name, value in now.items() if name not in old or old[name] != value})
        }
        trained, self._trained = self._trained, _trained(self._layers)
        return changed, None if trained == self._trained else self._trained

    def carry(self, remote: RemoteStage) -> None:
        """Carries what has changed to the stage, with the next call of a command."""
        self.carry_buffers(remote)
        attributes, trained = self.changes()
        if attributes:
            remote.queue(StageCommands.set_attributes, attributes)
        if trained is not None:
            remote.queue(StageCommands.set_requires_grad, trained)

    def carry_buffers(self, remote: RemoteStage) -> None:
        """Carries tensors that have been assigned to buffers, and puts the stand-ins without values back."""
        assigned = {}
        for path, buffers, name, stand_in in self._buffers:
            value = buffers.get(name)
            if value is None or value is stand_in or value.is_meta:
                continue
            if (value.shape, value.dtype) == (stand_in.shape, stand_in.dtype):
                assigned[path], buffers[name] = value.detach().cpu().clone(), stand_in
        if assigned:
            remote.queue(StageCommands.set_buffers, assigned)

    def take_back(self, attributes: Sequence[Mapping[str, Any]]) -> None:
        """Gives the driver's copies the worker's attributes, but for those that have been changed here since."""
        for module, sent, now in zip(self._layers.modules(), self._sent, attributes, strict=True):
            own = vars(module)
            own.update({name: value for name, value in now.items() if name in sent and own.get(name) == sent[name]})


def plain_attributes(layers: nn.Module) -> list[dict[str, Any]]:
    """The plain attributes of each module, ``training`` among them, in the order of ``modules()``."""
    return [
        {name: value for name, value in vars(module).items() if type(value) in _PLAIN} for module in layers.modules()
    ]


def set_attributes(layers: nn.Module, attributes: Attributes) -> None:
    """Sets what :meth:`Mirror.changes` told."""
    modules = list(layers.modules())
    for k, changed in attributes.items():
        vars(modules[k]).update(changed)


def _trained(layers: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in layers.parameters()]


def _structure_of(layers: nn.Module) -> list[Any]:
    """Equal as long as there are the same objects at the same places."""
    structure: list[Any] = []
    for name, module in layers.named_modules(remove_duplicate=False):
        tensors = [*module._parameters.values(), *module._buffers.values()]
        hooks = (*forward_hooks(module), *backward_hooks(module))
        structure.append((name, id(module), [id(tensor) for tensor in tensors], [tuple(hook) for hook in hooks]))
    return structure
