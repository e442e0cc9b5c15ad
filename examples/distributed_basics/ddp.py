"""``DistributedDataParallel``: every process has the whole model and a share of each batch.

``python -m examples.distributed_basics.ddp``

Each backward pass averages the gradients of all processes. All processes therefore make the same step, which equals the
step of one process on the whole batch.
"""

from itertools import chain

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from examples.distributed_basics.digits import BATCH, accuracy, digits, perceptron, sgd, train
from examples.distributed_basics.launch import launch, say

EPOCHS = 3


def program(rank: int, num_processes: int) -> None:
    data = digits()
    sampler = DistributedSampler(data, shuffle=True, seed=0, drop_last=True)  # gets the rank from the process group
    loader = DataLoader(data, batch_size=BATCH // num_processes, sampler=sampler)
    model = perceptron()
    ddp = DistributedDataParallel(model)  # broadcasts the weights of rank 0
    optimizer = sgd(model)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        train(ddp, optimizer, loader)

    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    of_all = [torch.empty_like(weights) for _ in range(num_processes)]
    dist.all_gather(of_all, weights)
    for weights_of_rank in of_all:
        assert_close(weights_of_rank, weights, rtol=0, atol=0)
    say(rank, f"accuracy {accuracy(model, data):.3f}; the weights of all ranks are equal to the last bit")

    if rank == 0:  # trains one process on the same batches
        samplers = [DistributedSampler(data, num_processes, r, seed=0, drop_last=True) for r in range(num_processes)]
        single = perceptron()
        optimizer = sgd(single)
        for epoch in range(EPOCHS):
            for each in samplers:
                each.set_epoch(epoch)
            rows = list(chain.from_iterable(zip(*samplers, strict=True)))
            train(single, optimizer, DataLoader(data, batch_size=BATCH, sampler=rows))
        for own, expected in zip(model.parameters(), single.parameters(), strict=True):
            assert_close(own, expected, rtol=1e-9, atol=1e-9)
        say(rank, "one process on the whole batches gets the same weights")


def main() -> None:
    launch(program, 2)
    print("ddp: two processes trained the same model as one process")


if __name__ == "__main__":
    main()
