"""Runs ``training_step`` once per micro-batch and combines the results into the result for the whole batch.

Losses, logged values and numbers in the output become means over the micro-batches, weighted by their numbers of rows
or by other weights (:mod:`.loss_weights`). If the loss is a mean over rows, or over tokens, the combined value equals
the value for the whole batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from strategies.lightning.arguments import check_whole_number
from strategies.lightning.compat import (
    Callback,
    ClosureResult,
    GradientAccumulationScheduler,
    LightningModule,
    MisconfigurationException,
    Precision,
    forward_cache,
    recursive_detach,
    set_forward_cache,
    takes_iterator,
)
from strategies.lightning.features.feature import Feature, MemoryArguments
from strategies.lightning.features.loss_weights import (
    LossWeights,
    check_loss_weight,
    has_own_weights,
    warn_of_ignored_labels,
)
from strategies.lightning.hooks import Collect, Undo, collect_logs, scaler_of
from strategies.lightning.options import Options
from strategies.lightning.run import Preparation, Run
from strategies.lightning.search_settings import DEFAULT_MICROBATCHES
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.per_microbatch import ReleaseFactors
from strategies.pipeline.executor.settings import ScheduleChoice, Settings
from strategies.pipeline.optim.optimizers import clears_as_torch_does
from strategies.pipeline.schedule.tables import SCHEDULES
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.microbatch.by_length import split_by_length
from strategies.pipeline.stage.microbatch.split import Microbatches, split_batch

_collector: ContextVar[Collect | None] = ContextVar("collector of what one micro-batch logs", default=None)


class StepsPerMicrobatch(Feature):
    """Runs ``training_step`` once per micro-batch, unless the schedule runs whole batches.

    Args:
        loss_weight: The option ``loss_weight``.
        microbatch_tokens: The option ``microbatch_tokens``.
    """

    options = ("loss_weight", "microbatch_tokens")

    def __init__(self, loss_weight: str, microbatch_tokens: int | None = None) -> None:
        self._loss_weight, self._tokens = loss_weight, microbatch_tokens

    @classmethod
    def of(cls, options: Options) -> "StepsPerMicrobatch | None":
        """Return the feature if the schedule runs micro-batches."""
        check_loss_weight(options.loss_weight, options.settings)
        _check_tokens(options.microbatch_tokens, options.microbatches, options.order.name, options.settings)
        return cls(options.loss_weight, options.microbatch_tokens) if options.settings.interleaves else None

    def check(self, prepared: Preparation) -> None:
        """Check that optimization is automatic, and how the micro-batches are made."""
        if prepared.is_fitting:
            check_automatic_optimization(prepared.model, prepared.settings.schedule)
            if takes_iterator(prepared.model):
                raise MisconfigurationException(
                    f"schedule={prepared.settings.schedule!r} splits each batch before training_step runs, but "
                    f"{type(prepared.model).__name__}.training_step(dataloader_iter) takes the batch itself. Use "
                    "schedule='gpipe', or take the batch as an argument."
                )
        if self._tokens is not None and hasattr(prepared.model, "split_batch"):
            raise MisconfigurationException(
                f"microbatch_tokens={self._tokens} and {type(prepared.model).__name__}.split_batch both make the "
                "micro-batches. Leave one of them out."
            )

    def memory(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> MemoryArguments:
        """Return the number of gradients that each parameter has at the same time."""
        owners = prepared.ranks.world_size if prepared.options.zero_stage == 2 else 1
        return {"gradient_sets": num_gradient_sets(prepared.model.trainer, prepared.model, optimizers, owners)}

    def training_step(self, prepared: Preparation, pipeline: Pipeline) -> "TrainingStepPerMicrobatch":
        """Return the object that runs ``training_step`` for all micro-batches."""
        model, ranks, weights = prepared.model, prepared.ranks, None
        if self._loss_weight == "tokens" or has_own_weights(model):

            def sum_over_replicas(numbers: Sequence[float]) -> list[float]:
                summed = ranks.reduce(torch.tensor(numbers, dtype=torch.float64), reduce_op="sum")
                return list(summed.tolist())

            weights = LossWeights(
                model,
                sum_over_replicas,
                ranks.world_size,
                same_passes=prepared.options.zero_stage == 3,
            )
        return TrainingStepPerMicrobatch(model, pipeline, prepared.precision, prepared.settings, weights, self._tokens)

    def begin(self, run: Run) -> Iterable[Undo]:
        """Collect the values that micro-batches log."""
        yield collect_logs(run.model, _collector.get)


class TrainingStepPerMicrobatch:
    """Runs ``model.training_step(batch, *rest)`` one micro-batch at a time.

    Args:
        model: The model. If it has a method ``split_batch(batch, num_microbatches)``, this method makes the
            micro-batches.
        pipeline: The running pipeline.
        precision: Provides the context of ``training_step``, and the loss scale if it has a gradient scaler.
        settings: Settings of the pipeline: the largest number of micro-batches.
        loss_weights: Provides the weights of micro-batches, accumulated batches and replicas. By default, micro-batches
            are weighted by their rows, and batches and replicas equally, as in Lightning.
        microbatch_tokens: The largest number of tokens of a micro-batch of rows of similar length. By default, rows are
            split in order, into the number of micro-batches in the settings.
    """

    def __init__(
        self,
        model: LightningModule,
        pipeline: Pipeline,
        precision: Precision,
        settings: Settings,
        loss_weights: LossWeights | None = None,
        microbatch_tokens: int | None = None,
    ) -> None:
        self._tokens = microbatch_tokens
        self._model, self._pipeline, self._precision, self._settings = model, pipeline, precision, settings
        self._scaler, self._loss_weights = scaler_of(precision), loss_weights
        self._has_checked_labels = loss_weights is not None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``training_step`` and the backward pass for all micro-batches.

        Args:
            args: The positional arguments of ``training_step``: the whole batch, and further arguments, which are the
                same for every micro-batch.
            kwargs: The keyword arguments of ``training_step``, in the order of its signature.

        Returns:
            The combined output of ``training_step``.

        Raises:
            MisconfigurationException: If the batch cannot be split, if a micro-batch has no valid weight, or if
                ``training_step`` returns something that Lightning does not accept.
        """
        if not self._model.automatic_optimization:  # switched off since the start
            check_automatic_optimization(self._model, self._settings.schedule)
        batch, *rest = (*args, *kwargs.values())
        with self._pipeline.step():
            return self._run(batch, rest)

    def _run(self, batch: Any, rest: Sequence[Any]) -> Any:
        split = split_for(self._model, batch, self._settings.microbatches, self._tokens)
        parts, sizes = split.parts, split.sizes
        if not self._has_checked_labels:  # once: counting the labels of each batch would wait for the device
            self._has_checked_labels = True
            warn_of_ignored_labels(parts, sizes)
        weights: Sequence[float] = sizes
        release_factors: Callable[[], ReleaseFactors] = ReleaseFactors
        factor = 1.0
        trainer = self._model.trainer
        if self._loss_weights is not None:
            if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:  # Lightning clears the gradients then
                self._loss_weights.begin_step()
            weights = self._loss_weights.of(parts)
            weight, factor = self._loss_weights.of_batch(weights)
            release_factors = partial(self._loss_weights.added, weight, trainer.accumulate_grad_batches)
        logs = _Logs(weights, self._loss_weights)
        outputs: list[Mapping[str, Any] | None] = [None] * len(parts)

        def step(m: int) -> Tensor | None:
            token = _collector.set(partial(logs.collect, m))
            try:
                output = self._model.training_step(parts[m], *rest)
            finally:
                _collector.reset(token)
            parts[m] = None
            if isinstance(output, Tensor) and output.is_floating_point():
                return output
            loss = ClosureResult.from_training_step_output(output).closure_loss  # raises Lightning's own errors
            if isinstance(output, Mapping):
                outputs[m] = recursive_detach(output)  # otherwise the graphs of all micro-batches would be kept
            return loss

        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        with self._precision.train_step_context():
            context = PassContext.capture(self._pipeline.device.type)
        codes = [partial(step, m) for m in range(len(parts))]
        if num_gradient_sets(trainer, self._model, trainer.optimizers) == 1:
            for optimizer in trainer.optimizers:  # Lightning clears them after the pass, when there would be two sets
                optimizer.zero_grad()
        loss = self._pipeline.interleave(codes, _normalised(weights, sizes), context, scale, release_factors, factor)
        with context.entered(grad=True):
            logs.log_to(self._model)
        return _combine_outputs(outputs, loss, split, weights)


