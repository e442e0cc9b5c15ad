"""Saving and loading a checkpoint under DDP.

``python -m examples.distributed_basics.checkpoint``

Rank 0 saves, because all ranks have the same state, and the other ranks wait until the file exists. Each rank loads the
file to its own device. The run then continues as if it had not been interrupted.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.testing import assert_close

from examples.distributed_basics.digits import accuracy, batches_of_all, digits, perceptron, sgd, share, train
from examples.distributed_basics.launch import launch, say


def save(model: nn.Module, optimizer: Optimizer, path: Path, rank: int) -> None:
    """Save on rank 0 and return when the file exists. Every process must call this function."""
    if rank == 0:
        unfinished = path.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
        unfinished.replace(path)  # atomic: a run that dies here leaves the old file or the new one
    dist.barrier()  # no rank reads the file before it has been written


def load(model: nn.Module, optimizer: Optimizer, path: Path, device: torch.device) -> None:
    """Load the state that rank 0 saved from *its* device, to the device of this process."""
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def program(rank: int, num_processes: int, folder: str) -> None:
    enough = torch.cuda.device_count() >= num_processes
    device = torch.device("cuda", rank) if enough else torch.device("cpu")
    data, path = digits(), Path(folder) / "model.pt"
    batches = share(batches_of_all(data), rank, num_processes)
    batches = [(images.to(device), targets.to(device)) for images, targets in batches]
    half = len(batches) // 2

    model = perceptron().to(device)
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    train(ddp, optimizer, batches[:half])
    save(model, optimizer, path, rank)  # not the DDP wrapper, whose names begin with "module."
    if rank == 0:
        say(rank, f"saved {path.name} after {half} steps")
    train(ddp, optimizer, batches[half:])

    resumed = perceptron().to(device)
    for parameter in resumed.parameters():
        nn.init.zeros_(parameter)  # so that the weights can come from the file only
    resumed_optimizer = sgd(resumed)
    load(resumed, resumed_optimizer, path, device)
    train(DistributedDataParallel(resumed), resumed_optimizer, batches[half:])
    for own, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert_close(own, expected, rtol=0, atol=0)
    say(rank, f"loaded model.pt to {device}, continued, and has the weights of the uninterrupted run")
    if rank == 0:
        say(rank, f"accuracy {accuracy(resumed.cpu(), data):.3f}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="relay-basics-") as folder:
        launch(program, 2, folder)
    print("checkpoint: both ranks loaded the checkpoint and continued exactly")


if __name__ == "__main__":
    main()
