"""Scripts without a guard, pasted lines, and imports that stay light: what a user starts without reading on."""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import procfs
import pytest
from harness import run
from paths import ROOT

import strategies

# Blank lines only between statements at top level, as an interactive session wants them. Everything is defined here:
# the layer and the model exist in no module that a worker could import.
SCRIPT = """
import os, torch, pytorch_lightning as pl
from torch import nn
from torch.utils.data import DataLoader
from trainer import Trainer

SCALE = 0.5

def scaled(x):
    return SCALE * x

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.pids = set()
    def forward(self, x):
        self.pids.add(os.getpid())
        return torch.tanh(scaled(self.linear(x)))

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.sequential_module = nn.Sequential(Layer(4), Layer(4), Layer(4), Layer(4))
        self.example_input_array = torch.zeros(8, 4, dtype=torch.float64)
    def training_step(self, batch, batch_idx):
        loss = (self.sequential_module(batch) - 0.25).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

data = DataLoader(torch.linspace(-1, 1, 40, dtype=torch.float64).view(10, 4), batch_size=4)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(accelerator="cpu", devices=DEVICES, strategy=STRATEGY, max_epochs=3, **quiet)
model = Model()
trainer.fit(model, data)
print("loss", repr(trainer.callback_metrics["loss"].item()))
print("checksum", repr(sum(p.sum().item() for p in model.parameters())))
print("layers run here", [layer.pids == {os.getpid()} for layer in model.sequential_module])
"""

APPLY = """
import sys, torch
from strategies.pipeline.stage.layers import PassContext
PassContext.capture("cpu").apply()
assert "torch._inductor" not in sys.modules
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_float32_matmul_precision("high")
torch.autograd.set_detect_anomaly(True, False)
other = PassContext.capture("cpu")
torch.use_deterministic_algorithms(False)
torch.set_float32_matmul_precision("highest")
torch.autograd.set_detect_anomaly(False)
other.apply()
assert PassContext.capture("cpu") == other
"""
"""Settings that are as they should be cost no import of the compiler."""


def script(strategy: str, devices: int) -> str:
    return SCRIPT.replace("STRATEGY", repr(strategy)).replace("DEVICES", str(devices))


def python(arguments: Sequence[str], *, text: str | None = None) -> list[str]:
    """Runs Python in another directory; returns what it printed, and sees that nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="relay-test-") as scratch:
        for name in ("cwd", "tmp"):
            (Path(scratch) / name).mkdir()
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments],
            cwd=f"{scratch}/cwd",
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": f"{scratch}/tmp", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(text, timeout=100)
            finally:
                process.kill()
        assert process.returncode == 0 and "Traceback" not in err, err
        assert not [procfs.describe(pid) for pid in procfs.family(process.pid, Path(scratch).resolve())]
        assert not [path for path in Path(scratch, "tmp").glob("*") if "torchinductor" not in path.name]
        assert not list(Path(scratch, "cwd").iterdir())
        return out.splitlines()


def results(lines: Sequence[str]) -> tuple[float, float, str]:
    loss, checksum, run_here = lines[-3:]
    return float(loss.removeprefix("loss ")), float(checksum.removeprefix("checksum ")), run_here


def printed(text: str) -> list[str]:
    """Runs a script in this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(text, {"__name__": "script"})
    return output.getvalue().splitlines()


@pytest.fixture(scope="module")
def in_one_process() -> tuple[float, float, str]:
    return results(run(printed, script("single_device", 1)))


def test_a_script_without_a_guard(tmp_path: Path, in_one_process: tuple[float, float, str]) -> None:
    assert "__main__" not in SCRIPT
    (tmp_path / "script.py").write_text(script("rpc_sequential", 2))
    loss, checksum, run_here = results(python([str(tmp_path / "script.py")]))
    assert (loss, checksum) == pytest.approx(in_one_process[:2], rel=1e-9)
    assert in_one_process[2] == "layers run here [True, True, True, True]"
    # The layers of the first stage ran elsewhere, and in no other process: balance_by_size looks at copies.
    assert run_here == "layers run here [False, False, True, True]"


@pytest.mark.slow
def test_the_same_lines_in_an_interactive_session(in_one_process: tuple[float, float, str]) -> None:
    lines = python(["-i", "-q"], text=script("rpc_sequential", 2) + "\n")
    loss, checksum, _ = results([line.removeprefix(">>> ") for line in lines])
    assert (loss, checksum) == pytest.approx(in_one_process[:2], rel=1e-9)


# Imports


def test_the_engine_imports_no_lightning_and_usual_settings_not_the_compiler() -> None:
    """Every module of it, one after the other in one process."""
    rooms = ("common", "optim", "sharding", "pipeline", "remote")
    files = [file.relative_to(ROOT) for room in rooms for file in sorted(ROOT.glob(f"strategies/{room}/**/*.py"))]
    modules = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert "strategies.pipeline.driver" in modules and "strategies.pipeline.worker.process" in modules
    code = f"""
import importlib, sys
{APPLY}
for module in {modules}:
    importlib.import_module(module)
    heavy = [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning", "trainer")
        or (name.startswith("strategies.lightning.") and name != "strategies.lightning.registry")
    ]
    assert not heavy, (module, heavy)
"""
    assert python(["-c", code]) == []


def test_strategies_resolves_names_when_they_are_asked_for() -> None:
    for name in strategies.__all__:
        assert getattr(strategies, name).__name__ == name
    assert set(strategies.__all__) <= set(dir(strategies))
    with pytest.raises(AttributeError, match="module 'strategies' has no attribute 'RPCSequential'"):
        _ = strategies.RPCSequential
    with pytest.raises(ImportError):
        from strategies import Nothing

        del Nothing
