"""``trainer.plan``: what is measured, what is refused, and that the model is left unchanged."""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from sleep_layer import READ_SECONDS, Sleep, only_sleep_takes_time, slept
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from strategies import Recovery, RPCSequentialStrategy, Schedule
from strategies.launch import workers
from strategies.lightning import partitioning
from strategies.optim.costs import StepCost
from strategies.pipeline.schedule.operations import UserCode
from strategies.planning import plan
from strategies.planning.plan import PlanTable
from strategies.sharding.single_rank import GroupSeconds, LinearSeconds
from trainer import Trainer
from trainer.plan_report import strategy_block, why_best, yaml_of

WIDTH, BLOCKS, ROWS, FLOAT = 8, 4, 16, 4
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * FLOAT


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BUDGET_SECONDS", 0.01)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(3 * ROWS, WIDTH), torch.zeros(3 * ROWS)), batch_size=ROWS)


class Model(pl.LightningModule):
    """Layers and a head outside; counts the steps."""

    def __init__(self, example: bool = False) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.rows: list[int] = []
        if example:
            self.example_input_array = torch.rand(ROWS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.sequential_module(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.rows.append(len(x))
        loss = (self(x).mean(1) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)]


class Late(Model):
    """Builds its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        self.example_input_array = torch.rand(ROWS, WIDTH)

    def configure_model(self) -> None:
        if not hasattr(self, "sequential_module"):
            self.sequential_module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Llama(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        shape = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4}
        self.net = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class TwoLists(Model):
    """A second list, whose blocks all read the output of the first."""

    def __init__(self, example: bool = False) -> None:
        super().__init__(example)
        del self.sequential_module
        self.encoder, self.decoder = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number)) for number in (BLOCKS, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = block(memory)
        memory = slept(memory.tanh().exp(), 0.02, 0.03)
        for block in self.decoder:
            x = block(x + memory)
        return self.head(x)


def trainer_with(devices: int = 2, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=devices, strategy=RPCSequentialStrategy(**settings), logger=False, max_epochs=1
    )


def planned(model: pl.LightningModule, data: Any = None, *, settings: Any = None, **choices: Any) -> PlanTable:
    settings = settings or {}
    with redirect_stdout(io.StringIO()):
        return trainer_with(2 * settings.get("tensor_parallel_size", 1), **settings).plan(model, data, **choices)


@pytest.fixture(scope="module")
def table() -> Iterator[PlanTable]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BUDGET_SECONDS", 0.01)
        yield planned(Model(), Data(), microbatches=[2, 4], memory_limit_bytes=10**6)


def test_rows_for_everything(table: PlanTable) -> None:
    found = {(row.stages, row.microbatches, row.schedule) for row in table.rows}
    names = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half")
    assert found == {(2, number, name) for number in (2, 4) for name in names} and len(table.rows) == len(found)
    for row in table.rows:
        assert row.seconds is not None and row.seconds > 0 and row.idle is not None and 0 <= row.idle < 1
        assert row.rows == ROWS and sum(row.balance) == BLOCKS
        assert len(row.balance) == row.stages * row.chunks_per_stage
        *_, driver = row.processes
        assert sum(len(process.layers) for process in row.processes) == BLOCKS
        for process in row.processes:
            number = len(process.layers) + (process is driver)
            assert process.need.parameters == process.need.gradients == number * LAYER_BYTES
            assert process.need.states == 2 * number * LAYER_BYTES
            assert process.activations > 0 and process.step.seconds > 0
    assert table.best.seconds == min(row.seconds or 0.0 for row in table.rows)
    assert table.measured_on == f"training_step on a batch of {ROWS} rows" and table.notes == []


def test_the_model_is_left_unchanged() -> None:
    model, trainer = Model(), trainer_with()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    with redirect_stdout(io.StringIO()):
        trainer.plan(model, Data(), microbatches=2, schedules="1f1b")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert "log" not in vars(model) and model._trainer is None
    assert trainer.lightning_module is None and trainer.strategy.optimizers == []


class Teacher(Model):
    """Follows the head in each step, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for own, student in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            own.data.mul_(0.9).add_(student.data, alpha=0.1)
        return super().training_step(batch, batch_idx) + (self.teacher(batch[0]) - self(batch[0])).square().mean()


def test_a_training_step_may_change_parameters_in_place() -> None:
    model = Teacher()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    planned(model, Data(), microbatches=2, schedules="1f1b")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_loader_keeps_its_order() -> None:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(3 * ROWS, WIDTH), torch.zeros(3 * ROWS))
    before = generator.get_state()
    planned(Model(), DataLoader(data, batch_size=ROWS, shuffle=True, generator=generator), microbatches=2)
    assert torch.equal(generator.get_state(), before)


