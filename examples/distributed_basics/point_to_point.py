"""Point-to-point: one process sends a tensor, another one receives it.

``python -m examples.distributed_basics.point_to_point``

    blocking        rank 0  send ────▶ recv  rank 1        each call returns when the tensor is through
    not blocking    rank 0  isend ───▶ irecv rank 1        each call returns at once, with a handle;
                            irecv ◀─── isend               the tensor may be touched after handle.wait()
"""

import torch
import torch.distributed as dist
from torch.testing import assert_close

from examples.distributed_basics.launch import launch, say


def blocking(rank: int) -> None:
    """Rank 0 sends three numbers, rank 1 doubles them and sends them back."""
    if rank == 0:
        numbers = torch.tensor([1.0, 2.0, 3.0])
        dist.send(numbers, dst=1)
        dist.recv(numbers, src=1)  # into the same memory
        say(rank, f"sent [1, 2, 3], got back {numbers.tolist()}")
        assert_close(numbers, torch.tensor([2.0, 4.0, 6.0]))
    else:
        numbers = torch.empty(3)  # the receiver has to know shape and type
        sender = dist.recv(numbers)  # from whoever sends first
        say(rank, f"received {numbers.tolist()} from rank {sender}")
        dist.send(numbers * 2, dst=0)


def not_blocking(rank: int) -> None:
    """Both send and receive at the same time; with ``send`` each would wait for the other's ``recv``, forever."""
    other = 1 - rank
    mine, theirs = torch.full((1000,), float(rank)), torch.empty(1000)
    sending, receiving = dist.isend(mine, dst=other), dist.irecv(theirs, src=other)
    meanwhile = sum(range(1000))  # whatever else there is to do
    receiving.wait()  # before this, `theirs` may hold anything
    sending.wait()  # before this, changing `mine` might change what is sent
    mine.zero_()
    say(rank, f"computed {meanwhile} while 1000 numbers went each way; I got {theirs.sum().item():.0f} in sum")
    assert_close(theirs, torch.full((1000,), float(other)))


def program(rank: int, num_processes: int) -> None:
    blocking(rank)
    dist.barrier()
    not_blocking(rank)


def main() -> None:
    launch(program, 2)
    print("point-to-point: every tensor arrived as it was sent")


if __name__ == "__main__":
    main()
