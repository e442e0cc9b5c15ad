"""The oracle: how a case may end, and everything in which an outcome differs from that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tests.faults.simulator.cases import (
    ANY_MOMENT,
    DRIVER,
    LINK_DOWN,
    LINK_SLOW,
    NUM_BATCHES,
    RECOVERY,
    SERVER,
    TORCHRUN,
    WORKER,
    Case,
    Fault,
    Shape,
)
from tests.faults.simulator.traps import FAULT

BOUND_SECONDS = 25.0
"""From a fault to the end of the run that it ends, on a machine that may be busy: above the time-out of what hangs, and
far below the time-out that is used otherwise."""


@dataclass(frozen=True)
class Error:
    """What a run raised.

    Attributes:
        kind: The name of its type.
        message: The message.
        traceback: The traceback, with those of the errors that led to it.
    """

    kind: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Results:
    """What a run came to.

    Attributes:
        error: What it raised.
        began: When it began, in seconds.
        ended: When it ended.
        losses: Each batch whose training ended, with its loss.
        tensors: The weights and buffers at the end, if it raised nothing.
        metrics: The logged values, if it raised nothing.
        hooks: Every call of a hook of a callback, with the batch: ``on_train_batch_end 3``.
    """

    error: Error | None
    began: float
    ended: float
    losses: Sequence[tuple[int, float]]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    hooks: Sequence[str] = ()


@dataclass
class Outcome:
    """What a case came to.

    Attributes:
        results: Of the disturbed run; ``None`` if its process was killed.
        checkpoints: The tensors of each checkpoint, or the error of one that cannot be read.
        status: The exit status of the driver, if that was a process of its own.
        struck: When each fault struck, in seconds.
        leftovers: What else the run has left in the folder of its checkpoints.
        afterwards: The results of the run that continues from the last checkpoint, if the disturbed one ended.
        checkpoints_afterwards: The checkpoints of that.
        of_damaged: The results of a run that continues from a damaged checkpoint.
        damaged_name: The name of that checkpoint.
        left: Ranks that have not ended.
    """

    results: Results | None
    checkpoints: dict[str, dict[str, Tensor] | str] = field(default_factory=dict)
    status: int | None = None
    struck: dict[int, float] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    afterwards: Results | None = None
    checkpoints_afterwards: dict[str, dict[str, Tensor] | str] = field(default_factory=dict)
    of_damaged: Results | None = None
    damaged_name: str = ""
    left: list[str] = field(default_factory=list)

    def seconds_to_end(self) -> float | None:
        """Seconds from the last fault to the end of a run that raised something."""
        if self.results is None or self.results.error is None or not self.struck:
            return None
        return self.results.ended - max(self.struck.values())


@dataclass(frozen=True)
class Ending:
    """A way in which a run may end.

    Attributes:
        kinds: The names of the types of which it may raise one; empty if it goes on to its end.
        pattern: A regular expression that the error's message contains.
        statuses: The exit statuses that its driver may have, if that is a process of its own and has no results.
    """

    kinds: tuple[str, ...] = ()
    pattern: str = ""
    statuses: tuple[int, ...] = ()


GOES_ON = Ending()


def endings(case: Case) -> list[Ending]:
    """All the ways in which a case whose faults have struck may end rightly."""
    found = [ending for fault in case.faults for ending in _endings_of(case.shape, fault)]
    if 0 < case.shape.num_repairs < len(case.faults):  # one loss may be one too many
        found += [ending for fault in case.faults for ending in _raising(fault)]
    return found


def _endings_of(shape: Shape, fault: Fault) -> list[Ending]:
    if fault.kind == "terminate" and fault.role == DRIVER:
        is_early = fault.phase == ANY_MOMENT  # perhaps before Lightning handles the signal
        return [Ending(("SIGTERMException", "SystemExit"), statuses=(-15,) if is_early else ())]
    if fault.kind == "nan" and fault.role == WORKER and (every_n_steps := shape.option("verify_every_n_steps")):
        found = Ending(("ComputedWrongly",), "gave different values")  # it is not computed a second time
        return [found] if every_n_steps == 1 else [GOES_ON, found]
    if fault.role == SERVER or fault.kind in ("terminate", "pause", "slow", "busy", "nan", "damaged", LINK_SLOW):
        return [GOES_ON]
    if fault.kind == LINK_DOWN:
        return [Ending(("RuntimeError",), "rank 0 on a .* has heard nothing from b .* network between the two hosts")]
    raising = _raising(fault)
    if shape.launcher == TORCHRUN and fault.role == WORKER:
        raising.append(Ending(statuses=(1,)))  # torchrun ends the driver when a rank ends, perhaps before it raises
    if shape.launcher and fault.kind == "kill":  # the driver is not the parent, and does not see processes of a host
        raising.append(Ending(("WorkerLost",), rf"stage {fault.stage} .*(has ended|on b, did not answer)"))
    if fault.kind == "connection lost" and shape.replicas > 1:  # between ranks, or to the store of rank 0
        raising = [
            Ending(("RuntimeError",), "lost a connection between them|rank 1, process|stage"),
            Ending(("WorkerLost",), "stage"),
        ]
    takes_snapshots = shape.num_repairs or shape.option("verify_every_n_steps")
    if fault.kind == "disk full" and fault.role == WORKER and takes_snapshots:
        # The limit is one of the size of files, and applies to snapshots too, which are files in memory.
        raising.append(Ending(("OSError",), f"a snapshot of .*{_FULL}"))
    if fault.phase == RECOVERY:  # another attempt may go well
        of_layer = Ending(("WorkerLost",), FAULT)
        return [GOES_ON, *raising, *([of_layer] if fault.kind == "exception" else [])]
    if fault.replica and fault.phase == "teardown":
        return [GOES_ON, *raising]  # rank 0 may be through
    if fault.phase == ANY_MOMENT or fault.kind == "connection lost":
        return [GOES_ON, *raising]  # it may be over, or close a connection that is not used any more
    if fault.role == WORKER and fault.kind in ("kill", "stop", "hang", "cut off"):
        if shape.num_repairs and fault.phase == "start":
            return [GOES_ON, *raising]  # there may be no snapshot yet
        if shape.num_repairs:
            return [GOES_ON]
    return raising


def _raising(fault: Fault) -> list[Ending]:
    """The ways in which a fault may end a run."""
    stage, error = rf"stage {fault.stage}\b.*", fault.detail
    if fault.role == WORKER:
        if fault.kind == "exception" and error in ("TwoArguments", "Unpicklable"):
            found = [Ending(("RuntimeError",), f"{stage}{error}: {FAULT}")]
        elif fault.kind == "exception" and error == "StopIteration":
            found = [Ending(("RuntimeError",), f"StopIteration.*{FAULT}")]
        else:
            found = {
                "kill": [Ending(("WorkerLost",), f"{stage}was killed by signal 9")],
                "cut off": [Ending(("WorkerLost",), f"{stage}was killed by signal 25")],
                "stop": [Ending(("WorkerLost",), f"{stage}does not answer")],
                "hang": [Ending(("WorkerLost",), f"{stage}hangs: it has made no progress")],
                "exception": [Ending((error or "",), FAULT)],
                "disk full": [Ending(("RuntimeError",), f"{stage}could not write its part .*step=.*{_FULL}")],
                "connection lost": [Ending(("WorkerLost",), "stage")],
            }.get(fault.kind, [])
    else:
        found = {
            "kill": [Ending(statuses=(-9,))],
            "cut off": [Ending(statuses=(-25,))],
            "exception": [Ending((error or "",), FAULT)],
            "disk full": [Ending(("OSError", "RuntimeError"), f"{_CHECKPOINT}could not be (written|saved): .*{_FULL}")],
            "connection lost": [Ending(("WorkerLost",), "stage")],
        }.get(fault.kind, [])
    if not fault.replica:
        return found
    status = {"kill": "was killed by signal 9"} if fault.role == DRIVER else {}
    how = status.get(
        fault.kind, f"(ended with status 1 .*which|has) raised ({'|'.join(k for e in found for k in e.kinds)})"
    )
    return [Ending(("RuntimeError",), f"rank {fault.replica}, process .*{how}")]


_FULL = "File too large"
_CHECKPOINT = "step=.*"
"""Matches the name of a checkpoint."""


def judge(case: Case, outcome: Outcome, reference: Outcome) -> list[str]:
    """What is wrong with an outcome; nothing if the list is empty.

    Args:
        case: The case.
        outcome: What came of it.
        reference: What a run of the same shape comes to that nothing disturbs.
    """
    wrong = [*outcome.left, *_of_the_end(case, outcome), *_of_the_results(case, outcome, reference)]
    if outcome.leftovers and (outcome.status or 0) >= 0 and not any(f.kind == "cut off" for f in case.faults):
        wrong.append(f"left in the folder of checkpoints: {outcome.leftovers}")
    if outcome.of_damaged is not None:
        wrong += _of_the_damaged(outcome.of_damaged, outcome.damaged_name)
    return wrong


def _of_the_end(case: Case, outcome: Outcome) -> list[str]:
    struck = tuple(fault for number, fault in enumerate(case.faults) if number in outcome.struck)
    allowed = endings(replace(case, faults=struck)) if struck else [GOES_ON]
    error = outcome.results.error if outcome.results is not None else None
    if outcome.results is None:
        if not any(outcome.status in ending.statuses for ending in allowed):
            return [f"the driver ended with status {outcome.status}"]
        return []
    if error is None:
        return [] if GOES_ON in allowed else ["the run went on"]
    if not any(error.kind in e.kinds and re.search(e.pattern, error.message, re.DOTALL) for e in allowed):
        return [f"raised {error.kind}: {error.message}\n{error.traceback}"]
    seconds = outcome.seconds_to_end()
    if seconds is not None and seconds > BOUND_SECONDS:
        return [f"it took {seconds:.1f} s to end"]
    return []


def _of_the_results(case: Case, outcome: Outcome, reference: Outcome) -> list[str]:
    if any(fault.kind == "nan" for fault in case.faults) and outcome.struck:
        return _of_nan(case, outcome)
    assert reference.results is not None
    expected, wrong = reference.results, []
    wrong += _of_checkpoints("", outcome.checkpoints, reference.checkpoints)
    goes_on = outcome.results is not None and outcome.results.error is None
    if outcome.results is not None:
        wrong += _of_run("", outcome.results, expected, is_whole=goes_on)
        wrong += _differing_calls(outcome.results.hooks, expected.hooks, is_whole=goes_on)
    if goes_on and outcome.of_damaged is None:
        missing = reference.checkpoints.keys() - outcome.checkpoints.keys()
        return wrong + [f"there is no checkpoint {name}" for name in sorted(missing)]
    if outcome.afterwards is None:
        return [*wrong, "there is no run afterwards"]
    if outcome.afterwards.error is not None:
        error = outcome.afterwards.error
        return [*wrong, f"afterwards raised {error.kind}: {error.message}\n{error.traceback}"]
    wrong += _of_run("afterwards, ", outcome.afterwards, expected, is_whole=True)
    wrong += _of_checkpoints("afterwards, ", outcome.checkpoints_afterwards, reference.checkpoints)
    wrong += [f"afterwards, {each}" for each in _of_resumed(outcome.afterwards.hooks, expected.hooks, is_whole=True)]
    return wrong


def _of_resumed(found: Sequence[str], expected: Sequence[str], *, is_whole: bool) -> list[str]:
    """The hooks of a run that continues from a checkpoint: from its first batch on as without faults."""
    first = next((each for each in found if each.startswith("on_train_batch_start ")), None)
    if first is None:
        return [] if not is_whole or found[-1:] == expected[-1:] else [f"the last hook was {found[-1:]}"]
    rest = expected[expected.index(first) :] if first in expected else []
    return _differing_calls(found[found.index(first) :], rest, is_whole=is_whole)


def _differing_calls(found: Sequence[str], expected: Sequence[str], *, is_whole: bool) -> list[str]:
    """Each call of a hook must come once, in its place, up to the last one."""
    for place, each in enumerate(found):
        if place >= len(expected) or each != expected[place]:
            instead = expected[place] if place < len(expected) else "the end"
            return [f"the hook {each} was called instead of {instead}, after {list(found[max(0, place - 3) : place])}"]
    missing = expected[len(found) : len(found) + 1] if is_whole else []
    return [f"the hook {each} was not called" for each in missing]


def _of_run(when: str, results: Results, expected: Results, *, is_whole: bool) -> list[str]:
    wrong = []
    losses = dict(expected.losses)
    for batch, loss in results.losses:
        if loss != losses[batch]:
            wrong.append(f"{when}the loss of batch {batch} is {loss!r}, not {losses[batch]!r}")
    if not is_whole:
        return wrong
    if results.losses and results.losses[-1][0] != NUM_BATCHES - 1:
        wrong.append(f"{when}the last batch was {results.losses[-1][0]}")
    wrong += _differences(f"{when}at the end", results.tensors, expected.tensors)
    if results.metrics != expected.metrics:
        wrong.append(f"{when}the metrics are {dict(results.metrics)}, not {dict(expected.metrics)}")
    return wrong


def _of_checkpoints(
    when: str, found: Mapping[str, dict[str, Tensor] | str], expected: Mapping[str, dict[str, Tensor] | str]
) -> list[str]:
    wrong = []
    for name, tensors in found.items():
        like = expected.get(name)
        if isinstance(tensors, str):
            wrong.append(f"{when}the checkpoint {name} cannot be read: {tensors}")
        elif not isinstance(like, dict):
            wrong.append(f"{when}there is a checkpoint {name}, and none without faults")
        else:
            wrong += _differences(f"{when}in the checkpoint {name}", tensors, like)
    return wrong


def _differences(where: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    wrong = []
    if found.keys() != expected.keys():
        wrong.append(f"{where}, the names are not the same: {sorted(found.keys() ^ expected.keys())}")
    different = [name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])]
    if different:
        wrong.append(f"{where}, {len(different)} of {len(found)} tensors are not equal, such as {min(different)}")
    return wrong


def _of_nan(case: Case, outcome: Outcome) -> list[str]:
    """A value that is NaN ends no run; with a gradient scaler, no stage makes that step, otherwise every stage does."""
    results, wrong = outcome.results, []
    if results is None or results.error is not None:
        return []  # the end has been judged already
    is_nan = [batch for batch, loss in results.losses if loss != loss]
    has_scaler = case.shape.precision == "16-mixed"
    # With a scaler, later losses are not NaN. Then one of another replica is not seen here, and one that comes while a
    # micro-batch is recomputed is in no loss.
    is_unseen = has_scaler and (any(f.replica for f in case.faults) or case.shape.option("checkpoint") != "never")
    if (not is_nan and not is_unseen) or (not has_scaler and is_nan[-1] != NUM_BATCHES - 1):
        wrong.append(f"the losses of batches {is_nan} are NaN")
    weights = [tensor for name, tensor in results.tensors.items() if name.endswith(".weight")]
    num_nan = sum(bool(weight.isnan().any()) for weight in weights)
    if has_scaler and num_nan:
        wrong.append(f"{num_nan} weights are NaN, although the scaler leaves out such steps")
    if not has_scaler and num_nan != len(weights):
        wrong.append(f"{num_nan} of {len(weights)} weights are NaN")
    return wrong


def _of_the_damaged(results: Results, name: str) -> list[str]:
    if results.error is None:
        return [f"the damaged checkpoint {name} was loaded"]
    wrong = []
    if results.losses:
        wrong.append(f"the damaged checkpoint {name} was noticed after {len(results.losses)} batches")
    if name not in results.error.message:
        wrong.append(f"the error of the damaged checkpoint {name} is {results.error.kind}: {results.error.message}")
    return wrong
