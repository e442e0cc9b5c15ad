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
from strategies.launch.workers import share_of_threads
from strategies.lightning.checks import as_misconfiguration
from strategies.lightning.compat import LightningModule, MisconfigurationException
from strategies.pipeline.partition.balance import balance_by_size, balance_by_time, partition_costs
from strategies.pipeline.partition.probe import input_of
from strategies.pipeline.partition.sequential import check_balance
from strategies.pipeline.stage.calling import call_with_one
from strategies.pipeline.stage.skip import verify_skippables

BALANCE_MODES = ("balance_by_size", "balance_by_time")


def find_module(model: LightningModule, path: str) -> nn.Sequential:
    """Return the ``nn.Sequential`` to be pipelined.

    Args:
        model: The model.
        path: The dotted path of the ``nn.Sequential`` in the model.

    Raises:
        MisconfigurationException: If there is no ``nn.Sequential`` at the path, if its parameters have no shapes or no
            values, or if the skip connections between its layers do not match.
    """
    kind = type(model).__name__
    hint = _other_modules(model, path)
    try:
        module = attrgetter(path)(model)
    except AttributeError:
        raise MisconfigurationException(
            f"{kind} has no {path!r}, the nn.Sequential to be pipelined: set `self.{path} = nn.Sequential(...)`, or "
            f"name another one by RPCSequentialStrategy(module=...){hint}"
        ) from None
    if isinstance(module, nn.ModuleList):
        return module
        raise MisconfigurationException(
            f"{kind}.{path} is an nn.ModuleList, whose layers the model calls itself, so a pipeline cannot run them on "
            "other processes. If each layer takes what the previous one returns, make it an nn.Sequential (parameters "
            f"keep their names, so checkpoints still load) and call `x = self.{path}(x)` in place of the loop over it. "
            "Anything else that the loop does has to move into the layers."
        )
    if not isinstance(module, nn.Sequential):
        raise MisconfigurationException(
            f"{kind}.{path} must be an nn.Sequential to be pipelined, but is a {type(module).__name__}: put its "
            f"layers into one, or name another one by RPCSequentialStrategy(module=...){hint}"
        )
    if type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
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
    sequentials = [name for name, child in model.named_modules() if isinstance(child, nn.Sequential) and name]
    if sequentials:
        return did_you_mean(path, sequentials)
    lists = [name for name, child in model.named_modules() if isinstance(child, nn.ModuleList)]
    if not lists:
        return "; it has no nn.Sequential at all"
    return f"; it has no nn.Sequential, but an nn.ModuleList, {lists[0]!r}: make that an nn.Sequential"


def find_balance(
    model: LightningModule,
    module: nn.Sequential,
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
            f"The pipelined nn.Sequential has {len(module)} layers, too few for {num_stages} devices: each stage needs "
            f"one. Set devices to at most {len(module)}, or divide it into more layers."
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


def _are_alike(layers: nn.Sequential) -> bool:
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
