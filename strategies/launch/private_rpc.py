"""A private RPC session of one worker, for an ``RRef`` in a process that has not initialised RPC.

It listens only on the loopback interface. It ends when nothing uses it, and at the latest with the process.

torch gives a process one RPC number, and one session for all its ``RRef`` objects to other processes (a singleton in
C++ keeps the first session). After a private session, ``init_rpc`` works as rank 0, for calls and for a ``Pipe`` with
all layers in this process. For any other use, call ``init_rpc`` before the first ``Pipe``.
"""

import secrets
import warnings
import weakref
from typing import Any, ClassVar

from torch.distributed import rpc

from strategies.common.torch_compat import rpc_is_initialized, rpc_options, set_autograd_number, start_rpc_alone
from strategies.launch.rendezvous import LOOPBACK, interface_to
from strategies.launch.session import environment_variables, leave_rpc


class PrivateRpc:
    """Keeps the session open as long as an object refers to it; see :meth:`needed`."""

    _current: ClassVar["weakref.ref[PrivateRpc] | None"] = None  # one per process, like the RPC session itself

    has_been: ClassVar[bool] = False
    """Whether this process has or had one."""

    @classmethod
    def needed(cls) -> "PrivateRpc | None":
        """Return the object to keep as long as RPC is needed; ``None`` if other code has initialised RPC."""
        current = cls._current() if cls._current is not None else None
        if current is None:
            if rpc_is_initialized():
                return None
            current = cls()
            cls._current, cls.has_been = weakref.ref(current), True
        return current

    def __init__(self) -> None:
        # Not with init_rpc, which counts sessions: processes with different counts would wait forever.
        options = rpc_options(num_threads=1)
        _, interface = interface_to(LOOPBACK)
        interfaces = {"TP_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
        with environment_variables(**interfaces), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using a Backend")  # RPC's own use of gloo
            name = f"relay-pipe-{secrets.token_hex(4)}"
            # With another rank, a later init_rpc would hang at its first RRef. This makes it raise an error.
            set_autograd_number(0)
            start_rpc_alone(name, options)
        weakref.finalize(self, _end, name)

    def __reduce__(self) -> Any:
        """Make copies of the holder refer to this object; in another process, to the session of that process."""
        return PrivateRpc.needed, ()


def _end(name: str) -> None:
    if rpc_is_initialized() and rpc.get_worker_info().name == name:
        leave_rpc()
