"""Draws models and optimizers from public packages, and compares their training as a pipeline with one process.

    draw.py          seed ──▶ Cases: a class of a package each, found by what the package says of itself
    tiny.py          a small configuration of any class of ``transformers``, and batches
    families.py      trains a model of ``transformers`` both ways, in a process of the test harness
    optimizers.py    trains a small model with an optimizer both ways, there too
    judgement.py     what an exception or a difference means; the verdicts, and whether they suffice
    __main__.py      the command

``python -m tests.drawing`` draws with the seed of the day. No family or optimizer is named here: what the packages
contain is drawn, whether or not a test of the project knows it.
"""

import sys
from pathlib import Path

# pytest puts this folder on the path; the command has no pytest.
if (helpers := str(Path(__file__).parents[1] / "helpers")) not in sys.path:
    sys.path.insert(0, helpers)
