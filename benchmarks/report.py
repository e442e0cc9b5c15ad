"""The result of a benchmark, and the report: one section of Markdown per benchmark."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "pytorch-lightning", "numpy", "torchgpipe", "fairscale", "deepspeed", "matplotlib")


@dataclass(frozen=True)
class Effort:
    """The amount of work of a benchmark.

    Attributes:
        plots: Folder for figures.
        rounds: Number of rounds of each contestant; ``None`` for the default of the section.
        tiny: Only show that everything runs, with the smallest models and numbers. The figures have no meaning.
    """

    plots: Path
    rounds: int | None = None
    tiny: bool = False

    def rounds_or(self, default: int) -> int:
        """Return the requested number of rounds, otherwise ``default``, or 1 for a tiny run."""
        return self.rounds or (1 if self.tiny else default)


@dataclass
class Table:
    """A table: column headings and rows of formatted cells."""

    columns: list[str]
    rows: list[list[str]]
    heading: str = ""

    def markdown(self) -> str:
        """Return the table as Markdown with aligned columns, so that it is also readable on a terminal."""
        widths = [max(len(row[k]) for row in [self.columns, *self.rows]) for k in range(len(self.columns))]

        def line(cells: Sequence[str]) -> str:
            first, *others = zip(cells, widths, strict=True)
            return f"| {first[0]:<{first[1]}} |" + "".join(f" {cell:>{width}} |" for cell, width in others)

        rule = "".join(["|:" + "-" * (widths[0] + 1), *("|" + "-" * (width + 1) + ":" for width in widths[1:]), "|"])
        heading = [f"**{self.heading}**", ""] if self.heading else []
        return "\n".join([*heading, line(self.columns), rule, *map(line, self.rows)])


@dataclass
class Section:
    """The outcome of one benchmark.

    Attributes:
        title: Title of the section.
        setting: What was measured, and how.
        tables: The measurements.
        notes: Remarks on the measurements.
        plots: File names within the folder of plots.
        absent: Contestants that could not take part, with the reason.
    """

    title: str
    setting: str
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return the section as Markdown for the report."""
        parts = [f"## {self.title}", self.setting, *(table.markdown() for table in self.tables)]
        parts += ["\n".join(f"- {note}" for note in self.notes)] if self.notes else []
        parts += [f"![{name}](plots/{name})" for name in self.plots]
        absent = Table(["did not run", "why"], [[name, " ".join(why.split())] for name, why in self.absent.items()])
        parts += [absent.markdown()] if self.absent else []
        return "\n\n".join(parts)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Section":
        """Return the section from the output of :func:`plain`."""
        return cls(**{**plain, "tables": [Table(**table) for table in plain["tables"]]})


def spread(values: Sequence[float], digits: int = 3, factor: float = 1.0) -> list[str]:
    """Return two cells: the median, and the quartiles."""
    low, middle, high = quartiles([value * factor for value in values])
    return [f"{middle:.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile; also for a single value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(own: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the ratio of each round. Both values of a round are measured under the same load of the machine."""
    return [a / b for a, b in zip(own, reference, strict=True)]


def machine() -> list[str]:
    """Return two lines: the machine, and the versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB, {platform.system()} {platform.release()}",
        f"Python {platform.python_version()}, " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
    ]


def stamp(*, tiny: bool) -> str:
    """Return date, commit and load of the machine."""
    commit = _git("describe", "--always", "--abbrev=10", "--exclude=*") or "unknown"
    written = (":!benchmarks/results.*", ":!benchmarks/plots")  # changed by earlier sections
    changed = " with changes" if _git("status", "--porcelain", "--", ".", *written) else ""
    load = os.getloadavg()[0]
    warning = "; TINY: these figures only show that the benchmark runs" if tiny else ""
    when = datetime.now(timezone.utc)
    return f"{when:%Y-%m-%d %H:%M} UTC, commit {commit}{changed}, load {load:.1f} at the start{warning}"


def write(folder: Path, outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write ``results.md``, and ``results.json``, from which a later run of some sections reads the other sections."""
    (folder / "results.json").write_text(json.dumps(outcomes, indent=1) + "\n")
    head = [
        "# Benchmarks",
        "Written by `make bench`; [what each section compares](../docs/costs.md#the-benchmarks). Sections may have "
        "been measured on different days and machines, some of them faster: compare figures within a section only.",
        "",
    ]
    parts = ["\n\n".join(head).rstrip(), "\n".join(f"- {line}" for line in machine())]
    for outcome in outcomes.values():
        parts += [Section.of(outcome["section"]).markdown(), f"<sub>{outcome['stamp']}; {outcome['took']}</sub>"]
    (folder / "results.md").write_text("\n\n".join(parts) + "\n")


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of earlier runs."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def plain(section: Section) -> dict[str, Any]:
    """Return the section as values that JSON can represent."""
    return asdict(section)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
