"""A sharded checkpoint is read back as it was written, or not at all; nothing in it is run."""

import os
import pickle
import resource
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_job import write_shards
from parity import alike
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from strategies.checkpoint import save_and_load
from strategies.checkpoint.atomic import remove
from strategies.checkpoint.consolidate import main
from strategies.lightning.checkpoints import AtomicCheckpointIO


def write(path: Path) -> dict[str, Any]:
    """A checkpoint of two processes, in this one."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model[0].bias]["note"] = ["plain", None]
    state: Any = model.state_dict()
    state["empty"] = torch.zeros(0, 3)
    checkpoint = {"state_dict": state, "optimizer_states": [optimizer.state_dict()], "epoch": 3, "other": torch.ones(2)}
    tensors = list(save_and_load.sharded_tensors(checkpoint).items())
    parts = [dict(tensors[::2]), dict(tensors[1::2])]
    bare = [{name: torch.empty_like(tensor, device="meta") for name, tensor in part.items()} for part in parts]
    with save_and_load.writing_shards(checkpoint, path) as shards:
        write_shards(shards, parts, bare)
    return checkpoint


def test_the_file_of_one_process_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a.ckpt", tmp_path / "whole.ckpt"
    path.write_bytes(b"a file that was there before")
    for _ in range(2):  # the second one in place of the first
        written = write(path)
    assert len(list(path.iterdir())) == 2 and os.listdir(tmp_path) == ["a.ckpt"]
    main([str(path), str(out)])
    read = torch.load(out, weights_only=True)
    alike(read, written, tolerance=0.0)
    assert type(read["state_dict"]) is OrderedDict and read["state_dict"]._metadata == written["state_dict"]._metadata
    bare = torch.load(path / "meta.pt", weights_only=True)
    assert bare["state_dict"]["0.weight"].is_meta and not bare["other"].is_meta
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(out)])
    assert capsys.readouterr().err == f"error: {tmp_path} is not a sharded checkpoint: it has no meta.pt\n"


def test_tensors_of_an_optimizer_outside_its_state_are_always_read(tmp_path: Path) -> None:
    (states,) = write(path := tmp_path / "a.ckpt")["optimizer_states"]
    for keys in ([], ["state_dict"]):
        checkpoint, _ = save_and_load.load_sharded(path, keys)
        (read,) = checkpoint["optimizer_states"]
        alike(read["param_groups"], states["param_groups"], tolerance=0.0)
        assert read["state"][0]["exp_avg"].is_meta and checkpoint["state_dict"]["0.weight"].is_meta == (not keys)


def test_a_file_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    written = write(path)
    main([str(path), str(path)])
    alike(torch.load(path, weights_only=True), written, tolerance=0.0)
    write(path)
    AtomicCheckpointIO().save_checkpoint({"a": 1}, path)
    assert torch.load(path) == {"a": 1} and os.listdir(tmp_path) == ["a.ckpt"]
    (tmp_path / "other").mkdir()
    with pytest.raises(IsADirectoryError):
        AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "other")
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(IsADirectoryError, match="other is a directory that is not a sharded checkpoint"):
        write(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "other"] and os.listdir(tmp_path / "other") == ["thesis.txt"]


def test_a_link_is_replaced_and_not_what_it_points_to(tmp_path: Path) -> None:
    """``ModelCheckpoint(save_last="link")`` makes such links."""
    old, link, folder, other = (tmp_path / name for name in ("old.ckpt", "last.ckpt", "folder", "other.ckpt"))
    written = write(old)
    folder.mkdir()
    (folder / "thesis.txt").touch()
    for target in (old, folder, tmp_path / "gone"):
        for save in (write, lambda path: AtomicCheckpointIO().save_checkpoint({"a": 1}, path)):
            link.symlink_to(target.name)
            save(link)
            assert not link.is_symlink() and link.is_dir() == (save is write)
            link.rename(other)
            remove(other)
    AtomicCheckpointIO().save_checkpoint({"a": 1}, other)
    link.symlink_to(other.name)
    write(link)
    assert torch.load(other) == {"a": 1} and not link.is_symlink() and link.is_dir()
    read, _ = save_and_load.load_sharded(old, weights_only=True)
    alike(read, written, tolerance=0.0)
    assert os.listdir(folder) == ["thesis.txt"]
    assert sorted(os.listdir(tmp_path)) == ["folder", "last.ckpt", "old.ckpt", "other.ckpt"]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_disk_is_named_with_the_checkpoint(sharded: bool, tmp_path: Path) -> None:
    """At whatever byte it is full: what was there before stays, and nothing else is left."""
    save = save_and_load.save_sharded if sharded else save_and_load.save_file
    path, checkpoint = tmp_path / "a.ckpt", {"state_dict": {f"{k}": torch.ones(9, 9) for k in range(9)}}
    save(checkpoint, path)
    before = sorted(path.rglob("*"))
    for size_bytes in (0, 64, 1000, 4000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
        try:
            with pytest.raises(OSError, match=rf"the checkpoint {path} could not be written: File too large"):
                save(checkpoint, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert list(tmp_path.iterdir()) == [path] and sorted(path.rglob("*")) == before


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
@pytest.mark.parametrize("name", ["", "meta.pt", ".metadata"])
def test_a_file_that_is_cut_off_is_named(name: str, share: float, tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "a.ckpt", {"state_dict": {f"{k}": torch.ones(9, 9) for k in range(9)}}
    (save_and_load.save_sharded if name else save_and_load.save_file)(checkpoint, path)
    (file,) = path.rglob(name) if name else [path]
    os.truncate(file, int(share * file.stat().st_size))
    with pytest.raises(
        RuntimeError, match=rf"the checkpoint {path}.* is incomplete, and nothing of it has been loaded"
    ):
        if name:
            save_and_load.load_sharded(path)
        else:
            AtomicCheckpointIO().load_checkpoint(path)


def test_what_is_not_whole_is_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(path := tmp_path / "a.ckpt")
    (file,) = path.rglob("__1_0.distcp")
    content = file.read_bytes()
    for broken in (b"", content[:-1]):
        file.write_bytes(broken)
        with pytest.raises(RuntimeError, match=r"too short: __1_0.distcp, written by process 1\).*state_dict.0.b"):
            save_and_load.load_sharded(path)
    file.unlink()
    with pytest.raises(SystemExit):
        main([str(path), str(tmp_path / "out.ckpt")])
    assert "is incomplete (absent or too short: __1_0.distcp" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.ckpt"]
    file.write_bytes(content)
    bare = torch.load(path / "meta.pt", weights_only=True)
    bare["state_dict"]["more"] = bare["state_dict"].pop("0.weight")
    torch.save(bare, path / "meta.pt")
    with pytest.raises(RuntimeError, match=r"missing \['state_dict.more'\], unexpected \['state_dict.0.weight'\]"):
        save_and_load.load_sharded(path)


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


class PicklesMembersByName(pickle.Pickler):
    """As Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_checkpoint_of_python_3_11_2_is_read(tmp_path: Path) -> None:
    write(path := tmp_path / "a.ckpt")
    (file,) = path.rglob(".metadata")
    metadata, expected = pickle.loads(file.read_bytes()), save_and_load.load_sharded(path)
    with open(file, "wb") as opened:
        PicklesMembersByName(opened).dump(metadata)
    assert b"getattr" in file.read_bytes()
    alike(save_and_load.load_sharded(path), expected, tolerance=0.0)


