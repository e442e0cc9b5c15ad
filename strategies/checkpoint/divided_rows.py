"""Checkpoints of ranks that divide every parameter and its optimizer states by rows: ZeRO stage 3.

full      every rank ──rows, tensor by tensor──▶ rank 0, which has the checkpoint of one process in host memory
sharded   every rank: its rows ──▶ torch.distributed.checkpoint.save ──▶ its own file;  rank 0: meta.pt
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from strategies.checkpoint.ranks import DividedStates
from strategies.checkpoint.references import InShards, Unread, with_values
from strategies.checkpoint.save_and_load import load_tensors
from strategies.common.torch_compat import tree_map_only
from strategies.common.trees import flat, with_tensors
from strategies.optim.restricted import is_by_element, parameters_of
from strategies.sharding.model import divided_by_rows
from strategies.sharding.rows import gather_rows, own_rows, rows_of, whole_shape


def read_rows(
    unread: Unread, state: Mapping[str, Any], parameters: Mapping[str, DTensor], group: ProcessGroup
) -> dict[str, Any]:
    """Read the weights of a sharded checkpoint: only this rank's rows of divided parameters, and all other tensors.

    Args:
        unread: The tensors of the checkpoint that have not been read.
        state: The state dict in the checkpoint, which ``on_load_checkpoint`` may have changed.
        parameters: The divided parameters, by name.
        group: The ranks, on gloo.
    """
    mesh, rows, keys = DeviceMesh.from_group(group, "cpu"), dict[str, DTensor](), dict[str, str]()
    located = unread.located(state, "state_dict")
    for name, p in parameters.items():
        stored = located.get(name)
        if isinstance(stored, InShards) and stored.is_whole and stored.size == p.shape:
            keys[name] = stored.key
            rows[stored.key] = divided_by_rows(torch.empty(p.to_local().shape, dtype=stored.dtype), p.shape, mesh)
    load_tensors({key: own for key, own in rows.items() if own.to_local().numel()}, unread.shards)
    undivided = with_values({name: value for name, value in located.items() if name not in keys})
    return {name: rows[keys[name]] if name in keys else undivided[name] for name in state}


def divided_states(num_entries: Sequence[Mapping[tuple[int, str], int]]) -> set[tuple[int, str]]:
    """Return which states are divided by rows, given as number of the parameter and name of the state.

    A state of one entry may be a rank's only row, or a value for the whole parameter, such as a number of steps. It is
    the latter if another rank has more rows of the parameter. If no rank has, states of the same name for other
    parameters decide.

    Args:
        num_entries: For each rank, the number of entries of each state; 0 for a state that does not have one entry
            for each element of the rank's rows.

    >>> sorted(divided_states([{(0, "mean"): 2, (0, "step"): 0, (1, "mean"): 1, (1, "step"): 1}] * 2))
    [(0, 'mean'), (1, 'mean')]
    """
    keys = {key for own in num_entries for key in own}
    by_element = {key for key in keys if all(own.get(key, 1) for own in num_entries)}
    clear = {key for key in by_element if any(own.get(key, 1) > 1 for own in num_entries)}
    undivided = {name for _, name in keys - by_element} - {name for _, name in clear}
    return {key for key in by_element if key in clear or key[1] not in undivided}


class RowStates(DividedStates):
    """Optimizer states that are divided by rows: every rank has some rows of each state.

    Args:
        group: The ranks, on gloo.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self._mesh = DeviceMesh.from_group(group, "cpu")

    def _whole(self, optimizer: Optimizer) -> dict[str, Any]:
        state = self._converted(optimizer, self._gathered_rows)
        return state if self._group.rank() == 0 else {}

    def _parts(self, optimizer: Optimizer) -> dict[str, Any]:
        state = self._converted(optimizer, self._divided_rows)
        if self._group.rank() > 0:  # rank 0 writes the undivided values
            state["state"] = {
                number: _only_rows(own) for number, own in state["state"].items() if isinstance(number, int)
            }
        return state

    def _converted(
        self, optimizer: Optimizer, convert: Callable[[Tensor, Tensor, torch.Size], Tensor | None]
    ) -> dict[str, Any]:
        """Return the state dict with ``convert(rows, parameter, shape of the whole tensor)`` in place of rows."""
        state = optimizer.state_dict()
        rank, size = self._group.rank(), self._group.size()
        parameters = dict(enumerate(parameters_of(optimizer)))
        num_rows = {number: len(rows_of(p.shape[0], rank, size)) for number, p in parameters.items()}
        own = {number: flat(state["state"][number]) for number in parameters if number in state["state"]}
        num_entries = {
            (number, name): value.numel() * is_by_element(value, (num_rows[number], *parameters[number].shape[1:]))
            for number, values in own.items()
            for name, value in values.items()
        }
        everywhere: list[Any] = [None] * size
        dist.all_gather_object(everywhere, num_entries, group=self._group)
        divided, whole = divided_states(everywhere), dict[Any, Any]()
        for number, values in own.items():
            p, rows = parameters[number], {name: v for name, v in values.items() if (number, name) in divided}
            done: Any = {name: convert(v, p, whole_shape(v, p.shape, num_rows[number])) for name, v in rows.items()}
            whole[number] = with_tensors(state["state"][number], done)
        return {**state, "state": {**whole, **{key: own for key, own in state["state"].items() if key not in whole}}}

    def _gathered_rows(self, rows: Tensor, parameter: Tensor, shape: torch.Size) -> Tensor | None:
        return gather_rows(rows, shape, parameter.shape, self._group)

    def _divided_rows(self, rows: Tensor, parameter: Tensor, shape: torch.Size) -> Tensor:
        return divided_by_rows(rows.detach().cpu(), shape, self._mesh)

    def _own_part(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> dict[Any, Any]:
        part: dict[Any, Any] = {key: value for key, value in states.items() if not isinstance(key, int)}
        for number, parameter in enumerate(parameters_of(optimizer)):
            rows = rows_of(parameter.shape[0], self._group.rank(), self._group.size())
            if len(rows) and parameter.numel() and number in states:
                part[number] = self._rows(states[number], parameter)
        return part

    def _rows(self, state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Read the state of one parameter, and return this rank's rows of it."""
        rank, size = self._group.rank(), self._group.size()

        def own(value: Tensor) -> Tensor:
            if not is_by_element(value, parameter.shape):
                return value
            return own_rows(value, parameter.shape, rank, size).clone()

        rows: dict[str, Any] = tree_map_only(Tensor, own, with_values(state))
        return rows


def _only_rows(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state without its undivided values."""
    return {
        name: _only_rows(value) if isinstance(value, dict) else value
        for name, value in state.items()
        if isinstance(value, dict | DTensor)
    }
