"""A schedule that a search has found, as a function and as plain data."""

import json

import pytest

from strategies.pipeline.schedule.custom import custom_table
from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.pipeline.schedule.program import check_order
from strategies.planning.search import SEARCHABLE, SEARCHED, LayerCosts, ModelCosts, search
from strategies.planning.simulator import simulate

COSTS = ModelCosts([LayerCosts(1, 1, 1.5, backward=2)] * 7 + [LayerCosts(3, 3, 3)])


@pytest.mark.parametrize("name", [name for name in SEARCHABLE if name != SEARCHED])
def test_named_schedules(name: str) -> None:
    plan = search(COSTS, 2, [6], schedules=[name], effort=100_000)
    planned = PlannedSchedule.from_state(json.loads(json.dumps(plan.planned_schedule().state())))
    assert custom_table(planned, 2, 6) == plan.table
    assert planned.name == name and repr(planned) == "'auto'"
    for number in (1, 2, 5, 7):  # the last batch of an epoch has fewer rows
        assert simulate(custom_table(planned, 2, number)).placement == plan.placement


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_searched_orders(chunks: int) -> None:
    plan = search(COSTS, 2, [6], max_chunks=chunks, effort=400_000)
    assert plan.schedule == SEARCHED
    planned = plan.planned_schedule()
    assert custom_table(planned, 2, 6) == plan.table
    check_order(plan.table)
    assert simulate(custom_table(planned, 2, 4)).placement == plan.placement
    kinds = [{action.kind for row in custom_table(planned, 2, m) for action in row} for m in (4, 6)]
    assert kinds[0] - {"B"} == kinds[1] - {"B"}  # both split backward passes, or neither does
