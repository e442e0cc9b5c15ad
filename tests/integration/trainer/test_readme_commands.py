"""The README's commands, as a user types them, but for the number of epochs and batches."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.timeout(400)


def command(*arguments: str | Path, cwd: Path = ROOT) -> str:
    """Runs Python and returns what it printed, the progress bar included."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        timeout=300,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


FEW = {"limit_train_batches": 75, "limit_val_batches": 10}
"""Instead of 165 batches of training data, and all of validation data."""
SHORTENED = [f"--trainer.{name}={number}" for name, number in FEW.items()]


def script(name: str, folder: Path) -> str:
    """Runs a copy of an example with few batches in a folder, and returns what it printed."""
    text, epochs = (ROOT / "examples" / name).read_text(), "    max_epochs=1,\n"
    assert text.count(epochs) == 1
    limits = ", ".join(f"{argument}={number}" for argument, number in FEW.items())
    (folder / name).write_text(text.replace(epochs, f"{epochs}    {limits},\n"))
    return command(folder / name, cwd=folder)


def losses(output: str) -> tuple[list[float], float]:
    """The validation losses and the unigram loss that the report prints."""
    validation = re.search(r"validation loss +([\d. ]+) nats", output)
    unigram = re.search(r"unigram loss +([\d.]+)", output)
    assert validation and unigram
    return [float(loss) for loss in validation[1].split()], float(unigram[1])


@pytest.mark.slow
def test_the_demo_and_what_follows_it(tmp_path: Path) -> None:
    into = f"--trainer.logger.init_args.save_dir={tmp_path}"
    fit = ("-m", "trainer", "fit", "--config", "configs/pipeline.yaml", "--trainer.max_epochs=2")
    output = command(*fit, *SHORTENED, into)
    (first, second), unigram = losses(output)
    assert second < first < unigram - 0.5
    assert re.search(r"speed +[\d,]+ tokens/s", output)
    balance = re.search(r"balance +\[(\d), (\d)\]", output)
    assert balance and int(balance[1]) + int(balance[2]) == 7
    assert "Epoch 1" in output  # the progress bar, of tqdm or of rich
    checkpoint = re.search(r"checkpoint +(\S+\.ckpt)", output)
    assert checkpoint and Path(checkpoint[1]).parent.joinpath("config.yaml").exists()

    for config in ("pipeline", "single"):
        arguments = ("--config", f"configs/{config}.yaml", "--ckpt_path", checkpoint[1], SHORTENED[1], into)
        table = command("-m", "trainer", "validate", *arguments)
        validated = re.search(r"val_loss\W+([\d.]+)", table)
        assert validated and float(validated[1]) == pytest.approx(second, abs=1e-3)


@pytest.mark.nightly
def test_the_scripts_that_differ_in_one_argument(tmp_path: Path) -> None:
    single, _ = losses(script("train_single.py", tmp_path))
    pipeline, unigram = losses(script("train_pipeline.py", tmp_path))
    assert pipeline == pytest.approx(single, abs=2e-3)
    assert pipeline[-1] < unigram - 0.5


@pytest.mark.slow
def test_the_hugging_face_model(tmp_path: Path) -> None:
    into = f"--trainer.logger.init_args.save_dir={tmp_path}"
    shortened = ("--trainer.max_epochs=2", "--trainer.limit_train_batches=30", SHORTENED[1])
    output = command("-m", "trainer", "fit", "--config", "configs/hf_pipeline.yaml", *shortened, into)
    (first, second), unigram = losses(output)
    assert second < first < unigram
    balance = re.search(r"balance +\[(\d), (\d)\]", output)
    assert balance and int(balance[1]) + int(balance[2]) == 4
    checkpoint = re.search(r"checkpoint +(\S+\.ckpt)", output)
    assert checkpoint and Path(checkpoint[1]).exists()


@pytest.mark.nightly
def test_the_script_of_the_hugging_face_model(tmp_path: Path) -> None:
    (loss,), unigram = losses(script("hf_finetune.py", tmp_path))
    assert loss < unigram - 0.5
