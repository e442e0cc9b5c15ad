"""Data parallelism by hand: a partition of the data for each process, and gradients averaged after each backward pass.

``python -m examples.distributed_basics.partitioner``

``DistributedDataParallel`` does the same, and also averages while the backward pass is still running.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset

from examples.distributed_basics.digits import BATCH, accuracy, digits, perceptron, sgd, train
from examples.distributed_basics.launch import launch, say


class Partition(Dataset):
    """The rows of a dataset with the given indices."""

    def __init__(self, data: Dataset, rows: Sequence[int]) -> None:
        self._data, self._rows = data, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._rows[index]]


def partitions(data: Any, num_partitions: int, seed: int = 0) -> list[Partition]:
    """Divide a dataset at random into parts of equal size and omit the remaining rows.

    Every process calls this function with the same seed, so all compute the same division without communication.
    """
    rows = list(range(len(data)))
    random.Random(seed).shuffle(rows)
    size = len(data) // num_partitions
    return [Partition(data, rows[part * size : (part + 1) * size]) for part in range(num_partitions)]


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients in each process by their mean over all processes."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def program(rank: int, num_processes: int) -> None:
    data = digits()
    part = partitions(data, num_processes)[rank]
    say(rank, f"has {len(part)} of {len(data)} images; the first one is number {part._rows[0]}")

    loader = DataLoader(part, batch_size=BATCH // num_processes)
    by_hand = perceptron()
    optimizer = sgd(by_hand)
    for images, targets in loader:
        optimizer.zero_grad()
        cross_entropy(by_hand(images), targets).backward()
        average_gradients(by_hand)
        optimizer.step()

    model = perceptron()
    train(DistributedDataParallel(model), sgd(model), loader)
    for own, ddps in zip(by_hand.parameters(), model.parameters(), strict=True):
        assert_close(own.grad, ddps.grad, rtol=1e-12, atol=1e-12)
        assert_close(own, ddps, rtol=1e-12, atol=1e-12)
    say(rank, f"accuracy {accuracy(by_hand, data):.3f} by hand, {accuracy(model, data):.3f} by DDP")


def main() -> None:
    launch(program, 2)
    print("partitioner: averaging by hand gives the gradients and weights of DDP")


if __name__ == "__main__":
    main()
