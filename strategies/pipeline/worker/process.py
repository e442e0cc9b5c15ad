"""Set-up of a worker's process: it joins the session, and the driver creates the host of its stage there.

The process executes nothing of the user's script.
"""

import sys
from functools import partial
from pathlib import Path

import torch

from strategies.commands.host import Host
from strategies.common.activity import Activity
from strategies.launch.session import Session, join_data_plane, join_rpc
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.transport.slots import SlotAddress
from strategies.pipeline.transport.storages import receive_storages
from strategies.pipeline.worker.hosted import HostedStage, take_over, unpack
from strategies.pipeline.worker.wiring import to_neighbours


def host(blob: bytes, rank: int, session: Session) -> Host[HostedStage]:
    """Connect this process to the others and host a stage; ``rpc.remote`` calls this, so the driver gets an ``RRef``.

    Args:
        blob: The pickled :class:`~strategies.pipeline.worker.payload.Payload`.
        rank: The rank of this process, which is the number of the stage.
        session: The session of the driver.
    """
    activity = Activity(session.note(rank))
    group = join_data_plane(session, rank)
    wire = partial(to_neighbours, group=group, wait=activity.wait, idle=activity.idle)
    receive = partial(receive_storages, group=group, peer=session.size - 1, wait=activity.idle)
    create = partial(unpack, blob, wire, activity, receive)
    return Host(create, StageCommands, name=f"stage {rank}", activity=activity).start()


def host_snapshot(address: SlotAddress, number: int, rank: int, session: Session) -> Host[HostedStage]:
    """Do what :func:`host` does, with a stage from a snapshot.

    Args:
        address: The slot with the snapshot.
        number: The number of the snapshot.
        rank: The rank of this process, which is the number of the stage.
        session: The session of the driver.
    """
    activity = Activity(session.note(rank))
    group = join_data_plane(session, rank)
    wire = partial(to_neighbours, group=group, wait=activity.wait, idle=activity.idle)
    create = partial(take_over, address, number, wire, activity)
    return Host(create, StageCommands, name=f"stage {rank}", activity=activity).start()


def join(directory: str, rank: int) -> None:
    """Join a session, whose calls arrive on threads of RPC from then on.

    Args:
        directory: The directory of the session.
        rank: The rank of this process.
    """
    session = Session.from_json((Path(directory) / "session.json").read_text())
    sys.path[:] = session.paths
    torch.set_num_threads(session.threads)
    (Path(directory) / f"ready-{rank}").touch()
    join_rpc(session, rank)