def test_the_microbatches_of_a_sweep_divide_the_rows() -> None:
    rows = planned(Late(), schedules="gpipe").rows
    assert [row.microbatches for row in rows] == [2, 4, 8, 16]


def test_the_settings_of_the_strategy_hold() -> None:
    settings = {"balance": [3, 1], "schedule": Schedule("zb-h1", chunks=1), "checkpoint": "never"}
    table = planned(Model(), Data(), settings=settings, microbatches=4)
    balances = {row.schedule: row.balance for row in table.rows}
    assert balances["1f1b"] == balances["gpipe"] == balances["zb-h1"] == [3, 1]
    assert len(balances["zbv"]) == 4  # the given one is for two chunks
    even = planned(Model(), Data(), settings={"balance": "even"}, microbatches=4)
    assert {tuple(row.balance) for row in even.rows} == {(2, 2), (1, 1, 1, 1)}
    checkpointed = planned(Model(), Data(), microbatches=4, schedules="gpipe").best
    kept = next(row for row in table.rows if row.schedule == "gpipe")
    assert checkpointed.processes[0].activations < kept.processes[0].activations


def test_schedules_with_too_many_chunks_are_left_out() -> None:
    table = planned(Model(), Data(), stages=[3], microbatches=2)
    assert {row.schedule for row in table.rows} == {"gpipe", "1f1b", "zb-h1"}
    assert table.notes[0] == ("interleaved with 3 stages is left out: its 6 chunks need a layer each, but there are 4.")


def test_rows_of_similar_length_are_not_counted() -> None:
    settings = {"schedule": "1f1b", "microbatch_tokens": 64}
    (note,) = planned(Model(), Data(), settings=settings, microbatches=2, schedules="1f1b").notes
    assert note.startswith("all rows assume micro-batches of equally many rows") and "microbatch_tokens=64" in note


def test_several_lists_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    only_sleep_takes_time(monkeypatch)
    printed = io.StringIO()
    with redirect_stdout(printed):
        table = trainer_with().plan(TwoLists(), Data(), microbatches=[2, 4])
    assert "Note: zbv and v-half are left out, because" in printed.getvalue()
    assert {row.schedule for row in table.rows} == {"gpipe", "1f1b", "zb-h1"}
    left_out = "interleaved with 2 stages is left out: its 4 chunks need a layer each, but there are 4 and 3."
    assert table.notes == ["zbv and v-half are left out, because they are for one list of layers", left_out]
    assert table.path == ["encoder", "decoder"] and table.layers == "7 layers: Linear"
    for row in table.rows:
        assert sum(row.balance[:2]) == BLOCKS and sum(row.balance[2:]) == 3
        worker, driver = row.processes
        first, second = row.balance[0], row.balance[2]
        assert worker.layers == [*range(first), *range(BLOCKS, BLOCKS + second)]
        assert worker.need.parameters == (first + second) * LAYER_BYTES
        assert driver.need.parameters == (7 - first - second + 1) * LAYER_BYTES
        assert row.simulation is not None and row.seconds is not None
        code = {step for step in row.simulation.end if isinstance(step, UserCode) and step.stage == 2}
        assert len(code) == (2 if row.schedule == "gpipe" else 2 * row.microbatches)
        times = {
            part: [row.simulation.end[s] - row.simulation.start[s] for s in code if s.part == part] for part in "ba"
        }
        reads = 20 * READ_SECONDS * row.microbatches
        assert sum(times["b"]) == pytest.approx(0.02 * row.microbatches, abs=reads)
        assert sum(times["a"]) == pytest.approx(0.03 * row.microbatches, abs=reads)
        given = strategy_block(table, row)["init_args"]
        assert given["module"] == ["encoder", "decoder"]
        strategy = RPCSequentialStrategy(**as_the_command_line_does(given))
        assert strategy.options.settings.programs(2, num_lists=2).placement.num_stages == len(row.balance)
    even = planned(TwoLists(), Data(), settings={"balance": "even"}, microbatches=2, schedules="1f1b")
    assert even.best.balance == [2, 2, 2, 1]
    given = planned(TwoLists(), Data(), settings={"balance": [1, 3, 1, 2]}, microbatches=2, schedules="1f1b")
    assert given.best.balance == [1, 3, 1, 2]


