"""``RemoteModule``: a module in another process that is used, trained and saved like a local module.

``torch.distributed.nn.RemoteModule`` also places a module on another process and calls it. Its backward pass trains
nothing outside of a distributed autograd context, and ``loss.backward()`` fails within one; it refuses ``parameters``,
``state_dict`` and ``zero_grad``, also for a model that contains it, and errors of its module lose their type.
"""

import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future
from torch.optim import Optimizer

from strategies.common.autograd import with_backward
from strategies.common.names import did_you_mean
from strategies.common.torch_compat import (
    RemoteDevice,
    in_distributed_autograd,
    metadata_being_loaded,
    metadata_of,
    rpc_is_initialized,
    rpc_workers,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
    with_metadata,
)
from strategies.pipeline.stage.layers import PassContext
from strategies.remote.client import ModuleClient
from strategies.remote.commands import ModuleCommands
from strategies.remote.host import (
    call_module,
    host_existing_module,
    host_new_module,
    module_of,
    parameters_of,
    refuse_hidden_tensors,
)
from strategies.remote.optimizer import RemoteOptimizer


class RemoteModule(nn.Module):
    """A module in another process of ``torch.distributed.rpc``.

    ``loss.backward()`` runs through the module and adds to ``.grad`` of its parameters in their process. An optimizer
    made with :meth:`optimizer` steps them. ``state_dict``, ``load_state_dict``, ``train``, ``eval``, ``double`` and
    similar methods apply to the module, also when they are called on a model that contains it. The parameters are not
    parameters of that model, so ``DistributedDataParallel`` and local optimizers ignore them.

    The object can be sent to other processes by RPC, which then call the same module. Attributes and hooks that were
    added to the object are not sent. If several processes train the module, each on its share of a batch, set
    ``num_callers``: gradients are then means over the callers, as under DDP, and ``zero_grad`` and ``step`` run once,
    when all callers have called them.

    Args:
        remote_device: ``"<workername>/<device>"`` or ``"rank:<rank>/<device>"``, such as ``"ps/cuda:0"``; without
            a device it is the CPU.
        module_cls: A class, or a function that returns a module. It is pickled by value if it is defined in a script.
        args: Positional arguments of ``module_cls``.
        kwargs: Keyword arguments of ``module_cls``.
        num_callers: The number of processes that train the module together.

    Raises:
        RuntimeError: If RPC is not initialised in this process.
        ValueError: If RPC does not know the address, if there are no callers, or if the class returns no module.
        TypeError: If the class or its arguments cannot be pickled.
        Exception: Any exception of the class, with the remote traceback as its cause.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_callers: int = 1,
    ) -> None:
        super().__init__()
        if num_callers < 1:
            raise ValueError(f"num_callers must be at least 1, got {num_callers}")
        worker, device = _destination(remote_device)
        self._address = f"{worker.name}/{device}"
        make = self._packed(
            module_cls,
            (module_cls, tuple(args or ()), dict(kwargs or {})),
            "Create objects that cannot be sent in the other process: pass a function that returns the module.",
        )
        self._connect(
            ModuleClient(rpc.remote(worker, host_new_module, args=(make, device, num_callers)), self._address)
        )

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: Any, *, num_callers: int = 1) -> "RemoteModule":
        """Make a remote module of a module that already exists in another process.

        All remote modules of one module share its optimizers, and their commands run one at a time.

        Args:
            remote_device: The process that owns the module, and the device that the module is on.
            module_rref: An ``RRef`` to the module, such as :meth:`get_module_rref` returns.
            num_callers: As in the constructor. If a ``RemoteModule`` created the module, its number is kept.

        Raises:
            ValueError: If ``remote_device`` names a process that does not own the module, or another device.
            TypeError: If ``module_rref`` refers to an object that is not an ``nn.Module``.
        """
        if num_callers < 1:
            raise ValueError(f"num_callers must be at least 1, got {num_callers}")
        worker, device = _destination(remote_device)
        if module_rref.owner().name != worker.name:
            raise ValueError(
                f"remote_device {remote_device!r} names process {worker.name}, but process {module_rref.owner().name} "
                "owns the module"
            )
        remote = cls.__new__(cls)
        nn.Module.__init__(remote)
        remote._address = f"{worker.name}/{device}"
        host = rpc.remote(worker, host_existing_module, args=(module_rref, device, num_callers))
        client = ModuleClient(host, remote._address)
        client.call(ModuleCommands.check, device)
        remote._connect(client)
        return remote

    def _connect(self, client: ModuleClient) -> None:
        """Connect this object to the host of the module."""
        self._class_name, num_callers = client.call(ModuleCommands.facts)
        self._client = ModuleClient(client.host, client.address, num_callers)
        self.module_rref = rpc.remote(client.host.owner(), module_of, args=(client.host,))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module and wait for its result.

        Args:
            args: Positional arguments of the module. Nested tuples, lists and dicts may contain tensors.
            kwargs: Keyword arguments of the module, likewise.

        Returns:
            The result of the module. Its tensors are on the device of the first tensor among the arguments.

        Raises:
            Exception: The exception of the module, with the remote traceback as its cause.
            RuntimeError: If the process does not answer.
            TypeError: If an object that is not a tuple, list or dict contains a tensor with a gradient.
        """
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module without waiting. ``wait()`` of the future returns or raises what :meth:`forward` would.

        Within a context of ``torch.distributed.autograd``, the context records the call, as with torch's
        ``RemoteModule``: ``dist_autograd.backward(context_id, [loss])`` gathers the gradients in the context, for a
        ``DistributedOptimizer`` over :meth:`remote_parameters`, and nothing is added to ``.grad``.
        """
        grad = torch.is_grad_enabled()
        context = PassContext.capture(torch.device(self._address.rpartition("/")[2]).type)
        if in_distributed_autograd():
            arguments = (self._client.host, args, kwargs, grad, context)
            return rpc.rpc_async(self._client.host.owner(), call_module, args=arguments)
        leaves, spec = tree_flatten((args, kwargs))
        refuse_hidden_tensors(leaves)
        wanted = [grad and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        inputs = [leaf for leaf, flag in zip(leaves, wanted, strict=True) if flag]
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        sent = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        done: Future[Any] = Future()
        args, kwargs = tree_unflatten(sent, spec)
        reply = self._client.start(ModuleCommands.forward, args, kwargs, wanted, grad, context)
        reply.add_done_callback(partial(self._settle, done, inputs, device))
        return done

    def _settle(self, done: Future[Any], inputs: list[Tensor], device: torch.device, reply: Future[Any]) -> None:
        try:
            output, flags, number = self._client.answer(reply)
            output = tree_map_only(Tensor, lambda tensor: tensor.to(device), output)
            if number is not None:
                backward = partial(self._backward, number)
                weakref.finalize(backward, self._client.forget, number).atexit = False
                with torch.enable_grad():  # for this RPC thread
                    output = with_backward(output, flags, inputs, backward)
            done.set_result(output)
        except Exception as error:
            done.set_exception(error)

    def _backward(self, number: int, grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        given = self._client.call(
            ModuleCommands.backward, number, [None if grad is None else grad.cpu() for grad in grads]
        )
        return [None if g is None else g.to(tensor.device) for g, tensor in zip(given, inputs, strict=True)]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names of the parameters and copies of their current values on the CPU, with their gradients.

        The copies are read-only: an optimizer over them, or clipping their gradients, raises an error. Without
        ``recurse``, yields nothing, because DDP and similar code would treat the copies as local parameters.
        """
        for name, value, grad, requires_grad in self._client.call(ModuleCommands.parameters) if recurse else ():
            with torch.inference_mode():  # inference tensors cannot be changed outside of inference mode
                parameter = ParameterCopy(value.clone(), requires_grad)
                parameter.grad = None if grad is None else grad.clone()
            yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of the buffers and copies of their values on the CPU; without ``recurse``, yield nothing."""
        for name, value in self._client.call(ModuleCommands.buffers) if recurse else ():
            yield f"{prefix}.{name}" if prefix else name, value

    def train(self, mode: bool = True) -> "RemoteModule":
        """Set the mode of the module."""
        super().train(mode)
        self._client.call(ModuleCommands.train, mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "RemoteModule":
        """Freeze or unfreeze all parameters."""
        self._client.call(ModuleCommands.requires_grad_, requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients when all callers have called this."""
        self._client.call(ModuleCommands.zero_grad, set_to_none)

    def optimizer(self, cls: Callable[..., Optimizer], **options: Any) -> RemoteOptimizer:
        """Create an optimizer of all parameters in the process of the module. All callers create it together.

        Args:
            cls: Class of the optimizer.
            options: Arguments of the class, except the parameters.
        """
        advice = "Give a class or a function that can be imported, and arguments that can be pickled."
        return RemoteOptimizer(
            self._client, *self._client.call(ModuleCommands.make_optimizer, self._packed(cls, (cls, options), advice))
        )

    def apply(self, fn: Callable[[nn.Module], Any]) -> "RemoteModule":
        """Call ``fn`` with each submodule and with the module itself, in the process of the module.

        Random numbers that ``fn`` draws from torch's CPU generator and from Python's ``random`` continue the sequences
        of this process, which then continue after them. So ``model.apply(init)`` gives a model that contains a remote
        module the values that it would have in one process. A module on a GPU uses the generator of this GPU.

        Args:
            fn: The function, sent with cloudpickle. Every call takes effect, regardless of ``num_callers``.

        Raises:
            TypeError: If ``fn`` cannot be sent, such as a method of a model that contains this module.
            RuntimeError: If ``fn`` changed an object to which it refers, such as a list of this process. The change
                would be lost.
            Exception: Any exception of ``fn``.
        """
        name = getattr(fn, "__qualname__", repr(fn))
        packed = self._packed(
            fn,
            fn,
            f"apply() sends the function to the process of the module: instead of {name}, give a function (or a "
            "functools.partial of one) that does not hold this model, or initialise the module in its constructor.",
        )
        state, changed = self._client.call(ModuleCommands.apply, packed, (random.getstate(), torch.get_rng_state()))
        random.setstate(state[0])
        torch.set_rng_state(state[1])
        if changed:
            raise RuntimeError(
                f"{name} has changed an object that it refers to while it was applied to the {self._class_name} on "
                f"{self._address}; that object is a copy there, so the change is lost here. The changes to the module "
                "itself are kept. Read what you need with state_dict(), or with "
                "rpc.rpc_sync(worker, function, args=(remote_module.get_module_rref(),))."
            )
        return self

    def get_module_rref(self) -> Any:
        """Return an ``RRef`` to the module, the same as :attr:`module_rref`.

        Methods called through it (``get_module_rref().rpc_sync().eval()``) run on an RPC thread. Their backward pass
        uses ``torch.distributed.autograd``.
        """
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[Any]:
        """Return an ``RRef`` to each parameter, as ``torch.distributed.optim.DistributedOptimizer`` takes them.

        Such an optimizer takes its gradients from a context of ``torch.distributed.autograd``; see
        :meth:`forward_async`. :meth:`optimizer` needs none.

        Args:
            recurse: Whether to include the parameters of submodules.
        """
        references: list[Any] = rpc.rpc_sync(
            self._client.host.owner(), parameters_of, args=(self._client.host, recurse)
        )
        return references

    def register_parameter(self, name: str, param: nn.Parameter | None) -> NoReturn:
        """Always raise an error, as torch's ``RemoteModule`` does: the module is in another process.

        The equivalent ``remote.weight = nn.Parameter(...)`` also raises an error.

        Raises:
            ValueError: Always.
        """
        raise _not_supported("register_parameter")

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> NoReturn:
        """Always raise an error; see :meth:`register_parameter`."""
        raise _not_supported("register_buffer")

    def add_module(self, name: str, module: nn.Module | None) -> NoReturn:
        """Always raise an error; see :meth:`register_parameter`."""
        raise _not_supported("add_module")

    def register_module(self, name: str, module: nn.Module | None) -> NoReturn:
        """Always raise an error; see :meth:`register_parameter`."""
        raise _not_supported("register_module")

    def share_memory(self) -> NoReturn:
        """Always raise an error; see :meth:`register_parameter`."""
        raise _not_supported("share_memory")

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            raise _not_supported("add_module")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to call the module, in the form of torch's ``RemoteModule``."""
        fresh = vars(nn.Module())
        added = [
            name
            for name, value in vars(self).items()
            if name not in _SENT and (name not in fresh or fresh[name] != value)
        ]
        if added:
            warnings.warn(
                f"RemoteModule ({self.extra_repr()}) is sent without {', '.join(added)}: attributes and hooks that "
                "were added to it stay in this process. Set them on the other process, or send them as arguments.",
                stacklevel=2,
            )
        return {name: vars(self)[name] for name in _SENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        vars(self).update(state)

    def extra_repr(self) -> str:
        return f"{self._class_name} on {self._address}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RemoteModule":
        """Apply ``double``, ``to(dtype)`` and similar methods in the module's process. The device does not change."""
        dtypes = {fn(torch.empty(0, dtype=dtype)).dtype for dtype in (torch.float32, torch.float64)}
        if len(dtypes) == 1:
            self._client.call(ModuleCommands.to, dtypes.pop())
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        state = self._client.call(ModuleCommands.state_dict)
        destination.update({prefix + name: value for name, value in state.items()})
        metadata_of(destination).update(
            {(prefix + name).removesuffix("."): own for name, own in metadata_of(state).items()}
        )

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = with_metadata(
            {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)},
            metadata_being_loaded(prefix),
        )
        missing, unexpected, errors = self._client.call(ModuleCommands.load_state_dict, own)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in unexpected]
        error_msgs += errors

    def _packed(self, function: Callable[..., Any], thing: Any, advice: str) -> bytes:
        try:
            return cloudpickle.dumps(thing)
        except Exception as error:  # methods of the user's objects may raise any exception
            name = getattr(function, "__name__", repr(function))
            raise TypeError(
                f"{name} cannot be sent to {self._address}, as it or its arguments cannot be pickled: {error}. {advice}"
            ) from error


