"""Divides the layers of a pipeline among its stages, by their costs, and finds an example of their input."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from strategies.common.joined_lists import JoinedLists, lengths_of
from strategies.common.stage_layers import kinds_of
from strategies.common.torch_compat import tree_map_only
from strategies.common.transformers_compat import example_of, switch_off_cache
from strategies.common.trees import tensors_in
from strategies.launch.allocator import all_freed_memory_kept
from strategies.launch.workers import share_of_threads
from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.compat import (
    LightningModule,
    MisconfigurationException,
    Precision,
    rank_zero_info,
    rank_zero_warn,
)
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.partition.balance import partition_lists
from strategies.pipeline.partition.model_costs import (
    BySize,
    ByTime,
    Costs,
    Example,
    Measure,
    costs_of,
    costs_of_parameters,
)
from strategies.pipeline.partition.probe import calls_last_first
from strategies.pipeline.partition.profiling import PassSeconds
from strategies.pipeline.partition.sequential import Pipelined, check_balance, check_lists, even_balance
from strategies.pipeline.schedule.tables import recomputed

BUDGET_SECONDS = 1.0
"""The time that the measured passes of all layers may take together, beyond warm-up and the first few passes."""


def is_called_in_reverse(model: LightningModule, module: Pipelined, device: torch.device, precision: Precision) -> bool:
    """Return whether the model calls the blocks of an ``nn.ModuleList`` from the last to the first.

    This is known only for a model with an ``example_input_array``. For a model without it, the blocks are assumed to be
    called in order.
    """
    if isinstance(module, JoinedLists) and len(module.lengths) > 1:
        return False  # a model that calls the blocks of one list in reverse is refused in the first step
    if not isinstance(module, nn.ModuleList) or len(module) < 2 or model.example_input_array is None:
        return False
    with _without_cache(model), precision.forward_context():
        example = _moved(precision.convert_input(model.example_input_array), device)
        return calls_last_first(module, model, example)


def find_balance(
    model: LightningModule,
    module: Pipelined,
    *,
    path: str,
    num_stages: int,
    num_chunks: int,
    given: list[int] | Literal["even"] | None,
    by_time: bool,
    settings: Settings,
    device: torch.device,
    precision: Precision | None = None,
    in_reverse: bool = False,
    num_processes: int | None = None,
) -> list[int]:
    """Return the number of layers of each stage, as given or measured.

    Args:
        model: The model. It is measured on its ``example_input_array``. Without it, a Hugging Face model is measured on
            an input made from its configuration. The parts of the model outside ``module`` are on ``device``.
        module: The pipelined part of the model.
        path: Its dotted path in the model, or those of its lists, for messages.
        num_stages: Number of stages.
        num_chunks: Number of chunks of layers in all stages.
        given: The number of layers of each chunk, or ``"even"`` for equal numbers. ``None`` measures each layer and the
            rest of the model, which the process of the last stage runs. Without an input, only the parameters count,
            and the layers must all be alike.
        by_time: Whether seconds are measured, otherwise bytes.
        settings: Micro-batches, schedule and recomputation.
        device: Where a copy of one layer at a time is measured.
        precision: The precision of the training; by default, the precision of the tensors.
        in_reverse: Whether the first stage has the last layers.
        num_processes: Number of processes on a host, of all replicas; by default one for each stage.

    Raises:
        MisconfigurationException: If the given numbers do not fit the layers, or if there are too few layers or no
            example input.
    """
    if given is not None and given != "even":
        with as_misconfiguration():
            balance = check_balance(given, len(module), num_stages, chunks=num_chunks // num_stages)
            check_lists(balance, lengths_of(module))
            return balance
    lengths = lengths_of(module)
    chunks_of_list = num_chunks // len(lengths)
    if len(lengths) > 1 and min(lengths) < chunks_of_list:
        raise MisconfigurationException(
            f"The lists to be pipelined, {path}, have {', '.join(map(str, lengths))} layers, but each needs at least "
            f"{chunks_of_list}, one for each device. Use fewer devices, or name only the longer lists by module=..."
        )
    if len(module) < num_chunks and num_chunks > num_stages:
        raise MisconfigurationException(
            f"The pipelined {type(module).__name__} has {len(module)} layers, too few for {num_stages} devices with "
            f"{num_chunks} chunks of layers under schedule={settings.schedule!r}: each chunk needs one. Use fewer "
            "devices or a smaller chunks, schedule='1f1b', or divide the module into more layers."
        )
    if len(module) < num_stages:
        raise MisconfigurationException(
            f"The pipelined {type(module).__name__} has {len(module)} layers, too few for {num_stages} devices: each "
            f"stage needs one. Set devices to at most {len(module)}, or divide it into more layers."
        )
    if num_chunks == 1:
        return [len(module)]
    if given == "even" or num_stages == 1:
        return even_balance(lengths, chunks_of_list)
    if model.example_input_array is None and example_of(model, module) is None and not _are_alike(module):
        each = f"{num_stages} devices" if num_chunks == num_stages else f"{num_chunks} chunks"
        raise MisconfigurationException(
            f"Measuring the layers needs an example input: set `self.example_input_array` on {type(model).__name__} "
            f"to a batch of inputs, or give the balance, one number of layers for each of the {each}. "
            'balance="even" gives each the same number of layers, whatever they cost.'
        )
    precision = precision or Precision()
    with measuring(model, num_processes or num_stages, precision):
        costs = _costs(model, module, by_time=by_time, settings=settings, device=device, precision=precision)
    is_counted = settings.interleaves or not by_time
    layers = costs.layers[::-1] if in_reverse else costs.layers
    chunks = [[_cost(layer, again) for layer in layers] for again in _recomputed_shares(settings, num_stages, lengths)]
    balance = partition_lists(chunks, lengths, driver=costs.driver if is_counted else 0.0)
    mean = sum(chunks[0]) / len(layers)
    rank_zero_info(f"RPCSequentialStrategy: {_explained(balance, costs, mean, module, path, is_counted=is_counted)}")
    return balance


def _recomputed_shares(settings: Settings, num_stages: int, lengths: Sequence[int]) -> list[float]:
    """Return for each chunk the share of micro-batches whose forward pass runs again in the backward pass."""
    programs = settings.programs(num_stages, num_lists=len(lengths))
    rows = programs.actions_of_step(settings.microbatches)
    again = Counter(i for row in rows for _, i in recomputed(row, settings.checkpoint, settings.microbatches))
    return [again[i] / settings.microbatches for i in range(len(programs.rank_of))]


def _cost(layer: float | PassSeconds, recomputed_share: float) -> float:
    if not isinstance(layer, PassSeconds):
        return layer
    return layer.forward * (1 + recomputed_share) + layer.backward


def _costs(
    model: LightningModule,
    module: Pipelined,
    *,
    by_time: bool,
    settings: Settings,
    device: torch.device,
    precision: Precision,
) -> Costs[Any, float]:
    microbatches = settings.microbatches
    found = find_example(model, module, device, precision)
    if found is None:
        return costs_of_parameters(model, module, by_time=by_time)
    if not found.is_made:
        example = Example(model, found.value, max(1, min(found.rows, microbatches)))
        held = 1 if settings.interleaves else example.microbatches
    else:
        example = Example(found.model, found.value)
        held = 1 if settings.interleaves else microbatches
    measure: Measure[Any, float] = ByTime(BUDGET_SECONDS / len(module)) if by_time else BySize(held)
    if not found.is_made:
        with as_misconfiguration():
            return costs_of(model, module, example, measure, device)
    try:
        return costs_of(model, module, example, measure, device)
    except Exception as error:  # a model that needs a different input may raise anything
        kind = type(found.model).__name__
        if not _are_alike(module):
            raise MisconfigurationException(
                f"Measuring the layers needs an example input, and the one made from the configuration of {kind} does "
                f"not fit ({type(error).__name__}: {error}). Set `self.example_input_array` on {type(model).__name__}, "
                'or give the balance, or balance="even".'
            ) from error
        rank_zero_warn(
            f"The balance counts parameters only: the input made from the configuration of {kind} does not fit "
            f"({type(error).__name__}: {error}). Set `self.example_input_array` on {type(model).__name__} to a batch "
            "of inputs, or give the balance."
        )
        return costs_of_parameters(model, module, by_time=by_time)


@dataclass(frozen=True)
class FoundExample:
    """An input on which a model can be measured.

    Attributes:
        model: The model that takes the input.
        value: The input; a tuple is passed as positional arguments, a dict as keyword arguments.
        is_made: Whether the input is made from the configuration of a Hugging Face model, with the rows of a
            micro-batch; otherwise it is the model's ``example_input_array``, a batch.
    """

    model: nn.Module
    value: Any
    is_made: bool

    @property
    def rows(self) -> int:
        """The number of rows."""
        return max((len(tensor) for tensor in tensors_in(self.value) if tensor.dim()), default=1)


def find_example(
    model: LightningModule, module: Pipelined, device: torch.device, precision: Precision
) -> FoundExample | None:
    """Return an input for a model, on a device; ``None`` if there is none."""
    if model.example_input_array is not None:
        example = precision.convert_input(model.example_input_array)
        return FoundExample(model, _moved(example, device), is_made=False)
    made = example_of(model, module)
    return None if made is None else FoundExample(made[0], _moved(made[1], device), is_made=True)


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _explained(
    balance: list[int], costs: Costs[Any, float], mean: float, module: Pipelined, path: str, *, is_counted: bool
) -> str:
    """Return a line that states the balance and the cost of what the driver runs outside the layers."""
    unit = "blocks" if isinstance(module, nn.ModuleList) else "layers"
    number = f"as much as {costs.driver / mean:.1f} {unit}" if mean > 0 else f"{costs.driver:.3g}"
    line = f"balance {balance}: what the model runs outside {path}, on the driver, costs {number}"
    if not is_counted:
        line += ", not counted: under schedule='gpipe' it runs before and after the passes of the stages"
    if costs.not_measured:
        line += f" ({costs.not_measured})"
    return f"{line}."


def _are_alike(layers: Pipelined) -> bool:
    """Return whether all layers have the same modules, shapes of tensors and plain attributes."""
    return len(set(kinds_of([*layers]))) == 1


@contextmanager
def measuring(model: nn.Module, num_processes: int, precision: Precision) -> Iterator[None]:
    """Context in which a layer computes as in training.

    It computes in the precision of the training, without a key-value cache, and with memory that earlier passes have
    freed. It gets the number of threads of one of ``num_processes`` processes on a host.
    """
    caches = torch.is_autocast_cache_enabled()
    threads = share_of_threads(num_processes)
    with with_threads(threads), all_freed_memory_kept(), _without_cache(model), precision.forward_context():
        torch.set_autocast_cache_enabled(False)  # it keeps weights cast to bfloat16 or float16 until the context ends
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(caches)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Context in which Hugging Face models fill no key-value cache."""
    undo = switch_off_cache(model)
    try:
        yield
    finally:
        for restore in undo:
            restore()


@contextmanager
def with_threads(number: int) -> Iterator[None]:
    """Context in which torch computes with a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
