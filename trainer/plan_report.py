"""The output of ``Trainer.plan``: a table for terminals, the best row as YAML, everything as JSON, and a picture.

In: a :class:`~strategies.planning.plan.PlanTable`. Out: text and files. Imports ``rich`` when it prints.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from strategies.lightning.compat import MisconfigurationException

if TYPE_CHECKING:
    from strategies.planning.plan import PipelineOptions, PlanTable
    from strategies.planning.plan_rows import PlanRow

_MEBI = 2**20
_WIDTH = 132
"""The width of the whole table, which is written if the output is not a terminal."""


def strategy_block(table: "PlanTable", row: "PlanRow") -> dict[str, Any]:
    """Return the ``strategy:`` block of a configuration that runs a row."""
    options = table.options
    arguments: dict[str, Any] = {
        "balance": list(row.balance),
        "microbatches": row.microbatches,
        "schedule": _schedule_of(options, row),
        "checkpoint": options.settings.checkpoint,
    }
    if table.path != "sequential_module" or options.path is not None:
        arguments["module"] = table.path
    if options.loss_weight != "rows":
        arguments["loss_weight"] = options.loss_weight
    if options.settings.deferred_batch_norm:
        arguments["deferred_batch_norm"] = True
    if options.num_replicas > 1:
        arguments["data_parallel_size"] = options.num_replicas
    if options.num_parts > 1:
        arguments["tensor_parallel_size"] = options.num_parts
    if options.zero_stage:
        arguments["zero_stage"] = options.zero_stage
    return {"class_path": "strategies.RPCSequentialStrategy", "init_args": arguments}


def _schedule_of(options: "PipelineOptions", row: "PlanRow") -> str | dict[str, Any]:
    """Return the value of ``schedule`` for a row.

    A name replaces what the configuration that was planned says; fields are merged with those that it has.
    """
    from strategies.pipeline.schedule.tables import SCHEDULES

    least, _, most = SCHEDULES[row.schedule].chunks
    if least == most:
        return row.schedule
    fields: dict[str, Any] = {"name": row.schedule, "chunks": row.chunks_per_stage, **dict.fromkeys(options.only_auto)}
    return fields if options.settings.pipelined_backward else {**fields, "pipelined_backward": True}


def yaml_of(table: "PlanTable", row: "PlanRow") -> str:
    """Return the part of a configuration that runs a row: the ``strategy:`` block and the number of devices."""
    number, nodes = row.stages * table.options.num_pipelines, table.options.num_nodes
    trainer: dict[str, Any] = {"devices": number}
    if nodes > 1 and number % nodes == 0:
        trainer = {"devices": number // nodes, "num_nodes": nodes}
    trainer["strategy"] = strategy_block(table, row)
    return str(yaml.safe_dump({"trainer": trainer}, sort_keys=False, default_flow_style=None))


def why_best(table: "PlanTable") -> str:
    """Return a line that names the best row and explains why it is the best."""
    row = table.best
    chunks = f" with {row.chunks_per_stage} chunks per stage" if row.chunks_per_stage > 1 else ""
    line = (
        f"Best: {row.schedule}{chunks}, {row.stages} stages, {row.microbatches} micro-batches, balance {row.balance}: "
    )
    peak = f"at most {_mebi(row.peak_bytes)} MiB per process"
    if not row.fits:
        return (
            f"{line}{peak}, the smallest peak, but nothing fits into the limit of {_mebi(row.memory_limit_bytes)} MiB."
        )
    if row.seconds is None:
        return f"{line}{peak}, the smallest peak."
    others = [each for each in table.rows if each is not row and each.fits and each.seconds is not None]
    line += f"{_milliseconds(row.seconds)} ms per step, {peak}, the fastest"
    if row.memory_limit_bytes is not None:
        line += " of those that fit"
    if others:
        second = min(others, key=lambda each: each.rank)
        assert second.rows_per_second is not None and row.rows_per_second is not None
        more = row.rows_per_second / second.rows_per_second - 1
        line += f"; {second.schedule} with {second.microbatches} micro-batches takes {more:.1%} longer"
        line += " per row" if second.rows != row.rows else ""
    return f"{line}."


def as_dict(table: "PlanTable") -> dict[str, Any]:
    """Return the whole plan as numbers, strings and lists."""
    return {
        "module": table.path,
        "layers": table.layers,
        "measured_on": table.measured_on,
        "notes": table.notes,
        "best": next(place for place, row in enumerate(table.rows) if row is table.best),
        "strategy": strategy_block(table, table.best),
        "rows": [_row_as_dict(row) for row in table.rows],
    }


def _row_as_dict(row: "PlanRow") -> dict[str, Any]:
    return {
        "stages": row.stages,
        "microbatches": row.microbatches,
        "schedule": row.schedule,
        "chunks_per_stage": row.chunks_per_stage,
        "balance": row.balance,
        "step_seconds": row.seconds,
        "idle": row.idle,
        "rows_per_second": row.rows_per_second,
        "peak_bytes": row.peak_bytes,
        "memory_limit_bytes": row.memory_limit_bytes,
        "fits": row.fits,
        "processes": [
            {
                "name": name,
                "layers": process.layers,
                "parameters_bytes": process.need.parameters,
                "gradients_bytes": process.need.gradients,
                "earlier_gradients_bytes": process.earlier_gradients,
                "optimizer_bytes": process.need.states,
                "activations_bytes": process.activations,
                "optimizer_step_bytes": process.step.extra_bytes,
                "optimizer_step_seconds": process.step.seconds if row.seconds is not None else None,
                "start_bytes": process.start_bytes,
                "training_bytes": process.training_bytes,
                "end_bytes": process.end_bytes,
                "peak_bytes": process.peak_bytes,
                "peak_at": process.peak_at,
            }
            for name, process in zip(names_of(row), row.processes, strict=True)
        ],
    }


def check_path(name: str, path: str | os.PathLike[str] | None, ending: str) -> None:
    """Check that a file can be written, before anything is measured.

    Raises:
        MisconfigurationException: If its folder does not exist, if it is a folder, or if its suffix is wrong.
    """
    if path is None:
        return
    path = os.fspath(path)
    if not path.endswith(ending):
        raise MisconfigurationException(f"{name}={path!r} must end with {ending!r}: the picture is written as SVG.")
    if not (folder := Path(path).absolute().parent).is_dir():
        raise MisconfigurationException(f"{name}={path!r}: there is no folder {str(folder)!r}. Create it first.")
    if Path(path).is_dir():
        raise MisconfigurationException(f"{name}={path!r} is a folder; give the path of a file in it.")


def report(
    table: "PlanTable", *, json: str | os.PathLike[str] | None = None, picture: str | os.PathLike[str] | None = None
) -> None:
    """Print the plan, and write the requested files."""
    print_plan(table)
    if json is not None:
        write_json(table, json)
    if picture is not None and table.best.simulation is None:
        raise MisconfigurationException(
            f"picture={os.fspath(picture)!r} shows times, but there are none: the model has parameters without memory. "
            "Leave picture out."
        )
    if picture is not None:
        write_picture(table, picture)


def write_json(table: "PlanTable", path: str | os.PathLike[str]) -> None:
    """Write the whole plan to a file."""
    Path(path).write_text(json.dumps(as_dict(table), indent=1) + "\n")


def write_picture(table: "PlanTable", path: str | os.PathLike[str]) -> None:
    """Write the predicted timetable of the best row to an SVG file."""
    from strategies.planning.picture import svg
    from strategies.planning.plan_rows import rank_of_row

    row = table.best
    assert row.simulation is not None and row.seconds is not None
    names = names_of(row)
    title = f"{row.schedule}, balance {row.balance}, {row.microbatches} micro-batches: predicted passes of a step"
    ranks = rank_of_row(row.simulation.placement)
    Path(path).write_text(svg(row.simulation, [names[rank] for rank in ranks], title))


def names_of(row: "PlanRow") -> list[str]:
    """Return the names of the processes of a row, with the driver last."""
    return [*(f"stage {i}" for i in range(row.stages - 1)), "driver"]


def print_plan(table: "PlanTable") -> None:
    """Print all rows, grouped by number of stages with the fastest first, and the best row with its YAML."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    numbers = ("step ms", "idle", "rows/s")
    sizes = ("parameters", "gradients", "optimizer", "activations", "peak")
    is_narrow = console.width < _WIDTH
    title = f"{table.path!r} ({table.layers}); measured: {table.measured_on}"
    if (parts := table.options.num_parts) > 1:
        title += f"; one of {parts} pipelines that divide the layers"
    shown = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
    )
    for name in ("stages", "micro-\nbatches"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("schedule", "balance"):
        shown.add_column(name, no_wrap=name == "schedule")
    for name in numbers:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("process", no_wrap=True)
    for name in sizes[-1:] if is_narrow else sizes:
        shown.add_column(f"{name}\nMiB", justify="right", no_wrap=True)
    for row in sorted(table.rows, key=lambda row: (row.stages, row.rank)):
        style = "bold" if row is table.best else "red" if not row.fits else None
        cells = _cells(row)
        shown.add_row(*(cells[: -len(sizes)] + cells[-1:] if is_narrow else cells), style=style)
    console.print(shown)
    if is_narrow:
        console.print(f"A terminal of {_WIDTH} columns shows what the peaks consist of; so does --json.\n")
    if marked := {process.peak_at for row in table.rows for process in row.processes} - {"training"}:
        console.print(f"* Its peak is at the {' or '.join(sorted(marked))} of the run, when it has the whole model.\n")
    for note in table.notes:
        console.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(why_best(table), markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{yaml_of(table, table.best)}", markup=False, highlight=False, soft_wrap=True)


def _cells(row: "PlanRow") -> list[str]:
    limit = row.memory_limit_bytes
    columns = [
        [_mebi(process.need.parameters) for process in row.processes],
        [_mebi(process.need.gradients + process.earlier_gradients) for process in row.processes],
        [_mebi(process.need.states) for process in row.processes],
        [_mebi(process.activations) for process in row.processes],
        [
            _mebi(process.peak_bytes) + (" does not fit" if limit is not None and process.peak_bytes > limit else "")
            for process in row.processes
        ],
    ]
    return [
        str(row.stages),
        str(row.microbatches),
        row.schedule,
        str(row.balance),
        "" if row.seconds is None else _milliseconds(row.seconds),
        "" if row.idle is None else f"{row.idle:.1%}",
        "" if row.rows_per_second is None else f"{row.rows_per_second:,.1f}",
        "\n".join(
            name if process.peak_at == "training" else f"{name}*"
            for name, process in zip(names_of(row), row.processes, strict=True)
        ),
        *("\n".join(column) for column in columns),
    ]


def _mebi(size_bytes: float | None) -> str:
    value = (size_bytes or 0) / _MEBI
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
