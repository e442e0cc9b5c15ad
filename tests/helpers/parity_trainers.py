"""The same use of trainers in one process and over pipelines: validation, several fits, tuners and so on.

``parity.check`` compares one ``fit``; here a function does what it likes with the trainers that it makes, and returns
what is to be equal:

    def use(make: Make) -> Any:
        trainer = make(max_epochs=2)
        trainer.fit(...); return trainer.test(...)

    single, *pipelines = everywhere(use)      # within a child of the harness
    for pipeline in pipelines:
        alike(pipeline, single)
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pytorch_lightning import seed_everything
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from strategies import RPCSequentialStrategy
from trainer import Trainer

Make = Callable[..., Trainer]
T = TypeVar("T")

BALANCES = {2: [3, 3], 3: [2, 2, 2]}
"""For six layers."""


def everywhere(use: Callable[[Make], T], *, stages: Sequence[int] = (2, 3), **options: Any) -> list[T]:
    """What ``use`` returns for one process, then for each number of stages.

    Args:
        use: Gets a function that makes a quiet Trainer in float64, with the arguments that it is given.
        stages: The numbers of stages.
        options: Arguments of ``RPCSequentialStrategy``; 3 micro-batches and an even balance unless it says otherwise.
    """
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")

    def make_of(number: int) -> Make:
        def make(**arguments: Any) -> Trainer:
            strategy: Any = SingleDeviceStrategy("cpu")
            if number > 1:
                strategy = RPCSequentialStrategy(**{"balance": BALANCES[number], "microbatches": 3, **options})
            quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
            settings = {"accelerator": "cpu", "precision": "64-true", **dict.fromkeys(quiet, False), **arguments}
            return Trainer(devices=number, strategy=strategy, **settings)

        return make

    results = []
    for number in (1, *stages):
        seed_everything(0, verbose=False)
        results.append(use(make_of(number)))
    return results


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer."""
    return {name: value.clone() for name, value in model.state_dict().items()}
