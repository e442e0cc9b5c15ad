"""Curves and bars as SVG, which takes its colours from the CSS of the page.

│  ╭──╮      one polyline for each series, interrupted where values are not finite or steps go back,
│──╯  ╰──    a dot where a single value is left, and round areas on which the pointer shows step and value
└────────
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from trainer.report.run_folder import Curve

MOST_POINTS, MOST_MARKS = 1000, 150
NUM_COLOURS = 8

_WIDTH, _HEIGHT, _RIGHT, _TOP, _BOTTOM = 500.0, 240.0, 12.0, 10.0, 40.0
_BAR, _NAME = 34.0, 80.0
_LARGEST, _SMALLEST = 1e300, 1e-300
_PER_CHARACTER = 8.8
"""About the width of a character in pixels, on a narrow page, where the text is larger."""


@dataclass(frozen=True)
class Series:
    """A curve in a chart.

    Attributes:
        name: Its name in the legend.
        curve: Its points.
        colour: The number of its colour; the colours repeat, with dashes, from ``NUM_COLOURS`` on.
    """

    name: str
    curve: Curve
    colour: int


@dataclass(frozen=True)
class Segment:
    """A part of a bar.

    Attributes:
        size: The length in units of the axis.
        label: The text in the segment, if there is room.
        title: The tooltip.
        style: The CSS class.
    """

    size: float
    label: str
    title: str
    style: str


def number(value: float, digits: int = 4) -> str:
    """Return a number with ``digits`` significant digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if 10.0**digits <= abs(value) < 1e15 else f"{value:,.{digits}g}"


def labels(values: Sequence[float]) -> list[str]:
    """Return numbers with as many digits as are necessary to distinguish them, at least four."""
    texts = [number(value) for value in values]
    for digits in range(5, 16):
        if len(set(texts)) == len(texts):
            break
        texts = [number(value, digits) for value in values]
    return texts


def step_number(step: float) -> str:
    """Return the number of a step, with all its digits."""
    return f"{step:.15g}"


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return at most ``most`` points of a curve, in the same order.

    These are both ends and, for each of several equal parts, the lowest, the highest, and the first non-finite point.
    """
    if len(curve) <= most:
        return curve
    finite = [math.isfinite(value) for _, value in curve]
    num_parts = (most - 2) // (2 if all(finite) else 3)
    kept = {0, len(curve) - 1}
    for part in range(num_parts):
        places = range(part * len(curve) // num_parts, (part + 1) * len(curve) // num_parts)
        if drawable := [i for i in places if finite[i]]:
            kept |= {min(drawable, key=lambda i: curve[i][1]), max(drawable, key=lambda i: curve[i][1])}
        kept.update([i for i in places if not finite[i]][:1])
    return [curve[i] for i in sorted(kept)]


def runs_of(curve: Curve) -> list[Curve]:
    """Divide a curve where a value is not finite, and where steps go back: a run has continued from a checkpoint."""
    runs: list[Curve] = [[]]
    for step, value in curve:
        if not math.isfinite(value):
            runs.append([])
            continue
        if runs[-1] and step < runs[-1][-1][0]:
            runs.append([])
        runs[-1].append((step, value))
    return [run for run in runs if run]


def drawn_at(value: float) -> float:
    """Return the place of a finite number on an axis. Sums and differences of such places are finite."""
    return max(-_LARGEST, min(value, _LARGEST))


def are_equal(low: float, high: float) -> bool:
    """Return whether the difference of the ends of an axis is due to rounding, and too small to be divided."""
    return high - low <= max(_SMALLEST, 1e-12 * max(abs(low), abs(high)))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers from at most ``low`` to at least ``high``."""
    low, high = drawn_at(low), drawn_at(high)
    if are_equal(low, high):
        size = max(abs(low), abs(high))
        margin = size / 2 if size > _SMALLEST else 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) if abs(step) > 1e-9 else k * step for k in range(first, last + 1)]


