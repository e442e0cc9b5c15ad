"""Relay's names in Lightning's ``StrategyRegistry``, so that Lightning's own Trainer knows them, too.

``import strategies`` must import no Lightning: it would decide which package of Lightning the process uses, and workers
do without. Names are therefore registered when Lightning's strategies have been imported, before or after this module.
A strategy is imported when a Trainer asks for its name.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from strategies.common.names import PLUGINS

_PACKAGE_OF = {"pytorch_lightning.strategies": "pytorch_lightning", "lightning.pytorch.strategies": "lightning.pytorch"}
"""For each module with a registry, the package of Lightning that it belongs to."""


def register_names() -> None:
    """Register the names with the packages of Lightning that are imported, and with those that will be."""
    for name in _PACKAGE_OF:
        if hasattr(module := sys.modules.get(name), "StrategyRegistry"):
            _register(module)
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(module: Any) -> None:
    """Register each name that Lightning does not use itself: ``ddp`` stays Lightning's."""
    for name, attribute in PLUGINS.items():
        if name not in module.StrategyRegistry:
            module.StrategyRegistry.register(
                name,
                partial(_make, _PACKAGE_OF[module.__name__], attribute),
                description=f"strategies.{attribute} of Relay",
            )


def _make(package: str, attribute: str, **arguments: Any) -> Any:
    """Return a strategy for a Trainer of ``package``.

    Raises:
        MisconfigurationException: If the process uses the other package of Lightning.
    """
    compat = import_module("strategies.lightning.compat")
    if package != compat.PACKAGE:
        raise compat.MisconfigurationException(
            f"the Trainer is of {package}, but strategies use {compat.PACKAGE}, which this process imported first. "
            f"Import {package} before {compat.PACKAGE}, trainer and strategies."
        )
    return getattr(import_module("strategies"), attribute)(**arguments)


class _AfterImport(MetaPathFinder):
    """Has a package of Lightning that is imported later register the names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PACKAGE_OF:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Registering(spec.loader.name, spec.loader.path)
        return spec


class _Registering(SourceFileLoader):
    """Executes a module of Lightning, then registers the names with it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _register(module)
