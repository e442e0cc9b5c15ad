"""The state of a stage in the process that runs it: capture parts of it, and place parts that the driver sends.

capture(part)  ──▶ a tree of tensors, for the shelf       place(part, content)  ◀── content from the driver
whole()        ──▶ everything, for another process        (``StageState``)
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.random_seeds import ProcessRandomState
from strategies.common.stage_layers import StageLayers
from strategies.common.torch_compat import tree_map_only
from strategies.optim.restricted import load_states, parameters_of, part_of, taken_apart
from strategies.pipeline.construction.stored import Stored
from strategies.pipeline.control.parts import Part, PartKind
from strategies.pipeline.optim.replicas import SharedSteps
from strategies.pipeline.state.mirror import has_extra_state, plain_attributes, set_attributes
from strategies.pipeline.state.objects import objects_of
from strategies.pipeline.state.stage_state import StageState


class HeldState:
    """The state of a stage between two passes, in the objects that the process trains.

    Args:
        state: The initial state of the stage, on its device. Only its layers, copies, numbers, computed values and
            shelf are used.
        optimizers: The user's optimizers, restricted to this stage.
        device: The device of the stage.
        shared_steps: Divides optimizer states among the replicas of the stage; ``None`` if they are not divided.
    """

    def __init__(
        self,
        state: StageState,
        optimizers: list[Optimizer],
        device: torch.device,
        shared_steps: SharedSteps | None = None,
    ) -> None:
        self._device = device
        self.layers, self.copies, self.optimizers = state.layers, state.copies, optimizers
        self.modules: Sequence[StageLayers] = [state.layers, *state.copies]
        self.numbers = state.numbers
        """For each optimizer, the numbers of this stage's parameters in the whole optimizer."""
        self.computed = state.computed
        """Results of operations that the driver refers to, by number."""
        self.shelf = state.shelf
        """Tensors on the shelf, by number and flattened path.

        Commands add and remove tensors between passes. RPC threads read the tensors (``RemoteStage.beside``), so that
        the stage can run passes at the same time.
        """
        self.shared_steps = shared_steps
        self.states_read: dict[Stored, Tensor] = {}
        """States of optimizers that an RPC thread has read from a checkpoint, until they are placed."""

    def capture(self, part: Part) -> Any:
        """Return a part of the state. Its tensors are the stage's tensors, on the stage's device."""
        kind, number = part
        if kind is PartKind.TENSORS:
            module = self.modules[number]
            return dict([*module.named_parameters(), *module.named_buffers(remove_duplicate=False)])
        if kind is PartKind.STATE_DICT:
            return self.modules[number].state_dict()
        if kind is PartKind.EXTRA_STATE:
            modules = enumerate(self.modules[number].modules())
            return {k: m.get_extra_state() for k, m in modules if has_extra_state(m)}
        if kind is PartKind.GRADS:
            return {name: p.grad for name, p in self.modules[number].named_parameters()}
        if kind is PartKind.ATTRIBUTES:
            return plain_attributes(self.modules[number])
        if kind is PartKind.OBJECTS:
            return objects_of(self.modules[number])
        states = self._states_of(number)
        if kind is PartKind.WHOLE_OPTIMIZER and self.shared_steps is not None:
            return self.shared_steps.gathered(states)
        return states

    def place(self, part: Part, content: Any) -> None:
        """Replace a part of the state.

        Args:
            part: A state dict, buffers, attributes, ``requires_grad`` flags, or the states of an optimizer.
            content: A result of :meth:`capture`, or some of its entries; the driver reports missing entries. Attributes
                are given by the place of their module. For an optimizer, it may have the states of the whole optimizer,
                and a :class:`~strategies.pipeline.construction.stored.Stored` in place of a tensor.
        """
        kind, number = part
        if kind is PartKind.STATE_DICT:
            _load(self.modules[number], *content)
        elif kind is PartKind.TENSORS:
            self._place_buffers(self.modules[number], content)
        elif kind is PartKind.ATTRIBUTES:
            set_attributes(self.modules[number], content)
        elif kind is PartKind.REQUIRES_GRAD:
            for parameter, flag in zip(self.modules[number].parameters(), content, strict=True):
                parameter.requires_grad_(flag)
        else:
            assert kind is PartKind.OPTIMIZER, f"{kind} cannot be placed"
            self._place_states(number, content)

    def whole(self) -> StageState:
        """Return the whole state, for another process."""
        named = self.layers.named_parameters()
        return StageState(
            layers=self.layers,
            copies=self.copies,
            optimizers=[taken_apart(optimizer) for optimizer in self.optimizers],
            numbers=self.numbers,
            grads={name: p.grad for name, p in named if p.grad is not None},
            computed=self.computed,
            shelf=self.shelf,
            random_state=ProcessRandomState(self._device),
            owners=None if self.shared_steps is None else dict(self.shared_steps.owners),
            means=[] if self.shared_steps is None else self.shared_steps.means,
        )

    def _states_of(self, number: int) -> dict[int, Any]:
        own = self.optimizers[number]
        pairs = zip(self.numbers[number], parameters_of(own), strict=True)
        return {number: own.state[p] for number, p in pairs if own.state.get(p)}

    def _place_states(self, number: int, states: Mapping[Any, Any]) -> None:
        states = tree_map_only(Stored, self._value_of, states)
        places = {number: place for place, number in enumerate(self.numbers[number])}
        own = {places.get(key, key): state for key, state in part_of(states, self.numbers[number]).items()}
        if self.shared_steps is not None:
            own = self.shared_steps.own_part(self.optimizers[number], own)
        load_states(self.optimizers[number], own)

    def _value_of(self, stored: Stored) -> Tensor:
        return self.states_read.pop(stored) if stored in self.states_read else stored.read()

    def _place_buffers(self, layers: StageLayers, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            path, _, own = name.rpartition(".")
            layers.get_submodule(path)._buffers[own] = buffer.to(self._device)


def _load(layers: StageLayers, names: Iterable[str], state: Mapping[str, Any]) -> None:
    """Load a state dict into the layers with these names.

    The state dict of one of several lists lacks the entries that the other lists' layers may read when they are loaded.
    """
    loaded = StageLayers()
    loaded._modules.update({name: layers._modules[name] for name in names})
    loaded.load_state_dict(state, strict=False)
