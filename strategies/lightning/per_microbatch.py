"""``training_step`` run once per micro-batch, and what comes out of it put together as if it had been run once.

Losses, logged values and numbers in the output become means over the micro-batches, weighted by their rows: for a loss
that is a mean over samples, that is the value of the whole batch.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.loops.optimization.automatic import ClosureResult
from pytorch_lightning.plugins import Precision
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.memory import recursive_detach
from torch import Tensor
from torchmetrics import Metric

from strategies.pipeline.driver import Pipeline
from strategies.pipeline.microbatch.batch import split_batch
from strategies.pipeline.stage.context import PassContext


def training_step_per_microbatch(
    model: LightningModule,
    pipeline: Pipeline,
    precision: Precision,
    microbatches: int,
    batch: Any,
    rest: Sequence[Any],
) -> Any:
    """Stands for ``model.training_step(batch, *rest)``.

    Args:
        model: Its ``split_batch(batch, num_microbatches)``, if it has one, returns the list of micro-batches.
        pipeline: The running pipeline.
        precision: What ``training_step`` runs under, and the loss scale for float16 if it has one.
        microbatches: How many micro-batches to make at most.
        batch: The whole batch.
        rest: The further arguments of ``training_step``, the same for every micro-batch.

    Returns:
        What ``training_step`` returned, put together.

    Raises:
        MisconfigurationException: If the batch cannot be split, or ``training_step`` returns something else than
            Lightning allows.
    """
    parts, sizes = _split(model, batch, microbatches)
    logs = _Logs(sizes)
    outputs: list[Mapping[str, Any] | None] = [None] * len(parts)

    def code(m: int) -> Tensor | None:
        logs.begin(m)
        output = model.training_step(parts[m], *rest)
        parts[m] = None
        loss = ClosureResult.from_training_step_output(output).closure_loss  # raises what Lightning does
        if isinstance(output, Mapping):
            outputs[m] = recursive_detach(output)  # or else the graphs of all micro-batches would be kept
        return loss

    scaler = getattr(precision, "scaler", None)
    scale = scaler.get_scale() if scaler is not None else 1.0
    with precision.train_step_context():
        context = PassContext.capture(pipeline.device.type)
    weights = [size / max(1, sum(sizes)) for size in sizes]
    with logs.instead_of(model):
        loss = pipeline.interleave([partial(code, m) for m in range(len(parts))], weights, context, scale)
    with context.entered(grad=True):
        logs.pass_on(model)
    return _merged(outputs, loss, sizes)


def _split(model: Any, batch: Any, microbatches: int) -> tuple[list[Any], list[int]]:
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
    except ValueError:  # only the user knows how many rows they have
        return parts, [1] * len(parts)


@dataclass
class _Logged:
    """One call of ``self.log``."""

    value: Any
    size: int
    settings: dict[str, Any]


class _Logs:
    """Keeps what is logged for each micro-batch, and logs it once for all."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._logged: dict[str, list[_Logged]] = {}
        self._thread = threading.local()

    def begin(self, m: int) -> None:
        """What the calling thread logs from now on is that of micro-batch ``m``."""
        self._thread.microbatch = m

    @contextmanager
    def instead_of(self, model: LightningModule) -> Iterator[None]:
        """Takes over ``model.log``."""
        vars(model)["log"] = self._log
        try:
            yield
        finally:
            del vars(model)["log"]

    def _log(self, *args: Any, **kwargs: Any) -> None:
        name, value, settings = _call_of_log(*args, **kwargs)
        size = settings.get("batch_size") or self._sizes[self._thread.microbatch]
        if isinstance(value, Tensor):
            value = value.detach()
        elif isinstance(value, Metric):
            settings["metric"] = value
            value = value._forward_cache
        self._logged.setdefault(name, []).append(_Logged(value, size, settings))

    def pass_on(self, model: LightningModule) -> None:
        """Logs each name once."""
        for name, logged in self._logged.items():
            settings = logged[-1].settings
            values, sizes = [entry.value for entry in logged], [entry.size for entry in logged]
            metric = settings.pop("metric", None)
            if metric is not None:
                if isinstance(metric._forward_cache, Tensor):
                    metric._forward_cache = _mean(values, sizes)
                model.log(name, metric, **settings)
                continue
            if settings.get("batch_size") is not None:
                settings["batch_size"] = sum(sizes)
            model.log(name, _reduced(values, sizes, settings.get("reduce_fx", "mean")), **settings)


def _call_of_log(name: str, value: Any, *args: Any, **kwargs: Any) -> tuple[str, Any, dict[str, Any]]:
    further = list(signature(LightningModule.log).parameters)[3:]  # after self, name and value
    return name, value, {**dict(zip(further, args, strict=False)), **kwargs}


def _reduced(values: Sequence[Any], sizes: Sequence[int], reduce_fx: str | Callable[..., Any]) -> Any:
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if kind in ("sum", "max", "min"):
        return getattr(torch.stack([torch.as_tensor(value) for value in values]), kind)()
    return _mean(values, sizes)


def _mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    total = sum(sizes)
    if not total or len(values) == 1:
        return values[-1]
    return sum(value * (size / total) for value, size in zip(values, sizes, strict=True))


def _merged(outputs: Sequence[Mapping[str, Any] | None], loss: Tensor | None, sizes: Sequence[int]) -> Any:
    known = [(output, size) for output, size in zip(outputs, sizes, strict=True) if output is not None]
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for output, _ in known for name in output):
        column = [(output[name], size) for output, size in known if name in output]
        merged[name] = _joined([value for value, _ in column], [size for _, size in column])
    return {**merged, "loss": loss} if merged else loss


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Numbers by their mean, tensors with a row for each sample one after another, of all else the last."""
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
