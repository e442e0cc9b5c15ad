"""``PipelineMonitor`` over several processes: its figures are consistent, and training is the same as without it."""

import csv
import io
import itertools
import json
import re
import statistics
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import run
from parity import WIDTH, Small, batches, compare, fit, on_cpus
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger
from sleep_layer import slept
from sleeping import Sleepy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from undisturbed import until_undisturbed

from benchmarks.messages import told
from strategies import Rebalance, RPCSequentialStrategy
from strategies.pipeline.executor.settings import Settings
from trainer import PipelineMonitor

STAGES = {"gpipe": 3, "1f1b": 3, "interleaved": 2, "zbv": 2}
"""The schedules, and the number of processes of each."""

MICROBATCHES, STEPS, EVERY, TRACED = 4, 9, 3, [4, 8]
REPORTED = [2, 5, 8]
MOST_ADDED_SECONDS = 100e-6


class WithCodeBefore(Small):
    """Runs a layer before the pipelined ones, which gets gradients from stage 0."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(self.before(x))


class Timed(PipelineMonitor):
    """Notes what its hooks take in steps that it does not record."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.added: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        begin = time.thread_time()
        super().on_train_batch_start(*args)
        self.seconds = time.thread_time() - begin

    def on_train_batch_end(self, *args: Any) -> None:
        reports = self._waiting is not None or self._current is not None
        begin = time.thread_time()
        super().on_train_batch_end(*args)
        if not reports:
            self.added.append(self.seconds + time.thread_time() - begin)


