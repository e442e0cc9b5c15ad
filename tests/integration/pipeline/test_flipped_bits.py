"""Bits that flip in workers: a step that is computed twice finds them, and names the stage or the message."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.optimizers import follow_optimizer
from strategies.pipeline.recovery.repairs import Recovery
from strategies.pipeline.recovery.verification import ComputedWrongly
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.transport.link import Sender

CPU = torch.device("cpu")
ROWS, WIDTH, CLASSES, MICROBATCHES = 6, 8, 5, 3
KINDS = ["activation", "weight", "gradient", "optimizer state", "buffer", "message"]


def order_of(stage: int) -> Path:
    """The file that tells a stage what to flip."""
    return Path(f"flip-{stage}.json")


def flip(tensor: Tensor, place: float, bit: int) -> None:
    """Flips a bit of one element of a float32 tensor, unseen by autograd."""
    elements = tensor.detach().numpy().view("int32").reshape(-1)
    elements[int(place * len(elements))] ^= 1 << bit


def ordered(stage: int, *kinds: str) -> dict[str, Any] | None:
    """What a stage is to flip now: after some calls, once, whichever process runs it."""
    file = order_of(stage)
    if not file.exists():
        return None
    order: dict[str, Any] = json.loads(file.read_text())
    if order["kind"] not in kinds:
        return None
    if order["calls"]:
        file.write_text(json.dumps({**order, "calls": order["calls"] - 1}))
        return None
    file.unlink()
    return order


class Flips(nn.Module):
    """Flips bits of what passes, of its weight, of its buffer, or of the next message of its process."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if order := ordered(self.stage, "activation", "weight", "gradient", "buffer", "message"):
            change = partial(flip, place=order["place"], bit=order["bit"])
            if order["kind"] == "activation":
                x = x + 0.0
                change(x)
            elif order["kind"] == "weight":
                change(self.linear.weight)
            elif order["kind"] == "buffer":
                change(self.mean)
            elif order["kind"] == "message":
                flip_next_message(change)
            else:
                x = x + 0.0
                x.register_hook(lambda grad: flipped(grad, change)) if x.requires_grad else change(x)
        with torch.no_grad():
            self.mean.lerp_(x.mean(dim=0), 0.1)
        return torch.tanh(self.linear(x) + self.mean) + 0.5 * x


def flipped(tensor: Tensor, change: Callable[[Tensor], None]) -> Tensor:
    copy = tensor.clone()
    change(copy)
    return copy


def flip_next_message(change: Callable[[Tensor], None]) -> None:
    """Flips a bit of the next value that this process sends, on its way."""
    send = Sender.send

    def flipping(self: Sender, value: Any, *args: Any, **kwargs: Any) -> bool:
        patch.stop()
        tensor = value[0] if isinstance(value, tuple) else value
        own = flipped(tensor.detach(), change).requires_grad_(tensor.requires_grad)
        return send(self, (own, *value[1:]) if isinstance(value, tuple) else own, *args, **kwargs)

    patch = mock.patch.object(Sender, "send", flipping)
    patch.start()


