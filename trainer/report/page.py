"""The page: one self-contained HTML file with a style sheet, no script, and no external resources."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from statistics import mean, median
from typing import Any
from xml.etree import ElementTree

from strategies.planning.picture import COLOURS
from trainer.report.charts import NUM_COLOURS, Segment, Series, bars, for_pages, line_chart, number, step_number, style
from trainer.report.run_folder import Curve, ReportedRun

MOST_PICTURES, MOST_LOSSES = 12, 4

_MONITOR = (
    "Add <code>trainer.PipelineMonitor</code> to the callbacks of the run "
    "(<code>--trainer.callbacks+=trainer.PipelineMonitor</code>)"
)
_PARTS = {
    "forward_ms": ("forward", "F"),
    "backward_ms": ("backward", "B"),
    "weight_gradients_ms": ("weight gradients", "W"),
    "code_ms": ("code outside the layers", "code"),
    "sending_ms": ("sending", "sending"),
    "optimizer_ms": ("optimizer", "optimizer"),
    "waiting_ms": ("waiting", "waiting"),
}
"""The parts of a step in the order of the bars: the last part of a scalar's name, its words, its CSS class."""

_OF_EVERY_EVENT = {"time", "event", "epoch", "step", "processes"}
"""Facts with a separate column in the table of events, or with a picture."""

_USUAL = ("start", "checkpoint", "end", "error")
"""Events that every run may have. Charts mark the steps of all other events."""

_WORDS = {
    "microbatches": "micro-batches",
    "error": "",
    "line": "",
    "lost": "",
    "restart_seconds": "seconds until new workers had started",
    "num_messages": "messages sent again",
}
"""Labels for the facts of an event. Facts that are sentences need no label."""

_PART_COLOURS = {**COLOURS, "sending": "#f2c6de", "optimizer": "#c9b8e8"}
# The two rows are the colours on a light and on a dark page.
_LIGHT = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#008300", "#4a3aa7", "#e34948")
_DARK = ("#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#2ba02b", "#9085e9", "#e66767")

_STYLE = """
:root { color-scheme: light dark; --page: #f6f6f4; --card: #fff; --ink: #1a1a19; --soft: #63625e; --line: #dddcd6;
  LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #131312; --card: #1e1e1c; --ink: #ecebe6; --soft: #a3a29b;
  --line: #3a3a37; DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 30px 0 8px; }
h3 { font-size: .95rem; margin: 4px 0 6px; font-weight: 600; } h3, p { overflow-wrap: anywhere; }
p { margin: 6px 0; } .soft, .missing { color: var(--soft); } .missing { font-style: italic; }
code, pre { font-family: ui-monospace, monospace; font-size: .87em; } pre { overflow-x: auto; margin: 8px 0 0; }
.card, .tiles > div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.card + .card { margin-top: 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(124px, 1fr)); gap: 10px; margin-top: 16px; }
.tiles b { display: block; font-size: 1.05rem; font-weight: 600; }
.tiles > div { min-width: 0; padding: 10px 12px; }
.tiles span { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
.charts .card { margin: 0; min-width: 0; }
.scroll { overflow-x: auto; } .tall { max-height: 24rem; overflow-y: auto; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--ink); font: 12.5px system-ui, sans-serif; }
table.wide { min-width: 640px; } .narrow { display: none; }
.gantt svg { min-width: 760px; } .gantt svg svg { min-width: 0; }
.chart text { fill: var(--soft); } .grid { stroke: var(--line); } .tick { stroke: var(--soft); }
.mark { stroke: var(--ink); stroke-dasharray: 2 3; stroke-width: 1.5; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .line.dashed { stroke-dasharray: 5 3; }
.dot { stroke: none; opacity: 0; } .dot:hover { opacity: 1; }
.segment rect { stroke: var(--card); stroke-width: 1.5; } .segment text { fill: #1a1a19; }
.segment rect.layer { fill-opacity: .55; } .segment rect.layer ~ text { fill: var(--ink); }
.segment rect.waiting { fill: none; stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.segment rect.waiting ~ text { fill: var(--soft); }
.gantt .background { fill: none; } .gantt .step text { fill: #1a1a19; } .gantt line { stroke: var(--soft); }
table { border-collapse: collapse; min-width: min(100%, 480px); font-variant-numeric: tabular-nums; font-size: .87rem; }
th { text-align: left; font-weight: 500; color: var(--soft); } th, td { padding: 3px 16px 3px 0; vertical-align: top; }
td { border-top: 1px solid var(--line); } .right { text-align: right; } .one-line { white-space: nowrap; }
td.name { overflow-wrap: anywhere; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.key.waiting { border: 1px dashed var(--soft); } .keys > span { margin-right: 14px; white-space: nowrap; }
.key.dashed { opacity: .6; } summary { cursor: pointer; } details + details { margin-top: 8px; }
@media (max-width: 720px) { .charts { grid-template-columns: minmax(0, 1fr); }
  .broad { display: none; } .narrow { display: block; } }
@media (max-width: 900px) { .chart text { font-size: 16px; } th, td { padding-right: 10px; } }
"""


