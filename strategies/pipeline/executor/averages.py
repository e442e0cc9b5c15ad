"""The driver's lead in averaging gradients over replicas: every stage with the same stage of the other pipelines."""

from collections.abc import Sequence

from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.executor.passes import Passes
from strategies.pipeline.optim.replicas import Averaging


class GradientAverages:
    """Has all stages average their gradients, each as soon as its backward passes are done.

    Args:
        own: This process's part.
        remotes: The other stages.
        passes: What leads the stages through passes.
    """

    def __init__(self, own: Averaging, remotes: Sequence[RemoteStage], passes: Passes) -> None:
        self._own, self._remotes, self._passes = own, remotes, passes
        self._num_averaged = 0

    def average(self) -> None:
        """Averages, whether or not there were backward passes since the last time."""
        self._num_averaged = self._passes.num_backward
        for remote in self._remotes:
            remote.start(StageCommands.average_grads)
        with self._passes.explained():
            self._own.average()

    def complete(self) -> None:
        """Averages what backward passes have left behind that nobody has averaged yet."""
        if self._passes.num_backward > self._num_averaged:
            self.average()
