"""``python -m trainer report``: what the page says, what it leaves out, and what it does with unfriendly files."""

import csv
import json
import math
import os
import random
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from strategies.pipeline.schedule.tables import SCHEDULES
from strategies.planning.picture import stacked_svg
from strategies.planning.simulator import ActionCosts, simulate
from trainer.cli import main
from trainer.report.charts import MOST_POINTS, Series, labels, line_chart, runs_of, thinned, ticks
from trainer.report.page import MOST_PICTURES

_ALONE = {"meta", "line", "rect", "circle", "polyline"}
"""Elements without an end tag, or that are written without content."""

HOSTILE = "<script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;"


class Page(HTMLParser):
    """Reads a page: texts by their element, attributes, and whether each element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.ids: dict[str, str] = {}
        self.titles: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._section = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "section":
            self._section = str(dict(attrs)["id"])
            self.ids[self._section] = ""
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "title":
            self.titles.append("")
        if tag not in _ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in _ALONE:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.text += data
        if self._section:
            self.ids[self._section] += data
        if "title" in self.open:
            self.titles[-1] += data
        if self.open and ("td" in self.open or "th" in self.open) and self.rows[-1]:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == name)


def write_metrics(folder: Path, columns: dict[str, list[Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def picture() -> str:
    table = SCHEDULES["1f1b"].table(2, 4, 1)
    return stacked_svg(
        [("step 19 measured", simulate(table, ActionCosts([0.01, 0.02], [0.02, 0.04])))], ["stage 0", "driver"]
    )


EVENTS: list[dict[str, Any]] = [
    {
        "time": 1_790_000_000.5,
        "event": "start",
        "epoch": 0,
        "step": 0,
        "schedule": "1f1b",
        "microbatches": 4,
        "balance": [2, 1],
        "processes": [
            {
                "name": "stage 0",
                "layers": [
                    {"place": 0, "name": "embedding", "class": "Embedding", "parameters": 24_576},
                    {"place": 1, "name": "block", "class": "Block", "parameters": 111_840},
                ],
            },
            {"name": "driver", "layers": [{"place": 2, "name": "head", "class": "Linear", "parameters": 12_416}]},
        ],
    },
    {"time": 1_790_000_010.5, "event": "checkpoint", "epoch": 0, "step": 10},
    {"time": 1_790_000_020.5, "event": "repair", "epoch": 0, "step": 10, "lost": "stage 0", "num_messages": 7},
    {"time": 1_790_003_700.5, "event": "error", "epoch": 1, "step": 20, "error": "KeyError: 'on purpose'"},
]

METRICS: dict[str, list[Any]] = {
    "epoch": [0, 0, 1, 1],
    "step": [4, 9, 14, 19],
    "train_loss": [4.5498418, 3.25, "", 2.125],
    "val_loss": ["", 3.5, "", "nan"],
    "lr": [0.001, 0.002, 0.003, 0.004],
    "pipeline/step_ms": ["", 437.25, "", 401.75],
    "pipeline/bubble": ["", 0.341, "", 0.251],
    "pipeline/bubble_predicted": ["", 0.359, "", 0.26],
    "pipeline/stage_0/forward_ms": ["", 113.5, "", 120.5],
    "pipeline/stage_0/waiting_ms": ["", 44, "", 46],
    "pipeline/stage_0/memory_mib": ["", 471, "", 472],
    "pipeline/driver/forward_ms": ["", 23, "", 25],
    "pipeline/driver/memory_mib": ["", 15_515, "", 15_616],
    "pipeline/driver/use": ["", 0.45, "", 0.55],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with everything that a page shows."""
    run = tmp_path / "version_0"
    write_metrics(run, METRICS)
    (run / "hparams.yaml").write_text("width: 96\n")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "config.yaml").write_text("seed_everything: 1\n")
    (run / "checkpoints" / "epoch=0-step=10.ckpt").write_bytes(bytes(3 * 2**20))
    (run / "pipeline").mkdir()
    (run / "pipeline" / "step-19.svg").write_text(picture())
    (run / "pipeline" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    return run


def report(folder: Path) -> Page:
    main(["report", str(folder)])
    return Page((folder / "report.html").read_text())


def refused(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, args)])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


