"""Micro-batches of rows of similar length, in which little is computed for padding.

    rows, sorted by length     ▪▪ ▪▪▪ ▪▪▪ ▪▪▪▪ │ ▪▪▪▪▪▪ ▪▪▪▪▪▪▪ │ ▪▪▪▪▪▪▪▪▪▪▪▪▪▪
    columns of a micro-batch   4               │ 7              │ 14

The sorted rows are cut by dynamic programming, as in DynaPipe (Jiang et al., EuroSys 2024): the time of a batch on n
stages is about the sum of the costs of its micro-batches, plus n - 1 times the largest cost. Here a cost is a number of
tokens, with padding, and n is always 4, because micro-batches, and with them dropout masks, must not depend on the
number of stages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from strategies.pipeline.stage.microbatch.split import Microbatches, has_rows, picked

IGNORED_LABEL = -100
"""The label of positions that do not count: torch's default for ``ignore_index``, which Hugging Face models use."""

_MASKS = ("attention_mask", "decoder_attention_mask")
_LABELS = ("labels", "shift_labels")
_DECODER = (*_LABELS, "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")
_NAMES = (
    *(*_MASKS, *_DECODER, "input_ids", "inputs_embeds", "token_type_ids", "position_ids"),
    *("decoder_position_ids", "special_tokens_mask", "loss_mask"),
)
"""Entries of a batch that have a column for each token: ``[batch, tokens]`` or ``[batch, tokens, ...]``."""

_DEFINE = "define split_batch(self, batch, num_microbatches) on the model instead of microbatch_tokens"

_OVERHEAD = 1 / 16
"""The cost of a micro-batch without tokens, as a share of the largest micro-batch."""
_STAGES = 4
"""The number of stages for which rows are cut."""
_NUM_BOUNDS = 24
"""The number of bounds on the largest cost that are tried."""


def split_by_length(batch: Any, max_tokens: int) -> Microbatches:
    """Split a batch into micro-batches of rows of similar length, and cut off columns that only have padding.

    Args:
        batch: A mapping of the kind that Hugging Face models take, padded on the right, with an ``attention_mask`` of
            shape ``[batch, tokens]``.
        max_tokens: The largest number of tokens of a micro-batch, with padding. A longer row is a micro-batch.

    Raises:
        ValueError: If the batch is of another kind.
    """
    groups = _groups(batch)
    if not len(batch["attention_mask"]):
        return Microbatches([batch], [0])
    lengths = _lengths(batch, groups)
    order = numpy.argsort(lengths.sum(0), kind="stable")
    sizes = cut(lengths[:, order], max_tokens)
    parts, rows, start = [], [], 0
    for size in sizes:
        own = order[start : start + size]
        part = picked(batch, own.tolist())
        for names, length in zip(groups.values(), lengths[:, own].max(1).tolist(), strict=True):
            for name in names:
                part[name] = part[name][:, :length].contiguous()  # models call view()
        parts.append(part)
        rows += own.tolist()
        start += size
    return Microbatches(parts, sizes, rows)


def cut(lengths: Any, max_tokens: int) -> list[int]:
    """Return the number of rows of each micro-batch, for sorted rows.

    Args:
        lengths: The number of tokens of each row, shape ``[sequences, rows]``. An encoder-decoder model has two
            sequences in a row.
        max_tokens: The largest number of tokens of a micro-batch, with padding, unless it has one row.
    """
    number = lengths.shape[1]
    costs = numpy.full((number, number + 1), numpy.inf)
    for first in range(number):
        longest = numpy.maximum.accumulate(lengths[:, first:], axis=1).sum(0)
        costs[first, first + 1 :] = longest * numpy.arange(1, number - first + 1)
    fits = costs <= max_tokens
    fits[numpy.arange(number), numpy.arange(1, number + 1)] = True
    return cut_by_costs(numpy.where(fits, costs + _OVERHEAD * max_tokens, numpy.inf), _STAGES)


def cut_by_costs(costs: Any, num_stages: int) -> list[int]:
    """Return the number of rows of each micro-batch, for the shortest time that can be expected.

    Args:
        costs: The cost of a micro-batch of rows ``first`` to ``end`` (without ``end``), shape ``[rows, rows + 1]``;
            infinite if there must not be such a micro-batch. More rows cost at least as much.
        num_stages: The number of stages.
    """
    number = len(costs)
    least = costs[numpy.arange(number), numpy.arange(1, number + 1)].max()
    known = numpy.unique(costs[(costs >= least) & (costs < numpy.inf)])
    bounds = known[numpy.unique(numpy.linspace(0, len(known) - 1, _NUM_BOUNDS).astype(int))]
    tried = [_cheapest(numpy.where(costs <= bound, costs, numpy.inf), (num_stages - 1) * bound) for bound in bounds]
    return min(tried, key=lambda each: each[0])[1]


def _cheapest(costs: Any, more: float) -> tuple[float, list[int]]:
    """Return the smallest sum of costs, plus ``more``, and the number of rows of each micro-batch."""
    number = len(costs)
    sums, begins = numpy.zeros(number + 1), [0] * (number + 1)
    for end in range(1, number + 1):
        through = sums[:end] + costs[:end, end]
        begins[end] = int(through.argmin())
        sums[end] = through[begins[end]]
    sizes, end = [], number
    while end:
        sizes.append(end - begins[end])
        end = begins[end]
    return float(sums[number]) + more, sizes[::-1]


def _groups(batch: Any) -> dict[int, list[str]]:
    """Return the names of the entries with one column for each token, by their number of columns."""
    entries = dict(batch) if isinstance(batch, Mapping) else {}
    mask = entries.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise ValueError(
            "microbatch_tokens sorts rows by their number of tokens, which the entry 'attention_mask' of a batch says, "
            f"of shape [batch, tokens]; this batch is a {type(batch).__name__}"
            + (f" with the entries {', '.join(map(repr, entries))}" if entries else "")
            + f". Let the loader return what a Hugging Face tokenizer returns, or {_DEFINE}"
        )
    groups: dict[int, list[str]] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor) and value.dim() > 1 and has_rows(value):
            groups.setdefault(value.shape[1], []).append(name)
    found = {}
    for length, names in groups.items():
        counts = any(name in _MASKS for name in names) or all(name in _DECODER for name in names)
        if counts and all(name in _NAMES for name in names):
            found[length] = names
    if mask.shape[1] not in found:
        unknown = [name for name in groups[mask.shape[1]] if name not in _NAMES]
        raise ValueError(
            f"microbatch_tokens cuts off columns of padding, but {', '.join(map(repr, unknown))} also has "
            f"{mask.shape[1]} columns, and it is not known whether they are tokens. Known entries are "
            f"{', '.join(_NAMES)}. Leave the entry out, or {_DEFINE}"
        )
    return found


def _lengths(batch: Any, groups: Mapping[int, Sequence[str]]) -> Any:
    """Return the number of columns that each row needs, for each group of entries; at least 1."""
    found = []
    for columns, names in groups.items():
        needed = []
        for name in names:
            value = batch[name]
            if value.dim() == 2 and name in (*_MASKS, *_LABELS):
                used = value != IGNORED_LABEL if name in _LABELS else value != 0
                places = torch.arange(1, columns + 1, device=value.device)
                needed.append((used * places).amax(1))
        found.append(torch.stack(needed).amax(0).clamp(min=1) if needed else _all(batch, names, columns))
    return torch.stack(found).cpu().numpy()


def _all(batch: Any, names: Sequence[str], columns: int) -> Tensor:
    value = batch[names[0]]
    return torch.full((len(value),), columns, device=value.device)
