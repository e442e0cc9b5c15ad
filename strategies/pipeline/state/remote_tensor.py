"""Stand-ins on the driver for parameters and buffers whose values are on a worker.

Name, shape, dtype and ``requires_grad`` are known on the driver. Only reading values fetches them, with one message to
the stage:

    parameter.detach(), .data, [0], .t()   a view: also a stand-in, whose values are fetched when they are read
    parameter.norm(), .clone(), .cpu()     computed from the current values of the stage
    parameter.grad                         the stage's current gradient, or ``None``; a :class:`FetchedTensor`
    zero_grad(), parameter.grad = None     clears the gradient on the stage, before the next command of the stage
    parameter.mul_(2), .grad.mul_(2)       an error, because the change would not reach the stage
    loss + parameter.norm()                a value; its backward pass adds to the gradient on the stage
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn, cast

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from strategies.common.torch_compat import (
    as_subclass,
    storage_key,
    tree_map,
    tree_map_only,
    values_of_sparse,
    without_torch_function,
)
from strategies.common.trees import tensors_in
from strategies.optim.calls import runs_own_code
from strategies.optim.gradients import add_gradient
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import NamedParameters, StageCommands
from strategies.pipeline.control.operations import GradientOf
from strategies.sharding.gathered_layers import USED_ELSEWHERE, is_part

_HARMLESS = ("requires_grad_", "rename_")
"""Methods whose names end in an underscore, but which change no value."""

_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
        *("lshift", "rshift", "and", "or", "xor"),
    )
)

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")

_LIKE = frozenset(f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint"))
"""Functions that need only the shape. The ``new_...`` methods of tensors are also such functions."""

_FACTS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "shape", "dtype", "is_meta", "is_leaf", "ndim")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
    ]
)
"""Properties of stand-ins and fetched tensors that are known without values."""

_FIND_NO_GRADIENT = ("torch.optim.", "torch.amp.", "torch.nn.modules.", "torch.utils.", "torch._", "strategies.")
"""Modules whose functions get ``None`` for ``.grad``, because the stage does their work. Other code gets the gradient.

