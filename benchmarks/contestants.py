"""The contestants of the pipeline benchmark, all with the same model, loader and optimizer.

Each class runs in the processes of one contestant. ``prepare(microbatches)`` resets the weights and the data,
``step()`` runs one training step and returns the loss if this process knows it, ``trace()`` returns the spans of one
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
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.stage.layers import PassContext

PROCESSES = 2
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Shape:
    """The model and the batch."""

    num_blocks: int = 8
    width: int = 512
    rows: int = 16
    length: int = 64


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss over all tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def endless(shape: Shape) -> Iterator[list[Tensor]]:
    """Yields batches of tokens and targets from an ordinary loader, the same for every contestant."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (8 * shape.rows, shape.length + 1), generator=generator)
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
        self.model = gpt_layers(self.shape.num_blocks, self.shape.width, self.shape.length)
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


class Relay:
    """Relay: the driver of a pipeline, which starts its workers."""

    def __init__(self, number: int, shape: Shape, schedule: str) -> None:
        self.shape, self.schedule = shape, schedule
        self.pipeline: Pipeline | None = None

    def prepare(self, microbatches: int) -> None:
        self.close()
        self.microbatches, self.batches = microbatches, endless(self.shape)
        self.start(gpt_layers(self.shape.num_blocks, self.shape.width, self.shape.length), extra_layers=0)

    def start(self, model: nn.Sequential, *, extra_layers: int) -> None:
        settings = Settings(microbatches=self.microbatches, checkpoint="never", schedule=self.schedule)
        self.rank_of = settings.timetables(PROCESSES).rank_of
        balance = [layers + extra_layers for layers in gpt_balance(self.shape.num_blocks, len(self.rank_of))]
        self.model, self.optimizer = model, make_optimizer(model)
        devices = [torch.device("cpu")] * PROCESSES
        self.pipeline = Pipeline(model, balance, devices, settings, optimizers=[self.optimizer])
        self.pipeline.start()

    def step(self) -> float:
        assert self.pipeline is not None
        tokens, targets = next(self.batches)
        self.optimizer.zero_grad()
        self.pipeline.optimizers.zero_grad_remotes(self.optimizer, True)
        loss = self.loss_of_schedule(tokens, targets)
        assert loss is not None
        loss.backward()
        self.optimizer.step()
        self.pipeline.optimizers.step_remotes(self.optimizer, {})
        self.pipeline.wait()
        return loss.item()

    def loss_of_schedule(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        if self.schedule == "gpipe":
            return loss_of(self.model(tokens), targets)
        assert self.pipeline is not None
        parts = zip(tokens.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        codes = [partial(self.loss_of_part, x, y) for x, y in parts]
        return self.pipeline.interleave(codes, [1 / len(codes)] * len(codes), PassContext.capture("cpu"))

    def loss_of_part(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.model(x), y)

    def trace(self) -> list[Span]:
        """Returns the spans of the third step of a pipeline with recording layers; these steps are not timed."""
        self.close()
        layers = gpt_layers(self.shape.num_blocks, self.shape.width, self.shape.length)
        chunks = cut(layers, gpt_balance(self.shape.num_blocks, len(self.rank_of)))
        listeners = [RecordingLayer() for _ in chunks]
        model = nn.Sequential(*(m for own, chunk in zip(listeners, chunks, strict=True) for m in (own, *chunk)))
        self.start(model, extra_layers=1)
        for _ in range(3):
            began = perf_counter()
            self.step()
        self.close()
        spans = []
        for rank, listener in zip(self.rank_of, listeners, strict=True):
            notes = listener.get_extra_state() if rank == self.rank_of[-1] else listener.notes
            spans += spans_of(notes, rank, began)
        return spans

    def close(self) -> None:
        if self.pipeline is not None:
            self.pipeline.finish()
            self.pipeline = None


@dataclass(frozen=True)
class Placement:
    """The stages of each process: ``LOOP`` 0 2 | 1 3, ``V`` 0 3 | 1 2, and with one stage each ``LINE`` 0 | 1."""

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
        stages = cut(gpt_layers(shape.num_blocks, shape.width, shape.length), gpt_balance(shape.num_blocks, num))
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
        """Returns the spans of one step: times the methods that compute, which run when their input has arrived."""
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
    """Returns a method of torch's stage that adds a span for each call."""

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
        layers = gpt_layers(self.shape.num_blocks, self.shape.width, self.shape.length)
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
