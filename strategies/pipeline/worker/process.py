"""What a worker's process does: it hosts one stage.

It runs nothing of the user's script. The driver reaches the stage by an ``RRef``; an RPC handler only hands commands to
the stage's one compute thread (a pool of threads, each with its own malloc arena, made a step 1.4 times as long).
"""

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch.futures import Future

from strategies.commands.declaration import Call, declarations_of
from strategies.common.activity import Activity, Progress
from strategies.launch.session import Session, join_data_plane, join_rpc
from strategies.pipeline.control.calls import Failure, failure_of
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.worker.hosted import HostedStage, unpack
from strategies.pipeline.worker.wiring import to_neighbours

_DECLARATIONS = declarations_of(StageCommands)


class Host:
    """Runs the commands for a stage one after another, in the order in which the driver numbered them.

    The stage is unpacked on the compute thread too, ahead of the first command, whose result tells if that fails.

    Args:
        unpack: Makes the stage.
        name: What to call it as long as there is none.
        activity: Where it says what it does.
    """

    def __init__(self, unpack: Callable[[Activity], HostedStage], name: str, activity: Activity) -> None:
        self._name, self._activity = name, activity
        self._unpack: Callable[[Activity], HostedStage] | None = unpack
        self._stage: HostedStage | None = None
        self._queue: SimpleQueue[tuple[int, list[Call], Future] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="compute", daemon=True).start()

    def submit(self, number: int, commands: list[Call]) -> Future:
        """Queues commands; the future gets the last one's result, or a :class:`Failure`."""
        future: Future = Future()
        self._queue.put((number, commands, future))
        return future

    def close(self) -> None:
        """Ends the compute thread, once it has done what it was told before."""
        self._queue.put(None)

    @property
    def hosted(self) -> HostedStage:
        """The stage, for what needs no order among the commands."""
        assert self._stage is not None
        return self._stage

    def progress(self) -> Progress:
        """How far the stage is."""
        return self._activity.progress()

    def _work(self) -> None:
        early: dict[int, tuple[list[Call], Future]] = {}
        following = 0
        self._activity.begin()
        while True:
            got = self._activity.idle(self._queue.get)
            if got is None:
                return
            number, commands, future = got
            early[number] = commands, future
            while following in early:
                commands, future = early.pop(following)
                following += 1
                future.set_result(self._run(commands))

    def _run(self, commands: list[Call]) -> Any:
        result = None
        try:
            if self._stage is None:
                assert self._unpack is not None
                self._activity.doing = "unpacking its layers"
                self._stage, self._unpack = self._unpack(self._activity), None
            for name, args, kwargs in commands:
                if doing := _DECLARATIONS[name].doing:
                    self._activity.doing = doing
                result = getattr(self._stage, name)(*args, **kwargs)
        except BaseException as error:  # a layer may even exit; the driver must hear of it
            if self._stage is not None:
                self._stage.tell_neighbours()
            return self._failure(error)
        return result

    def _failure(self, error: BaseException) -> Failure:
        stage = self._name if self._stage is None else self._stage.describe()
        return failure_of(error, stage, self._activity.doing)


def host(blob: bytes, rank: int, session: Session) -> Host:
    """Connects this process to the others; called by ``rpc.remote``, so that the driver gets an ``RRef``."""
    activity = Activity(session.note(rank))
    wire = partial(to_neighbours, group=join_data_plane(session, rank), wait=activity.wait)
    return Host(partial(unpack, blob, wire), f"stage {rank}", activity)


def join(directory: str, rank: int) -> None:
    """Joins the session, whose calls come on threads of RPC from then on.

    Args:
        directory: That of the session.
        rank: This process's.
    """
    session = Session.from_json((Path(directory) / "session.json").read_text())
    sys.path[:] = session.paths
    torch.set_num_threads(session.threads)
    (Path(directory) / f"ready-{rank}").touch()
    join_rpc(session, rank)
