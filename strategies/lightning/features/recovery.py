"""Replaces lost workers and verifies steps, from snapshots and the driver's log; see ``docs/lost_workers.md``."""

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from strategies.launch.rounds import Rounds, shared_store
from strategies.lightning.arguments import check_whole_number
from strategies.lightning.compat import MisconfigurationException, rank_zero_warn
from strategies.lightning.features.feature import Feature, MemoryArguments, PipelineArguments
from strategies.lightning.options import Options
from strategies.lightning.run import Preparation, Run
from strategies.pipeline.recovery.repairs import Recovery
from strategies.pipeline.state.snapshots import check_snapshots
from strategies.pipeline.transport.slots import NUM_SLOTS


class LostWorkers(Feature):
    """Gives the pipeline the settings of recovery.

    Args:
        settings: How lost workers are replaced and which steps are verified.
    """

    options = ("recovery",)

    def __init__(self, settings: Recovery) -> None:
        self._settings = settings

    @classmethod
    def of(cls, options: Options) -> "LostWorkers | None":
        """Return the feature if the options ask for replacing lost workers or verifying steps."""
        settings = options.recovery
        if settings is not None:
            check_settings(settings)
        return cls(settings) if settings is not None and settings != Recovery() else None

    def check(self, prepared: Preparation) -> None:
        """Check that workers can be replaced and steps verified in this run; warn if it has no workers.

        Raises:
            MisconfigurationException: If the workers make traces.
        """
        if prepared.num_stages == 1:
            if prepared.is_fitting:
                rank_zero_warn(
                    "recovery has no effect with a single stage, which the driver itself runs, because there is no "
                    "worker that could be lost or compute wrongly. Set devices to 2 or more."
                )
        elif prepared.is_profiled:
            raise MisconfigurationException(
                "recovery runs steps again, of which PyTorchProfiler would lose or repeat the traces. Leave recovery "
                "or the profiler out."
            )

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return the settings of recovery, and the store through which all drivers agree on repairs."""
        if prepared.num_stages == 1:
            return {}
        together = _rounds(prepared) if prepared.ranks.num_pipelines > 1 else None
        return {"recovery": self._settings, "together": together}

    def on_batches_end(self, run: Run) -> None:
        """Prepare the validation that follows."""
        run.pipeline.before_evaluation()

    def memory(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> MemoryArguments:
        """Return the number of snapshots that the host holds."""
        return {"num_snapshots": NUM_SLOTS if prepared.num_stages > 1 else 0}


def _rounds(prepared: Preparation) -> Callable[[], Rounds]:
    """Return a function that connects to the store through which the drivers of all pipelines agree on repairs.

    Raises:
        ValueError: If the default process group has no TCP store.
    """
    ranks, seconds = prepared.ranks, prepared.settings.patience_seconds
    connect = shared_store(f"relay {ranks.rendezvous}")
    kind = "replica" if ranks.world_size == ranks.num_pipelines else "pipeline"
    return lambda: Rounds(connect(), *ranks.group_place, seconds, kind)


def check_settings(settings: Recovery) -> None:
    """Check the numbers of ``Recovery(...)``.

    Raises:
        MisconfigurationException: If a number is wrong, if ``snapshot_every_n_steps`` has no effect, or if this system
            cannot take snapshots.
    """
    if not isinstance(settings, Recovery):
        raise MisconfigurationException(
            f"recovery must be None or a Recovery, such as Recovery(max_restarts=3), got {settings!r}."
        )
    check_whole_number("max_restarts", settings.max_restarts, 0)
    check_whole_number("snapshot_every_n_steps", settings.snapshot_every_n_steps, 1)
    check_whole_number("verify_every_n_steps", settings.verify_every_n_steps, 0)
    if settings.snapshot_every_n_steps != 1 and not settings.max_restarts:
        raise MisconfigurationException(
            f"snapshot_every_n_steps={settings.snapshot_every_n_steps} has no effect with max_restarts=0, because lost "
            "workers are not repaired: set max_restarts to 1 or more, or leave snapshot_every_n_steps out."
        )
    if settings == Recovery():
        return
    try:
        check_snapshots()
    except ValueError as error:
        raise MisconfigurationException(f"recovery repeats computation from snapshots, but {error}") from error