@pytest.mark.parametrize(
    ("settings", "choices", "message"),
    [
        ({}, {"schedules": "zbv"}, "schedule='zbv' is for one list of layers, but 2 lists .* 'gpipe', '1f1b', 'interl"),
        (
            {"module": ["encoder", "decoder"]},
            {"stages": 4},
            "stages=4, but 'encoder' and 'decoder' have 4 and 3 layers, and each stage needs one of each",
        ),
        ({"balance": [3, 2, 1, 1]}, {}, r"balance \[3, 2, 1, 1\] has \[3, 2\] for list 0 of 2, which has 4 layers"),
        ({"module": ["decoder", "encoder"]}, {}, "lists of layers are called in the order 1, 0, where 0 is the first"),
    ],
)
def test_refusals_of_several_lists(settings: dict[str, Any], choices: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        planned(TwoLists(), Data(), settings=settings, microbatches=2, **choices)


def test_a_model_of_hugging_face_needs_no_input() -> None:
    table = planned(Llama(), microbatches=[2], schedules=["1f1b", "gpipe"])
    assert sum(table.best.balance) == 4 and table.best.rows == 4
    assert table.measured_on == "an input made from the configuration, with 2 rows for each micro-batch"


def test_without_memory_there_are_bytes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        table = planned(Late(), microbatches=[4], schedules=["gpipe", "zbv"])
    assert all(row.seconds is None for row in table.rows)
    assert {sum(process.need.parameters for process in row.processes) for row in table.rows} == {5 * LAYER_BYTES}
    assert "there are only bytes and no times, because" in table.notes[-1]
    real = planned(Late(), microbatches=[4], schedules=["gpipe"])
    assert real.best.seconds is not None
    monkeypatch.setattr(plan, "room_on_host", lambda: type("Room", (), {"size_bytes": 1000}))
    late = Late()
    large = planned(late, microbatches=[4], schedules=["gpipe"], stages=2)
    assert large.best.seconds is None and not hasattr(late, "sequential_module")
    assert [process.activations for process in large.best.processes] == [
        process.activations for process in next(row for row in table.rows if row.schedule == "gpipe").processes
    ]


class Unusual(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise RuntimeError("needs a running loop")


def test_a_training_step_that_cannot_be_measured() -> None:
    reason = r"Unusual\.training_step cannot be measured on its own \(RuntimeError: needs a running loop\)"
    with pytest.raises(MisconfigurationException, match=rf"{reason}\. Set `self\.example_input_array`"):
        planned(Unusual(), Data(), microbatches=2)
    model = Unusual(example=True)
    model.example_input_array = torch.rand(4, WIDTH)
    table = planned(model, Data(), schedules="1f1b")
    assert re.match(f"{reason}, so forward is", table.notes[0])
    assert {(row.microbatches, row.rows) for row in table.rows} == {(2, 4), (4, 4)}  # those of the example


class Manual(Model):
    def __init__(self) -> None:
        super().__init__(example=True)
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"schedules": ["1f2b"]}, r"Unknown schedule '1f2b'; did you mean '1f1b'\?"),
        ({"schedules": "auto"}, "schedules names 'auto', but a plan compares the schedules from which .* gpipe, 1f1b"),
        ({"schedules": []}, "schedules is empty"),
        ({"stages": 5}, "stages=5, but 'sequential_module' has 4 layers"),
        ({"stages": 1}, "stages must be whole numbers of at least 2, got 1"),
        ({"stages": []}, r"stages must be whole numbers of at least 2, got \[\]"),
        ({"microbatches": 0}, "microbatches must be whole numbers of at least 1, got 0"),
        ({"microbatches": [4, 32]}, "microbatches=32, but the batch has 16 rows"),
        ({"memory_limit_bytes": -1}, "memory_limit_bytes must be whole numbers of at least 1, got -1"),
        ({"stages": 3, "schedules": "zbv"}, "has 4 layers, too few for zbv with 3 stages"),
        ({"json": "no/such/folder.json"}, r"json='no/such/folder.json': there is no folder"),
        ({"picture": "picture.png"}, "picture='picture.png' must end with '.svg'"),
    ],
)
def test_refusals(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        planned(Model(), Data(), **choices)


def test_refusals_of_models() -> None:
    with pytest.raises(MisconfigurationException, match="A plan measures the layers, which needs an input: give a"):
        planned(Model())
    with pytest.raises(MisconfigurationException, match=r"schedule='1f1b' runs training_step once per micro-batch"):
        planned(Manual(), Data(), schedules="1f1b")
    with pytest.raises(MisconfigurationException, match=r"balance sum: 2 does not match .* length: 4"):
        planned(Model(), Data(), settings={"balance": [1, 1]})
    other = Trainer(accelerator="cpu", devices=1, logger=False)
    with pytest.raises(MisconfigurationException, match=r"is SingleDeviceStrategy\. Set strategy='rpc_seq"):
        other.plan(Model(), Data())


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    table = trainer_with().plan(
        Model(), Data(), microbatches=4, schedules=["1f1b", "zbv"], json=str(figures), picture=str(picture)
    )
    found = json.loads(figures.read_text())
    assert [row["schedule"] for row in found["rows"]] == ["1f1b", "zbv"]
    assert found["rows"][found["best"]]["step_seconds"] == table.best.seconds
    assert found["strategy"] == strategy_block(table, table.best)
    names = [process["name"] for process in found["rows"][0]["processes"]]
    assert names == ["stage 0", "driver"]
    assert found["rows"][0]["processes"][1]["parameters_bytes"] == table.rows[0].processes[1].need.parameters
    space = "{http://www.w3.org/2000/svg}"
    boxes = [each for each in ElementTree.parse(picture).iter(f"{space}g") if each.get("class") == "step"]
    assert table.best.simulation is not None
    assert len(boxes) == len(table.best.simulation.start)
    said = capsys.readouterr().out
    assert "does not fit" not in said and "\nBest: " in said and yaml_of(table, table.best) in said


def test_what_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    trainer_with().plan(Model(), Data(), microbatches=4, schedules=["1f1b"], memory_limit_bytes=100)
    said = capsys.readouterr().out
    assert said.count("does not fit") == 2
    assert "the smallest peak, but nothing fits into the limit of 0.0 MiB" in said


def as_the_command_line_does(arguments: dict[str, Any]) -> dict[str, Any]:
    schedule = arguments["schedule"]
    return {**arguments, "schedule": Schedule(**schedule) if isinstance(schedule, dict) else schedule}


@pytest.mark.parametrize("place", range(12))
def test_the_yaml_gives_the_row(table: PlanTable, place: int) -> None:
    row = table.rows[place]
    arguments = yaml.safe_load(yaml_of(table, row))["trainer"]["strategy"]["init_args"]
    assert f"balance: {row.balance}\n" in yaml_of(table, row)
    strategy = RPCSequentialStrategy(**as_the_command_line_does(arguments))
    tables = strategy.options.settings.programs(row.stages)
    assert strategy.balance == row.balance and strategy.options.settings.microbatches == row.microbatches
    assert tables.placement.num_stages == row.stages * row.chunks_per_stage
    assert strategy.options.settings.schedule == row.schedule


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": Schedule("auto", max_microbatches=8, memory_limit_bytes=10**9), "microbatches": "auto"},
        {"schedule": Schedule("interleaved", chunks=2)},
        {"schedule": "1f1b", "loss_weight": "tokens"},
        {"schedule": Schedule(pipelined_backward=False)},
    ],
)
def test_the_yaml_can_follow_the_configuration_that_was_planned(given: dict[str, Any]) -> None:
    table = planned(Model(), Data(), settings=given, microbatches=2)
    assert ("gpipe" in {row.schedule for row in table.rows}) == ("loss_weight" not in given)
    for row in table.rows:
        merged = RPCSequentialStrategy(**{**given, **as_the_command_line_does(strategy_block(table, row)["init_args"])})
        assert merged.options.settings.schedule == row.schedule and merged.balance == row.balance
        tables = merged.options.settings.programs(row.stages)
        assert tables.placement.num_stages == row.stages * row.chunks_per_stage


