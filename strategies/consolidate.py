"""Makes one file of a checkpoint in parts: ``python -m strategies.consolidate DIRECTORY OUT.ckpt``."""

import argparse
import sys
from pathlib import Path
from pickle import UnpicklingError

from strategies.checkpoint import shards
from strategies.checkpoint.io import AtomicCheckpointIO


def consolidate(directory: Path, out: Path, *, weights_only: bool = True) -> None:
    """Writes the file that ``state_dict_type="full"`` would have written.

    Args:
        directory: The checkpoint in parts.
        out: The file; may be where the directory is.
        weights_only: As in ``torch.load``: refuse anything but tensors and plain types.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        RuntimeError: If some of it is missing.
    """
    if not shards.is_sharded(directory):
        raise FileNotFoundError(f"{directory} is no checkpoint in parts: it has no meta.pt")
    checkpoint, _ = shards.load(directory, weights_only=weights_only)
    AtomicCheckpointIO().save_checkpoint(checkpoint, out)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Raises:
        SystemExit: With status 2 after one line on stderr, if there is nothing to consolidate.
    """
    parser = argparse.ArgumentParser("python -m strategies.consolidate", description=__doc__)
    parser.add_argument("directory", type=Path, help="the checkpoint that was saved with state_dict_type='sharded'")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--trust", action="store_true", help="take any Python object that the checkpoint holds")
    given = parser.parse_args(arguments)
    try:
        consolidate(given.directory, given.out, weights_only=not given.trust)
    except (FileNotFoundError, RuntimeError) as error:
        parser.exit(2, f"error: {error}\n")
    except UnpicklingError as error:
        parser.exit(2, f"error: {str(error).splitlines()[0]} Where you trust its author, give --trust.\n")


if __name__ == "__main__":
    main(sys.argv[1:])
