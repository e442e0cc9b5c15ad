"""A run in one process that computes what a strategy must compute; optionally, with the micro-batches of a pipeline.

The micro-batches run one after another in plain PyTorch, without any code of the engine, and their losses are added
with the weights that a pipeline gives them::

    training_step(batch)    ──▶    w0 * training_step(rows 0 to 3) + w1 * training_step(rows 4 to 7) + ...
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn

from strategies.common.patching import replaced
from strategies.lightning.compat import LightningModule, MisconfigurationException
from strategies.lightning.features.loss_weights import LossWeights, has_own_weights
from strategies.lightning.features.per_microbatch import split_for
from strategies.lightning.hooks import collect_logs
from strategies.pipeline.stage.microbatch.split import split_batch
from trainer.verification.record import RunRecord
from trainer.verification.recorder import StepWatch

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_Log = dict[str, list[tuple[float, Any, dict[str, Any]]]]


def watch_first_step(model: LightningModule, record: RunRecord) -> None:
    """Record, in the first call of ``training_step``, what only a run in one process can observe."""
    original = model.training_step

    @functools.wraps(original)
    def training_step(self: LightningModule, *args: Any, **kwargs: Any) -> Any:
        undo()
        watch = StepWatch(self, record)
        watch.begin()
        release.append(watch.end)
        with watch.forward():
            result = original(*args, **kwargs)
        watch.end_of_forward()
        return result

    @functools.wraps(model.on_train_batch_end)
    def on_train_batch_end(self: LightningModule, *args: Any, **kwargs: Any) -> Any:
        while release:
            release.pop()()
        return of_model(*args, **kwargs)

    release: list[Callable[[], None]] = []
    of_model = model.on_train_batch_end
    undo = replaced(model, "training_step", MethodType(training_step, model))
    replaced(model, "on_train_batch_end", MethodType(on_train_batch_end, model))


def run_microbatches(
    model: LightningModule, number: int, *, by_tokens: bool, batches: Sequence[Any] = (), per_step: int = 1
) -> None:
    """Make ``training_step`` run once per micro-batch, in one process.

    Args:
        model: The model.
        number: The largest number of micro-batches of a batch.
        by_tokens: Whether micro-batches are weighted by their tokens; otherwise by their rows, unless the model defines
            weights.
        batches: All batches, because weights by tokens depend on all batches of a step.
        per_step: Number of batches of an optimizer step.
    """
    original = model.training_step
    weights_of = LossWeights(model).of if by_tokens or has_own_weights(model) else None
    logged: list[_Log] = [{}]
    weight = [1.0]

    def collect(name: str, value: Any, settings: dict[str, Any]) -> None:
        logged[0].setdefault(name, []).append((weight[0], value, settings))

    totals = [sum(weights_of(split_for(model, batch, number)[0])) for batch in batches] if weights_of else []

    @functools.wraps(original)
    def training_step(self: LightningModule, batch: Any, *rest: Any) -> Any:
        parts, sizes = split_for(self, batch, number)
        _check_rows(self, batch, sizes)
        weights = [float(size) for size in sizes] if weights_of is None else weights_of(parts)
        whole, logged[0] = sum(weights) or 1.0, {}
        factor = 1.0
        if totals and rest:
            first = int(rest[0]) // per_step * per_step
            of_step = sum(totals[first : first + per_step])
            factor = per_step * sum(weights) / of_step if of_step else 1.0
        losses = []
        undo = collect_logs(self, lambda: collect)
        try:
            for part, own in zip(parts, weights, strict=True):
                weight[0] = own / whole
                output = original(part, *rest)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if isinstance(loss, Tensor):
                    losses.append(loss * (own / whole))
        finally:
            undo()
        _log_means(self, logged[0])
        if not losses:
            return None
        loss = sum(losses[1:], losses[0])
        return loss + (factor - 1.0) * (loss - loss.detach())  # the factor is for gradients only

    replaced(model, "training_step", MethodType(training_step, model))


def switch_off_dropout(model: nn.Module) -> None:
    """Set the probability of all dropout layers to 0."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0


def _check_rows(model: LightningModule, batch: Any, sizes: Sequence[int]) -> None:
    """Check that no row is left out, because a comparison with the same micro-batches would not detect this."""
    if hasattr(model, "split_batch"):
        return
    (rows,) = split_batch(batch, 1)[1]
    if sum(sizes) != rows:
        raise MisconfigurationException(f"the micro-batches have {sum(sizes)} rows, but the batch has {rows}")


def _log_means(model: LightningModule, logged: _Log) -> None:
    for name, entries in logged.items():
        *_, (_, value, settings) = entries
        if settings.get("reduce_fx", "mean") != "mean" or not isinstance(value, Tensor | float | int):
            continue  # only other references have this value
        total = sum(weight for weight, _, _ in entries) or 1.0
        mean = sum(each * (weight / total) for weight, each, _ in entries)
        model.log(name, mean, **settings)
