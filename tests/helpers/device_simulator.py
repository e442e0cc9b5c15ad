"""Simulate devices that run posted operations with the worst-case rules of NCCL, and report the cycle of a deadlock.

The rules:

- Nothing is buffered: a send runs together with its receive.
- A communicator runs the operations of a process in the order in which they were posted. On a communicator, the k-th
  send from one process to another process belongs to the k-th receive of the latter.
- A group runs as a whole, together with all counterparts of its sends and receives, and with their groups.
- An operation of several processes, such as a collective, runs when all of them have started it. On a device it is in
  one queue with the actions.
- A device runs one operation at a time, in the order of posting. With ``independent_streams``, streams run in parallel:
  one for the actions and one for each communicator. Then an action waits for the receive of its input, and a send waits
  for its action. Posting a receive waits until its send is posted, because the shape arrives over the CPU.

An operation always waits for all operations of a set, never for one of several. So whether the operations run does not
depend on times: they run if and only if the waits have no cycle. Operations that run on devices with one operation at a
time also run on independent streams, where they wait for fewer operations.

Index letters: ``r`` process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from strategies.pipeline.schedule.operations import Computation, Edge, Post, UserCode, edge_to


def edge_from(computation: Computation) -> Edge | None:
    """Return the edge over which the result of a computation is sent."""
    if computation[0] in "aW":
        return None
    if isinstance(computation, UserCode):
        return "F", computation.stage
    return ("F", computation.stage + 1) if computation.kind == "F" else ("B", computation.stage)


class Collective(NamedTuple):
    """An operation that several processes run together: a collective, an exchange of ties, a new communicator.

    Attributes:
        name: A unique name, such as ``"average 3"``.
        ranks: The processes that participate.
    """

    name: str
    ranks: tuple[int, ...]

    def __repr__(self) -> str:
        return self.name


class Group(NamedTuple):
    """Sends and receives between ``ncclGroupStart`` and ``ncclGroupEnd``, which start together and end together."""

    posts: tuple[Post, ...]

    def __repr__(self) -> str:
        return f"({' '.join(map(repr, self.posts))})"


DeviceOperation: TypeAlias = Computation | Post | Collective | Group
"""An operation that a process submits to its device."""

Communicator: TypeAlias = Callable[[int, Post], Hashable]
"""Returns the name of the communicator of a send or receive that a process posts."""


def per_edge(r: int, post: Post) -> Hashable:
    """One communicator for each direction of each edge, as in the device plane."""
    return post.kind, post.edge


def per_pair(r: int, post: Post) -> Hashable:
    """One communicator for each pair of processes, as in a group of two ranks."""
    return frozenset((r, post.peer))


def for_all(r: int, post: Post) -> Hashable:
    """One communicator for all processes."""
    return None


def with_collectives(
    rows: Iterable[Sequence[DeviceOperation]], collectives: Sequence[Collective]
) -> list[list[DeviceOperation]]:
    """Append to the row of each process the collectives in which it participates, in the given order."""
    return [[*row, *(collective for collective in collectives if r in collective.ranks)] for r, row in enumerate(rows)]


class Deadlock(ValueError):
    """Raised if operations of processes wait for each other in a cycle.

    Attributes:
        cycle: Processes and their operations. Each operation waits for the next, and the last waits for the first.
    """

    def __init__(self, cycle: list[tuple[int, DeviceOperation]]) -> None:
        self.cycle = cycle
        chain = [f"{_named(operation)} of process {r}" for r, operation in cycle]
        super().__init__(f"deadlock: {' waits for '.join([*chain, chain[0]])}")


def _no_time(computation: Computation) -> float:
    return 0.0


def check_runs(
    rows: Iterable[Iterable[DeviceOperation]],
    *,
    communicator: Communicator = per_edge,
    independent_streams: bool = False,
    seconds: Callable[[Computation], float] = _no_time,
    posting_seconds: Callable[[Computation], float] = _no_time,
) -> float:
    """Check that all operations run.

    Args:
        rows: The operations that each process posts, in order, for one or more passes.
        communicator: Returns the communicator of a send or receive.
        independent_streams: Whether streams of a process run in parallel.
        seconds: The time of an action on a device. Transfers take no time.
        posting_seconds: The time that a process takes to post an action, with independent streams.

    Returns:
        When the last operation ends.

    Raises:
        Deadlock: If operations wait for each other.
        ValueError: If a send or receive has no counterpart or the wrong one, if a process posts a send before the
            action whose result it sends or a receive after the action that needs it, or if a process is missing from
            an operation of several processes.
    """
    devices = _Devices(communicator, independent_streams, seconds, posting_seconds)
    for r, row in enumerate(rows):
        devices.add(r, row)
    devices.connect()
    return devices.run()


_Value: TypeAlias = tuple[str, int, int]
"""Kind, edge and micro-batch of a value that a process sends to another process."""


class _Nodes(NamedTuple):
    """The nodes of an operation.

    Attributes:
        r: The process of the operation.
        operation: The operation.
        before: The posting of the previous operation, if there is one and streams are independent.
        posted: The posting of the operation; its start if streams are not independent.
        started: The start of the operation.
        ended: The end of the operation.
    """

    r: int
    operation: DeviceOperation
    before: Sequence[int]
    posted: int
    started: int
    ended: int


class _Devices:
    """The postings, starts and ends of operations, as a graph of dependencies."""

    def __init__(
        self,
        communicator: Communicator,
        independent_streams: bool,
        seconds: Callable[[Computation], float],
        posting_seconds: Callable[[Computation], float],
    ) -> None:
        self._communicator, self._independent = communicator, independent_streams
        self._seconds, self._posting_seconds = seconds, posting_seconds
        self._waits_for: list[list[int]] = []
        self._seconds_of: list[float] = []
        self._owner: list[tuple[int, DeviceOperation]] = []
        self._ends: dict[tuple[Hashable, int, int], tuple[list[_End], list[_End]]] = {}
        """For each communicator, source and target, the sends and the receives."""
        self._collectives: dict[Collective, dict[int, _Nodes]] = {}
        self._paired: dict[int, _Nodes] = {}
        """Sends, receives, groups and collectives by the node of their start."""
        self._partners: dict[int, list[_Nodes]] = {}
        """For each of these, the operations that run together with it."""

    def add(self, r: int, row: Iterable[DeviceOperation]) -> None:
        """Add the operations that a process posts."""
        last: dict[Hashable, int] = {}  # stream -> end of its last operation
        unsent: dict[_Value, int] = {}  # result of an action -> end of the action
        unused: dict[_Value, _End] = {}  # received values that a later action needs
        before: list[int] = []
        for operation in row:
            posts = _posts(operation)
            streams = [self._stream(r, post) for post in posts] or [_ACTIONS]
            needs = [last[stream] for stream in streams if stream in last]
            before, reached = [], before
            if self._independent:
                before = [self._node(r, operation, reached, self._posting_seconds)]
                needs += before
            for post in posts:
                if post.way == "SEND":
                    if _value(post) not in unsent:
                        raise ValueError(f"process {r} posts {_named(post)} before the action whose result it sends")
                    needs.append(unsent.pop(_value(post)))
            computation = None if isinstance(operation, Post | Group | Collective) else operation
            if computation is not None and (edge := edge_to(computation)) is not None:
                received = unused.pop((*edge, computation.microbatch), None)
                needs += [] if received is None else [received.nodes.ended]
            started = self._node(r, operation, needs, self._seconds)
            ended = self._node(r, operation, [started])
            nodes = _Nodes(r, operation, reached, before[0] if before else started, started, ended)
            for post in posts:
                end = _End(post, nodes)
                route = (r, post.peer) if post.way == "SEND" else (post.peer, r)
                self._ends.setdefault((self._communicator(r, post), *route), ([], []))[post.way == "RECV"].append(end)
                if post.way == "RECV":
                    unused[_value(post)] = end
            if isinstance(operation, Collective):
                members = self._collectives.setdefault(operation, {})
                assert r not in members, "each collective has a unique name"
                members[r] = nodes
            elif computation is not None and (edge := edge_from(computation)) is not None:
                unsent[(*edge, computation.microbatch)] = ended
            last |= dict.fromkeys(streams, ended)
        for end in unused.values():
            raise ValueError(f"process {r} posts {_named(end.post)}, but no action after it that needs the value")

    def connect(self) -> None:
        """Make operations wait for their counterparts."""
        for sends, receives in self._ends.values():
            for send, receive in zip(sends, receives, strict=False):
                if _value(send.post) != _value(receive.post):
                    raise ValueError(
                        f"{_named(send.post)} of process {send.nodes.r} meets {_named(receive.post)} of process "
                        f"{receive.nodes.r}, which would get the wrong value. Processes must post the sends and "
                        "receives of a communicator in the same order."
                    )
                if self._independent:
                    self._waits_for[receive.nodes.posted] += send.nodes.before
                self._pair(send.nodes, receive.nodes)
            for end in (*sends[len(receives) :], *receives[len(sends) :]):
                raise ValueError(f"process {end.post.peer} does not post the counterpart of {_named(end.post)}")
        for collective, members in self._collectives.items():
            for r in collective.ranks:
                if r not in members:
                    raise ValueError(f"process {r} does not take part in {_named(collective)}")
                self._pair(members[collective.ranks[0]], members[r])
        seen: set[int] = set()
        for nodes in self._paired.values():
            if nodes.started not in seen:
                self._run_together(nodes, seen)

    def _pair(self, a: _Nodes, b: _Nodes) -> None:
        """Note that two operations run together."""
        for nodes, other in ((a, b), (b, a)):
            self._paired[nodes.started] = nodes
            self._partners.setdefault(nodes.started, []).append(other)

    def _run_together(self, first: _Nodes, seen: set[int]) -> None:
        """Make an operation and all operations that run together with it end after the starts of all of them.

        These operations form a tree. Each operation waits for its children and for its parent, so that a cycle shows
        which operation waits for which.
        """
        tree: list[tuple[_Nodes, _Nodes | None]] = [(first, None)]
        seen.add(first.started)
        for nodes, _ in tree:  # it grows during the loop
            for other in self._partners[nodes.started]:
                if other.started not in seen:
                    seen.add(other.started)
                    tree.append((other, nodes))
        further: dict[int, list[int]] = {}
        for nodes, closer in reversed(tree):
            needs = further.get(nodes.started, [])
            if needs:
                all_started = self._node(nodes.r, nodes.operation, [nodes.started, *needs])
                self._waits_for[nodes.ended].append(all_started)
            else:
                all_started = nodes.started
            if closer is not None:
                self._waits_for[nodes.ended].append(closer.ended)
                further.setdefault(closer.started, []).append(all_started)

    def run(self) -> float:
        """Return when the last operation ends."""
        waited_for_by: list[list[int]] = [[] for _ in self._waits_for]
        num_missing = [len(nodes) for nodes in self._waits_for]
        for node, nodes in enumerate(self._waits_for):
            for other in nodes:
                waited_for_by[other].append(node)
        times = [0.0] * len(num_missing)
        ready = [node for node, missing in enumerate(num_missing) if not missing]
        for node in ready:  # it grows during the loop
            times[node] += self._seconds_of[node]
            for later in waited_for_by[node]:
                times[later] = max(times[later], times[node])
                num_missing[later] -= 1
                if not num_missing[later]:
                    ready.append(later)
        if len(ready) < len(num_missing):
            raise Deadlock(self._cycle(num_missing))
        return max(times, default=0.0)

    def _cycle(self, num_missing: Sequence[int]) -> list[tuple[int, DeviceOperation]]:
        node = next(node for node, missing in enumerate(num_missing) if missing)
        path: dict[int, None] = {}
        while node not in path:
            path[node] = None
            node = next(other for other in self._waits_for[node] if num_missing[other])
        owners = [self._owner[other] for other in list(path)[list(path).index(node) :]]
        return [owner for owner, before in zip(owners, [owners[-1], *owners], strict=False) if owner != before]

    def _node(
        self,
        r: int,
        operation: DeviceOperation,
        waits_for: Iterable[int],
        seconds: Callable[[Computation], float] = _no_time,
    ) -> int:
        self._waits_for.append(list(waits_for))
        self._seconds_of.append(0.0 if isinstance(operation, Post | Group | Collective) else seconds(operation))
        self._owner.append((r, operation))
        return len(self._owner) - 1

    def _stream(self, r: int, post: Post) -> Hashable:
        return (self._communicator(r, post),) if self._independent else _ACTIONS


_ACTIONS = "actions"
"""The stream of the actions."""


class _End(NamedTuple):
    """A send or receive, and the nodes of the operation or group that contains it."""

    post: Post
    nodes: _Nodes


def _value(post: Post) -> _Value:
    return post.kind, post.edge, post.microbatch


def _posts(operation: DeviceOperation) -> tuple[Post, ...]:
    if isinstance(operation, Group):
        return operation.posts
    return (operation,) if isinstance(operation, Post) else ()


def _named(operation: DeviceOperation) -> str:
    return f"{operation} (edge {operation.edge})" if isinstance(operation, Post) else repr(operation)
