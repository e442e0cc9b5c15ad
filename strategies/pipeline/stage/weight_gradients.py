"""Split backward passes: input gradients first, weight gradients of linear layers and convolutions later.

The preceding stage waits for input gradients. No stage waits for weight gradients, which may fill idle time (Qi et al.,
2023, https://arxiv.org/abs/2401.10241). Within :class:`DelayedWeights`, functions that multiply by a parameter record
an autograd node that leaves the gradient of the parameter to :class:`WeightGradients`. All other gradients, such as
those of norms, custom functions, and compiled or recomputed layers, are computed immediately. So any layer may run
within it. The gradient of a weight is also computed immediately if the input of the function requires no gradient,
such as the tokens of an embedding or a buffer, because a layer may change such a tensor in its next forward pass.

    forward     y = linear(x, w, b)       keeps x and w
    backward    grad_x = grad_y · w       and stores (w, b, x, grad_y)
    later       w.grad += grad_yᵀ · x

The product is added to ``w.grad`` without a temporary tensor, and so are the rows of an embedding. For a large weight,
this takes half of the time or less, because the temporary tensor would be new memory in each micro-batch. Schedules
with whole backward passes also use this for large weights.
"""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from strategies.common.torch_compat import (
    gradient_hooks,
    is_computed_in_this_pass,
    is_functorch_active,
    top_saved_tensors_hooks,
    version_of,
)


class _Function(NamedTuple):
    """A function of an input, a weight and a bias, and its gradients.

    Attributes:
        forward: Takes input, weight, bias and further arguments.
        input_grad: Takes the gradient of the output, input, weight and further arguments.
        weight_grad: Takes the same arguments as ``input_grad``.
        bias_grad: Takes the gradient of the output.
        add_weight_grad: Takes an existing gradient of the weight, to which it adds, and the arguments of
            ``weight_grad``. ``None`` if this function cannot add without a temporary tensor.
        is_cast: Whether autocast converts the arguments.
    """

    forward: Callable[..., Tensor]
    input_grad: Callable[..., Tensor]
    weight_grad: Callable[..., Tensor]
    bias_grad: Callable[[Tensor], Tensor]
    add_weight_grad: Callable[..., Any] | None = None
    is_cast: bool = True


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


_LINEAR = _Function(
    functional.linear,
    lambda grad, x, weight: grad @ weight,
    lambda grad, x, weight: _rows(grad).T @ _rows(x),
    lambda grad: _rows(grad).sum(0),
    lambda total, grad, x, weight: total.addmm_(_rows(grad).T, _rows(x)),
)

_ADDMM = _Function(
    lambda x, weight, bias: torch.addmm(bias, x, weight),
    lambda grad, x, weight: grad @ weight.T,
    lambda grad, x, weight: x.T @ grad,
    lambda grad: grad.sum(0),
    lambda total, grad, x, weight: total.addmm_(x.T, grad),
)


def _embedding_grad(grad: Tensor, indices: Tensor, weight: Tensor, padding: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, indices, len(weight), padding, False)


def _add_embedding_grad(total: Tensor, grad: Tensor, indices: Tensor, weight: Tensor, padding: int) -> None:
    """Add rows one by one if they are few, which is then faster than to compute the gradient of the whole table."""
    if indices.numel() > len(weight):
        total.add_(_embedding_grad(grad, indices, weight, padding))
        return
    places, rows = indices.reshape(-1), _rows(grad)
    if padding >= 0:
        rows = rows.masked_fill((places == padding)[:, None], 0.0)
    total.index_add_(0, places, rows)


def _no_grad(grad: Tensor, *arguments: Any) -> Any:
    raise AssertionError("indices have no gradient, and an embedding has no bias")


_EMBEDDING = _Function(
    lambda indices, weight, bias, padding: torch.embedding(weight, indices, padding),
    _no_grad,
    _embedding_grad,
    _no_grad,
    _add_embedding_grad,
    is_cast=False,
)


def _convolution_grad(place: int) -> Callable[..., Tensor]:
    def grad_of(grad: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
        mask = [place == 0, place == 1, False]
        settings = (stride, padding, dilation, False, [0] * (weight.dim() - 2), groups)
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, mask)[place]

    return grad_of


def _convolution(dims: int) -> tuple[Callable[..., Tensor], _Function]:
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    axes = [0, *range(2, dims + 2)]
    return function, _Function(function, _convolution_grad(0), _convolution_grad(1), lambda grad: grad.sum(axes))


class _DelayableCall(NamedTuple):
    """The arguments of a call that can leave a gradient for later."""

    kind: _Function
    x: Any
    weight: Any
    bias: Any
    others: tuple[Any, ...] = ()


def _linear(input: Any, weight: Any, bias: Any = None) -> _DelayableCall | None:
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    is_broadcast = isinstance(bias, Tensor) and bias.shape != weight.shape[:1]
    return None if is_broadcast else _DelayableCall(_LINEAR, input, weight, bias)


