"""Cases: the shape of a run and the faults that it meets, drawn from a seed.

The tables at the top of this module are all that a case is drawn from: a new option of the strategy is a line in
``OPTIONS``, a new kind of fault a line in ``KINDS``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

NUM_BATCHES = 8
SAVE_EVERY = 2
"""Optimizer steps between two checkpoints."""

OPTIONS: dict[str, tuple[Any, ...]] = {
    "schedule": ("gpipe", "1f1b", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half"),
    "microbatches": (1, 2, 3),
    "checkpoint": ("never", "except_last", "always"),
    "state_dict_type": ("full", "sharded"),
    "async_save": (False, False, True),
    "max_restarts": (0, 1, 3),
    "snapshot_every_n_steps": (1, 2),
    "verify_every_n_steps": (0, 0, 1, 2),
}
"""Arguments of ``RPCSequentialStrategy``, and of ``Recovery``, with their values; a value that is there twice is drawn
twice as often."""

ONLY_WITH = {"snapshot_every_n_steps": "max_restarts"}
"""Arguments that have no effect without another one."""

SEVERAL_PIPELINES: dict[str, tuple[Any, ...]] = {
    "max_restarts": (0, 3),
    "zero_stage": (0, 1, 2, 3),
    "tensor_parallel_size": (1, 1, 2),
}
"""What differs where there are several pipelines: replicas, or pipelines that divide layers."""

RANKS: dict[str, dict[str, tuple[Any, ...]]] = {
    "ddp": {"async_save": (False, True)},
    "zero": {"stage": (1, 2), "state_dict_type": ("full", "sharded"), "async_save": (False, True)},
}
"""Arguments of the strategies that have ranks in place of stages."""

TORCHRUN, TWO_HOSTS = "torchrun", "two hosts"
LAUNCHERS = {"": 36, TORCHRUN: 1, TWO_HOSTS: 1}
"""Who starts the ranks of a single pipeline, with weights: nobody, torchrun, or tasks of SLURM on two hosts, which are
network namespaces of this machine with a router between them."""

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")

SANITY = "sanity validation"
PHASES = ("start", SANITY, "forward", "backward", "step", "checkpoint", "validation", "teardown")
RECOVERY = "recovery"
"""A phase too: a worker starts again, after another fault."""
ANY_MOMENT = "any moment"
"""A phase too: a thread of the driver strikes after a time, whatever the processes do then."""

EXCEPTIONS = (
    *("ValueError", "KeyError", "ZeroDivisionError", "StopIteration", "OSError", "AssertionError", "MemoryError"),
    *("OutOfMemoryError", "ConnectionResetError", "RuntimeError", "TwoArguments", "Unpicklable"),
)
"""Names of the exceptions that a fault raises; see :func:`tests.faults.simulator.traps.exception`."""


@dataclass(frozen=True)
class Shape:
    """What a run is like.

    Attributes:
        strategy: ``pipeline``, or a key of ``RANKS``.
        stages: Number of stages; 1 where there are ranks.
        replicas: Number of pipelines, or of ranks. Pipelines with ``tensor_parallel_size`` are one replica.
        precision: Lightning's.
        accumulate: Batches of one optimizer step.
        options: Arguments of the strategy.
        has_sanity: Whether it validates before the first step.
        launcher: A key of ``LAUNCHERS``.
    """

    strategy: str
    stages: int
    replicas: int
    precision: str
    accumulate: int
    options: tuple[tuple[str, Any], ...]
    has_sanity: bool = False
    launcher: str = ""

    def option(self, name: str, default: Any = None) -> Any:
        """An argument of the strategy."""
        return dict(self.options).get(name, default)

    @property
    def num_parts(self) -> int:
        """Into how many parts the pipelines divide layers."""
        return int(self.option("tensor_parallel_size", 1))

    @property
    def num_repairs(self) -> int:
        """How many lost workers the run may repair."""
        return int(self.option("max_restarts", 0))

    def __str__(self) -> str:
        what = f"{self.stages} stages" if self.strategy == "pipeline" else self.strategy
        times = f" x {self.replicas}" if self.replicas > 1 else ""
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        sanity = ", sanity validation" if self.has_sanity else ""
        what += f" by {self.launcher}" if self.launcher == TORCHRUN else f" on {self.launcher}" if self.launcher else ""
        return f"{what}{times}, {self.precision}, accumulate={self.accumulate}, {options}{sanity}"


DRIVER = "driver"
WORKER = "worker"
SERVER = "fork server"


@dataclass(frozen=True)
class Fault:
    """What happens, where and when.

    Attributes:
        kind: A key of ``KINDS``.
        phase: In which phase it strikes.
        role: ``DRIVER``, ``WORKER`` or ``SERVER``.
        replica: The replica of the process.
        stage: The stage of the process; of a driver, the last one.
        batch: From which batch on.
        skip: How many passes of a layer come first, from that batch on.
        detail: The name of the exception, the number of bytes that can still be written, or the share of the run's
            usual time after which the fault strikes at any moment.
    """

    kind: str
    phase: str
    role: str
    replica: int
    stage: int
    batch: int
    skip: int
    detail: Any = None

    def __str__(self) -> str:
        who = self.role if self.role != WORKER else f"worker of stage {self.stage}"
        who += f" of replica {self.replica}" if self.replica else ""
        detail = f" ({self.detail})" if self.detail is not None else ""
        skip = f", after {self.skip} passes" if self.skip else ""
        return f"{self.kind}{detail} in {self.phase} on the {who} from batch {self.batch} on{skip}"


PAIRS = 0.5
"""The share of two faults among the cases whose first fault can come with another one."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        roles: The roles that it can befall.
        phases: The phases in which it can strike.
        weight: How often it is drawn.
        pairs: Whether it can come with another fault.
        ranks: Whether it can befall a rank of DDP or ZeRO, or the driver of several replicas. What stops such a rank
            without ending it is left to torch's time-outs, which are minutes.
    """

    roles: tuple[str, ...]
    phases: tuple[str, ...]
    weight: int
    pairs: bool = False
    ranks: bool = True


PASSES = ("forward", "backward", "step", "validation")
KINDS: dict[str, Kind] = {
    "kill": Kind((DRIVER, WORKER, WORKER, SERVER), (*PHASES, ANY_MOMENT), 5, pairs=True),
    "stop": Kind((WORKER,), (*PHASES, ANY_MOMENT), 2, pairs=True),
    "pause": Kind((DRIVER, WORKER), PHASES, 2, pairs=True),
    "terminate": Kind((DRIVER, WORKER, SERVER), (*PASSES, "checkpoint", ANY_MOMENT), 2),
    "exception": Kind((DRIVER, WORKER, WORKER), PHASES, 5, pairs=True),
    "hang": Kind((WORKER,), PHASES, 2, pairs=True),
    "slow": Kind((DRIVER, WORKER), PHASES, 2, pairs=True),
    "busy": Kind((DRIVER, WORKER), ("forward", "backward"), 1),
    "nan": Kind((DRIVER, WORKER), ("forward",), 2),
    "disk full": Kind((DRIVER, WORKER), ("checkpoint",), 3, pairs=True),
    "cut off": Kind((DRIVER, WORKER), ("checkpoint",), 3),
    "damaged": Kind((DRIVER,), ("after",), 2, ranks=False),
    "connection lost": Kind((DRIVER, WORKER), PASSES, 3, pairs=True),
}


LINK_DOWN, LINK_SLOW = "link down", "link slow"
OF_LAUNCHED: dict[str, Kind] = {
    "kill": Kind((WORKER,), PHASES, 4),
    "stop": Kind((WORKER,), PASSES, 1),
    "pause": Kind((DRIVER, WORKER), PASSES, 1),
    "exception": Kind((DRIVER, WORKER), PASSES, 2),
    "hang": Kind((WORKER,), PASSES, 1),
    "slow": Kind((DRIVER, WORKER), PASSES, 1),
    LINK_DOWN: Kind((DRIVER, WORKER), PASSES, 3),
    LINK_SLOW: Kind((DRIVER, WORKER), PHASES, 3),
}
"""The faults of runs that a launcher starts. With ``link down``, the router drops the packets to the second host from
then on; with ``link slow`` for a time, after which they are sent again."""

IN_RECOVERY = ("kill", "stop", "exception", "hang", "slow")
"""Kinds whose second fault can also strike a worker that starts again after the first."""


@dataclass(frozen=True)
class Case:
    """A run and its faults.

    Attributes:
        seed: From which it was drawn.
        shape: The run.
        faults: One fault, or two.
    """

    seed: int
    shape: Shape
    faults: tuple[Fault, ...]

    @property
    def rpc_timeout_sec(self) -> float:
        """Short where something hangs, and long where a failure must be noticed without the time-out."""
        kinds = ("hang", "stop", "slow", "busy", LINK_DOWN)
        return 3.0 if any(fault.kind in kinds for fault in self.faults) else 60.0

    @property
    def ends_driver(self) -> bool:
        """Whether a fault may end the process of the first driver, so that this has to be a process of its own."""
        fatal = ("kill", "terminate", "cut off")
        return any(fault.role == DRIVER and not fault.replica and fault.kind in fatal for fault in self.faults)

    def __str__(self) -> str:
        return f"{self.shape}: {' and '.join(map(str, self.faults))}"


class Draws:
    """Random draws, each by its own name, so that none depends on what else is drawn.

    A new option, kind of fault or value of a table leaves the other cases as they are: each value has a number of its
    own, and the value with the largest number is drawn. So a new value changes only the cases that draw it.

    Args:
        seed: The seed of the case, with the number of the attempt.
    """

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def number(self, name: str) -> float:
        """A number from 0 to 1, without 1."""
        return random.Random(f"{self._seed}/{name}").random()

    def below(self, name: str, end: int) -> int:
        """A whole number from 0 to ``end - 1``."""
        return int(self.number(name) * end)

    def of(self, name: str, values: Sequence[T]) -> T:
        """One of some values; a value that is there twice is drawn twice as often."""
        counted: Counter[str] = Counter()
        numbers = []
        for value in values:
            numbers.append(self.number(f"{name}/{value!r}/{counted[repr(value)]}"))
            counted[repr(value)] += 1
        return values[numbers.index(max(numbers))]

    def weighted(self, name: str, weights: Mapping[str, int]) -> str:
        """One of some names, drawn as often as its weight says."""
        return max(weights, key=lambda each: self.number(f"{name}/{each}") ** (1 / weights[each]))


def draw(seed: int) -> Case:
    """The case of a seed."""
    for attempt in count():
        draws = Draws(f"{seed}/{attempt}")
        shape = _draw_shape(draws)
        faults = _draw_faults(draws, shape)
        if faults:
            has_sanity = any(fault.phase == SANITY for fault in faults)
            return Case(seed, replace(shape, has_sanity=has_sanity), faults)
    raise AssertionError("unreachable")


def first_seed(kind: str, role: str, start: int = 0) -> int:
    """The first seed from ``start`` on whose only fault is of a kind and befalls a role, in a single pipeline."""
    cases = map(draw, count(start))
    return next(
        c.seed for c in cases if [(f.kind, f.role) for f in c.faults] == [(kind, role)] and c.shape.replicas == 1
    )


def _draw_shape(draws: Draws) -> Shape:
    strategy = draws.weighted("strategy", {"pipeline": 10, **dict.fromkeys(RANKS, 1)})
    precision, accumulate = draws.of("precision", PRECISIONS), draws.of("accumulate", (1, 1, 2))
    if strategy != "pipeline":
        return Shape(strategy, 1, 2, precision, accumulate, _draw_options(draws, RANKS[strategy]))
    stages, replicas = draws.of("stages", (1, 2, 2, 3, 3)), int(draws.weighted("replicas", {"1": 12, "2": 1}))
    options = _draw_options(draws, {**OPTIONS, **(SEVERAL_PIPELINES if replicas > 1 else {})})
    launcher = draws.weighted("launcher", LAUNCHERS) if stages > 1 and replicas == 1 else ""
    if launcher == TWO_HOSTS:
        stages = 2  # one on each
    return Shape(strategy, stages, replicas, precision, accumulate, options, launcher=launcher)


def _draw_options(draws: Draws, table: dict[str, tuple[Any, ...]]) -> tuple[tuple[str, Any], ...]:
    drawn = {name: draws.of(name, values) for name, values in table.items()}
    drawn.pop("zero_stage" if drawn.get("tensor_parallel_size", 1) > 1 else "tensor_parallel_size", None)
    if drawn.get("zero_stage") == 3:
        drawn["state_dict_type"] = "full"
    return tuple((name, value) for name, value in drawn.items() if drawn.get(ONLY_WITH.get(name, ""), 1) != 0)


def _draw_faults(draws: Draws, shape: Shape) -> tuple[Fault, ...]:
    """One or two faults; none if what has been drawn cannot happen to a run of this shape."""
    if shape.launcher:
        kinds = {name: k.weight for name, k in OF_LAUNCHED.items() if shape.launcher == TWO_HOSTS or "link" not in name}
        kind = draws.weighted("kind of launched", kinds)
        only = _draw_fault(draws, "first", shape, kind, draws.of("phase of launched", OF_LAUNCHED[kind].phases))
        return (only,) if only is not None else ()
    kind = draws.weighted("kind", {name: known.weight for name, known in KINDS.items()})
    first = _draw_fault(draws, "first", shape, kind, draws.of("phase", KINDS[kind].phases))
    if first is None:
        return ()
    is_single = not KINDS[kind].pairs or shape.replicas > 1 or first.phase == ANY_MOMENT
    if is_single or draws.number("pair") > PAIRS:
        return (first,)
    kind = draws.weighted("second kind", {name: 1 for name, known in KINDS.items() if known.pairs})
    phases = [phase for phase in KINDS[kind].phases if phase != ANY_MOMENT]
    phase = draws.of("second phase", phases)
    if first.phase in phases and draws.number("same phase") < 0.5:
        phase = first.phase
    if kind in IN_RECOVERY and shape.num_repairs and draws.number("in recovery") < 0.3:
        phase = RECOVERY
    second = _draw_fault(draws, "second", shape, kind, phase)
    where = (first.role, first.replica, first.stage)
    if second is None or (second.role, second.replica, second.stage) == where or SERVER in (first.role, second.role):
        return ()
    return (first, second)


def _draw_fault(draws: Draws, which: str, shape: Shape, kind: str, phase: str) -> Fault | None:
    role = draws.of(f"{which} role", (OF_LAUNCHED if shape.launcher else KINDS)[kind].roles)
    replica = draws.below(f"{which} replica", shape.replicas)
    is_worker = role == WORKER and shape.stages > 1
    stage = draws.below(f"{which} stage", shape.stages - 1) if is_worker else shape.stages - 1
    batch = draws.below(f"{which} batch", NUM_BATCHES - 3)
    skip = draws.below(f"{which} skip", 2) if phase in ("forward", "backward") else 0
    detail: Any = None
    if kind == "exception":
        detail = draws.of(f"{which} exception", EXCEPTIONS)
    elif kind in ("disk full", "cut off"):
        detail = 64 + draws.below(f"{which} bytes", 6000 - 64)
    elif kind in ("nan", "connection lost", "damaged") or phase == ANY_MOMENT:
        detail = round(draws.number(f"{which} share"), 3)
    fault = Fault(kind, phase, role, replica, stage, batch, skip, detail)
    return fault if _is_possible(shape, fault) else None


def _is_possible(shape: Shape, fault: Fault) -> bool:
    if fault.role != DRIVER and (shape.strategy != "pipeline" or shape.stages == 1):
        return False
    if fault.kind == "stop" and shape.launcher == TWO_HOSTS:
        return False  # nothing on the other host ends the process, but the launcher
    if fault.phase == RECOVERY and (fault.role != WORKER or shape.replicas > 1):
        return False
    if fault.role == SERVER and (shape.replicas > 1 or fault.phase == ANY_MOMENT):
        return False
    driver_writes = shape.option("state_dict_type") != "sharded" or shape.num_parts > 1
    if fault.role == WORKER and fault.kind in ("disk full", "cut off") and driver_writes:
        return False
    if fault.kind == "nan" and shape.num_parts > 1:
        return False  # in one pipeline only: what the others compute depends on the layer
    if (
        fault.replica
        and fault.phase == "checkpoint"
        and (fault.role == WORKER or fault.kind in ("disk full", "cut off"))
    ):
        return False  # only the first replica writes
    if fault.role == DRIVER and fault.detail == "StopIteration":
        return False  # Lightning's loop takes it for the end of the data
    if fault.kind == "terminate" and shape.replicas > 1:
        return False  # Lightning's handler broadcasts the signal: launchers send it to all ranks
    if fault.kind == "connection lost" and shape.stages == 1 and shape.replicas == 1:
        return False  # there is none
    return shape.replicas == 1 or (KINDS[fault.kind].ranks and fault.phase != ANY_MOMENT)
