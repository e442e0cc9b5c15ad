"""Finds the layers of a ``LightningModule`` to pipeline: the list of blocks, or several lists, and their names.

Without a name, this is ``sequential_module`` if the model has one; else the lists of blocks by which a model of
``transformers`` is known (:func:`~strategies.common.transformers_compat.lists_of_blocks`); else the outermost
``nn.ModuleList`` or ``nn.Sequential`` with enough layers.
"""

from collections.abc import Sequence
from operator import attrgetter

from torch import nn
from torch.nn.parameter import is_lazy

from strategies.common.joined_lists import JoinedLists
from strategies.common.names import did_you_mean
from strategies.common.transformers_compat import lists_of_blocks
from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.compat import (
    MisconfigurationException,
    rank_zero_info,
    rank_zero_warn,
)
from strategies.pipeline.construction.without_memory import Construction
from strategies.pipeline.partition.chains import chains_of
from strategies.pipeline.partition.sequential import Pipelined
from strategies.pipeline.stage.skip import skips_of, verify_skippables

Where = str | tuple[tuple[str, ...], ...]
"""The dotted path of the pipelined module; for several lists of layers, the paths of the parts of each list."""


def find_path(
    model: nn.Module,
    given: str | Sequence[str] | None,
    num_stages: int,
    num_chunks: int | None = None,
    *,
    several: bool = False,
) -> Where:
    """Return the dotted path of the pipelined part of the model, or those of several lists of layers.

    Several ``nn.Sequential`` that the model calls one after another, with nothing but single layers in between, count
    as one list.

    Args:
        model: The model.
        given: The path or paths that the user has given; ``None`` to find them. The first choice is
            ``"sequential_module"``. The second are the lists of blocks of the classes that a Hugging Face model names
            in ``_no_split_modules``. The third are the ``nn.ModuleList`` (or, without any, the ``nn.Sequential``) with
            at least one layer per chunk. An ``nn.Sequential`` next to an ``nn.ModuleList`` is a candidate too if it
            has more parameters, and one that contains all ``nn.ModuleList`` is chosen if there are several of these.
        num_stages: Number of stages.
        num_chunks: Number of chunks of layers in all stages; by default one per stage.
        several: Whether several lists may be pipelined one after another.

    Raises:
        MisconfigurationException: If there are several candidates, of which only one can be pipelined, or none.
    """
    if isinstance(given, str):
        return given
    if given is not None:
        _check_names(model, given)
        groups = chains_of(model, given)
        if [len(group) for group in groups] != [1] * len(given):
            _announce_lists(model, groups)
        return _where(groups)
    kind = type(model).__name__
    if hasattr(model, "sequential_module"):
        _announce(model, "sequential_module")
        return "sequential_module"
    found, least, smaller = lists_of_blocks(model), num_chunks or num_stages, list[str]()
    if not found:
        found, smaller = _candidates(model, least)
    elif len(long := [path for path in found if len(model.get_submodule(path)._modules) >= least]) > 0:
        found = long
    groups = [(path,) for path in found]
    if len(found) != 1 and not any(isinstance(model.get_submodule(path), nn.ModuleList) for path in found):
        groups = chains_of(model, _outermost(model, nn.Sequential, 1))
        groups = [group for group in groups if _num_layers(model, group) >= least]
    if len(groups) > 1 and not several:
        listed = ", ".join(_described_group(model, group) for group in groups)
        raise MisconfigurationException(
            f"{kind} has several lists of layers that could be pipelined: {listed}. Name one of them, such as "
            f"RPCSequentialStrategy(module={groups[0][0]!r}); the others then run in the driver's process. Or use "
            "schedule 'gpipe' or '1f1b', which pipeline all of them, one after another."
        )
    if not groups:
        each = f"{num_stages} devices" if least == num_stages else f"{least} chunks of layers on {num_stages} devices"
        raise MisconfigurationException(
            f"{kind} has no nn.Sequential or nn.ModuleList with at least {least} layers, one for each of the {each}, "
            "so there is nothing to pipeline. Put its layers into one, such as "
            "`self.sequential_module = nn.Sequential(...)`, or use fewer devices."
        )
    where = _where(groups)
    if isinstance(where, str):
        _announce(model, where, smaller)
    else:
        _announce_lists(model, where)
    return where


def _where(groups: Sequence[Sequence[str]]) -> Where:
    return groups[0][0] if len(groups) == 1 and len(groups[0]) == 1 else tuple(map(tuple, groups))


def _num_layers(model: nn.Module, group: Sequence[str]) -> int:
    parts = [model.get_submodule(path) for path in group]
    return sum(len(part._modules) if isinstance(part, Pipelined) else 1 for part in parts)


