"""Checkpoints are written at once or by a thread, one at a time; errors surface."""

import threading

import pytest
import torch

from strategies.checkpoint.background import BackgroundWriter, Writer, snapshot


def test_a_snapshot_is_a_copy_that_shares_what_was_shared() -> None:
    weight, received = torch.ones(3), torch.ones(2)
    loss = (weight.clone().requires_grad_() * 2).sum()
    taken = snapshot({"a": weight, "b": [weight.view(3)], "c": received, "loss": loss, "n": {"m": [1]}}, [received])
    weight.add_(1)
    received.add_(1)
    assert taken["a"].tolist() == taken["b"][0].tolist() == [1, 1, 1] and taken["loss"] == 6
    assert taken["a"].data_ptr() == taken["b"][0].data_ptr()
    assert taken["c"] is received


def test_a_snapshot_of_sparse_tensors() -> None:
    checkpoint = {"rows": torch.eye(3).to_sparse_csr(), "pairs": torch.eye(3).to_sparse()}
    copied = snapshot(checkpoint)
    checkpoint["rows"].values().zero_()
    checkpoint["pairs"].coalesce().values().zero_()
    assert all(torch.equal(tensor.to_dense(), torch.eye(3)) for tensor in copied.values())


def test_one_at_a_time_and_errors_surface() -> None:
    background, go, done = BackgroundWriter(), threading.Event(), []
    background.save(lambda: (go.wait(10), done.append("first"))[0])
    background.after_saving(lambda: done.append("removed"))
    assert done == []
    threading.Timer(0.1, go.set).start()
    background.save(lambda: done.append("second"))
    assert done[:2] == ["first", "removed"]
    background.save(fail)
    background.after_saving(lambda: done.append("removed although the new one is not there"))
    with pytest.raises(OSError, match="the disk is full"):
        background.save(lambda: done.append("never"))
    background.save(fail)
    with pytest.raises(OSError, match="the disk is full"):
        background.end()
    assert done == ["first", "removed", "second"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("relay-save")]


def test_in_the_foreground() -> None:
    writer, done = Writer(), []
    assert not writer.in_background
    writer.save(lambda: done.append("saved"))
    writer.after_saving(lambda: done.append("removed"))
    with pytest.raises(OSError, match="the disk is full"):
        writer.save(fail)
    writer.settle(), writer.wait(), writer.end()
    assert done == ["saved", "removed"]


def fail() -> None:
    raise OSError("the disk is full")
