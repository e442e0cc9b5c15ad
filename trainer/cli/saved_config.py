"""Save the resolved configuration of a fit in the directory of its checkpoints."""

import itertools
import posixpath

from strategies.lightning.compat import get_filesystem, pl
from trainer.cli.lightning_cli import SaveConfigCallback


class SaveConfigBesideCheckpoints(SaveConfigCallback):
    """Writes ``config.yaml`` into the directory of each ``ModelCheckpoint`` of a fit, with any logger.

    An existing file with a different configuration is kept, and the new file is named ``config-v1.yaml``, in the same
    way as ``ModelCheckpoint`` names its files. Without a ``ModelCheckpoint``, the file goes into the log directory.
    Only ``fit`` saves a configuration, because no other command writes checkpoints.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Do nothing yet: each ``ModelCheckpoint`` determines its directory in its ``setup``."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file, on rank 0 only."""
        log_dir = trainer.log_dir  # collective
        if not trainer.is_global_zero or self.already_saved:
            return
        dirpaths = dict.fromkeys(getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
        text = self.parser.dump(self.config, skip_none=False)
        for dirpath in [path for path in dirpaths if path] or [log_dir or trainer.default_root_dir]:
            _write_beside(str(dirpath), self.config_filename, text)
        self.already_saved = True


def _write_beside(dirpath: str, filename: str, text: str) -> None:
    filesystem = get_filesystem(dirpath)
    filesystem.makedirs(dirpath, exist_ok=True)
    stem, extension = posixpath.splitext(filename)
    for version in itertools.count():
        path = posixpath.join(dirpath, f"{stem}-v{version}{extension}" if version else filename)
        if not filesystem.exists(path):
            filesystem.write_text(path, text)
            return
        if filesystem.read_text(path) == text:
            return
