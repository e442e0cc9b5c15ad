"""The only module of ``strategies`` and ``trainer`` that uses private names of torch.

This module imports or reads each private function, class or attribute once; other modules use the public names below.
``tests/unit/test_compat.py`` lists every private name with its use, and fails if a version of torch removes a name. It
also fails if another module uses a private name. Three attributes are allowed everywhere, because much of PyTorch's
ecosystem relies on them: ``Module._parameters``, ``Module._buffers`` and ``Module._modules``.

``import torch`` has already loaded everything that this module imports, so a worker starts no more slowly.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from inspect import currentframe
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, rpc
from torch.distributed.distributed_c10d import _get_default_group as default_group
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _world
from torch.distributed.remote_device import _remote_device as RemoteDevice
from torch.distributed.utils import _verify_param_shape_across_processes as verify_shapes_across_ranks
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_KEY_SUFFIX
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    SequenceKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_map_with_path,
    tree_unflatten,
)
from torch.utils.data._utils.worker import _generate_state as numpy_seed_of_worker

__all__ = [
    "EXTRA_STATE_KEY_SUFFIX",
    "BatchNorm",
    "NormBase",
    "RemoteDevice",
    "SequenceKey",
    "TorchDispatchMode",
    "TreeSpec",
    "default_group",
    "default_store",
    "has_global_hooks",
    "keystr",
    "numpy_seed_of_worker",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_map_with_path",
    "tree_unflatten",
    "verify_shapes_across_ranks",
]


# Tensors and operators


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Returns how many times a tensor has been changed in place. Views share the count."""


def num_changes(tensor: Tensor) -> int:
    """Return how often a tensor has been changed in place; 0 for inference and lazy tensors, which have no count."""
    return 0 if is_lazy(tensor) or tensor.is_inference() else version_of(tensor)


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for two tensors if and only if they share a storage."""
    return number_of_storage(tensor.untyped_storage())


def number_of_storage(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage as long as the storage exists."""
    return storage._cdata


def as_subclass(tensor: Tensor, kind: type[Tensor]) -> Tensor:
    """Return a tensor as a subclass that shares its values; detached if it is sparse, which ``as_subclass`` refuses."""
    if tensor.layout is torch.strided:
        return cast(Tensor, tensor.as_subclass(kind))
    return Tensor._make_subclass(kind, tensor)


def indices_of_sparse(tensor: Tensor) -> Tensor:
    """Return the indices of a sparse COO tensor, which need not be coalesced."""
    return tensor._indices()


def values_of_sparse(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor, which need not be coalesced."""
    return tensor._values()


def fake_tensors() -> Any:
    """Return a context in which new tensors, such as those that ``torch.load`` returns, have no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # 0.3 s of imports, which no worker needs

    return FakeTensorMode()


def offset_in_file(tensor: Tensor) -> int | None:
    """Return the offset in bytes of the storage of a tensor that was loaded within :func:`fake_tensors`."""
    return tensor.untyped_storage()._checkpoint_offset


STORAGES = torch.storage.TypedStorage, torch.UntypedStorage
"""The classes of the objects that represent a storage in a pickle."""


def storage_of(
    pickled: torch.storage.TypedStorage | torch.UntypedStorage,
) -> tuple[torch.UntypedStorage, torch.dtype]:
    """Return the storage of an object that represents it in a pickle, and its dtype, ``uint8`` if it has none.

    torch pickles tensors of the dtypes that it has had since 2.1, such as ``uint16`` and ``float8_e4m3fn``, with an
    ``UntypedStorage``.
    """
    if isinstance(pickled, torch.UntypedStorage):
        return pickled, torch.uint8
    return pickled._untyped_storage, pickled.dtype


def storage_for_pickle(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """Return the object that represents a storage when a tensor of any dtype is unpickled.

    It is a ``TypedStorage`` even if the tensor was pickled with an ``UntypedStorage``, as in ``torch.load``: torch
    makes no tensor of an ``UntypedStorage``.
    """
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def reduced_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Return the reduced form of a storage for a ``dispatch_table``; torch's own form cannot be unpickled."""
    return _itself, (storage_for_pickle(*storage_of(storage)),)


def _itself(pickled: Any) -> Any:
    return pickled


without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context manager in which ``__torch_function__`` of tensor subclasses is not called."""


def wrapper_of(kind: type[Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of a subclass, without storage."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def norms_of(tensors: list[Tensor], norm_type: float) -> tuple[Tensor, ...]:
    """Return the norm of each tensor. Uses one fused operation, as ``torch.nn.utils.clip_grad_norm_`` does."""
    return torch._foreach_norm(tensors, norm_type)


def operator_name(operator: Any) -> tuple[str, str, str]:
    """Return namespace, name and overload of an operator, so that another process can look it up."""
    return operator.namespace, operator._schema.name.rpartition("::")[2], operator._overloadname


def named_operator(namespace: str, name: str, overload: str) -> Any:
    """Return the operator with this name; the inverse of :func:`operator_name`."""
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


_UNDECLARED, _STATISTICS = ("native_batch_norm", "batch_norm"), ("running_mean", "running_var")
"""Operators that change arguments without declaring it, and these arguments."""


def changed_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operator that it changes in place."""
    declared = operator._schema.arguments
    given = [*zip(declared, args, strict=False), *((d, kwargs[d.name]) for d in declared if d.name in kwargs)]
    hidden = _STATISTICS if operator_name(operator)[1] in _UNDECLARED else ()
    changed = [v for d, v in given if d.name in hidden or (d.alias_info is not None and d.alias_info.is_write)]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


gradient_hooks: Callable[[Tensor], tuple[Any, Any]]
gradient_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Returns a tensor's ``register_hook`` and ``register_post_accumulate_grad_hook`` hooks; ``None`` if it has none."""


# Modules


forward_hooks: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]]
forward_hooks = attrgetter("_forward_pre_hooks", "_forward_hooks")
"""Returns a module's forward pre-hooks and forward hooks, by handle id; deleting an entry removes the hook."""


