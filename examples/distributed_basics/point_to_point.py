"""Point-to-point: one process sends a tensor, and another process receives it.

``python -m examples.distributed_basics.point_to_point``

    blocking        rank 0  send ────▶ recv  rank 1        each call returns when the transfer is done
    not blocking    rank 0  isend ───▶ irecv rank 1        each call returns a handle at once;
                            irecv ◀─── isend               use the tensor only after handle.wait()
"""

import torch
import torch.distributed as dist
from torch.testing import assert_close

from examples.distributed_basics.launch import launch, say


def blocking(rank: int) -> None:
    """Rank 0 sends three numbers; rank 1 doubles them and sends them back."""
    if rank == 0:
        numbers = torch.tensor([1.0, 2.0, 3.0])
        dist.send(numbers, dst=1)
        dist.recv(numbers, src=1)  # overwrites `numbers`
        say(rank, f"sent [1, 2, 3], got back {numbers.tolist()}")
        assert_close(numbers, torch.tensor([2.0, 4.0, 6.0]))
    else:
        numbers = torch.empty(3)  # the receiver must know shape and dtype
        sender = dist.recv(numbers)  # from the first rank that sends
        say(rank, f"received {numbers.tolist()} from rank {sender}")
        dist.send(numbers * 2, dst=0)


def not_blocking(rank: int) -> None:
    """Both ranks send and receive at the same time; with ``send``, each would wait forever for the other's ``recv``."""
    other = 1 - rank
    mine, theirs = torch.full((1000,), float(rank)), torch.empty(1000)
    sending, receiving = dist.isend(mine, dst=other), dist.irecv(theirs, src=other)
    meanwhile = sum(range(1000))  # other work during the transfer
    receiving.wait()  # before this call, the content of `theirs` is undefined
    sending.wait()  # before this call, a change of `mine` could change the sent values
    mine.zero_()
    say(rank, f"computed {meanwhile} during the transfer of 1000 numbers; received a sum of {theirs.sum().item():.0f}")
    assert_close(theirs, torch.full((1000,), float(other)))


def program(rank: int, num_processes: int) -> None:
    blocking(rank)
    dist.barrier()
    not_blocking(rank)


def main() -> None:
    launch(program, 2)
    print("point-to-point: every tensor arrived unchanged")


if __name__ == "__main__":
    main()
