"""The only module of Relay that uses private names of ``transformers``. It does not import ``transformers``.

Models of Hugging Face declare their blocks and whether they fill a key-value cache.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

_BLOCK_CLASSES = "_no_split_modules"
"""Attribute of a ``PreTrainedModel``: the names of the classes of its blocks."""


def lists_of_blocks(model: nn.Module) -> list[str]:
    """Return the paths of all ``nn.ModuleList`` with entries of the classes in ``_no_split_modules``.

    ``PreTrainedModel._no_split_modules`` names the classes of blocks that ``device_map`` keeps on one device. Lists
    inside such a block are left out.
    """
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, _BLOCK_CLASSES, None) or ())
    found: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if not is_inside and isinstance(module, nn.ModuleList) and {type(block).__name__ for block in module} & names:
            found.append(path)
    return found


def switch_off_cache(model: nn.Module) -> list[Callable[[], None]]:
    """Set ``use_cache=False`` in the configurations of a model of Hugging Face; return functions that undo this.

    A key-value cache serves generation only. Blocks in other processes would fill it without effect.
    """
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        configs: list[Any] = [getattr(module, name, None) for name in ("config", "generation_config")]
        for config in configs:
            if getattr(config, "use_cache", None) is True:
                config.use_cache = False
                undo.append(partial(setattr, config, "use_cache", True))
    return undo
