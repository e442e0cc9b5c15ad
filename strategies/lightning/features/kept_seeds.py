"""Continues the random numbers of layers over several runs of a strategy, and from a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from strategies.common.random_seeds import Seeds
from strategies.lightning.features.feature import Feature, PipelineArguments
from strategies.lightning.run import Preparation


class LayerSeeds(Feature):
    """Keeps the source of the layers' random numbers, which the first run takes from the process's generator."""

    def __init__(self) -> None:
        self._seeds: Seeds | None = None

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return the source of random numbers."""
        self._seeds = self._seeds or Seeds.ahead_of_the_process()
        return {"seeds": self._seeds}

    def state(self) -> dict[str, Any]:
        """Return the position in the random numbers, so that resumed training draws what would have come next."""
        return {} if self._seeds is None else {"seeds": self._seeds.state_dict()}

    def load_state(self, state: Mapping[str, Any], *, is_running: bool) -> None:
        """Continue from the position of a checkpoint."""
        if (found := state.get("seeds")) is not None:
            self._seeds = self._seeds or Seeds(0)
            self._seeds.load_state_dict(found)
