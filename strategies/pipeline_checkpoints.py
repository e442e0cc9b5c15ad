"""Checkpoints of a pipeline: what the stages hold becomes one process's checkpoint, and the other way round."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.base import StrategyPlugin
from strategies.checkpoint.background import snapshot
from strategies.checkpoint.shards import load
from strategies.checkpoint.stage_shards import load_optimizer_states, save, shelve
from strategies.checkpoint.validate import Place, check_fit, load_whole, nowhere, places
from strategies.common.torch_compat import default_group
from strategies.common.trees import flat, take_over
from strategies.lightning.compat import is_stand_in, unwrapped
from strategies.lightning.restarts import Restarts
from strategies.lightning.weight_averaging import averages_weights
from strategies.optim.restricted import check_optimizer_states, parameters_of
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.stage.randomness import Seeds
from strategies.sharding.states import whole_state_dict


class PipelineCheckpoints(StrategyPlugin):
    """The part of :class:`~strategies.RPCSequentialStrategy` that saves and loads."""

    _pipeline: Pipeline | None
    _seeds: Seeds | None
    _given_balance: list[int] | Literal["even"] | None
    _module_path: str
    _divides_states: bool
    _gathered: dict[str, Tensor]
    """What the other stages have given for the weights in the next checkpoint, by name."""
    _gathered_states: dict[Optimizer, dict[Any, Any]]
    """The same for the states of optimizers, by the numbers of parameters."""
    _shards: Path | None = None
    _restarts: Restarts | None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of every stage, gathered one stage after another; on the first replica only, which writes."""
        if not self.is_global_zero:
            return {}
        state = self._pipeline.state if self._pipeline is not None else None
        model = self.lightning_module
        # With an average there are two sets of weights, of which one is in none of the parts.
        whole = self._state_dict_type == "full" or (model is not None and averages_weights(model.trainer))
        in_parts = state is not None and not whole
        with state.without_values() if state is not None and in_parts else nullcontext():
            gathered = super().lightning_module_state_dict()
        if state is not None:
            elsewhere = {name for name, value in self._named_tensors() if value.is_meta}
            self._gathered = {name: value for name, value in gathered.items() if name in elsewhere}
        return gathered

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer over all stages, as one process would have it; on the first replica only."""
        if not (self.is_global_zero or self._divides_states):
            return {}
        own = unwrapped(optimizer)
        if is_stand_in(own):
            return super().optimizer_state(optimizer)
        if self._pipeline is None:
            divided = self._divides_states and torch.distributed.is_initialized()
            return whole_state_dict(own, default_group()) if divided else super().optimizer_state(optimizer)
        state = self._pipeline.optimizers.state_dict(own, values=self._state_dict_type == "full")
        self._gathered_states[own] = self._elsewhere(own, state)
        return state if self.is_global_zero else {}

    def _elsewhere(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[Any, Any]:
        numbers = [number for number, p in enumerate(parameters_of(optimizer)) if p.is_meta]
        return {number: state["state"][number] for number in numbers if number in state["state"]}

    def _refresh_gathered(self) -> None:
        """Brings what has been gathered up to date, after a method of an optimizer was called.

        In one process a state dict shares its tensors with the model and the optimizers, so it shows what a hook such
        as ``on_save_checkpoint`` has changed.
        """
        if self._pipeline is None or self._state_dict_type == "sharded":  # each stage writes what it has then
            return
        if self._gathered:
            before, now = self._gathered, self.lightning_module_state_dict()
            take_over(before, {name: now[name] for name in before})
            self._gathered = before
        for optimizer, states in self._gathered_states.items():
            take_over(states, self._elsewhere(optimizer, self._pipeline.optimizers.state_dict(optimizer)))

    def _forget_gathered(self) -> None:
        self._gathered, self._gathered_states = {}, {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Writes the checkpoint, for which Lightning has gathered the state of every stage.

        Where the layers' random numbers stand goes under its key ``relay``, unless it holds weights only.
        """
        resumable = "optimizer_states" in checkpoint
        if self._seeds is not None and resumable:
            checkpoint.setdefault("relay", {})["seeds"] = self._seeds.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._forget_gathered()
        if resumable and self._restarts is not None:
            self._restarts.checkpoint_saved(filepath)

    def _settle(self) -> None:
        if self._background is not None:
            self._background.settle()  # stages may be writing

    def _save_in_parts(self, checkpoint: dict[str, Any], path: Path) -> None:
        background, pipeline = self._background, self._pipeline
        if not self.is_global_zero:
            if self._divides_states:  # the first replica gathers at this moment
                shelve({}, pipeline, self._module_path, copies=False)
            return
        if background is not None:
            background.wait()
            checkpoint = snapshot(checkpoint)
        names = shelve(checkpoint, pipeline, self._module_path, copies=background is not None)
        write = partial(save, checkpoint, path, pipeline, names)
        if background is None:
            write()
        else:
            background.save(write)

    def load_checkpoint(self, checkpoint_path: str | Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint; a training that goes on from it draws the random numbers that would have come next."""
        self._shards = None
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        model, state = self.lightning_module, checkpoint.get("relay", {}).get("seeds")
        if state is not None and model is not None and model.trainer.state.fn == TrainerFn.FITTING:
            self._seeds = self._seeds or Seeds(0)
            self._seeds.load_state_dict(state)
        return checkpoint

    def _load_in_parts(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        # The model is whole in this process by now, so the weights are read here; each stage reads its own optimizer
        # states, when it has got its layers.
        checkpoint, self._shards = load(path, ["state_dict"], weights_only)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives each stage the optimizer states of its parameters."""
        if self._shards is None or self._pipeline is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        check_optimizer_states([unwrapped(own) for own in self.optimizers], checkpoint["optimizer_states"])
        load_optimizer_states(checkpoint["optimizer_states"], self._shards, self._pipeline)

    def _private_tensors(self) -> list[Tensor]:
        return [*self._gathered.values(), *flat(self._gathered_states).values()]

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        assert self.lightning_module is not None
        yield from self.lightning_module.named_parameters(remove_duplicate=False)
        yield from self.lightning_module.named_buffers(remove_duplicate=False)

    def rpc_save_model(self, trainer: Trainer, save_model_fn: Callable[[Trainer, Any], Any], filepath: Any) -> None:
        """Calls ``save_model_fn(trainer, filepath)`` while the model has the weights of every stage.

        As in Lightning 1.3: the pipelined module of ``trainer.lightning_module`` is a plain ``nn.Sequential`` with real
        values meanwhile, which can be pickled, copied or exported. Other stages' layers are copies: changing them
        changes nothing in the run.
        """
        state = self._pipeline.state if self._pipeline is not None else None
        if state is None:
            save_model_fn(trainer, filepath)
            return
        parent, _, name = self._module_path.rpartition(".")
        holder: Any = attrgetter(parent)(trainer.lightning_module) if parent else trainer.lightning_module
        pipelined = getattr(holder, name)
        setattr(holder, name, state.whole())
        try:
            save_model_fn(trainer, filepath)
        finally:
            setattr(holder, name, pipelined)

    def _load_whole(self, pipeline: Pipeline) -> list[Callable[[], None]]:
        """Has the model refuse what does not fit while the pipeline runs, before any stage has got a part of it."""
        model = self.lightning_module
        assert model is not None

        def staying_here() -> AbstractContextManager[Any]:
            return pipeline.state.staying_here() if pipeline.state is not None else nullcontext()

        return load_whole(model, self._module_path, pipeline.stages, staying_here)

    def _check_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        if self._pipeline is not None:
            return  # the model does so itself
        model = self.lightning_module
        assert model is not None
        module = dict(model.named_modules()).get(self._module_path)
        place: Place = nowhere
        given = self._given_balance
        if given is not None and given != "even" and isinstance(module, nn.Sequential):
            place = places(cut(module, given), f"{self._module_path}.")
        check_fit(model, state, strict=strict, place=place)
