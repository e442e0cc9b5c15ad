"""One case of the drawing of ``python -m tests.drawing``, which a nightly job makes for others each day."""

from pathlib import Path

import pytest
from parity import on_cpus

from tests.drawing.__main__ import main


@on_cpus
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_family_of_a_drawing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.md"
    assert main(["--seed", "7", "--only", "LlamaForCausalLM", "--report", str(report)]) == 0
    assert "seed 7" in capfd.readouterr().out
    rows = [line for line in report.read_text().splitlines() if line.startswith("| LlamaForCausalLM | 7 | ")]
    assert [row.split(" | ")[2:4] for row in rows] == [
        ["equal", "gpipe, micro-batches: 3"],
        ["equal", "1f1b, micro-batches: 3"],
    ]
