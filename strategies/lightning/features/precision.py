"""Makes the casting, clipping and gradient scaler of Lightning's precision plug-ins apply to all stages."""

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from strategies.lightning.compat import (
    DoublePrecision,
    HalfPrecision,
    MisconfigurationException,
    MixedPrecision,
    Precision,
    rank_zero_warn,
)
from strategies.lightning.features.feature import Feature, PipelineArguments
from strategies.lightning.hooks import Undo, follow_precision, operations_over_stages, scaler_of
from strategies.lightning.run import Preparation, Run


class PrecisionOnStages(Feature):
    """Makes the precision plug-in apply to all stages."""

    def check(self, prepared: Preparation) -> None:
        """Check that autocast reaches all stages, and warn of a plug-in that may do more."""
        check_mixed_precision(prepared.precision, prepared.devices)
        warn_of_other_contexts(prepared.precision)

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return whether there is a gradient scaler."""
        return {"skips_infinite_steps": scaler_of(prepared.precision) is not None}

    def begin(self, run: Run) -> Iterable[Undo]:
        """Make clipping and unscaling reach all stages."""
        return follow_precision(run.precision, operations_over_stages(run.pipeline.optimizers))


_KNOWN = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


def warn_of_other_contexts(precision: Precision) -> None:
    """Warn if steps run in a context of its own class: Relay gives the stages only what it knows of a context."""
    kind = type(precision)
    for name in ("forward_context", "train_step_context"):
        if getattr(kind, name) not in [getattr(known, name) for known in _KNOWN]:
            rank_zero_warn(
                f"{kind.__name__}.{name} may enter more than autocast and a default dtype, which are all that Relay "
                "gives to the layers of every process: FP8 recipes, torch modes or a choice of kernels would be lost, "
                "or hold in some stages only. Enter them in the forward method of the layers instead."
            )
            return


def check_mixed_precision(precision: Precision, devices: Sequence[torch.device]) -> None:
    """Check that autocast, which works on one kind of device, reaches all stages.

    Raises:
        MisconfigurationException: If stages are on devices of several kinds, under mixed precision.
    """
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1 and str(precision.precision).endswith("-mixed"):
        raise MisconfigurationException(
            f"precision={precision.precision!r} casts on one kind of device only, but the stages are on "
            f"{' and '.join(kinds)}, so some of them would compute in full precision. Put all stages on devices of one "
            "kind, or set precision='bf16-true' or '32-true'."
        )
