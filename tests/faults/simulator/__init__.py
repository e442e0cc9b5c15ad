"""A simulator of faults: runs of random shape meet random faults, and an oracle judges how they end.

    cases.py      seed ──▶ Case: the shape of a run, and one or two faults (kind, phase, process); pure
    traps.py      layers, an optimizer and hooks of the model in which a fault strikes, in whichever process
    subject.py    the run: until the fault has ended it or it is over, then again from its last checkpoint
    launched.py   the run of ranks that torchrun starts, or tasks on two hosts
    oracle.py     what must come of a case, and everything in which an outcome differs from that; pure
    campaign.py   runs cases in the test harness, which finds what they leave behind
    report.py     the outcomes as Markdown; pure

``python -m tests.faults.simulator --seed S --count N`` runs the seeds S to S + N - 1. The tests import this package,
and so do the processes that it starts; it imports the test harness and the strategies. ``make faults`` runs 1,000 seeds
and continues where it was interrupted; remove ``build/faults`` after a change of the code. A new option of a strategy,
or a new kind of fault, is a line in a table of ``cases.py``, which leaves the cases of other seeds as they are.
"""

import sys
from pathlib import Path

# pytest puts this folder on the path; the command has no pytest.
if (helpers := str(Path(__file__).parents[2] / "helpers")) not in sys.path:
    sys.path.insert(0, helpers)