backward_hooks: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]]
backward_hooks = attrgetter("_backward_pre_hooks", "_backward_hooks")
"""Returns a module's backward pre-hooks and backward hooks, by handle id."""


def give_parameters(replica: nn.Module) -> None:
    """Make ``parameters()`` of a copy of ``DataParallel`` return its weights, which torch keeps as plain attributes."""
    for module in replica.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module._parameters.update(vars(module)["_former_parameters"])


def state_dict_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a module's ``state_dict`` hooks and ``load_state_dict`` pre-hooks, by handle id."""
    return module._state_dict_hooks, module._load_state_dict_pre_hooks


def set_state_dict_hooks(module: nn.Module, hooks: Any, pre_hooks: Any) -> None:
    """Replace what :func:`state_dict_hooks` returns."""
    module._state_dict_hooks, module._load_state_dict_pre_hooks = hooks, pre_hooks


# Optimizers


def changed_before_loading(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the ``load_state_dict`` pre-hooks of an optimizer make of a state dict."""
    result = dict(state)
    for hook in [*optimizer._optimizer_load_state_dict_pre_hooks.values()]:
        changed = hook(optimizer, result)
        result = result if changed is None else changed
    return result


@contextmanager
def without_load_pre_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which an optimizer has no ``load_state_dict`` pre-hooks."""
    before = optimizer._optimizer_load_state_dict_pre_hooks
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = before


_METADATA = "_metadata"


def metadata_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a state dict says about each module, such as its version, by the name of the module."""
    metadata: dict[str, Any] = getattr(state, _METADATA, {})
    return metadata


def with_metadata(entries: Mapping[str, Any], metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict of the entries for which :func:`metadata_of` returns ``metadata``."""
    state = OrderedDict(entries)
    setattr(state, _METADATA, OrderedDict(metadata))
    return state


def metadata_being_loaded(prefix: str) -> dict[str, Any]:
    """Return the metadata of the state dict that the innermost ``load_state_dict`` on this thread loads into a module.

    A load pre-hook and ``_load_from_state_dict`` of a module do not get the metadata of its children: only a frame on
    the stack has them. The key ``assign_to_params_buffers`` is left out, because it says how this process loads the
    state dict, or has loaded it before.

    Args:
        prefix: The start of the names of the module's entries, as the pre-hook gets it.

    Returns:
        The metadata of the module, whose name is "", and of its children.
    """
    frame = currentframe()
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == (nn.modules.module.__file__, "load_state_dict"):
            return {
                f"{name}."[len(prefix) :].removesuffix("."): {
                    key: value for key, value in own.items() if key != "assign_to_params_buffers"
                }
                for name, own in metadata_of(frame.f_locals["state_dict"]).items()
                if f"{name}.".startswith(prefix)
            }
        frame = frame.f_back
    return {}


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's direct buffers that are not part of its ``state_dict``."""
    return module._non_persistent_buffers_set


compiled_call: Callable[[nn.Module], Any]
compiled_call = attrgetter("_compiled_call_impl")
"""Returns the compiled call that ``module.compile()`` stored; ``None`` if it was not called."""


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ``torch.compile`` does not trace; without ``torch.compile``, the function itself."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function


CALL_ATTRIBUTE = "_compiled_call_impl"
"""Attribute of a module. If set, it is called instead of the module and its hooks. Copies of the module lose it."""


def call_of_module(module: nn.Module) -> Callable[..., Any]:
    """Return the function that a call of ``module`` runs: its hooks and ``forward``, compiled or not."""
    return module._compiled_call_impl or module._call_impl


def convert_tensors(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Apply a function to all tensors of a module, as ``nn.Module.to`` does."""
    return nn.Module._apply(module, function, recurse)


def replacing_conversion(convert: Callable[..., nn.Module]) -> dict[str, Callable[..., nn.Module]]:
    """Return the instance attribute that makes ``to``, ``float``, ``cuda`` etc. of a module call ``convert``."""
    return {"_apply": convert}


def undo_fully_shard(module: nn.Module, cls: type[nn.Module]) -> None:
    """Restore a module's class, and remove what ``fully_shard`` added to the module, except for parameters.

    torch has no function for this. The remaining hooks would gather parameters that are already whole.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping as states

    module.__class__ = cls
    own = vars(module)
    for name in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        own.pop(name, None)
    cast(Any, states).pop(module, None)
    tables = [table for name, table in own.items() if name.endswith("_hooks") and isinstance(table, dict)]
    added = [
        key
        for table in tables
        for key, hook in table.items()
        if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
    ]
    for table in (table for table in own.values() if isinstance(table, dict)):
        for key in added:
            table.pop(key, None)


# Autograd


is_computed_in_this_pass: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Returns whether the current backward pass will compute a node of the graph."""


def number_of_backward_pass() -> int:
    """Return a number that identifies the current backward pass."""
    return torch._C._current_graph_task_id()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass."""
    cast(Any, Variable)._execution_engine.queue_callback(callback)


def in_distributed_autograd() -> bool:
    """Return whether this thread is within a context of ``torch.distributed.autograd``."""
    try:
        dist_autograd._current_context()
    except RuntimeError:
        return False
    return True


profiler_is_on: Callable[[], bool] = torch.autograd._profiler_enabled
"""Returns whether torch's profiler is active."""


def set_profiler_events(enabled: bool) -> None:
    """Enable or disable profiler events for this thread and for callbacks that inherit its state."""
    torch.autograd._enable_record_function(enabled)


# Modes of a thread, such as torch.device and saved_tensors_hooks. The last entry of a stack is the innermost mode.

num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack

num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
pop_dispatch_mode: Callable[[], Any] = partial(torch._C._pop_torch_dispatch_stack, None)
push_dispatch_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack

is_functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transformation of ``torch.func``, such as ``vmap``, is running."""

top_saved_tensors_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
"""Returns the innermost pair of ``saved_tensors_hooks``; ``None`` if there is none."""

gather_base: Callable[[ProcessGroup, Tensor, Tensor], dist.Work] = ProcessGroup._allgather_base
"""Gathers tensors of one size, one after the other, in the first tensor.

``all_gather_into_tensor`` needs a default process group.
"""

pop_saved_tensors_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensors_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks


# Gradient scaler

UnscaleGrads = Callable[[Optimizer, Tensor, Tensor, bool], dict[torch.device, Tensor]]
"""Divides gradients. Arguments: optimizer, inverse scale, initial ``found_inf``, whether to allow float16 gradients."""


def unscale_grads(scaler: torch.amp.GradScaler) -> UnscaleGrads:
    """Return the method of a scaler's class that both ``unscale_`` and ``step`` call to divide gradients.

    For each device, it returns a scalar that is not zero if a gradient is infinite or NaN.
    """
    return cast(Any, type(scaler))._unscale_grads_.__get__(scaler)


def replacing_unscale_grads(function: UnscaleGrads) -> dict[str, Any]:
    """Return the instance attribute that makes a scaler call ``function`` to divide gradients."""
    return {"_unscale_grads_": function}


# Process groups


def forget_group_names() -> None:
    """Restart the numbering of process groups, as in a new process. Call this only without a default group."""
    _world.group_count = 0


def has_excepthook_of_groups(hook: Any) -> bool:
    """Return whether ``init_process_group`` has installed an ``sys.excepthook``."""
    return hook.__module__ == _world.__module__


def cpu_backend(group: ProcessGroup) -> Any:
    """Return the backend for CPU tensors. Its ``send`` and ``recv`` each save a call of torch's dispatcher."""
    return group._get_backend(torch.device("cpu"))


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the time-out with which a group's gloo backend connected. It also applies to sends and receives."""
    timeout: timedelta = cpu_backend(group).options._timeout
    return timeout


def gloo_options(device: Any, timeout: timedelta) -> Any:
    """Return options for :func:`add_gloo_backend`: the network device to use, and the time-out for connecting."""
    options = cast(Any, dist.ProcessGroupGloo)._Options()
    options._devices, options._timeout = [device], timeout
    return options


def nccl_backend(store: dist.Store, rank: int, size: int) -> Any:
    """Return a separate, unregistered NCCL communicator, before ``eager_connect_single_device``.

    Its time-out is practically infinite: at a time-out, torch's watchdog ends the process (by default,
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` is 3), even if a debugger has stopped another process. Relay itself detects
    processes that hang, and ends waits for transfers when a process has failed.
    """
    nccl = cast(Any, dist).ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(days=20)  # c10d counts milliseconds in 31 bits
    return nccl(store, rank, size, options)


def group_without_backend(store: dist.Store, rank: int, size: int) -> ProcessGroup:
    """Return an unregistered process group without connections."""
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def add_gloo_backend(group: ProcessGroup, backend: Any, timeout: timedelta) -> None:
    """Add a connected gloo backend to a group; ``timeout`` applies to the group's collectives."""
    backend._set_default_timeout(timeout)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)


def broadcast_coalesced(group: ProcessGroup, tensors: list[Tensor], buffer_bytes: int, source: int) -> None:
    """Broadcast tensors from one rank of a group, with several tensors per message."""
    cast(Any, dist)._broadcast_coalesced(group, tensors, buffer_bytes, source)


# RPC


def rpc_is_initialized() -> bool:
    """Return whether this process is part of an RPC session."""
    return rpc.api._is_current_rpc_agent_set()


def rpc_workers() -> list[Any]:
    """Return the name and id of every process of the current RPC session."""
    return rpc.api._get_current_rpc_agent().get_worker_infos()


def num_rpc_sessions_begun() -> int:
    """Return how many sessions ``init_rpc`` has started in this process."""
    return rpc._init_counter


def rpc_options(*, num_threads: int, timeout_seconds: float | None = None) -> Any:
    """Return options of an RPC agent that uses only plain TCP.

    torch's default transport on one machine, ``shm``, polls without pause and so takes one core per process. torch's
    other channels open dozens of listening sockets for tensors, which Relay does not send by RPC.
    """
    given: Mapping[str, float] = {} if timeout_seconds is None else {"rpc_timeout": timeout_seconds}
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=num_threads, _transports=["uv"], _channels=["basic"], **cast(Any, given)
    )


