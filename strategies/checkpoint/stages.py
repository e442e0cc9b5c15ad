"""Checkpoints of a pipeline: the stages' state under the names of one process.

    full      every stage ──state, one stage after another──▶ driver, which has the checkpoint of one process

    sharded             driver ──── shelve ───▶ every stage sets its tensors aside, in order with its other commands
              thread of driver ──── write ────▶ every stage writes them, beside its other commands; the driver its own
              thread of driver: .metadata and meta.pt, which make the files a checkpoint

Workers are in no process group that ``torch.distributed`` knows, so ``torch.distributed.checkpoint.save`` cannot
coordinate them. Its planner and its writer are used by themselves: the driver makes the plan, for which shapes
suffice, and RPC brings each stage its part of the plan.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from strategies.checkpoint.store import read_tensors, sharded_tensors, writing_shards
from strategies.checkpoint.validate import check_before_loading
from strategies.common.trees import flat, layouts, take_over, with_meta_tensors, with_tensors
from strategies.optim.restricted import parameters_of, part_of
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.driver import Pipeline

_NUMBER = 0
"""Place on the shelf of a stage; one checkpoint is written or read at a time."""


class StageStates:
    """The state of a running pipeline, gathered for checkpoints and loaded from them.

    Args:
        pipeline: The pipeline.
        model: The model that the pipelined module is a part of.
        path: Dotted path of the pipelined module within ``model``.
    """

    def __init__(self, pipeline: Pipeline, model: nn.Module, path: str) -> None:
        self._pipeline, self._model, self._path = pipeline, model, path
        self._weights: dict[str, Tensor] = {}
        self._states: dict[Optimizer, dict[Any, Any]] = {}
        self.has_gathered = False
        """Whether there is anything to :meth:`forget`."""

    # Gathering on the driver

    def weights(self, *, values: bool) -> dict[str, Any]:
        """The model's ``state_dict``; without ``values``, tensors of other stages are on the ``meta`` device."""
        state, self.has_gathered = self._pipeline.state, True
        with state.without_values() if state is not None and not values else nullcontext():
            gathered: dict[str, Any] = self._model.state_dict()
        if state is not None:
            named = [
                *self._model.named_parameters(remove_duplicate=False),
                *self._model.named_buffers(remove_duplicate=False),
            ]
            elsewhere = {name for name, tensor in named if tensor.is_meta}
            self._weights = {name: value for name, value in gathered.items() if name in elsewhere}
        return gathered

    def optimizer_state(self, optimizer: Optimizer, *, values: bool) -> dict[str, Any]:
        """The state dict of an optimizer; without ``values``, tensors of other stages are on the ``meta`` device."""
        state = self._pipeline.optimizers.state_dict(optimizer, values=values)
        self._states[optimizer] = _states_elsewhere(optimizer, state)
        self.has_gathered = True
        return state

    def gathered_tensors(self) -> list[Tensor]:
        """The tensors received from other stages, to which only the checkpoint refers."""
        return [*self._weights.values(), *flat(self._states).values()]

    def refresh(self) -> None:
        """Update the state dicts that were returned last, after a method of an optimizer was called.

        In one process a state dict shares its tensors with the model and the optimizers, so it reflects what a hook
        such as ``on_save_checkpoint`` changes through them.
        """
        if self._weights:
            before, now = self._weights, self.weights(values=True)
            take_over(before, {name: now[name] for name in before})
            self._weights = before
        for optimizer, states in self._states.items():
            take_over(states, _states_elsewhere(optimizer, self._pipeline.optimizers.state_dict(optimizer)))

    def forget(self) -> None:
        """Release what has been gathered."""
        self._weights, self._states, self.has_gathered = {}, {}, False

    # Sharded checkpoints

    def prepare_sharded(self, checkpoint: Mapping[str, Any], path: Path, *, needs_copy: bool) -> Callable[[], None]:
        """Have every stage set aside the tensors that it will write, and return when all have.

        Args:
            checkpoint: The checkpoint; tensors on the ``meta`` device are those of other stages.
            path: The directory of the checkpoint.
            needs_copy: Whether training continues before the checkpoint is written.

        Returns:
            The function that writes the checkpoint, on any thread.
        """
        return partial(self._save_sharded, checkpoint, path, self._set_aside(checkpoint, needs_copy))

    def join_first_replica(self) -> None:
        """On other replicas: take part while the stages of the first one gather states that replicas have divided."""
        self._set_aside({}, needs_copy=False)

    def _set_aside(self, checkpoint: Mapping[str, Any], needs_copy: bool) -> list[dict[str, str]]:
        """Returns, for each stage, the keys of the tensors that it writes, each with the tensor's key on that stage."""
        remotes = self._pipeline.remotes
        keys: list[dict[str, str]] = [{} for _ in remotes]
        first_of: dict[int, str] = {}  # tied tensors are one object
        for key, tensor in sharded_tensors(checkpoint).items():
            if tensor.is_meta:
                first = first_of.setdefault(id(tensor), key.replace(f"state_dict.{self._path}.", "state_dict.", 1))
                keys[self._stage_of(first)][key] = first
        replies = [
            remote.start(StageCommands.shelve, _NUMBER, own, needs_copy)
            for remote, own in zip(remotes, keys, strict=True)
        ]
        for remote, reply in zip(remotes, replies, strict=True):
            remote.result(reply)
        return keys

    def _stage_of(self, key: str) -> int:
        """The stage that writes a tensor; a tied one is written by its owner, the first stage that uses it."""
        part, place, *rest = key.split(".")
        if part == "state_dict":
            return next(i for i, layers in enumerate(self._pipeline.stages) if place in layers._modules)
        number = int(rest[1])
        return next(i for i, own in enumerate(self._pipeline.optimizers.numbers) if number in own[int(place)])

    def _save_sharded(self, checkpoint: Mapping[str, Any], path: Path, keys: list[dict[str, str]]) -> None:
        tensors, remotes = sharded_tensors(checkpoint), self._pipeline.remotes
        own = {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}
        of_stages = [{key: tensors[key] for key in theirs} for theirs in keys]
        with writing_shards(checkpoint, path) as shards:
            writer = dcp.FileSystemWriter(shards)
            plans, metadata = dcp.DefaultSavePlanner().create_global_plan(
                [*map(plan_shard, of_stages), plan_shard(own)]
            )
            *stage_plans, own_plan = writer.prepare_global_plan(plans)
            replies = [
                remote.beside(_write_shelved, shards, plan) for remote, plan in zip(remotes, stage_plans, strict=True)
            ]
            try:
                written = write_shard(shards, own_plan, own)
            finally:
                errors = [error for reply in replies if (error := _error_of(reply)) is not None]
            if errors:
                raise errors[0]
            writer.finish(metadata, [*(reply.value() for reply in replies), written])

    def load_optimizer_states(self, states: list[dict[str, Any]], shards: Path) -> None:
        """Load the optimizer states of a sharded checkpoint; each stage reads those of its own parameters.

        Nothing is loaded before every stage has read its part.

        Args:
            states: The state dicts of all optimizers, with tensors on the ``meta`` device.
            shards: The directory with the values.
        """
        optimizers, prefix = self._pipeline.optimizers, "optimizer_states"

        def part(numbers: Callable[[int], list[int]]) -> dict[int, Any]:
            return {k: {"state": part_of(state["state"], numbers(k))} for k, state in enumerate(states)}

        replies = [
            remote.beside(_read_to_shelf, shards, layouts(part(numbers.__getitem__)), prefix)
            for remote, numbers in zip(self._pipeline.remotes, optimizers.numbers, strict=True)
        ]
        here = [[n for n, p in enumerate(parameters_of(own)) if not p.is_meta] for own in optimizers.optimizers]
        mine = part(here.__getitem__)
        mine = with_tensors(mine, read_tensors(shards, flat(mine, prefix)), prefix)
        for reply in replies:
            reply.wait()
        for remote in self._pipeline.remotes:
            remote.start(StageCommands.load_shelved_optimizer_states, _NUMBER)
        for k, optimizer in enumerate(optimizers.optimizers):
            optimizers.load_here(optimizer, {**states[k], **mine[k]})
        self._pipeline.wait()

    # The model

    def check_before_loading(self) -> list[Callable[[], None]]:
        """Make ``load_state_dict`` of the model refuse what does not fit, before any stage receives a part of it.

        Returns:
            Functions that undo this.
        """

        def staying_here() -> AbstractContextManager[Any]:
            return self._pipeline.state.staying_here() if self._pipeline.state is not None else nullcontext()

        return check_before_loading(self._model, self._path, self._pipeline.stages, staying_here)

    @contextmanager
    def whole_module(self) -> Iterator[None]:
        """Within this, the pipelined module of the model is a plain module with the values of all stages."""
        if self._pipeline.state is None:
            yield
            return
        parent, _, name = self._path.rpartition(".")
        holder: Any = attrgetter(parent)(self._model) if parent else self._model
        pipelined = getattr(holder, name)
        setattr(holder, name, self._pipeline.state.whole())
        try:
            with self._pipeline.calls_in_this_process():
                yield
        finally:
            setattr(holder, name, pipelined)


