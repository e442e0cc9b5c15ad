"""Draws models and optimizers from public packages, and compares their training as a pipeline with one process.

    draw.py          seed ──▶ Cases: a class of a package each, found by what the package says of itself
    tiny.py          a small configuration of any class of ``transformers``, and batches
    families.py      trains a model of ``transformers`` both ways, in a process of the test harness
    optimizers.py    trains a small model with an optimizer both ways, there too
    judgement.py     what an exception or a difference means; the verdicts, and whether they suffice
    __main__.py      the command

``python -m tests.drawing`` draws with the seed of the day. No family or optimizer is named here: what the packages
contain is drawn, whether or not a test of the project knows it.

Each class trains in one process and as two stages under ``gpipe`` and ``1f1b``, in float64. Losses, parameters, buffers
and states of optimizers must be equal to 1e-9, or to 1e-6 if the model computes in float32. The command fails if a
verdict is FAILED, or if less than a third of the classes of a package are equal:

    equal      to one process (with one micro-batch if rows of a batch depend on each other)
    refused    by an error that ``strategies/`` raises for users
    not built  no small model could be built or trained in one process, or it draws random numbers
    FAILED     everything else: a difference, another error, a time-out, something that is left behind
"""

import sys
from pathlib import Path

# pytest puts this folder on the path; the command has no pytest.
if (helpers := str(Path(__file__).parents[1] / "helpers")) not in sys.path:
    sys.path.insert(0, helpers)
