"""However often a step calls the pipelined module, and whatever becomes of the results, it trains the same.

And when a step is over, no stage keeps an activation of it.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Fresh, Small, batches, check, small_layers
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from strategies.pipeline.control.parts import PartKind
from strategies.pipeline.control.shelf import captured


class Remembers(nn.Module):
    """Runs a layer, and knows how many of the inputs that it has had are still in memory, for whatever reason.

    An input of a stage's first layer is what the stage keeps to recompute; the others are activations within it.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.inputs: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(StorageWeakRef(x.untyped_storage()))
        return self.layer(x)

    def get_extra_state(self) -> int:
        """How many; a worker's layer can be asked for nothing else."""
        return sum(not reference.expired() for reference in self.inputs)

    def set_extra_state(self, state: int) -> None:
        pass


def remembering(layers: Sequence[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*[Remembers(layer) for layer in layers])


class CountActivations(Callback):
    """Counts the activations on each stage before each backward pass, and when the step is over.

    A worker hears of a pass that is to be forgotten together with the next command, such as the optimizer's step. To
    be asked for a number would be such a command too, so there must be none that waits.
    """

    def __init__(self) -> None:
        self.before_backward: list[list[int]] = []
        self.after_step: list[list[int]] = []

    def on_before_backward(self, trainer: Any, model: Any, loss: Tensor) -> None:
        self.before_backward.append(self.count(trainer, model))

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        pipeline = getattr(trainer.strategy, "pipeline", None)
        for remote in [] if pipeline is None else pipeline.remotes:
            assert "discard" not in [command for command, *_ in remote._queued]
        self.after_step.append(self.count(trainer, model))

    def count(self, trainer: Any, model: Any) -> list[int]:
        pipeline = getattr(trainer.strategy, "pipeline", None)
        if pipeline is None:
            layers = [m for m in model.modules() if isinstance(m, Remembers)]
            return [sum(layer.get_extra_state() for layer in layers)]
        workers = [sum(captured(remote, PartKind.EXTRA_STATE).values()) for remote in pipeline.remotes]
        return [*workers, sum(layer.get_extra_state() for layer in pipeline.stages[-1])]


def counted(make: Any, **arguments: Any) -> list[tuple[list[list[int]], list[list[int]]]]:
    outcomes = check(make, train=lambda: batches(SIZES), callbacks=Fresh(lambda: [CountActivations()]), **arguments)
    counters = [outcome.trainer.callbacks[0] for outcome in outcomes]
    return [(counter.before_backward, counter.after_step) for counter in counters]


def assert_nothing_left(
    counts: list[tuple[list[list[int]], list[list[int]]]], steps: int, stages: Sequence[int] = (1, 2, 3)
) -> None:
    for number, (before_backward, after_step) in zip(stages, counts, strict=True):
        assert all(max(numbers) > 0 for numbers in zip(*before_backward, strict=True))
        assert after_step == [[0] * number] * steps


SIZES = (8, 7, 2, 5, 7)


class Calls(Small):
    """Calls the module in a different way for each batch of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = remembering(small_layers())

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x.clone())  # nobody else keeps it

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        steps = [self.two_views, self.without_backward, self.no_loss, self.no_loss_after_all, self.teacher]
        loss = steps[batch_idx](*batch)
        self.losses.append(0.0 if loss is None else loss.item())
        return loss

    def two_views(self, x: Tensor, target: Tensor) -> Tensor:
        """Two calls before one backward pass, as contrastive methods have them."""
        first, second = self(x), self(x.flip(1) * 0.5)
        assert first.grad_fn is not None and second.grad_fn is not None
        return mse_loss(first, target) + (first * second).mean()  # the order of the two in autograd is not theirs here

    def without_backward(self, x: Tensor, target: Tensor) -> Tensor:
        unused = self(x.flip(0))
        assert unused.requires_grad
        return mse_loss(self(x), target)

    def no_loss(self, x: Tensor, target: Tensor) -> None:
        return None

    def no_loss_after_all(self, x: Tensor, target: Tensor) -> None:
        """Two passes that might have had a backward part, and one that could not."""
        with torch.no_grad():
            self(x * 2)
        unused = self(x), self(x + 1)
        assert all(output.requires_grad for output in unused)

    def teacher(self, x: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self(x * 2)
        assert not teacher.requires_grad
        return mse_loss(self(x), target + teacher)


def test_two_calls_no_backward_pass_no_loss_and_no_grad() -> None:
    assert_nothing_left(run(counted, Calls), steps=2 * len(SIZES))


class Gan(Small):
    """Generator and discriminator, one of them pipelined, each with its optimizer, as in Lightning's own example."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)]
        self.generator = remembering(layers)
        layers = [nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)]
        self.discriminator = remembering(layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        noise, real = (tensor.clone() for tensor in batch)  # nobody else keeps them
        if batch_idx % 2 == 0:
            self.by_turns(noise, real)
        else:
            self.with_every_gradient(noise, real)

    def by_turns(self, noise: Tensor, real: Tensor) -> None:
        """Switches off the gradients of the parameters of the one while the other is trained."""
        for_generator, for_discriminator = self.optimizers()
        self.toggle_optimizer(for_discriminator)
        fake = self.generator(noise)
        assert not fake.requires_grad
        self.step(for_discriminator, self.judged(real, 1.0) + self.judged(fake, 0.0))
        self.untoggle_optimizer(for_discriminator)

        self.toggle_optimizer(for_generator)
        self.step(for_generator, self.judged(self.generator(noise), 1.0))
        self.untoggle_optimizer(for_generator)

    def with_every_gradient(self, noise: Tensor, real: Tensor) -> None:
        """The discriminator gets gradients from the generator's step, and clears them before its own."""
        for_generator, for_discriminator = self.optimizers()
        fake = self.generator(noise)
        self.step(for_generator, self.judged(fake, 1.0))
        self.step(for_discriminator, self.judged(real, 1.0) + self.judged(fake.detach(), 0.0))

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())

    def judged(self, x: Tensor, truth: float) -> Tensor:
        scores = self.discriminator(x)
        return binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.5) for part in parts], []


def gan() -> list[Any]:
    generator = counted(Gan, strategy={"module": "generator"}, stages=(3,))
    return [counted(Gan, strategy={"module": "discriminator"}), generator]


@pytest.mark.slow
def test_gan_with_either_part_pipelined() -> None:
    discriminator, generator = run(gan)
    assert_nothing_left(discriminator, steps=2 * len(SIZES))
    assert_nothing_left(generator, steps=2 * len(SIZES), stages=(1, 3))
