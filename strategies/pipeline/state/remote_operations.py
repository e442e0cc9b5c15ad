"""Operations on tensors whose values are on a worker: the driver sends them, and the stage runs them.

    driver    with OnStages():
                  average.lerp_(weight, 0.1)      on stand-ins without values: shapes, types and errors
    worker        aten.lerp_.Scalar(#7, #3, 0.1)  before the next command of the stage

The driver does not wait. An operation is identified by the ATen operator that runs, a tensor by its storage on the
``meta`` device, so views and detached tensors refer to the value whose storage they share.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strategies.common.torch_compat import (
    TorchDispatchMode,
    changed_arguments,
    named_operator,
    operator_name,
    storage_key,
    tree_map_only,
    without_torch_function,
)
from strategies.common.trees import tensors_in
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.operations import GradientOf, Name, OperandKey, Strides, TensorOperation, WorkerTensor
from strategies.pipeline.state.remote_tensor import RemoteBuffer, RemoteParameter

_REMOTE = RemoteParameter | RemoteBuffer


class RemoteValue:
    """Refers to a value on a worker. The worker frees a computed value when the driver has no reference to it."""

    def __init__(self, holder: "Holder", key: OperandKey, stand_in: Tensor) -> None:
        self.holder, self.key, self.layout = holder, key, Strides.of(stand_in)

    def __del__(self) -> None:
        if isinstance(self.key, int):
            self.holder.stage.send(StageCommands.free, self.key)

    def reference(self, tensor: Tensor) -> WorkerTensor:
        """Return the reference to ``tensor`` in an operation. The tensor shares the storage of this value."""
        layout = Strides.of(tensor)
        return WorkerTensor(self.key, self.layout, None if layout == self.layout else layout)


class Holder:
    """Sends operations to the stage that holds some values.

    Args:
        stage: The stage.
    """

    def __init__(self, stage: RemoteStage) -> None:
        self.stage, self.description = stage, stage.description
        self.num_writes = 0
        """The number of operations that have changed values in place."""
        self._has_ended = False

    def take(self, module: int, layers: nn.Module) -> None:
        """Connect the stand-ins in ``layers`` to their values, in module number ``module`` of the stage."""
        for name, tensor in (*layers.named_parameters(), *layers.named_buffers()):
            if isinstance(tensor, _REMOTE) and tensor.relay_value is None:  # the first stage owns a tied one
                tensor.relay_value = RemoteValue(self, (module, name), tensor)

    def computed(self, stand_in: Tensor) -> RemoteValue:
        """Return a reference to the result of an operation, which ``stand_in`` represents on the driver."""
        return RemoteValue(self, self.stage.new_number(), stand_in)

    def end(self) -> None:
        """Refuse all further operations, because the stage has ended."""
        self._has_ended = True

    def run(self, operation: TensorOperation, writes: bool) -> None:
        """Run an operation before the next command of the stage."""
        self._check()
        self.num_writes += writes
        self.stage.send(StageCommands.compute, operation, torch.get_default_dtype())

    def fetch(self, reference: WorkerTensor) -> Tensor:
        """Return a tensor of the stage, on the CPU."""
        self._check()
        value = self.stage.readable().ask(StageCommands.value, reference).wait()
        assert value is not None
        return value

    def _check(self) -> None:
        if self._has_ended:
            raise RuntimeError(
                f"{self.description} has ended, so the values that were computed there are lost; to keep values after "
                "the run, copy the model's state_dict()"
            )


class OnStages(TorchFunctionMode):
    """Mode in which stages run operations on stand-ins for their tensors, and keep the results.

    Lists of tensors, as in ``torch._foreach_lerp_``, are divided among the stages. Operations that need values in this
    process, such as ``item()``, fetch them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        remotes = [t for t in tensors_in(given) if isinstance(t, _REMOTE) and t.relay_value is not None]
        if not remotes:
            if func is Tensor.to and any(isinstance(v, torch.device) and v.type == "meta" for v in given[1:]):
                return args[0]  # it will be combined with a stand-in, and is sent as a value then
            return func(*args, **kwargs)
        if _is_left_alone(func):
            return func(*args, **kwargs)
        values = {storage_key(t): t.relay_value for t in remotes if t.relay_value is not None}
        operations = RemoteOperations(values, loads=func is Tensor.copy_)
        with without_torch_function():
            if func.__name__ == "__get__" and not isinstance(found := func(*args, **kwargs), Tensor):
                return found  # such as a shape
            try:
                with operations:
                    result = func(*args, **kwargs)
            except RuntimeError as error:
                if isinstance(error, NotCarriedError) or operations.writes or "meta" not in str(error).lower():
                    raise
                return func(  # with values, such as item()
                    *tree_map_only(Tensor, operations.fetched, tuple(args)),
                    **tree_map_only(Tensor, operations.fetched, dict(kwargs)),
                )
            operations.commit()

            def marked(tensor: Tensor) -> Tensor:
                value = values.get(storage_key(tensor)) if tensor.is_meta else None
                if value is None or isinstance(tensor, _REMOTE):
                    return tensor
                made = tensor.as_subclass(RemoteBuffer)
                made.relay_name, made.relay_value = f"what was computed from {remotes[0].relay_name}", value
                # For reads while this mode is not active.
                made.relay_view = partial(_fetch, value.holder, value.reference(tensor))
                return made

            return tree_map_only(Tensor, marked, result)


