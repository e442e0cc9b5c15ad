"""``schedule="auto"``: measure the layers, and find the schedule, the balance and the number of micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from strategies.common.joined_lists import lengths_of
from strategies.common.trees import tensors_in
from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.compat import LightningModule, MisconfigurationException, Precision, rank_zero_info
from strategies.lightning.partitioning import FoundExample, find_example, measuring
from strategies.lightning.search_settings import MAX_CHUNKS, MAX_MICROBATCHES, SearchSettings
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.partition.model_costs import Costs, Example, costs_of
from strategies.pipeline.partition.profiling import first_microbatch
from strategies.pipeline.partition.sequential import Pipelined, check_balance, check_lists, even_balance
from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.planning.action_costs import ByAction, DriverPart, PlannedLayer, WithoutTimes, model_costs
from strategies.planning.plan_rows import ALLOCATOR_SHARE, MeasuredPasses, activation_peaks
from strategies.planning.search import EFFORT, ModelCosts, search

HELD_WITHOUT_GRADIENTS = 3.0
"""The number of copies of a trained parameter without its gradients: itself, and Adam's states."""

CLEARLY_FASTER = 0.97
"""The predicted gain that a custom order must have: it fits the measured costs, and predictions were up to 5 % off."""


def find_schedule(
    model: LightningModule,
    module: Pipelined,
    *,
    num_stages: int,
    given: Sequence[int] | Literal["even"] | None,
    settings: Settings,
    choices: SearchSettings,
    device: torch.device,
    precision: Precision | None = None,
    in_reverse: bool = False,
    gradient_sets: int = 1,
    budget_seconds: float = 1.0,
    effort: int = EFFORT,
    num_processes: int | None = None,
) -> PlannedSchedule:
    """Measure a model and return the schedule with the shortest time for a batch.

    Args:
        model: The model. It is measured on its ``example_input_array``, or otherwise, for a Hugging Face model, on an
            input made from its configuration. Its parts outside ``module`` are on ``device``.
        module: The pipelined part of the model.
        num_stages: Number of processes, at least 2.
        given: The number of layers of each chunk; ``"even"`` for equal numbers; ``None`` to find them.
        settings: Recomputation, and the number of chunks of layers that a process may have.
        choices: The settings that the search may choose.
        device: The device on which a copy of one layer at a time is measured.
        precision: The precision of the training; by default the precision of the tensors.
        in_reverse: Whether the first stage has the last layers.
        gradient_sets: Number of gradients of a parameter that exist at the same time.
        budget_seconds: Time limit for all passes of all layers, in addition to the warm-up and the first few passes.
        effort: As in :func:`~strategies.planning.search.search`.
        num_processes: Number of processes on a host, of all replicas; by default one for each stage.

    Raises:
        MisconfigurationException: If there is no example input, if the model does not take it, if there are too few
            layers, or if nothing fits into the memory.
    """
    precision = precision or Precision()
    found = find_example(model, module, device, precision)
    kind = type(model).__name__
    if found is None:
        raise MisconfigurationException(
            f"schedule='auto' measures the layers, which needs an example input: set `self.example_input_array` on "
            f"{kind} to a batch of inputs, or choose a schedule, such as '1f1b' or 'interleaved'."
        )
    if choices.finds_microbatches and (found.is_made or found.rows < 2):
        what = "there is none" if found.is_made else "it has one row"
        raise MisconfigurationException(
            f"microbatches='auto' splits `example_input_array` of {kind} into different numbers of parts, but {what}. "
            "Set it to a batch of inputs with as many rows as the batches of training, or give the number."
        )
    numbers = _numbers(found.rows, choices)
    lengths = lengths_of(module)
    num_chunks = [num_stages * len(lengths) * chunks for chunks in range(1, (settings.chunks or MAX_CHUNKS) + 1)]
    balances = {number: _balance(given, lengths, number, num_stages, num_chunks) for number in num_chunks}
    with as_misconfiguration(), measuring(model, num_processes or num_stages, precision):
        try:
            measured = measure_actions(
                model,
                module,
                found,
                numbers,
                device=device,
                budget_seconds=budget_seconds,
                gradient_sets=gradient_sets,
                with_steps=True,
            )
        except Exception as error:
            if not found.is_made:
                raise
            raise MisconfigurationException(
                f"schedule='auto' measures the layers, and the input made from the configuration of "
                f"{type(found.model).__name__} does not fit ({type(error).__name__}: {error}). Set "
                f"`self.example_input_array` on {kind} to a batch of inputs, or choose a schedule, such as '1f1b'."
            ) from error

        def known(number: int) -> ModelCosts:
            costs = measured[number]
            passes = MeasuredPasses(
                layers=costs.layers[::-1] if in_reverse else costs.layers,
                driver=costs.driver,
                microbatches=number,
                checkpoint=settings.checkpoint,
                input_bytes=input_bytes(found, number),
                lengths=lengths,
            )
            peaks = partial(activation_peaks, measured=passes, at_once=False)
            of_model = model_costs(costs, in_reverse=in_reverse)
            return replace(
                of_model,
                activation_peaks=peaks,
                memory_scale=1 + ALLOCATOR_SHARE,
                lengths=lengths,
                checkpoint=settings.checkpoint,
            )

        not_measured = measured[numbers[-1]].not_measured
        plan = search(
            known,
            num_stages,
            numbers,
            max_chunks=settings.chunks or MAX_CHUNKS,
            memory_limit_bytes=choices.memory_limit_bytes,
            balance_of=balances.get if given is not None else None,
            clearly_faster=CLEARLY_FASTER,
            effort=effort,
        )
    line = f"RPCSequentialStrategy: schedule='auto' chooses {plan.reason}"
    if not_measured:
        line += f" (without the code outside the layers: {not_measured})"
    rank_zero_info(f"{line}.")
    return plan.planned_schedule(gradient_sets)