def _states_elsewhere(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[Any, Any]:
    numbers = [number for number, p in enumerate(parameters_of(optimizer)) if p.is_meta]
    return {number: state["state"][number] for number in numbers if number in state["state"]}


def plan_shard(tensors: Mapping[str, Tensor]) -> SavePlan:
    """The part of the plan for one process; shapes and dtypes of its tensors suffice."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    return planner.create_local_plan()


def write_shard(shards: Path, plan: SavePlan, tensors: Mapping[str, Tensor]) -> list[WriteResult]:
    """Write the file of one process, and return when it is on the disk."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    planner.create_local_plan()
    return dcp.FileSystemWriter(shards).write_data(planner.finish_plan(plan), planner).value()


def _write_shelved(stage: Any, shards: Path, plan: SavePlan) -> list[WriteResult]:
    """Runs on an RPC thread of a worker: write what its stage (an ``RRef``) has set aside."""
    return write_shard(shards, plan, stage.local_value().hosted.shelf.pop(_NUMBER))


def _read_to_shelf(stage: Any, shards: Path, layout: Any, prefix: str) -> None:
    """Runs on an RPC thread of a worker: read tensors, and leave them on the shelf of its stage (an ``RRef``)."""
    bare = with_meta_tensors(layout)
    stage.local_value().hosted.shelf[_NUMBER] = with_tensors(bare, read_tensors(shards, flat(bare, prefix)), prefix)


def _error_of(reply: Any) -> Exception | None:
    try:
        reply.wait()
    except Exception as error:  # of any kind: from the function, or from RPC if the worker has died
        return error
    return None
