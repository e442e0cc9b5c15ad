"""Sections of ``make bench`` run, and one that fails or hangs does not end the others; ``make bench-tiny`` runs all."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from benchmarks.balance import maximum, optimum, random_vectors
from benchmarks.blockpartition import block_partition
from benchmarks.report import Section, Table, quartiles, ratios, spread
from benchmarks.timeline import bubble, spans_of
from strategies.pipeline.partition.balance import partition_costs

CHECKED = ("pipeline_step", "zero", "checkpoint", "memory")
"""Sections whose figures say more than that they run."""


def bench(into: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command at its smallest, and returns what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "--tiny", "--rounds=1", f"--into={into}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=900,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_section_runs(tmp_path: Path) -> None:
    done = bench(tmp_path, "driver_overhead")
    assert done.returncode == 0, done.stdout[-5000:]
    report = (tmp_path / "results.md").read_text()
    assert done.stdout.count("\ntook ") == report.count("\n## ") == report.count("TINY") == 1
    assert "The number of calls per step does not grow" in report


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_sections_run(tmp_path: Path) -> None:
    done = bench(tmp_path, *CHECKED)
    assert done.returncode == 0, done.stdout[-5000:]
    report = (tmp_path / "results.md").read_text()
    assert done.stdout.count("\ntook ") == report.count("\n## ") == report.count("TINY") == len(CHECKED)
    steps = Section.of(json.loads((tmp_path / "results.json").read_text())["pipeline_step"]["section"])
    names = [row[0] for row in steps.tables[0].rows]
    pipelines = [name for name in names if name.startswith(("Relay", "torch,"))]
    assert len(pipelines) == 4, steps.absent  # three of Relay, one of torch
    measured = [float(row[-1].rstrip("%")) for row in steps.tables[0].rows if row[0] in pipelines]
    assert all(0 < idle < 100 for idle in measured)
    zero = _section(tmp_path, "zero").tables[0]
    share = zero.columns.index("share")
    state = {row[0]: float(row[share].rstrip("%")) for row in zero.rows}
    assert state["DDP + AdamW"] == 100.0
    relay = [share for name, share in state.items() if name.startswith("Relay, stage")]
    assert len(relay) == 7 and max(relay) <= 55.0
    saved = [row[0] for row in _section(tmp_path, "checkpoint").tables[0].rows]
    assert "sharded, asynchronous" in saved
    phases = [row[0] for row in _section(tmp_path, "memory").tables[1].rows]
    assert "fit, sharded: save" in phases and "resumed fit, sharded" in phases


def _section(folder: Path, name: str) -> Section:
    return Section.of(json.loads((folder / "results.json").read_text())[name]["section"])


@pytest.mark.slow
def test_a_section_that_runs_out_of_time_is_reported_and_keeps_the_others(tmp_path: Path) -> None:
    outcome = {"section": {"title": "Zero", "setting": "s", "tables": [], "notes": ["kept"]}, "stamp": "", "took": ""}
    (tmp_path / "results.json").write_text(json.dumps({"zero": outcome}))
    done = bench(tmp_path, "--limit=0.2", "growth")
    assert done.returncode == 1 and "failed: growth" in done.stdout
    report = (tmp_path / "results.md").read_text()
    assert "was still running after 0 s" in report and "- kept" in report


def test_a_name_that_is_no_section_is_refused(tmp_path: Path) -> None:
    done = bench(tmp_path, "pipelinestep")
    assert done.returncode == 2 and "no benchmark ['pipelinestep']; there are pipeline_step, " in done.stdout


def test_the_optimum_and_the_published_algorithm() -> None:
    assert optimum([1, 2, 3, 4, 5, 6], 2) == 11
    assert optimum([5, 1, 1, 1, 1, 1], 3) == 5
    assert block_partition([1.0] * 8, 4) == [2, 2, 2, 2]
    vectors = random_vectors(400)
    assert len(vectors[396][0]) == vectors[396][1] == 8  # each layer a block: only exact sums let the algorithm end
    for costs, parts in vectors:
        best, published = optimum(costs, parts), block_partition(costs, parts)
        assert sum(published) == len(costs) and len(published) == parts
        assert maximum(costs, partition_costs(costs, parts)) == best <= maximum(costs, published)
        bounds = [sum(published[:k]) for k in range(parts + 1)]
        low, high = min(costs), max(costs)
        sums = [sum((c - low) / (high - low) for c in costs[a:b]) for a, b in itertools.pairwise(bounds)]
        assert max(sums) - min(sums) <= 1 + 1e-9  # what the paper proves


def test_what_a_stage_notes_becomes_spans() -> None:
    waits, fed = "F1, waiting for its input", "B0, waiting for its gradients"
    notes = [(0.0, "F0, layer 0"), (0.5, "F0, layer 1"), (1.0, waits), (1.5, "F1, layer 0"), (2.0, fed)]
    notes += [(3.0, "recomputing F0, layer 0"), (4.0, "B0"), (5.0, "")]
    spans = spans_of(notes, 0, 0.0)
    assert [(span.kind, span.microbatch, span.start, span.end) for span in spans] == [
        ("F", 0, 0.0, 1.0),
        ("F", 1, 1.5, 2.0),
        ("B", 0, 3.0, 5.0),
    ]
    assert bubble(spans) == pytest.approx(1.5 / 5)


def test_the_report_reads_well() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0], 1) == ["3.0", "2.0 to 4.0"]
    assert ratios([2.0, 3.0], [1.0, 2.0]) == [2.0, 1.5]
    section = Section("A", "b.", [Table(["", "x"], [["one", "1"], ["three", "22"]])], absent={"peer": "no\n GPU"})
    text = section.markdown()
    assert "| one   |  1 |\n| three | 22 |" in text and "| peer        | no GPU |" in text