class NotCarriedError(RuntimeError):
    """Raised for an operation that no stage can run."""


class RemoteOperations(TorchDispatchMode):
    """Collects operations on stand-ins while this mode is active. :meth:`commit` sends them to their stages.

    Args:
        values: The known values of stand-ins by storage. The values of results are added.
        loads: Whether a tensor without values may be copied, as ``load_state_dict`` does after it has sent the values.
    """

    def __init__(self, values: dict[int, RemoteValue], *, loads: bool) -> None:
        super().__init__()
        self._values, self._loads = values, loads
        self.writes = False
        """Whether an operation changes a tensor in place."""
        self._uncommitted: list[tuple[Holder, TensorOperation, bool]] = []
        self._kept: list[Tensor] = []  # so that no new storage gets the same address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        written = changed_arguments(func, args, kwargs)
        known = [t for t in tensors_in((args, kwargs)) if self._value(t) is not None]
        self.writes |= any(t.is_meta for t in written)
        if known and any(not t.is_meta for t in written):
            raise RuntimeError(f"{func} needs the values of meta tensors")
        result = func(*args, **kwargs)
        created = [t for t in tensors_in(result) if t.is_meta and self._value(t) is None]
        loaded = self._loads and len(args) > 1 and args[1].is_meta and self._value(args[1]) is None
        if known and (written or created) and not loaded:
            self._assign(func, args, kwargs, result, bool(written))
        return result

    def fetched(self, tensor: Tensor) -> Tensor:
        """Return the values of ``tensor`` if it is a stand-in, or ``tensor`` itself."""
        value = self._value(tensor)
        return tensor if value is None else value.holder.fetch(value.reference(tensor)).to(tensor.dtype)

    def commit(self) -> None:
        """Send the operations."""
        for holder, operation, writes in self._uncommitted:
            holder.run(operation, writes)

    def _value(self, tensor: Tensor) -> RemoteValue | None:
        return self._values.get(storage_key(tensor)) if tensor.is_meta else None

    def _places(self, tensors: Sequence[Tensor]) -> str:
        values = [value for t in tensors if (value := self._value(t)) is not None]
        return " and ".join(dict.fromkeys(value.holder.description for value in values))

    def _assign(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, writes: bool) -> None:
        """Add an operation, or its parts, to the operations of the stages that hold its values."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotCarriedError(f"{func} draws random numbers, which would differ on another stage")
        tensors = tensors_in((args, kwargs))
        lost = [t for t in tensors if t.is_meta and self._value(t) is None]
        if lost:
            raise NotCarriedError(f"{func} takes a tensor without values")
        namespace, name, _ = operator_name(func)
        divisible = namespace == "aten" and name.startswith("_foreach_") and all(isinstance(t, Tensor) for t in args[0])
        lengths = {len(args[0])} if divisible else set()
        holders = {value.holder: None for t in tensors if (value := self._value(t)) is not None}
        if not divisible and len(holders) > 1:
            raise NotCarriedError(f"{func} combines values of {self._places(tensors)}")
        if not divisible:
            self._add(next(iter(holders)), func, args, kwargs, _listed(result), writes)
            return
        results = list(result) if isinstance(result, list | tuple) else []
        owners = [self._value(t) for t in args[0]]
        for holder in holders:
            places = [place for place, value in enumerate(owners) if value is not None and value.holder is holder]

            def part(argument: Any, places: list[int] = places) -> Any:
                is_list = isinstance(argument, list | tuple) and len(argument) in lengths
                return [argument[place] for place in places] if is_list else argument

            own = part(args[0]), *map(part, args[1:])
            if any((v := self._value(t)) is not None and v.holder is not holder for t in tensors_in(own)):
                raise NotCarriedError(f"{func} combines values of {self._places(tensors)}")
            chosen = {name: part(value) for name, value in kwargs.items()}
            self._add(holder, func, own, chosen, part(results), writes)

    def _add(
        self,
        holder: Holder,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Any],
        writes: bool,
    ) -> None:
        named_args, named_kwargs = tree_map_only(Tensor, self._reference, (tuple(args), dict(kwargs)))
        numbers: list[int | None] = []
        for result in results:
            number = None
            if isinstance(result, Tensor) and result.is_meta and self._value(result) is None:
                value = self._values[storage_key(result)] = holder.computed(result)
                self._kept.append(result)
                assert isinstance(value.key, int)
                number = value.key
            numbers.append(number)
        name = operator_name(func)
        self._uncommitted.append((holder, TensorOperation(name, named_args, named_kwargs, tuple(numbers)), writes))

    def _reference(self, tensor: Tensor) -> WorkerTensor | Tensor:
        value = self._value(tensor)
        if value is not None:
            return value.reference(tensor)
        return tensor.detach().to("cpu", copy=True)  # the tensor may change before it is sent


class HeldValues:
    """Parameters, buffers and computed values of a stage, on the worker.

    Args:
        modules: The modules of the stage, by number.
        computed: Results of operations that the driver refers to, by number.
    """

    def __init__(self, modules: Sequence[nn.Module], computed: dict[int, Tensor]) -> None:
        self._modules, self.computed = modules, computed

    @torch.no_grad()
    def compute(self, operation: TensorOperation) -> None:
        """Run an operation and keep its new values."""
        namespace, name, overload = operation.name
        func = named_operator(namespace, name, overload)
        args, kwargs = tree_map_only(WorkerTensor, self.tensor, (operation.args, operation.kwargs))
        written, tensors = changed_arguments(func, args, kwargs), tensors_in((args, kwargs))
        if len({tensor.device for tensor in tensors}) > 1:
            device = next((t.device for t in (*written, *tensors) if t.dim()), torch.device("cpu"))

            def here(tensor: Tensor) -> Tensor:
                return tensor if any(tensor is one for one in written) or not tensor.dim() else tensor.to(device)

            args, kwargs = tree_map_only(Tensor, here, (args, kwargs))
        kwargs = {name: value for name, value in kwargs.items() if value != torch.device("meta")}
        for number, result in zip(operation.results, _listed(func(*args, **kwargs)), strict=False):
            if number is not None:
                self.computed[number] = result

    def value(self, reference: Name | GradientOf | WorkerTensor) -> Tensor | None:
        """Return the tensor that a reference names, on the CPU; see :meth:`StageCommands.value`."""
        if isinstance(reference, WorkerTensor):
            return self.tensor(reference).cpu()
        if isinstance(reference, GradientOf):
            module, name = reference.parameter
            grad = self._modules[module].get_parameter(name).grad
            return None if grad is None else grad.cpu()
        found = self._named(reference)
        is_in_graph = found is not None and found.requires_grad and not isinstance(found, nn.Parameter)
        return None if found is None else found.detach().cpu().requires_grad_(is_in_graph)

    def tensor(self, reference: WorkerTensor) -> Tensor:
        """Return the tensor of an operation, detached."""
        key = reference.key
        value = self.computed[key] if isinstance(key, int) else self._named(key)
        assert value is not None
        value = value.detach()
        view, base = reference.view, reference.base
        if value.dtype != base.dtype or value.shape != base.size:
            raise RuntimeError(
                f"{key} is a {value.dtype} of shape {list(value.shape)}, not as the driver has it: {base}"
            )
        if view is None:
            return value
        if value.stride() != base.stride or view.dtype != base.dtype:
            raise RuntimeError(f"{key} has strides {value.stride()}, so that no view can be taken of it as of {base}")
        return value.as_strided(view.size, view.stride, value.storage_offset() + view.offset - base.offset)

    def _named(self, name: Name) -> Tensor | None:
        path, _, own = name[1].rpartition(".")
        module = self._modules[name[0]].get_submodule(path)
        return {**module._parameters, **module._buffers}.get(own)


def _fetch(holder: Holder, reference: WorkerTensor, read: Callable[..., Tensor]) -> Tensor:
    """Read a computed value. ``read`` is for views of stand-ins and is not used."""
    return holder.fetch(reference)


def _is_left_alone(func: Any) -> bool:
    """Return whether a function reads a gradient, sets an attribute, or registers a hook."""
    name = func.__name__
    if name == "__get__":
        return getattr(func, "__self__", None) is Tensor.grad
    return name in ("__set__", "__delete__", "register_hook", "register_post_accumulate_grad_hook", "__reduce_ex__")


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]
