"""The contestants of the pipeline benchmark, all with the same model, loader and optimizer.

Each class runs in the processes of one contestant. ``prepare(microbatches)`` resets the weights and the data.
``step()`` runs one training step and returns the loss if this process knows it. ``trace()`` returns the spans of one
step, and ``close()`` ends the contestant.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import VOCABULARY, gpt_balance, gpt_layers
from benchmarks.timeline import RecordingLayer, Span, spans_of
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.partition.model_costs import Example, costs_of
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.schedule.custom import custom_table
from strategies.pipeline.schedule.tables import SCHEDULES, ActionTable
from strategies.pipeline.stage.layers import PassContext
from strategies.planning.action_costs import ByAction, model_costs

PROCESSES = 2
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Shape:
    """The model and the batch."""

    num_blocks: int = 8
    width: int = 512
    rows: int = 16
    length: int = 64
    vocabulary: int = VOCABULARY

    def layers(self) -> nn.Sequential:
        """Return the model with the same weights at each call."""
        return gpt_layers(self.num_blocks, self.width, self.length, self.vocabulary)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over all tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def endless(shape: Shape) -> Iterator[list[Tensor]]:
    """Yield batches of tokens and targets from an ordinary loader, the same for every contestant."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocabulary, (8 * shape.rows, shape.length + 1), generator=generator)
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=shape.rows)
    while True:
        yield from loader


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)


class OneProcess:
    """One process that trains micro-batch by micro-batch, on the number of threads that each step gets."""

    def __init__(self, number: int, shape: Shape) -> None:
        self.shape = shape

    def prepare(self, microbatches: int) -> None:
        self.microbatches, self.batches = microbatches, endless(self.shape)
        self.model = self.shape.layers()
        self.optimizer = make_optimizer(self.model)

    def step(self, threads: int = 1) -> float:
        torch.set_num_threads(threads)
        total = 0.0
        tokens, targets = next(self.batches)
        self.optimizer.zero_grad()
        for x, y in zip(tokens.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True):
            loss = loss_of(self.model(x), y) / self.microbatches
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    def close(self) -> None: ...


class Busy(OneProcess):
    """The process that keeps the second core busy: it runs the same steps until the event is cleared."""

    def __init__(self, number: int, shape: Shape, go: Any) -> None:
        super().__init__(number, shape)
        self.go = go

    def keep_busy(self) -> None:
        while self.go.is_set():
            self.step()


