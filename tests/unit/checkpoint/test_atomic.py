"""Files and directories appear completely or not at all."""

import os
from pathlib import Path

import pytest
import torch

from strategies.checkpoint import atomic
from strategies.checkpoint.atomic import new_directory, replacing
from strategies.lightning.checkpoints import AtomicCheckpointIO


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"before")
    with pytest.raises(AttributeError, match="local object"):
        AtomicCheckpointIO().save_checkpoint({"tensor": torch.ones(1000), "bad": lambda: 1}, path)
    with pytest.raises(KeyboardInterrupt), new_directory(path) as directory:
        (directory / "some").touch()
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["a.ckpt"]


def test_leftovers_go_unless_they_are_being_written(tmp_path: Path) -> None:
    dead, alive, young = (tmp_path / f".relay-{digit * 32}.part" for digit in "abc")
    dead.mkdir()
    (dead / "shard").touch()
    young.touch()
    theirs = tmp_path / ".download.part"
    theirs.mkdir()
    (theirs / "thesis.txt").touch()
    os.utime(theirs, (0, 0))
    with replacing(tmp_path / "a") as file:
        Path(file.name).rename(alive)
        for path in (dead, alive):
            os.utime(path, (0, 0))
        with replacing(tmp_path / "b"):
            pass
        assert sorted(os.listdir(tmp_path)) == [theirs.name, alive.name, young.name, "b"]
        alive.rename(file.name)
    assert sorted(os.listdir(tmp_path)) == [theirs.name, young.name, "a", "b"] and os.listdir(theirs)


@pytest.mark.parametrize("num_renamed", [0, 1])
def test_an_error_of_the_last_step_leaves_what_was_there(
    num_renamed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, renamed, rename = tmp_path / "a.ckpt", [0], os.rename
    path.mkdir()
    (path / "shard").touch()

    def fails_once(*names: Path) -> None:
        renamed[0] += 1
        if renamed[0] == num_renamed + 1:
            raise KeyboardInterrupt
        rename(*names)

    monkeypatch.setattr(atomic.os, "rename", fails_once)
    with pytest.raises(KeyboardInterrupt), replacing(path, may_be_directory=True) as file:
        file.write(b"new")
    assert os.listdir(tmp_path) == ["a.ckpt"] and os.listdir(path) == ["shard"]
    with replacing(path, may_be_directory=True) as file:
        file.write(b"new")
    assert os.listdir(tmp_path) == ["a.ckpt"] and path.read_bytes() == b"new"
    with pytest.raises(IsADirectoryError), replacing(tmp_path):
        pass


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for name in ("x", "y"):
        with new_directory(tmp_path / "a") as directory:
            (directory / name).touch()
    assert os.listdir(tmp_path) == ["a"] and os.listdir(tmp_path / "a") == ["y"]