class GetsMethod:
    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "numel")


def test_nothing_in_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(path := tmp_path / "a.ckpt")
    (metadata,) = path.rglob(".metadata")
    for content, told in (
        (Runs(), "names posix.mkdir, which torch does not write"),
        (GetsMethod(), "names builtins.getattr, which torch does not write"),
        ({}, "holds a dict, not metadata"),
    ):
        metadata.write_bytes(pickle.dumps(content))
        with pytest.raises(SystemExit):
            main([str(path), "out.ckpt", "--trust"])
        assert told in capsys.readouterr().err
    with pytest.raises(CheckpointException, match=r"holds a dict, not metadata"):
        save_and_load.read_tensors(metadata.parent, {"state_dict.empty": torch.empty(0, 3, device="meta")})
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("name", ["shards-/../../b.ckpt", "/tmp/shards-1", "elsewhere"])
def test_its_tensors_are_in_it(tmp_path: Path, name: str) -> None:
    write(path := tmp_path / "a.ckpt")
    bare = torch.load(path / "meta.pt", weights_only=True)
    bare["relay"]["shards"] = name
    torch.save(bare, path / "meta.pt")
    with pytest.raises(
        RuntimeError, match=f"names '{name}' as the directory of its tensors, which is not a subdirectory"
    ):
        save_and_load.load_sharded(path)


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "quantized"])
def test_what_shards_cannot_hold_is_named(layout: str) -> None:
    eye = torch.eye(3)
    tensor = {
        "sparse_coo": eye.to_sparse(),
        "sparse_csr": eye.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
    }[layout]
    checkpoint = {"state_dict": {"weight": eye, "graph.adjacency": tensor}, "other": tensor}
    message = rf'state_dict\.graph\.adjacency is a {layout} tensor, .* use state_dict_type="full"'
    with pytest.raises(ValueError, match=message):
        save_and_load.check_can_be_sharded(checkpoint)
    save_and_load.check_can_be_sharded({"state_dict": {"weight": eye}, "other": tensor})
