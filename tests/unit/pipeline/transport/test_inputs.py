"""Inputs of micro-batches that travel several in one message."""

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from strategies.pipeline.transport.channel import SMALL_BYTES, Inputs, Receiver, Sender

CPU = torch.device("cpu")
Ends = tuple[Sender, Receiver, Inputs]


@pytest.fixture
def ends(groups: tuple[ProcessGroup, ProcessGroup]) -> Ends:
    receiver = Receiver(groups[1], 0, device=CPU)
    receiver.post()
    return Sender(groups[0], 1), receiver, Inputs(receiver)


def assert_same(got: tuple[Tensor, dict[str, int]], sent: tuple[Tensor, dict[str, int]]) -> None:
    assert torch.equal(got[0], sent[0]) and got[1] == sent[1]
    assert got[0].requires_grad


def test_small_inputs_share_messages(ends: Ends) -> None:
    sender, _, port = ends
    inputs = [(torch.randn(3, m + 1), {"number": m}) for m in range(20)]
    for number in range(2):  # a second pass, for which both sides know the layout
        assert sender.send_inputs(inputs, number, 0, [True]) == 20
        for m, sent in enumerate(inputs):
            value, skips = port.receive(number, m)
            assert_same(value, sent)
            assert skips == {}


@pytest.mark.parametrize("size_bytes", [SMALL_BYTES // 5, SMALL_BYTES // 2, SMALL_BYTES])
def test_inputs_that_are_not_small_together(ends: Ends, size_bytes: int) -> None:
    sender, _, port = ends
    inputs = [(torch.randn(size_bytes // 4), {"number": m}) for m in range(5)]
    counts = []
    while sum(counts) < 5:
        counts.append(sender.send_inputs(inputs[sum(counts) :], 0, sum(counts), [True]))
    assert counts == ([2, 2, 1] if size_bytes < SMALL_BYTES // 2 else [1, 1, 1, 1, 1])
    for m, sent in enumerate(inputs):
        assert_same(port.receive(0, m)[0], sent)


def test_another_micro_batch_than_the_next_one_is_an_error(ends: Ends) -> None:
    sender, _, port = ends
    sender.send_inputs([torch.ones(1), torch.ones(1)], 3, 0, [False])
    port.receive(3, 0)
    with pytest.raises(AssertionError, match=r"expected \(3, 2\), got \(3, 1\)"):
        port.receive(3, 2)
