"""What a feature of a pipeline may do, in the order of a run.

of ─▶ check ─▶ prepare ─▶ measuring ─▶ arguments ─▶ memory ─▶ (workers start) ─▶ training_step ─▶ begin
options  setup                                                                     batches ...
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypedDict

from torch.optim import Optimizer

from strategies.common.random_seeds import Seeds
from strategies.launch.rounds import Rounds
from strategies.launch.session import Peers
from strategies.lightning.compat import MisconfigurationException
from strategies.lightning.hooks import Undo
from strategies.lightning.options import Options
from strategies.lightning.run import Preparation, Run, TrainingStep
from strategies.pipeline.construction.without_memory import Construction
from strategies.pipeline.driver import ModelCopy, Pipeline
from strategies.pipeline.optim.replicas import Replicas
from strategies.pipeline.recovery.repairs import Recovery
from strategies.sharding.divided_layers import DividedModel


class PipelineArguments(TypedDict, total=False):
    """Arguments of :class:`~strategies.pipeline.driver.Pipeline` that features provide."""

    construction: Construction | None
    copies: Sequence[ModelCopy]
    divided: DividedModel | None
    gathers_on_end: bool
    layer_peers: Peers | None
    recovery: Recovery | None
    replicas: Replicas | None
    seeds: Seeds | None
    skips_infinite_steps: bool
    together: Callable[[], Rounds] | None


class MemoryArguments(TypedDict, total=False):
    """Arguments of :func:`~strategies.pipeline.partition.memory.check_memory` that features provide."""

    gradient_sets: float
    num_shares: int
    num_snapshots: int


class Feature:
    """A feature of a pipeline. It overrides the methods that it needs; by default, all methods do nothing.

    A feature lives as long as its strategy. What lives for one run is in :class:`~strategies.lightning.run.Run`.
    """

    options: ClassVar[Sequence[str]] = ()
    """The names of the options that have no effect without this feature."""

    @classmethod
    def of(cls, options: Options) -> "Feature | None":
        """Check the options and return the feature; ``None`` if the options do not ask for it.

        Raises:
            MisconfigurationException: If an option is wrong.
        """
        return cls()

    def check(self, prepared: Preparation) -> None:
        """Check the run, and warn of what differs from one process. No worker has started; do not change anything.

        Raises:
            MisconfigurationException: If the run needs something that the feature cannot do.
        """

    def prepare(self, prepared: Preparation) -> Iterable[Undo]:
        """Make the changes that must precede measuring and sending layers; yield functions that undo them."""
        return ()

    def measuring(self, prepared: Preparation) -> AbstractContextManager[Any]:
        """Return the context in which layers are measured, for the schedule and the balance."""
        return nullcontext()

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return arguments of the pipeline. ``optimizers`` holds the user's optimizers if the run trains.

        Raises:
            ValueError: If the user's settings do not fit. The user gets Lightning's ``MisconfigurationException``.
        """
        return {}

    def memory(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> MemoryArguments:
        """Return the arguments that describe the memory that the feature uses."""
        return {}

    def training_step(self, prepared: Preparation, pipeline: Pipeline) -> TrainingStep | None:
        """Return the object that runs ``training_step``; ``None`` to leave it to another feature or to Lightning."""
        return None

    def begin(self, run: Run) -> Iterable[Undo]:
        """Start the feature after the workers have started; yield functions that end it before the workers end."""
        return ()

    # Called within fit, only for features that override them

    def on_train_batch_start(self, run: Run) -> None:
        """Called when a training batch begins."""

    def on_batches_end(self, run: Run) -> None:
        """Called when a validation begins, or when the last training batch is over."""

    # Checkpoints from which training can resume

    def state(self) -> dict[str, Any]:
        """Return entries for the key ``relay`` of a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any], *, is_running: bool) -> None:
        """Restore entries of the key ``relay`` of a checkpoint, within ``fit``.

        Args:
            state: The entries of all features. A checkpoint of an earlier version may lack the entries of this feature.
            is_running: Whether workers have started.
        """


def overriding(features: Iterable[Feature], name: str) -> list[Callable[[Run], None]]:
    """Return the method with this name of each feature that overrides it."""
    return [getattr(own, name) for own in features if getattr(type(own), name) is not getattr(Feature, name)]


class KindOfFeature(Protocol):
    """A class of features, or an object that imports such a class."""

    @property
    def options(self) -> Sequence[str]:
        """The names of the options that have no effect without the feature."""

    def of(self, options: Options) -> Feature | None:
        """Return the feature for these options; ``None`` if the options do not ask for it."""


@dataclass(frozen=True)
class ImportedIfAskedFor:
    """A class of features that is imported only if one of its options is given, because its imports take time.

    Attributes:
        module: The module of the class.
        name: The name of the class.
        options: The names of its options. An option that is not given is ``None``.
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
    """Return the features that the options ask for.

    Args:
        kinds: All classes of features.
        options: The options.
        intrinsic: The names of the options that have an effect without any feature.
        defaults: The default of each option.

    Raises:
        MisconfigurationException: If an option is wrong, or if it has no effect because its feature is not in use.
    """
    listed = list(kinds)
    with_effect = {*intrinsic, *(name for kind in listed for name in kind.options)}
    for name in vars(options).keys() & defaults.keys() - with_effect:
        if (value := getattr(options, name)) != defaults[name]:
            raise MisconfigurationException(f"{name}={value!r} has no effect: no feature of the strategy uses it.")
    found = [kind.of(options) for kind in listed]
    return [feature for feature in found if feature is not None]