def test_the_numbers_are_those_of_the_files(folder: Path) -> None:
    page = report(folder)
    for name in ("train_loss", "lr"):
        for step, value in zip(METRICS["step"], METRICS[name], strict=True):
            assert (f"{name}, step {step}: {value:.6g}" in page.titles) if value != "" else True
    assert "pipeline" not in " ".join(page.ids["other-values"].split())
    assert page.row("train_loss") == ["train_loss", "2.125", "2.125", "4.55"]
    assert page.row("val_loss; 1 not finite, first at step 19")[1:] == ["nan", "3.5", "3.5"]
    assert page.row("measured") == ["measured", "0.251", "0.251", "0.341"]
    assert page.row("predicted") == ["predicted", "0.26", "0.26", "0.359"]
    assert "stage 0, forward: 117 ms, mean of 2 steps" in page.titles
    assert "driver, step 19: 15616" in page.titles and "15,616 MiB" in page.text
    assert "419.5 ms" in page.text and "29.6%" in page.text  # medians
    assert "repair event" in page.text and "repair events" not in page.text
    assert "layer 1 (block): Block, 111,840 parameters" in page.titles
    assert page.row("stage 0")[1:] == ["0 Embedding, 1 Block", "136,416"]
    assert "schedule 1f1b, micro-batches 4" in page.ids["balance"]
    assert [row[0] for row in page.rows if row[0] in ("start", "checkpoint", "repair", "error")] == [
        event["event"] for event in EVENTS
    ]
    assert page.row("repair")[5] == "stage 0, messages sent again 7"
    assert page.row("error")[1:3] == ["20", "1"] and page.row("error")[4:] == ["1:01:40", "KeyError: 'on purpose'"]
    assert "repair, step 10" in page.titles
    assert page.row("epoch=0-step=10.ckpt") == ["epoch=0-step=10.ckpt", "3 MiB"]
    assert "seed_everything: 1" in page.ids["settings"] and "width: 96" in page.ids["settings"]
    assert "F0" in " ".join(page.titles) and "step 19 measured" in page.ids["timetables"]


def test_the_page_is_alone_and_runs_nothing(folder: Path) -> None:
    page = report(folder)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "a", "image", "use"}
    assert not [name for name, _ in page.attributes if name in ("src", "href", "xlink:href") or name.startswith("on")]
    assert "default-src 'none'; style-src 'unsafe-inline'" in dict(page.attributes)["content"]
    assert "url(" not in (folder / "report.html").read_text()


