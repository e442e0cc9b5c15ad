"""``schedule="auto"``: settings that are refused, and when a schedule that was found earlier is used again."""

from typing import Any, cast

import pytest
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from strategies import RPCSequentialStrategy, Schedule
from strategies.lightning.search_settings import SearchSettings, fits, with_schedule
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.pipeline.schedule.tables import interleaved, zbv


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"microbatches": "auto"},
            "microbatches='auto' is for schedule='auto', which measures the layers; got",
        ),
        (
            {"schedule": Schedule(memory_limit_bytes=9)},
            "memory_limit_bytes=9 is for schedule='auto', which measures the layers;",
        ),
        (
            {"schedule": Schedule("auto", max_microbatches=9)},
            "max_microbatches=9 is for microbatches='auto', got microbat",
        ),
        (
            {"schedule": Schedule("auto", max_microbatches=0), "microbatches": "auto"},
            "max_microbatches must be a whole number",
        ),
        (
            {"schedule": Schedule("auto", memory_limit_bytes=cast(Any, "1 GB"))},
            "memory_limit_bytes must be a whole number of at",
        ),
        ({"schedule": "auto", "microbatches": "many"}, "microbatches must be a whole number of at least 1, got"),
        ({"schedule": Schedule("auto", chunks=0)}, "chunks must be a whole number of at least 1, got 0."),
        (
            {"schedule": Schedule("auto", pipelined_backward=False)},
            "pipelined_backward=False waits for all forward passes",
        ),
        ({"schedule": "automatic"}, "Unknown schedule 'automatic'; did you mean 'auto'?"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException) as error:
        RPCSequentialStrategy(**settings)
    assert message in str(error.value)


def test_what_was_found_earlier_is_used_where_it_fits() -> None:
    """It is not used if the settings of this run say something else."""
    planned = PlannedSchedule("zbv", 2, [2, 1, 1, 2], 4, zbv(2, 4), peak_bytes=100.0, gradient_sets=1)
    assert PlannedSchedule.from_state(planned.state()) == planned

    def is_used(
        stages: int = 2, layers: int = 6, given: Any = None, chunks: int | None = None, sets: int = 1, **choices: Any
    ) -> bool:
        settings = Settings(schedule="auto", chunks=chunks)
        given_choices = SearchSettings("auto", **{"microbatches": 4, **choices})
        return fits(planned, stages, [layers], given, settings, given_choices, sets)

    assert is_used() and is_used(given=(2, 1, 1, 2)) and is_used(chunks=3) and is_used(memory_limit_bytes=100)
    assert is_used(microbatches="auto") and is_used(microbatches="auto", max_microbatches=4)
    assert not is_used(stages=3) and not is_used(layers=7) and not is_used(microbatches=8)
    assert not is_used(given=[1, 2, 1, 2]) and not is_used(given=[3, 3]) and not is_used(given="even")
    assert not is_used(chunks=1) and not is_used(memory_limit_bytes=99)
    assert is_used(sets=2) and not is_used(sets=2, memory_limit_bytes=100)
    assert not is_used(microbatches="auto", max_microbatches=3)


def test_a_schedule_of_three_processes_is_used_again() -> None:
    planned = PlannedSchedule("interleaved", 2, [1, 1, 1, 1, 1, 2], 6, interleaved(3, 6))
    assert fits(planned, 3, [7], None, Settings(schedule="auto"), SearchSettings("auto", 6))


def test_a_schedule_of_several_lists_is_used_for_lists_of_the_same_lengths() -> None:
    planned = PlannedSchedule("1f1b", 1, [2, 1, 1, 3], 4, interleaved(2, 4), num_lists=2)
    assert PlannedSchedule.from_state(planned.state()) == planned

    def is_used(*lengths: int, given: Any = None) -> bool:
        return fits(planned, 2, lengths, given, Settings(schedule="auto"), SearchSettings("auto", 4))

    assert is_used(3, 4) and is_used(3, 4, given=[2, 1, 1, 3])
    assert not is_used(7) and not is_used(4, 3) and not is_used(3, 4, given="even")
    programs = with_schedule(Settings(schedule="auto"), planned).programs(2, num_lists=2)
    assert programs.placement.firsts == [0, 2]
    assert [len(row) for row in programs.actions_of_step(4)] == [16, 16] and len(programs.actions_of_step(3)[0]) == 12
