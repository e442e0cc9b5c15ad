"""``RemoteModule``: a module on another process that is used, trained and saved as if it were here.

``torch.distributed.nn.RemoteModule`` places a module elsewhere and calls it. Its backward pass trains nothing outside
of a distributed autograd context, and inside of one ``loss.backward()`` fails; it refuses ``parameters``,
``state_dict`` and ``zero_grad``, a model around it can have none of them either, and the errors of its module lose
their type.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed import _remote_device, rpc
from torch.futures import Future
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from strategies.names import did_you_mean
from strategies.pipeline.node import with_backward
from strategies.pipeline.remote import rebuilt
from strategies.pipeline.worker import Failure
from strategies.remote_host import Host, ask, refuse_hidden_tensors
from strategies.remote_optimizer import RemoteOptimizer


class RemoteModule(nn.Module):
    """A module that lives on another process of ``torch.distributed.rpc``.

    ``loss.backward()`` goes through it and adds to ``.grad`` of its parameters there; :meth:`optimizer` steps them.
    ``state_dict`` and ``load_state_dict``, ``train`` and ``eval``, ``double`` and the like reach it, also those of a
    model around it. Its parameters are not among that model's, so ``DistributedDataParallel`` and local optimizers
    leave them alone.

    It can be sent to other processes by RPC, and they call the same module. If several train it, each on its share of a
    batch, tell by ``num_callers``: gradients are then means over the callers, as DDP makes them, and ``zero_grad`` and
    ``step`` happen once, when all callers have asked for them.

    Args:
        remote_device: ``"<workername>/<device>"`` or ``"rank:<rank>/<device>"``, such as ``"ps/cuda:0"``; without
            a device it is the CPU.
        module_cls: A class, or a function that returns a module. It is pickled by value if it is defined in a script.
        args: Its arguments.
        kwargs: Its keywords.
        num_callers: How many processes train it together.

    Raises:
        RuntimeError: If RPC is not initialised in this process.
        ValueError: For an address that RPC does not know, or no callers.
        TypeError: If the class or its arguments cannot be pickled, or make no module.
        Exception: What the class itself raises, with the traceback there as its cause.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_callers: int = 1,
    ) -> None:
        super().__init__()
        if num_callers < 1:
            raise ValueError(f"num_callers must be at least 1, got {num_callers}")
        worker, device = _destination(remote_device)
        self._address, self._num_callers = f"{worker.name}/{device}", num_callers
        packed = self._packed((module_cls, tuple(args), dict(kwargs or {})))
        self._forgotten: deque[int] = deque()  # the garbage collector may append from any thread
        self._host = rpc.remote(worker, Host, args=(packed, device, num_callers))
        self._class_name = self._call("build")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module and waits for what it returns.

        Args:
            args: As the module takes them; nestings of tuples, lists and dicts may hold tensors.
            kwargs: Likewise.

        Returns:
            What the module returned; its tensors are on the device of the first tensor among the arguments.

        Raises:
            Exception: What the module raised, with the traceback there as its cause.
            RuntimeError: If the process does not answer.
            TypeError: If a tensor with a gradient is in an object of another kind, there or here.
        """
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls the module and does not wait; ``wait()`` of the future returns or raises what :meth:`forward` would."""
        leaves, spec = tree_flatten((args, kwargs))
        refuse_hidden_tensors(leaves)
        grad = torch.is_grad_enabled()
        wanted = [grad and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        inputs = [leaf for leaf, flag in zip(leaves, wanted, strict=True) if flag]
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        sent = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        done: Future[Any] = Future()
        reply = self._start("forward", *tree_unflatten(sent, spec), wanted, grad)
        reply.add_done_callback(partial(self._settle, done, inputs, device))
        return done

    def _settle(self, done: Future[Any], inputs: list[Tensor], device: torch.device, reply: Future[Any]) -> None:
        try:
            output, flags, number = self._answer(reply)
            leaves, spec = tree_flatten(output)
            places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            tensors: Sequence[Tensor] = [leaves[place].to(device) for place in places]
            if number is not None:
                backward = partial(self._backward, number)
                weakref.finalize(backward, self._forgotten.append, number).atexit = False
                with torch.enable_grad():  # of this thread, which is RPC's
                    tensors = with_backward(tensors, flags, inputs, backward)
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor
            done.set_result(tree_unflatten(leaves, spec))
        except Exception as error:
            done.set_exception(error)

    def _backward(self, number: int, grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        given = self._call("backward", number, [None if grad is None else grad.cpu() for grad in grads])
        return [None if g is None else g.to(tensor.device) for g, tensor in zip(given, inputs, strict=True)]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names of the parameters, and copies of what they are now, on the CPU, with their gradients.

        The copies are for reading: an optimizer over them, or clipping their gradients, raises an error. Without
        ``recurse`` there are none: DDP and the like ask each module for its own, and would take them for local ones.
        """
        for name, value, grad, requires_grad in self._call("parameters") if recurse else ():
            with torch.inference_mode():  # tensors made here cannot be changed outside
                parameter = RemoteParameter(value.clone(), requires_grad)
                parameter.grad = None if grad is None else grad.clone()
            yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Names of the buffers, and copies of what they are now, on the CPU; without ``recurse`` none."""
        for name, value in self._call("buffers") if recurse else ():
            yield f"{prefix}.{name}" if prefix else name, value

    def train(self, mode: bool = True) -> "RemoteModule":
        """Sets the mode, there as well."""
        super().train(mode)
        self._call("train", mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "RemoteModule":
        """Freezes or thaws all parameters."""
        self._call("requires_grad_", requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, when all callers have asked for it."""
        self._call("zero_grad", set_to_none)

    def optimizer(self, cls: Callable[..., Optimizer], **options: Any) -> RemoteOptimizer:
        """Makes an optimizer of the parameters, there; all callers make it together.

        Args:
            cls: Its class.
            options: Its arguments, but for the parameters.
        """
        return RemoteOptimizer(self._call, *self._call("make_optimizer", self._packed((cls, options))))

    def get_module_rref(self) -> Any:
        """The ``RRef`` by which the module is reached."""
        return self._host

    def extra_repr(self) -> str:
        return f"{self._class_name} on {self._address}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RemoteModule":
        """Has ``double``, ``to(dtype)`` and the like done there; the device is that of the address."""
        dtypes = {fn(torch.empty(0, dtype=dtype)).dtype for dtype in (torch.float32, torch.float64)}
        if len(dtypes) == 1:
            self._call("to", dtypes.pop())
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: value for name, value in self._call("state_dict").items()})

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
        own = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        missing, unexpected, errors = self._call("load_state_dict", own)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in unexpected]
        error_msgs += errors

    def _packed(self, thing: tuple[Any, ...]) -> bytes:
        try:
            return cloudpickle.dumps(thing)
        except Exception as error:  # whatever the user's objects raise
            name = getattr(thing[0], "__name__", repr(thing[0]))
            raise TypeError(
                f"{name} cannot be sent to {self._address}, as it or its arguments cannot be pickled: {error}. Make "
                "there what cannot travel: give a function that returns the module."
            ) from error

    def _start(self, command: str, *arguments: Any) -> Future[Any]:
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        return rpc.rpc_async(self._host.owner(), ask, args=(self._host, forgotten, command, *arguments))

    def _answer(self, reply: Future[Any]) -> Any:
        try:
            value = reply.wait()
        except RuntimeError as error:  # of RPC; those of the module are in the answer
            others = f" (optimizer, zero_grad and step wait for all {self._num_callers} callers)"
            raise RuntimeError(
                f"the remote module on {self._address} did not answer: {error}{others if self._num_callers > 1 else ''}"
            ) from error
        if isinstance(value, Failure):
            raise rebuilt(value)
        return value

    def _call(self, command: str, *arguments: Any) -> Any:
        return self._answer(self._start(command, *arguments))


def _refuse(parameter: nn.Parameter) -> bool:
    raise RuntimeError(
        "this is a copy of a parameter of a RemoteModule, which lives on another process; to train that, use "
        "RemoteModule.optimizer(cls, lr=...)"
    )


class RemoteParameter(nn.Parameter):
    """A copy, for reading, of a parameter of a :class:`RemoteModule`; no optimizer takes it."""

    is_leaf: Any = property(_refuse)  # which every optimizer asks for


def _destination(address: str) -> tuple[Any, str]:
    """The process and the device that an address names."""
    if not rpc.api._is_current_rpc_agent_set():
        raise RuntimeError(
            "RemoteModule needs torch.distributed.rpc, which is not initialised in this process: call "
            "rpc.init_rpc(name, rank=..., world_size=...) on every process first"
        )
    try:
        place = _remote_device(address)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"remote_device must be '<workername>/<device>', such as 'ps/cpu', got {address!r}: {error}"
        ) from error
    workers = rpc._get_current_rpc_agent().get_worker_infos()
    for worker in workers:
        if worker.name == place.worker_name() or worker.id == place.rank():
            return worker, str(place.device())
    wanted = place.worker_name() or address
    raise ValueError(
        f"remote_device {address!r} names no process of RPC{did_you_mean(wanted, [worker.name for worker in workers])}"
    )