def page(run: ReportedRun) -> str:
    """Return the page."""
    title = f"Run {run.folder}"
    sections = [
        ("Balance", _balance(run)),
        ("Losses", _losses(run)),
        ("Other values", _others(run)),
        ("Step times", _step_times(run)),
        ("Timetables", _timetables(run)),
        ("Memory", _memory(run)),
        ("Events", _events(run)),
        ("Settings", _settings(run)),
    ]
    body = [f"<h1>{escape(title)}</h1>", f'<p class="soft">Written on {_date(time.time())}.</p>', *_tiles(run)]
    for name, parts in sections:
        if content := list(parts):
            body += [f'<section id="{name.lower().replace(" ", "-")}"><h2>{name}</h2>', *content, "</section>"]
    body += [f'<p class="missing">{escape(note)}</p>' for note in run.notes]
    # The policy lets a browser neither run a script nor load anything, whatever a file of the run contains.
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title><style>{_css()}</style></head><body><main>",
            *body,
            "</main></body></html>\n",
        ]
    )


def _css() -> str:
    colours = [" ".join(f"--c{i}: {colour};" for i, colour in enumerate(palette)) for palette in (_LIGHT, _DARK)]
    classes = [
        f".line.c{i} {{ stroke: var(--c{i}); }} .dot.c{i}, .point.c{i}, .segment rect.c{i} {{ fill: var(--c{i}); }} "
        f".key.c{i} {{ background: var(--c{i}); }}"
        for i in range(NUM_COLOURS)
    ]
    parts = [
        f".segment rect.{kind} {{ fill: {colour}; }} .key.{kind} {{ background: {colour}; }}"
        for kind, colour in _PART_COLOURS.items()
    ]
    return "\n".join([_STYLE.replace("LIGHT", colours[0]).replace("DARK", colours[1]), *classes, *parts])


def _missing(what: str, how: str) -> str:
    return f'<p class="missing">{what} {how}.</p>'


def _not_monitored(what: str, run: ReportedRun) -> str:
    """Return a paragraph that says which part of a step's record is missing, and why or what the next run needs."""
    if not run.events:
        how = _MONITOR
    elif run.pictures:
        how = "The run has a <code>PipelineMonitor</code>, but no logger that keeps what it measures"
    elif "pipeline/step_ms" in run.curves:
        how = "The run's <code>PipelineMonitor</code> writes them, so they have been removed"
    else:
        how = (
            "The run's <code>PipelineMonitor</code> has recorded no step: there were fewer than "
            "<code>every_n_steps</code> (50 unless you set it)"
        )
    return _missing(what, how)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _finite(curve: Curve) -> Curve:
    return [(step, value) for step, value in curve if math.isfinite(value)]


def _of_processes(run: ReportedRun, scalar: str) -> dict[str, Curve]:
    """Return the curve of a scalar of ``PipelineMonitor`` for each process that has it."""
    names = {name: f"pipeline/{name.replace(' ', '_')}/{scalar}" for name in run.processes}
    return {name: curve for name, key in names.items() if (curve := run.curves.get(key))}


def _losses_of(run: ReportedRun) -> dict[str, Curve]:
    return {name: curve for name, curve in run.curves.items() if "loss" in name.lower() and not _is_ours(name)}


def _is_ours(name: str) -> bool:
    return name.startswith("pipeline/")


# Parts of the page


