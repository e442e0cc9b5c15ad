"""Which stage has computed wrongly, by what the stages have sent and received twice."""

from dataclasses import replace
from typing import Literal

from strategies.pipeline.recovery.log import NotRepeated
from strategies.pipeline.recovery.verification import first_differences
from strategies.pipeline.transport.journal import SAME_STAGE, Comparison, Message


def message(way: Literal["sent", "received"], peer: int, tag: int, value: int) -> Message:
    return Message(way, peer, tag, number=7, microbatch=1, fingerprint=(value,))


def step(first: int, second: int) -> list[list[Message]]:
    """One micro-batch through two workers and back: what each of them sends and receives.

    Args:
        first: What stage 0 sends.
        second: What stage 1 sends to the driver.
    """
    return [
        [message("received", 2, 10, 1), message("sent", 1, 12, first), message("received", 1, 12, 4 + second)],
        [
            message("received", 0, 12, first),
            message("sent", 2, 14, second),
            message("received", 2, 14, 3 + second),
            message("sent", 0, 12, 4 + second),
        ],
    ]


def compared(before: list[list[Message]], after: list[list[Message]], *states: list[str]) -> list[Comparison]:
    return [Comparison(*pair) for pair in zip(before, after, states or ([], []), strict=True)]


def test_equal_steps_have_no_difference() -> None:
    assert first_differences(compared(step(2, 3), step(2, 3)), []) == []


def test_the_first_stage_that_sends_a_different_value_is_named_alone() -> None:
    found = first_differences(
        compared(step(2, 3), step(9, 8), ["a.weight"], ["b.weight"]), [NotRepeated(1, "stage 1", 7, 1)]
    )
    assert found == ["stage 0 sent stage 1 a different value for micro-batch 1 of pass 7"]
    found = first_differences(compared(step(2, 3), step(2, 8)), [NotRepeated(1, "stage 1", 7, 1)])
    assert found == ["stage 1 sent the driver a different value for micro-batch 1 of pass 7"]


def test_a_stage_that_only_ends_in_a_different_state_is_named_with_the_tensors() -> None:
    names = [f"layer.{k}" for k in range(7)]
    found = first_differences(compared(step(2, 3), step(2, 3), [], names), [])
    assert found == ["stage 1 ended with different values of layer.0, layer.1, layer.2, layer.3, layer.4 and 2 more"]


def test_a_value_that_changes_on_its_way_is_named_with_both_ends() -> None:
    before, after = step(2, 3), step(2, 8)
    after[1][0] = replace(after[1][0], fingerprint=(99,))
    found = first_differences(compared(before, after), [NotRepeated(1, "stage 1", 7, 1)])
    assert found == ["a value for micro-batch 1 of pass 7 arrived differently at stage 1, which stage 0 had sent"]

    after = step(2, 3)
    after[0][0] = replace(after[0][0], fingerprint=(99,))
    (found_one,) = first_differences(compared(before, after), [])
    assert found_one.endswith("arrived differently at stage 0, which the driver had sent")

    (found_one,) = first_differences(compared(before, step(2, 3)), [NotRepeated(1, "stage 1", 7, 1)])
    assert found_one.endswith("arrived differently at the driver, which stage 1 had sent")


def exchanging(first: int, all_of_them: int, sent: int) -> list[list[Message]]:
    """The stages of :func:`step`, of which the first exchanges a value with the same stage of other pipelines."""
    messages = step(sent, 3)
    messages[0].insert(1, message("sent", SAME_STAGE, 0, first))
    messages[0].insert(2, message("received", SAME_STAGE, 0, all_of_them))
    return messages


def test_a_wrong_value_of_another_pipeline_is_no_fault_of_this_one() -> None:
    found = first_differences(compared(exchanging(5, 6, 2), exchanging(5, 8, 9)), [NotRepeated(1, "stage 1", 7, 1)])
    assert found == [
        "stage 0 got a different value from the same stage of another pipeline, whose driver names the cause"
    ]
    found = first_differences(compared(exchanging(5, 6, 2), exchanging(7, 8, 9)), [])
    assert found == ["stage 0 gave the same stage of the other pipelines a different value"]


def test_a_stage_that_sends_less_is_named() -> None:
    after = step(2, 3)
    del after[1][-1], after[0][-1]
    found = first_differences(compared(step(2, 3), after), [])
    assert "stage 1 sent stage 0 a different value for micro-batch 1 of pass 7" in found


def test_workers_that_have_been_replaced_are_compared_by_their_state() -> None:
    replaced = [Comparison(None, messages, state) for messages, state in zip(step(2, 3), ([], ["w"]), strict=True)]
    assert first_differences(replaced, []) == ["stage 1 ended with different values of w"]
