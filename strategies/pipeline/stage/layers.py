"""Consecutive layers, and how :class:`Layers` runs one micro-batch through them.

The output of a layer depends on more than its input. This module handles the rest:

- settings of a thread or a process (autocast, default dtype, anomaly detection, ...): the driver captures its settings
  in a :class:`PassContext`, and every stage applies them;
- random numbers, seeded by (pass, micro-batch, layer): equal for any number of stages, and in a recomputation;
- buffers, such as running statistics: a recomputation has those of the forward pass, and changes none;
- modes, ``requires_grad`` and plain attributes, which user code may change before the backward pass: a recomputation
  has those of the forward pass;
- whether the layers run for the first time or are recomputed. With recomputation (activation checkpointing: Chen et
  al., 2016, https://arxiv.org/abs/1604.06174; in pipelines: GPipe, Huang et al., 2019,
  https://arxiv.org/abs/1811.06965) a stage keeps only the input of its layers, and runs them again before the backward
  pass.

The caller transfers micro-batches and gradients: a :class:`~strategies.pipeline.stage.stage.Stage`, or the single
autograd graph of a ``Pipe`` in one process.
"""

import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.profiler import record_function

from strategies.common.patching import ABSENT, set_entry
from strategies.common.random_seeds import RandomStateKeeper, draws_nothing, layer_seed, seed_device
from strategies.common.torch_compat import (
    BatchNorm,
    NormBase,
    compiled_call,
    num_changes,
    profiler_is_on,
    tree_leaves,
    tree_map_only,
    version_of,
)
from strategies.pipeline.stage.action_recorder import ActionRecorder
from strategies.pipeline.stage.batchnorm import DeferredStatistics
from strategies.pipeline.stage.skip import SKIPS, SkipKey, waiting_skips
from strategies.pipeline.stage.weight_gradients import LARGE_BYTES, DelayedWeights, WeightGradients

Carried = tuple[Any, dict[SkipKey, Tensor | None]]
"""The value that a stage sends to the next stage: the output of its last layer, and the skips that later layers pop."""

Before = Callable[[int, Any], None]
"""Called before each layer with the index of the layer in its ``nn.Sequential`` and the layer's input."""

CallLayers = Callable[[nn.Sequential, Any, Before], Any]
"""Takes layers, the input of the first layer, and a function to call before each layer; returns the last output."""

RECOMPUTE_MODES = ("always", "except_last", "never")

_BACKEND_FLAGS = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic"),
    "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    *("fp32_precision", "cuda.matmul.fp32_precision"),
    *("cudnn.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision"),
    "mkldnn.rnn.fp32_precision",
)
"""Attributes of ``torch.backends`` that choose kernels. Each precision follows the one that it inherits by default."""
_ATTENTION_KERNELS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


# Settings of a pass

_backend_flags = attrgetter(*_BACKEND_FLAGS)


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # fp32_precision of one backend has been set, or several to different values
        return None


def _attention_kernels() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cuda, f"{name}_enabled")() for name in _ATTENTION_KERNELS)