def _tiles(run: ReportedRun) -> Iterator[str]:
    tiles = []
    if steps := [step for curve in run.curves.values() for step, _ in curve]:
        tiles.append(("last step that was logged", number(max(steps))))
    for name, curve in list(_losses_of(run).items())[:MOST_LOSSES]:
        if values := [value for _, value in _finite(curve)]:
            tiles.append((f"{name}, lowest", number(min(values))))
    if times := [value for _, value in _finite(run.curves.get("pipeline/step_ms", []))]:
        tiles.append((f"time of a step, median of {len(times)} recorded", f"{number(median(times))} ms"))
    if bubbles := [value for _, value in _finite(run.curves.get("pipeline/bubble", []))]:
        tiles.append(("bubble, median", f"{median(bubbles):.1%}"))
    if memory := [value for curve in _of_processes(run, "memory_mib").values() for _, value in _finite(curve)]:
        tiles.append(("memory of a process, highest", f"{number(max(memory))} MiB"))
    if run.events:
        tiles.append(("from the first to the last event", _duration(run.events[-1]["time"] - run.events[0]["time"])))
        for name, count in Counter(event["event"] for event in run.events if _is_special(event)).items():
            tiles.append((f"{name} event{'s' if count > 1 else ''}", str(count)))
    yield '<div class="tiles">'
    yield from (f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    yield "</div>"


def _balance(run: ReportedRun) -> Iterator[str]:
    if (pipeline := run.pipeline) is None:
        yield _missing("The balance is not in the folder.", _MONITOR)
        return
    colour_of = {name: i for i, name in enumerate(run.processes)}
    totals = {
        process["name"]: sum(layer["parameters"] for layer in process["layers"]) for process in pipeline["processes"]
    }
    unit, unit_size = ("million parameters", 10**6) if max(totals.values()) >= 10**7 else ("parameters", 1)
    rows = []
    for process in pipeline["processes"]:
        segments = [
            Segment(
                layer["parameters"] / unit_size,
                layer["class"],
                f"layer {layer['place']} ({layer['name']}): {layer['class']}, {layer['parameters']:,} parameters",
                f"{style(colour_of[process['name']])} layer",
            )
            for layer in process["layers"]
        ]
        rows.append((process["name"], segments))
    yield '<div class="card">'
    yield f"<h3>Balance {escape(str(pipeline['balance']))}: layers and their parameters</h3>"
    yield f'<p class="soft">{escape(_facts(pipeline, ("schedule", "microbatches")))}</p>'
    yield for_pages(lambda wide: bars(rows, "parameters of the layers of each process", unit, wide=wide))
    yield "<table><tr><th>process</th><th>layers</th><th class=right>parameters</th></tr>"
    for process in pipeline["processes"]:
        key = f'<span class="key {style(colour_of[process["name"]])}"></span>'
        yield (
            f"<tr><td class=one-line>{key}{escape(process['name'])}</td>"
            f"<td class=name>{escape(_layers(process))}</td><td class=right>{totals[process['name']]:,}</td></tr>"
        )
    yield "</table></div>"


def _layers(process: dict[str, Any]) -> str:
    """Return the indices and classes of a process's layers. Neighbours of one class are grouped."""
    runs: list[list[dict[str, Any]]] = []
    for layer in process["layers"]:
        before = runs[-1][-1] if runs else None
        if before is not None and (layer["place"], layer["class"]) == (before["place"] + 1, before["class"]):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    places = [(f"{run[0]['place']} to {run[-1]['place']}" if len(run) > 1 else str(run[0]["place"])) for run in runs]
    return ", ".join(f"{place} {run[0]['class']}" for place, run in zip(places, runs, strict=True))


def _losses(run: ReportedRun) -> Iterator[str]:
    losses = _losses_of(run)
    if not run.curves:
        yield _missing("There are no metrics in the folder.", "A <code>CSVLogger</code> writes them")
    elif not losses:
        yield _missing("No value is called a loss.", 'Log one: <code>self.log("train_loss", loss)</code>')
    else:
        yield _chart("Logged values with “loss” in their name", losses, _marks(run), wide=True)


def _others(run: ReportedRun) -> Iterator[str]:
    losses = _losses_of(run)
    others = {name: curve for name, curve in run.curves.items() if not _is_ours(name) and name not in losses}
    if others:
        yield '<div class="charts">'
        yield from (_chart(name, {name: curve}, _marks(run)) for name, curve in others.items())
        yield "</div>"


def _step_times(run: ReportedRun) -> Iterator[str]:
    if not (steps := run.curves.get("pipeline/step_ms")):
        yield _not_monitored("The times of steps are not in the metrics.", run)
        return
    yield from _parts_of_steps(run)
    yield '<div class="charts" style="margin-top:12px">'
    yield _chart("Time of a step (ms)", {"step": steps}, _marks(run), from_zero=True)
    bubbles = {
        words: curve
        for name, words in {"bubble": "measured", "bubble_predicted": "predicted"}.items()
        if (curve := run.curves.get(f"pipeline/{name}"))
    }
    if bubbles:
        yield _chart("Bubble (share of the passes)", bubbles, _marks(run), from_zero=True)
    for scalar, title in {"use": "Use (share of the passes with work)", "waiting_ms": "Waiting (ms per step)"}.items():
        if curves := _of_processes(run, scalar):
            yield _chart(title, curves, _marks(run), from_zero=True, processes=run.processes)
    yield "</div>"


def _parts_of_steps(run: ReportedRun) -> Iterator[str]:
    """Yield a bar for each process, with the mean time of each part of the recorded steps."""
    rows, used = [], set()
    for name in run.processes:
        segments = []
        for scalar, (words, kind) in _PARTS.items():
            values = [value for _, value in _finite(_of_processes(run, scalar).get(name, []))]
            if values and mean(values) > 0:
                used.add(scalar)
                milliseconds = mean(values)
                told = f"{name}, {words}: {number(milliseconds)} ms, mean of {len(values)} steps"
                segments.append(Segment(milliseconds, number(milliseconds), told, kind))
        if segments:
            rows.append((name, segments))
    if rows:
        yield '<div class="card"><h3>Parts of a step (ms, mean of the recorded steps)</h3><p class="keys">'
        for scalar in _PARTS:
            if scalar in used:
                words, kind = _PARTS[scalar]
                yield f'<span><span class="key {kind}"></span>{words}</span>'
        title = "parts of a step of each process"
        yield f"</p>{for_pages(lambda wide: bars(rows, title, 'milliseconds', wide=wide))}</div>"


def _timetables(run: ReportedRun) -> Iterator[str]:
    if not run.pictures:
        yield _not_monitored("There are no pictures in the folder <code>pipeline</code>.", run)
        return
    steps = list(run.pictures)
    shown = sorted({steps[-1 - i * len(steps) // MOST_PICTURES] for i in range(MOST_PICTURES)})
    if len(shown) < len(steps):
        yield f'<p class="soft">{len(shown)} of the {len(steps)} pictures in <code>pipeline</code>.</p>'
    last, *others = (
        f'<h3>step {step}</h3><div class="gantt scroll">{_picture(run.pictures[step])}</div>'
        for step in reversed(shown)
    )
    yield f'<div class="card">{last}</div>'
    if others:
        yield f'<details class="card"><summary>{len(others)} earlier steps</summary>{"".join(others)}</details>'


def _memory(run: ReportedRun) -> Iterator[str]:
    if not (curves := _of_processes(run, "memory_mib")):
        yield _not_monitored("The memory of the stages is not in the metrics.", run)
        return
    title = "Memory of each process (MiB: resident; on CUDA the most that torch has allocated)"
    yield _chart(title, curves, _marks(run), from_zero=True, wide=True, processes=run.processes)


def _events(run: ReportedRun) -> Iterator[str]:
    if not run.events:
        yield _missing("Starts, repairs and checkpoints are not in the folder.", _MONITOR)
    else:
        first = run.events[0]["time"]
        yield '<div class="card scroll tall"><table class="wide"><tr><th>event</th><th class=right>step</th>'
        yield "<th class=right>epoch</th><th>time</th><th class=right>after</th><th></th></tr>"
        for event in run.events:
            epoch, facts = str(event.get("epoch", "")), _facts(event, event.keys() - _OF_EVERY_EVENT)
            yield (
                f"<tr><td>{escape(event['event'])}</td><td class=right>{step_number(event['step'])}</td>"
                f"<td class=right>{escape(epoch)}</td><td class=one-line>{_date(event['time'])}</td>"
                f"<td class=right>{_duration(event['time'] - first)}</td><td class=name>{escape(facts)}</td></tr>"
            )
        yield "</table></div>"
    if run.checkpoints:
        yield '<div class="card scroll tall"><h3>Files of checkpoints</h3><table>'
        for name, size in run.checkpoints:
            yield f"<tr><td class=name>{escape(name)}</td><td class=right>{number(size / 2**20)} MiB</td></tr>"
        yield "</table></div>"
    else:
        how = "A <code>ModelCheckpoint</code> without <code>dirpath</code> writes them there"
        yield _missing("There are no checkpoints in the folder <code>checkpoints</code>.", how)


def _settings(run: ReportedRun) -> Iterator[str]:
    if not run.settings:
        how = "<code>python -m trainer fit</code> writes config.yaml, and <code>self.save_hyperparameters()</code> "
        yield _missing("There are no settings in the folder.", how + "makes loggers write hparams.yaml")
    for name, text in run.settings.items():
        yield f'<details class="card"><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>'


def _facts(event: dict[str, Any], keys: Iterable[str]) -> str:
    """Return the facts of an event, in the order in which they were written."""
    return ", ".join(f"{_WORDS.get(key, key)} {value}".strip() for key, value in event.items() if key in keys)


def _is_special(event: dict[str, Any]) -> bool:
    return event["event"] not in _USUAL


def _marks(run: ReportedRun) -> list[tuple[float, str]]:
    return [
        (event["step"], f"{event['event']}, step {step_number(event['step'])}")
        for event in run.events
        if _is_special(event)
    ]


def _chart(
    title: str,
    curves: dict[str, Curve],
    marks: Sequence[tuple[float, str]],
    *,
    from_zero: bool = False,
    wide: bool = False,
    processes: Sequence[str] = (),
) -> str:
    """Return a card with a chart and a legend that has figures of each curve.

    Args:
        title: The title, with the unit.
        curves: The curves.
        marks: Steps with a vertical line, and the tooltip of the line.
        from_zero: Whether the axis begins at 0.
        wide: Whether the chart is as wide as the page.
        processes: The processes, if each curve belongs to a process: a process has one colour in all charts. Other
            curves get the same colours, starting from the last one.
    """
    places = {name: i for i, name in enumerate(processes)}
    series = [
        Series(name, curve, places.get(name, NUM_COLOURS - 2 - i if i < NUM_COLOURS - 1 else i))
        for i, (name, curve) in enumerate(curves.items())
    ]
    drawable = [own for own in series if _finite(own.curve)]
    draw = partial(_line_chart, drawable, title, from_zero, marks)
    picture = "" if not drawable else for_pages(draw) if wide else draw(False)
    legend = "".join(_legend_row(own) for own in series)
    head = "<tr><th></th><th class=right>last</th><th class=right>lowest</th><th class=right>highest</th></tr>"
    return f'<div class="card"><h3>{escape(title)}</h3>{picture}<table>{head}{legend}</table></div>'


def _line_chart(series: Sequence[Series], title: str, from_zero: bool, marks: Any, wide: bool) -> str:
    return line_chart(series, title, from_zero=from_zero, wide=wide, marks=marks)


def _legend_row(series: Series) -> str:
    values = [value for _, value in _finite(series.curve)]
    wrong = [step for step, value in series.curve if not math.isfinite(value)]
    told = f"; {len(wrong)} not finite, first at step {step_number(wrong[0])}" if wrong else ""
    figures = (series.curve[-1][1], min(values), max(values)) if values else (series.curve[-1][1], math.nan, math.nan)
    cells = "".join(f"<td class=right>{number(figure)}</td>" for figure in figures)
    key = f'<span class="key {style(series.colour)}"></span>'
    return f"<tr><td class=name>{key}{escape(series.name)}{escape(told)}</td>{cells}</tr>"


# Pictures of the monitor

_ELEMENTS = {"svg", "g", "rect", "line", "text", "title"}
_ATTRIBUTES = {"x", "y", "x1", "x2", "y1", "y2", "width", "height", "viewBox", "class"}
_ATTRIBUTES |= {"fill", "stroke", "stroke-width", "text-anchor", "font-size", "font-family"}
_VALUE = re.compile(r"[#\w .,%-]*")


def _picture(path: Path) -> str:
    """Return the elements of a picture that ``PipelineMonitor`` draws, and nothing else that a file may contain."""
    try:
        text = path.read_text(encoding="utf-8")
        if "<!" in text:
            raise ValueError("it declares entities or has comments")
        root = ElementTree.fromstring(text)
        if _tag(root) != "svg":
            raise ValueError("it is no SVG")
        if "viewBox" not in root.attrib:  # without it, a browser would not scale the picture
            root.set("viewBox", f"0 0 {root.get('width', '100')} {root.get('height', '100')}")
        return "".join(_copied(root))
    except (OSError, ValueError, ElementTree.ParseError) as error:
        return f'<p class="missing">{escape(path.name)} could not be read: {escape(str(error))}.</p>'


def _copied(element: Any) -> Iterable[str]:
    tag = _tag(element)
    if tag not in _ELEMENTS:
        return
    attributes = "".join(
        f' {name}="{escape(value)}"'
        for name, value in element.attrib.items()
        if name in _ATTRIBUTES and _VALUE.fullmatch(value)
    )
    yield f"<{tag}{attributes}>{escape((element.text or '').strip())}"
    for child in element:
        yield from _copied(child)
    yield f"</{tag}>"


def _tag(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]
