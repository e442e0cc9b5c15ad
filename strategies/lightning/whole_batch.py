"""Runs ``training_step`` once for the whole batch, under ``schedule="gpipe"``."""

from collections.abc import Callable, Iterator
from typing import Any

from strategies.lightning.compat import LightningModule
from strategies.pipeline.driver import Pipeline


class TrainingStepPerBatch:
    """Runs ``training_step`` as Lightning does.

    Args:
        model: The model.
        pipeline: The running pipeline.
        run: Lightning's ``Strategy.training_step``.
    """

    def __init__(self, model: LightningModule, pipeline: Pipeline, run: Callable[..., Any]) -> None:
        self._model, self._pipeline, self._run = model, pipeline, run

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of ``training_step``."""
        # A training_step that steps its optimizers itself must not run twice.
        repeat = self._repeat if self._model.automatic_optimization else None
        with self._pipeline.step(repeat, args, kwargs):
            return self._run(*args, **kwargs)

    def _repeat(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` again for some rows of the batch."""
        check_repeatable(self._model)
        return self._run(*args, **kwargs)


def check_repeatable(model: LightningModule) -> None:
    """Check that the code of ``training_step`` can run a second time for the same batch.

    Raises:
        RuntimeError: If a module has an iterator, such as one over a second loader, which a second call would advance.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Iterator):
                raise RuntimeError(
                    f"{'.'.join(filter(None, [path, name]))} is an iterator ({type(value).__name__}), which a second "
                    "call of training_step would advance; call the blocks in the forward of a module instead"
                )