class Usual(Model):
    """What a step may do under Lightning: call arguments, optimizers, loggers, transfers, attributes of ``setup``."""

    def setup(self, stage: str) -> None:
        self.scale = 2.0

    def configure_model(self) -> None:
        if not hasattr(self, "tail"):
            rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]  # which the meta device cannot give
            self.tail = nn.Sequential(*map(nn.Dropout, rates), nn.Linear(WIDTH, int(4 * self.scale)))
            assert self.trainer.max_epochs == 1

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].to(self.dtype) * self.scale, batch[1]]

    def training_step(self, batch: list[Tensor], *numbers: int) -> Tensor:
        assert self.scale == 2.0 and numbers == (0,)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.lr_schedulers().get_last_lr()
        self.logger.log_metrics({"x": 1.0})
        return (self.tail(self(batch[0])).mean(1) - batch[1]).square().mean()


def test_what_a_step_may_do(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=RPCSequentialStrategy(module="sequential_module"),
        logger=CSVLogger(tmp_path),
        max_epochs=1,
    )
    model, data = Usual(), Data()
    with redirect_stdout(io.StringIO()):
        table = trainer.plan(model, data, microbatches=2, schedules="1f1b")
    assert table.notes == [] and table.measured_on == f"training_step on a batch of {ROWS} rows"
    assert not any(tmp_path.rglob("*.csv")) and isinstance(trainer.logger, CSVLogger)
    assert not hasattr(model, "tail") and trainer.datamodule is None and data.trainer is None
    loader = data.train_dataloader()
    with redirect_stdout(io.StringIO()):
        assert trainer.plan(model, loader, microbatches=2, schedules="1f1b").measured_on == table.measured_on


