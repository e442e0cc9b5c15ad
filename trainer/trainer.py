"""``Trainer``: Lightning's, which also finds Relay's strategies by name."""

import functools
import inspect
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import Strategy, StrategyRegistry
from pytorch_lightning.utilities.argparse import _defaults_from_env_vars

import strategies
from strategies.names import PLUGINS, did_you_mean


class Trainer(pl.Trainer):
    """``pytorch_lightning.Trainer`` with the same arguments, whose ``strategy`` also takes Relay's names.

    ``strategy`` is one of Relay's names (``"ddp"``, ``"rpc_sequential"``), a name that Lightning knows (``"auto"``,
    ``"fsdp"``, ...), or an instance of a strategy.

    Raises:
        TypeError: for a keyword that Lightning's Trainer does not have.
        ValueError: for a strategy name that neither Relay nor Lightning knows.
    """

    # Lightning's own decorator takes arguments by position, and defaults from PL_TRAINER_* variables.
    @_defaults_from_env_vars
    @functools.wraps(pl.Trainer.__init__)
    def __init__(self, **kwargs: Any) -> None:
        known = inspect.signature(pl.Trainer).parameters
        for keyword in kwargs:
            if keyword not in known:
                raise TypeError(f"Trainer has no argument {keyword!r}{did_you_mean(keyword, known)}")
        if isinstance(kwargs.get("strategy"), str):
            kwargs["strategy"] = _strategy_by_name(kwargs["strategy"])
        super().__init__(**kwargs)


def _strategy_by_name(name: str) -> Strategy | str:
    """One of Relay's plug-ins with its defaults, or the name again where it is Lightning's to resolve."""
    plugin, lightning_names = PLUGINS.get(name.lower()), ["auto", *StrategyRegistry.available_strategies()]
    if plugin is not None:
        strategy: Strategy = getattr(strategies, plugin)()
        return strategy
    if name.lower() not in lightning_names:
        raise ValueError(
            f"unknown strategy {name!r}{did_you_mean(name, [*PLUGINS, *lightning_names])} "
            f"(Relay's strategies: {', '.join(PLUGINS)}; others are Lightning's)"
        )
    return name
