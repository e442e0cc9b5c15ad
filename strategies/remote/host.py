"""The owner's end of a module on another process: it hosts the module and implements the commands of the callers."""

import random
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer

from strategies.commands.host import Host
from strategies.common.activity import Activity
from strategies.common.random_seeds import preserved_random_state
from strategies.common.torch_compat import (
    metadata_of,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    with_metadata,
)
from strategies.common.trees import tensors_in
from strategies.optim.calls import hyperparameters, set_hyperparameters
from strategies.pipeline.stage.layers import PassContext
from strategies.remote.commands import ModuleCommands


class HostedModule(ModuleCommands):
    """A module and its optimizers. :class:`~strategies.remote.commands.ModuleCommands` documents the methods.

    Args:
        module: The module.
        device: The device of the module.
        num_callers: The number of processes that train the module.
    """

    hosts: ClassVar["weakref.WeakValueDictionary[int, Host[HostedModule]]"] = weakref.WeakValueDictionary()
    """The host of each hosted module, by the module's ``id``. A host keeps its module alive."""

    def __init__(self, module: nn.Module, device: str, num_callers: int) -> None:
        self.module, self._device, self._num_callers = module, device, num_callers
        self._optimizers: list[Optimizer] = []
        # Not behind an RRef, which can only be sent from an RPC thread.
        self._graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._num_calls = 0

    def describe(self) -> str:
        return type(self.module).__name__

    def announce_failure(self) -> None:
        """Do nothing: each caller waits only for its own commands."""

    def facts(self) -> tuple[str, int]:
        return type(self.module).__name__, self._num_callers

    def check(self, device: str) -> None:
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"module_rref refers to a {type(self.module).__name__}, not to an nn.Module")
        named = torch.empty(0, device=device).device  # "cuda" is the current device
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.device != named:
                raise ValueError(f"the module is on {tensor.device}, but remote_device says {device}")

    def apply(self, packed: bytes, state: tuple[Any, Tensor]) -> tuple[tuple[Any, Tensor], bool]:
        function = cloudpickle.loads(packed)
        before = cloudpickle.dumps(function)
        with preserved_random_state(torch.device("cpu")):
            random.setstate(state[0])
            torch.set_rng_state(state[1])
            self.module.apply(function)
            state = random.getstate(), torch.get_rng_state()
        return state, cloudpickle.dumps(function) != before

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: list[bool], grad: bool, context: PassContext
    ) -> tuple[Any, list[bool], int | None]:
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [leaf.to(self._device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs = [leaf.requires_grad_() for leaf, flag in zip(leaves, wanted, strict=True) if flag]
        with _entered(context, grad):
            # The module could not change an autograd leaf in place.
            passed = [leaf.clone() if flag else leaf for leaf, flag in zip(leaves, wanted, strict=True)]
            args, kwargs = tree_unflatten(passed, spec)
            output = self.module(*args, **kwargs)
        refuse_hidden_tensors(tree_leaves(output))
        tensors = tensors_in(output)
        flags = [tensor.requires_grad for tensor in tensors]
        sent = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), output)
        if not any(flags):
            return sent, flags, None
        self._num_calls += 1
        self._graphs[self._num_calls] = inputs, [tensor for tensor in tensors if tensor.requires_grad]
        return sent, flags, self._num_calls

    def call_in_autograd_context(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, context: PassContext
    ) -> Any:
        """Call the module and leave its backward pass to distributed autograd. RPC calls this directly."""
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), (args, kwargs))
        with _entered(context, grad):
            output = self.module(*args, **kwargs)
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), output)

    def forget(self, number: int) -> None:
        self._graphs.pop(number, None)

    def backward(self, number: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        if number not in self._graphs:
            raise RuntimeError(
                "a second backward pass through one call of a remote module: the first pass has freed its graph, even "
                "with retain_graph=True. Call the module again."
            )
        inputs, outputs = self._graphs.pop(number)
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        share = self._num_callers
        torch.autograd.backward([out for out, _ in pairs], [grad.to(self._device) / share for _, grad in pairs])
        return [None if tensor.grad is None else tensor.grad.cpu() * share for tensor in inputs]

    def num_graphs(self) -> int:
        return len(self._graphs)

    def parameters(self) -> list[tuple[str, Tensor, Tensor | None, bool]]:
        return [
            (name, _copy(p), None if p.grad is None else _copy(p.grad), p.requires_grad)
            for name, p in self.module.named_parameters()
        ]

    def buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, _copy(buffer)) for name, buffer in self.module.named_buffers()]

    def state_dict(self) -> dict[str, Any]:
        state = self.module.state_dict()
        return with_metadata(tree_map_only(Tensor, _copy, dict(state)), metadata_of(state))

    def load_state_dict(self, state: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
        try:
            keys = self.module.load_state_dict(state, strict=False)
        except RuntimeError as error:  # the shapes differ
            return [], [], [str(error)]
        return keys.missing_keys, keys.unexpected_keys, []

    def train(self, mode: bool) -> None:
        self.module.train(mode)

    def to(self, dtype: torch.dtype) -> None:
        self.module.to(dtype)

    def requires_grad_(self, flag: bool) -> None:
        self.module.requires_grad_(flag)

    def zero_grad(self, set_to_none: bool) -> None:
        self.module.zero_grad(set_to_none)

    def make_optimizer(self, packed: bytes) -> tuple[int, list[torch.Size], dict[str, Any]]:
        cls, options = cloudpickle.loads(packed)
        optimizer = cls(self.module.parameters(), **options)
        self._optimizers.append(optimizer)
        shapes = [parameter.shape for parameter in optimizer.param_groups[0]["params"]]
        return len(self._optimizers) - 1, shapes, hyperparameters(optimizer)[0]

    def step(self, number: int, values: list[dict[str, Any]]) -> None:
        set_hyperparameters(self._optimizers[number], values)
        self._optimizers[number].step()

    def optimizer_state_dict(self, number: int) -> dict[str, Any]:
        return tree_map_only(Tensor, _copy, self._optimizers[number].state_dict())

    def load_optimizer_state_dict(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        self._optimizers[number].load_state_dict(state)
        return hyperparameters(self._optimizers[number])[0]


def host_new_module(packed: bytes, device: str, num_callers: int) -> Host[HostedModule]:
    """Host a module that does not exist yet. The first command creates the module, and reports exceptions of its class.

    Args:
        packed: A class or a function that returns a module, positional and keyword arguments, by cloudpickle.
        device: The device of the module.
        num_callers: The number of processes that train the module.
    """
    activity = Activity()

    def create() -> HostedModule:
        activity.doing = "build"
        make, args, kwargs = cloudpickle.loads(packed)
        module = make(*args, **kwargs)
        if not isinstance(module, nn.Module):
            raise ValueError(
                "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an "
                f"instance of {type(module)}; module_cls is {make!r}"
            )
        hosted = HostedModule(module.to(device), device, num_callers)
        if (host := own()) is not None:
            HostedModule.hosts[id(hosted.module)] = host
        return hosted

    host = Host(create, ModuleCommands, name="Module", activity=activity, num_callers=num_callers)
    own = weakref.ref(host)  # the host's thread must not keep the host alive
    return host.start()


def host_existing_module(module: Any, device: str, num_callers: int) -> Host[HostedModule]:
    """Host the object behind the ``RRef``, or return its existing host."""
    value = module.local_value()
    hosted = HostedModule(value, device, num_callers)
    new = Host(lambda: hosted, ModuleCommands, name=hosted.describe(), activity=Activity(), num_callers=num_callers)
    host = HostedModule.hosts.setdefault(id(value), new)
    return host.start() if host is new else host


def module_of(host: Any) -> nn.Module:
    """Return the module of the host behind the ``RRef``."""
    module: nn.Module = host.local_value().hosted.module
    return module


def parameters_of(host: Any, recurse: bool) -> list[Any]:
    """Return an ``RRef`` to each parameter of the module."""
    return [rpc.RRef(parameter) for parameter in module_of(host).parameters(recurse)]


def call_module(host: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, context: PassContext) -> Any:
    """Call the module within the caller's distributed autograd context, on the RPC thread for this context."""
    return host.local_value().hosted.call_in_autograd_context(args, kwargs, grad, context)


def refuse_hidden_tensors(leaves: Iterable[Any]) -> None:
    """Check that no tensor with a gradient is an attribute of an object, where the gradient would be lost.

    Raises:
        TypeError: If an object has such an attribute.
    """
    for leaf in leaves:
        held = () if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(value, Tensor) and value.requires_grad for value in held):
            raise TypeError(
                "tensors with gradients go to and from a remote module in tuples, lists and dicts, got a "
                f"{type(leaf).__name__} that holds one"
            )


def _entered(context: PassContext, grad: bool) -> AbstractContextManager[None]:
    """Return a context with the caller's autocast and inference mode.

    It keeps the default dtype, which is global to the process, because other threads use it at the same time.
    """
    return replace(context, default_dtype=torch.get_default_dtype()).entered(grad=grad)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