def test_an_optimizer_over_the_parameters_of_another_model_is_refused() -> None:
    model = Late()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)  # a plan builds a copy of Late
    with pytest.raises(MisconfigurationException, match="Late returns SGD over no parameter of the model that a plan"):
        planned(model, microbatches=2, schedules="1f1b")


def test_activations_follow_the_precision() -> None:
    def kept(**precision: str) -> int:
        strategy = RPCSequentialStrategy([2, 2], checkpoint="never")  # else measured times divide the layers
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, **precision)
        with redirect_stdout(io.StringIO()):
            return trainer.plan(Late(), microbatches=4, schedules="gpipe").best.processes[0].activations

    assert kept(precision="bf16-true") < kept(precision="bf16-mixed") < kept() < kept(precision="64-true")


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.sequential_module:
            layer.weight = self.head.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_tied_parameters_count_once_in_a_process_and_their_states_in_one() -> None:
    bias, weight = WIDTH * FLOAT, WIDTH * WIDTH * FLOAT
    for row in planned(Tied(), Data(), microbatches=2).rows:
        worker, driver = (process.need for process in row.processes)
        layers = [len(process.layers) for process in row.processes]
        assert worker.parameters == weight + layers[0] * bias and driver.parameters == weight + (layers[1] + 1) * bias
        assert worker.states + driver.states == 2 * (weight + (BLOCKS + 1) * bias)