def _described_group(model: nn.Module, group: Sequence[str]) -> str:
    if len(group) == 1:
        return f"{group[0]!r} ({_described(model, group[0])})"
    return f"{described((tuple(group),))} as one list ({_num_layers(model, group)} layers)"


def _announce_lists(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    listed = ", then ".join(_described_group(model, group) for group in groups)
    several = ", one after another. Name fewer by module=..., and the others run on the driver" if groups[1:] else ""
    rank_zero_info(f"RPCSequentialStrategy pipelines {listed} of {type(model).__name__}{several}.")


def _candidates(model: nn.Module, num_layers: int) -> tuple[list[str], list[str]]:
    """Return the paths of the modules that could be pipelined, and of each ``nn.Sequential`` smaller than the list."""
    lists, sequences = (_outermost(model, kind, num_layers) for kind in (nn.ModuleList, nn.Sequential))
    if not lists:
        return sequences, []
    around = [one for one in sequences if all(path.startswith(f"{one}.") for path in lists)]
    if around and len(lists) > 1:
        return around, []
    apart = [
        one for one in sequences if not any(f"{a}.".startswith(f"{b}.") for x in lists for a, b in ((one, x), (x, one)))
    ]
    largest = max(_num_parameters(model, path) for path in lists)
    larger = [path for path in apart if _num_parameters(model, path) > largest]
    return larger + lists, [path for path in apart if path not in larger]


def _num_parameters(model: nn.Module, path: str) -> int:
    return sum(p.numel() for p in model.get_submodule(path).parameters() if not is_lazy(p))


def _announce(model: nn.Module, path: str, smaller: Sequence[str] = ()) -> None:
    if isinstance(getattr(model, path.partition(".")[0]), nn.Module):  # if not, find_module refuses it
        kind = type(model).__name__
        others = ", ".join(f"{other!r} ({_described(model, other)})" for other in smaller)
        rank_zero_info(
            f"RPCSequentialStrategy pipelines {path!r} of {kind} ({_described(model, path)})"
            + (f"; it is larger than {others}, which runs on the driver." if others else ".")
        )


def _outermost(model: nn.Module, kind: type[Pipelined], num_layers: int) -> list[str]:
    """Return the paths of modules of a class with enough layers, except modules inside another such module."""
    found: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not is_inside and type(module) is kind and len(module) >= num_layers:
            found.append(path)
    return found


def _described(model: nn.Module, path: str) -> str:
    module = model.get_submodule(path)
    kinds = dict.fromkeys(type(child).__name__ for child in module.children())
    return f"{len(list(module.children()))} {' and '.join(kinds)}"


def _check_names(model: nn.Module, paths: Sequence[str]) -> None:
    """Check the lists that the user has named.

    Raises:
        MisconfigurationException: If there is no list at a path, or if one is named twice or is inside another.
    """
    for number, path in enumerate(paths):
        _check_list(model, path)
        for other in paths[:number]:
            if f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}."):
                raise MisconfigurationException(
                    f"module names {other!r} and {path!r}, which have layers in common. Name each list of layers once."
                )


def described(where: Where) -> str:
    """Return the paths of the pipelined layers, for messages."""
    if isinstance(where, str):
        return repr(where)
    *paths, last = [repr(path) for paths in where for path in paths]
    return f"{', '.join(paths)} and {last}" if paths else last


def find_module(
    model: nn.Module, where: Where, construction: Construction | None = None, *, needs_values: bool = True
) -> Pipelined:
    """Return the pipelined part of the model; for several lists, all of their layers as one sequence.

    Args:
        model: The model.
        where: The dotted path of the part in the model, or those of several lists.
        construction: Knows how to build parameters that have no values yet.
        needs_values: Whether parameters without values that it cannot build are an error.

    Raises:
        MisconfigurationException: If there is no ``nn.Sequential`` or ``nn.ModuleList`` at the path, or if its
            parameters have no shapes or no values. Also if a block is in the list twice or cannot be called, or if the
            skip connections between layers do not match.
    """
    kind = type(model).__name__
    if not isinstance(where, str):
        for path in (path for paths in where for path in paths):
            if isinstance(model.get_submodule(path), Pipelined):  # not a single layer between two of them
                _check_list(model, path)
        module: Pipelined = _joined(model, where)
    else:
        module = _check_list(model, where)
    lacks = construction.lacks_values if construction is not None else attrgetter("is_meta")
    lost = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if lacks(tensor)]
    if lost and needs_values:
        raise MisconfigurationException(
            f"{len(lost)} parameters or buffers of {kind} have no values (they are on the meta device), such as "
            f"{lost[0]}: they stayed on the workers of an earlier run (gather_on_end=False, or a model that was built "
            "in configure_model), or such a worker has ended before it returned them, or their module was built on the "
            "meta device and has no reset_parameters. Give a checkpoint: trainer.fit(model, ckpt_path=...), or "
            "ckpt_path of validate, test and predict."
        )
    if isinstance(module, JoinedLists) and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise MisconfigurationException(
            f"{kind} has tensors without memory (built in configure_model or init_module), which a pipeline builds for "
            f"one nn.Sequential or nn.ModuleList, but {described(where)} are pipelined together. Name one of them by "
            "module=..., or build the model in __init__."
        )
    with as_misconfiguration():
        verify_skippables(module)
    return module


