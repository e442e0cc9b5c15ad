"""Notes the phase of training of each rank, for the error message of rank 0 if a rank is killed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from strategies.common.activity import ActivityFile
from strategies.common.patching import replaced
from strategies.lightning.compat import Strategy

_PHASES = {
    "training_step": "training step",
    "validation_step": "validation step",
    "test_step": "test step",
    "predict_step": "prediction step",
    "backward": "backward pass",
    "lightning_module_state_dict": "saving a checkpoint",
    "teardown": "teardown",
}
"""The phase that begins when Lightning calls a method of the strategy, by the name of the method."""


@contextmanager
def noting_phases(strategy: Strategy, note: ActivityFile) -> Iterator[None]:
    """Write to ``note`` which phase begins, whenever Lightning calls the strategy."""

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

    with ExitStack() as undo:
        for name, what in _PHASES.items():
            undo.callback(replaced(strategy, name, partial(begin, what, getattr(strategy, name))))
        undo.callback(replaced(strategy, "optimizer_step", partial(step_after_passes, strategy.optimizer_step)))
        yield
