"""Settings of Hugging Face models and of torch's Transformers that a pipeline handles differently or cannot support."""

from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from strategies.common.joined_lists import JoinedLists
from strategies.common.transformers_compat import switch_off_cache, switch_off_recomputation
from strategies.lightning.compat import MisconfigurationException, rank_zero_info, rank_zero_warn
from strategies.lightning.features.feature import Feature
from strategies.lightning.hooks import Undo
from strategies.lightning.run import Preparation, Run
from strategies.pipeline.executor.settings import Settings


class HuggingFaceModels(Feature):
    """Switches off the key-value cache, and gradient checkpointing of blocks that their stages recompute."""

    def check(self, prepared: Preparation) -> None:
        """Refuse LayerDrop, and warn about an auxiliary loss of routers."""
        if isinstance(prepared.module, nn.ModuleList) and prepared.is_fitting:
            module = prepared.module
            parts = [start[:-1] for start, _ in module.parts] if isinstance(module, JoinedLists) else [prepared.path]
            for path in parts:
                check_layer_drop(prepared.model, path)
            warn_of_router_loss(prepared.model, prepared.settings)

    def begin(self, run: Run) -> Iterable[Undo]:
        """Switch off what stages do not need."""
        if isinstance(run.module, nn.ModuleList):
            yield from switch_off_cache(run.model)
        mode = run.settings.checkpoint
        if not run.is_fitting or mode == "never":
            return
        undo, where = switch_off_recomputation(run.module), f" in {run.path!r}" if run.path else ""
        yield from undo
        if undo:
            rank_zero_info(
                f"RPCSequentialStrategy switches off gradient checkpointing of the blocks{where} during fit: "
                f"its stages recompute them, because checkpoint={mode!r}. With checkpoint='never' each block "
                "recomputes itself."
            )


class TransformerEncoders(Feature):
    """Switches off nested tensors of each ``nn.TransformerEncoder`` whose layers are the blocks.

    In evaluation, the encoder would make a nested tensor of the rows without their padding, from the values of a weight
    of the first layer, and blocks on other processes take tensors with a shape.
    """

    def begin(self, run: Run) -> Iterable[Undo]:
        """Switch the setting off."""
        inside = set(run.module.modules())
        encoders = [module for module in run.model.modules() if isinstance(module, nn.TransformerEncoder)]
        for encoder in encoders:
            if encoder.use_nested_tensor and encoder not in inside and not inside.isdisjoint(encoder.layers):
                encoder.use_nested_tensor = False
                yield partial(setattr, encoder, "use_nested_tensor", True)


def check_layer_drop(model: nn.Module, path: str) -> None:
    """Refuse a model that skips blocks at random in training (LayerDrop: Fan et al., 2020, arXiv:1909.11556).

    Args:
        model: The model.
        path: Path of the blocks. The probability is an attribute of the module that contains them, or of its
            configuration.

    Raises:
        MisconfigurationException: If the probability is not 0.
    """
    parent = path.rpartition(".")[0]
    owner: Any = attrgetter(parent)(model) if parent else model
    where = "layerdrop" if hasattr(owner, "layerdrop") else "config.layerdrop"
    try:
        probability = attrgetter(where)(owner)
    except AttributeError:
        return
    if isinstance(probability, int | float) and probability > 0:
        raise MisconfigurationException(
            f"{type(model).__name__}.{parent} skips blocks at random in training ({where} is {probability}), but a "
            f"pipeline runs every block. Set {parent}.{where} = 0."
        )


def warn_of_router_loss(model: nn.Module, settings: Settings) -> None:
    """Warn if a Hugging Face mixture of experts adds its auxiliary loss, which is not a mean over rows."""
    if not settings.interleaves or settings.microbatches == 1:
        return
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False) is True:
            rank_zero_warn(
                f"{name}, a {type(module).__name__}, adds the auxiliary loss of its routers, because of "
                f"output_router_logits=True. Under schedule={settings.schedule!r} each micro-batch has such a loss, so "
                "the total differs from that of one process. schedule='gpipe' computes it for the whole batch."
            )
            return
