"""``schedule="1f1b"`` runs ``training_step`` once per micro-batch; the training is that of one process all the same."""

from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, batches, check, compare, fit, on_cpus
from parity_layers import Unembed
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy

ALWAYS = {"schedule": "1f1b", "microbatches": 4, "checkpoint": "always"}
EXCEPT_LAST = {"schedule": "1f1b", "microbatches": 3, "checkpoint": "except_last"}
MORE_THAN_ROWS = {"schedule": "1f1b", "microbatches": 16, "checkpoint": "never"}

UNEVEN = (8, 5, 1, 7)


def data() -> Any:
    return batches(UNEVEN)


class Once(Small):
    """Keeps the loss of each batch, however often ``training_step`` is run for it; ``None`` where there is none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(-1.0 if not outputs else outputs["loss"].item())


class Around(Once):
    """Trains code before and after the call, and on both sides of it; the loss sees the input directly, too."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.both, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = checkpoint(self.before, batch[0], use_reentrant=False)  # run through twice, by both ways back
        x = self.both(x)
        y = self.after(self(x).tanh_()) + x[:, :2]
        return mse_loss(y + self.both(batch[0])[:, 2:4], batch[1])


class Beside(Once):
    """The input wants no gradient, but the loss depends on trained code that ran before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(WIDTH, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        beside = self.beside(batch[0]).tanh()
        return mse_loss(self(batch[0]) + beside, batch[1])


class Given(Once):
    """Calls the module with a parameter itself, which is known to the optimizer only."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Parameter(torch.randn(1, WIDTH, dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module({"x": x, "query": self.hidden[0]})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.parameters(), *self.hidden], lr=0.01)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses += self.hidden[0].flatten().tolist()


