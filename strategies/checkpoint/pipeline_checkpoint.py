"""Checkpoints of a pipeline: the state of all stages, with the names that one process would use.

    collecting   driver ─── capture ───▶ every stage puts its state on a shelf, in the order of its commands
                 driver ◀── layouts ──── names, shapes and dtypes; values travel when they are read

    full         thread ◀── tensors ──── one at a time; the thread writes each tensor when it arrives

    sharded      thread ──── write ────▶ every stage writes its part while it runs other commands; so does the driver
                 thread: .metadata and meta.pt, which make the files a checkpoint

The thread is the driver's main thread, unless checkpoints are written in the background. In that case, the stages
first copy the tensors on their shelves.

``torch.distributed.checkpoint.save`` cannot coordinate the workers, because they are in no process group that
``torch.distributed`` knows. Relay therefore uses only its planner and its writer. The driver makes the plan from the
shapes, and sends each stage its part of the plan by RPC.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from strategies.checkpoint.references import InShards, Unread, read_together, with_values
from strategies.checkpoint.save_and_load import save_file, sharded_tensors, without_values, writing_shards
from strategies.checkpoint.streaming import LateTensors
from strategies.checkpoint.validate import check_before_loading
from strategies.common.errors import WorkerLost
from strategies.common.joined_lists import JoinedLists
from strategies.common.torch_compat import changed_before_loading, tree_leaves
from strategies.common.trees import on_cpu
from strategies.optim.restricted import parameters_of, part_of
from strategies.pipeline.control.client import RemoteStage, Reply
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.parts import Part, PartKind
from strategies.pipeline.control.shelf import Fetch, among_commands, beside
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.state.shelved import ShelvedTensor, is_shelved, put_values, shelved_tensors, values_of
from strategies.sharding.divided_layers import tensor_group

ShelfPaths = dict[str, tuple[int, str]]
"""Tensors on the shelf of a stage: key in the checkpoint ──▶ number of the part on the shelf, and path in this part."""


class StageStates:
    """The state of a running pipeline, gathered for checkpoints and loaded from them.

    Args:
        pipeline: The pipeline.
        model: The model that the pipelined module is a part of.
        path: Dotted path of the pipelined module within ``model``.
    """

    def __init__(self, pipeline: Pipeline, model: nn.Module, path: str) -> None:
        self._pipeline, self._model, self._path = pipeline, model, path
        self._weights: dict[str, Any] = {}
        self._states: dict[Optimizer, dict[Any, Any]] = {}
        self._fetched: list[Tensor] = []
        self.has_gathered = False
        """Whether the stages hold a shelf that :meth:`forget` would release."""

    # Collecting on the driver

    def weights(self) -> dict[str, Any]:
        """Return the model's ``state_dict``; tensors of remote stages are :class:`ShelvedTensor` objects."""
        self.has_gathered = True
        with ExitStack() as late:
            for state in self._pipeline.states:
                late.enter_context(state.reading_late())
            gathered: dict[str, Any] = self._model.state_dict()
        if (divided := self._pipeline.divided) is not None:
            own = {name: gathered[name] for name, _ in self._model.named_parameters() if name in gathered}
            put_values(own)
            divided.check_equal(own, tensor_group())
            others = {n: value for n, value in divided.parts_in(gathered).items() if n not in own}  # tied ones
            put_values(others)
            gathered.update(divided.whole_weights({**own, **others}, tensor_group()))
        self._weights = {name: value for name, value in gathered.items() if isinstance(value, ShelvedTensor)}
        return gathered

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of an optimizer; tensors of remote stages are :class:`ShelvedTensor` objects."""
        state = self._pipeline.optimizers.state_dict(optimizer, shelved_tensors)
        if (divided := self._pipeline.divided) is not None:
            put_values(state)
            state["state"] = divided.whole_states(optimizer, state["state"], tensor_group())
        self._states[optimizer] = _states_elsewhere(optimizer, state)
        self.has_gathered = True
        return state

    def refresh(self) -> None:
        """Update the state dicts that were returned last, after a method of an optimizer was called.

        In one process, a state dict shares its tensors with the model and the optimizers. It therefore reflects what a
        hook such as ``on_save_checkpoint`` changes. A shelf also shares tensors, unless the method replaces them.
        """
        if self._pipeline.divided is not None and self.has_gathered:
            raise RuntimeError(
                "a method of an optimizer was called while a checkpoint was collected, such as in on_save_checkpoint; "
                f"with {self._pipeline.divided.option} the checkpoint has copies that do not follow. Call it before "
                "the checkpoint."
            )
        if self._weights:
            before, now = self._weights, self.weights()
            _take_over_shelved(before, {name: now[name] for name in before})
            self._weights = before
        for optimizer, states in self._states.items():
            now = self._pipeline.optimizers.state_dict(optimizer, shelved_tensors)
            _take_over_shelved(states, _states_elsewhere(optimizer, now))

    def forget(self) -> None:
        """Release the collected state."""
        self._weights, self._states, self._fetched, self.has_gathered = {}, {}, [], False

    # One file

    def prepare_file(self, checkpoint: Mapping[str, Any], path: Path, *, needs_copy: bool) -> Callable[[], None]:
        """Return the function that writes a checkpoint to one file, on any thread.

        Args:
            checkpoint: The checkpoint.
            path: The file.
            needs_copy: Whether training continues before the checkpoint is written.
        """
        if needs_copy:
            self._copy_shelved(checkpoint)
        return partial(save_file, checkpoint, path, late_tensors(beside if needs_copy else among_commands))

    def gather(self, checkpoint: dict[str, Any]) -> None:
        """Replace each :class:`ShelvedTensor` in a checkpoint with its values."""
        self._fetched += put_values(checkpoint)

    def gathered_tensors(self) -> list[Tensor]:
        """The values that :meth:`gather` fetched. Only the checkpoint refers to them."""
        return self._fetched

    def _copy_shelved(self, checkpoint: Mapping[str, Any]) -> None:
        parts = {leaf.relay_wanted.part: None for leaf in tree_leaves(checkpoint) if is_shelved(leaf)}
        for answer in [part.stage.ask(StageCommands.copy_shelved, part.number) for part in parts]:
            answer.wait()

    # Sharded checkpoints

    def prepare_sharded(self, checkpoint: Mapping[str, Any], path: Path, *, needs_copy: bool) -> Callable[[], None]:
        """Return the function that writes a checkpoint to a directory, on any thread.

        Args:
            checkpoint: The checkpoint. Each stage writes its tensors of the sharded entries.
            path: The directory of the checkpoint.
            needs_copy: Whether training continues before the checkpoint is written.
        """
        if needs_copy:
            self._copy_shelved(checkpoint)
        else:
            self._pipeline.wait()
        return partial(self._save_sharded, checkpoint, path)

    def _save_sharded(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        remotes = self._pipeline.remotes
        tensors, bare = sharded_tensors(checkpoint), sharded_tensors(without_values(checkpoint))
        names: list[ShelfPaths] = [{} for _ in remotes]
        for key, tensor in tensors.items():
            if isinstance(tensor, ShelvedTensor):
                part, there, _ = tensor.relay_wanted
                stage = next(i for i, remote in enumerate(remotes) if remote is part.stage)
                names[stage][key] = part.number, there
        own = {key: tensor for key, tensor in tensors.items() if not is_shelved(tensor)}
        with writing_shards(checkpoint, path, late_tensors(beside)) as shards:
            writer = dcp.FileSystemWriter(shards)
            plans, metadata = dcp.DefaultSavePlanner().create_global_plan(
                [*(plan_shard({key: bare[key] for key in theirs}) for theirs in names), plan_shard(own)]
            )
            *stage_plans, own_plan = writer.prepare_global_plan(plans)
            replies = [
                remote.beside(_write_shelved, shards, plan, theirs)
                for remote, plan, theirs in zip(remotes, stage_plans, names, strict=True)
            ]
            try:
                written = write_shard(shards, own_plan, own)
            finally:
                errors = [
                    error
                    for told in zip(remotes, replies, strict=True)
                    if (error := _error_of(*told, path)) is not None
                ]
            if errors:
                raise errors[0]
            writer.finish(metadata, [*(reply.wait() for reply in replies), written])

    def load_optimizer_states(self, states: list[dict[str, Any]], unread: Unread) -> None:
        """Load the optimizer states of a sharded checkpoint. Each stage reads the states of its parameters.

        No stage loads anything before every stage has read its part.

        Args:
            states: The state dicts of all optimizers, which ``on_load_checkpoint`` may have changed. Pre-hooks of the
                optimizers get them without values.
            unread: The tensors of the checkpoint that have not been read.
        """
        optimizers, remotes = self._pipeline.optimizers, self._pipeline.remotes
        states = [changed_before_loading(own, state) for own, state in zip(optimizers.optimizers, states, strict=True)]
        located = [unread.located(own["state"], f"optimizer_states.{k}.state") for k, own in enumerate(states)]
        here = [[n for n, p in enumerate(parameters_of(own)) if not p.is_meta] for own in optimizers.optimizers]
        theirs = [list(map(part_of, located, numbers)) for numbers in optimizers.numbers]
        replies = [
            remote.beside(
                _read_states, [leaf for leaf in tree_leaves(parts) if isinstance(leaf, InShards)], is_logged=True
            )
            for remote, parts in zip(remotes, theirs, strict=True)
        ]
        mine = with_values(list(map(part_of, located, here)))
        for reply in replies:
            reply.wait()
        for remote, parts in zip(remotes, theirs, strict=True):
            for k, part in enumerate(parts):
                remote.send(StageCommands.place, Part(PartKind.OPTIMIZER, k), on_cpu(part))
        for state, part, optimizer in zip(states, mine, optimizers.optimizers, strict=True):
            optimizers.load_here(optimizer, {**state, "state": part})
        self._pipeline.wait()

    # The model

    def check_before_loading(self) -> list[Callable[[], None]]:
        """Make the model's ``load_state_dict`` refuse a state dict that does not fit, before any stage receives values.

        Returns:
            Functions that undo this.
        """

        @contextmanager
        def staying_here() -> Iterator[None]:
            with ExitStack() as staying:
                for state in self._pipeline.states:
                    staying.enter_context(state.staying_here())
                yield

        module, stages = self._pipeline.module, self._pipeline.stages
        if isinstance(module, JoinedLists):
            paths = [start.removesuffix(".") for start, _ in module.parts]
            return check_before_loading(self._model, paths, stages, staying_here, are_full=True)
        return check_before_loading(self._model, [self._path], stages, staying_here)

    @contextmanager
    def whole_module(self) -> Iterator[None]:
        """Context in which the pipelined module of the model is a plain module with the values of all stages."""
        if not self._pipeline.states:
            yield
            return
        if self._pipeline.divided is not None:
            raise RuntimeError(
                f"rpc_save_model needs whole layers, but {self._pipeline.divided.option} divides them. Save a "
                "checkpoint."
            )
        module, kept = self._pipeline.module, []
        starts = [start for start, _ in module.parts] if isinstance(module, JoinedLists) else [f"{self._path}."]
        for start, state in zip(starts, self._pipeline.states, strict=True):
            parent, _, name = start.removesuffix(".").rpartition(".")
            holder: Any = attrgetter(parent)(self._model) if parent else self._model
            kept.append((holder, name, getattr(holder, name), state.whole()))
        try:
            for holder, name, _, whole in kept:
                setattr(holder, name, whole)
            with self._pipeline.calls_in_this_process():
                yield
        finally:
            for holder, name, pipelined, _ in kept:
                setattr(holder, name, pipelined)


def _states_elsewhere(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[Any, Any]:
    numbers = [number for number, p in enumerate(parameters_of(optimizer)) if p.is_meta]
    return {number: state["state"][number] for number in numbers if number in state["state"]}


def _take_over_shelved(tree: dict[Any, Any], now: Mapping[Any, Any]) -> None:
    """Copy the structure of a nested dict. Tensors of the same shape stay the same objects and use the new shelf."""
    for key, value in now.items():
        before = tree.get(key)
        if isinstance(before, ShelvedTensor) and isinstance(value, ShelvedTensor) and before.shape == value.shape:
            before.relay_source = value.relay_source
        elif isinstance(before, dict) and isinstance(value, Mapping):
            _take_over_shelved(before, value)
        else:
            tree[key] = value
    for key in [key for key in tree if key not in now]:
        del tree[key]


def late_tensors(fetch: Fetch) -> LateTensors:
    """Return how to write the :class:`ShelvedTensor` objects of a checkpoint."""
    return LateTensors(is_shelved, partial(values_of, fetch=fetch))


def plan_shard(tensors: Mapping[str, Tensor]) -> SavePlan:
    """Return the part of the plan for one process. Uses only the shapes and dtypes of its tensors."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    return planner.create_local_plan()


