"""Run code that builds a model without memory for large tensors, and note in recipes how to compute their values.

    with construction.without_memory():  user's code, on the driver
        nn.Linear(8192, 8192)            empty(8192, 8192), uniform_(...): steps of a recipe; the weight is on ``meta``
        nn.LayerNorm(8192)               small tensors are computed as usual

An operation that draws random numbers also runs on temporary memory, so that the generator advances as in one process.
Code may read values of an unbuilt tensor (``.item()``, ``.any()``): the recipe of the tensor is then replayed at once.
"""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode

from strategies.common.torch_compat import (
    TorchDispatchMode,
    changed_arguments,
    operator_name,
    storage_key,
    tree_map,
    tree_map_only,
)
from strategies.common.trees import tensors_in
from strategies.pipeline.construction.recipe import Recipe, RecipeStep, View, constant, is_random, views_in
from strategies.pipeline.construction.stored import References, Stored

SMALL_BYTES = 2**14
"""Maximum size of a new tensor that is computed as usual, and of a storage that is part of the pickle of a stage."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

_OVERWRITING = ("uniform_", "normal_", "exponential_", "random_", "log_normal_", "zero_", "fill_", "copy_")
"""In-place operations that do not read the previous values."""


@dataclass
class _UnbuiltStorage:
    """A storage without memory.

    Attributes:
        storage: The storage, on the ``meta`` device. This reference keeps its address from being used again.
        writers: The numbers of the steps that write the storage, in order.
    """

    storage: UntypedStorage
    writers: list[int] = field(default_factory=list)


class Construction:
    """Large tensors that have no memory yet, called unbuilt, and the steps that compute their values.

    Args:
        small_bytes: Maximum size of a new tensor that is computed as usual.
    """

    def __init__(self, small_bytes: int = SMALL_BYTES) -> None:
        self._small_bytes = small_bytes
        self._steps: list[RecipeStep] = []
        self._is_replaying = self._is_active = False
        self.is_in_function = False
        """Whether a torch function that the code has called with an unbuilt tensor is still running."""
        self._overwrites: set[int] = set()
        """Numbers of the steps that overwrite a whole storage."""
        self._unbuilt: dict[int, _UnbuiltStorage] = {}
        self._adopted: set[int] = set()
        """Numbers of storages that were on ``meta`` before the construction, so that they have no values yet."""
        self._latest: tuple[int, int, UntypedStorage] | None = None
        """The most recent random values: the number of the step, the number of the storage, and the values."""
        self.references = References()

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """Context in which new large tensors get no memory, and operations on unbuilt tensors become steps."""
        if self._is_active:
            yield
            return
        self._is_active = True
        try:
            with _Functions(self), _Operations(self):
                yield
        finally:
            self._is_active, self._latest = False, None

    @contextmanager
    def reading(self, module: nn.Module) -> Iterator[None]:
        """Context in which operations on unbuilt tensors of a module, such as a copy of a layer, use their values."""
        with _Reading(self) if any(map(self.knows, (*module.parameters(), *module.buffers()))) else nullcontext():
            yield

    def build(
        self,
        modules: Iterable[nn.Module],
        replace: Callable[[nn.Parameter, nn.Parameter], None],
        storages: dict[int, UntypedStorage],
    ) -> None:
        """Compute the values of the unbuilt tensors of modules, also of tensors in attributes, one storage at a time.

        Args:
            modules: The modules, without their children.
            replace: Replaces a parameter with another one everywhere.
            storages: The storages built before, by number. The storages built now are added.
        """

        def built(tensor: Tensor) -> Tensor:
            view = self.view(tensor)
            if view.storage not in storages:
                storages[view.storage] = self.recipe(tensor).replay()
            here = view.on(storages[view.storage])
            vars(here).update(vars(tensor))
            return here

        for module in modules:
            for parameter in module._parameters.values():
                if parameter is not None and self.knows(parameter):
                    replace(parameter, nn.Parameter(built(parameter), parameter.requires_grad))
            for name, buffer in module._buffers.items():
                if buffer is not None and self.knows(buffer):
                    module._buffers[name] = built(buffer)
            own = {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
            for name, value in own.items():
                if any(map(self.knows, tensors_in(value))):
                    here = tree_map_only(Tensor, lambda tensor: built(tensor) if self.knows(tensor) else tensor, value)
                    vars(module)[name] = here

    def copied(self, tensor: Tensor) -> Tensor:
        """Return an unbuilt tensor with the values of ``tensor``, which has memory."""
        made = _to_meta(tensor)
        self._writers(made)
        return made.copy_(tensor)

    def stored_tensor(self, stored: Stored, like: Tensor) -> Tensor:
        """Return an unbuilt tensor whose values are read from a file when they are needed.

        Args:
            stored: The tensor in the file.
            like: A tensor on the ``meta`` device of the same shape and dtype.
        """
        if like.nbytes <= self._small_bytes:
            return stored.read()
        made = torch.empty(like.shape, dtype=like.dtype, device="meta")
        self._writers(made).append(len(self._steps))
        self._overwrites.add(len(self._steps))
        self._steps.append(RecipeStep(None, [constant(None, stored)], outputs=[self.view(made)]))
        return made

    def held_elsewhere(self, built: Collection[int]) -> list[Tensor]:
        """Return the unbuilt tensors in this process that use none of the storages with these numbers."""
        if not self._unbuilt:
            return []
        tensors = [own for own in gc.get_objects() if type(own) in (Tensor, nn.Parameter)]
        return [own for own in tensors if self.knows(own) and storage_key(own) not in built]

    def knows(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is unbuilt."""
        try:
            return tensor.is_meta and storage_key(tensor) in self._unbuilt
        except (RuntimeError, NotImplementedError):  # a tensor without a storage, such as a sparse one
            return False

    def adopt(self, tensor: Tensor) -> None:
        """Include a tensor that was on the ``meta`` device before and lacks values until it is overwritten."""
        if not self.knows(tensor):
            self._writers(tensor)
            self._adopted.add(storage_key(tensor))

    def lacks_values(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the ``meta`` device and has no recipe for its values."""
        if not tensor.is_meta or not self.knows(tensor):
            return tensor.is_meta
        number = storage_key(tensor)
        return number in self._adopted and not self._unbuilt[number].writers

    def _writers(self, tensor: Tensor) -> list[int]:
        return self._unbuilt.setdefault(storage_key(tensor), _UnbuiltStorage(tensor.untyped_storage())).writers

    def view(self, tensor: Tensor) -> View:
        """Return the geometry of an unbuilt tensor.

        Raises:
            RuntimeError: If the tensor is a conjugate or negative view, which its geometry does not show.
        """
        if tensor.is_conj() or tensor.is_neg():
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} of a model that is built in configure_model or init_module is "
                "a view with the conjugate or the negative values, which cannot be built later. Compute these values "
                "without conj(), or build the model in __init__."
            )
        return View(
            storage_key(tensor),
            tensor.untyped_storage().nbytes(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def recipe(self, tensor: Tensor) -> Recipe:
        """Return the recipe of the storage of an unbuilt tensor."""
        number = storage_key(tensor)
        return Recipe(number, tensor.untyped_storage().nbytes(), [self._steps[i] for i in self._needed(number)])

    def values(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the values of an unbuilt tensor."""
        before, self._is_replaying = self._is_replaying, True  # a function may read values within ``without_memory``
        try:
            return self.view(tensor).on(self._replay(tensor))
        finally:
            self._is_replaying = before

    def _replay(self, tensor: Tensor) -> UntypedStorage:
        recipe, known = self.recipe(tensor), {}
        if self._latest is not None:
            number, storage, values = self._latest
            drawn = self._steps[number]
            using = [step for step in recipe.steps if any(view.storage == storage for view in views_in(step))]
            if using and using[0] is drawn:
                recipe = Recipe(recipe.storage, recipe.num_bytes, [step for step in recipe.steps if step is not drawn])
                known = {storage: values.clone()}
        return recipe.replay(known)

    def _needed(self, number: int) -> list[int]:
        """Return the numbers of the steps on which the values of a storage depend, in order."""
        found: set[int] = set()
        open_ends = [(number, len(self._steps))]
        while open_ends:
            storage, before = open_ends.pop()
            for i in reversed(self._unbuilt[storage].writers):
                if i >= before:
                    continue
                if i not in found:
                    found.add(i)
                    open_ends += [(v.storage, i) for v in views_in(self._steps[i]) if v.storage != storage]
                if i in self._overwrites:
                    break
        return sorted(found)

    # Operations within ``without_memory``

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation, or add it as a step."""
        if self._is_replaying:
            return func(*args, **kwargs)
        if self.is_in_function and kwargs.get("device") == torch.device("meta"):
            kwargs = {**kwargs, "device": torch.device("cpu")}  # a number beside an unbuilt tensor
        tensors = tensors_in((list(args), dict(kwargs)))
        is_made = not tensors and self._makes_large_tensor(func, args, kwargs)
        if not is_made and not any(self.knows(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:  # t_(), squeeze_()
            return self._change_geometry(func, args, kwargs)
        changed = changed_arguments(func, args, kwargs)
        if len({self.knows(tensor) for tensor in changed}) > 1:
            raise RuntimeError(
                f"`{operator_name(func)[1]}` changes large and small tensors in place at once, while a model is built "
                "without memory for large tensors. Change each tensor separately, or build the model in __init__."
            )
        if any(not self.knows(tensor) for tensor in changed):
            return self.run_with_values(func, args, kwargs)
        if is_random(func):
            return self._draw(func, args, kwargs, changed)
        on_meta = tree_map_only(Tensor, _to_meta, (list(args), dict(kwargs)))
        if "device" in on_meta[1]:
            on_meta[1]["device"] = torch.device("meta")
        try:
            result = func(*on_meta[0], **on_meta[1])
        except (NotImplementedError, RuntimeError):  # the operator has no rule for shapes, or shapes depend on values
            result = self.run_with_values(func, args, kwargs)
        outputs = tensors_in(result)
        if not outputs and not changed:
            return self.run_with_values(func, args, kwargs)
        if not changed and all(self.knows(output) for output in outputs):
            return result  # views
        return self._add_step(func, args, kwargs, changed, result)

    def _change_geometry(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        number, num_bytes = storage_key(args[0]), args[0].untyped_storage().nbytes()
        result = func(*args, **kwargs)
        if storage_key(args[0]) != number or args[0].untyped_storage().nbytes() != num_bytes:
            name = operator_name(func)[1]
            raise RuntimeError(
                f"`{name}` on a tensor of {num_bytes} bytes of a model that is built in configure_model or "
                "init_module: a tensor without memory cannot get another storage. Build the model in __init__, or make "
                "a new tensor."
            )
        return result

    def _makes_large_tensor(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        device = kwargs.get("device")
        if "device" not in kwargs or (device is not None and torch.device(device).type != "cpu"):
            return False
        if kwargs.get("layout") not in (None, torch.strided):
            return False
        made = tensors_in(func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": False}))
        return any(tensor.untyped_storage().nbytes() > self._small_bytes for tensor in made)

    def run_with_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation with the values of unbuilt tensors, and free these values afterwards."""

        def real(tensor: Tensor) -> Tensor:
            if self.knows(tensor):
                return self.values(tensor)
            self._check_has_values(func, tensor)
            return tensor

        args, kwargs = tree_map_only(Tensor, real, (list(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], changed: Sequence[Tensor]) -> Any:
        """Draw the numbers, so that the generator advances, and add the operation with the generator's old state."""
        generator = next((a for a in (*args, kwargs.get("generator")) if isinstance(a, torch.Generator)), None)
        state = torch.get_rng_state() if generator is None else generator.get_state()
        without_generator = [None if isinstance(own, torch.Generator) else own for own in args]
        without = {name: None if name == "generator" else value for name, value in kwargs.items()}
        if changed and operator_name(func)[1] in _OVERWRITING:
            (target,) = changed
            scratch = self.view(target).on(UntypedStorage(target.untyped_storage().nbytes()))
            func(scratch, *args[1:], **kwargs)
            result: Any = target
        else:
            scratch = None
            result = self.run_with_values(func, args, kwargs)
            if changed:  # an in-place operation has changed a copy
                result = changed[0]
        result = self._add_step(func, without_generator, without, changed, result, state)
        if scratch is not None and len(self._steps) - 1 in self._overwrites:
            self._latest = len(self._steps) - 1, storage_key(changed[0]), scratch.untyped_storage()
        return result

    def _add_step(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        changed: Sequence[Tensor],
        result: Any,
        random_state: Tensor | None = None,
    ) -> Any:
        """Add an operation as a step. Returns its result with unbuilt tensors in place of new tensors."""
        number = len(self._steps)
        inputs = {storage_key(tensor) for tensor in tensors_in((list(args), dict(kwargs)))}
        made: dict[int, Tensor] = {}

        def output(tensor: Tensor) -> Tensor:
            if self.knows(tensor) and storage_key(tensor) in inputs:
                return tensor
            new = tensor
            if not tensor.is_meta:  # the operation ran with values, which are not kept
                new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            made[id(tensor)] = new
            return new

        result = tree_map_only(Tensor, output, result)
        for tensor in (*made.values(), *changed):
            self._writers(tensor).append(number)
        overwrites = not changed
        if len(changed) == 1 and operator_name(func)[1] in _OVERWRITING and self.view(changed[0]).is_whole:
            reads = {storage_key(t) for t in tensors_in((list(args[1:]), dict(kwargs)))}
            overwrites = storage_key(changed[0]) not in reads
        if overwrites:
            self._overwrites.add(number)

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if self.knows(leaf):
                return self.view(leaf)
            if (stored := self.references.stored(leaf)) is not None:
                return constant(None, stored)
            self._check_has_values(func, leaf)
            return constant(leaf.detach().clone())

        own_args, own_kwargs = tree_map(argument, (list(args), dict(kwargs)))
        views = [self.view(tensor) for tensor in made.values()]
        self._steps.append(
            RecipeStep(operator_name(func), own_args, own_kwargs, views, torch.get_default_dtype(), random_state)
        )
        return result

    def _check_has_values(self, func: Any, tensor: Tensor) -> None:
        if tensor.is_meta:
            raise RuntimeError(
                f"`{operator_name(func)[1]}` takes a tensor of shape {list(tensor.shape)} on the meta device, which "
                "has no values, while a model is built in configure_model or init_module. Make this tensor on the CPU."
            )


class _Operations(TorchDispatchMode):
    """Passes every operation of the code to a construction."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._construction.run(func, args, kwargs or {})


class _Reading(TorchDispatchMode):
    """Runs operations on unbuilt tensors with their values."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        construction, kwargs = self._construction, kwargs or {}
        if not any(map(construction.knows, tensors_in((list(args), kwargs)))):
            return func(*args, **kwargs)
        return construction.run_with_values(func, args, kwargs)


class _Functions(TorchFunctionMode):
    """Makes unbuilt tensors look like CPU tensors to the code."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, construction = kwargs or {}, self._construction
        out = kwargs.get("out")
        if isinstance(out, Tensor) and construction.knows(out):
            return out.copy_(func(*args, **{name: value for name, value in kwargs.items() if name != "out"}))
        if args and isinstance(args[0], Tensor):
            is_known = construction.knows(args[0])
            if func == _SET_DATA and is_known != construction.knows(args[1]):
                return func(args[0], construction.copied(args[1]) if is_known else construction.values(args[1]))
            if is_known and (handle := _HANDLED.get(func)) is not None:
                return handle(construction, func, *args, **kwargs)
        if construction.is_in_function or not any(map(construction.knows, tensors_in((list(args), kwargs)))):
            return func(*args, **kwargs)
        construction.is_in_function = True
        try:
            return func(*args, **kwargs)
        finally:
            construction.is_in_function = False


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


def _returning(value: Any) -> Callable[..., Any]:
    return lambda construction, func, tensor, *rest: value


def _deep_copy(construction: Construction, func: Any, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    copied: Tensor = memo.setdefault(id(tensor), tensor.detach().clone())
    return copied


def _read(construction: Construction, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a function that reads the memory of a tensor directly, without an operator."""
    return func(construction.values(tensor), *args, **kwargs)


def _array(construction: Construction, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a read-only array, because changes would not reach the tensor."""
    array = _read(construction, func, tensor, *args, **kwargs)
    array.flags.writeable = False
    return array


def _address(construction: Construction, func: Any, tensor: Tensor) -> int:
    """Return a number that differs for tensors at different addresses."""
    return storage_key(tensor) + int(tensor.storage_offset()) * tensor.itemsize


def _convert(construction: Construction, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Convert the dtype. For the code, the tensor is on the CPU already."""
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    others = []
    for arg in args:
        if isinstance(arg, Tensor):
            dtype = arg.dtype
        elif isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, str | torch.device):
            device = arg
        elif arg is not None:
            others.append(arg)
    if device is not None and torch.device(device).type != "cpu":
        return cast(Tensor, tensor.to(device=torch.device(device), dtype=dtype or tensor.dtype))
    is_same = dtype in (None, tensor.dtype) and not kwargs.get("copy") and others[1:2] != [True]
    if is_same and kwargs.get("memory_format") in (None, torch.preserve_format):
        return tensor
    kwargs.pop("non_blocking", None)
    return cast(Tensor, Tensor.to(tensor, dtype or tensor.dtype, **kwargs))


_SET_DATA = cast(Any, Tensor.data).__set__

_HANDLED: dict[Any, Callable[..., Any]] = {
    _getter("device"): _returning(torch.device("cpu")),
    _getter("is_cpu"): _returning(True),
    _getter("is_meta"): _returning(False),
    Tensor.__deepcopy__: _deep_copy,
    Tensor.tolist: _read,
    Tensor.__format__: _read,
    Tensor.__repr__: _read,
    Tensor.numpy: _array,
    Tensor.__array__: _array,
    Tensor.data_ptr: _address,
    Tensor.to: _convert,
    Tensor.type_as: _convert,
    Tensor.cpu: _convert,
    torch.as_tensor: _convert,
    torch.asarray: _convert,
}
"""Replacements for the functions that do not work through operators on an unbuilt tensor."""


def _to_meta(tensor: Tensor) -> Tensor:
    return (
        tensor
        if tensor.is_meta
        else torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    )
