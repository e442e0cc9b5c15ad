"""Convert a sharded checkpoint to one file: ``python -m strategies.checkpoint.consolidate DIRECTORY OUT.ckpt``."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

from torch import Tensor

from strategies.checkpoint.save_and_load import is_sharded, load_sharded, read_tensors, save_file, sharded_tensors
from strategies.checkpoint.streaming import LateTensors
from strategies.launch.allocator import return_freed_memory

_GROUP_BYTES = 16 * 2**20
"""Maximum total size of the tensors that are read at once. A larger tensor is read separately."""


def consolidate(directory: Path, out: Path, *, weights_only: bool = True) -> None:
    """Write the file that ``state_dict_type="full"`` would have written, a few tensors at a time.

    Args:
        directory: The sharded checkpoint.
        out: The file to write. If it equals ``directory``, the file replaces the directory.
        weights_only: As in ``torch.load``: refuse anything but tensors and plain types.

    Raises:
        FileNotFoundError: If ``directory`` is not a sharded checkpoint.
        RuntimeError: If the checkpoint is incomplete.
    """
    if not is_sharded(directory):
        raise FileNotFoundError(f"{directory} is not a sharded checkpoint: it has no meta.pt")
    checkpoint, shards = load_sharded(directory, (), weights_only)
    keys = {id(tensor): key for key, tensor in sharded_tensors(checkpoint).items() if tensor.is_meta}
    save_file(checkpoint, out, LateTensors(lambda tensor: id(tensor) in keys, partial(_read, shards, keys)))


def _read(shards: Path, keys: Mapping[int, str], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the values of tensors, in the order given. Reads groups, since torch reads all metadata for each group."""
    rest = list(reversed(tensors))
    while rest:
        group: dict[str, Tensor] = {}
        size_bytes = 0
        while rest and (not group or size_bytes + rest[-1].nbytes <= _GROUP_BYTES):
            tensor = rest.pop()
            group[keys[id(tensor)]], size_bytes = tensor, size_bytes + tensor.nbytes
        return_freed_memory()
        values = read_tensors(shards, group)
        for key in group:
            yield values.pop(key)


def main(arguments: list[str] | None = None) -> None:
    """Run the command-line tool.

    Raises:
        SystemExit: With status 2, after one line on stderr, if the checkpoint cannot be read.
    """
    parser = argparse.ArgumentParser("python -m strategies.checkpoint.consolidate", description=__doc__)
    parser.add_argument("directory", type=Path, help="the checkpoint that was saved with state_dict_type='sharded'")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--trust", action="store_true", help="load any Python object that the checkpoint holds")
    given = parser.parse_args(arguments)
    try:
        consolidate(given.directory, given.out, weights_only=not given.trust)
    except (FileNotFoundError, RuntimeError) as error:
        parser.exit(2, f"error: {error}\n")
    except UnpicklingError as error:
        parser.exit(2, f"error: {str(error).splitlines()[0]} If you trust its author, give --trust.\n")


if __name__ == "__main__":
    main(sys.argv[1:])