class Backwards(Model):
    """Calls its blocks from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)])
        self.example_input_array = torch.rand(ROWS, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_blocks_that_are_called_in_reverse() -> None:
    first = (2 * WIDTH * WIDTH + WIDTH) * FLOAT
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Backwards()
        row = planned(model, settings={"balance": [1, 2]}, microbatches=2, schedules="1f1b").best
        assert [process.need.parameters for process in row.processes] == [first, 3 * LAYER_BYTES]


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module.insert(0, nn.Embedding(10, WIDTH, sparse=True))
        self.example_input_array = torch.zeros(ROWS, dtype=torch.long)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_sparse_gradients() -> None:
    assert planned(Sparse(), microbatches=2, schedules="1f1b").notes == []


class Foreach(Late):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), foreach=True)


def test_a_step_over_lists_of_tensors_takes_memory_for_all_of_them() -> None:
    one, several = (
        planned(model, microbatches=2, schedules="1f1b", settings={"balance": [1, 3]}).best.processes
        for model in (Late(), Foreach())
    )
    assert one[0].step.extra_bytes == one[1].step.extra_bytes
    assert several[1].step.extra_bytes == 4 * several[0].step.extra_bytes  # with the head


def test_inputs_that_were_made_have_different_batches() -> None:
    table = planned(Llama(), microbatches=[2, 4], schedules="gpipe")
    assert [row.rows for row in table.rows] == [4, 8]
    assert table.best.rows_per_second == max(row.rows_per_second or 0.0 for row in table.rows)
    assert "longer per row" in why_best(table)


def test_labels_are_not_what_a_stage_keeps_of_a_recomputed_microbatch() -> None:
    class Labels(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(torch.randn(ROWS, WIDTH), torch.zeros(ROWS, 1000)), batch_size=ROWS)

    class Wide(Late):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return (self(batch[0]).mean(1, keepdim=True) - batch[1]).square().mean()

    choices: dict[str, Any] = {"microbatches": 4, "schedules": "gpipe", "settings": {"checkpoint": "always"}}
    worker, driver = planned(Wide(), Labels(), **choices).best.processes
    assert worker.activations < ROWS * WIDTH * FLOAT * BLOCKS * 4 < driver.activations


def test_snapshots_are_noted_with_their_size() -> None:
    (note,) = planned(Model(), Data(), settings={"recovery": Recovery(1)}, microbatches=2, schedules="1f1b").notes
    size = (
        2 * 4 * (BLOCKS + 1) * LAYER_BYTES / 2**20
    )  # two copies of the parameters, their gradients and AdamW's two states
    assert note.startswith(
        f"recovery takes {size:.1f} MiB of memory on all processes together, which is not in these figures"
    )


class Slow(Model):
    """Layers that take a millisecond each, on whichever machine."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(
            *(nn.Sequential(Sleep(1e-3, 2e-3), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
        )


def test_more_processes_than_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four stages on two cores cannot do in the same time twice what two stages do."""
    only_sleep_takes_time(monkeypatch)
    monkeypatch.setattr(workers, "num_cores", lambda: 2)
    monkeypatch.setattr(plan, "num_cores", lambda: 2)
    work = 8 * BLOCKS * 3e-3  # of all micro-batches
    table = planned(Slow(), Data(), stages=[2, 4], microbatches=8, schedules=["gpipe", "1f1b"])
    for row in table.rows:
        assert row.seconds is not None and row.simulation is not None and row.seconds > work / 2
        assert row.simulation.total_time > work / 2
    (note,) = table.notes
    assert note == "with 4 stages, 4 processes share the 2 cores of a host; their times include this"
    monkeypatch.setattr(plan, "num_cores", lambda: 4)
    quick = planned(Slow(), Data(), stages=[4], microbatches=8, schedules=["1f1b"])
    alone = quick.best.simulation
    (shared,) = (row for row in table.rows if row.stages == 4 and row.schedule == "1f1b")
    assert alone is not None and quick.best.seconds is not None and shared.seconds is not None
    assert quick.best.seconds < shared.seconds
    assert alone.total_time < sum(end - alone.start[step] for step, end in alone.end.items()) / 2
    assert quick.notes == []


def test_replicas_share_cores_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    only_sleep_takes_time(monkeypatch)
    asked: list[int] = []

    def share(processes: int) -> int:
        asked.append(processes)
        return 1

    for module in (plan, partitioning):
        monkeypatch.setattr(module, "share_of_threads", share)
    monkeypatch.setattr(plan, "num_cores", lambda: 2)
    settings = {"data_parallel_size": 2}
    with redirect_stdout(io.StringIO()):
        table = trainer_with(devices=4, **settings).plan(Slow(), Data(), microbatches=4, schedules="1f1b")
    assert set(asked) == {4}
    assert "with 2 stages, 4 processes share the 2 cores of a host; their times include this" in table.notes
    assert table.best.seconds is not None
    assert table.best.seconds > 4 * BLOCKS * 3e-3, "a replica has one core, which does all its work"


class Large(Model):
    """Whose parameters are much more than anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * BLOCKS)))
        self.example_input_array = torch.rand(2, WIDTH)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("gathers", [None, False])
