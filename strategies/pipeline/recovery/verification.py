"""Finds the process that computes wrongly: computes a step twice from one snapshot, and compares the two results.

    driver    snapshot 3 │ run │ value sent │ value received │ step │ snapshot 4 │ back to 3 │ the log again │ compare
    worker                 journal of what it sends and receives                   second journal, state against 4

All values and states must be equal, bit by bit. Values computed from a wrong value are wrong too. So the faulty stage
is the stage that received equal values both times but sent a different value, or only ended in a different state. If
this is a stage of another pipeline, the driver of that pipeline says which.
"""

from collections.abc import Sequence

from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.recovery.log import WHY_DIFFERENT, NotRepeated
from strategies.pipeline.transport.journal import SAME_STAGE, Comparison, Message


class ComputedWrongly(RuntimeError):
    """Raised if a step that was computed twice gave different values."""


def check_repeated(
    remotes: Sequence[RemoteStage], comparisons: Sequence[Comparison], differences: Sequence[NotRepeated]
) -> None:
    """Check that the second computation of a step gave the same values as the first.

    Args:
        remotes: The stages on workers.
        comparisons: The comparison of each stage on a worker.
        differences: The values that the driver received the second time and that were different.

    Raises:
        ComputedWrongly: If a value is different.
    """
    found = first_differences(comparisons, differences)
    if found:
        whose = [remote.process.description for remote in remotes]
        stages = ", ".join(f"stage {i} is {described}" for i, described in enumerate(whose))
        raise ComputedWrongly(
            f"a step was computed a second time (verify_every_n_steps) and gave different values: {'; '.join(found)}. "
            f"{WHY_DIFFERENT} ({stages}.) Do not trust the weights: start again from a checkpoint that was written "
            "before this step."
        )


def first_differences(comparisons: Sequence[Comparison], differences: Sequence[NotRepeated]) -> list[str]:
    """Describe the differences that are not caused by other differences.

    Args:
        comparisons: The comparison of each stage on a worker.
        differences: The values that the driver received the second time and that were different.
    """
    driver = len(comparisons)
    found: list[str] = []
    elsewhere: list[str] = []
    for i, comparison in enumerate(comparisons):
        pair = _first_difference(comparison)
        if pair is None and comparison.state:
            found.append(f"stage {i} ended with different values of {_listed(comparison.state)}")
        if pair is None:
            continue
        before, after = pair
        message = before or after
        assert message is not None
        if message.peer == SAME_STAGE:
            if message.way == "sent":
                found.append(f"stage {i} gave the same stage of the other pipelines a different value")
            else:
                elsewhere.append(
                    f"stage {i} got a different value from the same stage of another pipeline, whose driver names "
                    "the cause"
                )
            continue
        what = f"micro-batch {message.microbatch} of pass {message.number}"
        if message.way == "sent":
            found.append(f"stage {i} sent {_named(message.peer, driver)} a different value for {what}")
        elif message.peer == driver or not _has_sent(comparisons[message.peer], i, before, after):
            found.append(
                f"a value for {what} arrived differently at stage {i}, which {_named(message.peer, driver)} had sent"
            )
    found = found or elsewhere
    if not found and differences:
        each = differences[0]
        what = f"micro-batch {each.microbatch} of pass {each.number}"
        found.append(f"a value for {what} arrived differently at the driver, which stage {each.stage} had sent")
    return found


def _first_difference(comparison: Comparison) -> tuple[Message | None, Message | None] | None:
    """Return the first message that is different the second time; ``None`` if all are equal or nothing is compared."""
    first, second = comparison.first, comparison.second
    if first is None:
        return None
    length = max(len(first), len(second))
    padded = ([*messages, *[None] * (length - len(messages))] for messages in (first, second))
    return next(((before, after) for before, after in zip(*padded, strict=True) if before != after), None)


def _has_sent(sender: Comparison, receiver: int, before: Message | None, after: Message | None) -> bool:
    """Return whether a stage has received, both times, what the other stage has sent."""
    return all(
        received is None or journal is None or any(_is_same(sent, received, receiver) for sent in journal)
        for received, journal in ((before, sender.first), (after, sender.second))
    )


def _is_same(sent: Message, received: Message, receiver: int) -> bool:
    place = sent.channel, sent.number, sent.microbatch, sent.fingerprint
    return (
        sent.way == "sent"
        and sent.peer == receiver
        and place == (received.channel, received.number, received.microbatch, received.fingerprint)
    )


def _named(rank: int, driver: int) -> str:
    return "the driver" if rank == driver else f"stage {rank}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


_MOST_NAMES = 5
