"""Strategies by name, and what to say about a name that is not there. Imports neither torch nor Lightning."""

import difflib
from collections.abc import Iterable

# What ``trainer.Trainer(strategy=...)`` adds to Lightning's names: the name and the attribute of ``strategies``.
PLUGINS = {
    "ddp": "DDPStrategy",
    "rpc_sequential": "RPCSequentialStrategy",
}

_FEW = 12  # so many names fit into a message


def did_you_mean(name: str, valid: Iterable[str], *, or_list: bool = True) -> str:
    """The end of a message about an unknown ``name``: the nearest valid names, or all of them where they are few.

    Where none is near, ``or_list`` says whether to name the valid ones all the same.

    >>> did_you_mean("micro_batches", ["balance", "microbatches"])
    "; did you mean 'microbatches'?"
    """
    by_lower = {candidate.lower(): candidate for candidate in sorted(valid, reverse=True)}  # Adam before adam
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(repr(by_lower[match]) for match in close)}?"
    if not or_list:
        return ""
    if len(by_lower) <= _FEW:
        return f"; valid names: {', '.join(sorted(by_lower.values())) or 'none'}"
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=5, cutoff=0.0)
    return f"; the nearest of {len(by_lower)} valid names: {', '.join(by_lower[match] for match in nearest)}"