def _check_tokens(tokens: int | None, microbatches: object, schedule: object, settings: Settings) -> None:
    """Check the option ``microbatch_tokens``.

    Raises:
        MisconfigurationException: If it is no number of tokens, or has no effect.
    """
    if tokens is None:
        return
    check_whole_number("microbatch_tokens", tokens, 1)
    reasons = {
        f"schedule={schedule!r} runs training_step once for the whole batch": not settings.interleaves,
        f"schedule={schedule!r} has a fixed number of micro-batches": not isinstance(schedule, str)
        or schedule not in SCHEDULES,
        f"microbatches={microbatches!r} gives their number": microbatches != DEFAULT_MICROBATCHES,
    }
    for reason, applies in reasons.items():
        if applies:
            raise MisconfigurationException(
                f"microbatch_tokens={tokens} cuts each batch into as many micro-batches as it needs, but {reason}. "
                "Leave one of them out, or use schedule='1f1b'."
            )


def check_automatic_optimization(model: LightningModule, schedule: ScheduleChoice) -> None:
    """Check that optimization is automatic if the schedule runs ``training_step`` once per micro-batch.

    Raises:
        MisconfigurationException: If the model steps its optimizers itself.
    """
    if schedule != "gpipe" and not model.automatic_optimization:
        raise MisconfigurationException(
            f"schedule={schedule!r} runs training_step once per micro-batch, so manual optimization would step after "
            "each of them. Use schedule='gpipe', or automatic optimization."
        )


