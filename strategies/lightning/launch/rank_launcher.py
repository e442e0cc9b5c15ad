"""The launcher of the Trainer if torchrun, SLURM or a similar launcher has started the processes."""

import atexit
from collections.abc import Callable
from typing import Any

from torch.distributed import Store

from strategies.launch.host_links import explaining_lost_hosts
from strategies.launch.ranks import World, become_worker, dismiss
from strategies.lightning.compat import Launcher, MisconfigurationException, Trainer


class RanksLauncher(Launcher):
    """Runs the Trainer's loop on drivers. The other ranks become workers and do not return to the script.

    Args:
        world: All ranks, and the number of this rank.
        replace_workers: Whether ranks start a new worker in place of a killed worker.
    """

    def __init__(self, world: World, *, replace_workers: bool = False) -> None:
        self._world, self._replace_workers = world, replace_workers
        self._store: Store | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether the launcher works in a notebook. It does not, because several processes run the script."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function on a driver. On any other rank, serve the driver and do not return.

        Raises:
            MisconfigurationException: If an earlier Trainer has divided the ranks into a different number of stages.
        """
        if not self._world.is_driver:
            become_worker(self._world, replace=self._replace_workers)
        if self._store is None:
            store = self._world.store()
            (stages, parts), world = self._world.divided_into(store), self._world
            if (stages, parts) != (world.num_stages, world.num_parts):
                known = f" with tensor_parallel_size={parts}" if max(parts, world.num_parts) > 1 else ""
                raise MisconfigurationException(
                    f"The {world.size} ranks of this run are divided into pipelines of {stages} stages{known}, and "
                    f"those that are no drivers do not come back; got {world.num_stages} stages"
                    f"{f' and {world.num_parts}' if known else ''} now. Start another run for that."
                )
            atexit.register(dismiss, self._world, store)
            self._store = store
        with explaining_lost_hosts():
            return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Do nothing: the launcher that has started the processes ends them."""