class FlippingAdamW(torch.optim.AdamW):
    """Flips bits of its state after a step. It knows its stage by the size of its first parameter's group."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].get("exp_avg")
                is_weight = average is not None and average.shape == (WIDTH, WIDTH)
                if is_weight and (order := ordered(group["stage"], "optimizer state")):
                    flip(average, order["place"], order["bit"])
        return result


class Subject:
    """A training of three processes, of which every step is verified.

    Args:
        schedule: The schedule.
        recovery: Which steps are verified.
    """

    def __init__(self, schedule: str, recovery: Recovery) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(
            *(nn.Embedding(CLASSES, WIDTH), Flips(0), Flips(0), Flips(1), Flips(1)), nn.Linear(WIDTH, CLASSES)
        )
        groups = [
            {"params": [*layers[:3].parameters()], "stage": 0},
            {"params": [*layers[3:5].parameters()], "stage": 1},
            {"params": [*layers[5:].parameters()], "stage": 2},
        ]
        self.layers, self.optimizer = layers, FlippingAdamW(groups, lr=0.01)
        settings = Settings(microbatches=MICROBATCHES, schedule=schedule, checkpoint="never")
        self.pipeline = Pipeline(layers, [3, 2, 1], [CPU] * 3, settings, optimizers=[self.optimizer], recovery=recovery)
        follow_optimizer(self.optimizer, self.pipeline.optimizers)
        self.pipeline.start()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers(x), y)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randint(CLASSES, (ROWS,), generator=generator) for _ in range(2))
        self.optimizer.zero_grad()
        if self.pipeline.settings.interleaves:
            codes = [partial(self.loss, *part) for part in zip(x.split(2), y.split(2), strict=True)]
            loss = self.pipeline.interleave(codes, [1 / MICROBATCHES] * MICROBATCHES, PassContext.capture("cpu"))
            assert loss is not None
        else:
            loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()


def found_bits(schedule: str, num_cases: int) -> None:
    """In every second step, a bit flips in a worker. It is found in this step, and nothing in the others."""
    subject, random_number = Subject(schedule, Recovery(0, verify_every_n_steps=1)), random.Random(17)
    for case in range(num_cases):
        kind, stage = random_number.choice(KINDS), random_number.randrange(2)
        order = {
            "kind": kind,
            "calls": random_number.randrange(4),
            "place": random_number.random(),
            "bit": random_number.randrange(12, 31),  # a smaller one may be lost by rounding
        }
        order_of(stage).write_text(json.dumps(order))
        what = f"case {case}, stage {stage}: {order}"
        try:
            subject.step(2 * case)
            subject.pipeline.verify()
        except ComputedWrongly as error:
            message = str(error)
        else:
            raise AssertionError(f"{what} was not found; struck: {not order_of(stage).exists()}")
        assert not order_of(stage).exists(), what
        culprits = message.partition("different values: ")[2].partition(". Either")[0]
        if kind == "message":
            assert "arrived differently" in culprits and f"which stage {stage} had sent" in culprits, (what, culprits)
        else:
            assert culprits.startswith(f"stage {stage} ") and "; " not in culprits, (what, culprits)
        subject.step(2 * case + 1)
        subject.pipeline.verify()
    subject.pipeline.close()


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "1f1b"])
def test_flipped_bits_are_found(schedule: str) -> None:
    run(found_bits, schedule, 12)


def returned_after_a_flipped_bit() -> None:
    """The last step is verified when the pipeline ends; the layers return all the same."""
    subject = Subject("gpipe", Recovery(0, verify_every_n_steps=1))
    order_of(0).write_text(json.dumps({"kind": KINDS[0], "calls": 1, "place": 0.5, "bit": 30}))
    subject.step(0)
    with pytest.raises(ComputedWrongly):
        subject.pipeline.close()
    assert not any(parameter.is_meta for parameter in subject.layers.parameters())


def test_layers_return_after_a_flipped_bit() -> None:
    run(returned_after_a_flipped_bit)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_hundred_flipped_bits_are_found(schedule: str) -> None:
    run(found_bits, schedule, 100)


def recorded_while_verified() -> None:
    """A recording has the passes of the first computation, whether it is stopped before or after the second one."""
    counts = []
    for every in (0, 1):
        subject = Subject("1f1b", Recovery(1, verify_every_n_steps=every))
        subject.step(0)
        recording = subject.pipeline.start_recording(1)
        subject.step(1)
        subject.pipeline.verify()
        recording.stop()
        later = subject.pipeline.start_recording(2)
        subject.step(2)
        later.stop()
        subject.pipeline.verify()
        taken = [recording.take(), later.take()]
        counts.append([[len(each.records) for each in records] for records in taken if records is not None])
        subject.pipeline.close()
    assert counts[0] == counts[1] and all(count for recording in counts[0] for count in recording), counts


def test_a_recording_has_each_pass_once() -> None:
    run(recorded_while_verified)