class NotesBar(Callback):
    """Notes what the progress bar shows."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def on_train_batch_end(self, trainer: Any, model: Any, *args: Any) -> None:
        self.shown.append(trainer.progress_bar_callback.get_metrics(trainer, model).get("use"))


def scalars(folder: Path) -> list[dict[str, float]]:
    """The rows of a CSV log that have scalars of the monitor."""
    with (folder / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "pipeline/step_ms" in row]


def trained(schedule: str, **arguments: Any) -> Any:
    strategy = RPCSequentialStrategy(microbatches=MICROBATCHES, schedule=schedule, balance="even")
    sizes = [8] * STEPS
    return fit(WithCodeBefore, strategy, STAGES[schedule], train=lambda: batches(sizes), max_epochs=1, **arguments)


def monitored() -> dict[str, dict[str, Any]]:
    found = {}
    for schedule in STAGES:
        monitor, bar = Timed(EVERY, TRACED), NotesBar()
        logger = CSVLogger(".", name=schedule)
        outcome = trained(schedule, callbacks=[monitor, bar], logger=logger, enable_progress_bar=True)
        compare(outcome, trained(schedule), 0.0)
        folder = Path(schedule, "version_0")
        found[schedule] = {
            "rows": scalars(folder),
            "files": {path.name: path.read_text() for path in (folder / "pipeline").iterdir()},
            "shown": bar.shown,
            "added": monitor.added,
            "after": "get_metrics" in vars(outcome.trainer.progress_bar_callback),
        }
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = run(monitored)
    return result


@pytest.fixture(params=STAGES)
def schedule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def traces(found: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    for step in TRACED:
        yield json.loads(found["files"][f"step-{step}.trace.json"])["traceEvents"]


def test_every_action_is_recorded_once_where_it_ran(found: dict[str, dict[str, Any]], schedule: str) -> None:
    programs = Settings(microbatches=MICROBATCHES, schedule=schedule).programs(STAGES[schedule])
    expected = [[repr(action) for action in row] for row in programs.actions_of_step(MICROBATCHES)]
    for events in traces(found[schedule]):
        rows: list[list[str]] = [[] for _ in expected]
        for event in events:
            if event["ph"] == "X" and re.fullmatch(r"\d+[FBIW]\d+", event["name"]):
                rows[event["pid"]].append(event["name"])
        assert rows == expected
        assert [e["pid"] for e in events if e["name"] == "optimizer"] == list(range(STAGES[schedule]))
        codes = {e["name"] for e in events if e["ph"] == "X" and e["name"].startswith(("b", "loss", "a"))}
        assert codes >= (
            {"loss3"} if schedule == "gpipe" else {f"{k}{m}" for k in ("b", "loss", "a") for m in range(4)}
        )


def test_clocks_are_ordered(found: dict[str, dict[str, Any]], schedule: str) -> None:
    for events in traces(found[schedule]):
        of_name = {event["name"]: event for event in events if event["ph"] == "X"}
        num_compared = 0
        for name, event in of_name.items():
            if (match := re.fullmatch(r"(\d+)([FBI])(\d+)", name)) is None:
                continue
            i, kind, m = int(match[1]), match[2], match[3]
            before = i - 1 if kind == "F" else i + 1
            sources = [
                of_name[key] for key in (f"{before}{k}{m}" for k in ("F" if kind == "F" else "BI")) if key in of_name
            ]
            for source in sources:
                assert source["ts"] + source["dur"] <= event["ts"], (name, source["name"])
                num_compared += source["pid"] != event["pid"]
        assert num_compared >= 2 * MICROBATCHES
        arrows = [[e["ts"] for e in events if e["ph"] == phase] for phase in "sf"]
        assert len(arrows[0]) == len(arrows[1]) == num_compared


def test_parts_of_a_step(found: dict[str, dict[str, Any]], schedule: str) -> None:
    rows = found[schedule]["rows"]
    assert [row["step"] for row in rows] == REPORTED
    processes = [*(f"stage_{i}" for i in range(STAGES[schedule] - 1)), "driver"]
    for row in rows:
        for process in processes:
            parts = {name: value for name, value in row.items() if name.startswith(f"pipeline/{process}/")}
            times = [value for name, value in parts.items() if name.endswith("_ms")]
            assert len(times) == 7 and min(times) >= 0 and sum(times) <= row["pipeline/step_ms"]
            for part in ("forward", "backward", "optimizer", "waiting"):
                assert parts[f"pipeline/{process}/{part}_ms"] > 0, (process, part)
            assert (parts[f"pipeline/{process}/weight_gradients_ms"] > 0) == (schedule == "zbv")
            assert (parts[f"pipeline/{process}/code_ms"] > 0) == (process == "driver")
            assert 30 < parts[f"pipeline/{process}/memory_mib"] < 4000
        uses = [row[f"pipeline/{process}/use"] for process in processes]
        assert row["pipeline/bubble"] == pytest.approx(1 - statistics.fmean(uses)) and 0 < min(uses) <= max(uses) <= 1
        assert 0 <= row["pipeline/bubble_predicted"] < 1


def test_pictures_and_progress_bar(found: dict[str, dict[str, Any]], schedule: str) -> None:
    own = found[schedule]
    pictures = {name: text for name, text in own["files"].items() if name.endswith(".svg")}
    assert set(pictures) == {f"step-{step}.svg" for step in REPORTED}
    for text in pictures.values():
        assert "measured: bubble" in text and "predicted: bubble" in text
        assert text.count("<title>0F0</title>") == 2
    # The third step is the first that is recorded, and is reported at the end of the fourth one.
    assert own["shown"][:3] == [None] * 3 and not own["after"]
    assert all(re.fullmatch(r"\d+(\|\d+)+%", shown) for shown in own["shown"][3:])


def test_a_step_that_is_not_recorded_costs_little(found: dict[str, dict[str, Any]]) -> None:
    added = [seconds for own in found.values() for seconds in own["added"]]
    assert len(added) >= 8 and statistics.median(added) < MOST_ADDED_SECONDS


def with_tensorboard() -> tuple[list[dict[str, float]], list[dict[str, float]], dict[int, bytes]]:
    """The scalars in a CSV log and those in an event file, by step, and the encoded pictures."""
    from pytorch_lightning.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(".", name="csv"), TensorBoardLogger(".", name="board")]
    trained("1f1b", callbacks=[PipelineMonitor(EVERY)], logger=loggers)
    board = EventAccumulator(str(Path("board", "version_0")), size_guidance={"scalars": 0, "images": 0}).Reload()
    rows = [{"step": float(step)} for step in REPORTED]
    for name in board.Tags()["scalars"]:
        if name.startswith("pipeline/"):
            for row, event in zip(rows, board.Scalars(name), strict=True):
                assert event.step == row["step"]
                row[name] = event.value
    images = {event.step: event.encoded_image_string for event in board.Images("pipeline/timetable")}
    return scalars(Path("csv", "version_0")), rows, images


def test_tensorboard_gets_scalars_and_pictures() -> None:
    pytest.importorskip("tensorboard")
    image = pytest.importorskip("PIL.Image")
    written, board, images = run(with_tensorboard)
    assert board == [pytest.approx(row, rel=1e-6) for row in written]  # event files hold float32
    assert list(images) == REPORTED
    for encoded in images.values():
        picture = image.open(io.BytesIO(encoded)).convert("RGB")
        assert picture.width > 300 and picture.height > 100
        assert len(picture.getcolors(2**24)) > 10  # actions of several kinds, and text


def records(path: Path) -> Iterator[Any]:
    """The records of an offline run's file, which is a log of LevelDB: pieces, in blocks that none of them crosses."""
    from wandb.proto.wandb_internal_pb2 import Record

    header, block_bytes, last_pieces = struct.Struct("<IHB"), 2**15, (1, 4)
    data, place, record = path.read_bytes(), header.size, b""  # the file's own header is as long as that of a piece
    while place < len(data):
        if (left := block_bytes - place % block_bytes) < header.size:
            place += left
            continue
        _, size, kind = header.unpack_from(data, place)
        place += header.size
        if place + size > len(data):  # it is being written
            return
        record += data[place : place + size]
        place += size
        if kind in last_pieces:
            yield Record.FromString(record)
            record = b""


