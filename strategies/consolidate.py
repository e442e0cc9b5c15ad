"""Convert a sharded checkpoint to one file: ``python -m strategies.consolidate DIRECTORY OUT.ckpt``."""

import argparse
import sys
from pathlib import Path
from pickle import UnpicklingError

from strategies.checkpoint.store import is_sharded, load_sharded, save_file


def consolidate(directory: Path, out: Path, *, weights_only: bool = True) -> None:
    """Write the file that ``state_dict_type="full"`` would have written.

    Args:
        directory: The sharded checkpoint.
        out: The file; may be equal to ``directory``, which it then replaces.
        weights_only: As in ``torch.load``: refuse anything but tensors and plain types.

    Raises:
        FileNotFoundError: If ``directory`` is not a sharded checkpoint.
        RuntimeError: If the checkpoint is incomplete.
    """
    if not is_sharded(directory):
        raise FileNotFoundError(f"{directory} is not a sharded checkpoint: it has no meta.pt")
    checkpoint, _ = load_sharded(directory, weights_only=weights_only)
    save_file(checkpoint, out)


def main(arguments: list[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: With status 2, after one line on stderr, if the checkpoint cannot be read.
    """
    parser = argparse.ArgumentParser("python -m strategies.consolidate", description=__doc__)
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