def _joined(model: nn.Module, where: Sequence[Sequence[str]]) -> JoinedLists:
    """Return the layers of several lists."""
    kind, module = type(model).__name__, JoinedLists(model, where)
    if len(set(module)) < len(module):
        raise MisconfigurationException(f"{kind} has the same layer in two of the lists {described(module.paths)}.")
    for name, layer in module._modules.items():
        if layer is not None and any(skips_of(layer)):
            raise MisconfigurationException(
                f"{kind}.{name} stashes or pops a value (@skippable), which only the layers of one nn.Sequential can "
                "do. Name that list alone by module=..."
            )
    return module


def _check_list(model: nn.Module, path: str) -> Pipelined:
    """Return the module at a path, which must be a list that can be pipelined."""
    kind = type(model).__name__
    try:
        module = attrgetter(path)(model)
    except AttributeError:
        raise MisconfigurationException(
            f"{kind} has no {path!r}, the nn.Sequential or nn.ModuleList to be pipelined{_other_modules(model, path)}"
        ) from None
    if not isinstance(module, Pipelined):
        raise MisconfigurationException(
            f"{kind}.{path} must be an nn.Sequential or an nn.ModuleList to be pipelined, but is a "
            f"{type(module).__name__}{_other_modules(model, path)}"
        )
    if isinstance(module, nn.ModuleList):
        if len(set(module)) < len(module):
            raise MisconfigurationException(
                f"{kind}.{path} contains the same block several times, so one process would have to run it at several "
                "places of the pipeline. Give each place a separate block, or share parameters instead of blocks."
            )
    elif type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        raise MisconfigurationException(
            f"{kind}.{path} is a {type(module).__name__} with its own forward method, which a pipeline would not run, "
            "because it calls the layers one after another. Move the code of that method into a layer, or use a plain "
            "nn.Sequential. Or use an nn.ModuleList, and call its blocks in the forward method of the module around it."
        )
    for name, block in module.named_children():
        if not _is_callable(block):
            raise MisconfigurationException(
                f"{kind}.{path} cannot be pipelined: its entry {name!r}, a {type(block).__name__}, has no forward, so "
                "the model calls the parts of its entries, and no entry as a whole. Give the entries a forward that "
                "does what the loop does for one of them, and call them in the loop. A class Block(nn.ModuleList) with "
                "`def forward(self, x): first, second = self; ...` keeps the names of the weights. Or name another "
                "list by module=..."
            )
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise MisconfigurationException(
            f"{kind}.{path} has parameters without a shape, such as {lazy[0]} (of a lazy layer): run a batch through "
            "the model before fit, or give the layer its sizes."
        )
    checked: Pipelined = module
    return checked


def _is_callable(block: nn.Module) -> bool:
    """Return whether a module has a ``forward``, or overrides ``__call__`` of ``nn.Module``."""
    kind = type(block)
    forward = getattr(kind, "forward", None)  # the class of a traced module raises an error
    return "forward" in vars(block) or forward is not nn.Module.forward or kind.__call__ is not nn.Module.__call__


def _other_modules(model: nn.Module, path: str) -> str:
    """Return the end of a message that names other modules which the user may have meant."""
    paths = [name for name, child in model.named_modules() if isinstance(child, Pipelined) and name]
    if paths:
        return did_you_mean(path, paths)
    return "; it has neither anywhere: put its layers into one, such as `self.sequential_module = nn.Sequential(...)`"


def warn_of_time_first(module: nn.Module, path: str) -> None:
    """Warn if a layer takes time as the first dimension, because a pipeline splits that dimension as the batch."""
    for name, layer in module.named_children():
        if getattr(getattr(layer, "self_attn", layer), "batch_first", True) is False:
            rank_zero_warn(
                f"Layer {name} of {path}, a {type(layer).__name__}, has batch_first=False, so its first dimension "
                "is time; a pipeline splits the first dimension into micro-batches. Give it batch_first=True."
            )
            return


def warn_of_compiled_model(path: str) -> None:
    """Warn if a module that contains the pipelined blocks is compiled, since the blocks run on their stages."""
    if "_orig_mod" in path.split("."):
        rank_zero_warn(
            f"{path} is inside a module in torch.compile(...), which compiles neither its blocks, because they run on "
            "their stages, nor the code that calls them. Compile the blocks instead: "
            "blocks[i] = torch.compile(blocks[i])."
        )