def with_wandb() -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The scalars in a CSV log and those in the file of an offline run of W&B."""
    from pytorch_lightning.loggers import WandbLogger

    board = WandbLogger(save_dir="own", offline=True)
    trained("1f1b", callbacks=[PipelineMonitor(EVERY)], logger=[CSVLogger(".", name="csv"), board])
    board.experiment.finish()
    (path,) = Path("own", "wandb").glob("offline-run-*/run-*.wandb")
    rows = []
    deadline = time.monotonic() + 30  # W&B's own process may write for a moment after finish
    while all(record.WhichOneof("record_type") != "exit" for record in records(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for record in records(path):
        items = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        if "pipeline/step_ms" in items:
            row = {name: float(value) for name, value in items.items() if name.startswith("pipeline/")}
            rows.append({"step": float(items["trainer/global_step"]), **row})
    return scalars(Path("csv", "version_0")), rows


def test_wandb_gets_scalars() -> None:
    pytest.importorskip("wandb")
    # W&B's own process and its files may last until the process that has started them ends; Lightning sets WANDB_MODE.
    written, board = run(with_wandb, allow=("env", "port", "process", "thread", "tmp"))
    assert len(written) == len(REPORTED) and board == [pytest.approx(row) for row in written]


MARK, SLOW_STEP, SLOW_SECONDS = 100.0, 3, 0.03


class SleepsIfMarked(nn.Linear):
    """A layer that sleeps in the batch that is marked."""

    def forward(self, x: Tensor) -> Tensor:
        marks = x.detach().amax() >= MARK
        return super().forward(slept(x.clamp(max=1.0), SLOW_SECONDS if marks else 0.0, 0.0))


class Marked(Small):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module.insert(0, SleepsIfMarked(WIDTH, WIDTH))


class Moves(Callback):
    """Moves a layer at the start or the end of a batch; takes a while before."""

    def __init__(self, hook: str, number: int, balance: list[int]) -> None:
        self.hook, self.number, self.balance = hook, number, balance

    def _move(self, hook: str, trainer: Any, number: int) -> None:
        if (hook, number) == (self.hook, self.number):
            time.sleep(0.5)
            trainer.strategy.rebalance(self.balance)

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        self._move("start", trainer, batch_idx)

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._move("end", trainer, batch_idx)


def beside_rebalancing() -> list[dict[str, float]]:
    made = list(batches([8] * 8))
    made[SLOW_STEP][0][0::2] = MARK
    fit(
        Marked,
        RPCSequentialStrategy(microbatches=MICROBATCHES, balance=[4, 3], rebalance=Rebalance(threshold=0.99)),
        2,
        train=lambda: DataLoader(made, batch_size=None),
        max_epochs=1,
        callbacks=[Moves("end", 1, [3, 4]), PipelineMonitor(2), Moves("start", 5, [4, 3])],
        logger=CSVLogger(".", name="own"),
    )
    return scalars(Path("own", "version_0"))


@on_cpus
def test_records_are_those_of_their_step_beside_rebalancing() -> None:
    """The strategy records every batch too, and layers move at the end of one batch and at the start of another one."""

    def slow_steps(rows: list[dict[str, float]]) -> list[float]:
        least = 1e3 * MICROBATCHES * SLOW_SECONDS
        return [row["step"] for row in rows if row["pipeline/stage_0/forward_ms"] >= least]

    def measure() -> list[dict[str, float]]:
        rows: list[dict[str, float]] = run(beside_rebalancing)
        assert SLOW_STEP in slow_steps(rows)
        return rows

    def check_times(rows: list[dict[str, float]]) -> None:
        assert slow_steps(rows) == [SLOW_STEP]
        for row in rows:
            assert row["pipeline/step_ms"] < (500 if row["step"] != 1 else 5000), row

    rows = until_undisturbed(measure, check_times)
    assert [row["step"] for row in rows] == [1, 3, 5, 7]
    for row in rows:
        assert all(row[f"pipeline/{name}/forward_ms"] > 0 for name in ("stage_0", "driver")), row


WAITING = r"PipelineMonitor: most waiting is for stage 0 \(busy \d+% of the passes; the other one \d+%\)\. "
# What a layer takes beside its sleep may favour one layer more or less.
UNEVEN = WAITING + r"Balance \[[56], [65]\] instead of \[8, 3\]: passes predicted in \d+ ms"
SLOW = (
    WAITING
    + r"Stage 0 takes \d\.\d times as long for its layers as others would\. "
    + r"Balance \[[34], [78]\] instead of \[5, 6\]: passes predicted in \d+ ms"
)
UNBALANCED: dict[str, tuple[list[int], int | None, list[str]]] = {
    "uneven": ([8, 3], None, [UNEVEN]),
    "slow": ([5, 6], 0, [SLOW]),
    "even": ([5, 6], None, []),
}
"""The balance, the slow process, and what each line that is told matches."""


def told_of(name: str, number: Iterator[int]) -> list[str]:
    balance, slow, _ = UNBALANCED[name]
    strategy = RPCSequentialStrategy(microbatches=MICROBATCHES, schedule="1f1b", balance=balance)
    folder = f"{name}-{next(number)}"
    with told("PipelineMonitor:") as lines:
        fit(
            partial(Sleepy, slow),
            strategy,
            2,
            train=lambda: batches([8] * 5),
            max_epochs=1,
            callbacks=[PipelineMonitor(1, dirpath=folder)],
        )
    events = map(json.loads, Path(folder, "pipeline", "events.jsonl").read_text().splitlines())
    assert lines == [f"PipelineMonitor: {event['line']}" for event in events if event["event"] == "imbalance"]
    assert len(lines) <= 1, lines
    return lines


def unbalanced() -> None:
    number = itertools.count()
    for name, (_, _, expected) in UNBALANCED.items():

        def check(lines: list[str], name: str = name, expected: list[str] = expected) -> None:
            assert len(lines) == len(expected) and all(map(re.match, expected, lines)), (name, lines)

        for _ in range(1 if expected else 2):  # nothing is told twice, so that it is no chance
            until_undisturbed(partial(told_of, name, number), check)


@pytest.mark.alone
def test_imbalance_is_told_once() -> None:
    run(unbalanced)
