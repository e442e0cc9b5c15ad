"""What others could reach: on one host no socket beyond the loopback interface, and no file that they may write.

And what a checkpoint of theirs could do: nothing that it holds is run, unless the user says that he trusts it.
"""

import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import security_job
import torch
from harness import OWN_SERVER, run
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from scripts import Script
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.utils.data import DataLoader

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from strategies.checkpoint import consolidate, save_and_load
from trainer import Trainer
from trainer.cli import main
from trainer.resume.loader import Resumption, TrackedLoader


def train(names: list[str], umask: int) -> list[dict[str, Any]]:
    """Trains under each strategy at the same time; what each saw, and the files that are left."""
    os.umask(umask)
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for number, name in enumerate(names):
            results = Path(folder, str(number), "results.json")
            results.parent.mkdir()
            job = Script(
                security_job.__file__,
                str(results),
                name,
                num_copies=0 if name == "pipeline" else 1,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            jobs.append((job, results))
        seen = []
        for job, results in jobs:
            said, _ = job.communicate(timeout=100)
            assert job.returncode == 0, said
            seen.append({**json.loads(results.read_text()), "files": security_job.modes(results.parent)})
        return seen


def check(seen: dict[str, Any], processes: int, umask: int) -> set[int]:
    assert seen["processes"] == processes
    assert seen["listeners"]
    for address, port in seen["listeners"]:
        assert ip_address(address).is_loopback, (address, port)
    assert any(name.endswith(".ckpt") for name in seen["files"])
    for name, mode in (seen["files"] | seen["files in between"]).items():
        assert not mode & umask, (name, oct(mode))
        if Path(name).name.startswith("relay-"):  # where processes meet
            assert mode == 0o700, (name, oct(mode))
    return {port for _, port in seen["listeners"]}


@pytest.mark.slow
def test_two_runs_of_ddp_at_once_on_the_loopback_interface() -> None:
    umask = 0o027
    one, other = (
        check(seen, 2, umask) for seen in run(train, ["ddp", "ddp"], umask, timeout_seconds=110, env=OWN_SERVER)
    )
    assert not one & other


@pytest.mark.parametrize(
    ("name", "umask"),
    [
        pytest.param("pipeline", 0o077, marks=pytest.mark.nightly),
        pytest.param("replicas", 0o027, marks=pytest.mark.slow),
        pytest.param("zero", 0o077, marks=pytest.mark.nightly),
        pytest.param("own launcher", 0o027, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_open_beyond_the_loopback_interface(name: str, umask: int) -> None:
    (seen,) = run(train, [name], umask, timeout_seconds=110, env=OWN_SERVER)
    check(seen, security_job.STRATEGIES[name][2], umask)
    meetings = [Path(file).name for file in seen["files in between"] if Path(file).name.startswith("relay-")]
    assert len(meetings) == {"pipeline": 1, "replicas": 3, "zero": 0, "own launcher": 0}[name]


class Runs:
    """What runs something as soon as it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def in_a_file(path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.ones(2)}, "more": Runs()}, path)


def in_parts(path: Path, **more: Any) -> None:
    save_and_load.save_sharded({"state_dict": {"weight": torch.ones(2)}, "more": Runs(), **more}, path)


def ran() -> bool:
    """Whether it has run, since this was asked last."""
    there = Path("ran").exists()
    if there:
        Path("ran").rmdir()
    return there


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


READERS: dict[str, Callable[[], Any]] = {
    "one process": lambda: Trainer(accelerator="cpu", devices=1, logger=False).strategy,
    "ddp": DDPStrategy,
    "zero": ZeROStrategy,
    "pipeline": lambda: RPCSequentialStrategy([1, 1]),
}


@pytest.mark.parametrize("write", [in_a_file, in_parts])
@pytest.mark.parametrize("name", READERS)
def test_nothing_in_a_checkpoint_is_run(name: str, write: Callable[[Path], None], folder: Path) -> None:
    write(path := folder / "a.ckpt")
    strategy = READERS[name]()
    for options in ({}, {"weights_only": None}, {"weights_only": True}):
        with pytest.raises(UnpicklingError, match=r"GLOBAL posix.mkdir whose module posix is blocked"):
            strategy.load_checkpoint(path, **options)
        assert not ran()
    assert "state_dict" in strategy.load_checkpoint(path, weights_only=False)
    assert ran()


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    threading.Thread(target=server.serve_forever, args=(0.02,)).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", READERS)
def test_nothing_in_a_checkpoint_of_the_web_is_run(
    name: str, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's own default is to trust those."""
    monkeypatch.setenv("TORCH_HOME", str(folder / "cache"))
    in_a_file(folder / "a.ckpt")
    strategy = READERS[name]()
    with pytest.raises(UnpicklingError, match=r"GLOBAL posix.mkdir whose module posix is blocked"):
        strategy.load_checkpoint(f"{url}/a.ckpt")
    assert not ran()
    strategy.load_checkpoint(f"{url}/a.ckpt", weights_only=False)
    assert ran()


def test_nothing_in_a_part_is_run(folder: Path) -> None:
    """Not even where the checkpoint itself is trusted: torch writes nothing but tensors there."""
    in_parts(path := folder / "a.ckpt", more=None)
    (part,) = path.rglob("*.distcp")
    metadata, file = save_and_load.ShardReader(part.parent).read_metadata(), part.parent / ".metadata"
    metadata.storage_meta, buffer = None, io.BytesIO()
    torch.save(Runs(), buffer)
    part.write_bytes(buffer.getvalue())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(buffer.getvalue())
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException) as raised:
        save_and_load.load_sharded(path, weights_only=False)
    assert "GLOBAL posix.mkdir whose module posix is blocked" in str(raised.value.failures[0][0])
    metadata.state_dict_metadata["state_dict.weight"] = BytesStorageMetadata()  # which torch would unpickle
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(RuntimeError, match=r"names torch.distributed.checkpoint.metadata.BytesStorageMetadata, which"):
        save_and_load.load_sharded(path, weights_only=False)
    assert not ran()


def test_consolidating_runs_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_parts(folder / "a.ckpt")
    with pytest.raises(SystemExit) as ended:
        consolidate.main(["a.ckpt", "b.ckpt"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert "If you trust its author, give --trust." in said
    assert not ran() and os.listdir() == ["a.ckpt"]
    consolidate.main(["a.ckpt", "b.ckpt", "--trust"])
    assert ran()


def test_the_command_line_runs_nothing_of_a_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["trainer"])
    quiet = ["logger", "enable_progress_bar", "enable_model_summary"]
    options = ["accelerator=cpu", "devices=1", "limit_train_batches=1", "default_root_dir=run"]
    trainer = [f"--trainer.{option}" for option in [*options, *(f"{name}=false" for name in quiet)]]
    command = ["fit", "--model=cli_models.Net", "--data=cli_models.Data", *trainer]
    main([*command, "--trainer.max_epochs=1"])
    (good,) = folder.rglob("*.ckpt")
    torch.save({**torch.load(good, weights_only=True), "more": Runs()}, "file.ckpt")
    in_parts(folder / "parts.ckpt")
    for name in ("file.ckpt", "parts.ckpt"):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*command, f"--ckpt_path={name}"])
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert ended.value.code == 2 and line.startswith(
            f"error: {name} is not a checkpoint of tensors and plain types"
        )
        assert "GLOBAL posix.mkdir whose module posix is blocked" in line and "give --weights_only=false" in line
        assert not ran()
    main([*command, "--trainer.max_epochs=2", "--ckpt_path=file.ckpt", "--weights_only=false"])
    assert ran()


def test_bytes_in_a_checkpoint_are_not_unpickled(folder: Path) -> None:
    """Those pass ``weights_only``; the states of a loader's workers are bytes on their way to the checkpoint."""
    torch.save({"workers": [pickle.dumps(Runs())]}, "a.ckpt")
    saved = torch.load("a.ckpt", weights_only=True)
    tracked = TrackedLoader(DataLoader([1, 2], num_workers=1))
    for in_mid_epoch in (True, False):
        with pytest.raises(MisconfigurationException, match=r"something other than the random states of a loader's"):
            tracked.resume(saved, Resumption(in_mid_epoch, 1, 1, 0))
    assert not ran()
