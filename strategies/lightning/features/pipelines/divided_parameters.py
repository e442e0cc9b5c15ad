"""``zero_stage=3``: the replicas of a stage divide its parameters, with their gradients and optimizer states.

    measuring   the part of one replica; a wait of the measured duration replaces each exchange with the others
    arguments   values of replica 0 to the other replicas ─▶ each keeps its part of the large parameters and states
    each pass   replicas with a different number of micro-batches are refused
    teardown    the parts of all replicas ─▶ whole parameters and states

Only ``fit`` divides parameters. Evaluation outside of it uses the whole model.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch.optim import Optimizer

from strategies.common.joined_lists import lists_of
from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.compat import MisconfigurationException, rank_zero_info, rank_zero_warn
from strategies.lightning.features.feature import Feature, PipelineArguments
from strategies.lightning.hooks import Undo, overridden_gradient_hooks
from strategies.lightning.model_copies import averaging_callbacks
from strategies.lightning.options import Options
from strategies.lightning.run import Preparation
from strategies.optim.trial import check_by_element
from strategies.pipeline.stage.layers import is_compiled
from strategies.sharding.divided_layers import check_is_whole
from strategies.sharding.gathered_layers import INSTEAD, GatheredModel, ReplicaGroup
from strategies.sharding.single_rank import GroupSeconds, as_single_replica

_OPTION = "zero_stage=3"


class DividedParameters(Feature):
    """Divides parameters among the replicas of a stage."""

    options = ("zero_stage",)

    def __init__(self) -> None:
        self._model: GatheredModel | None = None
        self._group: ReplicaGroup | None = None
        self._optimizers: Sequence[Optimizer] = ()

    @classmethod
    def of(cls, options: Options) -> "DividedParameters | None":
        """Return the feature if parameters are divided.

        Raises:
            MisconfigurationException: If another option excludes this one.
        """
        if options.zero_stage != 3:
            return None
        excluded = {
            f"tensor_parallel_size={options.tensor_parallel_size}": options.tensor_parallel_size > 1,
            "rebalance": options.rebalance is not None,
            "gather_on_end=False": options.gather_on_end is False,
            "state_dict_type='sharded'": options.state_dict_type == "sharded",
            f"microbatch_tokens={options.microbatch_tokens}": options.microbatch_tokens is not None,
        }
        for name in [name for name, is_given in excluded.items() if is_given]:
            raise MisconfigurationException(f"{name} does not work with {_OPTION} yet. {INSTEAD}")
        return cls()

    def check(self, prepared: Preparation) -> None:
        """Check what does not work with divided parameters."""
        model = prepared.model
        check_is_whole(model)
        if not prepared.is_fitting:
            return
        excluded = {
            "a model with compiled modules (torch.compile)": any(map(is_compiled, model.modules())),
            **{type(callback).__name__: True for callback in averaging_callbacks(prepared.trainer)},
        }
        for name in [name for name, is_given in excluded.items() if is_given]:
            raise MisconfigurationException(f"{name} does not work with {_OPTION} yet. {INSTEAD}")
        if hooks := overridden_gradient_hooks(prepared.trainer, model):
            rank_zero_warn(
                f"{', '.join(hooks)}: under {_OPTION} each replica has its part of the gradients of divided "
                "parameters. To clip, use self.trainer.strategy.clip_grad_norm_(max_norm)."
            )

    def prepare(self, prepared: Preparation) -> Iterable[Undo]:
        """Make the parameters whole at the end."""
        if prepared.is_fitting:
            world = torch.distributed.group.WORLD
            assert world is not None
            self._group = ReplicaGroup(world)
        yield lambda: self._end(failed=prepared.trainer.interrupted)

    @contextmanager
    def measuring(self, prepared: Preparation) -> Iterator[None]:
        """Measure the part of one replica, if the schedule or a balance by time is to be found."""
        if not (prepared.is_fitting and (prepared.settings.is_auto or prepared.options.balances_by_time)):
            yield
            return
        group = self._group
        assert group is not None
        seconds, layers = GroupSeconds.measured(group), chain(*lists_of(prepared.module))
        with ExitStack() as stack:
            with as_misconfiguration():
                stack.enter_context(as_single_replica(prepared.model, layers, group.size, seconds))
            yield

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Divide the model and the states of the optimizers."""
        if not prepared.is_fitting:
            return {}
        model, group = prepared.model, self._group
        assert group is not None
        for optimizer in optimizers:
            check_by_element(optimizer, _OPTION, "zero_stage=2")
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_meta:
                tensor.data.copy_(group.of_first(tensor.data))
        self._model = GatheredModel(model, chain(*lists_of(prepared.module)), group.rank, group.size)
        rank_zero_info(f"{_OPTION}: {self._model.described()}.")
        self._optimizers = optimizers
        for optimizer in optimizers:
            self._model.divide_states(optimizer)
        return {"divided": self._model}

    def _end(self, *, failed: bool) -> None:
        """Make model and optimizers whole again. After an error, other replicas may have ended."""
        model, self._model = self._model, None
        if model is not None:
            model.end(self._optimizers, None if failed else self._group)
