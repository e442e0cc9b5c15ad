"""References to tensors in checkpoints, which other processes read by themselves."""

import pickle
from pathlib import Path

import pytest
import torch

from strategies.checkpoint.references import references_in_file, references_in_shards
from strategies.checkpoint.save_and_load import load_sharded, save_sharded
from strategies.common.torch_compat import storage_key
from strategies.pipeline.construction.stored import where_stored


def test_tensors_in_a_file(tmp_path: Path) -> None:
    whole = torch.randn(40, 30)
    state = {"whole": whole, "view": whole.t()[3:5], "whole.numbers": torch.arange(7), "half": torch.ones(3).half()}
    torch.save({"state_dict": state, "epoch": 3}, path := tmp_path / "x.ckpt")
    checkpoint = torch.load(path, mmap=True)
    references = references_in_file(path, checkpoint, None)
    for name, tensor in checkpoint["state_dict"].items():
        reference = references[storage_key(tensor)].refer(tensor)
        assert len(pickle.dumps(reference)) < 1000
        read = pickle.loads(pickle.dumps(reference)).read()
        assert read.dtype == state[name].dtype and torch.equal(read, state[name]), name

    reference = references[storage_key(checkpoint["state_dict"]["whole"])].refer(whole)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RuntimeError, match=r"x\.ckpt has been replaced since its tensors were found in it"):
        reference.read()


@pytest.mark.parametrize(
    ("special", "number"),
    [
        (torch.eye(3).to_sparse(), 2),
        (torch.eye(3).to_sparse_csr(), 0),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), 0),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 0),
    ],
    ids=["sparse", "sparse by rows", "quantized", "nested"],
)
def test_tensors_beside_one_of_a_special_layout(special: torch.Tensor, number: int, tmp_path: Path) -> None:
    state = {"first": torch.randn(4), "special": special, "last": torch.arange(3)}
    torch.save({"state_dict": state, "optimizer_states": []}, path := tmp_path / "x.ckpt")
    checkpoint = torch.load(path, mmap=True)
    references = references_in_file(path, checkpoint, None)
    assert len(references) == number
    for name in ("first", "last")[:number]:
        tensor = checkpoint["state_dict"][name]
        assert torch.equal(references[storage_key(tensor)].refer(tensor).read(), state[name])


def test_views_of_tensors_in_shards(tmp_path: Path) -> None:
    square, numbers = torch.randn(30, 30), torch.arange(6)
    save_sharded({"state_dict": {"square": square, "numbers": numbers}}, path := tmp_path / "x.ckpt")
    checkpoint, shards = load_sharded(path, ())
    state = checkpoint["state_dict"]
    references = references_in_shards(shards, checkpoint)
    views: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "whole": (state["square"], square),
        "transposed": (state["square"].t(), square.t()),
        "rows": (state["square"][3:5], square[3:5]),
        "columns": (state["square"].detach()[:, ::7], square[:, ::7]),
        "flattened": (state["square"].view(-1), square.view(-1)),
        "bytes": (state["numbers"].view(torch.uint8)[8:], numbers.view(torch.uint8)[8:]),
    }
    for name, (view, expected) in views.items():
        reference = references[storage_key(view)].refer(view)
        assert len(pickle.dumps(reference)) < 1000
        read = pickle.loads(pickle.dumps(reference)).read()
        assert read.dtype == expected.dtype and torch.equal(read, expected), name


def test_what_does_not_have_the_values_of_a_tensor_in_shards(tmp_path: Path) -> None:
    save_sharded({"state_dict": {"complex": torch.randn(4, dtype=torch.complex64)}}, path := tmp_path / "x.ckpt")
    checkpoint, shards = load_sharded(path, ())
    references, tensor = references_in_shards(shards, checkpoint), checkpoint["state_dict"]["complex"]
    assert where_stored(tensor, references) and where_stored(torch.view_as_real(tensor), references)
    for other in (tensor.conj(), tensor.conj().imag, tensor * 2):
        assert where_stored(other, references) is None
    tensor[1:].zero_()
    assert where_stored(tensor, references) is None
