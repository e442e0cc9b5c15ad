"""Lightning's summary of the model under a pipeline: the whole model, and where each layer lives.

Names, types, parameter counts and modes can be read off the driver's modules. In and out sizes and FLOPs need a forward
pass of ``example_input_array``, of which the driver would only see the last stage. So that pass is run on the ``meta``
device, layer after layer in this process: shapes without values, hence without memory, computing and workers. Where a
model cannot do that (it looks at values, or a layer holds tensors that are neither parameters nor buffers), a warning
says so, and sizes and FLOPs are those of a model without an example: ``?`` and 0.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelSummary
from pytorch_lightning.utilities.model_summary import ModelSummary as Summary
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.func import functional_call

from strategies.common.torch_compat import tree_map
from strategies.pipeline.partition.sequential import cut


def show_stages(trainer: Any, module: nn.Sequential, balance: Sequence[int]) -> Callable[[], None]:
    """Makes the summary callbacks of ``trainer`` show the stage of each layer.

    A callback with a ``_summary`` of its own is left alone.

    Args:
        trainer: Its ``ModelSummary`` callbacks, ``RichModelSummary`` among them, are those that change.
        module: The pipelined part of the model.
        balance: Number of layers of each stage.

    Returns:
        A function that ends this.
    """
    shown = [
        callback
        for callback in trainer.callbacks
        if isinstance(callback, ModelSummary) and type(callback)._summary is ModelSummary._summary
    ]
    for callback in shown:
        vars(callback)["_summary"] = partial(_summary, callback, module, list(balance))

    def undo() -> None:
        for callback in shown:
            vars(callback).pop("_summary", None)

    return undo


class StageSummary(Summary):
    """Lightning's summary with one more column.

    It says ``stage 0``, ``stages 0-2`` for what spans several, and ``driver`` for what lies outside the pipelined part;
    the driver is the process of the last stage. The words are in the cells because the rich table has no heading for a
    column that Lightning does not know.

    Args:
        model: The whole model.
        max_depth: As in Lightning.
        module: The pipelined part of ``model``.
        balance: Number of layers of each stage.
    """

    def __init__(self, model: LightningModule, max_depth: int, module: nn.Sequential, balance: Sequence[int]) -> None:
        self._module, self._last = module, len(balance) - 1
        self._stages: dict[nn.Module, set[int]] = {}
        for i, stage in enumerate(cut(module, balance)):
            for layer in list(stage.modules())[1:]:
                self._stages.setdefault(layer, set()).add(i)
        super().__init__(model, max_depth)

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = super()._get_summary_data()
        modules = dict(self._model.named_modules())
        return [*columns, ("Where", [self._place(modules.get(name)) for name in dict(columns)["Name"]])]

    def _place(self, layer: nn.Module | None) -> str:
        """Where a layer lives; where there is none, it is about the parameters of the model itself."""
        if layer is None:
            return "driver"
        if layer in self._stages:
            return _in_words(self._stages[layer])
        stages = {i for part in layer.modules() for i in self._stages.get(part, ())}
        if not stages:
            return "driver"
        rest = [part for part in layer.modules() if part not in self._stages]
        return _in_words(stages | {self._last for part in rest if part._parameters or part._buffers})

    def _forward_example_input(self) -> None:
        model: Any = self._model
        example = model._apply_batch_transfer_handler(model._on_before_batch_transfer(model.example_input_array))
        example = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, example)
        kwargs = example if isinstance(example, dict) else {}
        args = () if isinstance(example, dict) else example if isinstance(example, list | tuple) else (example,)
        named = [*model.named_parameters(), *model.named_buffers()]
        shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in named}
        context = model.trainer.precision_plugin.forward_context()
        try:
            with _in_one_process(model, self._module), torch.no_grad(), context, self._flop_counter:
                functional_call(model, shapes, tuple(args), kwargs)
        except Exception as error:  # whatever the user's layers raise
            self._flop_counter.flop_counts.clear()
            rank_zero_warn(
                "The model summary lacks sizes and FLOPs. To find them, example_input_array goes through "
                f"{type(model).__name__}.forward on the meta device, as shapes without values; that failed with "
                f"{type(error).__name__}: {error}"
            )


def _summary(
    callback: ModelSummary, module: nn.Sequential, balance: list[int], trainer: Trainer, model: LightningModule
) -> StageSummary:
    """Stands for ``ModelSummary._summary``."""
    return StageSummary(model, callback._max_depth, module, balance)


def _in_words(stages: set[int]) -> str:
    first, last = min(stages), max(stages)
    if first == last:
        return f"stage {first}"
    adjacent = len(stages) == last - first + 1
    return f"stages {first}-{last}" if adjacent else "stages " + ", ".join(map(str, sorted(stages)))


@contextmanager
def _in_one_process(model: nn.Module, module: nn.Sequential) -> Iterator[None]:
    """In evaluation mode, and with ``module`` calling its layers itself."""
    modes = {part: part.training for part in model.modules()}
    pipelined = vars(module).pop("forward", None)
    try:
        model.eval()
        yield
    finally:
        if pipelined is not None:
            vars(module)["forward"] = pipelined
        for part, mode in modes.items():
            part.training = mode