def test_the_driver_has_the_whole_model_at_the_start_and_at_the_end(gathers: bool | None, capsys: Any) -> None:
    num_bytes = (2 * BLOCKS + 1) * LAYER_BYTES
    settings: dict[str, Any] = {"balance": [7, 1], "gather_on_end": gathers}
    given: dict[str, Any] = {"microbatches": 2, "schedules": "1f1b", "memory_limit_bytes": 3 * num_bytes - 1}
    table = trainer_with(**settings).plan(Large(), **given)
    worker, driver = table.best.processes
    assert worker.start_bytes == worker.end_bytes == 0 and worker.peak_at == "training"
    assert driver.start_bytes == num_bytes
    said = capsys.readouterr().out
    if gathers is False:
        assert driver.end_bytes == 0 and driver.peak_bytes == max(driver.training_bytes, num_bytes)
        assert "at the end" not in said
    else:
        assert driver.end_bytes == 3 * num_bytes + driver.need.gradients  # with the two states of AdamW
        assert driver.peak_bytes == driver.end_bytes and driver.peak_at == "end" and not table.best.fits
        assert "driver*" in said and "* Its peak is at the end of the run, when it has the whole model" in said
        assert "does not fit" in said and "set gather_on_end=False, or build its layers in" in said
    assert "at the start of a run" not in said


