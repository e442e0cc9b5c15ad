"""Optimizers over a ``Pipe`` with partitions on workers: their steps apply to every process."""

from collections.abc import Mapping, Sequence
from functools import partial

import cloudpickle
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.stage_layers import StageLayers, locate
from strategies.common.trees import on_cpu
from strategies.optim.restricted import numbers_of, parameters_of, restricted, taken_apart
from strategies.optim.trial import check_divisible
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.optim.optimizers import PipelineOptimizers, follow_optimizer
from strategies.pipeline.state.stand_ins import replace_in_optimizer

_ADVICE = (
    "Let the pipeline follow the optimizer, optimizer = pipe.follow(optimizer), so that its steps reach every process; "
    "for gradients of all partitions call pipe.clip_grad_norm_(optimizer, max_norm), and to clear them zero_grad() of "
    "the optimizer or of the Pipe."
)


class FollowedOptimizers:
    """Optimizers of the user that partitions on workers follow.

    Args:
        elsewhere: For each partition on a worker, its layers, whose parameters are stand-ins in this process.
        remotes: The stages on workers, in the same order.
        replaced: The stand-ins of parameters that could not become stand-ins themselves, by parameter. An optimizer
            made before the ``Pipe`` holds these parameters.
    """

    def __init__(
        self, elsewhere: Sequence[StageLayers], remotes: Sequence[RemoteStage], replaced: Mapping[Tensor, Tensor]
    ) -> None:
        self._elsewhere, self._remotes, self._replaced = list(elsewhere), list(remotes), replaced
        self.optimizers = PipelineOptimizers([], partial(locate, self._elsewhere, None), lambda: None)
        self.optimizers.connect(self._remotes, [[] for _ in self._remotes])
        for layers in elsewhere:
            for parameter in layers.parameters():
                vars(parameter).update(relay_advice=_ADVICE, relay_is_followed=False)

    def follow(self, optimizer: Optimizer) -> None:
        """Start to follow an optimizer; see :meth:`~strategies.pipeline.pipe.pipe.Pipe.follow`."""
        if any(optimizer is own for own in self.optimizers.optimizers):
            raise ValueError(f"the Pipe already follows this {type(optimizer).__name__}")
        owned = [list(layers.parameters()) for layers in self._elsewhere]
        elsewhere = {id(p) for part in owned for p in part}
        if any("relay_advice" in vars(p) and id(p) not in elsewhere for p in parameters_of(optimizer)):
            raise ValueError(
                f"this {type(optimizer).__name__} has parameters of workers of another Pipe, too; make an optimizer "
                "for each Pipe"
            )
        for old, new in self._replaced.items():
            replace_in_optimizer(optimizer, old, new)
        check_divisible(optimizer, [*owned, [p for p in parameters_of(optimizer) if id(p) not in elsewhere]])
        parts = [_part(optimizer, layers) for layers in self._elsewhere]
        for remote, (blob, numbers) in zip(self._remotes, parts, strict=True):
            remote.ask(StageCommands.adopt, blob, numbers).wait()
        self.optimizers.add(optimizer, [numbers for _, numbers in parts])
        self.optimizers.drop_shipped_states()
        follow_optimizer(optimizer, self.optimizers)
        for parameter in parameters_of(optimizer):
            if parameter.is_meta:
                vars(parameter)["relay_is_followed"] = True


def _part(optimizer: Optimizer, layers: nn.Module) -> tuple[bytes, list[int]]:
    """Return the part of an optimizer for some layers, and the numbers of its parameters.

    The part is the pickle of its class, its attributes, with parameters by name, and the states by these names.
    """
    owned = list(layers.parameters())
    names = {id(parameter): name for name, parameter in layers.named_parameters()}
    cls, attributes = taken_apart(restricted(optimizer, owned))
    groups, states = attributes["param_groups"], attributes["state"]
    attributes["param_groups"] = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in groups]
    named = {names[id(p)]: on_cpu(states.pop(p)) for p in owned if p in states}
    return cloudpickle.dumps((cls, attributes, named)), numbers_of(optimizer, owned)
