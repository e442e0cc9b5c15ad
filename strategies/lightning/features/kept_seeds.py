"""Continues the random numbers of layers over several runs of a strategy, and from a checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from strategies.common.random_seeds import Seeds
from strategies.lightning.features.feature import Feature, PipelineArguments
from strategies.lightning.hooks import Undo
from strategies.lightning.run import Preparation, Run


class LayerSeeds(Feature):
    """Keeps the source of the layers' random numbers, which the first run takes from the process's generator."""

    def __init__(self) -> None:
        self._seeds: Seeds | None = None
        self._trainer: Any = None

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return the source of random numbers."""
        self._seeds = self._seeds or Seeds.ahead_of_the_process()
        return {"seeds": self._seeds}

    def begin(self, run: Run) -> Iterable[Undo]:
        """Note where the random numbers of each batch begin."""
        assert self._seeds is not None
        self._trainer = run.trainer
        run.before_batch.append(self._seeds.begin_batch)
        return ()

    def state(self) -> dict[str, Any]:
        """Return the position in the random numbers, so that resumed training draws what would have come next.

        Within a step, this is where the step began, because resumed training repeats the step.
        """
        if self._seeds is None:
            return {}
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current if self._trainer is not None else None
        is_in_step = batches is not None and batches.started > batches.processed
        return {"seeds": self._seeds.state_dict(before_batch=is_in_step)}

    def load_state(self, state: Mapping[str, Any], *, is_running: bool) -> None:
        """Continue from the position of a checkpoint."""
        if (found := state.get("seeds")) is not None:
            self._seeds = self._seeds or Seeds(0)
            self._seeds.load_state_dict(found)