def _addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> _DelayableCall | None:
    is_plain = beta == 1 and alpha == 1 and out is None and isinstance(input, Tensor) and isinstance(mat2, Tensor)
    return _DelayableCall(_ADDMM, mat1, mat2, input) if is_plain and input.shape == mat2.shape[1:] else None


def _conv(dims: int) -> Callable[..., _DelayableCall | None]:
    _, kind = _convolution(dims)

    def call(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
    ) -> _DelayableCall | None:
        if isinstance(padding, str) or not isinstance(input, Tensor) or input.dim() != dims + 2:
            return None
        settings = [[value] * dims if isinstance(value, int) else list(value) for value in (stride, padding, dilation)]
        return _DelayableCall(kind, input, weight, bias, (*(s * dims if len(s) == 1 else s for s in settings), groups))

    return call


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _DelayableCall | None:
    if max_norm is not None or scale_grad_by_freq or sparse or not isinstance(weight, Tensor):
        return None
    if weight.device.type not in ("cpu", "meta"):  # on a GPU, the order of sums of index_add_ varies
        return None
    padding = -1
    if padding_idx is not None:
        padding = padding_idx + len(weight) if padding_idx < 0 else padding_idx
        if not 0 <= padding < len(weight):
            return None  # torch raises the error
    return _DelayableCall(_EMBEDDING, input, weight, None, (padding,))


_CALLS: Mapping[Any, Callable[..., _DelayableCall | None]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.addmm: _addmm,
    **{_convolution(dims)[0]: _conv(dims) for dims in (1, 2, 3)},
}


LARGE_BYTES = 2**22
"""Minimum size of a weight whose gradient is added without a temporary tensor under every schedule."""


def _within(function: Any) -> Any:
    """Return a copy of a function of ``torch.nn.functional`` whose inner calls a function mode sees.

    The original function passes itself to the mode, which can only run it without the mode; the copy does not. The copy
    is made for each call, because users replace functions of this module.
    """
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_ATTENTION = functional.multi_head_attention_forward


class WeightGradients:
    """Weight gradients of a micro-batch that have not been computed yet.

    Args:
        at_once: Compute each gradient when it is added, so that none waits.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._left: list[tuple[_DelayableCall, Tensor, int]] = []
        self._at_once = at_once

    def add(self, call: _DelayableCall, grad: Tensor, *, may_change: bool) -> None:
        """Leave the gradients of the parameters of a call for :meth:`compute`.

        Args:
            call: The call.
            grad: The gradient of its output.
            may_change: Whether the forward pass of a later micro-batch may change the input of the call. The gradients
                are then computed immediately.
        """
        if self._at_once or may_change:
            _add_gradients(call, grad)
        else:
            self._left.append((call, grad, version_of(call.x)))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are kept for :meth:`compute`, apart from parameters."""
        return [tensor for call, grad, _ in self._left for tensor in (call.x, grad)]

    def compute(self) -> None:
        """Add the gradients to ``.grad`` of the parameters.

        Raises:
            RuntimeError: If the input of a call has been changed in place since :meth:`add`.
        """
        left, self._left = self._left, []
        for call, grad, version in left:
            if version_of(call.x) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"the input {list(call.x.shape)} of a layer with a weight {list(call.weight.shape)} is at version "
                    f"{version_of(call.x)}; expected version {version}. A schedule with split backward passes computes "
                    "the gradient of the weight after forward passes of later micro-batches. Pass a copy of the tensor "
                    "to the layer (.clone()), or use schedule='1f1b' or 'interleaved'."
                )
            _add_gradients(call, grad)


@torch.no_grad()
def _add_gradients(call: _DelayableCall, grad: Tensor) -> None:
    kind, x, weight, bias, others = call
    if weight.requires_grad:
        if kind.add_weight_grad is not None and _can_add_to(weight.grad, grad, x):
            kind.add_weight_grad(weight.grad, grad, x, weight, *others)
        else:
            _add(weight, kind.weight_grad(grad, x, weight, *others))
    if bias is not None and bias.requires_grad:
        _add(bias, kind.bias_grad(grad))


def _can_add_to(total: Tensor | None, grad: Tensor, x: Tensor) -> bool:
    """Whether a product can be added to a gradient in place: it has the same precision, and the gradient is dense."""
    if type(total) is not Tensor or total.layout is not torch.strided or total.dtype != grad.dtype:
        return False
    return total.dtype == x.dtype or not x.is_floating_point()


