"""The six collectives; every process of the group must make the same call.

``python -m examples.distributed_basics.collectives``

    scatter     one rank has a list, each gets an element    [a b c d] · · ·   ->  a b c d
    gather      the inverse of scatter                       a b c d           ->  [a b c d] · · ·
    broadcast   one rank has a value, each gets it           a · · ·           ->  a a a a
    reduce      one rank gets the sum (maximum, ...)         a b c d           ->  S · · ·
    all-reduce  each rank gets the sum (maximum, ...)        a b c d           ->  S S S S
    all-gather  each rank gets the list                      a b c d           ->  [abcd] [abcd] [abcd] [abcd]
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from examples.distributed_basics.launch import launch, say


def number(value: float) -> Tensor:
    return torch.tensor([float(value)])


def scatter(rank: int, size: int) -> Tensor:
    mine = torch.empty(1)
    dist.scatter(mine, [number(10 * r) for r in range(size)] if rank == 0 else None, src=0)
    assert_close(mine, number(10 * rank))
    return mine


def gather(rank: int, size: int) -> list[Tensor] | None:
    everyone = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(number(rank), everyone, dst=0)
    if everyone is not None:
        assert_close(torch.cat(everyone), torch.arange(float(size)))
    return everyone


def broadcast(rank: int, size: int) -> Tensor:
    value = number(42 if rank == 0 else 0)
    dist.broadcast(value, src=0)  # in place
    assert_close(value, number(42))
    return value


def reduce(rank: int, size: int) -> Tensor | None:
    value = number(rank)
    dist.reduce(value, dst=0, op=dist.ReduceOp.SUM)
    if rank != 0:
        return None  # the content of `value` is undefined on other ranks
    assert_close(value, number(sum(range(size))))
    return value


def all_reduce(rank: int, size: int) -> Tensor:
    value = number(rank)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    assert_close(value, number(size - 1))
    return value


def all_gather(rank: int, size: int) -> list[Tensor]:
    everyone = [torch.empty(1) for _ in range(size)]
    dist.all_gather(everyone, number(rank**2))
    assert_close(torch.cat(everyone), torch.arange(float(size)) ** 2)
    return everyone


def program(rank: int, size: int) -> None:
    for collective in (scatter, gather, broadcast, reduce, all_reduce, all_gather):
        result = collective(rank, size)
        if isinstance(result, list):
            text = str([tensor.item() for tensor in result])
        else:
            text = "nothing" if result is None else str(result.item())
        say(rank, f"{collective.__name__:<11} gives {text}")
        dist.barrier()  # only orders the printed lines


def main() -> None:
    launch(program, 4)
    print("collectives: all six gave the expected result on each rank")


if __name__ == "__main__":
    main()
