"""The output of ``trainer.verify``: a table for terminals, and the whole certificate as JSON."""

import json
import math
import os
from pathlib import Path
from typing import Any

from trainer.verification.certificate import DOCUMENTED, EQUAL, Certificate

_COLORS = {EQUAL: "green", DOCUMENTED: "yellow"}


def as_dict(certificate: Certificate) -> dict[str, Any]:
    """Return the whole certificate as numbers, strings and lists."""
    origin = certificate.origin
    return {
        "verdict": certificate.verdict,
        "strategy": certificate.strategy,
        "reference": certificate.reference,
        "steps": certificate.steps,
        "precision": certificate.rounding.described,
        "limit_is_measured": certificate.rounding.is_measured,
        "limit": certificate.rounding.relative,
        "explained_by_microbatches": certificate.explained,
        "compared": {
            part: {"values": number, "largest": _finite(relative), "in_limits": _finite(in_limits)}
            for part, (number, relative, in_limits) in certificate.largest.items()
        },
        "reasons": certificate.reasons,
        "origin": None
        if origin is None
        else {**vars(origin), "size": _finite(origin.size), "relative": _finite(origin.relative)},
        "notes": certificate.notes,
        "facts": {name: value for name, value in certificate.facts.items() if isinstance(value, str | int | list)},
    }


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else "missing"


def write_certificate(certificate: Certificate, path: str | os.PathLike[str]) -> None:
    """Write the certificate to a file."""
    Path(path).write_text(json.dumps(as_dict(certificate), indent=1) + "\n")


def print_certificate(certificate: Certificate) -> None:
    """Print a table of the comparison, and the verdict with its explanation."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    number = certificate.steps
    title = (
        f"{certificate.strategy}, compared with {certificate.reference} in {certificate.rounding.described} over "
        f"{number} {'step' if number == 1 else 'steps'}"
    )
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("compared")
    for name in ("values", "largest difference", "of its limit"):
        shown.add_column(name, justify="right")
    for part, (number, relative, in_limits) in certificate.largest.items():
        size = "0" if not relative else f"{relative:.1e}" if math.isfinite(relative) else "missing"
        share = "wrong" if in_limits > 1 else f"{in_limits:.0e}" if in_limits else "0"
        shown.add_row(part, str(number), size, share, style="red" if in_limits > 1 else None)
    console.print(shown)
    for line in lines_of(certificate):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Verdict: {certificate.verdict}", style=f"bold {_COLORS.get(certificate.verdict, 'red')}", highlight=False
    )


def lines_of(certificate: Certificate) -> list[str]:
    """Return the lines below the table."""
    lines = [f"Note: {note}" for note in certificate.notes]
    if certificate.explained is not None:
        lines.append(
            f"Micro-batches alone change gradients by up to {certificate.explained:.1e} in one process; the limit is "
            f"{certificate.rounding.relative:.0e} of the largest value."
        )
    lines += [f"Different because of {reason}." for reason in certificate.reasons]
    origin = certificate.origin
    if origin is not None:
        when = "After the last step" if origin.step is None else f"In step {origin.step + 1}"
        where = f" of {origin.layer!r}" if origin.layer != origin.part else ""
        stage = f" on {origin.stage}" if origin.stage else ""
        size = f" The largest difference is {origin.size:.3g} ({origin.relative:.1e} of the largest value)."
        lines.append(
            f"{when}, {origin.part}{where}{stage}: {origin.what}.{size if math.isfinite(origin.size) else ''} "
            f"Look at {origin.advice}."
        )
    return lines
