"""Print tracebacks of errors in user code without the frames of Relay, Lightning and torch's wrappers.

The printed traceback shows the user's code and the line that raised the error. The exception keeps its whole traceback,
for debuggers, until Python prints it.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from strategies.common.errors import RemoteTraceback

VARIABLE = "RELAY_FULL_TRACEBACK"
"""Environment variable. If it is set, all frames are shown."""

_OWN = str(Path(__file__).resolve().parents[1])

_WRAPPERS = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/optim/", "/contextlib.py")
"""Path components of code that only calls other code."""

_BUGS = (AssertionError, AttributeError, IndexError, KeyError, NameError, TypeError)
"""Exceptions that a library raises because of a bug rather than to refuse something. For these, show all frames."""


def _folders() -> list[str]:
    specs = map(find_spec, ("pytorch_lightning", "lightning", "lightning_fabric"))
    found = [os.path.dirname(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return [_OWN, str(Path(_OWN).with_name("trainer")), *found]


def folded(error: BaseException) -> tuple[TracebackType | None, int]:
    """Return the traceback of an error without library frames, and the number of frames left out.

    Keeps the frame that raised the error, unless another process raised it. Keeps all frames if :data:`VARIABLE` is
    set, if no other frame would be left, or if the error is a bug of a library.
    """
    frames = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    if not frames or os.environ.get(VARIABLE):
        return error.__traceback__, 0
    folders = _folders()

    def is_of_library(entry: TracebackType) -> bool:
        return any(entry.tb_frame.f_code.co_filename.startswith(folder + os.sep) for folder in folders)

    def only_calls(entry: TracebackType) -> bool:
        path = entry.tb_frame.f_code.co_filename.replace(os.sep, "/")
        return is_of_library(entry) or any(part in path for part in _WRAPPERS)

    last, is_passed_on = frames[-1], isinstance(error.__cause__, RemoteTraceback)
    if is_of_library(last) and isinstance(error, _BUGS) and not is_passed_on:
        return error.__traceback__, 0
    kept = [entry for entry in frames if not only_calls(entry) or (entry is last and not is_passed_on)]
    if not kept:
        return error.__traceback__, 0
    shown: TracebackType | None = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown, len(frames) - len(kept)


def fold_when_shown(error: BaseException) -> None:
    """Make Python print an error that ends the program without library frames."""
    vars(error)["relay_folds"] = True  # the hook must not refer to the error, whose frames refer to the model
    if getattr(sys.excepthook, "func", None) is not _show:
        sys.excepthook = partial(_show, sys.excepthook)


def _show(
    previous: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    number = 0
    if any("relay_folds" in vars(one) for one in chain):
        for one in chain:
            one.__traceback__, left_out = folded(one)
            number += left_out
        trace = error.__traceback__
    previous(kind, error, trace)
    if number:
        sys.stderr.write(f"({number} frames of Relay, Lightning and torch are left out; {VARIABLE}=1 shows them)\n")
