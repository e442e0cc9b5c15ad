"""Settings of passes, as stages apply them."""

import subprocess
import sys

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


def test_settings_that_are_as_they_should_be_cost_no_import_of_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", APPLY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
