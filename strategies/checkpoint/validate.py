"""Check that a state dict fits a module before it is loaded, so that either all of it is loaded or nothing.

torch's ``load_state_dict`` copies the entries that fit and raises afterwards, which leaves a partly loaded model.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from strategies.common.patching import replaced
from strategies.common.stage_layers import StageLayers, describe, layer_of
from strategies.common.torch_compat import EXTRA_STATE_KEY_SUFFIX, non_persistent_buffers

_ANY = "any"
"""Placeholder for the shape of a lazy parameter, which has no shape yet."""

DescribeStage = Callable[[str], str]
"""Describes the stage that holds an entry of a state dict, given its name. Returns "" if the stage is not known."""


def no_stage(name: str) -> str:
    """Return an empty string: the :data:`DescribeStage` of a model without stages."""
    return ""


def stages_by_name(stages: Sequence[StageLayers], prefix: str) -> DescribeStage:
    """Return the :data:`DescribeStage` of a module that has the stages' layers under ``prefix``."""
    described = {name: describe(i, layers) for i, layers in enumerate(stages) for name in layers._modules}

    def stage_of(name: str) -> str:
        layer = layer_of(name[len(prefix) :], described) if name.startswith(prefix) else None
        return "" if layer is None else described[layer]

    return stage_of


def check_fit(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    stage_of: DescribeStage = no_stage,
    dry_run: Callable[[], AbstractContextManager[Any]] | None = None,
) -> None:
    """Check that ``state`` can be loaded into ``module``.

    Compares names and shapes. If they differ, tries ``load_state_dict`` on tensors without values, because hooks of the
    module may handle the difference.

    Args:
        module: The module; it is not changed.
        state: The state dict.
        strict: As in ``load_state_dict``.
        stage_of: Describes the stage of an entry, for the error message.
        dry_run: Returns a context in which ``load_state_dict`` has no effect on other processes.

    Raises:
        RuntimeError: If ``state`` does not fit.
    """
    expected = _shapes(module)
    given = {name: _shape(value) for name, value in state.items()}
    if expected == {name: shape if expected.get(name) != _ANY else _ANY for name, shape in given.items()}:
        return
    complaints, missing, unexpected = [], expected.keys() - state.keys(), state.keys() - expected.keys()
    with _without_values(module), dry_run() if dry_run else warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is a no-op")
        try:
            missing, unexpected = map(set, nn.Module.load_state_dict(module, state, strict=False))
        except RuntimeError as error:  # wrong shapes, or raised by a layer of the user
            complaints = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
    if strict:
        order = [*expected, *state]
        complaints += [f"missing {names}" for names in _by_stage(missing, order, stage_of)]
        complaints += [f"unexpected {names}" for names in _by_stage(unexpected, order, stage_of)]
    if complaints:
        lines = "".join(f"\n  {complaint}" for complaint in complaints)
        raise RuntimeError(
            f"the state dict does not fit {type(module).__name__}, and nothing of it has been loaded:{lines}"
        )


def check_before_loading(
    model: nn.Module,
    paths: Sequence[str],
    stages: Sequence[StageLayers],
    dry_run: Callable[[], AbstractContextManager[Any]],
    *,
    are_full: bool = False,
) -> list[Callable[[], None]]:
    """Make ``load_state_dict`` call :func:`check_fit` first, on the modules from ``model`` to those at ``paths``.

    A module that overrides ``load_state_dict`` is not changed.

    Args:
        model: The model.
        paths: Dotted path of the pipelined module, or of each module with pipelined layers.
        stages: The stages of the pipelined module.
        dry_run: As in :func:`check_fit`.
        are_full: Whether the names of the layers in ``stages`` begin with the path.

    Returns:
        Functions that undo this.
    """
    undo: list[Callable[[], None]] = []
    seen: set[str] = set()
    for names in (path.split(".") for path in paths):
        for k in range(len(names) + 1):
            start = ".".join(names[:k])
            module: Any = attrgetter(start)(model) if k else model
            if (
                start not in seen
                and isinstance(module, nn.Module)
                and type(module).load_state_dict is nn.Module.load_state_dict
            ):
                full = stages_by_name(stages, "")
                own = stages_by_name(stages, "".join(f"{name}." for name in names[k:]))
                stage_of = partial(_stage_of_full, full, f"{start}." if k else "") if are_full else own
                undo.append(replaced(module, "load_state_dict", partial(_check_and_load, module, stage_of, dry_run)))
            seen.add(start)
    return undo


def _stage_of_full(stage_of: DescribeStage, start: str, name: str) -> str:
    return stage_of(start + name)


def _check_and_load(
    module: nn.Module,
    stage_of: DescribeStage,
    dry_run: Callable[[], AbstractContextManager[Any]],
    state_dict: Mapping[str, Any],
    strict: bool = True,
    assign: bool = False,
) -> Any:
    if isinstance(state_dict, Mapping):
        check_fit(module, state_dict, strict=strict, stage_of=stage_of, dry_run=dry_run)
    return nn.Module.load_state_dict(module, state_dict, strict=strict, assign=assign)


def _by_stage(names: Collection[str], order: Iterable[str], stage_of: DescribeStage) -> Iterator[str]:
    """Yield one string per stage that lists the ``names`` of its entries, in the given order."""
    of_stage: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name in order if name in names):
        of_stage.setdefault(stage_of(name), []).append(name)
    for stage, own in of_stage.items():
        yield f"{f'in {stage}' if stage else 'keys'}: {', '.join(own)}"


def _shapes(module: nn.Module) -> dict[str, Any]:
    """Return the shape of each entry of the state dict of ``module``, without hooks; ``None`` for an extra state."""
    shapes: dict[str, Any] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        tensors = {
            **child._parameters,
            **{name: b for name, b in child._buffers.items() if name not in non_persistent_buffers(child)},
        }
        shapes.update({start + name: _shape(tensor) for name, tensor in tensors.items() if tensor is not None})
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            shapes[start + EXTRA_STATE_KEY_SUFFIX] = None
    return shapes


def _shape(value: Any) -> Any:
    if is_lazy(value):  # a lazy parameter takes the shape of the loaded tensor
        return _ANY
    return tuple(value.shape) if isinstance(value, Tensor) else None


@contextmanager
def _without_values(module: nn.Module) -> Iterator[None]:
    """Context in which parameters and buffers of ``module`` are on the ``meta`` device and extra states are ignored."""
    children = list(module.modules())
    # Some layers store loaded values in plain attributes.
    before = [(child, dict(child._parameters), dict(child._buffers), dict(vars(child))) for child in children]
    for child, parameters, buffers, _ in before:
        child._parameters.update({name: _like(p) for name, p in parameters.items() if p is not None})
        child._buffers.update({name: _like(b) for name, b in buffers.items() if b is not None})
        vars(child)["set_extra_state"] = lambda state: None
    try:
        yield
    finally:
        for child, parameters, buffers, attributes in before:
            child._parameters.clear()
            child._parameters.update(parameters)
            child._buffers.clear()
            child._buffers.update(buffers)
            vars(child).clear()
            vars(child).update(attributes)


def _like(tensor: Any) -> Any:
    if is_lazy(tensor):
        kind: Any = type(tensor)
        return kind(requires_grad=False, device="meta", dtype=tensor.dtype)
    bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