@dataclass(frozen=True)
class PassContext:
    """The driver's settings at the start of a pass; picklable."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype
    matmul_precision: str | None
    """``None`` if ``fp32_precision`` has been set in a way that torch's older functions cannot express."""
    backend_flags: tuple[bool | str, ...]
    attention_kernels: tuple[bool, ...]
    deterministic: bool
    deterministic_warn_only: bool
    anomaly: bool
    anomaly_check_nan: bool
    inference: bool

    @classmethod
    def capture(cls, device_type: str) -> "PassContext":
        """Read the settings of the calling thread; those of autocast for the CPU and for ``device_type``."""
        return cls(
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted({"cpu", device_type})
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_dtype=torch.get_default_dtype(),
            matmul_precision=_matmul_precision(),
            backend_flags=_backend_flags(torch.backends),
            attention_kernels=_attention_kernels(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            anomaly=torch.is_anomaly_enabled(),
            anomaly_check_nan=torch.is_anomaly_check_nan_enabled(),
            inference=torch.is_inference_mode_enabled(),
        )

    def apply(self) -> None:
        """Apply the settings that are global to a process. Only workers call this: their process runs only the pass.

        The call that sets deterministic algorithms imports torch's compiler, which takes more than a second.
        """
        if self.matmul_precision is not None and _matmul_precision() != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        for name, value in zip(_BACKEND_FLAGS, self.backend_flags, strict=True):
            if attrgetter(name)(torch.backends) != value:
                path, _, own = name.rpartition(".")
                setattr(attrgetter(path)(torch.backends) if path else torch.backends, own, value)
        for name, enabled in zip(_ATTENTION_KERNELS, self.attention_kernels, strict=True):
            getattr(torch.backends.cuda, f"enable_{name}")(enabled)
        deterministic = self.deterministic, self.deterministic_warn_only
        if deterministic != (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warn_only)
        if (self.anomaly, self.anomaly_check_nan) != (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()):
            torch.autograd.set_detect_anomaly(self.anomaly, self.anomaly_check_nan)

    @contextmanager
    def entered(self, *, grad: bool) -> Iterator[None]:
        """Run the body with the autocast settings, inference mode and default dtype of this context.

        Args:
            grad: Whether autograd records the body.
        """
        dtype = torch.get_default_dtype()
        if dtype != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        try:
            if self.inference != torch.is_inference_mode_enabled() or any(enabled for _, enabled, _ in self.autocast):
                with ExitStack() as stack:
                    stack.enter_context(torch.inference_mode(self.inference))
                    stack.enter_context(torch.set_grad_enabled(grad))
                    for kind, enabled, autocast_dtype in self.autocast:
                        if enabled:
                            cached = self.autocast_cache
                            stack.enter_context(torch.autocast(kind, dtype=autocast_dtype, cache_enabled=cached))
                    yield
            else:
                with torch.set_grad_enabled(grad):
                    yield
        finally:
            if torch.get_default_dtype() != dtype:
                torch.set_default_dtype(dtype)


# Recomputation


class _Phase(threading.local):
    """Whether the layers on this thread run to be recomputed later, or are recomputed."""

    checkpointing = False
    recomputing = False


_here = _Phase()


def is_checkpointing() -> bool:
    """Whether the layer that runs on this thread will be recomputed for the same micro-batch in the backward pass."""
    return _here.checkpointing


def is_recomputing() -> bool:
    """Whether the layer that runs on this thread is recomputed: it has run in the forward pass of this micro-batch."""
    return _here.recomputing


@contextmanager
def _phase(checkpointing: bool, recomputing: bool) -> Iterator[None]:
    """Make :func:`is_checkpointing` and :func:`is_recomputing` return these values."""
    before = _here.checkpointing, _here.recomputing
    _here.checkpointing, _here.recomputing = checkpointing, recomputing
    try:
        yield
    finally:
        _here.checkpointing, _here.recomputing = before


def refuse_checkpoint_around(what: str) -> None:
    """Refuse a call by ``torch.utils.checkpoint``, which only a frame on the stack shows.

    Args:
        what: What is called.

    Raises:
        RuntimeError: If ``torch.utils.checkpoint`` makes the call.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise RuntimeError(
                f"{what} is called within torch.utils.checkpoint, which would call it a second time in the backward "
                "pass. Disable it in the model, and set RPCSequentialStrategy(checkpoint=...); or use "
                "torch.utils.checkpoint within a layer or block."
            )
        frame = frame.f_back


@dataclass(frozen=True)
class Flags:
    """Modes and ``requires_grad`` of layers, stored because they may change before the layers are recomputed."""

    modes: list[bool]
    trained: list[bool]

    @classmethod
    def of(cls, layers: nn.Module) -> "Flags":
        """Read the flags of ``layers``."""
        modules = list(layers.modules())
        return cls([module.training for module in modules], [p.requires_grad for p in _parameters(modules)])

    @contextmanager
    def entered(self, layers: nn.Module) -> Iterator[None]:
        """Give ``layers`` these flags for the duration of the body."""
        now = Flags.of(layers)
        if now == self:
            yield
            return
        self._set(layers)
        try:
            yield
        finally:
            now._set(layers)

    def _set(self, layers: nn.Module) -> None:
        modules = list(layers.modules())
        for module, mode in zip(modules, self.modes, strict=True):
            module.training = mode
        for parameter, trained in zip(_parameters(modules), self.trained, strict=True):
            parameter.requires_grad_(trained)


def _parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters of these modules as often as they occur, which is faster than ``nn.Module.parameters``."""
    return (p for module in modules for p in module._parameters.values() if p is not None)


_PLAIN = frozenset([bool, int, float, complex, str, type(None)])

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The names of the attributes that torch gives to every module."""


def plain_attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of one module, including ``training`` and numbers of numpy."""
    return {
        name: value
        for name, value in vars(module).items()
        if (type(value) in _PLAIN or isinstance(value, np.generic))
        and (name == "training" or name not in OF_EVERY_MODULE)
    }


def has_same_entries(entries: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether two dicts have the same objects under the same names, in the same order."""
    return (
        len(entries) == len(before)
        and all(map(is_, entries.keys(), before))
        and all(map(is_, entries.values(), before.values()))
    )


AttributePlace = tuple[dict[str, Any], str]
"""An attribute: the ``vars`` of its module, and its name."""


class KeptAttributes(NamedTuple):
    """Values of plain attributes of layers as a forward pass begins."""

    places: Sequence[AttributePlace]
    values: Sequence[Any]


class PlainAttributes:
    """Keeps plain attributes of layers, such as the rate of a dropout layer, because forward passes run again.

    User code may change them between a forward pass and its recomputation. An attribute that the layers themselves
    change when they run, such as a count of their calls, is not kept: it changes again in the recomputation.
    """

    def __init__(self) -> None:
        self._places: list[AttributePlace] = []
        self._changing: dict[tuple[int, str], AttributePlace] = {}
        """The attributes that layers have changed, by the ``id`` of their module's ``vars`` and their name."""

    def search(self, modules: Iterable[nn.Module]) -> None:
        """Find the attributes of these modules."""
        owns = [(vars(module), plain_attributes_of(module)) for module in modules]
        places = [(own, name) for own, plain in owns for name in plain if name != "training"]  # Flags has the mode
        self._places = [place for place in places if not self._is_changing(place)] if self._changing else places

    @contextmanager
    def kept(self) -> Iterator[KeptAttributes]:
        """Context of a forward pass, with the values of the attributes before it."""
        kept = KeptAttributes(self._places, _values(self._places))
        yield kept
        self._note_changes(kept)

    @contextmanager
    def restored(self, kept: KeptAttributes) -> Iterator[None]:
        """Context of a recomputation, in which the attributes have these values again."""
        now = _values(kept.places)
        changed = [each for each in _differences(kept, now) if not self._is_changing(each[0])]
        for place, value, _ in changed:
            set_entry(*place, value)
        before = KeptAttributes(kept.places, _values(kept.places) if changed else now)
        try:
            yield
        finally:
            self._note_changes(before)
            for place, _, value in changed:
                if not self._is_changing(place):
                    set_entry(*place, value)

    def _note_changes(self, before: KeptAttributes) -> None:
        changed = [place for place, _, _ in _differences(before, _values(before.places))]
        self._changing.update({(id(own), name): (own, name) for own, name in changed})

    def _is_changing(self, place: AttributePlace) -> bool:
        return (id(place[0]), place[1]) in self._changing


def _values(places: Sequence[AttributePlace]) -> list[Any]:
    return [own.get(name, ABSENT) for own, name in places]


def _differences(before: KeptAttributes, now: Sequence[Any]) -> list[tuple[AttributePlace, Any, Any]]:
    """Return the attributes that are other objects now, each with its old and its new value."""
    if all(map(is_, before.values, now)):
        return []
    return [each for each in zip(*before, now, strict=True) if each[1] is not each[2]]


_SMALL_BYTES = 2**16
"""Each value with which forward passes begin that run again is copied, of buffers of at most this size."""

_BufferKey: TypeAlias = tuple[nn.Module, str, bool]
"""A buffer: its module, its name, and the mode of its module."""


class KeptBuffer(NamedTuple):
    """A buffer of a layer as a forward pass begins, for the recomputation.

    Attributes:
        key: The buffer, and the mode of its module.
        value: The buffer itself; ``None`` if the forward pass has changed it.
        num_changes: How often ``value`` had been changed in place.
        copy: The values with which the recomputation begins if the buffer has changed since; ``None`` if ``value`` is
            large, or if the buffer was ``None``.
    """

    key: _BufferKey
    value: Tensor | None
    num_changes: int
    copy: Tensor | None


class ChangedBuffers:
    """Keeps the values of buffers that layers change in forward passes, because these passes run again.

    A buffer is copied before each forward pass until a pass in the same mode has shown that it does not change. Of a
    small one, which may change in some passes only, each value is copied once, and kept until the passes that began
    with it have run again.
    """

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        self._unchanged: set[_BufferKey] = set()
        """The buffers that no forward pass has changed so far."""
        self._changing: set[_BufferKey] = set()
        """The buffers that a forward pass has changed, and statistics of norms in training."""
        self._copies: dict[int, KeptBuffer] = {}
        """Copies that hold as long as their buffers do not change, by the ``id`` of the buffers."""

    def search(self, modules: Iterable[nn.Module]) -> None:
        """Find the buffers of these modules."""
        self._copies.clear()  # Tensor.data counts no changes, and user code may have used it
        self._places = [
            (module, name)
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # its buffers are other objects each time
            for name in module._buffers
        ]
        norms = [place for place in self._places if isinstance(place[0], NormBase) and place[1] in _STATISTICS]
        self._changing.update((norm, name, True) for norm, name in norms)

    @contextmanager
    def kept(self) -> Iterator[list[KeptBuffer]]:
        """Context of a forward pass. When it ends, the list has what :meth:`restored` needs."""
        before = [self._before((module, name, module.training)) for module, name in self._places]
        kept: list[KeptBuffer] = []
        yield kept
        for each in before:
            key, value, _, copy = each
            is_large = value is not None and value.nbytes > _SMALL_BYTES
            has_changed = self._has_changed(each)
            if has_changed or is_large:
                self._copies.pop(id(value), None)
            if not has_changed:
                self._unchanged.add(key)
                kept.append(each._replace(copy=None) if is_large else each)
            elif value is None or copy is not None:
                self._note_change(key)
                kept.append(KeptBuffer(key, None, 0, copy))
            else:
                self._warn_of_late_change(key)

    def _before(self, key: _BufferKey) -> KeptBuffer:
        module, name, _ = key
        value = module._buffers[name]
        if value is None:
            return KeptBuffer(key, None, 0, None)
        number = num_changes(value)
        if key in self._unchanged and value.nbytes > _SMALL_BYTES:
            return KeptBuffer(key, value, number, None)
        known = self._copies.get(id(value))
        if known is None or known.num_changes != number:
            # The forward pass gives a lazy buffer its first values, so its values can be copied only later.
            copy = value if is_lazy(value) else value.detach().clone()
            self._copies[id(value)] = known = KeptBuffer(key, value, number, copy)
        return known if known.key is key else KeptBuffer(key, value, number, known.copy)

    def _has_changed(self, since: KeptBuffer) -> bool:
        module, name, _ = key = since.key
        value, copy = since.value, since.copy
        if key in self._changing or module._buffers.get(name) is not value:
            return True
        if value is None:
            return False
        if num_changes(value) != since.num_changes:
            return True
        # Tensor.data counts no changes.
        return copy is not None and key not in self._unchanged and not torch.equal(copy, value)

    def _note_change(self, key: _BufferKey) -> None:
        if key not in self._changing:
            self._unchanged.discard(key)
            self._changing.add(key)

    def _warn_of_late_change(self, key: _BufferKey) -> None:
        self._note_change(key)
        warnings.warn(
            f"{type(key[0]).__name__} has changed its buffer {key[1]!r} in a forward pass, but not in earlier ones. "
            "Micro-batches of these passes that are recomputed now begin with the new value, and may change it again; "
            "later ones do not. checkpoint='never' recomputes nothing.",
            stacklevel=2,
        )

    @contextmanager
    def restored(self, kept: Iterable[KeptBuffer]) -> Iterator[None]:
        """Context of a recomputation, in which layers have copies of changed buffers, which they may change."""
        changed = [each for each in kept if self._has_changed(each)]
        for each in changed:
            if each.copy is None and each.value is not None and each.key not in self._changing:
                self._warn_of_late_change(each.key)  # a forward pass that does not run again has changed the buffer
        owns = [(*each.key[:2], each.copy) for each in changed if each.copy is not None or each.value is None]
        now = [(module, name, module._buffers[name]) for module, name, _ in owns]
        copies = {id(copy): copy.clone() for _, _, copy in owns if copy is not None}
        for module, name, copy in owns:
            module._buffers[name] = None if copy is None else copies[id(copy)]
        try:
            yield
        finally:
            for module, name, own in now:
                module._buffers[name] = own


@dataclass(frozen=True)
class KeptState:
    """The state of layers, other than parameters, at the start of a forward pass, for the recomputation."""

    flags: Flags
    attributes: KeptAttributes
    buffers: Sequence[KeptBuffer]


class ReusedInput:
    """Lends layers an input that they get again in the recomputation, and which must stay as it is until then.

    Layers may write to their input. They get a copy until a run in the same modes, with the same attributes, has shown
    that they do not.

    Args:
        description: A description of the layers for errors.
    """

    def __init__(self, description: str) -> None:
        self._description, self._was_written = description, False
        self._unwritten: dict[tuple[bool, ...], Sequence[Any]] = {}
        """The attributes of the layers in the last run that has not written to the input, by their modes."""

    @contextmanager
    def lent(self, value: Any, state: KeptState) -> Iterator[Any]:
        """Return ``value``, or a copy of its tensors with their place in the autograd graph, for a run of the layers.

        Args:
            value: Nested tensors and other objects.
            state: The state of the layers, which may write in training only, or above a rate of 0, as dropout does.

        Raises:
            RuntimeError: If the layers have written to ``value`` itself.
        """
        modes, attributes = tuple(state.flags.modes), state.attributes.values
        is_copied = self._was_written or self._unwritten.get(modes) != attributes
        if is_copied:
            value = tree_map_only(Tensor, torch.clone, value)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        before = [*map(version_of, tensors)]
        yield value
        if before == [*map(version_of, tensors)]:
            self._unwritten[modes] = attributes
            return
        self._was_written = True
        if not is_copied:
            raise RuntimeError(
                f"{self._description} have changed their input in place, but not in earlier forward passes, so the "
                "input from which this micro-batch would be recomputed is lost. Layers must change their input either "
                "in every forward pass or in none (x = x * 2 instead of x.mul_(2), inplace=False instead of "
                "inplace=True). checkpoint='never' recomputes nothing."
            )


# Layers


def call_one_by_one(layers: nn.Sequential, x: Any, before: Before) -> Any:
    """Call each layer with the output of the layer before it, as ``nn.Sequential`` does."""
    for place, layer in enumerate(layers):
        before(place, x)
        x = layer(x)
    return x


class Layers:
    """Runs micro-batches through some layers.

    Args:
        layers: The layers, named as in the whole module.
        first_layer: Index of the first layer in the whole module. The seed of a layer depends on its index there.
        device: Device of the layers.
        deferred_batch_norm: Update running statistics once per pass instead of once per micro-batch.
        call: Calls the layers; by default one after the other.
        random_state: Restores the random state after a part of a pass. Several chunks of a process share it.
        adds_in_place: Whether gradients of large weights are added without a temporary tensor in whole backward passes,
            which must run within :meth:`in_backward`.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        first_layer: int,
        device: torch.device,
        *,
        deferred_batch_norm: bool = False,
        call: CallLayers = call_one_by_one,
        random_state: RandomStateKeeper | None = None,
        adds_in_place: bool = True,
    ) -> None:
        self._adds_in_place = adds_in_place
        self.layers, self.first_layer, self.device = layers, first_layer, device
        self.random_state = random_state or RandomStateKeeper(device)
        self._deferred = DeferredStatistics(layers) if deferred_batch_norm else None
        self._call = call
        self._delays, self._at_once = DelayedWeights(), WeightGradients(at_once=True)
        self._attributes, self._buffers = PlainAttributes(), ChangedBuffers()
        self.begin_pass()

    @property
    def description(self) -> str:
        """Return a description such as ``layers 3 to 5 (Block, Block, Linear)``."""
        kinds = ", ".join(type(layer).__name__ for layer in self.layers)
        return f"layers {self.first_layer} to {self.first_layer + len(self.layers) - 1} ({kinds})"

    def begin_pass(self) -> None:
        """Search the modules once per pass, so that :meth:`run` need not search them for each micro-batch."""
        if self._deferred is not None:
            self._deferred.forget()
        modules = list(self.layers.modules())
        self._norms = [module for module in modules if isinstance(module, BatchNorm)] if self._deferred else []
        self._seeded = [not draws_nothing(layer) for layer in self.layers]
        self._attributes.search(modules)
        self._buffers.search(modules)
        self._is_compiled = any(map(is_compiled, modules))
        self._has_skips = any(hasattr(type(module), SKIPS) for module in modules)
        self._has_large = self._adds_in_place and has_large_weights(modules)

    @contextmanager
    def kept(self) -> Iterator[KeptState]:
        """Context of a forward pass that runs again, with what :meth:`restored` needs."""
        flags = Flags.of(self.layers)  # a layer may change its own flags
        with self._attributes.kept() as attributes, self._buffers.kept() as buffers:
            yield KeptState(flags, attributes, buffers)

    @contextmanager
    def restored(self, kept: KeptState) -> Iterator[KeptState]:
        """Context of the recomputation, in which the layers are as before the forward pass."""
        attributes = self._attributes.restored(kept.attributes)
        with kept.flags.entered(self.layers), attributes, self._buffers.restored(kept.buffers):
            yield kept

    def run(
        self,
        carried: Carried,
        microbatch: int,
        seed: int,
        context: PassContext,
        *,
        grad: bool,
        checkpointing: bool,
        recomputing: bool,
        doing: Callable[[str], None] | None = None,
        splits: bool = False,
        recorder: ActionRecorder | None = None,
    ) -> Carried:
        """Run one micro-batch through the layers. Call :meth:`begin_pass` before the first one of a pass.

        Args:
            carried: Input of the first layer, and skips. A tensor that a layer may change in place must not be an
                autograd leaf; see :func:`~strategies.pipeline.stage.stage.entered`.
            microbatch: Index of the micro-batch.
            seed: Seed of the pass.
            context: Settings of the pass.
            grad: Whether autograd records the layers.
            checkpointing: Whether the layers will be recomputed for this micro-batch in the backward pass.
            recomputing: Whether this call recomputes the layers.
            doing: Called before each layer with a description for error reports.
            splits: Whether weight gradients may be left for later; see :meth:`in_backward`.
            recorder: Records the time of each layer; ``None`` while nothing is recorded.
        """
        gathering = self._deferred.gathering() if self._deferred and not recomputing else nullcontext()
        given, skips = carried[0], dict(carried[1])
        del carried  # otherwise this frame keeps a skip alive after its pop
        labels = _Labels() if profiler_is_on() else None

        def before(place: int, value: Any) -> None:
            nonlocal given
            given, layer = value, self.first_layer + place
            if doing is not None or labels is not None:
                what = f"{'recomputing ' if recomputing else ''}F{microbatch}, layer {layer}"
                if doing is not None:
                    doing(what)
                if labels is not None:
                    labels.next(what)
            if self._seeded[place]:
                self.random_state.keep()
                seed_device(layer_seed(seed, microbatch, layer), self.device)
            if recorder is not None:
                recorder.layer(layer, value)

        skipping = waiting_skips(skips) if self._has_skips else nullcontext()
        frozen = nullcontext() if recomputing else self._frozen()
        phases = checkpointing, recomputing
        phase = nullcontext() if phases == (_here.checkpointing, _here.recomputing) else _phase(*phases)
        self._delays.least_bytes = 0 if splits else LARGE_BYTES
        is_large = self._has_large and not any(on for kind, on, _ in context.autocast if kind == self.device.type)
        delays = self._delays if (splits or is_large) and grad and not self._is_compiled else nullcontext()
        with context.entered(grad=grad), frozen, gathering, phase, delays:
            try:
                with skipping:
                    return self._call(self.layers, given, before), skips
            except ValueError as error:
                self._explain_single_row(error, given, microbatch)
                raise
            finally:
                if labels is not None:
                    labels.end()
                if recorder is not None:
                    recorder.end_layers()

    @contextmanager
    def in_backward(self, left: WeightGradients | None = None) -> Iterator[None]:
        """Context for a backward pass, in which layers may draw random numbers.

        With ``deferred_batch_norm``, running statistics are frozen in it: a layer that checkpoints itself runs again.

        Args:
            left: Collects the weight gradients that can wait; ``None`` to compute all gradients immediately.
        """
        if any(self._seeded):
            self.random_state.keep()
        self._delays.left = self._at_once if left is None else left
        try:
            with self._frozen():
                yield
        finally:
            self._delays.left = None

    def _frozen(self) -> AbstractContextManager[None]:
        norms = [norm for norm in self._norms if norm.training]
        return _frozen_statistics(norms) if norms else nullcontext()

    def _explain_single_row(self, error: ValueError, x: Any, microbatch: int) -> None:
        """If a layer cannot normalise a micro-batch of one row, raise an error that names the layer and a remedy."""
        if not str(error).startswith("Expected more than 1 value per channel when training"):
            return
        names = {module: name for name, module in self.layers.named_modules()}
        callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        norm = next((caller for caller in reversed(callers) if isinstance(caller, nn.Module) and caller in names), None)
        rows = [len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if norm is None or rows[:1] != [1]:
            return
        raise ValueError(
            f"Layer {names[norm]}, a {type(norm).__name__} in training mode, cannot normalise micro-batch {microbatch}"
            f", which has 1 row. {error}. Use at most half as many micro-batches as the smallest batch has rows (leave "
            "smaller batches out, as drop_last=True of a DataLoader does for the last batch), or a layer that "
            "normalises each row separately, such as nn.LayerNorm."
        ) from error

    def end_forward(self) -> None:
        """Update the deferred statistics after the last micro-batch of a pass."""
        if self._deferred is not None:
            self._deferred.commit()

    def close(self) -> None:
        """Remove hooks from the layers."""
        if self._deferred is not None:
            self._deferred.remove()


def has_large_weights(modules: Iterable[nn.Module]) -> bool:
    """Whether a parameter is large enough that its gradient should be added without a temporary tensor."""
    parameters = (p for module in modules for p in module._parameters.values() if p is not None)
    return any(p.nbytes >= LARGE_BYTES and p.requires_grad for p in parameters)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` compiles calls of a module."""
    return compiled_call(module) is not None or type(module).__name__ == "OptimizedModule"


@contextmanager
def _frozen_statistics(norms: Sequence[BatchNorm]) -> Iterator[None]:
    """Run normalising layers in training mode without updating their running statistics.

    The layers update copies of the statistics, so autograd saves the same number of tensors, of the same shapes and
    dtypes, as without this: torch compares these when a layer that checkpoints itself runs again in the backward pass.
    """
    statistics = [{name: norm._buffers[name] for name in _STATISTICS if name in norm._buffers} for norm in norms]
    for norm, buffers in zip(norms, statistics, strict=True):
        norm._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, statistics, strict=True):
            norm._buffers.update(buffers)


class _Labels:
    """Consecutive labels in a trace of torch's profiler. Each label ends where the next label starts."""

    def __init__(self) -> None:
        self._current: record_function | None = None

    def next(self, label: str) -> None:
        """End the current label and start a new one."""
        self.end()
        self._current = record_function(label)
        self._current.__enter__()

    def end(self) -> None:
        """End the last label."""
        if self._current is not None:
            self._current.__exit__(None, None, None)
            self._current = None
