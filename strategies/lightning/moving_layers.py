"""Layers that move to other stages in mid-run: in which runs they can, and how a move is described."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from strategies.lightning.compat import MisconfigurationException


def moves(before: Sequence[int], after: Sequence[int], stage_of: Sequence[int]) -> str:
    """Return which layers move, such as ``layers 4 and 5 from stage 0 to the driver``.

    Args:
        before: The number of layers of each chunk before.
        after: The same afterwards.
        stage_of: The stage of each chunk; the driver has the last stage.
    """
    driver = max(stage_of)

    def stages(balance: Sequence[int]) -> list[int]:
        return [stage for stage, length in zip(stage_of, balance, strict=True) for _ in range(length)]

    def name(stage: int) -> str:
        return "the driver" if stage == driver else f"stage {stage}"

    found = []
    ways = [(old, new) for old, new in zip(stages(before), stages(after), strict=True)]
    for (old, new), group in groupby(enumerate(ways), key=lambda each: each[1]):
        places = [place for place, _ in group]
        if old != new:
            first, last = places[0], places[-1]
            what = f"layer {first}" if first == last else f"layers {first} to {last}"
            found.append(f"{what} from {name(old)} to {name(new)}")
    return ", ".join(found) or "no layer, between processes"


def refuse(what: str, reasons: Mapping[str, bool]) -> None:
    """Raise an error with the first reason that applies.

    Raises:
        MisconfigurationException: If one does.
    """
    for reason, applies in reasons.items():
        if applies:
            raise MisconfigurationException(f"{what} {reason}. Leave one of them out.")


def check_movable(
    what: str, *, replicas: int, is_external: bool, devices: Sequence[torch.device], gathers: bool, profiles: bool
) -> None:
    """Check that layers can move to other stages.

    Args:
        what: What needs that.
        replicas: Number of pipelines.
        is_external: Whether torchrun, SLURM or the like have started the workers.
        devices: The device of each stage.
        gathers: Whether the driver may hold the whole model.
        profiles: Whether the workers record traces for ``PyTorchProfiler``.

    Raises:
        MisconfigurationException: If they cannot.
    """
    others = [device for device in devices if device.type != "cpu"]
    reasons = {
        "is for one pipeline, but data_parallel_size is larger than 1": replicas > 1,
        "starts workers, but torchrun, SLURM or the like have started those of this run": is_external,
        f"is for stages on CPUs, but one is on {', '.join(map(str, others[:1]))}": bool(others),
        "brings all weights to the driver for a moment, which gather_on_end=False avoids (it is the default for a "
        "model that was built in configure_model or init_module)": not gathers,
        "ends workers, whose traces PyTorchProfiler would lose": profiles,
    }
    refuse(what, reasons)
