"""A run in one process that computes what a strategy must compute; optionally, with the micro-batches of a pipeline.

The micro-batches run one after another in plain PyTorch, without any code of the engine, and their losses are added
with the weights that a pipeline gives them::

    training_step(batch)    ──▶    w0 * training_step(rows 0 to 3) + w1 * training_step(rows 4 to 7) + ...
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from strategies.common.patching import replaced
from strategies.lightning.compat import (
    LightningModule,
    MisconfigurationException,
    extract_batch_size,
    is_overridden,
)
from strategies.lightning.features.loss_weights import LossWeights, has_own_weights
from strategies.lightning.features.per_microbatch import split_for
from strategies.lightning.hooks import collect_logs
from strategies.pipeline.stage.microbatch.split import Microbatches, split_batch
from trainer.verification.logged import LoggedCall
from trainer.verification.observed_run import ObservedRun
from trainer.verification.observer import StepWatch

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_LoggedValues = dict[str, list[tuple[float, Any, dict[str, Any]]]]


class NeedlessRun(Exception):
    """Ends a run whose first forward pass shows that its results are not needed."""


def watch_first_step(model: LightningModule, observed: ObservedRun, needless_if: Sequence[str] = ()) -> None:
    """Note, in the first call of ``training_step``, what only a run in one process can observe.

    Args:
        model: The model.
        observed: Receives what is observed.
        needless_if: Attributes of ``observed``. If one of them is true after the first call, the call raises.

    Raises:
        NeedlessRun: In the first call of ``training_step``.
    """
    original = model.training_step

    @functools.wraps(original)
    def training_step(self: LightningModule, *args: Any, **kwargs: Any) -> Any:
        undo()
        watch = StepWatch(self, observed)
        watch.begin()
        release.append(watch.end)
        with watch.forward():
            result = original(*args, **kwargs)
        watch.end_of_forward()
        if any(getattr(observed, name) for name in needless_if):
            while release:
                release.pop()()
            loss = result.get("loss") if isinstance(result, Mapping) else result
            observed.losses = [float(loss) if isinstance(loss, Tensor | float) else None]
            observed.stopped_after = 0
            raise NeedlessRun
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
    model: LightningModule,
    number: int,
    *,
    by_tokens: bool,
    max_tokens: int | None = None,
    batches: Sequence[Any] = (),
    per_step: int = 1,
) -> None:
    """Make ``training_step`` run once per micro-batch, in one process.

    Args:
        model: The model.
        number: The largest number of micro-batches of a batch.
        by_tokens: Whether micro-batches are weighted by their tokens; otherwise by their rows, unless the model defines
            weights.
        max_tokens: The option ``microbatch_tokens``.
        batches: All batches, because weights by tokens depend on all batches of a step.
        per_step: Number of batches of an optimizer step.
    """
    original = model.training_step
    weights_of = LossWeights(model).of if by_tokens or has_own_weights(model) else None
    logged: list[_LoggedValues] = [{}]
    weight = [1.0]

    def collect(name: str, value: Any, settings: dict[str, Any]) -> None:
        logged[0].setdefault(name, []).append((weight[0], value, settings))

    def split(batch: Any) -> Microbatches:
        return split_for(model, batch, number, max_tokens)

    totals = [sum(weights_of(split(batch).parts)) for batch in batches] if weights_of else []

    @functools.wraps(original)
    def training_step(self: LightningModule, batch: Any, *rest: Any) -> Any:
        found = split(batch)
        parts, sizes = found.parts, found.sizes
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


def number_batches_of_ranks(model: LightningModule, ranks: int) -> None:
    """Make ``training_step`` receive the ``batch_idx`` of a rank, in one process that runs the batches of all ranks."""
    original = model.training_step

    @functools.wraps(original)
    def training_step(self: LightningModule, batch: Any, *rest: Any) -> Any:
        return original(batch, *(number // ranks for number in rest[:1]), *rest[1:])

    replaced(model, "training_step", MethodType(training_step, model))


def note_logs(model: LightningModule, observed: ObservedRun) -> None:
    """Note what ``training_step`` logs, to compute the values of ranks, and what ranks of a validation do not share."""
    in_training, in_validation = model.training_step, model.validation_step
    observed.calls = calls = []

    @functools.wraps(in_training)
    def training_step(self: LightningModule, batch: Any, *rest: Any) -> Any:
        own: list[LoggedCall] = []
        calls.append(own)

        def collect(name: str, value: Any, settings: dict[str, Any]) -> None:
            type(self).log(self, name, value, **settings)
            if not settings.get("rank_zero_only"):
                own.append(_called(name, value, settings, batch))

        undo = collect_logs(self, lambda: collect)
        try:
            return in_training(batch, *rest)
        finally:
            undo()

    @functools.wraps(in_validation)
    def validation_step(self: LightningModule, *args: Any, **kwargs: Any) -> Any:
        def collect(name: str, value: Any, settings: dict[str, Any]) -> None:
            type(self).log(self, name, value, **settings)
            is_sum = not isinstance(value, Metric) and _reduction(settings) == "sum"
            if settings.get("rank_zero_only") or (is_sum and not settings.get("sync_dist")):
                observed.left_out += [name, f"{name}_epoch"]

        undo = collect_logs(self, lambda: collect)
        try:
            return in_validation(*args, **kwargs)
        finally:
            undo()

    replaced(model, "training_step", MethodType(training_step, model))
    if is_overridden("validation_step", model):
        replaced(model, "validation_step", MethodType(validation_step, model))


def _called(name: str, value: Any, settings: Mapping[str, Any], batch: Any) -> LoggedCall:
    number, size = None, settings.get("batch_size")
    if not isinstance(value, Metric):  # Lightning keeps numbers in torch's default type
        number = float(value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.get_default_dtype()))
    on_step, on_epoch = settings.get("on_step"), settings.get("on_epoch")
    if on_epoch and number is not None and size is None:
        size = extract_batch_size(batch)
    return LoggedCall(
        name,
        number,
        1 if size is None else size,
        _reduction(settings),
        is_synchronised=bool(settings.get("sync_dist")),
        on_step=on_step is None or bool(on_step),
        on_epoch=bool(on_epoch),
    )


def _reduction(settings: Mapping[str, Any]) -> str:
    given = settings.get("reduce_fx", "mean")
    name = str(given if isinstance(given, str) else getattr(given, "__name__", "mean")).lower()
    return "mean" if name == "avg" else name


def switch_off_dropout(model: nn.Module) -> None:
    """Set the probabilities of all dropout layers to 0, and those that modules pass to functions.

    The latter are numbers such as ``dropout`` of ``nn.MultiheadAttention``, or ``attention_dropout`` of
    ``transformers``. Probabilities to keep a value, such as ``dropout_keep``, stay as they are.
    """
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and "keep" not in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _check_rows(model: LightningModule, batch: Any, sizes: Sequence[int]) -> None:
    """Check that no row is left out, because a comparison with the same micro-batches would not detect this."""
    if hasattr(model, "split_batch"):
        return
    (rows,) = split_batch(batch, 1)[1]
    if sum(sizes) != rows:
        raise MisconfigurationException(f"the micro-batches have {sum(sizes)} rows, but the batch has {rows}")


def _log_means(model: LightningModule, logged: _LoggedValues) -> None:
    for name, entries in logged.items():
        *_, (_, value, settings) = entries
        if settings.get("reduce_fx", "mean") != "mean" or not isinstance(value, Tensor | float | int):
            continue  # only other references have this value
        sizes = [own.get("batch_size") for _, _, own in entries]
        if None not in sizes:
            settings = {**settings, "batch_size": sum(sizes)}
        total = sum(weight for weight, _, _ in entries) or 1.0
        mean = sum(each * (weight / total) for weight, each, _ in entries)
        model.log(name, mean, **settings)