def _normalised(weights: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return the share of each micro-batch in the loss of the batch.

    If all weights are zero, micro-batches are weighted by rows. As in one process, the loss is then NaN if the model
    returns NaN; otherwise it is the mean of the numbers that the model returns.
    """
    for known in (weights, sizes, [1.0] * len(weights)):
        if total := sum(known):
            return [weight / total for weight in known]
    raise AssertionError("a batch has at least one micro-batch")


def num_gradient_sets(
    trainer: Any, model: LightningModule, optimizers: Iterable[Optimizer] = (), num_owners: int = 1
) -> float:
    """Return how many sets of gradients a process holds during a pass that runs within ``training_step``.

    Lightning clears the gradients of the last step after ``training_step``, when such a pass has already computed new
    gradients. If no user code can read the old gradients in between, Relay clears them before the pass, and there is
    one set. There are two sets

    * if gradients are accumulated, because the gradients of earlier batches stay;
    * if the model or a callback overrides ``on_before_zero_grad``, or the model overrides ``optimizer_zero_grad``;
    * if the class of an optimizer overrides ``zero_grad``.

    Args:
        trainer: The Trainer.
        model: The model.
        optimizers: The optimizers. If they are left out, none is assumed to override ``zero_grad``.
        num_owners: Number of replicas among which the averaged gradients of a step are divided. Gradients that are
            accumulated are whole in each of them.
    """
    accumulates = trainer.accumulate_grad_batches > 1 or any(
        isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches()
        for callback in trainer.callbacks
    )
    hooks = [
        (model.on_before_zero_grad, LightningModule.on_before_zero_grad),
        (model.optimizer_zero_grad, LightningModule.optimizer_zero_grad),
        *((callback.on_before_zero_grad, Callback.on_before_zero_grad) for callback in trainer.callbacks),
    ]
    # A hook may be any callable, even one that Lightning's is_overridden does not accept.
    is_seen = any(getattr(hook, "__func__", None) is not original for hook, original in hooks)
    if accumulates:
        return 2
    return 1 if not is_seen and all(map(clears_as_torch_does, optimizers)) else 1 + 1 / num_owners


def split_for(model: Any, batch: Any, microbatches: int, max_tokens: int | None = None) -> Microbatches:
    """Return the micro-batches for ``training_step`` of a model.

    Args:
        model: The model, which may have a method ``split_batch``.
        batch: The batch.
        microbatches: The largest number of micro-batches.
        max_tokens: The option ``microbatch_tokens``, which replaces ``microbatches``.

    Raises:
        MisconfigurationException: If the batch cannot be split.
    """
    if not hasattr(model, "split_batch"):
        try:
            if max_tokens is not None:
                return split_by_length(batch, max_tokens)
            return Microbatches(*split_batch(batch, microbatches))
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error
    parts = list(model.split_batch(batch, microbatches))
    if not parts:
        raise MisconfigurationException(f"{type(model).__name__}.split_batch returned no micro-batch.")
    try:
        return Microbatches(parts, [split_batch(part, 1)[1][0] for part in parts])
    except ValueError:  # only the user's code knows the numbers of rows, so all weights are equal
        return Microbatches(parts, [1] * len(parts))


@dataclass
class _Logged:
    """One call of ``self.log``."""

    value: Any
    weight: float
    settings: dict[str, Any]


@dataclass
class _Combined:
    """The combined value that is logged under one name for the whole batch.

    Attributes:
        name: The name.
        value: The combined value.
        settings: Other arguments of ``self.log``.
        metric: The metric, if the model logs a metric; ``value`` is then its value for the batch, or ``None``.
        weight: Total weight of the values, if ``value`` is a mean with weights other than rows.
    """

    name: str
    value: Any
    settings: dict[str, Any]
    metric: Metric | None = None
    weight: float | None = None


class _Logs:
    """The values that ``training_step`` logs for each micro-batch.

    Args:
        weights: The weight of each micro-batch.
        loss_weights: The source of the weights, if they are not numbers of rows.
    """

    def __init__(self, weights: Sequence[float], loss_weights: LossWeights | None) -> None:
        self._weights, self._loss_weights = weights, loss_weights
        self._logged: dict[str, list[_Logged]] = {}

    def collect(self, m: int, name: str, value: Any, settings: dict[str, Any]) -> None:
        """Keep a value that micro-batch ``m`` has logged."""
        given = settings.get("batch_size")
        weight = self._weights[m] if given is None else given
        if isinstance(value, Tensor):
            value = value.detach().clone()  # later code may change it
        elif isinstance(value, Metric):
            settings["metric"] = value
            value = forward_cache(value)
        self._logged.setdefault(name, []).append(_Logged(value, weight, settings))

    def log_to(self, model: LightningModule) -> None:
        """Log each name once, with the combined value of all micro-batches."""
        combined = [self._combined(name, logged) for name, logged in self._logged.items()]
        if self._loss_weights is not None and self._loss_weights.num_replicas > 1:
            synchronised = [each for each in combined if each.weight is not None and _is_synchronised(each)]
            _weight_replicas(self._loss_weights, synchronised)
        for each in combined:
            if each.metric is not None and each.value is not None:
                set_forward_cache(each.metric, each.value)
            model.log(each.name, each.value if each.metric is None else each.metric, **each.settings)

    def _combined(self, name: str, logged: Sequence[_Logged]) -> _Combined:
        settings = logged[-1].settings
        values, weights = [entry.value for entry in logged], [entry.weight for entry in logged]
        metric = settings.pop("metric", None)
        if metric is not None:
            known = isinstance(values[-1], Tensor)  # it is None if the metric has not been called, but updated
            return _Combined(name, _mean(values, weights) if known else None, settings, metric)
        reduce_fx = settings.get("reduce_fx", "mean")
        kind = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        if kind in ("sum", "max", "min"):
            value = getattr(torch.stack([torch.as_tensor(value) for value in values]), kind)()
            return _Combined(name, value, settings)
        combined = _Combined(name, _mean(values, weights), settings)
        if settings.get("batch_size") is not None:
            settings["batch_size"] = sum(weights)
        elif self._loss_weights is not None:
            combined.weight = settings["batch_size"] = float(sum(weights))  # Lightning would round a mean of integers
        return combined


def _weight_replicas(loss_weights: LossWeights, means: Sequence[_Combined]) -> None:
    """Prepare means for ``sync_dist=True``, which averages the values of a step over replicas without weights.

    With weights w of the replicas, values v, and W the mean of w, the plain mean of v * w / W is the weighted mean of
    v. Over an epoch, Lightning weights these values by the batch size W.

    Means that are only logged at the end of the epoch need no W: Lightning then adds v * w and w over all batches and
    replicas. The replicas may log them for different batches.
    """
    of_step = []
    for mean in means:
        if mean.settings.get("on_step") is not False:
            of_step.append(mean)
        elif not mean.weight:
            mean.value = 0.0  # it may be NaN
    if not of_step:
        return
    own = [mean.weight or 0.0 for mean in of_step]
    for mean, weight, average in zip(of_step, own, loss_weights.over_replicas(own), strict=True):
        if average:
            mean.value = mean.value * (weight / average) if weight else 0.0
            mean.settings["batch_size"] = average


def _is_synchronised(combined: _Combined) -> bool:
    return bool(combined.settings.get("sync_dist")) and not combined.settings.get("rank_zero_only")


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean. A value with weight zero may be infinite or NaN."""
    total = sum(weights)
    if not total or len(values) == 1:
        return values[-1]
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True) if weight)


