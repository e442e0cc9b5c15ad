"""The page of ``python -m trainer report`` in a real browser, where there is one (``apt-get install chromium``).

``CHROMIUM`` may name its command.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness import run
from parity import Small, fit
from PIL import Image
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from strategies import RPCSequentialStrategy
from trainer import PipelineMonitor
from trainer.cli import main

NAMES = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, filter(None, NAMES))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

SCHEMES = {"light": "1", "dark": "0"}
"""Values of Blink's setting ``preferredColorScheme``."""

WIDTHS = (1280, 420)


class Logs(Small):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


def write_page(path: str) -> None:
    """The page of a run of 12 steps, with a timetable of every third."""
    fit(
        Logs,
        RPCSequentialStrategy([3, 3], microbatches=4, schedule="1f1b"),
        2,
        max_epochs=3,
        callbacks=[PipelineMonitor(3)],
        logger=CSVLogger("runs", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
    )
    main(["report", "runs/lightning_logs/version_0", "--output", path])


def browse(folder: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()),
    ]
    return subprocess.run(command, text=True, capture_output=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    run(write_page, str(path), timeout_seconds=150)
    return path


def test_the_browser_reads_the_page_as_it_is(page: Path, tmp_path: Path) -> None:
    """It drops no element, asks for nothing else, and complains of nothing."""
    result = browse(tmp_path, page, "--dump-dom")
    written = page.read_text()
    for element in ("<section", "<svg", "<polyline", "<rect", "<table", "<tr", "<td"):
        assert result.stdout.count(element) == written.count(element) > 0, element
    assert "CONSOLE" not in result.stderr


def pixels(image: Any) -> tuple[float, int]:
    """The mean brightness, 0 to 255, and the number of colours."""
    small = image.convert("RGB").resize((image.width // 2, image.height // 2))
    brightness = small.convert("L").histogram()
    mean = sum(value * number for value, number in enumerate(brightness)) / sum(brightness)
    return mean, len(small.getcolors(maxcolors=2**24))


@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_seen_in_light_and_in_dark(page: Path, tmp_path: Path, width: int) -> None:
    means = {}
    for name, scheme in SCHEMES.items():
        shot = tmp_path / f"{name}.png"
        scheme = f"--blink-settings=preferredColorScheme={scheme}"
        browse(tmp_path / name, page, scheme, f"--window-size={width},2400", f"--screenshot={shot}")
        image = Image.open(shot)
        assert image.size == (width, 2400)
        means[name], colours = pixels(image)
        assert colours > 100
        left, right = image.convert("L").crop((0, 0, 4, 2400)), image.convert("L").crop((width - 4, 0, width, 2400))
        assert left.getextrema() == right.getextrema(), "something reaches beyond the page"
    assert means["light"] > 200 and means["dark"] < 80
