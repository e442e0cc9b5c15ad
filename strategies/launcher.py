"""What the Trainer asks for at the start of ``fit`` where torchrun, SLURM or the like have started the processes."""

import atexit
from collections.abc import Callable
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.strategies.launchers.launcher import _Launcher
from torch.distributed import TCPStore

from strategies.pipeline.ranks import World, become_worker, dismiss


class RanksLauncher(_Launcher):
    """Lets drivers go on into the Trainer's loop. The other ranks become workers and do not come back.

    Args:
        world: This rank and the others.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._store: TCPStore | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook: not where several processes run it."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Calls the function on a driver; on another rank, serves the driver for the rest of its life."""
        if not self._world.is_driver:
            become_worker(self._world)
        if self._store is None:
            self._store = self._world.store()
            atexit.register(dismiss, self._world, self._store)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Nothing: who has started the processes ends them."""
