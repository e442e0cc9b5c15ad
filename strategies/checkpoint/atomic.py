"""Files and directories that appear whole or not at all, whenever the process or the machine stops.

    write beside it ── fsync ──▶ rename ── fsync of the directory ──▶ there

What a killed process leaves beside is removed by the next one that writes into the same directory.
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
"""Younger leftovers stay: between creating and locking one, its writer cannot be told from a dead one."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` at the end, unless something is raised before.

    Its permissions are those of any new file.
    """
    temporary = _beside(path)
    try:
        with open(temporary, "xb") as file:
            _lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory that becomes ``path`` at the end, unless something is raised before.

    Its files must have been synchronised. A file or directory that is at ``path`` is replaced; these are two steps,
    between which there is only the new one, under its temporary name.
    """
    temporary = _beside(path)
    temporary.mkdir()
    lock = os.open(temporary, os.O_RDONLY)
    try:
        _lock(lock)
        yield temporary
        sync_directory(temporary)
        remove(path)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    finally:
        os.close(lock)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Has the names in a directory written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """A new name in the directory of ``path``, which exists then and holds no leftovers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(_PREFIX + "[0-9a-f]" * 32 + _SUFFIX):  # nothing of anyone else's
        with suppress(OSError):  # its writer lives and holds the lock, or it has just been removed
            if time.time() - leftover.stat().st_mtime > _YOUNG_SECONDS and not _is_locked(leftover):
                remove(leftover)
    return path.parent / f"{_PREFIX}{uuid4().hex}{_SUFFIX}"


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # not every network filesystem can; leftovers stay there
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