def _add(parameter: Tensor, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    elif parameter.grad.is_sparse:  # an embedding shares the weight
        parameter.grad = grad.add_(parameter.grad)
    else:
        parameter.grad.add_(grad)


class DelayedWeights(TorchFunctionMode):
    """Mode in which linear layers, convolutions and embeddings leave the gradients of parameters to ``left``.

    Args:
        least_bytes: The minimum size of a weight.

    Attributes:
        left: Collects the delayed gradients; ``None`` if backward passes return the gradients to autograd.
        least_bytes: See above.
    """

    def __init__(self, least_bytes: int = 0) -> None:
        super().__init__()
        self.left: WeightGradients | None = None
        self.least_bytes = least_bytes
        self._in_attention = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = kwargs or {}
        if func in _CALLS and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            call = _CALLS[func](*args, **arguments)
            if call is not None and _can_wait(call) and self._is_worth_it(call):
                return _Delayed.apply(call.x, call.weight, call.bias, call.kind, call.others, self)
        if func is _ATTENTION and not self._in_attention and {*types} <= {Tensor, nn.Parameter}:
            self._in_attention = True
            try:
                with self:
                    return _within(func)(*args, **arguments)
            finally:
                self._in_attention = False
        return func(*args, **arguments)

    def _is_worth_it(self, call: _DelayableCall) -> bool:
        """Whether to handle the gradient of the weight here rather than in autograd.

        Under autocast, its precision differs from that of ``.grad``, so adding it in place gains nothing.
        """
        if self.least_bytes == 0:
            return True
        return call.weight.nbytes >= self.least_bytes and not (call.kind.is_cast and _casts(call.x.device.type))


def _casts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # not on meta


def _can_wait(call: _DelayableCall) -> bool:
    """Whether the gradients of the parameters may be computed later, with the same result."""
    if type(call.x) is not Tensor or type(call.weight) is not nn.Parameter or not call.weight.requires_grad:
        return False
    if call.bias is not None and type(call.bias) is not nn.Parameter:
        return False
    parameters = [call.weight] if call.bias is None else [call.weight, call.bias]
    if any(map(_has_hooks, parameters)):
        return False
    if is_functorch_active() or top_saved_tensors_hooks() is not None:  # such as those of torch.utils.checkpoint
        return False
    return not any(p.is_complex() or p.is_sparse or p.device != call.x.device for p in parameters)


def _has_hooks(parameter: Tensor) -> bool:
    return any(gradient_hooks(parameter))


class _Delayed(torch.autograd.Function):
    """A function of an input and parameters whose gradients may be delayed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: _Function,
        others: Any,
        delays: DelayedWeights,
    ) -> Tensor:
        ctx.kind, ctx.others, ctx.delays, ctx.parameters, ctx.dtype = kind, others, delays, (weight, bias), x.dtype
        device = x.device.type
        own: list[Any] = [x, weight, bias]
        if kind.is_cast and _casts(device):
            dtype = torch.get_autocast_dtype(device)
            own = [t.to(dtype) if t is not None and t.dtype in _AUTOCAST else t for t in own]
        ctx.is_cast = own[0] is not x or own[1] is not weight
        is_used = ctx.needs_input_grad[0] or ctx.is_cast  # otherwise a layer may change its weight in place in between
        ctx.save_for_backward(own[0], own[1] if is_used else None)
        return kind.forward(*own, *others).data  # may be a view, which the next layer could not change in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kind, others, (weight, bias), (x, used) = ctx.kind, ctx.others, ctx.parameters, ctx.saved_tensors
        used = weight if used is None else used  # only the shape of the weight is needed
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() and ctx.is_cast:
            raise RuntimeError(
                "a layer differentiates a gradient (create_graph=True) under autocast, which a schedule with split "
                "backward passes does not support. Use schedule='1f1b' or 'interleaved', or precision='32-true'."
            )
        grad_x = kind.input_grad(grad, x, used, *others).to(ctx.dtype) if wants_x else None
        hooked = _has_hooks(weight) or (bias is not None and _has_hooks(bias))  # since the forward pass
        if ctx.delays.left is not None and not torch.is_grad_enabled() and not hooked and _accumulates(ctx, weight):
            call = _DelayableCall(kind, x, weight, bias if wants_bias else None, others)
            ctx.delays.left.add(call, grad, may_change=not wants_x)  # such as a buffer that its layer updates
            return grad_x, None, None, None, None, None
        grad_weight = kind.weight_grad(grad, x, used, *others).to(weight.dtype) if wants_weight else None
        grad_bias = kind.bias_grad(grad).to(bias.dtype) if wants_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _accumulates(ctx: Any, weight: Tensor) -> bool:
    """Whether this backward pass adds to ``weight.grad``, unlike ``torch.autograd.grad`` within a layer or hook."""
    nodes = [node for node, _ in ctx.next_functions if getattr(node, "variable", None) is weight]
    try:
        return bool(nodes) and is_computed_in_this_pass(nodes[0])
    except RuntimeError:  # torch.autograd.grad requests the gradient of the weight
        return False


_AUTOCAST = frozenset([torch.float32, torch.float16, torch.bfloat16])
"""The dtypes that autocast converts; not float64."""
