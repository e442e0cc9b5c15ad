"""Names of strategies and of layers, suggestions for unknown names, and lazy imports for packages.

This module imports neither torch nor Lightning.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

# What ``Trainer(strategy=...)`` knows beside Lightning's names: the name and the attribute of ``strategies``. Under
# Lightning's own Trainer, "ddp" stays Lightning's (``strategies.lightning.registry``).
PLUGINS = {
    "ddp": "DDPStrategy",
    "rpc_sequential": "RPCSequentialStrategy",
    "zero": "ZeROStrategy",
    "dp": "DataParallelStrategy",
}

_ALIKE = 0.6  # minimum difflib ratio of a suggestion
_AS_GOOD = 0.15  # maximum difference from the ratio of the best suggestion
_MOST = 3
_FEW = 12  # maximum number of names that a message lists in full


def did_you_mean(name: str, valid: Iterable[str], *, or_list: bool = True) -> str:
    """Return the end of a message about an unknown ``name``: the most similar valid names, or all if there are few.

    If no name is similar, ``or_list`` determines whether the message lists valid names.

    >>> did_you_mean("micro_batches", ["balance", "microbatches"])
    "; did you mean 'microbatches'?"
    """
    candidates = sorted(set(valid))
    likeness = {candidate: _likeness(name, candidate) for candidate in candidates}
    best = max(likeness.values(), default=0.0)
    if best >= _ALIKE:
        close = [c for c in candidates if likeness[c] >= max(_ALIKE, best - _AS_GOOD)]
        close.sort(key=lambda candidate: -likeness[candidate])
        return f"; did you mean {' or '.join(map(repr, close[:_MOST]))}?"
    if not or_list:
        return ""
    if len(candidates) <= _FEW:
        return f"; valid names: {', '.join(candidates) or 'none'}"
    nearest = sorted(candidates, key=lambda candidate: -likeness[candidate])[:5]
    return f"; the nearest of {len(candidates)} valid names: {', '.join(nearest)}"


def imported_on_first_use(
    package: str, module_of: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its names on first use (PEP 562).

    Args:
        package: The name of the package.
        module_of: For each public name, the module that defines it.
    """

    def attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name]), name)

    return attribute, lambda: sorted(module_of)


def _likeness(name: str, candidate: str) -> float:
    """Return a similarity from 0 to 1 that ignores case. A prefix (``fp16`` of ``fp16_compress``) counts as similar."""
    name, candidate = name.lower(), candidate.lower()
    ratio = difflib.SequenceMatcher(None, name, candidate).ratio()
    return max(ratio, _ALIKE) if len(name) > 2 and candidate.startswith(name) else ratio


def with_wildcards(name: str) -> str:
    """Return a dotted name with ``*`` in place of each number, as plans of tensor parallelism have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", f".{name}")[1:]
