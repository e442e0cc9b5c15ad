"""The owner's half of :mod:`strategies.remote.module`: the module, and what its callers may ask of it.

What travels when a model is trained: the caller sends

    forward(args, wanted)     the owner runs the module, keeps its graph under a number, returns outputs and number
    backward(number, grads)   it goes back through that graph, adds to .grad of the parameters, returns those of inputs
    step(optimizer, values)   it steps with the hyperparameters that the caller has now
"""

import random
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, ClassVar

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future
from torch.optim import Optimizer

from strategies.common.torch_compat import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from strategies.common.trees import tensors_in
from strategies.optim.restricted import hyperparameters, set_hyperparameters
from strategies.pipeline.control.calls import failure_of
from strategies.pipeline.stage.layers import preserved_random_state

_TOGETHER = ("make_optimizer", "step", "zero_grad")
"""Commands that run once, when all callers have asked for them."""


class Host:
    """Holds a module on the process that owns it, and runs one command at a time, on a thread of its own.

    Args:
        device: Where the module is, or is to be.
        num_callers: How many processes use it at the same time.
        module: The module; left out, :meth:`build` makes it.
    """

    _of_module: ClassVar["weakref.WeakValueDictionary[int, Host]"] = weakref.WeakValueDictionary()
    """The host of each module that has one, by the module's ``id``: a host keeps its module."""

    def __init__(self, device: str, num_callers: int, module: nn.Module | None = None) -> None:
        self._device, self._num_callers = device, num_callers
        self._module = nn.Module() if module is None else module
        self._of_module[id(self._module)] = self
        self._optimizers: list[Optimizer] = []
        # Not behind an RRef, which can only be sent from a thread of RPC.
        self._graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._num_calls = 0
        self._waiting: dict[str, list[Future[Any]]] = {}
        self._lock = Lock()
        # Handlers of RPC run on a pool of threads, each with its own malloc arena, which makes computing slower.
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="relay-remote-module")

    @classmethod
    def of(cls, module: nn.Module, device: str, num_callers: int) -> "Host":
        """Return the host of a module of this process; creates it if there is none."""
        return cls._of_module.get(id(module)) or cls(device, num_callers, module)

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self._module

    def submit(self, command: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Queues a command; the future gets its result, or a :class:`~strategies.pipeline.control.calls.Failure`."""
        done: Future[Any] = Future()
        asked = [done]
        if command in _TOGETHER:
            with self._lock:
                asked = self._waiting.setdefault(command, [])
                asked.append(done)
                if len(asked) < self._num_callers:
                    return done
                del self._waiting[command]
        self._compute.submit(self._run, command, arguments, asked)
        return done

    def num_graphs(self) -> int:
        """Return the number of calls that wait for their backward pass."""
        return len(self._graphs)

    def _run(self, command: str, arguments: tuple[Any, ...], asked: list[Future[Any]]) -> None:
        try:
            result = getattr(self, command)(*arguments)
        except BaseException as error:  # a module may even exit; the caller must hear of it
            result = failure_of(error, type(self._module).__name__, command)
        for done in asked:
            done.set_result(result)

    def build(self, packed: bytes) -> None:
        """Create the module. The constructor of this class does not, because its errors would lose their type.

        Args:
            packed: A class or function, arguments and keyword arguments, pickled by cloudpickle.

        Raises:
            TypeError: If the result is not a module.
        """
        make, args, kwargs = cloudpickle.loads(packed)
        module = make(*args, **kwargs)
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected an nn.Module of {make!r}, got {type(module).__name__}")
        del self._of_module[id(self._module)]
        self._module = module.to(self._device)
        self._of_module[id(module)] = self

    def describe(self) -> tuple[str, int]:
        """Return the name of the module's class, and the number of callers."""
        return type(self._module).__name__, self._num_callers

    def check(self, device: str) -> None:
        """Check the module that another process has given as being on ``device``.

        Raises:
            TypeError: If it is not a module.
            ValueError: If it is on another device.
        """
        if not isinstance(self._module, nn.Module):
            raise TypeError(f"module_rref refers to a {type(self._module).__name__}, not to an nn.Module")
        named = torch.empty(0, device=device).device  # "cuda" is the current one
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            if tensor.device != named:
                raise ValueError(f"the module is on {tensor.device}, but remote_device says {device}")

    def apply(self, packed: bytes, state: tuple[Any, Tensor]) -> tuple[tuple[Any, Tensor], bool]:
        """Call a function with each submodule and the module.

        Args:
            packed: The function, pickled by cloudpickle.
            state: The caller's random states, of ``random`` and of torch on the CPU.

        Returns:
            The random states afterwards, and whether the function has changed an object that it refers to.
        """
        function = cloudpickle.loads(packed)
        before = cloudpickle.dumps(function)
        with preserved_random_state(torch.device("cpu")):
            random.setstate(state[0])
            torch.set_rng_state(state[1])
            self._module.apply(function)
            state = random.getstate(), torch.get_rng_state()
        return state, cloudpickle.dumps(function) != before

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: list[bool], grad: bool
    ) -> tuple[Any, list[bool], int | None]:
        """Call the module.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            wanted: For each leaf of both, whether its gradient will be requested.
            grad: Whether a backward pass may follow.

        Returns:
            The output, for each tensor in it whether it requires a gradient, and the number for the backward pass if
            any does.
        """
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [leaf.to(self._device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs = [leaf.requires_grad_() for leaf, flag in zip(leaves, wanted, strict=True) if flag]
        with torch.set_grad_enabled(grad):
            # A leaf of autograd could not be changed in place.
            passed = [leaf.clone() if flag else leaf for leaf, flag in zip(leaves, wanted, strict=True)]
            args, kwargs = tree_unflatten(passed, spec)
            output = self._module(*args, **kwargs)
        refuse_hidden_tensors(tree_leaves(output))
        tensors = tensors_in(output)
        flags = [tensor.requires_grad for tensor in tensors]
        sent = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), output)
        if not any(flags):
            return sent, flags, None
        self._num_calls += 1
        self._graphs[self._num_calls] = inputs, [tensor for tensor in tensors if tensor.requires_grad]
        return sent, flags, self._num_calls

    def call_recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module within distributed autograd, which records the call."""
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), (args, kwargs))
        output = self._module(*args, **kwargs)
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), output)

    def forget(self, number: int) -> None:
        """Free the graph of a call whose backward pass will not come."""
        self._graphs.pop(number, None)

    def backward(self, number: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Add the mean over the callers to the gradients of the parameters, and return the gradients of the inputs.

        Args:
            number: The number that :meth:`forward` returned.
            grads: The gradient of each output that requires one, or ``None``.

        Raises:
            RuntimeError: If there has been a backward pass through this call.
        """
        if number not in self._graphs:
            raise RuntimeError(
                "a second backward pass through one call of a remote module: the first one has freed what it needs, "
                "also with retain_graph=True. Call the module again."
            )
        inputs, outputs = self._graphs.pop(number)
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        share = self._num_callers
        torch.autograd.backward([out for out, _ in pairs], [grad.to(self._device) / share for _, grad in pairs])
        return [None if tensor.grad is None else tensor.grad.cpu() * share for tensor in inputs]

    def parameters(self) -> list[tuple[str, Tensor, Tensor | None, bool]]:
        """Return name, value, gradient and ``requires_grad`` of each parameter."""
        return [
            (name, _copy(p), None if p.grad is None else _copy(p.grad), p.requires_grad)
            for name, p in self._module.named_parameters()
        ]

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return name and value of each buffer."""
        return [(name, _copy(buffer)) for name, buffer in self._module.named_buffers()]

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict with copies of its tensors."""
        return tree_map_only(Tensor, _copy, dict(self._module.state_dict()))

    def load_state_dict(self, state: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
        """Load the entries that fit.

        Returns:
            Missing keys, unexpected keys, and messages about other errors.
        """
        try:
            keys = self._module.load_state_dict(OrderedDict(state), strict=False)
        except RuntimeError as error:  # other shapes
            return [], [], [str(error)]
        return keys.missing_keys, keys.unexpected_keys, []

    def train(self, mode: bool) -> None:
        """Set the mode."""
        self._module.train(mode)

    def to(self, dtype: torch.dtype) -> None:
        """Convert floating-point parameters and buffers."""
        self._module.to(dtype)

    def requires_grad_(self, flag: bool) -> None:
        """Freeze or thaw all parameters."""
        self._module.requires_grad_(flag)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients."""
        self._module.zero_grad(set_to_none)

    def make_optimizer(self, packed: bytes) -> tuple[int, list[torch.Size], dict[str, Any]]:
        """Create an optimizer of all parameters.

        Returns:
            Its number, the shapes of its parameters, and its hyperparameters.
        """
        cls, options = cloudpickle.loads(packed)
        optimizer = cls(self._module.parameters(), **options)
        self._optimizers.append(optimizer)
        shapes = [parameter.shape for parameter in optimizer.param_groups[0]["params"]]
        return len(self._optimizers) - 1, shapes, hyperparameters(optimizer)[0]

    def step(self, number: int, values: list[dict[str, Any]]) -> None:
        """Step an optimizer with the hyperparameters that its callers have now."""
        set_hyperparameters(self._optimizers[number], values)
        self._optimizers[number].step()

    def optimizer_state_dict(self, number: int) -> dict[str, Any]:
        """Return the state dict of an optimizer with copies of its tensors."""
        return tree_map_only(Tensor, _copy, self._optimizers[number].state_dict())

    def load_optimizer_state_dict(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Load the state dict of an optimizer; returns the hyperparameters in it."""
        self._optimizers[number].load_state_dict(state)
        return hyperparameters(self._optimizers[number])[0]


@rpc.functions.async_execution
def ask(host: Any, forgotten: list[int], command: str, *arguments: Any) -> Future[Any]:
    """Runs a command on the host behind the ``RRef``; see :meth:`Host.submit` and :meth:`Host.forget`."""
    for number in forgotten:
        host.local_value().submit("forget", (number,))
    return host.local_value().submit(command, arguments)


def host_of(module: Any, device: str, num_callers: int) -> Host:
    """Return the host of the module behind the ``RRef``; see :meth:`Host.of`."""
    return Host.of(module.local_value(), device, num_callers)


def module_of(host: Any) -> nn.Module:
    """Return the module of the host behind the ``RRef``."""
    module: nn.Module = host.local_value().module
    return module


def parameters_of(host: Any, recurse: bool) -> list[Any]:
    """Return an ``RRef`` to each parameter of the module."""
    return [rpc.RRef(parameter) for parameter in module_of(host).parameters(recurse)]


def call_module(host: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the module on a thread of RPC, within the caller's context of distributed autograd."""
    return host.local_value().call_recorded(args, kwargs)


def refuse_hidden_tensors(leaves: Iterable[Any]) -> None:
    """Check that no gradient would be lost in an object that only its own class can take apart.

    Raises:
        TypeError: If such an object holds a tensor that requires a gradient.
    """
    for leaf in leaves:
        held = () if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(value, Tensor) and value.requires_grad for value in held):
            raise TypeError(
                "tensors with gradients go to and from a remote module in tuples, lists and dicts, got a "
                f"{type(leaf).__name__} that holds one"
            )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
