"""The classes of Lightning's command line, from the package that ``strategies.lightning.compat`` has chosen.

They are not in ``compat``, because their module changes how the whole process's ``jsonargparse`` reads files.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from strategies.lightning.compat import PACKAGE

if TYPE_CHECKING:
    from pytorch_lightning import cli
    from pytorch_lightning.cli import ArgsType as ArgsType  # a type, which a variable cannot hold
else:
    cli = import_module(f"{PACKAGE}.cli")
    ArgsType = cli.ArgsType

LightningArgumentParser = cli.LightningArgumentParser
LightningCLI = cli.LightningCLI
SaveConfigCallback = cli.SaveConfigCallback
