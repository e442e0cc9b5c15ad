"""Several replicas of a pipeline: each stage averages its gradients with the same stage of the other replicas.

The replicas of a stage may divide its optimizer states and steps among themselves (ZeRO stage 1).
"""

from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from strategies.lightning.arguments import as_misconfiguration, check_whole_number
from strategies.lightning.compat import MisconfigurationException
from strategies.lightning.features.feature import Feature, MemoryArguments, PipelineArguments
from strategies.lightning.hooks import Undo, after_backward
from strategies.lightning.options import Options
from strategies.lightning.run import Preparation, Run
from strategies.optim.trial import check_divisible


class AveragedReplicas(Feature):
    """Connects the stages of all replicas, and averages gradients after each backward pass.

    Args:
        divides_states: Whether the replicas of a stage divide its optimizer states.
    """

    options = ("data_parallel_size", "shard_optimizer_states")

    def __init__(self, divides_states: bool) -> None:
        self._divides_states = divides_states

    @classmethod
    def of(cls, options: Options) -> "AveragedReplicas | None":
        """Return the feature if there are several replicas."""
        check_replicas(options.data_parallel_size, options.shard_optimizer_states)
        return cls(options.shard_optimizer_states) if options.data_parallel_size > 1 else None

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return the description of the replicas. Collective: every replica calls this."""
        divides = self._divides_states and prepared.is_fitting
        if self._divides_states:
            with as_misconfiguration():
                for optimizer in optimizers:
                    check_divisible(optimizer)
        return {"replicas": prepared.ranks.replicas(prepared.settings.patience_seconds, divide_states=divides)}

    def memory(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> MemoryArguments:
        """Return the number of replicas that divide the optimizer states."""
        return {"num_shares": prepared.ranks.world_size if self._divides_states else 1}

    def begin(self, run: Run) -> Iterable[Undo]:
        """Average gradients after each backward pass, unless more gradients are accumulated first."""

        def average() -> None:
            if run.ranks.averages_gradients:
                run.pipeline.average_grads(run.training_step.share_of_replica())

        yield after_backward(run.precision, average)


def check_replicas(number: int, divides_states: bool) -> None:
    """Check the number of pipelines.

    Args:
        number: ``data_parallel_size``.
        divides_states: ``shard_optimizer_states``.

    Raises:
        MisconfigurationException: If the number is too small, or if these settings exclude each other.
    """
    check_whole_number("data_parallel_size", number, 1)
    if divides_states and number == 1:
        raise MisconfigurationException(
            "shard_optimizer_states=True divides the states of a stage among its replicas, but there is only one: "
            "set data_parallel_size to 2 or more, or leave shard_optimizer_states out."
        )
