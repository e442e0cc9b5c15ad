"""Find the part of a ``LightningModule`` that is pipelined, and the number of its layers on each stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from strategies.common.names import did_you_mean
from strategies.common.transformers_compat import lists_of_blocks
from strategies.launch.workers import share_of_threads
from strategies.lightning.checks import as_misconfiguration
from strategies.lightning.compat import LightningModule, MisconfigurationException, rank_zero_info
from strategies.pipeline.partition.balance import balance_by_size, balance_by_time, partition_costs
from strategies.pipeline.partition.probe import input_of
from strategies.pipeline.partition.sequential import Pipelined, check_balance
from strategies.pipeline.stage.calling import call_with_one
from strategies.pipeline.stage.skip import verify_skippables

BALANCE_MODES = ("balance_by_size", "balance_by_time")


def find_path(model: nn.Module, given: str | None, num_stages: int) -> str:
    """Return the dotted path of the part of the model that is pipelined.

    Args:
        model: The model.
        given: The path that the user has given; ``None`` to find it: ``"sequential_module"``, else the list of blocks
            of the classes that a model of Hugging Face names in ``_no_split_modules``, else the only ``nn.ModuleList``
            (or, without any, the only ``nn.Sequential``) with at least one layer per stage.
        num_stages: Number of stages.

    Raises:
        MisconfigurationException: If there are several candidates, or none.
    """
    if given is not None:
        return given
    if hasattr(model, "sequential_module"):
        return "sequential_module"
    kind = type(model).__name__
    found = lists_of_blocks(model)
    if not found:
        found = _outermost(model, nn.ModuleList, num_stages) or _outermost(model, nn.Sequential, num_stages)
    if len(found) > 1:
        listed = ", ".join(f"{path!r} ({_described(model, path)})" for path in found)
        raise MisconfigurationException(
            f"{kind} has several lists of layers that could be pipelined: {listed}. Name one of them, such as "
            f"RPCSequentialStrategy(module={found[0]!r}); the others then run in the driver's process."
        )
    if not found:
        raise MisconfigurationException(
            f"{kind} has no nn.Sequential or nn.ModuleList with at least {num_stages} layers, one for each of the "
            f"{num_stages} devices, so there is nothing to pipeline. Put its layers into one, such as "
            "`self.sequential_module = nn.Sequential(...)`, or use fewer devices."
        )
    rank_zero_info(f"RPCSequentialStrategy pipelines {found[0]!r} of {kind} ({_described(model, found[0])}).")
    return found[0]


def _outermost(model: nn.Module, kind: type[Pipelined], num_layers: int) -> list[str]:
    """Return the paths of modules of a class with enough layers, except those inside another one."""
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


def find_module(model: nn.Module, path: str) -> Pipelined:
    """Return the part of the model that is pipelined.

    Args:
        model: The model.
        path: Its dotted path in the model.

    Raises:
        MisconfigurationException: If there is no ``nn.Sequential`` or ``nn.ModuleList`` at the path, if its parameters
            have no shapes or no values, if a block is in the list twice, or if the skip connections between layers do
            not match.
    """
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
                "places of the pipeline. Give each place a block of its own, or share parameters instead of blocks."
            )
    elif type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        raise MisconfigurationException(
            f"{kind}.{path} is a {type(module).__name__} with its own forward method, which a pipeline would not run, "
            "because it calls the layers one after another. Move the code of that method into a layer, or use a plain "
            "nn.Sequential."
        )
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise MisconfigurationException(
            f"{kind}.{path} has parameters without a shape, such as {lazy[0]} (of a lazy layer): run a batch through "
            "the model before fit, or give the layer its sizes."
        )
    lost = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if lost:
        raise MisconfigurationException(
            f"{len(lost)} parameters of {kind}.{path} have no values (they are on the meta device), such as {lost[0]}: "
            "a worker of an earlier run may have ended before it returned them. Build a new model and load a "
            "checkpoint."
        )
    with as_misconfiguration():
        verify_skippables(module)
    return module


def _other_modules(model: nn.Module, path: str) -> str:
    """Return the end of a message that names other modules which the user may have meant."""
    paths = [name for name, child in model.named_modules() if isinstance(child, Pipelined) and name]
    if paths:
        return did_you_mean(path, paths)
    return "; it has neither anywhere: put its layers into one, such as `self.sequential_module = nn.Sequential(...)`"


def find_balance(
    model: LightningModule,
    module: Pipelined,
    *,
    num_stages: int,
    given: list[int] | Literal["even"] | None,
    mode: str,
    microbatches: int,
    device: torch.device,
    convert: Callable[[Any], Any] = lambda example: example,
) -> list[int]:
    """Return the number of layers of each stage, as given or measured.

    Args:
        model: The model. Layers are measured on its ``example_input_array``.
        module: The pipelined part of the model.
        num_stages: Number of stages.
        given: The number of layers of each stage; ``"even"`` for equal numbers; ``None`` to measure each layer. Without
            an example input, layers that are all alike get equal numbers under ``None`` too.
        mode: What is measured: ``"balance_by_size"`` (bytes) or ``"balance_by_time"`` (seconds).
        microbatches: Number of micro-batches; sizes of activations are those of one of them.
        device: Where a copy of one layer at a time is measured.
        convert: Gives the example input the precision of the model.

    Gradients that the parameters hold, for instance from an earlier ``fit``, are kept aside during the measurement.

    Raises:
        MisconfigurationException: If the given numbers do not fit the layers, or if there are too few layers or no
            example input.
    """
    if given is not None and given != "even":
        with as_misconfiguration():
            return check_balance(given, len(module), num_stages)
    if len(module) < num_stages:
        raise MisconfigurationException(
            f"The pipelined {type(module).__name__} has {len(module)} layers, too few for {num_stages} devices: each "
            f"stage needs one. Set devices to at most {len(module)}, or divide it into more layers."
        )
    if num_stages == 1:
        return [len(module)]
    if given == "even" or (model.example_input_array is None and _are_alike(module)):
        return partition_costs([1] * len(module), num_stages)
    if model.example_input_array is None:
        raise MisconfigurationException(
            f"Measuring the layers needs an example input: set `self.example_input_array` on {type(model).__name__} "
            f"to a batch of inputs, or give the balance, one number of layers for each of the {num_stages} devices. "
            'balance="even" gives each stage the same number of layers, whatever they cost.'
        )
    sample = input_of(module, model, convert(model.example_input_array))
    measure: Any = balance_by_time if mode == "balance_by_time" else partial(balance_by_size, chunks=microbatches)
    with as_misconfiguration(), _threads(share_of_threads(num_stages)), _gradients_set_aside(module):
        return measure(num_stages, module, sample, device=device, call=call_with_one)


def _are_alike(layers: Pipelined) -> bool:
    """Return whether all layers have the same class, the same modules inside, and tensors of the same shapes."""
    kinds = [
        [
            (
                name,
                type(module),
                [(n, t.shape) for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None],
            )
            for name, module in layer.named_modules()
        ]
        for layer in layers
    ]
    return all(kind == kinds[0] for kind in kinds)


@contextmanager
def _gradients_set_aside(module: nn.Module) -> Iterator[None]:
    """Within this, no parameter of ``module`` holds a gradient."""
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
