"""``schedule="auto"``: what it may choose, what it measures, and what it refuses."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from sleep_layer import Sleep, only_sleep_takes_time
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from strategies.lightning.finding_blocks import find_module
from strategies.lightning.search_settings import SearchSettings, with_schedule
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.planning.automatic import find_schedule
from strategies.planning.plan_rows import ALLOCATOR_SHARE

WIDTH, BLOCKS, ROWS = 8, 6, 12


class Model(pl.LightningModule):
    """Layers between an input and a head; the input is a batch."""

    def __init__(self, rows: int | None = ROWS, head: int = WIDTH) -> None:
        super().__init__()
        self.before, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, head)
        self.sequential_module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        self.example_input_array = None if rows is None else torch.rand(rows, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.sequential_module(self.before(x)))


class OfLists(Model):
    """Two lists of blocks, of which the very first takes most of the time."""

    def __init__(self, lengths: Sequence[int] = (4, 3)) -> None:
        super().__init__()
        del self.sequential_module
        self.encoder, self.decoder = (
            nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Sleep(0.001, 0.001)) for _ in range(number))
            for number in lengths
        )
        self.encoder[0].append(Sleep(0.01, 0.02))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.before(x)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x + memory)
        return self.head(x)


class OfBlocks(pl.LightningModule):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        shape = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4}
        self.net = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=32))


def found(
    model: pl.LightningModule,
    path: str = "sequential_module",
    *,
    given: Any = None,
    chunks: Any = None,
    checkpoint: str = "never",
    gradient_sets: int = 1,
    **choices: Any,
) -> PlannedSchedule:
    where = (("encoder",), ("decoder",)) if isinstance(model, OfLists) else path
    return find_schedule(
        model,
        find_module(model, where),
        num_stages=2,
        given=given,
        settings=Settings(schedule="auto", chunks=chunks, checkpoint=checkpoint),
        choices=SearchSettings("auto", **choices),
        device=torch.device("cpu"),
        gradient_sets=gradient_sets,
        budget_seconds=0.02,
        effort=20_000,
    )


def test_a_schedule_is_found_and_the_model_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pytorch_lightning")
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    planned = found(model, microbatches=4)
    assert planned.microbatches == 4 and sum(planned.balance) == BLOCKS
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    (line,) = caplog.messages
    assert line.startswith("RPCSequentialStrategy: schedule='auto' chooses ") and f"balance {planned.balance}" in line
    tables = with_schedule(Settings(schedule="auto", chunks=2), planned).programs(2)
    for number in (1, 3, 4):
        assert sum(map(len, tables.actions_of_step(number))) >= 2 * number * len(planned.balance)


def test_what_is_given_limits_the_choice() -> None:
    for given, balances in {"even": ([3, 3], [2, 2, 1, 1]), (4, 2): ([4, 2],), (1, 2, 1, 2): ([1, 2, 1, 2],)}.items():
        assert found(Model(), given=given).balance in balances
    for _ in range(3):
        assert len(found(Model(), chunks=1).balance) == 2
    with pytest.raises(MisconfigurationException, match=r"The provided balance \[1, 1, 4\] is for 3 stages"):
        found(Model(), given=[1, 1, 4])
    with pytest.raises(MisconfigurationException, match=r"no plan fits into memory_limit_bytes=1000: process \d holds"):
        found(Model(), memory_limit_bytes=1000)
    assert found(Model(), memory_limit_bytes=10**9).balance


def test_memory_of_two_sets_of_gradients_and_of_recomputed_micro_batches() -> None:
    wide, layer = Model(), nn.Linear(512, 512)
    wide.before, wide.sequential_module = nn.Linear(WIDTH, 512), nn.Sequential(*[layer] * BLOCKS)
    wide.head = nn.Linear(512, 1)
    once, twice = (found(wide, gradient_sets=n, given=[5, 1], chunks=1, microbatches=4).peak_bytes for n in (1, 2))
    weights = 5 * (layer.weight.nbytes + layer.bias.nbytes)
    process = 1 + ALLOCATOR_SHARE  # bytes that it takes for each byte of its tensors
    assert twice - once == pytest.approx(
        process * weights, rel=0.05
    )  # what the micro-batches hold depends on the schedule
    deep = Model()
    deep.sequential_module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[nn.Tanh() for _ in range(31)])
    deep.example_input_array = torch.rand(4000, WIDTH)
    kept, recomputed = (
        found(deep, checkpoint=mode, given=[16, 16], chunks=1, microbatches=4).peak_bytes
        for mode in ("never", "always")
    )
    size = process * 1000 * WIDTH * 4  # of what each layer keeps of a micro-batch
    assert kept > 2 * 16 * size  # at least two micro-batches are under way in stage 0
    assert recomputed < 28 * size  # one of them with all layers, and of each its input


def test_the_number_of_microbatches() -> None:
    """One that divides the rows of the example, or a power of two, up to the largest."""
    assert found(Model(), microbatches="auto").microbatches in {1, 2, 3, 4, 6, 8, 12}
    assert found(Model(), microbatches="auto", max_microbatches=2).microbatches in {1, 2}
    assert found(Model(rows=2), microbatches=8).microbatches == 8  # measured on one row


def test_blocks_of_hugging_face_need_no_example() -> None:
    planned = found(OfBlocks(), "net.model.layers")
    assert sum(planned.balance) == 4 and planned.microbatches == 8


def test_several_lists_of_layers(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list is divided among all processes, so that the process with the slow block has as few others as it can."""
    only_sleep_takes_time(monkeypatch)
    caplog.set_level(logging.INFO, "pytorch_lightning")
    planned = found(OfLists(), microbatches=4)
    assert planned.balance == [1, 3, 1, 2] and planned.num_lists == 2 and planned.lengths == [4, 3]
    assert "balance [1, 3, 1, 2], 4 micro-batches" in caplog.messages[-1]
    programs = with_schedule(Settings(schedule="auto"), planned).programs(2, num_lists=2)
    assert programs.placement.process_of == (0, 1, 0, 1)
    assert {action.stage for row in planned(2, 3) for action in row} == {0, 1, 2, 3}
    assert found(OfLists(), given="even").balance == [2, 2, 2, 1]
    assert found(OfLists(), given=[3, 1, 1, 2]).balance == [3, 1, 1, 2]
    wrong = r"\[2, 2, 2, 1\] has \[2, 2\] for list 0 of 2, which has 3 layers"
    with pytest.raises(MisconfigurationException, match=wrong):
        found(OfLists((3, 4)), given=[2, 2, 2, 1])
    with pytest.raises(MisconfigurationException, match="4 and 1 layers cannot be divided among 2 processes"):
        found(OfLists((4, 1)))


def test_refusals() -> None:
    with pytest.raises(MisconfigurationException, match="schedule='auto' measures the layers, which needs an example"):
        found(Model(rows=None))
    with pytest.raises(
        MisconfigurationException, match=r"microbatches='auto' splits .* of Model .*, but it has one row"
    ):
        found(Model(rows=1), microbatches="auto")
    with pytest.raises(MisconfigurationException, match=r"microbatches='auto' splits .* of OfBlocks .*there is none"):
        found(OfBlocks(), "net.model.layers", microbatches="auto")
    small = Model()
    small.sequential_module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(MisconfigurationException, match="1 layers cannot be divided among 2 processes"):
        found(small)
    wrong = Model()
    wrong.example_input_array = torch.rand(4, WIDTH + 1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        found(wrong)
