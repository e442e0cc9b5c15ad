"""An error of user code is shown without the frames of Relay and Lightning; the exception keeps them."""

import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from paths import environment

from strategies.commands import folding
from strategies.commands.folding import VARIABLE, folded
from strategies.common import names
from strategies.common.errors import RemoteTraceback

SCRIPT = """
import torch
from pytorch_lightning import LightningModule
from torch.utils.data import DataLoader
from trainer import Trainer

class Net(LightningModule):
    def training_step(self, batch, batch_idx):
        {statement}
    def configure_optimizers(self):
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)

trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_steps=1)
trainer.fit(Net(), DataLoader(torch.ones(2, 1)))
"""


def shown(tmp_path: Path, statement: str, **variables: str) -> list[str]:
    """Run a script that ends with an error; the lines of its traceback."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(statement=statement))
    command = [sys.executable, "-W", "ignore", str(script)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**environment(), **variables}, cwd=tmp_path
    )
    assert ended.returncode == 1
    return ended.stderr[ended.stderr.index("Traceback") :].splitlines()


@pytest.mark.slow
def test_an_error_of_user_code_is_a_few_lines(tmp_path: Path) -> None:
    lines = shown(tmp_path, "raise LookupError('no such row')")
    files = [line.split('"')[1] for line in lines if line.startswith("  File")]
    assert files == [str(tmp_path / "script.py")] * 2
    assert lines[-2] == "LookupError: no such row"
    assert lines[-1].endswith(f"frames of Relay, Lightning and torch are left out; {VARIABLE}=1 shows them)")
    everything = shown(tmp_path, "raise LookupError('no such row')", **{VARIABLE: "1"})
    assert len(everything) > 40
    assert everything[-1] == "LookupError: no such row"


def caught(function: Any, *args: Any) -> Exception:
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def passes_on(what: type[Exception]) -> None:
    globals()["library"](what)


def functions_shown(error: Exception) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(folded(error)[0])]


def as_library(function: FunctionType, **variables: Any) -> FunctionType:
    """The same function, of a file of Relay."""
    code = function.__code__.replace(co_filename=names.__file__)
    return FunctionType(code, {**function.__globals__, **variables})


def test_frames_of_libraries_are_left_out_and_the_exception_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)

    def refuses(what: type[Exception]) -> None:
        raise what("told in words")

    library = as_library(refuses)
    refusal = caught(as_library(passes_on, library=library), ValueError)
    assert functions_shown(refusal) == ["caught", "refuses"]
    assert folded(refusal)[1] == 1
    assert len(traceback.extract_tb(refusal.__traceback__)) == 3
    refusal.__cause__ = RemoteTraceback("stage 0", "its traceback")
    assert functions_shown(refusal) == ["caught"]
    assert functions_shown(caught(as_library(refuses), AttributeError)) == ["caught", "refuses"]
    monkeypatch.setenv(VARIABLE, "1")
    assert functions_shown(refusal) == ["caught", "passes_on", "refuses"]


def test_the_hook_is_set_once_and_does_not_keep_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    folding.fold_when_shown(ValueError())
    hook = sys.excepthook
    folding.fold_when_shown(KeyError())
    assert sys.excepthook is hook
    assert isinstance(hook, partial)
    assert hook.args == (sys.__excepthook__,)