``GradScaler``, ``clip_grad_norm_`` and optimizers enter no context that could be detected, so the module of the
immediate caller decides; see decision record 073.
"""


@dataclass
class Source:
    """The place of the values of a stand-in.

    Attributes:
        stage: The stage.
        name: Name of the tensor in the module.
        device: Device to which fetched values are moved.
        module: Number of the module on the stage: 0 for its layers, ``k`` for the layers of the ``k``-th model copy.
    """

    stage: RemoteStage
    name: str
    device: torch.device
    module: int = 0
    _gradient: tuple[int, Tensor | None] = (-1, None)

    def value(self, described: str) -> Tensor:
        """Return a copy of the current values.

        Raises:
            RuntimeError: If there are no values, or if they are a result of the forward pass and require a gradient.
        """
        value = self.stage.readable().ask(StageCommands.value, (self.module, self.name)).wait()
        if value is None:
            raise RuntimeError(f"{described} on {self.stage.description} has no values: its layer has dropped it.")
        if value.requires_grad:
            raise RuntimeError(
                f"{described} on {self.stage.description} is a result of the layer's forward pass and "
                "requires a gradient, which cannot be sent to that stage from the driver. Return it from the layer."
            )
        return value.to(self.device)

    def add_gradient(self, grad: Tensor) -> None:
        """Add to the gradient on the stage, before its next command."""
        change = partial(add_gradient, grad=grad.detach().to("cpu", copy=True))
        self.stage.send(StageCommands.change_grads, NamedParameters([self.name], self.module), change)

    def gradient(self) -> Tensor | None:
        """Return the current gradient. It is fetched again only if the stage has changed it."""
        if self._gradient[0] != self.stage.version:
            grad = self.stage.readable().ask(StageCommands.value, GradientOf((self.module, self.name))).wait()
            self._gradient = self.stage.version, None if grad is None else grad.to(self.device)
        return self._gradient[1]

    def clear_gradient(self, set_to_none: bool) -> None:
        """Clear the gradient on the stage, as ``zero_grad`` of a module does."""
        self.stage.send_zero_grad(self.name, set_to_none, self.module)


class _Remote:
    """Fetches values for operations that read them, and refuses operations that would have no effect on the stage.

    Refused are in-place changes, setting a gradient, registering hooks, and using an outdated fetched copy.
    """

    relay_name: str
    """Name of this tensor, or of the tensor from which it was computed."""

    relay_source: Source | None = None
    """The place from which values can be fetched; ``None`` if they cannot be fetched."""

    relay_view: "Callable[[Callable[[_Remote], Tensor]], Tensor] | None" = None
    """For a view of a stand-in: returns its values, given a function that reads the stand-in."""

    relay_advice: str = (
        "For gradients of all stages set the Trainer's gradient_clip_val, or call self.clip_gradients(...) or "
        "trainer.strategy.clip_grad_norm_(...), which returns their norm (max_norm=inf does not change them); to clear "
        "them call zero_grad() of the optimizer or of the model."
    )
    """Advice in error messages about gradients."""

    relay_is_followed: bool = True
    """Whether optimizer steps over this parameter apply to the worker. If not, reading ``.grad`` in them raises."""

    relay_is_part: bool = False
    """Whether the worker holds the part of this replica of a parameter that replicas divide."""

    relay_value: Any = None
    """Reference to the values, for :class:`~strategies.pipeline.state.remote_operations.OnStages`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            if func in _FACTS:  # fast path: each pass reads these of all parameters
                return func(*args, **kwargs)
            descriptor, name = _descriptor(func), func.__name__
            if name == "__get__" and descriptor is Tensor.grad and isinstance(args[0], RemoteParameter):
                return args[0]._gradient(sys._getframe(1))
            if name == "__set__" and descriptor is Tensor.grad and isinstance(args[0], RemoteParameter):
                return args[0]._set_gradient(args[1])
            if name == "__get__" and descriptor is Tensor.device and args[0].relay_source is not None:
                return args[0].relay_source.device  # the device of fetched values
            if (changed := _changed(func, args, kwargs)) is not None:
                changed._refuse(getattr(descriptor, "__name__", name))
            if any(isinstance(t, _WITHOUT_VALUES) for t in _remotes_in((args, kwargs))):
                known, result = _without_values(func, args, kwargs)
                if known:
                    return result
            return _with_values(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with without_torch_function():
            copied: Tensor = self._value().detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def _value(self) -> Tensor:
        """Return the values, detached."""
        if self.relay_view is not None:
            with torch.no_grad():
                return self.relay_view(lambda remote: remote._value())
        if self.relay_source is None:
            self._refuse("reading values")
        return self.relay_source.value(self.relay_name)

    def _tracked(self) -> Tensor:
        """Return the values. If the parameter requires a gradient, their gradients are sent to the stage."""
        if not cast(Tensor, self).requires_grad:
            return self._value()
        if self.relay_view is not None:
            return self.relay_view(lambda remote: remote._tracked())
        if self.relay_is_part:
            raise RuntimeError(USED_ELSEWHERE)
        value = self._value()
        assert self.relay_source is not None
        return cast(Tensor, _FetchedWithGradient.apply(torch.zeros((), requires_grad=True), value, self.relay_source))

    def _gradient(self, frame: FrameType) -> Tensor | None:
        module = frame.f_globals.get("__name__", "")
        if module == "torch.nn.utils.clip_grad":
            self._refuse_gradient("torch.nn.utils.clip_grad_norm_ or clip_grad_value_")
        if frame.f_code is nn.Module.zero_grad.__code__:  # which skips parameters without a gradient
            self._clear_gradient(frame.f_locals["set_to_none"])
            return None
        if module.startswith(_FIND_NO_GRADIENT) or runs_own_code():
            if not self.relay_is_followed:
                self._refuse_gradient("an optimizer")
            return None
        if self.relay_source is None:
            self._refuse_gradient("reading it")
        if (grad := self.relay_source.gradient()) is None:
            return None
        return _fetched(grad, f"the gradient of {self.relay_name}", self.relay_source.stage, self.relay_advice)

    def _set_gradient(self, grad: Tensor | None) -> None:
        if grad is not None:
            self._refuse_gradient("setting it")
        self._clear_gradient(True)

    def _clear_gradient(self, set_to_none: bool) -> None:
        if self.relay_source is None:
            self._refuse_gradient("clearing it")
        self.relay_source.clear_gradient(set_to_none)

    @property
    def _stage(self) -> RemoteStage:
        assert self.relay_source is not None
        return self.relay_source.stage

    @property
    def _where(self) -> str:
        return "another stage" if self.relay_source is None else f"{self.relay_source.stage.description}, another stage"

    def _refuse_gradient(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"the gradient of {self.relay_name} is on {self._where} of the pipeline, which {what} here would leave "
            f"out. {self.relay_advice}"
        )

    def _refuse(self, what: str) -> NoReturn:
        if what == "grad":
            self._refuse_gradient("deleting it")
        if what in _HOOKS:
            raise RuntimeError(
                f"`{what}` on {self.relay_name}, which is on {self._where} of the pipeline: gradients are computed "
                "there, so the hook would never be called. Read the parameter's .grad in on_before_optimizer_step, "
                'which fetches it (for WandbLogger.watch pass log="parameters", and log gradients there).'
            )
        raise RuntimeError(
            f"`{what}` on {self.relay_name}, which is on {self._where} of the pipeline: its values are not in this "
            "process. They can be read and copied here, but while the pipeline runs, only layers, optimizers and "
            f"load_state_dict() can change them.{'' if self.relay_is_followed else f' {self.relay_advice}'}"
        )


class RemoteParameter(_Remote, nn.Parameter):
    """Represents a parameter on a worker. ``requires_grad`` can be read and set."""


class RemoteBuffer(_Remote, Tensor):
    """Represents a buffer on a worker, or a view of a parameter or buffer on a worker."""


class FetchedTensor(_Remote, Tensor):
    """Fetched values. They are read-only, and valid until the stage may have changed them."""

    relay_stage: RemoteStage
    relay_version: int

    @property
    def _stage(self) -> RemoteStage:
        return self.relay_stage

    def _value(self) -> Tensor:
        if self.relay_stage.version != self.relay_version:
            raise RuntimeError(
                f"{self.relay_name} of {self.relay_stage.description} was read before that stage ran another command, "
                "and may be out of date. Read it again, or keep a copy: .clone()."
            )
        return as_subclass(self, Tensor)

    def _tracked(self) -> Tensor:
        return self._value()

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"`{what}` on {self.relay_name}, which has been fetched from {self.relay_stage.description}: the change "
            f"would not reach that stage. To compute with it, change a copy: .clone(). {self.relay_advice}"
        )


