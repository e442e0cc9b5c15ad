"""Moves layers to other stages during a run: checks that they can move, moves them, and describes the move."""

import time
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.compat import MisconfigurationException, rank_zero_info
from strategies.lightning.run import Preparation, Run
from strategies.pipeline.partition.sequential import check_balance


def move_layers(run: Run, balance: Sequence[int], why: str) -> bool:
    """Move layers, with their optimizer states and gradients, to stages according to a new balance.

    Args:
        run: The run, between two batches.
        balance: The number of layers of each chunk.
        why: The end of the line that reports the move.

    Returns:
        Whether layers have moved.

    Raises:
        MisconfigurationException: If the numbers do not fit the layers, or if a stage would not fit into memory.
    """
    pipeline, stage_of, num_stages = run.pipeline, run.stage_of_chunk, run.num_stages
    with as_misconfiguration():
        chunks = len(stage_of) // num_stages
        numbers = check_balance(balance, len(pipeline.module), num_stages, chunks=chunks)
        before = pipeline.balance
        if numbers == before:
            return False
        run.states.forget()
        begin = time.perf_counter()
        pipeline.rebalance(numbers, run.check_memory)
    seconds = time.perf_counter() - begin
    rank_zero_info(
        f"RPCSequentialStrategy: balance {numbers} instead of {before}: {moves(before, numbers, stage_of)} "
        f"({seconds:.1f} s){why}."
    )
    return True


def check_can_move(what: str, prepared: Preparation) -> None:
    """Check that layers can move between the stages of a run.

    Raises:
        MisconfigurationException: If they cannot move.
    """
    check_movable(
        what,
        num_pipelines=prepared.ranks.num_pipelines,
        is_external=prepared.ranks.world is not None,
        devices=prepared.devices,
        gathers=prepared.gathers,
        profiles=prepared.is_profiled,
    )


def moves(before: Sequence[int], after: Sequence[int], stage_of: Sequence[int]) -> str:
    """Return which layers move, such as ``layers 4 and 5 from stage 0 to the driver``.

    Args:
        before: The number of layers of each chunk before the move.
        after: The number of layers of each chunk after the move.
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
        MisconfigurationException: If a reason applies.
    """
    for reason, applies in reasons.items():
        if applies:
            raise MisconfigurationException(f"{what} {reason}. Leave one of them out.")


def check_movable(
    what: str, *, num_pipelines: int, is_external: bool, devices: Sequence[torch.device], gathers: bool, profiles: bool
) -> None:
    """Check that layers can move to other stages.

    Args:
        what: What needs layers to move, for the message.
        num_pipelines: Number of pipelines.
        is_external: Whether torchrun, SLURM or a similar launcher has started the workers.
        devices: The device of each stage.
        gathers: Whether the driver may hold the whole model.
        profiles: Whether the workers make traces for ``PyTorchProfiler``.

    Raises:
        MisconfigurationException: If they cannot move.
    """
    others = [device for device in devices if device.type != "cpu"]
    reasons = {
        "is for one pipeline, but data_parallel_size or tensor_parallel_size is larger than 1": num_pipelines > 1,
        "starts workers, but torchrun, SLURM or the like have started those of this run": is_external,
        f"is for stages on CPUs, but one is on {', '.join(map(str, others[:1]))}": bool(others),
        "brings all weights to the driver for a moment, which gather_on_end=False avoids (it is the default for a "
        "model that was built in configure_model or init_module)": not gathers,
        "ends workers, whose traces PyTorchProfiler would lose": profiles,
    }
    refuse(what, reasons)
