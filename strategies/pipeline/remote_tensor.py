"""What stands on the driver for a parameter or a buffer whose values live on a worker."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_HARMLESS = ("requires_grad_", "rename_")
"""Methods that end in an underscore and change no value."""

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")

_READ_GRADIENTS = ("torch.optim.", "torch.amp.", "torch.nn.modules.", "torch.utils.", "torch._", "strategies.")
"""Modules that may find that such a tensor has no gradient. Others would take the last stage's gradients for all."""

_MAKE_UP_VALUES = ("torch.utils.tensorboard._convert_np",)
"""Modules that take random numbers for the values of a meta tensor."""


class _Remote:
    """Makes an error of whatever would silently do nothing, because the values are elsewhere.

    That is changing it in place, reading or setting ``data``, setting a gradient, copying or pickling it, and using its
    values, also those of what was computed from it. ``grad`` is ``None``, but only optimizers may read that.
    """

    relay_name: str
    """Which tensor this is, or was computed from."""

    relay_advice: str = (
        "For gradients of all stages set the Trainer's gradient_clip_val, or call self.clip_gradients(...) or "
        "trainer.strategy.clip_grad_norm_(...), which returns their norm and with max_norm=inf leaves them as they "
        "are; to clear them call zero_grad() of the optimizer or of the model."
    )
    """What to do about gradients."""

    relay_is_followed: bool = True
    """Whether what an optimizer does to this reaches the worker; otherwise it may not read the gradient either."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            reads_gradient = _descriptor(func) is Tensor.grad and func.__name__ == "__get__"
            if reads_gradient and not (args[0].relay_is_followed and _may_read(sys._getframe(1))):
                args[0]._refuse_gradient()
            if sys._getframe(1).f_globals.get("__name__") in _MAKE_UP_VALUES:
                args[0]._refuse("SummaryWriter")
            if (lost := _would_lose(func, args, kwargs)) is not None:
                lost._refuse(getattr(_descriptor(func), "__name__", func.__name__))
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, TypeError) as error:  # such as that of item(), which needs values
                remote = next(_remotes_in((*args, *kwargs.values())), None)
                if remote is None or "meta" not in str(error).lower():
                    raise
                remote._refuse(func.__name__)
            return _marked(result, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self._refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("pickle")

    def _refuse_gradient(self) -> NoReturn:
        raise RuntimeError(
            f"the gradient of {self.relay_name} is on another stage of the pipeline. {self.relay_advice}"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"`{what}` on {self.relay_name}, which lives on another stage of the "
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
    remote.relay_name = f"parameter {name} {list(parameter.shape)}"
    return remote


def remote_buffer(name: str, buffer: Tensor) -> RemoteBuffer:
    """A stand-in with the shape and type of ``buffer``."""
    remote = torch.empty_like(buffer, device="meta").as_subclass(RemoteBuffer)
    remote.relay_name = f"buffer {name} {list(buffer.shape)}"
    return remote


def _descriptor(func: Callable[..., Any]) -> Any:
    """The attribute of ``Tensor`` that ``func`` gets or sets, if it does."""
    return getattr(func, "__self__", None)


def _may_read(frame: FrameType | None) -> bool:
    """Whether the code of a frame may read gradients: torch's own, but for clipping, and an optimizer's step."""
    assert frame is not None
    name = frame.f_globals.get("__name__", "")
    if name.startswith(_READ_GRADIENTS) and not (name == "torch.nn.modules.module" and "zero_grad" in _function(frame)):
        return True
    caller: FrameType | None = frame
    while caller is not None and not caller.f_globals.get("__name__", "").startswith("pytorch_lightning."):
        if isinstance(caller.f_locals.get("self"), Optimizer):
            return True
        caller = caller.f_back
    return False  # user code that a training loop called, perhaps within a step's closure


def _function(frame: FrameType) -> str:
    return frame.f_code.co_name


def _remotes_in(values: Iterable[Any]) -> Iterator[_Remote]:
    for value in values:
        if isinstance(value, _Remote):
            yield value
        elif isinstance(value, list | tuple):
            yield from _remotes_in(value)


def _marked(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A tensor without values that was computed from a remote one is a remote one too."""
    if type(result) is not Tensor or not result.is_meta:
        return result
    remote = next(_remotes_in((*args, *kwargs.values())))
    marked = result.as_subclass(RemoteBuffer)
    marked.relay_name = remote.relay_name
    return marked


def _would_lose(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Remote | None:
    """The tensor that ``func`` would change, or change another by, without effect; ``None`` if there is none."""
    name, descriptor = func.__name__, _descriptor(func)
    if descriptor is Tensor.grad and name == "__set__":
        return args[0] if isinstance(args[0], _Remote) else None
    if name == "copy_" and not isinstance(args[1], _Remote) and args[1].is_meta:
        return None  # load_state_dict does this, when the values have been sent to where they belong
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if in_place or "out" in kwargs or descriptor is Tensor.data or name == "__setitem__" or name in _HOOKS:
        return next(_remotes_in((*args, *kwargs.values())), None)
    return None
