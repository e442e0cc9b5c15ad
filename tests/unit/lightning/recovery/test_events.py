"""What is heard of a step that runs several times."""

from collections.abc import Callable

import pytest

from strategies.lightning.recovery.events import Events


class Lost(Exception):
    pass


def step(events: Events, heard: list[str], *, lost_in: str = "", inside: bool = False) -> None:
    """Logs, then calls a callback that logs twice, then logs again."""

    def tell(name: str) -> Callable[[], None]:
        def told() -> None:
            if name == lost_in:
                raise Lost
            heard.append(name)

        return told

    def callback() -> None:
        events(tell("inner 1"))
        heard.append("callback")
        events(tell("inner 2"))

    events(tell("loss"))
    events(callback)
    events.note()
    if lost_in == "between":
        raise Lost
    events(tell("error"))


NAMES = ["loss", "inner 1", "callback", "inner 2", "error"]


@pytest.mark.parametrize(
    ("lost_in", "expected"),
    [
        ("loss", NAMES),
        ("inner 1", NAMES),
        ("inner 2", ["loss", "inner 1", "callback", "callback", "inner 2", "error"]),
        ("between", NAMES),
        ("error", NAMES),
    ],
)
def test_an_event_that_has_ended_is_not_heard_again(lost_in: str, expected: list[str]) -> None:
    events, heard = Events(), list[str]()
    events.begin_step()
    for where in (lost_in, lost_in, ""):
        events.begin_run(is_repeated=False)
        try:
            step(events, heard, lost_in=where)
        except Lost:
            assert where
        events.end_run()
    again = ["callback"] * (lost_in == "inner 2")  # what the callback does itself, once more for each loss within it
    assert heard == (expected if not again else [*expected[:3], "callback", *expected[3:]])


def test_nothing_is_heard_of_a_step_that_is_over() -> None:
    events, heard = Events(), list[str]()
    for is_repeated in (False, True, True):
        events.begin_run(is_repeated=is_repeated)
        step(events, heard)
        events.end_run()
    assert heard == NAMES
    events(lambda: heard.append("outside"))
    assert heard[-1] == "outside"


def test_silence_ends_with_the_last_event_that_was_heard() -> None:
    events, heard = Events(), list[str]()
    events.begin_step()
    events.begin_run(is_repeated=False, on_end_of_silence=lambda: heard.append("at once"))
    with pytest.raises(Lost):
        step(events, heard, lost_in="between")
    events.end_run()
    assert heard == ["at once", *NAMES[:-1]]
    events.begin_run(is_repeated=False, on_end_of_silence=lambda: heard.append("now"))
    step(events, heard)
    events.end_run()
    assert heard[-2:] == ["now", "error"]
    events.begin_run(is_repeated=True, on_end_of_silence=lambda: heard.append("never"))
    step(events, heard)
    assert heard[-1] == "error"
