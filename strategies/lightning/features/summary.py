"""Lightning's summary of the whole model, with a column that shows the stage of each layer.

Names, types, parameter counts and modes come from the driver's modules. Input and output sizes and FLOPs need a forward
pass of ``example_input_array``, but the driver would see only the last stage of it. The pass therefore runs on the
``meta`` device, layer by layer in this process. Tensors there have shapes but no values, so the pass needs no worker,
no memory for values and hardly any time. Some models cannot run there, because they read values or because a layer
holds tensors that are neither parameters nor buffers. A warning then says so, and the summary shows ``?`` for sizes and
0 for FLOPs, as Lightning does for a model without an example. A logger that traces the model (``log_graph=True``) is
refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from strategies.common.torch_compat import CALL_ATTRIBUTE, tree_map
from strategies.lightning.compat import (
    LightningModule,
    MisconfigurationException,
    ModelSummary,
    Summary,
    TensorBoardLogger,
    Trainer,
    example_batch_of,
    has_own_summary,
    logs_graph,
    rank_zero_warn,
    summary_depth,
)
from strategies.lightning.features.feature import Feature
from strategies.lightning.hooks import Undo, show_summary
from strategies.lightning.run import Preparation, Run


class SummaryOfStages(Feature):
    """Shows the stage of each layer in the model summary."""

    def check(self, prepared: Preparation) -> None:
        """Check that no logger traces the model."""
        if prepared.is_fitting:
            check_loggers(prepared.trainer)

    def begin(self, run: Run) -> Iterable[Undo]:
        """Make summary callbacks show the stage of each layer."""
        return show_stages(run.trainer, run.pipeline.module, run.pipeline.stages)


def check_loggers(trainer: Any) -> None:
    """Check that no logger traces the model, because a trace would contain only the driver's stage.

    Raises:
        MisconfigurationException: If a logger traces the model.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and logs_graph(logger):
            raise MisconfigurationException(
                f"{type(logger).__name__}(log_graph=True) traces the model in one process, but its layers are in "
                "several. Leave log_graph out; the model summary shows which layer is where."
            )


def show_stages(trainer: Any, module: nn.Module, stages: Sequence[nn.Sequential]) -> list[Undo]:
    """Make the summary callbacks of a Trainer show the stage of each layer.

    Args:
        trainer: The Trainer. Its ``ModelSummary`` callbacks change, including ``RichModelSummary``, except callbacks
            whose class overrides how the summary is made.
        module: The pipelined part of the model.
        stages: The parts of ``module``.

    Returns:
        Functions that make the callbacks show Lightning's summary again.
    """

    def stage_summary(depth: int, trainer: Trainer, model: LightningModule) -> StageSummary:
        return StageSummary(model, depth, module, stages)

    return [
        show_summary(callback, partial(stage_summary, summary_depth(callback)))
        for callback in trainer.callbacks
        if isinstance(callback, ModelSummary) and not has_own_summary(callback)
    ]


class StageSummary(Summary):
    """Lightning's summary with a column ``Where``.

    A cell says ``stage 0``, or ``stages 0-2`` for a module that spans several stages, or ``driver`` for a module
    outside the pipelined part. The driver is the process of the last stage. Each cell contains the word ``stage`` or
    ``driver``, because ``RichModelSummary`` prints no heading for a column that it does not know.

    Args:
        model: The whole model.
        max_depth: The depth down to which modules are listed; -1 lists all modules.
        module: The pipelined part of ``model``.
        stages: The parts of ``module``.
    """

    def __init__(
        self, model: LightningModule, max_depth: int, module: nn.Module, stages: Sequence[nn.Sequential]
    ) -> None:
        self._module, self._last = module, len(stages) - 1
        self._stages: dict[nn.Module, set[int]] = {}
        for i, stage in enumerate(stages):
            for layer in list(stage.modules())[1:]:
                self._stages.setdefault(layer, set()).add(i)
        super().__init__(model, max_depth)

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = super()._get_summary_data()
        modules = dict(self._model.named_modules())
        return [*columns, ("Where", [self._place(modules.get(name)) for name in dict(columns)["Name"]])]

    def _place(self, layer: nn.Module | None) -> str:
        """Return the cell of a module; ``None`` stands for parameters that belong to the model directly."""
        if layer is None:
            return "driver"
        if layer in self._stages:
            return _cell_of(self._stages[layer])
        stages = {i for part in layer.modules() for i in self._stages.get(part, ())}
        if not stages:
            return "driver"
        rest = [part for part in layer.modules() if part not in self._stages]
        return _cell_of(stages | {self._last for part in rest if part._parameters or part._buffers})

    def _forward_example_input(self) -> None:
        model: Any = self._model
        example = example_batch_of(model)
        example = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, example)
        kwargs = example if isinstance(example, dict) else {}
        args = () if isinstance(example, dict) else example if isinstance(example, list | tuple) else (example,)
        named = [*model.named_parameters(), *model.named_buffers()]
        shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in named}
        context = model.trainer.precision_plugin.forward_context()
        try:
            with _in_one_process(model, self._module), torch.no_grad(), context, self._flop_counter:
                functional_call(model, shapes, tuple(args), kwargs)
        except Exception as error:  # the user's layers may raise anything
            self._flop_counter.flop_counts.clear()
            rank_zero_warn(
                "The model summary lacks sizes and FLOPs. To find them, example_input_array goes through "
                f"{type(model).__name__}.forward on the meta device, as shapes without values; that failed with "
                f"{type(error).__name__}: {error}"
            )


def _cell_of(stages: set[int]) -> str:
    first, last = min(stages), max(stages)
    if first == last:
        return f"stage {first}"
    adjacent = len(stages) == last - first + 1
    return f"stages {first}-{last}" if adjacent else "stages " + ", ".join(map(str, sorted(stages)))


@contextmanager
def _in_one_process(model: nn.Module, module: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode, and ``module`` calls its layers in this process."""
    modes = {part: part.training for part in model.modules()}
    pipelined = vars(module).pop("forward", None)
    intercepted = [(part, vars(part).pop(CALL_ATTRIBUTE)) for part in module.children() if CALL_ATTRIBUTE in vars(part)]
    try:
        model.eval()
        yield
    finally:
        if pipelined is not None:
            vars(module)["forward"] = pipelined
        for part, call in intercepted:
            vars(part)[CALL_ATTRIBUTE] = call
        for part, mode in modes.items():
            part.training = mode
