"""Attributes of layers that a worker may have changed: lists, dicts, other objects, and tensors that are not buffers.

They return to the driver at the end of a run, and when layers move to other processes during a run. If the worker has
not changed an attribute, or the driver has changed it, the driver keeps its object, because other objects may refer to
it. Not returned are functions, and objects that contain modules, tensors or objects with ``__del__``, because this
would create a second copy of these. Tensors that require a gradient are not returned either: they are results of a
forward pass.
"""

import io
import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from strategies.common.torch_compat import storage_key, version_of
from strategies.pipeline.stage.layers import OF_EVERY_MODULE

_PLAIN = (bool, int, float, str, type(None))


class _NotCarried(Exception):
    """Raised if an object must not be copied, because it contains a module, a tensor or an object with ``__del__``."""


class _AttributePickler(cloudpickle.Pickler):
    """Refuses modules, tensors, and objects with ``__del__``, whose copy would release a resource a second time."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module | Tensor) or hasattr(type(obj), "__del__"):
            raise _NotCarried
        return super().reducer_override(obj)


def objects_of(layers: nn.Module) -> tuple[bytes, dict[tuple[int, str], Tensor]]:
    """Return the attributes of layers, by the index of the module in ``modules()`` and the name.

    Returns:
        The objects, pickled together so that shared objects stay shared; and the tensors.
    """
    held = {storage_key(tensor) for tensor in (*layers.parameters(), *layers.buffers())}
    objects, tensors = {}, {}
    for k, module in enumerate(layers.modules()):
        for name, value in vars(module).items():
            if name in OF_EVERY_MODULE or type(value) in _PLAIN or callable(value):
                continue
            if type(value) is Tensor:
                if not value.requires_grad and not value.is_meta and storage_key(value) not in held:
                    tensors[k, name] = value.cpu()
            elif pickled_alone(value) is not None:
                objects[k, name] = value
    return cloudpickle.dumps(objects), tensors


class ObjectsAtStart:
    """The attributes of the driver's copies of layers at the time when the layers were sent to a worker.

    Args:
        layers: The copies.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._modules = list(layers.modules())
        self._known = [
            {name: _mark(value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
            for module in self._modules
        ]

    def take(self, pickled: bytes, tensors: Mapping[tuple[int, str], Tensor]) -> None:
        """Set the attributes that :func:`objects_of` returned on the worker, if only the worker has changed them."""
        for (k, name), value in pickle.loads(pickled).items():
            own = vars(self._modules[k])
            if self.is_unchanged(k, name) and not (name in own and canonical(own[name]) == canonical(value)):
                own[name] = value
        for (k, name), tensor in tensors.items():
            own = vars(self._modules[k]).get(name)
            same = isinstance(own, Tensor) and own.dtype == tensor.dtype and torch.equal(own.cpu(), tensor)
            if not same and self.is_unchanged(k, name):
                vars(self._modules[k])[name] = tensor.clone()

    def is_unchanged(self, k: int, name: str) -> bool:
        """Return whether the driver has not changed an attribute of the ``k``-th module; it may be absent."""
        own, known = vars(self._modules[k]), self._known[k]
        if name not in own or name not in known:
            return name not in own and name not in known
        return bool(_mark(own[name]) == known[name])


def _mark(value: Any) -> Any:
    """Return a value that stays equal as long as an attribute does not change."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if type(value) in _PLAIN:
        return type(value), repr(value)
    return id(value) if callable(value) else pickled_alone(value) or id(value)


def canonical(value: Any) -> bytes | None:
    """Return a pickle that does not depend on how the object was made, such as on which equal strings are identical."""
    first = pickled_alone(value)
    return None if first is None else pickled_alone(pickle.loads(first))


def pickled_alone(value: Any) -> bytes | None:
    """Return a pickle of an object; ``None`` if it cannot be pickled, or must have no copy."""
    file = io.BytesIO()
    try:
        _AttributePickler(file).dump(value)
    except Exception:  # methods of the object may raise any exception; such an object is not returned
        return None
    return file.getvalue()