class WithLoss(nn.Module):
    """A model whose ``forward`` computes the loss, so that the loss is measured too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = shape.layers()
        self.example_input_array = tuple(next(endless(shape)))

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.layers(tokens), targets)}


class Measurer(OneProcess):
    """Measures the costs of the actions of a schedule, as ``schedule="auto"`` does."""

    def costs(self, microbatches: int) -> Any:
        model = WithLoss(self.shape)
        parts = tuple(tensor[: -(-len(tensor) // microbatches)] for tensor in model.example_input_array)
        return model_costs(costs_of(model, model.layers, Example(model, parts), ByAction(), torch.device("cpu")))


class Relay:
    """Relay: the driver of a pipeline, which starts its workers.

    With ``schedule="auto"``, a search finds schedule and balance first; with ``finds_microbatches``, it also finds the
    number of micro-batches.
    """

    def __init__(self, number: int, shape: Shape, schedule: str, finds_microbatches: bool = False) -> None:
        self.shape, self.schedule, self.finds_microbatches = shape, schedule, finds_microbatches
        self.pipeline: Pipeline | None = None
        self.own_choice: tuple[Settings, list[int]] | None = None

    def prepare(self, microbatches: int) -> str:
        """Start the pipeline; return the schedule and the balance."""
        self.close()
        self.settings = Settings(microbatches=microbatches, checkpoint="never", schedule=self.schedule)
        balance: list[int] | None = None
        if self.schedule == "auto":
            self.settings, balance = self.own_choice or self.found(microbatches)
            if self.finds_microbatches:  # the choice does not depend on the given number, and a search takes long
                self.own_choice = self.settings, balance
        self.batches = endless(self.shape)
        self.rank_of = self.settings.programs(PROCESSES).rank_of
        self.balance = gpt_balance(self.shape.num_blocks, len(self.rank_of)) if balance is None else balance
        self.start(self.shape.layers(), self.balance)
        return f"{self.settings.microbatches} micro-batches, balance {self.balance}"

    def found(self, microbatches: int) -> tuple[Settings, list[int]]:
        # These modules import Lightning. The import takes a second, which the other contestants need not spend.
        from strategies.lightning.search_settings import SearchSettings, with_schedule
        from strategies.planning import automatic

        model: Any = WithLoss(self.shape)
        planned = automatic.find_schedule(
            model,
            model.layers,
            num_stages=PROCESSES,
            given=None,
            settings=self.settings,
            choices=SearchSettings("auto", "auto" if self.finds_microbatches else microbatches),
            device=torch.device("cpu"),
        )
        return with_schedule(self.settings, planned), planned.balance

    def plan(self) -> tuple[ActionTable, list[int]]:
        """Return the table and the balance."""
        schedule, number = self.settings.schedule, self.settings.microbatches
        if isinstance(schedule, str):
            named = SCHEDULES[schedule]
            return named.table(PROCESSES, number, named.chunks[1]), self.balance
        return custom_table(schedule, PROCESSES, number), self.balance

    def start(self, model: nn.Sequential, balance: list[int]) -> None:
        self.model, self.optimizer = model, make_optimizer(model)
        devices = [torch.device("cpu")] * PROCESSES
        self.pipeline = Pipeline(model, balance, devices, self.settings, optimizers=[self.optimizer])
        self.pipeline.start()

    def step(self) -> float:
        loss = self.passes()
        assert self.pipeline is not None
        self.pipeline.optimizers.step_remotes(self.optimizer, {})  # workers step while this process does
        self.optimizer.step()
        self.pipeline.wait()
        return loss

    def passes(self) -> float:
        """Run the forward and backward passes of a step; return the loss."""
        assert self.pipeline is not None
        tokens, targets = next(self.batches)
        self.optimizer.zero_grad()
        self.pipeline.optimizers.zero_grad_remotes(self.optimizer, True)
        loss = self.loss_of_schedule(tokens, targets)
        assert loss is not None
        loss.backward()
        return loss.item()

    def timed_passes(self) -> float:
        """Return the seconds of the passes of a step until all stages have finished."""
        assert self.pipeline is not None
        self.pipeline.wait()
        began = perf_counter()
        self.passes()
        self.pipeline.wait()
        return perf_counter() - began

    def loss_of_schedule(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        if self.schedule == "gpipe":
            return loss_of(self.model(tokens), targets)
        assert self.pipeline is not None
        number = self.settings.microbatches
        parts = zip(tokens.chunk(number), targets.chunk(number), strict=True)
        codes = [partial(self.loss_of_part, x, y) for x, y in parts]
        return self.pipeline.interleave(codes, [1 / len(codes)] * len(codes), PassContext.capture("cpu"))

    def loss_of_part(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.model(x), y)

    def trace(self) -> list[Span]:
        """Return the spans of the third step of a pipeline with recording layers; these steps are not timed."""
        self.close()
        chunks = cut(self.shape.layers(), self.balance)
        listeners = [RecordingLayer() for _ in chunks]
        model = nn.Sequential(*(m for own, chunk in zip(listeners, chunks, strict=True) for m in (own, *chunk)))
        self.start(model, [layers + 1 for layers in self.balance])
        for _ in range(3):
            began = perf_counter()
            self.step()
        self.close()
        spans, driver = [], self.rank_of[-1]
        for rank in sorted(set(self.rank_of)):  # all chunks of a process write to one log
            listener = listeners[self.rank_of.index(rank)]
            notes = listener.get_extra_state() if rank == driver else listener.notes
            spans += spans_of(notes, rank, began)
        return spans

    def close(self) -> None:
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None


@dataclass(frozen=True)
class Placement:
    """The stages of each process: ``LOOP`` 0 2 | 1 3, ``V`` 0 3 | 1 2, or with one stage per process ``LINE`` 0 | 1."""

    stages_of: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.stages_of))


LINE, LOOP, V = Placement(((0,), (1,))), Placement(((0, 2), (1, 3))), Placement(((0, 3), (1, 2)))

TORCH_SCHEDULES = {
    "ScheduleGPipe": LINE,
    "Schedule1F1B": LINE,
    "ScheduleInterleaved1F1B": LOOP,
    "ScheduleInterleavedZeroBubble": LOOP,
    "ScheduleZBVZeroBubble": V,
}


class TorchPipelining:
    """A rank of ``torch.distributed.pipelining``, used as in its documentation."""

    def __init__(self, rank: int, shape: Shape, schedule: str, store: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
        self.schedule_name, self.placement, self.rank = schedule, TORCH_SCHEDULES[schedule], rank
        self.shape = shape

    def prepare(self, microbatches: int) -> None:
        num, device, shape = self.placement.num_stages, torch.device("cpu"), self.shape
        stages = cut(shape.layers(), gpt_balance(shape.num_blocks, num))
        self.own = {i: stages[i] for i in self.placement.stages_of[self.rank]}
        self.optimizer, self.batches = make_optimizer(nn.ModuleList(self.own.values())), endless(shape)
        self.stages = [PipelineStage(module, i, num, device) for i, module in self.own.items()]
        make: Callable[..., Any] = getattr(pipelining, self.schedule_name)
        given: Any = self.stages[0] if self.placement is LINE else self.stages
        self.schedule = make(given, microbatches, loss_fn=loss_of)

    def step(self) -> float | None:
        tokens, targets = next(self.batches)
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        first, last = 0 in self.own, self.placement.num_stages - 1 in self.own
        self.schedule.step(*([tokens] if first else []), **({"target": targets, "losses": losses} if last else {}))
        self.optimizer.step()
        return sum(loss.item() for loss in losses) / len(losses) if last else None

    def trace(self) -> list[Span]:
        """Return the spans of one step: of the methods that compute, which run when their input has arrived."""
        spans: list[Span] = []
        for stage in self.stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, timed(self.rank, stage.stage_index, name, getattr(stage, name), spans))
        self.step()
        for stage in self.stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                delattr(stage, name)
        return spans

    def close(self) -> None:
        dist.destroy_process_group()


def timed(rank: int, stage: int, name: str, method: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    """Return a method of torch's stage that adds a span for each call."""

    def call(number: int, *arguments: Any, **named: Any) -> Any:
        began = perf_counter()
        result = method(number, *arguments, **named)
        kind = {"f": "F", "w": "W"}.get("w" if "weight" in name else name[0], "B")
        kind = "I" if kind == "B" and named.get("full_backward") is False else kind
        spans.append(Span(rank, stage, kind, number, began, perf_counter()))
        return result

    return call


class GPipeLibrary:
    """torchgpipe or its descendant, fairscale's Pipe; without GPUs, one thread per stage in one process."""

    def __init__(self, number: int, shape: Shape, module: str, name: str) -> None:
        self.shape, self.make = shape, getattr(importlib.import_module(module), name)

    def prepare(self, microbatches: int) -> None:
        self.batches = endless(self.shape)
        layers = self.shape.layers()
        balance = gpt_balance(self.shape.num_blocks, PROCESSES)
        devices = ["cpu"] * PROCESSES
        self.model = self.make(layers, balance, devices=devices, chunks=microbatches, checkpoint="never")
        self.optimizer = make_optimizer(self.model)

    def step(self) -> float:
        tokens, targets = next(self.batches)
        self.optimizer.zero_grad()
        loss = loss_of(self.model(tokens), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def close(self) -> None: ...
