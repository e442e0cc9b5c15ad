"""The only module of Relay that uses private names of ``transformers``. It does not import ``transformers``.

Hugging Face models declare their blocks, whether they fill a key-value cache, and which modules recompute activations.
"""

import inspect
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, repeat
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.names import with_wildcards
from strategies.common.patching import replaced
from strategies.common.torch_compat import forward_hooks

_BLOCK_CLASSES = "_no_split_modules"
"""Attribute of a ``PreTrainedModel``: the names of the classes of its blocks."""

_TENSOR_PLAN = "tp_plan"
"""Property of a ``PreTrainedModel``: the styles by which tensor parallelism divides its layers."""

_INITIALISES = "_init_weights"
"""Method of a ``PreTrainedModel`` that sets the initial values of the parameters and buffers of one of its modules."""

_OPENS_FILES = "safe_open"
"""The function that ``transformers.modeling_utils`` calls to open a ``safetensors`` file."""

_READS_IN_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that makes ``from_pretrained`` read tensors in the calling thread."""

_RECOMPUTES = "gradient_checkpointing"
"""Flag of a module that recomputes its activations, set by ``PreTrainedModel.gradient_checkpointing_enable``."""

_SAVES = "save_pretrained"
"""Method of a ``PreTrainedModel`` that writes its weights and its configurations; ``push_to_hub`` calls it."""


def lists_of_blocks(model: nn.Module) -> list[str]:
    """Return the paths of all ``nn.ModuleList`` with entries of the classes in ``_no_split_modules``.

    ``PreTrainedModel._no_split_modules`` names the classes of blocks that ``device_map`` keeps on one device. Lists
    inside such a block are left out.
    """
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, _BLOCK_CLASSES, None) or ())
    found: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if not is_inside and isinstance(module, nn.ModuleList) and {type(block).__name__ for block in module} & names:
            found.append(path)
    return found


def tensor_parallel_plans(model: nn.Module) -> list[tuple[str, Any, dict[str, str]]]:
    """Return path, configuration and tensor parallel plan of each Hugging Face model that has a plan.

    The names of a plan are those of the whole model. A model inside another has no entry, because the outer one has its
    plan. Layers that this model lacks are left out, since a plan is for all models of a class.
    """
    found: list[tuple[str, Any, dict[str, str]]] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}." if outer else "") for outer, _, _ in found)
        plan = getattr(module, _TENSOR_PLAN, None) if hasattr(module, _BLOCK_CLASSES) else None
        if is_inside or not plan:
            continue
        names = {with_wildcards(name) for name, _ in chain(module.named_modules(), module.named_parameters())}
        start = f"{path}." if path else ""
        own = {f"{start}{name}": style for name, style in plan.items() if name in names}
        found.append((path, getattr(module, "config", None), own))
    return found


def initialiser_of(model: nn.Module, name: str) -> Callable[[], Any] | None:
    """Return a function that initialises a module as the enclosing Hugging Face model does; ``None`` without one.

    Args:
        model: The whole model.
        name: Dotted name of the module in it.
    """
    parts = name.split(".") if name else []
    for end in range(len(parts), -1, -1):
        around = model.get_submodule(".".join(parts[:end]))
        if callable(function := getattr(around, _INITIALISES, None)) and hasattr(around, _BLOCK_CLASSES):
            return partial(function, model.get_submodule(name))
    return None


@contextmanager
def lazy_safetensors(make: Callable[[str, str, Tensor], Tensor]) -> Iterator[None]:
    """Context in which ``from_pretrained`` reads no values from ``safetensors`` files.

    Has no effect if ``transformers`` has not been imported.

    Args:
        make: Returns the tensor to use instead. Its arguments are the path of a file, the name of a tensor in it, and
            an empty tensor on the ``meta`` device of the same shape and dtype.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not hasattr(modeling, _OPENS_FILES):
        yield
        return
    opens = getattr(modeling, _OPENS_FILES)
    setattr(modeling, _OPENS_FILES, partial(_LazyFile, opens, make))
    before = os.environ.get(_READS_IN_ONE_THREAD)
    os.environ[_READS_IN_ONE_THREAD] = "1"  # ``make`` must run in the calling thread
    try:
        yield
    finally:
        setattr(modeling, _OPENS_FILES, opens)
        if before is None:
            del os.environ[_READS_IN_ONE_THREAD]
        else:
            os.environ[_READS_IN_ONE_THREAD] = before