def set_autograd_number(number: int) -> None:
    """Set the number of this process in distributed autograd. torch accepts this once per process."""
    dist_autograd._init(number)


def set_rpc_agent(agent: Any) -> None:
    """Make ``agent`` the RPC agent of this process: the part of ``init_rpc`` after the creation of the agent."""
    rpc.api._init_rpc_states(agent)


def start_rpc_alone(name: str, options: Any) -> None:
    """Start an RPC session of one process that does not count as a session of ``init_rpc``."""
    backend = rpc.backend_registry.BackendType["TENSORPIPE"]
    rpc._init_rpc_backend(backend, dist.HashStore(), name, 0, 1, options)


# Data loading


def index_sampler(loader: Any) -> Iterable[Any]:
    """Return the batch sampler of a ``DataLoader``, or its sampler if it does not batch."""
    return loader._index_sampler


def makes_own_iterator(kind: type, base: type) -> bool:
    """Return whether a subclass of ``DataLoader`` overrides the creation of iterators."""
    return cast(Any, kind)._get_iterator is not cast(Any, base)._get_iterator


@contextmanager
def using_iterator(loader: Any, iterator: Any) -> Iterator[None]:
    """Context in which a ``DataLoader`` with persistent workers reuses an iterator and its workers.

    Args:
        loader: The ``DataLoader``, which has its own iterator back afterwards.
        iterator: The iterator, or ``None`` to start new workers.
    """
    own, loader._iterator = loader._iterator, iterator
    try:
        yield
    finally:
        loader._iterator = own


def has_given_length(sampler: Any) -> bool:
    """Return whether a ``RandomSampler`` was given ``num_samples``."""
    return sampler._num_samples is not None
