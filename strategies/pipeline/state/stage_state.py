"""The state of a stage between two passes: everything that another process needs to continue with the stage.

Every worker starts from such a state: of the layers in the driver's process, or of a snapshot of another worker. A
carrier brings the state to the worker (:mod:`strategies.pipeline.state.carriers`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.random_seeds import ProcessRandomState
from strategies.common.stage_layers import StageLayers
from strategies.common.trees import element_bytes, flat
from strategies.optim.restricted import move_states, numbers_of, put_together, restricted, taken_apart


@dataclass
class StageState:
    """The state of a stage, pickled as one object so that shared objects stay shared.

    Attributes:
        layers: The layers of the stage, named as in the whole module.
        copies: The same layers of copies of the model, such as averages, with separate values.
        optimizers: Class and attributes of each of the user's optimizers, restricted to this stage's parameters.
        numbers: For each optimizer, the numbers of this stage's parameters in the whole optimizer.
        grads: The gradients of the layers, by the name of the parameter. Missing parameters have no gradient.
        computed: Results of operations to which the driver refers, by number.
        shelf: Tensors on the shelf for the driver, by number and flattened path.
        random_state: The random state of the process; ``None`` if the new process starts with its own state.
        owners: The replica that steps each parameter, if the replicas of the stage divide its optimizer states.
        means: The parameters whose gradients are averages that only this replica has.
    """

    layers: StageLayers
    copies: list[StageLayers] = field(default_factory=list)
    optimizers: list[tuple[type[Optimizer], dict[str, Any]]] = field(default_factory=list)
    numbers: list[list[int]] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    computed: dict[int, Tensor] = field(default_factory=dict)
    shelf: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    random_state: ProcessRandomState | None = None
    owners: dict[Tensor, int] | None = None
    means: list[Tensor] = field(default_factory=list)

    @classmethod
    def capture(
        cls,
        layers: StageLayers,
        owned: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer] = (),
        copies: Sequence[StageLayers] = (),
    ) -> "StageState":
        """Return the state of layers in this process, for a new worker.

        Args:
            layers: The layers of the stage.
            owned: The parameters of the stage, without its copies of parameters that another stage owns.
            optimizers: The user's optimizers, over the parameters of all stages.
            copies: The same layers of copies of the model.
        """
        own = {id(parameter) for parameter in owned}
        return cls(
            layers,
            list(copies),
            [taken_apart(restricted(optimizer, owned)) for optimizer in optimizers],
            [numbers_of(optimizer, owned) for optimizer in optimizers],
            {name: p.grad for name, p in layers.named_parameters() if p.grad is not None and id(p) in own},
        )

    def place(self, device: torch.device) -> list[Optimizer]:
        """Move everything to the device of the stage, and set the gradients of the parameters.

        Returns:
            The optimizers.
        """
        self.layers.to(device)
        self.copies = [_moved(copy, device) for copy in self.copies]
        for name, parameter in self.layers.named_parameters():
            grad = self.grads.pop(name, None)
            parameter.grad = None if grad is None else grad.to(device)
        optimizers = [put_together(*parts) for parts in self.optimizers]
        for optimizer in optimizers:
            move_states(optimizer)  # they arrive on the CPU
        return optimizers


def differing(first: StageState, second: StageState) -> list[str]:
    """Return the names of the tensors in which two states of a stage differ, in any bit."""
    before, after = _named_tensors(first), _named_tensors(second)
    common = [name for name in before if name in after]
    return [
        *(name for name in common if not _is_same(before[name], after[name])),
        *(name for name in {**before, **after} if name not in common),
    ]


def _named_tensors(state: StageState) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, layers in [("", state.layers), *((f"copy {k} of ", copy) for k, copy in enumerate(state.copies, 1))]:
        for name, tensor in [*layers.named_parameters(), *layers.named_buffers()]:
            found[prefix + name] = tensor.detach()
    found |= {f"the gradient of {name}": grad for name, grad in state.grads.items()}
    names = {id(parameter): name for name, parameter in state.layers.named_parameters()}
    for k, (_, attributes) in enumerate(state.optimizers):
        for parameter, entries in attributes["state"].items():
            of = f"optimizer {k} of {names.get(id(parameter), 'a parameter')}"
            found |= {f"{name} of {of}": tensor for name, tensor in flat(entries).items()}
    return found | {f"the result of operation {number}": tensor for number, tensor in state.computed.items()}


def _is_same(first: Tensor, second: Tensor) -> bool:
    if (first.shape, first.dtype, first.layout) != (second.shape, second.dtype, second.layout):
        return False
    dense = [tensor if tensor.layout == torch.strided else tensor.to_dense() for tensor in (first, second)]
    return torch.equal(*map(element_bytes, dense))


def _moved(copy: StageLayers, device: torch.device) -> StageLayers:
    """Move a copy of the layers to ``device``. Averages that are on the CPU stay there, to save GPU memory."""
    tensors = (*copy.parameters(), *copy.buffers())
    return copy if all(tensor.device.type == "cpu" for tensor in tensors) else copy.to(device)
