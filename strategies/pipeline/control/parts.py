"""Parts of the state of a stage that it can set aside for the driver, and how the stage describes them."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strategies.common.torch_compat import tree_map_only
from strategies.common.trees import flat, special_layout


class PartKind(Enum):
    """The parts of the state of a stage."""

    TENSORS = "all parameters and buffers of a module, by name"
    STATE_DICT = "what state_dict of a module returns"
    EXTRA_STATE = "what get_extra_state of its modules returns, by their numbers in modules()"
    GRADS = "the gradient of each parameter of a module, by name; None if it has none"
    ATTRIBUTES = "the plain attributes of each module, in the order of modules()"
    REQUIRES_GRAD = "requires_grad of each parameter, in the order of parameters()"
    OBJECTS = "other attributes: objects, pickled together, and tensors that are no buffers"
    OPTIMIZER = "the optimizer states in this process, by the number of the parameter in the whole optimizer"
    WHOLE_OPTIMIZER = "the optimizer states of all replicas, gathered on the first replica"


class Part(NamedTuple):
    """A part of the state of a stage: its kind, and the number of the module or of the optimizer.

    Module 0 holds the layers of the stage, and module ``k`` holds its layers in the ``k``-th copy of the model.
    """

    kind: PartKind
    number: int = 0


class Piece(NamedTuple):
    """Some bytes of a tensor on the shelf: the flattened path of the tensor, and the range of bytes of its storage."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class ShelvedLayout:
    """Shape, strides and dtype of a tensor on the shelf, which fills its storage without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "ShelvedLayout":
        """Return the layout of a tensor, or the layout of a copy without gaps."""
        stride = torch.empty_like(tensor, device="meta").stride()
        return cls(tuple(tensor.shape), stride, tensor.dtype)

    def empty(self, device: str = "cpu") -> Tensor:
        """Return a new tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of the bytes of a tensor without gaps, in the order of its storage."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def on_shelf(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a tree that can be on a shelf, by flattened path, and the tree with their layouts.

    All other tensors, such as sparse tensors, stay in the tree, on the CPU.
    """

    def described(tensor: Tensor) -> Any:
        return ShelvedLayout.of(tensor) if _is_plain(tensor) else tensor.detach().cpu()

    tensors = {path: _without_gaps(tensor.detach()) for path, tensor in flat(tree).items() if _is_plain(tensor)}
    return tensors, tree_map_only(Tensor, described, tree)


def _without_gaps(tensor: Tensor) -> Tensor:
    like = ShelvedLayout.of(tensor)
    return tensor if tensor.stride() == like.stride else torch.empty_like(tensor).copy_(tensor)


def _is_plain(tensor: Tensor) -> bool:
    if special_layout(tensor) or tensor.is_meta:
        return False
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not (tensor.is_conj() or tensor.is_neg())