def test_what_replicas_divide_takes_less_memory() -> None:
    found = []
    for stage in (0, 1, 2, 3):
        settings: dict[str, Any] = {"balance": [4, 4], "data_parallel_size": 2, "zero_stage": stage}
        with redirect_stdout(io.StringIO()):
            table = trainer_with(devices=4, **settings).plan(Large(), microbatches=2, schedules="1f1b")
        assert strategy_block(table, table.best)["init_args"].get("zero_stage", 0) == stage
        found.append(table.best.processes[0])
    assert [each.need.parameters // LAYER_BYTES for each in found] == [4, 4, 4, 2]
    assert [each.need.gradients // LAYER_BYTES for each in found] == [4, 4, 4, 2]
    assert [each.need.states // LAYER_BYTES for each in found] == [8, 4, 4, 4]  # the two states of AdamW
    assert [each.freed_gradients for each in found] == [0, 0, 2 * LAYER_BYTES, 0]


class Divided(Large):
    """Layers that are divided by their outputs and by their inputs in turn; the head is whole."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {f"sequential_module.{number}": "rowwise" if number % 2 else "colwise" for number in range(2 * BLOCKS)}


def parted(model: pl.LightningModule, **settings: Any) -> PlanTable:
    settings = {"balance": [4, 4], "tensor_parallel_size": 2, **settings}
    devices = 2 * settings["tensor_parallel_size"] * settings.get("data_parallel_size", 1)
    with redirect_stdout(io.StringIO()):
        return trainer_with(devices=devices, **settings).plan(model, microbatches=2, schedules="1f1b")


def test_pipelines_that_divide_layers_have_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(plan, "share_of_threads", lambda processes: asked.append(processes) or 1)
    model = Divided()
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    table = parted(model, data_parallel_size=2)
    worker, driver = table.best.processes
    half, biases = WIDTH * WIDTH * FLOAT // 2, (WIDTH + WIDTH // 2) * FLOAT  # of two layers; one bias is whole
    assert worker.need.parameters == worker.need.gradients == 4 * half + 2 * biases
    assert worker.need.states == 2 * worker.need.parameters
    assert driver.need.parameters == worker.need.parameters + LAYER_BYTES
    whole = (2 * BLOCKS + 1) * LAYER_BYTES
    assert driver.start_bytes == whole and driver.end_bytes == 3 * whole + driver.need.gradients
    assert set(asked) == {8}, "2 stages x 2 parts x 2 replicas"
    written = yaml.safe_load(yaml_of(table, table.best))["trainer"]
    assert written["devices"] == 8 and written["strategy"]["init_args"]["tensor_parallel_size"] == 2
    assert any("one of the 2 pipelines that divide the layers (tensor_parallel_size=2)" in note for note in table.notes)
    for name, parameter in model.named_parameters():
        same, place, values = before[name]
        assert parameter is same and parameter.data_ptr() == place and torch.equal(parameter, values)


def test_a_hugging_face_model_is_divided_by_its_plan() -> None:
    words = torch.randint(50, (4, 6))
    found = [
        planned(Llama(), DataLoader(words, batch_size=4), microbatches=[2], schedules="1f1b", settings=settings)
        for settings in ({"balance": [2, 2]}, {"balance": [2, 2], "tensor_parallel_size": 2})
    ]
    whole, half = (table.best.processes[0] for table in found)
    norms = 2 * 2 * 8 * FLOAT  # every pipeline has the two norms of each of the two blocks
    assert half.need.parameters - norms == (whole.need.parameters - norms) // 2
    assert half.activations < whole.activations
    assert found[1].measured_on == "training_step on a batch of 4 rows"


def test_times_of_divided_layers_include_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    only_sleep_takes_time(monkeypatch)
    seconds = []
    for latency in (0.0, 0.02):
        waiting = GroupSeconds(sum=LinearSeconds(latency))
        monkeypatch.setattr(plan, "group_seconds", lambda size, waiting=waiting: waiting)
        seconds.append(parted(Divided()).best.seconds)
    # In each of 2 micro-batches and pairs of layers, one sum forward and one backward; a stage has 2 pairs.
    assert seconds[1] - seconds[0] > 2 * 2 * 2 * 0.02


def test_times_of_divided_parameters_include_their_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    only_sleep_takes_time(monkeypatch)
    seconds = []
    for latency in (0.0, 0.01):
        waiting = GroupSeconds(parts=LinearSeconds(latency))
        monkeypatch.setattr(plan, "group_seconds", lambda size, kind, waiting=waiting: waiting)
        settings: dict[str, Any] = {"balance": [4, 4], "data_parallel_size": 2, "zero_stage": 3}
        with redirect_stdout(io.StringIO()):
            table = trainer_with(devices=4, **settings).plan(Large(), microbatches=2, schedules="1f1b")
        seconds.append(table.best.seconds)
    assert any("what is gathered from the others" in note for note in table.notes)
    # In each of 2 micro-batches and 4 layers: a message and the weight, in the forward and in the backward pass.
    assert seconds[1] - seconds[0] > 2 * 4 * 4 * 0.01


def test_what_a_run_refuses_is_refused_with_divided_layers() -> None:
    class LateDivided(Late):
        tensor_parallel_plan = Divided.tensor_parallel_plan

    with pytest.raises(MisconfigurationException, match=r"but configure_model of LateDivided makes sequential_module"):
        parted(LateDivided())
    with pytest.raises(MisconfigurationException, match=r"divides layers by a plan, but Large has none"):
        parted(Large())
    with pytest.raises(MisconfigurationException, match=r"tensor_parallel_size=3 cannot divide sequential_module"):
        parted(Divided(), tensor_parallel_size=3)

    class ByRows(Divided):
        def configure_optimizers(self) -> Any:
            return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2])

    with pytest.raises(MisconfigurationException, match=r"Muon cannot be used under tensor_parallel_size=2"):
        parted(ByRows())


def test_a_model_that_configure_model_builds_is_never_whole() -> None:
    driver = planned(Late(), microbatches=2, schedules="1f1b").best.processes[-1]
    assert driver.start_bytes == driver.end_bytes == 0 and driver.peak_bytes == driver.training_bytes
    gathered = planned(Late(), microbatches=2, schedules="1f1b", settings={"gather_on_end": True}).best.processes[-1]
    assert gathered.start_bytes == 0 and gathered.end_bytes == 3 * 5 * LAYER_BYTES + gathered.need.gradients


def test_bytes_on_meta_are_those_on_the_cpu() -> None:
    for precision in ("32-true", "bf16-true"):
        found = []
        for device in ("cpu", "meta"):
            with torch.device(device):
                model = Late()
            trainer = Trainer(
                accelerator="cpu",
                devices=2,
                strategy=RPCSequentialStrategy([2, 2], checkpoint="never"),
                logger=False,
                precision=precision,
            )
            if device == "meta":
                vars(model)["configure_model"] = partial(on_meta, model.configure_model)
            with redirect_stdout(io.StringIO()):
                table = trainer.plan(model, microbatches=4, schedules=["gpipe", "1f1b", "zb-h1"])
            found.append([[replace(p, step=StepCost()) for p in row.processes] for row in table.rows])
        assert found[0] == found[1]


def on_meta(build: Callable[[], None]) -> None:
    with torch.device("meta"):
        build()
