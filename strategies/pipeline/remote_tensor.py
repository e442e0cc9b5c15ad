"""What stands on the driver for a parameter or a buffer whose values live on a worker."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

_HARMLESS = ("requires_grad_", "rename_")
"""Methods that end in an underscore and change no value."""

_TAKE_ALL_GRADIENTS = ("torch.nn.utils.clip_grad", "pytorch_lightning.utilities.grads")
"""Modules whose functions leave out parameters without a gradient, so that they would work on some stages only."""

_MAKE_UP_VALUES = ("torch.utils.tensorboard._convert_np",)
"""Modules that take random numbers for the values of a meta tensor."""


class _Remote:
    """Makes an error of whatever would silently do nothing, because the values are elsewhere.

    That is changing it in place, reading or setting ``data``, setting a gradient, copying or pickling it. ``grad`` is
    ``None``, but not to functions that clip or measure the gradients of all parameters.
    """

    relay_name: str
    shape: torch.Size

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            caller = sys._getframe(1).f_globals.get("__name__")
            if _reads_gradient(func) and caller in _TAKE_ALL_GRADIENTS:
                raise RuntimeError(
                    f"the gradient of {args[0].relay_name} {list(args[0].shape)} is on another stage of the "
                    "pipeline. For gradients of all stages set the Trainer's gradient_clip_val, or call "
                    "self.clip_gradients(...) or trainer.strategy.clip_grad_norm_(...), which returns their norm "
                    "and with max_norm=inf leaves them as they are."
                )
            if caller in _MAKE_UP_VALUES:
                args[0]._refuse("SummaryWriter")
            if (lost := _would_lose(func, args, kwargs or {})) is not None:
                lost._refuse(getattr(getattr(func, "__self__", None), "__name__", func.__name__))
            try:
                return func(*args, **(kwargs or {}))
            except (RuntimeError, NotImplementedError) as error:  # such as torch.equal, which needs values
                remote = next((arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, _Remote)), None)
                if remote is None or "meta" not in str(error):
                    raise
                remote._refuse(func.__name__)

    def __deepcopy__(self, memo: Any) -> Any:
        self._refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("pickle")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"`{what}` on {self.relay_name} {list(self.shape)}, which lives on another stage of the "
            "pipeline: its values are not in this process, so nothing could be read or done to them. While the "
            "pipeline runs only layers and optimizers change them, and state_dict() gives the values of every stage."
        )


class RemoteParameter(_Remote, nn.Parameter):
    """A parameter without values: name, shape, type and ``requires_grad`` can be read, ``requires_grad`` also set."""


class RemoteBuffer(_Remote, Tensor):
    """A buffer without values."""


def remote_parameter(name: str, parameter: nn.Parameter) -> RemoteParameter:
    """A stand-in with the shape, type and ``requires_grad`` of ``parameter``."""
    empty = torch.empty_like(parameter, device="meta")
    remote = cast(RemoteParameter, RemoteParameter(empty, requires_grad=parameter.requires_grad))
    remote.relay_name = f"parameter {name}"
    return remote


def remote_buffer(name: str, buffer: Tensor) -> RemoteBuffer:
    """A stand-in with the shape and type of ``buffer``."""
    remote = torch.empty_like(buffer, device="meta").as_subclass(RemoteBuffer)
    remote.relay_name = f"buffer {name}"
    return remote


def _reads_gradient(func: Callable[..., Any]) -> bool:
    return func.__name__ == "__get__" and getattr(func, "__self__", None) is Tensor.grad


def _would_lose(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Remote | None:
    """The tensor to which ``func`` would do something that has no effect; ``None`` if there is none."""
    first = next(iter((*args, *kwargs.values())), None)  # nn.init gives its tensor by name
    targets = first if isinstance(first, list | tuple) else [first]
    target = next((target for target in targets if isinstance(target, _Remote)), None)
    if target is None:
        return None  # it is only read
    name, descriptor = func.__name__, getattr(func, "__self__", None)
    if descriptor is Tensor.grad:
        lost = name == "__set__" and args[1] is not None
    elif name == "copy_":  # load_state_dict copies a meta tensor, when the values have been sent to where they belong
        lost = not args[1].is_meta
    else:
        in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
        lost = in_place or descriptor is Tensor.data or name == "__setitem__"
    return target if lost else None
