"""Several replicas of a pipeline: each stage averages its gradients with the same stage of the other replicas.

The replicas of a stage may divide its optimizer states and steps among themselves (ZeRO stage 1), and its gradients too
(stage 2). :mod:`.divided_parameters` divides their parameters (stage 3).
"""

from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from strategies.lightning.arguments import check_whole_number
from strategies.lightning.compat import MisconfigurationException, rank_zero_warn
from strategies.lightning.features.feature import Feature, MemoryArguments, PipelineArguments
from strategies.lightning.hooks import Undo, after_backward, overridden_gradient_hooks
from strategies.lightning.options import Options
from strategies.lightning.run import Preparation, Run
from strategies.optim.trial import check_divisible


class AveragedReplicas(Feature):
    """Connects the stages of all replicas, and averages gradients after each backward pass.

    Args:
        zero_stage: What the replicas of a stage divide among themselves.
    """

    options = ("data_parallel_size", "zero_stage")

    def __init__(self, zero_stage: int) -> None:
        self._zero_stage = zero_stage

    @classmethod
    def of(cls, options: Options) -> "AveragedReplicas | None":
        """Return the feature if there are several replicas."""
        check_replicas(options.data_parallel_size, options.zero_stage)
        return cls(options.zero_stage) if options.data_parallel_size > 1 else None

    def check(self, prepared: Preparation) -> None:
        """Warn of hooks that read gradients, of which a replica has only some under stage 2."""
        hooks = overridden_gradient_hooks(prepared.trainer, prepared.model) if prepared.is_fitting else []
        if self._zero_stage == 2 and hooks:
            rank_zero_warn(
                f"{', '.join(hooks)}: under zero_stage=2 each replica has the gradients of its own parameters only; "
                "the others are None. To clip, use self.trainer.strategy.clip_grad_norm_(max_norm)."
            )

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return the description of the replicas. Collective: every replica calls this."""
        zero_stage = self._zero_stage if prepared.is_fitting else 0
        if self._zero_stage in (1, 2):
            for optimizer in optimizers:
                check_divisible(optimizer)
        return {"replicas": prepared.ranks.replicas(prepared.settings.patience_seconds, zero_stage=zero_stage)}

    def memory(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> MemoryArguments:
        """Return the number of replicas that divide the optimizer states."""
        return {"num_shares": prepared.ranks.world_size if self._zero_stage in (1, 2) else 1}

    def begin(self, run: Run) -> Iterable[Undo]:
        """Average gradients after each backward pass, unless more gradients are accumulated first."""

        def average() -> None:
            if run.ranks.averages_gradients:
                run.pipeline.average_grads()

        yield after_backward(run.precision, average)


def check_replicas(number: int, zero_stage: int) -> None:
    """Check the number of pipelines and what they divide.

    Args:
        number: ``data_parallel_size``.
        zero_stage: The option of this name.

    Raises:
        MisconfigurationException: If a number is wrong, or if these settings exclude each other.
    """
    check_whole_number("data_parallel_size", number, 1)
    if type(zero_stage) is not int or zero_stage not in (0, 1, 2, 3):
        raise MisconfigurationException(f"zero_stage must be 0, 1, 2 or 3, got {zero_stage!r}.")
    if zero_stage and number == 1:
        raise MisconfigurationException(
            f"zero_stage={zero_stage} divides the optimizer states of a stage among its replicas, but there is only "
            "one: set data_parallel_size to 2 or more, or leave zero_stage out."
        )
