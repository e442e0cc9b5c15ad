"""What a feature of a pipeline may do, in the order of a run.

of ─▶ check_launch ─▶ check ─▶ prepare ─▶ arguments ─▶ memory ─▶ (workers start) ─▶ training_step ─▶ begin
options  Trainer built  setup                                                                        batches ...
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypedDict

from torch.optim import Optimizer

from strategies.launch.rounds import Rounds
from strategies.lightning.compat import MisconfigurationException
from strategies.lightning.hooks import Undo
from strategies.lightning.launch.replicas import ReplicatedStrategy
from strategies.lightning.options import Options
from strategies.lightning.run import Preparation, Run, TrainingStep
from strategies.pipeline.construction.recording import Construction
from strategies.pipeline.driver import ModelCopy, Pipeline
from strategies.pipeline.optim.replicas import Replicas
from strategies.pipeline.recovery.repairs import RecoverySettings
from strategies.pipeline.stage.layers import Seeds


class PipelineArguments(TypedDict, total=False):
    """Arguments of :class:`~strategies.pipeline.driver.Pipeline` that features give."""

    construction: Construction | None
    copies: Sequence[ModelCopy]
    gathers_on_end: bool
    recovery: RecoverySettings | None
    replicas: Replicas | None
    seeds: Seeds | None
    skips_infinite_steps: bool
    together: Callable[[], Rounds] | None


class MemoryArguments(TypedDict, total=False):
    """Arguments of :func:`~strategies.pipeline.partition.memory.check_memory` that features give."""

    gradient_sets: int
    num_shares: int
    num_snapshots: int


class Feature:
    """A feature of a pipeline. It overrides the methods that it needs; by default all do nothing.

    A feature exists as long as its strategy. What exists in a run only is in :class:`~strategies.lightning.run.Run`.
    """

    options: ClassVar[Sequence[str]] = ()
    """The names of the options that have no effect without this feature."""

    @classmethod
    def of(cls, options: Options) -> "Feature | None":
        """Return the feature for these options, which it checks; ``None`` if they do not ask for it.

        Raises:
            MisconfigurationException: If an option is wrong.
        """
        return cls()

    def check_launch(self, ranks: ReplicatedStrategy) -> None:
        """Check devices and hosts. Called when the Trainer is built."""

    def check(self, prepared: Preparation) -> None:
        """Check the run, and warn of what differs from one process. No worker has started; nothing may change.

        Raises:
            MisconfigurationException: If the run needs something that the feature cannot do.
        """

    def prepare(self, prepared: Preparation) -> Iterable[Undo]:
        """Change what must be changed before layers are measured and sent; yield what undoes it after the run."""
        return ()

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return arguments of the pipeline. ``optimizers`` are those of the user, if the run trains."""
        return {}

    def memory(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> MemoryArguments:
        """Return what the feature takes of the memory."""
        return {}

    def training_step(self, prepared: Preparation, pipeline: Pipeline) -> TrainingStep | None:
        """Return what runs ``training_step``; ``None`` to leave that to another feature, or to run whole batches."""
        return None

    def begin(self, run: Run) -> Iterable[Undo]:
        """Begin with a run whose workers have started; yield what ends it while they still run."""
        return ()

    # Called within fit, only of features that override them

    def on_train_batch_start(self, run: Run) -> None:
        """A training batch begins."""

    def on_batches_end(self, run: Run) -> None:
        """A validation begins, or the last training batch is over."""

    # Checkpoints from which training can go on

    def state(self) -> dict[str, Any]:
        """Return entries for the key ``relay`` of a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any], *, is_running: bool) -> None:
        """Take over entries of the key ``relay`` of a checkpoint, within ``fit``.

        Args:
            state: The entries of all features; of an earlier version, they may lack those of this one.
            is_running: Whether workers have started.
        """


def overriding(features: Iterable[Feature], name: str) -> list[Callable[[Run], None]]:
    """Return the methods of a name of those features that override it."""
    return [getattr(own, name) for own in features if getattr(type(own), name) is not getattr(Feature, name)]


class KindOfFeature(Protocol):
    """A class of features, or what imports one."""

    @property
    def options(self) -> Sequence[str]:
        """The names of the options that have no effect without it."""

    def of(self, options: Options) -> Feature | None:
        """Return the feature for these options; ``None`` if they do not ask for it."""


@dataclass(frozen=True)
class ImportedIfAskedFor:
    """A class of features that is imported if one of its options is given: other runs need not import its tools.

    Attributes:
        module: The module of the class.
        name: The name of the class.
        options: The names of its options, which are ``None`` if they are not given.
    """

    module: str
    name: str
    options: Sequence[str]

    def of(self, options: Options) -> Feature | None:
        """Return the feature, if one of its options is given."""
        if all(getattr(options, name) is None for name in self.options):
            return None
        kind: type[Feature] = getattr(import_module(self.module), self.name)
        return kind.of(options)


def features_of(
    kinds: Iterable[KindOfFeature], options: Options, intrinsic: Sequence[str], defaults: Mapping[str, Any]
) -> list[Feature]:
    """Return the features for which options ask.

    Args:
        kinds: The classes of features that there are.
        options: The options.
        intrinsic: The names of the options that have an effect without any feature.
        defaults: The default of each option.

    Raises:
        MisconfigurationException: If an option is wrong, or is given without a feature on which it would have an
            effect.
    """
    listed = list(kinds)
    with_effect = {*intrinsic, *(name for kind in listed for name in kind.options)}
    for name in vars(options).keys() & defaults.keys() - with_effect:
        if (value := getattr(options, name)) != defaults[name]:
            raise MisconfigurationException(f"{name}={value!r} has no effect: no feature of the strategy uses it.")
    found = [kind.of(options) for kind in listed]
    return [feature for feature in found if feature is not None]