def test_what_files_contain_is_escaped(folder: Path) -> None:
    write_metrics(folder, {**METRICS, f"{HOSTILE}_loss": [1, 2, 3, 4], HOSTILE: [1, 2, 3, 4]})
    (folder / "hparams.yaml").write_text(f"name: {HOSTILE}\n</pre>")
    (folder / "checkpoints" / "<b>.ckpt").write_bytes(b"")
    (folder / "pipeline" / "step-19.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10" onload="alert(1)"><script>alert(2)</script>'
        '<rect x="0" fill="url(http://example.org)" onclick="alert(3)"/><foreignObject><p>hidden</p></foreignObject>'
        "<text>&lt;b&gt;</text></svg>"
    )
    start = json.loads(json.dumps(EVENTS[0]))
    start["schedule"] = start["processes"][0]["layers"][0]["name"] = start["processes"][0]["layers"][0]["class"] = (
        HOSTILE
    )
    lines = [start, {**EVENTS[3], "event": HOSTILE, "epoch": HOSTILE, "error": HOSTILE}]
    (folder / "pipeline" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    test_the_page_is_alone_and_runs_nothing(folder)
    page = report(folder)
    assert page.text.count(HOSTILE) >= 8
    assert "hidden" not in page.text and "alert(2)" not in page.text and "<b>" in page.ids["timetables"]


def test_a_picture_that_cannot_be_read(folder: Path) -> None:
    path = folder / "pipeline" / "step-19.svg"
    for text, why in {
        "<svg>": "no element found",
        "<html/>": "it is no SVG",
        '<!DOCTYPE svg [<!ENTITY a "b">]><svg>&a;</svg>': "it declares entities",
    }.items():
        path.write_text(text)
        assert f"step-19.svg could not be read: {why}" in report(folder).text


def test_few_of_many_pictures(folder: Path) -> None:
    for step in range(39, 1000, 20):
        shutil.copy(folder / "pipeline" / "step-19.svg", folder / "pipeline" / f"step-{step}.svg")
    shown = [
        int(step)
        for step in re.findall("<h3>step (\\d+)</h3>", report(folder) and (folder / "report.html").read_text())
    ]
    assert len(shown) == MOST_PICTURES and shown == sorted(shown, reverse=True) and shown[0] == 999
    assert "12 of the 50 pictures" in report(folder).text


def test_what_is_missing_is_told_with_the_way_to_it(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", {"step": [1, 2], "accuracy": [0.5, 0.75]})
    page = report(tmp_path / "run")
    for section in ("balance", "step-times", "timetables", "memory", "events"):
        assert "Add trainer.PipelineMonitor to the callbacks" in page.ids[section]
    assert "A ModelCheckpoint without dirpath writes them there." in page.ids["events"]
    assert 'self.log("train_loss", loss)' in page.ids["losses"]
    assert "save_hyperparameters()" in page.ids["settings"]
    assert page.row("accuracy") == ["accuracy", "0.75", "0.5", "0.75"]


def test_a_run_without_metrics(folder: Path) -> None:
    (folder / "metrics.csv").unlink()
    page = report(folder)
    assert "There are no metrics in the folder. A CSVLogger writes them." in page.ids["losses"]
    assert "[2, 1]" in page.ids["balance"] and "step 19 measured" in page.ids["timetables"]
    assert "has a PipelineMonitor, but no logger that keeps what it measures" in page.ids["step-times"]


def test_a_run_that_was_shorter_than_the_interval_of_its_monitor(folder: Path) -> None:
    (folder / "pipeline" / "step-19.svg").unlink()
    assert "they have been removed" in report(folder).ids["timetables"]
    write_metrics(folder, {"step": [1, 2], "accuracy": [0.5, 0.75]})
    page = report(folder)
    for section in ("step-times", "timetables", "memory"):
        assert "has recorded no step: there were fewer than every_n_steps" in page.ids[section]
        assert "Add trainer.PipelineMonitor" not in page.ids[section]


def test_a_row_that_is_half_written(folder: Path) -> None:
    with (folder / "metrics.csv").open("a") as file:
        file.write("2")
    page = report(folder)
    assert "Rows of metrics.csv without the number of a step: 1, the first is row 5." in page.text
    assert page.row("train_loss")[1] == "2.125"


def test_events_of_any_name(folder: Path) -> None:
    """An event of a later version is in the table with all that it tells; a new balance is the one that is drawn."""
    processes = json.loads(json.dumps(EVENTS[0]["processes"]))
    processes[1]["layers"].insert(0, processes[0]["layers"].pop())
    moved = {"time": 1_790_003_650.5, "event": "rebalance", "epoch": 1, "step": 15, "line": "1 layer moved"}
    with (folder / "pipeline" / "events.jsonl").open("a") as file:
        file.write(json.dumps({**moved, "balance": [1, 2], "processes": processes}))
    page = report(folder)
    assert page.row("rebalance")[:3] == ["rebalance", "15", "1"]
    assert page.row("rebalance")[5] == "1 layer moved, balance [1, 2]"
    assert page.row("start")[5] == "schedule 1f1b, micro-batches 4, balance [2, 1]"
    assert "Balance [1, 2]" in page.ids["balance"] and "schedule 1f1b, micro-batches 4" in page.ids["balance"]
    assert page.row("driver")[1:] == ["1 Block, 2 Linear", "124,256"]
    assert {"repair, step 10", "rebalance, step 15"} <= set(page.titles)
    assert not [title for title in page.titles if title.startswith(("start, step", "checkpoint, step", "error, step"))]


def test_layers_of_one_class_are_told_together(folder: Path) -> None:
    layers = [{"place": i, "name": str(i), "class": "Block", "parameters": 4_000_000} for i in (0, 1, 2, 6, 7)]
    layers.append({"place": 8, "name": "8", "class": "Head", "parameters": 5})
    start = {**EVENTS[0], "processes": [{"name": "driver", "layers": layers}]}
    (folder / "pipeline" / "events.jsonl").write_text(json.dumps(start))
    page = report(folder)
    assert page.row("driver")[1:] == ["0 to 2 Block, 6 to 7 Block, 8 Head", "20,000,005"]
    assert "million parameters" in page.ids["balance"]


def test_large_steps_keep_their_digits(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": [1_234_567, 1_234_568], "train_loss": [1, math.inf]})
    page = report(tmp_path)
    assert "train_loss, step 1234567: 1" in page.titles
    assert page.row("train_loss; 1 not finite, first at step 1234568")


def test_lines_of_events_that_cannot_be_read_are_told(folder: Path) -> None:
    wrong = ['{"event": "st', "[]", '{"event": 1, "time": 1, "step": 1}', '{"event": "end", "time": "x", "step": 1}']
    wrong.append(json.dumps({**EVENTS[0], "processes": [{"name": "driver", "layers": [{}]}]}))
    wrong.append(json.dumps({**EVENTS[0], "processes": [{"name": "stage one", "layers": []}]}))
    wrong.append(json.dumps({**EVENTS[0], "processes": []}))
    wrong += [json.dumps({**EVENTS[1], key: value}) for key in ("time", "step") for value in (1e300, math.nan, 10**400)]
    with (folder / "pipeline" / "events.jsonl").open("a") as file:
        file.write("\n".join(wrong))
    page = report(folder)
    for number in (*range(5, 15), 16, 17):  # step 1e300 can be shown
        assert f"Line {number} of pipeline/events.jsonl could not be read." in page.text
    assert "[2, 1]" in page.ids["balance"]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, tmp_path / "none") == f"there is no folder {tmp_path / 'none'}"
    write_metrics(tmp_path / "gpt" / "version_0", {"step": [1], "loss": [1]})
    file = tmp_path / "gpt" / "version_0" / "metrics.csv"
    assert refused(capsys, file) == f"{file} is a file; give the folder of the run, such as {file.parent}"
    assert refused(capsys, tmp_path / "gpt").endswith(f"; {file.parent} has some")
    assert refused(capsys, tmp_path).endswith(f"; {file.parent} has some")
    write_metrics(newest := tmp_path / "gpt" / "version_10", {"step": [1], "loss": [1]})
    os.utime(file, (1, 1))
    assert refused(capsys, tmp_path / "gpt").endswith(f"; {newest} has some, the newest near it")
    shutil.rmtree(newest)
    (file.parent / "checkpoints").mkdir()
    assert refused(capsys, file.parent / "checkpoints").endswith(f"; {file.parent} has some")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert refused(capsys, tmp_path / "a" / "b").endswith(": log with a CSVLogger or a TensorBoardLogger")
    assert "has no values yet" in (write_metrics(file.parent, {"step": [], "loss": []}) or refused(capsys, file.parent))
    file.write_text("a,b\n1,2\n")
    assert "no number in the column 'step' of any row" in refused(capsys, file.parent)
    file.write_bytes(b"step,a\n\xff\xfe\x00,2\n")
    assert f"{file} is not a CSV file" in refused(capsys, file.parent)
    assert "unrecognized arguments: --out" in refused(capsys, file.parent, "--out", "x")
    assert "usage: python -m trainer report RUN_FOLDER" in refused(capsys)
    write_metrics(file.parent, {"step": [1], "loss": [1]})
    assert "No such file or directory" in refused(capsys, file.parent, "--output", tmp_path / "none" / "x.html")
    assert not (file.parent / "report.html").exists()


def test_output(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert Page((tmp_path / "page.html").read_text()).row("lr")[1] == "0.004"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "version_0"]
    assert not (folder / "report.html").exists()


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    writer = SummaryWriter(str(tmp_path))
    for step in range(20):
        writer.add_scalar("train_loss", 1 / (step + 1), step)
        writer.add_scalar("epoch", 0, step)
    writer.close()
    page = report(tmp_path)
    assert page.row("train_loss") == ["train_loss", "0.05", "0.05", "1"] and "train_loss, step 4: 0.2" in page.titles
    assert not [row for row in page.rows if row[0] == "epoch"]
    write_metrics(tmp_path, {"step": [1], "train_loss": [7]})  # a CSVLogger in the same folder has more digits
    assert report(tmp_path).row("train_loss")[1] == "7"
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    assert "were not read: pip install tensorboard." in report(tmp_path).text
    (tmp_path / "metrics.csv").unlink()
    capsys.readouterr()
    assert "tensorboard is not installed" in refused(capsys, tmp_path)


def test_thinning_keeps_ends_and_extremes() -> None:
    numbers = random.Random(1)
    curve = [(float(step), numbers.gauss(0, 1)) for step in range(12_345)]
    curve[7000] = (7000.0, 50.0)
    curve[9000] = (9000.0, -50.0)
    curve[11_000] = (11_000.0, math.nan)
    thin = thinned(curve)
    assert len(thin) <= MOST_POINTS and len(thin) > MOST_POINTS / 2
    assert [step for step, _ in thin] == sorted({step for step, _ in thin})
    assert {curve[0], curve[-1], (7000.0, 50.0), (9000.0, -50.0)} <= set(thin)
    assert sum(math.isnan(value) for _, value in thin) == 1
    assert thinned(curve[:MOST_POINTS]) == curve[:MOST_POINTS]
    picture = line_chart([Series("loss", curve, 0)], "losses")
    assert sum(line.count(",") for line in re.findall('points="([^"]*)"', picture)) <= MOST_POINTS
    assert len(picture) < 60_000


def test_curves_are_interrupted_where_steps_go_back_and_values_are_not_finite() -> None:
    curve = [(1.0, 1.0), (2.0, math.inf), (3.0, 3.0), (4.0, 4.0), (3.0, 3.0), (3.0, 2.0)]
    assert runs_of(curve) == [[(1.0, 1.0)], [(3.0, 3.0), (4.0, 4.0)], [(3.0, 3.0), (3.0, 2.0)]]


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (2.43, 4.55), (0.0, 0.0), (-3.0, 1e9), (1e-12, 3e-12), (5.0, 5.0), (2.42, 2.4204)]
)
def test_ticks_enclose_the_values(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 3 <= len(found) <= 8 and found == sorted(set(found))
    assert len(set(labels(found))) == len(found)


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize(
    "curve",
    [
        [(0.0, 1.0), (1.0, 0.9999999999999999)],
        [(0.0, 0.1), (1.0, 0.1 * (1 + 1e-13))],
        [(1e16, 1.0), (1e16, 2.0)],
        [(1e16, 1.0), (1e16 + 2, 2.0)],
        [(0.0, -1.7e308), (1.0, 1.7e308)],
        [(0.0, 1.7e308), (1.0, 1.7e308)],
        [(-1.7e308, 1.0), (1.7e308, 2.0)],
        [(0.0, 0.0), (1.0, 5e-324)],
    ],
)
def test_charts_of_values_that_floats_hardly_tell_apart(curve: list[tuple[float, float]], from_zero: bool) -> None:
    """Every number in the picture is finite, and every point is within it."""
    picture = line_chart([Series("loss", curve, 0)], "losses", from_zero=from_zero)
    (line,) = re.findall(r'points="(.*?)"', picture)
    places = [tuple(map(float, place.split(","))) for place in line.split()]
    assert len(places) == 2 and all(0 <= x <= 500 and 0 <= y <= 240 for x, y in places)
    assert "nan" not in picture and "inf" not in picture


def test_labels_have_the_digits_that_tell_them_apart() -> None:
    assert labels([0, 0.5, 1]) == ["0", "0.5", "1"] and labels([0, 50_000, 100_000]) == ["0", "50,000", "100,000"]
    assert labels([2.42, 2.4201, 2.4202]) == ["2.42", "2.4201", "2.4202"]
    assert labels([15_000, 15_000.5]) == ["15,000", "15,000.5"]


def test_a_single_value_is_a_dot() -> None:
    picture = line_chart([Series("loss", [(5.0, 1.0)], 0)], "losses")
    assert '<circle class="point c0"' in picture
    assert "point" not in line_chart([Series("loss", [(5.0, 1.0), (6.0, 1.0)], 0)], "losses").replace("points=", "")


def test_charts_fit_a_phone_without_scrolling(folder: Path) -> None:
    """Each wide chart has a second form; only timetables and the table of events are wider than the page."""
    attributes = report(folder).attributes
    classes = [value for name, value in attributes if name == "class"]
    assert classes.count("broad") == classes.count("narrow") == 4  # balance, losses, step times, parts of a step
    assert sum(value.startswith("0 0 1000 ") for name, value in attributes if name == "viewbox") == 4
    assert {value for value in classes if "scroll" in value} == {"gantt scroll", "card scroll tall"}
