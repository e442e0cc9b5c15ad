"""Lightning's launchers of ranks, with errors that name the rank or the host that has failed."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist

from strategies.launch.host_links import explaining_lost_hosts
from strategies.launch.rank_monitor import (
    MonitoredRank,
    RankLost,
    RankMonitor,
    is_lost_connection,
    new_notes,
    places,
)
from strategies.launch.rendezvous import InterruptibleTCPStore
from strategies.launch.session import environment_variables
from strategies.lightning.compat import (
    Launcher,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    Trainer,
    set_num_threads_if_needed,
)
from strategies.lightning.launch.loopback import PARENT, LoopbackEnvironment
from strategies.lightning.launch.phases import noting_phases

_NOTES = "RELAY_NOTES"
"""The environment variable with the places where each rank notes what it does."""

_SET_BY_A_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", PARENT)


class ScriptLauncher(SubprocessScriptLauncher):
    """Lightning's launcher, except that a failed rank causes one error on rank 0, which can then train again.

    The ranks of a new launch run the script from its start and meet rank 0 in their first ``fit``.
    """

    role: ClassVar[RankMonitor | MonitoredRank | None] = None
    """The role of the whole process, which outlives a Trainer, as the process group does."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks, unless they are running, and call the function.

        Raises:
            RuntimeError: If a rank has failed. The message says how, and during which phase.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if isinstance(monitor := self.role, RankMonitor) and monitor.has_ended:
            news = monitor.news
            self._dismiss(monitor)
            if news is not None:
                raise RuntimeError(news)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        elif self.role is None and _NOTES in os.environ and (rank := self.cluster_environment.local_rank()) > 0:
            noted_at = os.environ[_NOTES].split(os.pathsep)
            try:
                ScriptLauncher.role = MonitoredRank(noted_at[rank], noted_at[0])
            except FileNotFoundError as error:  # rank 0 has ended and removed its file
                raise RuntimeError(f"rank {rank}: rank 0 is gone, so this process ends as well") from error
        set_num_threads_if_needed(num_processes=self.num_processes)
        role = self.role
        if isinstance(role, RankMonitor):
            self.procs = role.processes  # which another Trainer may have started
            return self._lead(role, function, *args, **kwargs)
        if role is None or trainer is None:
            with explaining_lost_hosts():
                return function(*args, **kwargs)
        role.await_end()
        with role.call(), noting_phases(trainer.strategy, role.note):
            return function(*args, **kwargs)

    def watched(self, store: dist.TCPStore, timeout_seconds: float) -> dist.Store:
        """Return a store for the process group whose waits end when a rank has failed."""
        role = self.role
        return InterruptibleTCPStore(store, role.check, timeout_seconds) if isinstance(role, RankMonitor) else store

    def _call_children_scripts(self) -> None:
        before = {name: os.environ.get(name) for name in _SET_BY_A_LAUNCH}
        self.procs, notes = [], new_notes(self.num_processes if self.num_processes > 1 else 0)
        if isinstance(environment := self.cluster_environment, LoopbackEnvironment):
            environment.renew()  # this Trainer may have had other ranks
        with environment_variables(**{_NOTES: os.pathsep.join(places(notes))} if notes else {}):
            super()._call_children_scripts()
        if self.procs:  # a single process has no rank to watch
            ScriptLauncher.role = RankMonitor(self.procs, notes, before)

    def _lead(self, monitor: RankMonitor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with monitor.call():
                return function(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit):  # the other ranks got the signal too, and Lightning ends them
            monitor.excuse()
            raise
        except BaseException as error:
            if (why := monitor.why(error)) is None:
                monitor.excuse()
                if is_lost_connection(error):  # the processes live, but their process group is broken
                    raised = "".join(f" {each}." for each in monitor.raised())
                    self._dismiss(monitor)
                    raise RuntimeError(
                        f"The ranks have lost a connection between them, although the process of each of them runs: "
                        f"{error}.{raised} Rank 0 has ended the others, and starts them again in its next call."
                    ) from error
                if not monitor.have_left():  # and never will leave the call, without rank 0
                    self._dismiss(monitor)
                raise
            self._dismiss(monitor)
            raise RuntimeError(why) from None if isinstance(error, RankLost) else error

    def _dismiss(self, monitor: RankMonitor) -> None:
        monitor.dismiss()
        ScriptLauncher.role, self.procs = None, []


class SpawnLauncher(MultiProcessingLauncher):
    """Lightning's launcher for ``start_method="spawn"`` and the like, except that a rank's error names a lost host."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the ranks of this host, which call the function.

        Raises:
            ProcessRaisedException: If a rank has failed, with the rank's error.
        """
        return super().launch(partial(_call, function), *args, trainer=trainer, **kwargs)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with explaining_lost_hosts():
        return function(*args, **kwargs)


def in_place_of(launcher: Launcher | None, strategy: Any, start_method: Any) -> Launcher | None:
    """Return Relay's launcher where Lightning would use its own, else the given one."""
    if type(launcher) is SubprocessScriptLauncher:
        return ScriptLauncher(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
    if type(launcher) is MultiProcessingLauncher:
        return SpawnLauncher(strategy, start_method)
    return launcher


def mark_entered(launcher: Launcher | None) -> None:
    """Note that all ranks are in the same call of the Trainer."""
    if isinstance(launcher, ScriptLauncher) and launcher.role is not None:
        launcher.role.mark_entered()