def line_chart(
    series: Sequence[Series],
    title: str,
    *,
    from_zero: bool = False,
    wide: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Return an SVG element.

    Args:
        series: The curves, with at least one finite value.
        title: The title for screen readers.
        from_zero: Whether the axis begins at 0.
        wide: Whether the chart is as wide as the page, or half as wide.
        marks: Steps with a vertical line, and the tooltip of the line.
    """
    width = 2 * _WIDTH if wide else _WIDTH
    points = [point for own in series for point in own.curve if math.isfinite(point[1])]
    steps, values = [step for step, _ in points], [value for _, value in points]
    levels = ticks(min(0.0, *values) if from_zero else min(values), max(values))
    level_labels = labels(levels)
    margin = max(58.0, 12 + _PER_CHARACTER * max(map(len, level_labels)))
    left, right = drawn_at(min(steps)), drawn_at(max(steps))
    if are_equal(left, right):
        beside = max(1.0, 1e-6 * abs(right))
        left, right = left - beside, right + beside

    def x(step: float) -> float:
        return margin + (width - margin - _RIGHT) * ((drawn_at(step) - left) / (right - left))

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * ((levels[-1] - drawn_at(value)) / (levels[-1] - levels[0]))

    bottom = _HEIGHT - _BOTTOM
    size, label = f"{width:.0f} {_HEIGHT:.0f}", escape(title)
    across = f'x1="{margin:.1f}" x2="{width - _RIGHT}"'
    parts = [f'<svg class="chart" viewBox="0 0 {size}" role="img" aria-label="{label}">']
    for level, text in zip(levels, level_labels, strict=True):
        parts.append(f'<line class="grid" {across} y1="{y(level):.1f}" y2="{y(level):.1f}"/>')
        parts.append(f'<text x="{margin - 7:.1f}" y="{y(level) + 4:.1f}" text-anchor="end">{text}</text>')
    steps_shown = [step for step in ticks(left, right) if left <= step <= right and step == round(step)]
    for step, text in zip(steps_shown, labels(steps_shown), strict=True):
        parts.append(f'<line class="tick" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        anchor = "end" if x(step) > width - 30 else "middle"
        parts.append(f'<text x="{x(step):.1f}" y="{bottom + 19}" text-anchor="{anchor}">{text}</text>')
    parts.append(f'<text x="{width - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">step</text>')
    for step, told in marks:
        if left <= step <= right:
            line = f'<line class="mark" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP}" y2="{bottom}">'
            parts.append(f"{line}<title>{escape(told)}</title></line>")
    for own in series:
        for run in runs_of(thinned(own.curve)):
            line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)
            parts.append(f'<polyline class="line {style(own.colour)}" points="{line}"/>')
            if len(run) == 1:  # a line of one point cannot be seen
                place = f'cx="{x(run[0][0]):.1f}" cy="{y(run[0][1]):.1f}" r="3"'
                parts.append(f'<circle class="point {style(own.colour)}" {place}/>')
    for own in series:
        for step, value in thinned(own.curve, MOST_MARKS):
            if math.isfinite(value):
                told = f"{escape(own.name)}, step {step_number(step)}: {value:.6g}"
                place = f'class="dot {style(own.colour)}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="4"'
                parts.append(f"<circle {place}><title>{told}</title></circle>")
    return "\n".join([*parts, "</svg>"])


def for_pages(draw: Callable[[bool], str]) -> str:
    """Return a chart in two widths, of which a broad page shows the first, and a phone the second.

    Args:
        draw: Returns the chart. The argument says whether it is wide.
    """
    return f'<div class="broad">{draw(True)}</div><div class="narrow">{draw(False)}</div>'


def bars(rows: Sequence[tuple[str, Sequence[Segment]]], title: str, unit: str, *, wide: bool = True) -> str:
    """Return an SVG element with a bar for each name, on one scale that begins at 0."""
    width = 2 * _WIDTH if wide else _WIDTH
    longest = max(sum(segment.size for segment in segments) for _, segments in rows)
    levels = ticks(0.0, longest or 1.0, 8 if wide else 4)
    scale = (width - _NAME - 40.0) / levels[-1]
    bottom = _BAR * len(rows)
    parts = [f'<svg class="chart" viewBox="0 0 {width:.0f} {bottom + 44:.0f}" role="img" aria-label="{escape(title)}">']
    for r, (name, segments) in enumerate(rows):
        top, left = _BAR * r, _NAME
        parts.append(f'<text x="{_NAME - 8}" y="{top + 19}" text-anchor="end">{escape(name)}</text>')
        for segment in segments:
            length = scale * segment.size
            parts.append(
                f'<g class="segment"><title>{escape(segment.title)}</title><rect class="{segment.style}" '
                f'x="{left:.1f}" y="{top}" width="{length:.1f}" height="{_BAR - 6}"/>'
            )
            if length > _PER_CHARACTER * len(segment.label) + 6:
                middle = f'x="{left + length / 2:.1f}" y="{top + 18}"'
                parts.append(f'<text {middle} text-anchor="middle">{escape(segment.label)}</text>')
            parts.append("</g>")
            left += length
    for level in levels:
        x = _NAME + scale * level
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{number(level)}</text>')
    parts.append(f'<text x="{width - 40}" y="{bottom + 37}" text-anchor="end">{escape(unit)}</text>')
    return "\n".join([*parts, "</svg>"])


def style(colour: int) -> str:
    """Return the CSS classes of a colour."""
    return f"c{colour % NUM_COLOURS}" + (" dashed" if colour >= NUM_COLOURS else "")