def read_safetensors(path: Path, key: str) -> Tensor:
    """Return a tensor of a ``safetensors`` file. ``transformers`` installs the package ``safetensors``."""
    with import_module("safetensors").safe_open(str(path), framework="pt", backend="pread") as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor


class _LazyFile:
    """A ``safetensors`` file that ``from_pretrained`` opens."""

    def __init__(
        self,
        opens: Callable[..., Any],
        make: Callable[[str, str, Tensor], Tensor],
        path: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._file, self._make, self._path = opens(path, *args, **kwargs), make, str(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_slice(self, key: str) -> Any:
        return _LazySlice(self._file.get_slice(key), partial(self._make, self._path, key))


class _LazySlice:
    """A tensor in a :class:`_LazyFile`."""

    def __init__(self, real: Any, make: Callable[[Tensor], Tensor]) -> None:
        self._real, self._make = real, make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __getitem__(self, index: Any) -> Tensor:
        shape = self._real.get_shape()
        if not shape:
            scalar: Tensor = self._real[index]
            return scalar
        return self._make(torch.empty(shape, dtype=self._real[0:0].dtype, device="meta"))[index]


def switch_off_cache(model: nn.Module) -> list[Callable[[], None]]:
    """Set ``use_cache=False`` in the configurations of a Hugging Face model; return functions that undo this.

    Only generation uses a key-value cache, and blocks in other processes would fill it without effect. The files of
    ``save_pretrained`` contain the flags of the user.
    """
    held = [getattr(module, name, None) for module in model.modules() for name in ("config", "generation_config")]
    switched: list[Any] = [config for config in held if getattr(config, "use_cache", None) is True]

    def set_flags(flags: Iterable[bool]) -> None:
        for config, flag in zip(switched, flags, strict=False):
            config.use_cache = flag

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        flags = [config.use_cache for config in switched]
        set_flags(repeat(True))
        try:
            return type(self).save_pretrained(self, *args, **kwargs)
        finally:
            set_flags(flags)

    set_flags(repeat(False))
    undo: list[Callable[[], None]] = [partial(set_flags, repeat(True))]
    for module in model.modules() if switched else ():
        if hasattr(type(module), _SAVES) and _SAVES not in vars(module):
            undo.append(replaced(module, _SAVES, MethodType(save_pretrained, module)))  # a copy saves its own weights
    return undo


def switch_off_recomputation(blocks: nn.Module) -> list[Callable[[], None]]:
    """Undo ``model.gradient_checkpointing_enable()`` for some modules; return functions that restore it.

    Args:
        blocks: The blocks that the stages recompute. Modules outside of them still recompute their activations.
    """
    undo: list[Callable[[], None]] = []
    for module in blocks.modules():
        if getattr(module, _RECOMPUTES, None) is True:
            setattr(module, _RECOMPUTES, False)
            undo.append(partial(setattr, module, _RECOMPUTES, True))
    return undo


# Outputs that hooks capture: output_hidden_states, output_attentions, output_router_logits

_CAPTURING = "transformers.utils.output_capturing"
"""The module of ``transformers`` that installs capturing hooks, in the first forward pass that requests such outputs.

The hooks fill a collector: a dict from the name of an output to the list of tensors that modules of one class returned.
"""

_HOOK = "install_output_capuring_hook.<locals>.output_capturing_hook"
_TAKES_INPUT = "capture_initial_hidden_state"
"""Variable of a hook: whether it captures the input of the first block as a hidden state. Early versions always do."""

_STATES, _SELECTION = "hidden_states", "_hidden_states_layers"


@dataclass(frozen=True)
class Capture:
    """The output that one hook in a block captures.

    Attributes:
        path: The module with the hook, within the block.
        key: The name of the output, such as ``"router_logits"``.
        index: The index of the element, if the module returns a tuple.
        takes_input: Whether the first positional argument of the module is captured too, before its output, if the
            module is the first one whose output is captured.
    """

    path: str
    key: str
    index: int
    takes_input: bool


def is_capturing_hook(hook: Any) -> bool:
    """Return whether a forward hook captures outputs for ``transformers``."""
    return getattr(hook, "__module__", "") == _CAPTURING and getattr(hook, "__qualname__", "") == _HOOK


def active_collector() -> MutableMapping[str, Any] | None:
    """Return the collector of the forward pass that runs on this thread; ``None`` if the hooks capture nothing."""
    module: Any = sys.modules.get(_CAPTURING)
    return (module._active_collector.get() or None) if module is not None else None


@contextmanager
def collector_hidden() -> Iterator[None]:
    """Context in which the hooks of ``transformers`` capture nothing."""
    module: Any = sys.modules.get(_CAPTURING)
    if module is None:
        yield
        return
    token = module._active_collector.set(None)
    try:
        yield
    finally:
        module._active_collector.reset(token)


def captures_in(block: nn.Module, collector: MutableMapping[str, Any], deferred: Container[str] = ()) -> list[Capture]:
    """Return the outputs that the hooks in a block capture for a collector.

    Args:
        block: The block.
        collector: The collector, with the outputs of earlier modules.
        deferred: The names of outputs of earlier modules that the collector does not have yet.
    """
    found = []
    for path, module in block.named_modules():
        for hook in forward_hooks(module)[1].values():
            if is_capturing_hook(hook):
                values = inspect.getclosurevars(hook).nonlocals
                if (key := values["key"]) in collector:
                    is_first = key == _STATES and key not in deferred and not collector[key]
                    takes_input = is_first and values.get(_TAKES_INPUT, True)
                    found.append(Capture(path, key, values["index"], takes_input))
    return found


@contextmanager
def capturing(block: nn.Module, captures: Sequence[Capture]) -> Iterator[dict[str, list[Tensor]]]:
    """Yield a dict, and add to it what modules of a block return, as the hooks of ``transformers`` do."""
    captured: dict[str, list[Tensor]] = {capture.key: [] for capture in captures}

    def hook(capture: Capture, module: nn.Module, args: Any, output: Any) -> None:
        if capture.takes_input and not captured[capture.key]:
            captured[capture.key].append(args[0])
        value = output[capture.index] if isinstance(output, tuple) else output
        if value is not None:
            captured[capture.key].append(value)

    handles = [block.get_submodule(c.path).register_forward_hook(partial(hook, c)) for c in captures]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def collect(collector: MutableMapping[str, Any], captured: MutableMapping[str, list[Tensor]]) -> None:
    """Add captured outputs to a collector, where ``None`` stands for a hidden state that was not requested."""
    for key, values in captured.items():
        for value in values:
            selection = collector.get(_SELECTION) if key == _STATES else None
            is_wanted = selection is None or len(collector[key]) in selection
            collector[key].append(value if is_wanted else None)


# Example inputs made from a configuration

EXAMPLE_ROWS, EXAMPLE_LENGTH = 2, 128
_PREDICTS_TOKENS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration")
"""Suffixes of the names of classes whose labels have the shape of the tokens."""


def example_of(model: nn.Module, module: nn.Module) -> tuple[nn.Module, dict[str, Any]] | None:
    """Return the outermost Hugging Face model that contains ``module``, and an example input from its configuration.

    The input has 2 rows of up to 128 tokens, with the tokens as labels if the model predicts tokens; or 2 images.

    Returns:
        ``None`` if no such model contains ``module``, or if its input is neither tokens nor images.
    """
    around = [
        child
        for child in model.modules()
        if hasattr(type(child), "dummy_inputs") and any(inner is module for inner in child.modules())
    ]
    if not around:
        return None
    found: Any = around[0]
    config = found.config
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    vocabulary, kind = getattr(config, "vocab_size", None), getattr(found, "main_input_name", None)
    if kind == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        dtype = next((p.dtype for p in found.parameters() if p.is_floating_point()), torch.float32)
        return found, {"pixel_values": torch.zeros(EXAMPLE_ROWS, channels, size, size, dtype=dtype)}
    if kind != "input_ids" or not isinstance(vocabulary, int):
        return None
    longest = getattr(config, "max_position_embeddings", None)
    length = min(EXAMPLE_LENGTH, longest) if isinstance(longest, int) and longest > 0 else EXAMPLE_LENGTH
    tokens = torch.arange(EXAMPLE_ROWS * length).reshape(EXAMPLE_ROWS, length) % vocabulary
    takes = inspect.signature(found.forward).parameters
    has_labels = "labels" in takes and type(found).__name__.endswith(_PREDICTS_TOKENS)
    return found, {"input_ids": tokens, **({"labels": tokens} if has_labels else {})}