def _combine_outputs(
    outputs: Sequence[Mapping[str, Any] | None], loss: Tensor | None, split: Microbatches, weights: Sequence[float]
) -> Any:
    sizes = split.sizes
    known = [m for m, output in enumerate(outputs) if output is not None]
    combined: dict[str, Any] = {}
    for name in dict.fromkeys(name for m in known for name in outputs[m] or ()):
        found = [(output[name], m) for m in known if (output := outputs[m]) is not None and name in output]
        combined[name] = _combine_values(
            [value for value, _ in found], [sizes[m] for _, m in found], [weights[m] for _, m in found], split.rows
        )
    return {**combined, "loss": loss} if combined else loss


def _combine_values(
    values: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], rows: Sequence[int] | None = None
) -> Any:
    """Return the mean of numbers, the concatenation of tensors with one row per sample, or else the last value.

    Rows are in the order of the batch: ``rows`` has the row of the batch for each row of the micro-batches.
    """
    if all(isinstance(value, Tensor) for value in values):
        detached = [value.detach() for value in values]
        if all(value.dim() and value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
            joined = torch.cat(detached)
            if rows is None or len(rows) != len(joined):
                return joined
            return torch.empty_like(joined).index_copy(0, torch.tensor(rows, device=joined.device), joined)
        if all(value.dim() == 0 and value.is_floating_point() for value in values):
            return _mean(detached, weights)
        return detached[-1]
    if all(isinstance(value, float) for value in values):
        return _mean(values, weights)
    return values[-1]
