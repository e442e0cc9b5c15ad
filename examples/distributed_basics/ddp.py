"""``DistributedDataParallel``: every process has the whole model and a share of each batch.

``python -m examples.distributed_basics.ddp``

Each backward pass averages the gradients of all processes, so all make the same step, which is that of one process on
the whole batch.
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
    sampler = DistributedSampler(data, shuffle=True, seed=0, drop_last=True)  # asks the process group for the rank
    loader = DataLoader(data, batch_size=BATCH // num_processes, sampler=sampler)
    model = perceptron()
    ddp = DistributedDataParallel(model)  # brings all processes to the weights of rank 0
    optimizer = sgd(model)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # or every epoch has the same order
        train(ddp, optimizer, loader)

    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    of_all = [torch.empty_like(weights) for _ in range(num_processes)]
    dist.all_gather(of_all, weights)
    for others in of_all:
        assert_close(others, weights, rtol=0, atol=0)
    say(rank, f"accuracy {accuracy(model, data):.3f}; weights are those of the other ranks to the last bit")

    if rank == 0:  # what one process makes of the same batches
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
        say(rank, "one process on the whole batches ends up with the same weights")


def main() -> None:
    launch(program, 2)
    print("ddp: two processes trained one model")


if __name__ == "__main__":
    main()
