"""What a rank does, noted as Lightning calls the strategy, for the error of rank 0 should this rank be killed."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pytorch_lightning.strategies import Strategy

from strategies.common.activity import Note
from strategies.common.patching import replaced

_PHASES = {
    "training_step": "training step",
    "validation_step": "validation step",
    "test_step": "test step",
    "predict_step": "prediction step",
    "backward": "backward pass",
    "lightning_module_state_dict": "saving a checkpoint",
    "teardown": "teardown",
}
"""What begins when Lightning calls this method of a strategy."""


def note_phases(strategy: Strategy, note: Note) -> list[Callable[[], None]]:
    """Notes what begins, whenever Lightning calls the strategy.

    Returns:
        Functions that end this.
    """

    def begin(what: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        note.write(f"in {what}")
        return method(*args, **kwargs)

    def step_after_passes(
        step: Callable[..., Any], optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        def passes() -> Any:
            result = closure()
            note.write("in optimizer step")
            return result

        return step(optimizer, passes, *args, **kwargs)

    undo = [replaced(strategy, name, partial(begin, what, getattr(strategy, name))) for name, what in _PHASES.items()]
    return [*undo, replaced(strategy, "optimizer_step", partial(step_after_passes, strategy.optimizer_step))]
