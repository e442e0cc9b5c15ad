"""BatchNorm layers, which normalise each micro-batch separately: a warning, and deferred statistics.

With ``deferred_batch_norm=True``, the engine updates running statistics once per batch, from all of its rows.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from strategies.common.torch_compat import BatchNorm
from strategies.lightning.compat import (
    LightningModule,
    MisconfigurationException,
    rank_zero_warn,
    sized_len,
    training_loaders,
)
from strategies.lightning.features.feature import Feature
from strategies.lightning.hooks import Undo
from strategies.lightning.run import Preparation, Run
from strategies.pipeline.executor.settings import Settings


class BatchNormLayers(Feature):
    """Warns if a BatchNorm layer trains differently than in one process."""

    options = ("deferred_batch_norm",)

    def __init__(self) -> None:
        self._norms: dict[str, BatchNorm] = {}
        self._has_warned = False

    def check(self, prepared: Preparation) -> None:
        """Check that ``deferred_batch_norm=True`` has an effect."""
        check_deferred_batch_norm(prepared.settings, batch_norms_of(prepared), prepared.path)

    def prepare(self, prepared: Preparation) -> Iterable[Undo]:
        """Find the layers."""
        self._norms |= batch_norms_of(prepared)
        yield self._norms.clear

    def begin(self, run: Run) -> Iterable[Undo]:
        """Call the check before each batch, if there are BatchNorm layers."""
        if self._norms:
            run.before_batch.append(self._warn)
        return ()

    def _warn(self, run: Run) -> None:
        """Warn before the first step in which a layer normalises micro-batches."""
        if not self._has_warned:
            self._has_warned = warn_of_batch_norm(run.model, self._norms, run.settings)


def batch_norms_of(prepared: Preparation) -> dict[str, BatchNorm]:
    """Return the BatchNorm layers of the pipelined part, by name in the model."""
    return {
        f"{prepared.path}.{name}": child
        for name, child in prepared.module.named_modules()
        if isinstance(child, BatchNorm)
    }


def check_deferred_batch_norm(settings: Settings, norms: Mapping[str, BatchNorm], path: str) -> None:
    """Check that ``deferred_batch_norm=True`` has an effect.

    Args:
        settings: Settings of the pipeline.
        norms: BatchNorm layers of the pipelined part, by name.
        path: Dotted path of the pipelined part.

    Raises:
        MisconfigurationException: If there is no BatchNorm layer.
    """
    if settings.deferred_batch_norm and not norms:
        raise MisconfigurationException(
            f"deferred_batch_norm=True has no effect: {path} has no BatchNorm layer. Leave it out."
        )


def warn_of_batch_norm(model: LightningModule, norms: Mapping[str, BatchNorm], settings: Settings) -> bool:
    """Warn if a BatchNorm layer normalises with the statistics of each micro-batch instead of the whole batch.

    A BatchNorm layer in evaluation mode normalises with its running statistics, as in one process.

    Args:
        model: The model, before a training step.
        norms: The BatchNorm layers of its pipelined part, by name in the model.
        settings: Settings of the pipeline.

    Returns:
        Whether a warning was given.
    """
    if settings.microbatches == 1:
        return False
    active = [(name, norm) for name, norm in norms.items() if norm.training or norm.running_mean is None]
    if not active:
        return False
    name, first = active[0]
    more = f" (the first of {len(active)} such layers)" if len(active) > 1 else ""
    statistics = ""
    if any(norm.running_mean is not None for _, norm in active):
        statistics = (
            " Running statistics are updated once per batch, from all its rows (deferred_batch_norm=True)."
            if settings.deferred_batch_norm
            else " Running statistics are updated once per micro-batch; deferred_batch_norm=True updates them once per "
            "batch, from all its rows, and changes nothing else."
        )
    rows = smallest_batch(model.trainer)
    one_row = ""
    if rows is not None and rows < 2 * settings.microbatches:
        one_row = (
            f" The smallest batch of the training data has {rows} rows, so some micro-batches have a single row, for "
            f"which {type(first).__name__} raises an error if a row has one value per channel: set microbatches to at "
            f"most {max(1, rows // 2)}, or use larger batches (drop_last=True, if only the last one is so small)."
        )
    rank_zero_warn(
        f"Layer {name}, a {type(first).__name__}{more}, normalises each of the microbatches={settings.microbatches} "
        "parts of a batch by itself in training, whereas one process normalises the whole batch: losses and gradients "
        f"differ from those of one process.{statistics} microbatches=1 trains as one process does.{one_row}"
    )
    return True


def smallest_batch(trainer: Any) -> int | None:
    """Return the number of rows of the smallest training batch of an epoch, or ``None`` if it is unknown."""
    sizes = []
    for loader in training_loaders(trainer):
        sampler = getattr(loader, "batch_sampler", None)
        size, drop_last = getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", True)
        if not isinstance(size, int):
            continue
        whole, rest = divmod(sized_len(getattr(sampler, "sampler", None)) or 0, size)
        sizes.append(rest if rest and not drop_last and trainer.num_training_batches > whole else size)
    return min(sizes, default=None)
