"""The picture of a timetable: well-formed, with a box for every step of every process, where the simulator has it."""

from xml.etree import ElementTree

import pytest

from strategies.pipeline.schedule.tables import SCHEDULES
from strategies.planning.picture import COLOURS, pixels, stacked_svg, svg
from strategies.planning.simulator import ActionCosts, DriverCosts, simulate

SPACE = "{http://www.w3.org/2000/svg}"


def steps_of(document: str) -> list[ElementTree.Element]:
    return [group for group in ElementTree.fromstring(document).iter(f"{SPACE}g") if group.get("class") == "step"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_box_for_every_step(name: str) -> None:
    named = SCHEDULES[name]
    costs = ActionCosts(0.01, 0.02, 0.01, 0.01, driver=DriverCosts(0.001, 0.002, 0.001))
    simulation = simulate(named.table(2, 4, named.chunks[1]), costs)
    steps = steps_of(svg(simulation, ["stage 0", "driver"], "<title> & more"))
    assert sorted(step.findtext(f"{SPACE}title", "") for step in steps) == sorted(map(repr, simulation.start))


def test_boxes_lie_where_the_simulator_has_them() -> None:
    simulation = simulate(SCHEDULES["1f1b"].table(2, 2, 1), ActionCosts(1.0, 2.0))
    boxes = {}
    for step in steps_of(svg(simulation, ["stage 0", "driver"], "")):
        box = step.find(f"{SPACE}rect")
        assert box is not None
        boxes[step.findtext(f"{SPACE}title")] = (float(box.get("x", "")), float(box.get("width", "")), box.get("y"))
    origin, unit, top = boxes["0F0"]
    assert boxes["1F0"][0] == pytest.approx(origin + unit, abs=0.02)
    assert boxes["1B0"][:2] == (pytest.approx(origin + 2 * unit, abs=0.02), pytest.approx(2 * unit, abs=0.02))
    assert boxes["0B1"][2] == top != boxes["1B0"][2]


def test_stacked_pictures_have_one_scale() -> None:
    short, long = (simulate(SCHEDULES["gpipe"].table(2, 2, 1), ActionCosts(seconds, 2.0)) for seconds in (1.0, 5.0))
    document = stacked_svg([("measured", short), ("predicted", long)], ["stage 0", "driver"])
    first, second = ElementTree.fromstring(document).findall(f"{SPACE}svg")
    assert float(second.get("y", "")) == float(first.get("height", ""))
    widths = [
        box.get("width", "") for part in (first, second) for box in part.iter(f"{SPACE}rect") if not box.get("class")
    ]
    assert 5 * float(widths[0]) == pytest.approx(float(widths[len(widths) // 2]), abs=0.05)


def test_pixels_show_the_boxes() -> None:
    simulation = simulate(SCHEDULES["1f1b"].table(2, 2, 1), ActionCosts(1.0, 2.0))
    image = pixels([("measured", simulation), ("predicted", simulation)], ["stage 0", "driver"])
    ((left, top),) = {
        (round(float(box.get("x", ""))), round(float(box.get("y", ""))))
        for step in steps_of(svg(simulation, ["stage 0", "driver"], ""))
        for box in step.findall(f"{SPACE}rect")
        if step.findtext(f"{SPACE}title") == "0F0"
    }
    colour = [int(COLOURS["F"][k : k + 2], 16) for k in (1, 3, 5)]
    half = image.shape[0] // 2
    assert image[top + 4, left + 4].tolist() == image[half + top + 4, left + 4].tolist() == colour
    assert image[top - 4, left + 4].tolist() == [255, 255, 255]
