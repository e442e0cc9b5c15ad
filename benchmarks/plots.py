"""Figures, if matplotlib is installed; otherwise a section has a note instead of its figures."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.report import Effort, Section


def plot(
    section: Section, effort: Effort, name: str, draw: Callable[[Any], None], *, size: tuple[float, float]
) -> None:
    """Draw a figure into the folder of plots and add it to the section.

    Args:
        section: The section to which the figure belongs.
        effort: Contains the folder.
        name: Name of the file.
        draw: Draws into the empty figure that it gets.
        size: Width and height in inches.
    """
    if find_spec("matplotlib") is None:
        section.notes.append(f"No {name}: matplotlib is not installed (`pip install -e '.[bench]'`).")
        return
    from matplotlib.figure import Figure  # draws without a display, and without matplotlib's global state

    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    effort.plots.mkdir(parents=True, exist_ok=True)
    figure.savefig(effort.plots / name, dpi=110)
    section.plots.append(name)


def lines(axes: Any, xs: Sequence[float], ys: Mapping[str, Sequence[float]], *, x: str, y: str, log: str = "") -> None:
    """Draw a line for each name; ``log`` contains the letters of the logarithmic axes, such as ``"xy"``."""
    for name, values in ys.items():
        axes.plot(xs, values, marker="o", markersize=3, label=name)
    if "x" in log:
        axes.set_xscale("log", base=2)
    if "y" in log:
        axes.set_yscale("log", base=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def boxes(axes: Any, samples: Mapping[str, Sequence[float]], *, x: str) -> None:
    """Draw a box for each name, the first one at the top."""
    axes.boxplot(list(samples.values()), orientation="horizontal")
    axes.set_yticks(range(1, len(samples) + 1), list(samples), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(x)
    axes.grid(axis="x", alpha=0.3)