class Sum(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return super().forward(x["x"] + x["query"])


class GivenLayers(Given):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[0] = Sum()


class Frozen(Around):
    """No gradient reaches the first two of three stages, or the code before them."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.before, self.both, *self.sequential_module[:4]):
            part.requires_grad_(False)


class FrozenInside(Around):
    """Only what is around the module is trained: gradients go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module.requires_grad_(False)


class FrozenLast(Once):
    """The last of two or three stages has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[3:].requires_grad_(False)


def gradients_everywhere() -> None:
    clipped = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "val": data, "val_check_interval": 2}
    check(Around, strategy=EXCEPT_LAST, train=data, **clipped)
    check(Around, strategy=ALWAYS, train=data)
    check(
        Beside, strategy=MORE_THAN_ROWS, train=data, gradient_clip_val=0.1, gradient_clip_algorithm="value", stages=[3]
    )
    check(GivenLayers, strategy=EXCEPT_LAST, train=data, stages=[2])


@on_cpus
def test_code_around_the_module_is_trained() -> None:
    run(gradients_everywhere, timeout_seconds=170)


class Shift(nn.Module):
    """Does not need its input for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class ChangesInPlace(Once):
    """Changes the input of the layers after the call, and what it has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.sequential_module.insert(0, Shift())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.before(batch[0])
        y = self(x)
        x.mul_(0.5)
        loss = mse_loss(y, batch[1]) + x.square().mean()
        self.log("logged", loss)
        loss += x.mean()
        return loss


class MasksItsBatch(Once):
    """Changes its batch in place before a trained layer, as the SpecAugment of Whisper does."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0][:, 1] = 0
        return mse_loss(self(self.before(batch[0])), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert not batch[0][:, 1].any()


def changed_in_place() -> None:
    check(ChangesInPlace, strategy=EXCEPT_LAST, stages=[2])
    single = fit(MasksItsBatch, "auto", 1)
    for schedule in ("1f1b", "zbv"):
        compare(fit(MasksItsBatch, RPCSequentialStrategy(schedule=schedule, microbatches=3, balance="even"), 2), single)


def test_what_training_step_changes_in_place() -> None:
    run(changed_in_place)


def frozen() -> None:
    for model in (Frozen, FrozenInside, FrozenLast):
        first = check(model, strategy=EXCEPT_LAST, train=data)[0]
        assert len(set(first.losses)) == len(first.losses)


@pytest.mark.slow
def test_frozen_layers() -> None:
    run(frozen, timeout_seconds=170)


class Skips(Once):
    """``None`` for whole batches, as in one process: they are no step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (0, 2) else loss


class SkipsSome(Around):
    """``None`` for micro-batches; in one process, a weighted sum without their terms."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        learned = batch[1][:, 0] < 100
        if self.trainer.strategy.__class__.__name__ == "RPCSequentialStrategy":
            loss = super().training_step(batch, batch_idx)
            return loss if learned.any() else None
        known = [part[learned] for part in batch]
        return super().training_step(known, batch_idx) * (len(known[0]) / len(batch[0]))


def some() -> Any:
    """Three micro-batches each, of which the second, the first or the last is not to be learned."""
    made = list(batches((9, 9, 9)))
    for m, (_, y) in zip((1, 0, 2), made, strict=True):
        y[3 * m : 3 * m + 3, 0] = 1000
    return DataLoader(made, batch_size=None)


def none_returned() -> None:
    skipped = check(Skips, strategy=EXCEPT_LAST, train=data, accumulate_grad_batches=2)
    for outcome in skipped:
        assert [loss == -1 for loss in outcome.losses] == [True, False, True, False] * 2
    check(SkipsSome, strategy=EXCEPT_LAST, train=some)


@pytest.mark.slow
def test_steps_without_a_loss() -> None:
    run(none_returned, timeout_seconds=170)


class Tied(Once):
    """A weight of the first, the second and the last of three stages, and of the code before and after them."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        self.sequential_module = nn.Sequential(*layers)
        self.outside = Unembed(layers[0].weight)
        for k in (2, 5):
            layers[k].weight = layers[0].weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(self.outside(batch[0]).tanh())
        return mse_loss(self.outside(y)[:, :2], batch[1])


class TiedWorkers(Once):
    """A weight that stages 0 and 1 of three share."""

    def __init__(self) -> None:
        super().__init__()
        layers = self.sequential_module
        layers[3].weight = layers[0].weight


def tied() -> None:
    check(Tied, strategy=EXCEPT_LAST, train=data, accumulate_grad_batches=2, gradient_clip_val=0.1)
    check(TiedWorkers, strategy=ALWAYS, train=data, val=data)


@pytest.mark.slow
def test_tied_parameters() -> None:
    run(tied, timeout_seconds=170)


class BatchWide(Once):
    """Its loss is no mean over samples: the spread of the outputs counts too. So does precision, if it is mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.after(self(self.before(batch[0]).tanh()))
        loss = mse_loss(y, batch[1]) + (y - y.mean(0)).square().mean().sqrt()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


ACCUMULATED = 4


def accumulated() -> None:
    def small() -> Any:
        return DataLoader(
            [part for batch in batches((8, 8, 8)) for part in zip(*[t.split(2) for t in batch], strict=True)], None
        )

    for precision, tolerance in (("64-true", 1e-9), ("bf16-mixed", 1e-5)):
        arguments = {"precision": precision, "gradient_clip_val": 0.5}
        single = fit(BatchWide, "auto", 1, train=small, accumulate_grad_batches=ACCUMULATED, **arguments)
        groups = [single.losses[k : k + ACCUMULATED] for k in range(0, len(single.losses), ACCUMULATED)]
        single.losses = [sum(group) for group in groups]  # Lightning has divided them by their number
        for stages, mode in ((1, "never"), (2, "except_last"), (3, "always")):
            options = {"schedule": "1f1b", "microbatches": ACCUMULATED, "checkpoint": mode}
            strategy = RPCSequentialStrategy([6 // stages] * stages, **options)
            compare(fit(BatchWide, strategy, stages, train=partial(batches, (8, 8, 8)), **arguments), single, tolerance)


@pytest.mark.slow
def test_one_process_that_accumulates_the_gradients_of_the_micro_batches() -> None:
    run(accumulated, timeout_seconds=150)
