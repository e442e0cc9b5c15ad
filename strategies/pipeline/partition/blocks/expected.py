"""Predict the output of a block by running its code on the ``meta`` device."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.patching import unchanged
from strategies.common.random_seeds import preserved_random_state
from strategies.common.stage_layers import dotted
from strategies.common.torch_compat import CALL_ATTRIBUTE, TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only
from strategies.common.transformers_compat import collector_hidden
from strategies.pipeline.partition.blocks.calls import changed_argument, objects_of
from strategies.pipeline.stage.microbatch.split import PLAIN, freeze, pack_objects

_MANY = 4096
"""Maximum number of known outputs. A model needs a few of each block."""


@dataclass(frozen=True)
class Expected:
    """What a block is expected to return.

    Attributes:
        output: The output, with tensors on the ``meta`` device.
        is_guess: Whether the block's code needs values, so the output is a tensor like the first floating-point tensor
            among the arguments.
        is_like_first: Whether every tensor of the output has the shape of that argument, whatever its shape is.
    """

    output: Any
    is_guess: bool
    is_like_first: bool


def autocast_settings() -> tuple[tuple[bool, torch.dtype], ...]:
    """Return the settings of autocast, which a block's code may read."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


class ExpectedOutputs:
    """Predicts the outputs of blocks, and caches the results.

    Args:
        blocks: The blocks.
        path: Dotted path of the blocks in the model, for messages.
    """

    def __init__(self, blocks: nn.ModuleList, path: str) -> None:
        self._blocks, self.path = blocks, path
        self._known: dict[Any, _Known] = {}
        """The known outputs, by block and kinds of arguments."""

    def of(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
        """Find the nesting of a block's output and the shapes of its tensors, without running the block on values.

        The block's code runs on the ``meta`` device, once for each combination of kinds of arguments.

        Args:
            name: The name of the block.
            args: The positional arguments.
            kwargs: The keyword arguments.

        Raises:
            RuntimeError: If no argument is a floating-point tensor, or if the block changes an object among its
                arguments.
        """
        leaves = tree_leaves((args, kwargs))
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
        if first is None:
            raise RuntimeError(
                f"block {dotted(self.path, name)} got no floating-point tensor, so its output is not known before it "
                "runs; pass the hidden state as its first argument"
            )
        packed, nesting = tree_flatten(pack_objects((args, kwargs)))
        kinds = tuple((leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in packed)
        block = self._blocks.get_submodule(name)
        key = name, kinds, _digest(nesting), autocast_settings(), block.training
        tensors = [leaf for leaf in packed if isinstance(leaf, Tensor)]
        shapes = [tensor.shape for tensor in tensors]
        known = self._known.get(key)
        if known is None or not (known.is_like_first or known.shapes == shapes):
            objects = {argument: freeze(leaf) for argument, leaf in objects_of(args, kwargs)}
            found = _on_meta(block, args, kwargs)
            for argument, leaf in objects_of(args, kwargs):
                if freeze(leaf) != objects[argument]:  # the object now holds tensors without values
                    raise changed_argument(dotted(self.path, name), argument, type(leaf).__name__)
            given = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            is_like_first = all((leaf.shape, leaf.dtype) == (first.shape, first.dtype) for leaf in given)
            # If two arguments have this shape and dtype, the output may follow either of them.
            is_like_first &= sum((t.shape, t.dtype) == (first.shape, first.dtype) for t in tensors) == 1
            if len(self._known) >= _MANY:
                self._known.clear()
            known = self._known[key] = _Known(found, shapes, is_like_first)
        if known.output is None:
            return Expected(_like(first), is_guess=True, is_like_first=True)
        output = known.output[0]
        if known.is_like_first:
            output = tree_map_only(Tensor, lambda _: _like(first), output)
        return Expected(output, is_guess=False, is_like_first=known.is_like_first)


@dataclass(frozen=True)
class _Known:
    """The output of a block for certain kinds of arguments.

    Attributes:
        output: The output on the ``meta`` device, in a tuple; ``None`` if the code needs values.
        shapes: The shapes of the arguments that gave this output.
        is_like_first: Whether every tensor has the shape and dtype of the first floating-point argument. This is then
            assumed for other shapes as well.
    """

    output: tuple[Any] | None
    shapes: list[torch.Size]
    is_like_first: bool


def _constant(leaf: Any) -> Any:
    """Return the part of an argument that is not a tensor that may determine the output of a block."""
    return type(leaf), leaf if isinstance(leaf, PLAIN) else None


def _digest(nesting: TreeSpec) -> bytes:
    """Return a short description of the nesting of arguments and of the content of objects among them."""
    return blake2b(repr(nesting).encode()).digest()


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _on_meta(block: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any] | None:
    """Run a block's code on the ``meta`` device; return its output, or ``None`` if the code needs values."""
    tensors = {name: _like(t) for name, t in [*block.named_parameters(), *block.named_buffers()]}
    given, named = tree_map_only(Tensor, _like, (args, dict(kwargs)))
    modules = list(block.modules())
    try:
        with torch.no_grad(), preserved_random_state(torch.device("cpu")), collector_hidden(), unchanged(modules):
            for module in modules:
                vars(module).pop(CALL_ATTRIBUTE, None)
            output = torch.func.functional_call(block, tensors, given, named)
    except Exception:  # code that needs values may raise any exception
        return None
    if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves(output)):
        return None
    return (tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output),)
