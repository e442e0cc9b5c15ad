"""Set-up of a worker process: the process joins the session, and the driver creates the host of a stage in it.

The process does not run the user's script.
"""

import sys
from functools import partial
from pathlib import Path

import torch

from strategies.commands.host import Host
from strategies.common.activity import Activity
from strategies.launch.rendezvous import store_at
from strategies.launch.session import Session, environment_variables, join_data_plane, join_rpc, variables_of_nccl
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.schedule.program import ranks_of
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.state.carriers import Carrier
from strategies.pipeline.transport.device import routes_of
from strategies.pipeline.transport.interface import Transport
from strategies.pipeline.transport.journal import JournaledTransport
from strategies.pipeline.transport.link import NO_LIMIT, ORDERS, Links, Receiver
from strategies.pipeline.transport.planes import GLOO, NCCL, open_transport
from strategies.pipeline.transport.storages import receive_storages
from strategies.pipeline.worker.hosted import HostedStage, taken
from strategies.pipeline.worker.setup import StageSetup


def host(setup: StageSetup, carrier: Carrier, session: Session) -> Host[HostedStage]:
    """Connect this process to the pipeline and host a stage. The driver calls this with ``rpc.remote``.

    Args:
        setup: How the stage runs.
        carrier: Contains the state of the stage.
        session: The session of the driver.
    """
    rank = setup.index
    activity = Activity(session.note(rank))
    links = Links(join_data_plane(session, rank))
    driver = links[session.size - 1]
    receive = partial(receive_storages, link=driver, wait=activity.idle)

    def create() -> HostedStage:
        transport = _transport(setup, links, session, activity)
        if setup.is_verified:
            transport = JournaledTransport(transport)
        edges = Edges(rank, ranks_of(setup.placement), transport, firsts=setup.placement.firsts)
        orders = Receiver(driver, ORDERS, device=torch.device("cpu"), timeout=NO_LIMIT)
        return HostedStage(setup, taken(carrier, activity, receive), edges, activity, orders)

    name, next_order = f"stage {rank}", HostedStage.next_order
    return Host(create, StageCommands, name=name, activity=activity, next_order=next_order).start()


def _transport(setup: StageSetup, links: Links, session: Session, activity: Activity) -> Transport:
    """Connect the device of a stage to the devices of other stages. All processes do this at the same time."""
    if setup.plane != GLOO:
        activity.doing = "connecting to the devices of other stages"
    with environment_variables(**(variables_of_nccl(session) if setup.plane == NCCL else {})):
        return open_transport(
            setup.plane,
            links,
            setup.index,
            torch.device(setup.device),
            routes_of(ranks_of(setup.placement), setup.ties),
            activity.wait,
            partial(store_at, f"{session.rendezvous}/devices", session.size),
        )


def join(directory: str, rank: int) -> None:
    """Join a session. From then on, its calls arrive on RPC threads.

    Args:
        directory: The directory of the session.
        rank: The rank of this process.
    """
    session = Session.from_json((Path(directory) / "session.json").read_text())
    sys.path[:] = session.paths
    torch.set_num_threads(session.threads)
    (Path(directory) / f"ready-{rank}").touch()
    join_rpc(session, rank)
