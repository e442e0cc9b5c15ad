"""Hooks of the user on parameters of the driver, which run once per micro-batch: a warning."""

from strategies.common.torch_compat import gradient_hooks
from strategies.lightning.compat import rank_zero_warn
from strategies.lightning.features.feature import Feature
from strategies.lightning.run import Preparation


class HooksOnParameters(Feature):
    """Warns if a hook on a parameter gets the gradient of each micro-batch instead of that of the batch."""

    def check(self, prepared: Preparation) -> None:
        """Warn of the first such parameter. Hooks on a parameter that goes to a worker are an error later."""
        settings = prepared.settings
        if not prepared.is_fitting or not settings.pipelined_backward or settings.microbatches == 1:
            return
        within = set(prepared.module.parameters())
        for name, parameter in prepared.model.named_parameters():
            is_cut = settings.interleaves or parameter in within
            if is_cut and parameter.requires_grad and any(gradient_hooks(parameter)):
                rank_zero_warn(
                    f"Parameter {name} has a hook (register_hook), which runs once per micro-batch and gets a part of "
                    "the gradient of the batch. To read or change the whole gradient, use on_after_backward or "
                    "on_before_optimizer_step, or schedule=Schedule('gpipe', pipelined_backward=False), under which "
                    "hooks run once per batch."
                )
                return
