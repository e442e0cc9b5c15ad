"""For the training programs of this folder: 1,797 images of handwritten digits, a model, and a plain training loop.

The model computes in float64, so that mathematically equal ways of training agree almost to the last digit.
"""

from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

BATCH = 64
"""Number of images in each step, over all processes."""


def digits() -> TensorDataset:
    """Return images `[1797, 64]` and the digits that they show `[1797]`."""
    data = load_digits()
    return TensorDataset(torch.tensor(data.data / 16, dtype=torch.float64), torch.tensor(data.target))


def perceptron() -> nn.Sequential:
    """Return a model with the same weights in every process and at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.2, momentum=0.9)


def train(model: nn.Module, optimizer: Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Run an ordinary training loop, for one process or several."""
    for images, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(images), targets).backward()
        optimizer.step()


def batches_of_all(data: TensorDataset, num_epochs: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Return the batch of each step for one process, without the smaller last batch of an epoch."""
    order = range(0, len(data) - BATCH + 1, BATCH)
    return [data[start : start + BATCH] for _ in range(num_epochs) for start in order]


def share(batches: Iterable[tuple[Tensor, Tensor]], rank: int, num_processes: int) -> list[tuple[Tensor, Tensor]]:
    """Return one process's share of each batch."""
    return [(images[rank::num_processes], targets[rank::num_processes]) for images, targets in batches]


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, targets = data[:]
    with torch.no_grad():
        return (model(images).argmax(1) == targets).double().mean().item()
