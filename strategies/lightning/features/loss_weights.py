"""The weight of each micro-batch in the loss, and of each accumulated batch and replica in the gradient of a step.

Where ``training_step`` runs once per micro-batch, it returns means over this micro-batch. If micro-batches have
different numbers of elements (such as tokens that are not padding), their means must be weighted by these numbers. With
such weights ``w``, the gradient of an optimizer step is

    sum of w[r, b, m] * g[r, b, m] / sum of w[r, b, m]        over replicas r, accumulated batches b, micro-batches m

where ``g`` is the gradient of one micro-batch. The weights of later batches are unknown while a batch runs, so
``.grad`` is the mean over the batches so far. The next batch scales ``.grad`` down and adds its share::

    total weight    0          4                       10
    .grad           nothing    1 * g(4)                4/10 * .grad + 6/10 * g(6)

Here the weight of a batch is the sum over the replicas. Their gradients are averaged with equal shares, so each of *n*
replicas multiplies the gradients of its backward pass by *n* times its own share of this weight.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from strategies.lightning.compat import LightningModule, MisconfigurationException, rank_zero_info, rank_zero_warn
from strategies.pipeline.executor.per_microbatch import ReleaseFactors
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.stage.microbatch.by_length import IGNORED_LABEL

_LABELS = ("shift_labels", "labels")
"""The names under which labels are searched for, in this order."""


def has_own_weights(model: LightningModule) -> bool:
    """Return whether a model defines the weights of its micro-batches."""
    return hasattr(model, "microbatch_weight")


class LossWeights:
    """Weights other than rows: of micro-batches, and of batches and replicas in the gradient of a step.

    Args:
        model: The model. If it has a method ``microbatch_weight(microbatch)``, this method returns the weight.
            Otherwise the weight is the number of tokens: labels other than ``IGNORED_LABEL``. The first label of each
            row does not count if a Hugging Face model in ``model`` shifts ``labels``, whether or not ``training_step``
            uses its loss. Labels that have already been shifted are called ``shift_labels``.
        sum_over_replicas: Returns, for each of several numbers, the sum over the replicas. Every replica calls it.
        num_replicas: Number of replicas.
        same_passes: Whether all replicas must run the same backward passes, because they divide parameters.
    """

    def __init__(
        self,
        model: LightningModule,
        sum_over_replicas: Callable[[Sequence[float]], list[float]] = list,
        num_replicas: int = 1,
        *,
        same_passes: bool = False,
    ) -> None:
        self._model, self._sum_over_replicas, self.num_replicas = model, sum_over_replicas, num_replicas
        self._same_passes = same_passes
        self._total = 0.0
        """Weight of the batches of this step whose gradients are in ``.grad``."""
        self._is_first = True
        """Whether no backward pass of this step has run."""
        self._is_announced = False

    def of(self, microbatches: Sequence[Any]) -> list[float]:
        """Return the weight of each micro-batch.

        Raises:
            MisconfigurationException: If the method of the model returns an invalid weight, or if there are no labels
                to count.
        """
        if has_own_weights(self._model):
            model: Any = self._model
            return [self._checked(model.microbatch_weight(microbatch)) for microbatch in microbatches]
        return self._numbers_of_tokens(microbatches)

    def of_batch(self, weights: Sequence[float]) -> tuple[float, float]:
        """Return the weight of a batch, and the factor of this replica's gradients in the backward pass.

        Args:
            weights: The weight of each micro-batch on this replica.

        Raises:
            MisconfigurationException: If a micro-batch without weight would have no backward pass, although all
                replicas must run the same ones.
        """
        own = sum(weights)
        if self.num_replicas == 1:
            return own, 1.0
        total, num_without = self._sum_over_replicas([own, float(not all(weights))])
        if num_without and self._same_passes:
            raise MisconfigurationException(
                f"zero_stage=3 needs the same backward passes in all replicas, but a micro-batch of this batch counts "
                f"nothing in the loss (on this replica they have weights of {list(weights)}), so it has none. Leave "
                "rows without labels out, use fewer micro-batches, or zero_stage=2."
            )
        return total, own * self.num_replicas / total if total else 1.0

    def begin_step(self) -> None:
        """Reset the count: the next backward pass is the first of an optimizer step."""
        self._total, self._is_first = 0.0, True

    def added(self, weight: float, num_batches: int) -> ReleaseFactors:
        """Count a batch whose gradients are now added to ``.grad``.

        Args:
            weight: Weight of the batch, the sum of the weights of its micro-batches.
            num_batches: Number by which Lightning divides the loss of the batch.

        Returns:
            The factors that make ``.grad`` the weighted mean over the batches of the step.
        """
        before, self._total = self._total, self._total + weight
        is_first, self._is_first = self._is_first, False
        if not self._total:
            return ReleaseFactors()  # no batch has had a weight so far: Lightning's mean
        # A value in .grad before the first batch comes from the user, who has replaced zero_grad.
        return ReleaseFactors(added=num_batches * weight / self._total, kept=1.0 if is_first else before / self._total)

    def over_replicas(self, totals: Sequence[float]) -> list[float]:
        """Return mean weights over the replicas, given the weights on this replica."""
        return [total / self.num_replicas for total in self._sum_over_replicas(totals)]

    def _checked(self, weight: Any) -> float:
        if isinstance(weight, Tensor) and weight.numel() == 1:
            weight = weight.item()
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0.0 <= float(weight) < math.inf:
            raise MisconfigurationException(
                f"{type(self._model).__name__}.microbatch_weight returned {weight!r}; the weight of a micro-batch is a "
                "finite number of at least 0, such as its number of tokens."
            )
        return float(weight)

    def _numbers_of_tokens(self, microbatches: Sequence[Any]) -> list[float]:
        name, columns = _labels_of(microbatches)
        shifting = _shifting_model(self._model) if name == "labels" else None
        if shifting is not None:
            columns = [labels[..., 1:] for labels in columns]
        if not self._is_announced:
            self._is_announced = True
            how = f", after the causal shift of {shifting}" if shifting else ""
            rank_zero_info(f"loss_weight='tokens' counts {name!r} other than {IGNORED_LABEL}{how}.")
        counts = torch.stack([(labels != IGNORED_LABEL).sum() for labels in columns])  # one transfer from the device
        return list(counts.tolist())


def warn_of_ignored_labels(microbatches: Sequence[Any], sizes: Sequence[int]) -> None:
    """Warn if micro-batches have different numbers of tokens per row although they are weighted by rows.

    Args:
        microbatches: The micro-batches of a batch.
        sizes: The number of rows of each micro-batch.
    """
    for name in _LABELS:
        columns = [_entry(microbatch, name) for microbatch in microbatches]
        if not all(isinstance(labels, Tensor) and _is_integral(labels) for labels in columns):
            continue
        counts = torch.stack([(labels != IGNORED_LABEL).sum() for labels in columns]).tolist()
        if any(count * sizes[0] != counts[0] * size for count, size in zip(counts, sizes, strict=True)):
            rank_zero_warn(
                f"The micro-batches have {counts} {name!r} other than {IGNORED_LABEL}, but count by their rows "
                f"{list(sizes)}. A loss that is a mean over these labels then differs from that of one process. Set "
                "RPCSequentialStrategy(loss_weight='tokens')."
            )
        return


def check_loss_weight(loss_weight: str, settings: Settings) -> None:
    """Check that ``loss_weight="tokens"`` has an effect.

    Args:
        loss_weight: The setting.
        settings: Settings of the pipeline.

    Raises:
        MisconfigurationException: If ``training_step`` runs once for the whole batch.
    """
    if loss_weight == "tokens" and not settings.interleaves:
        raise MisconfigurationException(
            f"loss_weight='tokens' weights micro-batches, but under schedule={settings.schedule!r} training_step "
            "computes one loss for the whole batch, which may be a mean over its tokens. Leave loss_weight out, or use "
            "schedule='1f1b'."
        )


# Which labels are tokens


def _labels_of(microbatches: Sequence[Any]) -> tuple[str, list[Tensor]]:
    """Return the name of the labels, and the labels of each micro-batch."""
    for name in _LABELS:
        found = [_entry(microbatch, name) for microbatch in microbatches]
        if all(isinstance(labels, Tensor) and _is_integral(labels) for labels in found):
            return name, found
    raise MisconfigurationException(
        f"loss_weight='tokens' counts the labels of each micro-batch: integers, in an entry or attribute "
        f"{' or '.join(map(repr, _LABELS))}. {_described(microbatches[0])} Name the labels so, or give "
        "the model a method microbatch_weight(microbatch) that returns the number of tokens."
    )


def _entry(microbatch: Any, name: str) -> Any:
    return microbatch.get(name) if isinstance(microbatch, Mapping) else getattr(microbatch, name, None)


def _is_integral(labels: Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)


def _described(microbatch: Any) -> str:
    kind = type(microbatch).__name__
    for name in _LABELS:
        if (labels := _entry(microbatch, name)) is not None:
            what = str(labels.dtype) if isinstance(labels, Tensor) else type(labels).__name__
            return f"In this {kind}, {name!r} is of type {what}."
    if isinstance(microbatch, Mapping):
        return f"This {kind} has {', '.join(map(repr, microbatch))}."
    return f"This {kind} has neither."


def _shifting_model(model: nn.Module) -> str | None:
    """Return the class of the Hugging Face model in ``model`` whose loss shifts labels; ``None`` if none does.

    Such a loss compares the output for token n with the label of token n + 1, so nothing predicts the first label.

    Raises:
        MisconfigurationException: If it is unknown whether a model shifts labels.
    """
    decided = {type(part).__name__: _shifts(part) for part in _models_with_a_loss(model)}
    if None in decided.values() or len(set(decided.values())) > 1:
        raise MisconfigurationException(
            f"loss_weight='tokens' cannot tell whether the loss shifts the labels within {', '.join(decided)}. Give "
            "the batch 'shift_labels', or the model a method microbatch_weight(microbatch) that returns the number of "
            "tokens."
        )
    return next((name for name, shifts in decided.items() if shifts), None)


def _models_with_a_loss(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost Hugging Face models in ``module`` that compute a loss from labels."""
    # Wrappers, such as peft's, pass attribute reads on to the wrapped model. So this reads the attributes of the object
    # itself and of its class.
    has_loss = "loss_type" in vars(module) and hasattr(type(module), "loss_function")
    if has_loss and "labels" in inspect.signature(module.forward).parameters:
        yield module
        return
    for child in module.children():
        yield from _models_with_a_loss(child)


def _shifts(model: Any) -> bool | None:
    """Return whether the loss of a Hugging Face model shifts labels; ``None`` if this is unknown."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False  # the inputs of the decoder have been shifted instead
    forward = inspect.unwrap(type(model).forward)
    if "loss_function" in forward.__code__.co_names:
        loss = model.loss_function
        is_their_own = getattr(loss, "__module__", "").partition(".")[0] == "transformers"
        return loss.__name__ == "ForCausalLMLoss" if is_their_own else None
    kind = model.loss_type
    is_causal = kind is None or "ForCausalLM" in kind or "ForConditionalGeneration" in kind
    return None if is_causal else False
