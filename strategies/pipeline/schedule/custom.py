"""Custom tables: read from a file in torch's CSV format or returned by a function, and validated before they run.

A file has one line per process, with its actions in order. Empty entries, which are idle steps in files of
``torch.distributed.pipelining``, and communication actions are skipped: Relay adds sends and receives itself::

    0F0,0F1,,,0B0,0B1        process 0 has stage 0
    ,1F0,1B0,1F1,1B1,        process 1, the driver, has the last stage
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from strategies.pipeline.schedule.deadlocks import check_complete, running_order
from strategies.pipeline.schedule.tables import Action, ActionTable, shortened

CustomTable: TypeAlias = Sequence[Sequence[Action | str | None]]
"""The return type of a function: a row of actions, or their text, per process. An idle step is ``None`` or empty."""

_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def read_csv(path: str | Path) -> ActionTable:
    """Read a table from a file in the CSV format of ``torch.distributed.pipelining``, with or without communication.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If an entry is not an action.
    """
    with open(path, newline="") as file:
        return _parsed(csv.reader(file), str(path))


def write_csv(table: ActionTable, path: str | Path) -> None:
    """Write a table to a file that :func:`read_csv` and ``torch.distributed.pipelining`` can read."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(table)


def custom_table(
    source: str | Path | Callable[[int, int], CustomTable], processes: int, microbatches: int
) -> ActionTable:
    """Return the table of a file or a function, if it can run.

    Args:
        source: The path of a file, or a function that takes ``processes`` and ``microbatches`` and returns a table. If
            a file has more micro-batches, the surplus is left out.
        processes: The number of processes.
        microbatches: The number of micro-batches.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the table has the wrong number of rows or micro-batches, lacks or repeats an action, has actions
            of a stage on several processes, or deadlocks.
        TypeError: If the function does not return rows of actions.
    """
    if callable(source):
        name = f"the table of {getattr(source, '__qualname__', repr(source))}({processes}, {microbatches})"
        given = source(processes, microbatches)
        is_table = isinstance(given, Sequence) and all(isinstance(row, Sequence) for row in given)
        if not is_table or isinstance(given, str) or any(isinstance(row, str) for row in given):
            raise TypeError(f"{name} must be a list of lists of actions, one per process, got {given!r}")
        table = _parsed(given, name)
    else:
        name = f"the table in {source}"
        table = read_csv(source)
    if len(table) != processes:
        raise ValueError(f"{name} has {len(table)} rows, but there are {processes} processes; write one row for each")
    num = 1 + max((action.microbatch for row in table for action in row), default=-1)
    if num < microbatches or (callable(source) and num > microbatches):
        raise ValueError(f"{name} has {num} micro-batches instead of {microbatches}")
    try:
        running_order(table, check_complete(table).num_stages)
    except ValueError as error:
        raise ValueError(f"{name} cannot run: {error}") from None
    return shortened(table, microbatches)


def _parsed(rows: Iterable[Sequence[Action | str | None]], name: str) -> ActionTable:
    table = []
    for number, row in enumerate(rows):
        actions = []
        for entry in row:
            if isinstance(entry, Action):
                actions.append(entry)
            elif isinstance(entry, str):
                text = entry.strip()
                if text and not _COMMUNICATION.fullmatch(text):
                    try:
                        actions.append(Action.parse(text))
                    except ValueError as error:
                        raise ValueError(f"{name}, row {number}: {error}") from None
            elif entry is not None:
                raise TypeError(
                    f"{name}, row {number}: an action is an Action, text such as '2F0', or None; got {entry!r}"
                )
        table.append(actions)
    return table