def write_shard(shards: Path, plan: SavePlan, tensors: Mapping[str, Tensor]) -> list[WriteResult]:
    """Write the file of one process, and return when it is on the disk."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    planner.create_local_plan()
    return dcp.FileSystemWriter(shards).write_data(planner.finish_plan(plan), planner).value()


def _write_shelved(stage: Any, shards: Path, plan: SavePlan, names: ShelfPaths) -> list[WriteResult]:
    """Write the tensors on the shelf of the stage behind an ``RRef``. Runs on an RPC thread of the stage's worker."""
    shelf = stage.local_value().hosted.held.shelf
    return write_shard(shards, plan, {key: shelf[number][path] for key, (number, path) in names.items()})


def _read_states(stage: Any, stored: list[InShards]) -> None:
    """Read optimizer states for the stage behind an ``RRef``. Runs on an RPC thread of the stage's worker."""
    stage.local_value().hosted.held.states_read = read_together(stored)


def _error_of(remote: RemoteStage, reply: Reply[Any], path: Path) -> Exception | None:
    """Return why a stage did not write its part of a checkpoint; ``None`` if it did."""
    try:
        reply.wait()
    except Exception as error:  # of any kind: raised by the function, or by RPC if the worker has died
        if isinstance(error, WorkerLost):
            return error
        what = f"{remote.description}, {remote.process.description}"
        failed = RuntimeError(f"{what}, could not write its part of the checkpoint {path}: {error}")
        failed.__cause__ = error
        return failed
    return None