_WITHOUT_VALUES = (RemoteParameter, RemoteBuffer)


def remote_parameter(name: str, parameter: nn.Parameter, source: Source | None = None) -> RemoteParameter:
    """Return a stand-in with shape, dtype and ``requires_grad`` of ``parameter``."""
    empty = torch.empty_like(parameter, device="meta")
    remote = cast(RemoteParameter, RemoteParameter(empty, requires_grad=parameter.requires_grad))
    remote.relay_name, remote.relay_source = f"parameter {name} {list(parameter.shape)}", source
    remote.relay_is_part = is_part(parameter)
    return remote


def remote_buffer(name: str, buffer: Tensor, source: Source | None = None) -> RemoteBuffer:
    """Return a stand-in with shape and dtype of ``buffer``."""
    remote = torch.empty_like(buffer, device="meta").as_subclass(RemoteBuffer)
    remote.relay_name, remote.relay_source = f"buffer {name} {list(buffer.shape)}", source
    return remote


class _FetchedWithGradient(torch.autograd.Function):
    """Returns fetched values of a parameter, and sends their gradient to the stage of the parameter."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, source: Source) -> Tensor:
        ctx.source = source
        return value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.source.add_gradient(grads[0])
        return None, None, None


def _without_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether a function needs only shapes and dtypes, and in that case its result."""
    name, remotes = func.__name__, list(_remotes_in((args, kwargs)))
    if func is torch.autograd.grad or name == "backward":
        remotes[0]._refuse(f"{name} (a backward pass)")
    if name in _HARMLESS or name == "__set__" or _loads(func, args):
        return True, func(*args, **kwargs)
    if _is_in_place(func, kwargs) or kwargs.get("out") is not None:
        return False, None  # the changed tensor has values
    if name in _LIKE or name.startswith("new_"):
        return True, func(*tree_map_only(_Remote, _empty, args), **tree_map_only(_Remote, _empty, kwargs))
    try:
        result = func(*args, **kwargs)
    except Exception:  # the function may work with values; if not, it raises its error again
        return False, None
    tensors = tensors_in(result)
    origins = {_storage(t): t for t in remotes if isinstance(t, _WITHOUT_VALUES)}
    if not all(_storage(t) in origins for t in tensors):
        return False, None
    places = iter(range(len(tensors)))

    def marked(leaf: Any) -> Any:
        place = next(places) if isinstance(leaf, Tensor) else 0
        if not isinstance(leaf, Tensor) or isinstance(leaf, _Remote):
            return leaf
        return _view(leaf, origins[_storage(leaf)], func, args, kwargs, place)

    return True, tree_map(marked, result) if tensors else result


