"""Mistakes in the configuration, which the command line reports in one line without a traceback.

Errors of the parser are condensed by :mod:`trainer.cli.parser_messages`. Whether another error is such a mistake
depends on who has raised it, and when:

- while strategy, model, data and Trainer are built: a :class:`MisconfigurationException` or a ``ValueError`` of any
  code, and a ``TypeError`` of Relay's or Lightning's;
- while the run is set up: a :class:`MisconfigurationException`, a ``ValueError``, ``TypeError`` or missing file of
  Relay's or Lightning's code, and a checkpoint that cannot be opened;
- after that, none: these errors keep their traceback.
"""

import os
import sys
import time
import traceback
from pickle import UnpicklingError
from typing import NoReturn

from omegaconf.errors import OmegaConfBaseException

from strategies.lightning.compat import MisconfigurationException, rank_zero_only, run_stage_function

_HEAD_START_SECONDS = 10.0
"""How long other ranks wait for rank 0 to print the error, because torchrun ends all ranks when one rank ends."""

_OURS = ("strategies", "trainer", "pytorch_lightning", "lightning_fabric", "lightning")


def _frames(mistake: BaseException) -> list[tuple[str, str, str]]:
    """Return module, function and line of each frame. The last frame raised the error."""
    return [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_name, f"{frame.f_code.co_filename}:{line}")
        for frame, line in traceback.walk_tb(mistake.__traceback__)
    ]


def _is_ours(mistake: BaseException) -> bool:
    """Return whether code of Relay or Lightning raised the error, and not code that they called."""
    return _frames(mistake)[-1][0].split(".")[0] in _OURS


def is_refused_argument(error: Exception) -> bool:
    """Return whether a constructor refused its arguments. A ``TypeError`` in user code counts as a bug."""
    return isinstance(error, MisconfigurationException | ValueError) or (
        isinstance(error, TypeError) and _is_ours(error)
    )


def is_after_set_up(mistake: BaseException) -> bool:
    """Return whether the error came after set-up, when the loops had begun to run."""
    run_stage = run_stage_function()
    return (run_stage.__module__, run_stage.__name__) in [frame[:2] for frame in _frames(mistake)]


def is_refused_in_set_up(error: Exception, file: str | None = None) -> bool:
    """Return whether Relay or Lightning refused a setting before the loops began to run.

    Args:
        error: The error.
        file: A file that a setting names. An error of any code that names this file counts too.
    """
    failed = error.filename if isinstance(error, OSError) else None
    names_file = None not in (file, failed) and os.path.realpath(str(file)) == os.path.realpath(str(failed))
    return not is_after_set_up(error) and (
        isinstance(error, MisconfigurationException) or _is_ours(error) or names_file
    )


def end_with(mistake: Exception, told: str = "") -> NoReturn:
    """End the program with exit status 2 and one line, by default the error's own message in one line.

    Every rank refuses the same configuration, so rank 0 alone prints the line, and the others wait for it.
    """
    if getattr(rank_zero_only, "rank", 0) == 0:
        sys.stderr.write(f"error: {told or _one_line(mistake)}\n")
    else:
        starter, deadline = os.getppid(), time.monotonic() + _HEAD_START_SECONDS
        while os.getppid() == starter and time.monotonic() < deadline:
            time.sleep(0.05)
    raise SystemExit(2) from mistake


def not_weights_only(path: str, refused: UnpicklingError) -> str:
    """Return the line for a checkpoint that torch has refused to load under ``weights_only=True``."""
    told = str(refused).partition("\n\nCheck the documentation")[0]  # torch's, of many lines
    reason = told.rpartition("WeightsUnpickler error:")[2].rpartition("\n\n")[2].strip().split(". ")[0].rstrip(".")
    return (
        f"{path} is not a checkpoint of tensors and plain types only, and nothing in it has been run or loaded: "
        f"{reason}. If you trust its author, give --weights_only=false"
    )


def _one_line(mistake: Exception) -> str:
    if isinstance(mistake, OmegaConfBaseException):
        return f"{mistake.full_key}: {str(mistake).splitlines()[0]}"
    where = "" if _is_ours(mistake) else f" ({_frames(mistake)[-1][2]})"
    return " ".join(str(mistake).split()) + where
