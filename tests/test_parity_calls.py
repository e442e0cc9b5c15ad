"""However often a step calls the pipelined module, and whatever becomes of the results, it trains the same.

And when a step is over, no stage keeps an activation of it.
"""

from typing import Any

import torch
from harness import run
from parity import WIDTH, Fresh, Outcome, Small, batches, check
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

SIZES = (8, 7, 2, 5)


class CountKept(Callback):
    """Counts the micro-batches for which each stage keeps something after each step.

    A worker hears of a pass that is to be forgotten together with the next command, such as the optimizer's step. The
    question asked here would be such a command too, so what still waits to be told is counted as kept.
    """

    def __init__(self) -> None:
        self.kept: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        pipeline = getattr(trainer.strategy, "_pipeline", None)
        if pipeline is not None:
            waiting = [sum(name == "discard" for name, _ in remote._later) for remote in pipeline.remotes]
            asked = [remote.call("num_kept") for remote in pipeline.remotes]
            self.kept.append([*(a + b for a, b in zip(waiting, asked, strict=True)), pipeline._stage.num_kept])


def kept_of(outcomes: list[Outcome]) -> list[list[list[int]]]:
    """For each pipeline, for each step, what each stage kept."""
    return [outcome.trainer.callbacks[0].kept for outcome in outcomes[1:]]


def check_kept(make: Any, **arguments: Any) -> list[list[list[int]]]:
    callbacks = Fresh(lambda: [CountKept()])
    return kept_of(check(make, train=lambda: batches(SIZES), callbacks=callbacks, **arguments))


def assert_nothing_kept(kept: list[list[list[int]]], steps: int = 2 * len(SIZES)) -> None:
    assert kept == [[[0] * stages] * steps for stages in (2, 3)]


class TwoViews(Small):
    """Calls the module on two views of a batch before one backward pass, as contrastive methods do."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        first, second = self(x), self(x.flip(1) * 0.5)
        assert first.grad_fn is not None and second.grad_fn is not None
        loss = mse_loss(first, target) + (first * second).mean()  # the order of the two in autograd is not theirs here
        self.losses.append(loss.item())
        return loss


class Careless(Small):
    """Runs more than it uses, and sometimes gives up: the number of the batch says which."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        x, target = batch
        with torch.no_grad():
            teacher = self(x * 2)
        assert not teacher.requires_grad
        if batch_idx == 0:
            self(x.flip(0))  # its backward pass never comes
        if batch_idx == 1:
            return None
        loss = mse_loss(self(x), target + teacher)
        if batch_idx == 2:
            unused = self(x + 1)
            assert unused.requires_grad
            return None  # now there are three passes, two of which want a backward pass
        self.losses.append(loss.item())
        return loss


def test_two_calls_before_one_backward_pass() -> None:
    assert_nothing_kept(run(check_kept, TwoViews))


def test_calls_whose_backward_pass_never_comes() -> None:
    kept = run(check_kept, Careless)
    for steps in kept:
        for step in (2, 6):  # the driver forgets the step's last pass at the start of its next one, the workers at once
            steps[step][-1] = 0
    assert_nothing_kept(kept)


class Gan(Small):
    """Generator and discriminator, one of them pipelined, each with its optimizer, as in Lightning's own example."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)]
        self.generator = nn.Sequential(*layers)
        layers = [nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)]
        self.discriminator = nn.Sequential(*layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.by_turns(*batch)
        else:
            self.with_every_gradient(*batch)

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


def gan() -> list[list[list[list[int]]]]:
    return [check_kept(Gan, strategy={"module": module}) for module in ("discriminator", "generator")]


def test_gan_with_either_part_pipelined() -> None:
    for kept in run(gan):
        assert_nothing_kept(kept)