def _view(
    empty: Tensor, origin: _Remote, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], place: int
) -> RemoteBuffer:
    """Return a stand-in for the tensor at ``place`` in the result of a function that returns views."""
    view = empty.as_subclass(RemoteBuffer)
    view.relay_name, view.relay_source = origin.relay_name, origin.relay_source
    vars(view)["relay_advice"] = origin.relay_advice

    def values(read: Callable[[_Remote], Tensor]) -> Tensor:
        result = func(*tree_map_only(_Remote, read, args), **tree_map_only(_Remote, read, kwargs))
        return tensors_in(result)[place]

    view.relay_view = values
    return view


def _with_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with fetched values. Results that share memory with them are read-only."""
    fetched: dict[int, _Remote] = {}
    _note_use(args, kwargs)

    def with_value(remote: _Remote) -> Tensor:
        value = remote._tracked() if torch.is_grad_enabled() else remote._value()
        if (storage := _storage(value)) is not None:
            fetched[storage] = remote
        return value

    result = func(*tree_map_only(_Remote, with_value, args), **tree_map_only(_Remote, with_value, kwargs))
    if isinstance(result, numpy.ndarray):
        result.flags.writeable = False

    def protected(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, _Remote):
            return leaf
        origin = fetched.get(_storage(leaf) or 0)
        return leaf if origin is None else _fetched(leaf, origin.relay_name, origin._stage, origin.relay_advice)

    return tree_map(protected, result)


def _note_use(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Notify a stage if the driver combines one of its tensors with a tensor in this process."""
    given = tensors_in((args, kwargs))
    if all(isinstance(tensor, _Remote) for tensor in given):
        return
    for tensor in given:
        if isinstance(tensor, _Remote) and (source := tensor.relay_source) is not None:
            source.stage.on_use(f"{tensor.relay_name} of {source.stage.description}", source.stage.in_pass)
            return


def _fetched(value: Tensor, name: str, stage: RemoteStage, advice: str) -> FetchedTensor:
    fetched = cast(FetchedTensor, as_subclass(value, FetchedTensor))
    fetched.relay_name, fetched.relay_stage, fetched.relay_version = name, stage, stage.version
    vars(fetched)["relay_advice"] = advice
    return fetched


def _empty(remote: _Remote) -> Tensor:
    """Return an empty tensor with the shape and dtype of a stand-in, on the device of fetched values."""
    source = remote.relay_source
    return torch.empty_like(cast(Tensor, remote), device=None if source is None else source.device)


def _storage(tensor: Any) -> int | None:
    """Return a key that tensors have in common if they share memory; ``None`` if it is unknown."""
    try:
        return storage_key(values_of_sparse(tensor) if tensor.layout is torch.sparse_coo else tensor)
    except (NotImplementedError, RuntimeError):
        return None


def _descriptor(func: Callable[..., Any]) -> Any:
    """Return the attribute of ``Tensor`` that ``func`` gets or sets, or ``None``."""
    return getattr(func, "__self__", None)


def _remotes_in(value: Any) -> Iterator[_Remote]:
    """Yield stand-ins and fetched tensors among arguments. Runs for each operation, so it avoids pytrees, for speed."""
    if isinstance(value, _Remote):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _remotes_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _remotes_in(item)


def _is_in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    name = func.__name__
    if name.endswith("_") and not name.endswith("__"):
        return name not in _HARMLESS
    return name in _IN_PLACE_OPERATORS or name == "__setitem__" or kwargs.get("inplace") is True


def _loads(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether ``load_state_dict`` calls ``func``, after it has sent the values to the stage."""
    return func.__name__ == "copy_" and len(args) > 1 and not isinstance(args[1], _Remote) and args[1].is_meta


def _changed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Remote | None:
    """Return the stand-in or fetched tensor that ``func`` would change without effect on the stage, if any."""
    sets = func.__name__ in ("__set__", "__delete__") and _descriptor(func) is not Tensor.requires_grad
    targets = [kwargs["out"]] if kwargs.get("out") is not None else []
    if (sets or func.__name__ in _HOOKS or _is_in_place(func, kwargs)) and not _loads(func, args):
        targets.append(args[0] if args else next(iter(kwargs.values())))
    return next(_remotes_in(targets), None)
