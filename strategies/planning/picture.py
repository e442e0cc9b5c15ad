"""Draw timetables, as SVG or as pixels: a row of boxes for each process, above an axis in milliseconds.

stage 0  [F0][F1][F2]        [ B0 ][F3][ B1 ] ...
driver   [b0][F0    ][ B0 ][F1    ][ B1 ] ...
         0          10          20          30 ms
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from strategies.pipeline.schedule.operations import Computation, UserCode
from strategies.planning.simulator import Simulation

COLOURS = {"F": "#9ecae9", "B": "#f7b6a2", "I": "#fbd38d", "W": "#b7e4c7", "code": "#d5d5d5"}
WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "code": "driver, outside the layers",
}

_WIDTH, _ROW, _LEFT, _TOP = 1200.0, 34.0, 80.0, 54.0
_NARROWEST_TEXT = 14.0
"""Minimum width of a box with a number, in pixels."""


def svg(simulation: Simulation, names: Sequence[str], title: str, *, total_seconds: float | None = None) -> str:
    """Return the picture as a complete SVG document.

    Args:
        simulation: The timetable, in seconds.
        names: The names of the processes, in the order of the table's rows.
        title: The title.
        total_seconds: The time to which the axis extends; by default that of the timetable.
    """
    total = total_seconds or simulation.total_time or 1.0
    scale = _scale(total)
    height = _height(len(names))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect class="background" width="{_WIDTH:.0f}" height="{height:.0f}" fill="white"/>',
        f'<text x="{_LEFT:.0f}" y="18" font-size="14">{escape(title)}</text>',
        *_legend(simulation),
    ]
    for r, name in enumerate(names):
        top = _TOP + _ROW * r
        parts.append(f'<text x="{_LEFT - 8:.0f}" y="{top + 20:.1f}" text-anchor="end">{escape(name)}</text>')
    parts += [_box(*box) for box in _boxes(simulation, total)]
    parts += _axis(total, scale, _TOP + _ROW * len(names))
    return "\n".join([*parts, "</svg>"]) + "\n"


def stacked_svg(timetables: Sequence[tuple[str, Simulation]], names: Sequence[str]) -> str:
    """Return pictures of timetables of the same processes, each below its title, on one scale."""
    total = max(simulation.total_time for _, simulation in timetables)
    height = _height(len(names))
    parts = [
        svg(simulation, names, title, total_seconds=total).replace("<svg ", f'<svg y="{k * height:.0f}" ', 1)
        for k, (title, simulation) in enumerate(timetables)
    ]
    size = f'width="{_WIDTH:.0f}" height="{len(parts) * height:.0f}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>"]) + "\n"


def pixels(timetables: Sequence[tuple[str, Simulation]], names: Sequence[str]) -> Any:
    """Return the picture of :func:`stacked_svg` as pixels, a NumPy array ``[height, width, 3]`` of bytes.

    Raises:
        ImportError: If Pillow is not installed.
    """
    import numpy
    from PIL import Image, ImageDraw

    total = max(simulation.total_time for _, simulation in timetables)
    height = _height(len(names))
    image = Image.new("RGB", (round(_WIDTH), round(len(timetables) * height)), "white")
    draw = ImageDraw.Draw(image)
    for k, (title, simulation) in enumerate(timetables):
        base = k * height
        draw.text((_LEFT, base + 18), title, "black", anchor="ls")
        for r, name in enumerate(names):
            draw.text((_LEFT - 8, base + _TOP + _ROW * r + 14), name, "black", anchor="rm")
        for step, left, top, width in _boxes(simulation, total):
            corners = (left, base + top, left + width, base + top + _ROW - 6)
            draw.rectangle(corners, COLOURS[_kind(step)], "#555")
            if width >= _NARROWEST_TEXT:
                draw.text((left + width / 2, base + top + 14), str(step.microbatch), "black", anchor="mm")
        bottom = base + _TOP + _ROW * len(names)
        for x, label in _ticks(total, _scale(total)):
            draw.text((x, bottom + 12), label, "black", anchor="mm")
        draw.text((_WIDTH - 20, bottom + 30), "milliseconds", "black", anchor="rm")
    return numpy.asarray(image)


def _scale(total: float) -> float:
    """Return the number of pixels for a second."""
    return (_WIDTH - _LEFT - 20.0) / total


def _height(num_processes: int) -> float:
    return _TOP + _ROW * num_processes + 40.0


def _boxes(simulation: Simulation, total: float) -> Iterator[tuple[Computation, float, float, float]]:
    """Return every step, with the left and upper edge of its box, and its width."""
    scale = _scale(total)
    for r, row in enumerate(simulation.rows):
        for step in row:
            width = scale * (simulation.end[step] - simulation.start[step])
            yield step, _LEFT + scale * simulation.start[step], _TOP + _ROW * r, width


def _kind(step: Computation) -> str:
    return "code" if isinstance(step, UserCode) else step.kind


def _box(step: Computation, left: float, top: float, width: float) -> str:
    box = (
        f'<rect x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{_ROW - 6:.0f}" '
        f'fill="{COLOURS[_kind(step)]}" stroke="#555" stroke-width="0.5"/>'
    )
    text = ""
    if width >= _NARROWEST_TEXT:
        text = f'<text x="{left + width / 2:.2f}" y="{top + 18:.1f}" text-anchor="middle">{step.microbatch}</text>'
    return f'<g class="step"><title>{step!r}</title>{box}{text}</g>'


def _legend(simulation: Simulation) -> list[str]:
    kinds = {_kind(step) for row in simulation.rows for step in row}
    parts, left = [], _LEFT
    for kind, colour in COLOURS.items():
        if kind in kinds:
            parts.append(f'<rect class="legend" x="{left:.0f}" y="28" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{left + 17:.0f}" y="38">{WORDS[kind]}</text>')
            left += 40.0 + 7.0 * len(WORDS[kind])
    return parts


def _ticks(total: float, scale: float) -> list[tuple[float, str]]:
    """Return about ten round numbers of milliseconds, and where they are."""
    rough = 1e3 * total / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    numbers = range(int(1e3 * total / step) + 1)
    return [(_LEFT + scale * number * step / 1e3, f"{number * step:g}") for number in numbers]


def _axis(total: float, scale: float, top: float) -> list[str]:
    parts = [f'<line x1="{_LEFT}" y1="{top}" x2="{_LEFT + scale * total:.2f}" y2="{top}" stroke="#555"/>']
    for x, value in _ticks(total, scale):
        parts.append(f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 5}" stroke="#555"/>')
        parts.append(f'<text x="{x:.2f}" y="{top + 19}" text-anchor="middle">{value}</text>')
    return [*parts, f'<text x="{_LEFT + scale * total:.2f}" y="{top + 34}" text-anchor="end">milliseconds</text>']