_SENT = ("training", "_address", "_class_name", "_client", "module_rref")
"""The attributes of a :class:`RemoteModule` that RPC sends to another process."""


def _not_supported(name: str) -> ValueError:
    return ValueError(
        f"Method ``{name}`` not supported for RemoteModule: the module is on another process. Register it in the "
        "constructor of the module, or by apply(fn), which runs there."
    )


def _refuse(parameter: nn.Parameter) -> bool:
    raise RuntimeError(
        "this is a copy of a parameter of a RemoteModule, which lives on another process; to train that, use "
        "RemoteModule.optimizer(cls, lr=...)"
    )


class ParameterCopy(nn.Parameter):
    """A read-only copy of a parameter of a :class:`RemoteModule`, which optimizers refuse."""

    is_leaf: Any = property(_refuse)  # every optimizer reads this


def _destination(address: str) -> tuple[Any, str]:
    """Return the worker and the device that an address names."""
    if not rpc_is_initialized():
        raise RuntimeError(
            "RemoteModule needs torch.distributed.rpc, which is not initialised in this process: call "
            "rpc.init_rpc(name, rank=..., world_size=...) on every process first"
        )
    try:
        place = RemoteDevice(address)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"remote_device must be '<workername>/<device>', such as 'ps/cpu', got {address!r}: {error}"
        ) from error
    workers = rpc_workers()
    for worker in workers:
        if worker.name == place.worker_name() or worker.id == place.rank():
            return worker, str(place.device())
    wanted = place.worker_name() or address
    raise ValueError(
        f"remote_device {address!r} names no process of RPC{did_you_mean(wanted, [worker.name for worker in workers])}"
    )
