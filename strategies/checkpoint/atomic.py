"""Files and directories that appear completely or not at all, even if the process or the machine stops.

    write a temporary file ── fsync ──▶ rename it ── fsync the directory ──▶ done

The temporary file is in the same directory. If a process is killed and leaves one, the next process that writes into
the directory removes it.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

_PREFIX, _SUFFIX = ".relay-", ".part"
_YOUNG_SECONDS = 60.0
"""Younger temporary files are kept: before their writer locks them, they look like those of a dead process."""


@contextmanager
def replacing(path: Path, *, may_be_directory: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` at the end, unless the body raises.

    The file has the default permissions of a new file.

    Args:
        path: The file.
        may_be_directory: Whether the file may replace a directory.
    """
    temporary = _beside(path)
    try:
        with open(temporary, "xb") as file:
            _lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            (_exchange if may_be_directory else os.replace)(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory that is renamed to ``path`` at the end, unless the body raises.

    The body synchronises the files that it writes. The directory replaces a file or a directory.
    """
    temporary = _beside(path)
    temporary.mkdir()
    lock = os.open(temporary, os.O_RDONLY)
    try:
        _lock(lock)
        yield temporary
        sync_directory(temporary)
        _exchange(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    finally:
        os.close(lock)
    sync_directory(path.parent)


def _exchange(temporary: Path, path: Path) -> None:
    """Rename a file or a directory to ``path``, in place of a file or a directory that may be there.

    The old one first gets a temporary name, and is removed at the end. So both have temporary names for a moment, which
    is short however large they are.
    """
    before = _beside(path)
    try:
        with suppress(FileNotFoundError):
            os.rename(path, before)
        os.rename(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.rename(before, path)
        raise
    remove(before)


def sync_directory(path: Path) -> None:
    """Write the entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems cannot synchronise directories
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Return a temporary name beside ``path``. Creates the directory, and removes leftover temporary files from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(_PREFIX + "[0-9a-f]" * 32 + _SUFFIX):  # names of other programs do not match
        with suppress(OSError):  # another process has just removed it
            if time.time() - leftover.stat().st_mtime > _YOUNG_SECONDS and not _is_locked(leftover):
                remove(leftover)
    return path.parent / f"{_PREFIX}{uuid4().hex}{_SUFFIX}"


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # some network filesystems have no locks; there, leftovers are kept
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
