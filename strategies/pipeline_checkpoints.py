"""Checkpoints of a pipeline: what the stages hold becomes one process's checkpoint, and the other way round."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.core.optimizer import _MockOptimizer
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from strategies.base import StrategyPlugin, unwrapped
from strategies.checkpoint_fit import Place, load_whole, nowhere, places
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.placement import cut
from strategies.pipeline.randomness import Seeds


class PipelineCheckpoints(StrategyPlugin):
    """The part of :class:`~strategies.RPCSequentialStrategy` that saves and loads."""

    _pipeline: Pipeline | None
    _seeds: Seeds | None
    _given_balance: list[int] | None
    _module_path: str

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of every stage, gathered one stage after another; on the first replica only, which writes."""
        return super().lightning_module_state_dict() if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer over all stages, as one process would have it; on the first replica only."""
        if not self.is_global_zero:
            return {}
        if self._pipeline is None or isinstance(optimizer, _MockOptimizer):
            return super().optimizer_state(optimizer)
        return self._pipeline.optimizers.state_dict(unwrapped(optimizer))

    def load_checkpoint(self, checkpoint_path: str | Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint; a training that goes on from it draws the random numbers that would have come next."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        model, state = self.lightning_module, checkpoint.get("relay", {}).get("seeds")
        if state is not None and model is not None and model.trainer.state.fn == TrainerFn.FITTING:
            self._seeds = self._seeds or Seeds(0)
            self._seeds.load_state_dict(state)
        return checkpoint

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Writes the checkpoint, for which Lightning has gathered the state of every stage.

        Where the layers' random numbers stand goes under its key ``relay``, unless it holds weights only.
        """
        if self._seeds is not None and "optimizer_states" in checkpoint:
            checkpoint.setdefault("relay", {})["seeds"] = self._seeds.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

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

    def _place(self) -> Place:
        model = self.lightning_module
        module = attrgetter(self._module_path)(model)
        if self._given_balance is None or not isinstance(module, nn.Sequential):
            return nowhere
        return places(cut(module, self._given_balance), f"{self._module_path}.")