def measure_actions(
    model: LightningModule,
    module: Pipelined,
    found: FoundExample,
    numbers: Sequence[int],
    *,
    device: torch.device,
    budget_seconds: float,
    gradient_sets: int = 1,
    split: Callable[[int], Any] | None = None,
    with_steps: bool = False,
) -> dict[int, Costs[PlannedLayer, DriverPart]]:
    """Measure the costs of a micro-batch for each layer and for the driver, for several numbers of micro-batches.

    Args:
        model: The model.
        module: The pipelined part of the model.
        found: The input.
        numbers: The numbers of micro-batches.
        device: The device on which a copy of one layer at a time is measured; on ``meta``, only bytes are measured.
        budget_seconds: Time limit for all passes, in addition to the warm-up and the first few passes.
        gradient_sets: Number of gradients of a parameter that exist at the same time.
        split: Returns the first micro-batch of the input, given their number; by default its first rows.
        with_steps: Also measure a step of AdamW, in place of the optimizer, which does not exist yet.
    """
    measured, param_scale = {}, HELD_WITHOUT_GRADIENTS + gradient_sets
    for number in numbers:
        value = found.value
        if split is not None:
            value = split(number)
        elif not found.is_made:
            value = first_microbatch(value, min(found.rows, number))
        measure: ByAction | WithoutTimes = WithoutTimes(param_scale=param_scale)
        if device.type != "meta":
            budget = budget_seconds / len(module) / len(numbers)
            measure = ByAction(budget, param_scale=param_scale, with_steps=with_steps)
        measured[number] = costs_of(model, module, Example(found.model, value), measure, device)
    return measured


def input_bytes(found: FoundExample, number: int) -> int:
    """Return the bytes of the input of a micro-batch."""
    all_bytes = sum(tensor.nbytes for tensor in tensors_in(found.value))
    return all_bytes if found.is_made else -(-all_bytes // number)


def _numbers(rows: int, choices: SearchSettings) -> list[int]:
    """Return the numbers of micro-batches to choose from: divisors of the number of rows, and powers of two."""
    if not choices.finds_microbatches:
        return [choices.given_microbatches]
    most = min(rows, choices.max_microbatches or MAX_MICROBATCHES)
    powers = {2**k for k in range(most.bit_length()) if 2**k <= most}
    return sorted(powers | {number for number in range(1, most + 1) if rows % number == 0})


def _balance(
    given: Sequence[int] | Literal["even"] | None,
    lengths: Sequence[int],
    number: int,
    num_stages: int,
    numbers: list[int],
) -> list[int] | None:
    """Return the given balance if it has this number of chunks in all lists; otherwise ``None``."""
    if given is None or number // len(lengths) > min(lengths):
        return None
    if given == "even":
        return even_balance(lengths, number // len(lengths))
    if len(given) != number and len(given) in numbers:
        return None
    with as_misconfiguration():
        balance = check_balance(given, sum(lengths), num_stages, chunks=number // num_stages)
        check_lists(balance, lengths)
        return balance
