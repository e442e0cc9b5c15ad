"""Runs ``training_step`` once per micro-batch and combines the results into those of one call for the whole batch.

Losses, logged values and numbers in the output become means over the micro-batches, weighted by their numbers of rows.
For a loss that is a mean over samples this is the value of the whole batch.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from strategies.lightning.compat import (
    ClosureResult,
    LightningModule,
    MisconfigurationException,
    Precision,
    forward_cache,
    recursive_detach,
    set_forward_cache,
)
from strategies.lightning.hooks import Collect, scaler_of
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.microbatch.split import split_batch
from strategies.pipeline.stage.layers import PassContext


class TrainingStepPerMicrobatch:
    """Does what ``model.training_step(batch, *rest)`` does, one micro-batch at a time.

    Args:
        model: The model. If it has a method ``split_batch(batch, num_microbatches)``, that returns the micro-batches.
        pipeline: The running pipeline.
        precision: Gives the context of ``training_step``, and the loss scale if it has a gradient scaler.
        microbatches: The largest number of micro-batches.
    """

    def __init__(self, model: LightningModule, pipeline: Pipeline, precision: Precision, microbatches: int) -> None:
        self._model, self._pipeline, self._precision, self._microbatches = model, pipeline, precision, microbatches
        self._scaler = scaler_of(precision)
        self._thread = threading.local()

    def collector(self) -> Collect | None:
        """Return what collects the values that this thread logs now, for ``collect_logs``."""
        return getattr(self._thread, "collect", None)

    def __call__(self, batch: Any, rest: Sequence[Any]) -> Any:
        """Run ``training_step`` of all micro-batches, and their backward passes.

        Args:
            batch: The whole batch.
            rest: The other arguments of ``training_step``, the same for every micro-batch.

        Returns:
            The combined output of ``training_step``.

        Raises:
            MisconfigurationException: If the batch cannot be split, or if ``training_step`` returns something that
                Lightning does not accept.
        """
        parts, sizes = _split(self._model, batch, self._microbatches)
        logs = _Logs(sizes)
        outputs: list[Mapping[str, Any] | None] = [None] * len(parts)

        def step(m: int) -> Tensor | None:
            self._thread.collect = partial(logs.collect, m)
            try:
                output = self._model.training_step(parts[m], *rest)
            finally:
                self._thread.collect = None
            parts[m] = None
            loss = ClosureResult.from_training_step_output(output).closure_loss  # raises Lightning's own errors
            if isinstance(output, Mapping):
                outputs[m] = recursive_detach(output)  # otherwise the graphs of all micro-batches would be kept
            return loss

        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        with self._precision.train_step_context():
            context = PassContext.capture(self._pipeline.device.type)
        weights = [size / max(1, sum(sizes)) for size in sizes]
        loss = self._pipeline.interleave([partial(step, m) for m in range(len(parts))], weights, context, scale)
        with context.entered(grad=True):
            logs.log_to(self._model)
        return _combine_outputs(outputs, loss, sizes)


def _split(model: Any, batch: Any, microbatches: int) -> tuple[list[Any], list[int]]:
    """Return the micro-batches and the number of rows of each."""
    if not hasattr(model, "split_batch"):
        try:
            return split_batch(batch, microbatches)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error
    parts = list(model.split_batch(batch, microbatches))
    if not parts:
        raise MisconfigurationException(f"{type(model).__name__}.split_batch returned no micro-batch.")
    try:
        return parts, [split_batch(part, 1)[1][0] for part in parts]
    except ValueError:  # only the user's code knows the numbers of rows, so all micro-batches weigh the same
        return parts, [1] * len(parts)


@dataclass
class _Logged:
    """One call of ``self.log``."""

    value: Any
    size: int
    settings: dict[str, Any]


class _Logs:
    """The values that ``training_step`` logs for each micro-batch.

    Args:
        sizes: Number of rows of each micro-batch.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._logged: dict[str, list[_Logged]] = {}

    def collect(self, m: int, name: str, value: Any, settings: dict[str, Any]) -> None:
        """Keep one value that micro-batch ``m`` has logged."""
        size = settings.get("batch_size") or self._sizes[m]
        if isinstance(value, Tensor):
            value = value.detach()
        elif isinstance(value, Metric):
            settings["metric"] = value
            value = forward_cache(value)
        self._logged.setdefault(name, []).append(_Logged(value, size, settings))

    def log_to(self, model: LightningModule) -> None:
        """Log each name once, with the combined value of all micro-batches."""
        for name, logged in self._logged.items():
            settings = logged[-1].settings
            values, sizes = [entry.value for entry in logged], [entry.size for entry in logged]
            metric = settings.pop("metric", None)
            if metric is not None:
                if isinstance(forward_cache(metric), Tensor):
                    set_forward_cache(metric, _mean(values, sizes))
                model.log(name, metric, **settings)
                continue
            if settings.get("batch_size") is not None:
                settings["batch_size"] = sum(sizes)
            model.log(name, _reduce(values, sizes, settings.get("reduce_fx", "mean")), **settings)


def _reduce(values: Sequence[Any], sizes: Sequence[int], reduce_fx: str | Callable[..., Any]) -> Any:
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if kind in ("sum", "max", "min"):
        return getattr(torch.stack([torch.as_tensor(value) for value in values]), kind)()
    return _mean(values, sizes)


def _mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the mean, weighted by numbers of rows."""
    total = sum(sizes)
    if not total or len(values) == 1:
        return values[-1]
    return sum(value * (size / total) for value, size in zip(values, sizes, strict=True))


def _combine_outputs(outputs: Sequence[Mapping[str, Any] | None], loss: Tensor | None, sizes: Sequence[int]) -> Any:
    known = [(output, size) for output, size in zip(outputs, sizes, strict=True) if output is not None]
    combined: dict[str, Any] = {}
    for name in dict.fromkeys(name for output, _ in known for name in output):
        column = [(output[name], size) for output, size in known if name in output]
        combined[name] = _combine_values([value for value, _ in column], [size for _, size in column])
    return {**combined, "loss": loss} if combined else loss


def _combine_values(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the mean of numbers, the concatenation of tensors with one row per sample, or else the last value."""
    if all(isinstance(value, Tensor) for value in values):
        detached = [value.detach() for value in values]
        if all(value.dim() and value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
            return torch.cat(detached)
        if all(value.dim() == 0 and value.is_floating_point() for value in values):
            return _mean(detached, sizes)
        return detached[-1]
    if all(isinstance(value, float) for value in values):
        return _mean(values, sizes)
    return values[-1]
