"""``tensor_parallel_size``: pipelines that divide the weights of single layers and train on the same batches.

    measuring   the part of one pipeline; a wait of the measured duration replaces each sum over the pipelines
    arguments   values of pipeline 0 to the others ─▶ each keeps its part of the divided parameters and states
    each step   the batches of all pipelines must be equal; in the first, also the gradients of what is not divided
    teardown    the parts of all pipelines ─▶ whole parameters and states

In between, everything that follows a parameter (messages, optimizers, averages) follows the part. Norms for clipping
and checkpoints are those of whole parameters.
"""

import math
from binascii import crc32
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.patching import replaced
from strategies.common.random_seeds import random_state, set_random_state
from strategies.common.torch_compat import tree_leaves
from strategies.common.transformers_compat import tensor_parallel_plans
from strategies.lightning.arguments import as_misconfiguration, check_whole_number
from strategies.lightning.compat import (
    BatchSizeFinder,
    Metric,
    MisconfigurationException,
    averaged_model,
    rank_zero_info,
    rank_zero_warn,
)
from strategies.lightning.features.feature import Feature, PipelineArguments
from strategies.lightning.hooks import Undo, after_backward, overridden_gradient_hooks, run_hooks_within
from strategies.lightning.model_copies import averaging_callbacks, find_copies
from strategies.lightning.options import Options
from strategies.lightning.run import Preparation, Run
from strategies.optim.trial import check_by_element
from strategies.pipeline.optim.clipping import check_equal_gradients
from strategies.pipeline.state.shelved import put_values
from strategies.sharding.divided_layers import PlannedModel, TensorGroup, check_is_whole
from strategies.sharding.single_rank import GroupSeconds, as_single_rank

_DIGESTED = 2**16
"""The number of values of a tensor of a batch that pipelines compare."""

_DROPOUT_OF_HEADS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""The names that configurations give to the dropout of attention, which each part draws for its heads."""

PLAN = "tensor_parallel_plan"
"""The method of a model that returns its plan."""


class TensorParallel(Feature):
    """Divides layers among pipelines.

    Args:
        size: Number of pipelines of each replica.
    """

    options = ("tensor_parallel_size",)

    def __init__(self, size: int) -> None:
        self._size = size
        self._plan: Mapping[str, str] = {}
        self._model: PlannedModel | None = None
        self._group: TensorGroup | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._has_compared_losses = False

    @classmethod
    def of(cls, options: Options) -> "TensorParallel | None":
        """Return the feature if layers are divided.

        Raises:
            MisconfigurationException: If the number is wrong, or if another option excludes this one.
        """
        check_whole_number("tensor_parallel_size", options.tensor_parallel_size, 1)
        if options.tensor_parallel_size == 1:
            return None
        excluded = {
            "rebalance": options.rebalance is not None,
            "gather_on_end=False": options.gather_on_end is False,
        }
        if given := [name for name, is_given in excluded.items() if is_given]:
            raise MisconfigurationException(
                f"{given[0]} does not work with tensor_parallel_size={options.tensor_parallel_size} yet. Leave one of "
                "them out."
            )
        return cls(options.tensor_parallel_size)

    def check(self, prepared: Preparation) -> None:
        """Find the plan, and check what does not work with divided layers."""
        model = prepared.model
        trainer: Any = prepared.trainer
        check_is_whole(model)
        if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
            raise MisconfigurationException(
                f"BatchSizeFinder and Tuner.scale_batch_size do not work with tensor_parallel_size={self._size} yet, "
                "because each pipeline would search on its own. Set the batch size."
            )
        self._plan = plan_of(model, self._size)
        if not prepared.is_fitting:
            return
        if hooks := overridden_gradient_hooks(trainer, model):
            rank_zero_warn(
                f"{', '.join(hooks)}: under tensor_parallel_size={self._size} each pipeline has its part of the "
                "gradients of divided layers. To clip, use self.trainer.strategy.clip_grad_norm_(max_norm)."
            )

    def prepare(self, prepared: Preparation) -> Iterable[Undo]:
        """Give all pipelines of the replica the random state of the first, and count the replicas only in metrics."""
        ranks = prepared.ranks
        self._group = TensorGroup(ranks.tensor_parallel_group)
        yield lambda: self._end(failed=prepared.trainer.interrupted)
        _share_random_state(ranks.tensor_parallel_group, ranks.root_device, is_first=ranks.part == 0)
        inside = {*prepared.module.modules()}
        for metric in prepared.model.modules():
            if isinstance(metric, Metric) and metric.process_group is None and metric not in inside:
                metric.process_group = ranks.data_parallel_group
                yield partial(setattr, metric, "process_group", None)

    @contextmanager
    def measuring(self, prepared: Preparation) -> Iterator[None]:
        """Measure the part of one pipeline."""
        options, is_auto = prepared.options, prepared.settings.is_auto
        if options.given_balance is not None and not is_auto:
            yield  # nothing is measured
            return
        seconds = None
        if is_auto or options.balances_by_time:
            assert self._group is not None
            seconds = GroupSeconds.measured(self._group)
        with ExitStack() as stack:
            with as_misconfiguration():
                stack.enter_context(as_single_rank(prepared.model, self._plan, self._size, seconds))
            yield

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Divide the model and the states of the optimizers."""
        group, model = self._group, prepared.model
        assert group is not None
        for optimizer in optimizers:
            check_by_element(optimizer, f"tensor_parallel_size={self._size}", "tensor_parallel_size=1")
        averages = [copy.model for copy in find_copies(prepared.trainer, prepared.module, prepared.path)]
        for each in (model, *averages):
            for tensor in [*each.parameters(), *each.buffers()]:
                if not tensor.is_meta:
                    tensor.data.copy_(group.of_first(tensor.data))
        self._model = PlannedModel(model, self._plan, group.rank, group.size, averages)
        rank_zero_info(f"tensor_parallel_size={self._size}: {self._model.described()}.")
        self._optimizers = optimizers
        for optimizer in optimizers:
            self._model.divide_states(optimizer)
        layer_peers = prepared.ranks.layer_peers(prepared.settings.patience_seconds)
        return {"layer_peers": layer_peers, "divided": self._model}

    def begin(self, run: Run) -> Iterable[Undo]:
        """Check that all pipelines get the same batches, and compute the same in the first step."""
        self._has_compared_losses = False
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            yield replaced(run.ranks, name, partial(self._with_equal_batches, name, getattr(run.ranks, name)))
        has_checked = False

        def check() -> None:
            nonlocal has_checked
            if not has_checked:
                has_checked = True
                check_equal_gradients(run.pipeline.optimizers)

        yield after_backward(run.precision, check)
        for callback in averaging_callbacks(run.trainer):
            average = averaged_model(callback)
            assert average is not None
            yield from run_hooks_within(callback, ["state_dict", "on_save_checkpoint"], partial(self._whole, average))

    @contextmanager
    def _whole(self, average: nn.Module) -> Iterator[None]:
        """Context in which the state dict of an average has whole weights. All pipelines of a replica enter it."""

        def join(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            assert self._model is not None and self._group is not None
            given = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
            own = self._model.parts_in(given)
            put_values(own)
            state.update(
                {f"{prefix}{name}": value for name, value in self._model.whole_weights(own, self._group).items()}
            )

        handle = average.register_state_dict_post_hook(join)
        try:
            yield
        finally:
            handle.remove()

    def _with_equal_batches(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._group is not None
        first, *others = self._group.parts(torch.tensor(digest((args, kwargs))))
        if any(not torch.equal(first, other) for other in others):
            raise RuntimeError(
                f"the pipelines of tensor_parallel_size got different batches in {name}, but they divide the layers, "
                "so all of them need the same rows. Each pipeline runs the whole script: draw data and samples from a "
                "fixed seed (seed_everything), and count ranks with trainer.global_rank and trainer.world_size, which "
                "are those of the replicas."
            )
        output = step(*args, **kwargs)
        if name == "training_step" and not self._has_compared_losses:
            self._has_compared_losses = True
            self._compare_losses(output)
        return output

    def _compare_losses(self, output: Any) -> None:
        """Warn if the pipelines have computed different losses, so that a term of the loss depends on a part."""
        assert self._group is not None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            return
        losses = [float(own) for own in self._group.parts(loss.detach().double())]
        if len(set(losses)) > 1 and all(map(math.isfinite, losses)):
            rank_zero_warn(
                f"the pipelines of tensor_parallel_size have computed different losses from one batch: {losses}. A "
                "term of the loss seems to use a divided weight, of which each pipeline has its part, such as a "
                "penalty on weights. Use weight_decay of the optimizer, or leave the layer out of the plan."
            )

    def _end(self, *, failed: bool) -> None:
        """Make model and optimizers whole again. After an error, other pipelines may have ended."""
        model, self._model = self._model, None
        if model is not None:
            model.end(self._optimizers, None if failed else self._group)


def digest(tree: Any) -> int:
    """Return a number that depends on the shapes and values of the tensors in nested values.

    Of a large tensor, only some values count, evenly spread, so that the time does not depend on its size.
    """
    found = 0
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.is_sparse:
            values = leaf.detach().flatten()
            sample = values[:: max(1, values.numel() // _DIGESTED)].cpu().contiguous()
            content = sample.view(torch.uint8).numpy().tobytes()
            found = crc32(content, crc32(repr(leaf.shape).encode(), found))
    return found


def plan_of(model: nn.Module, size: int) -> Mapping[str, str]:
    """Return the tensor parallel plan of a model: the style of layers, by dotted name.

    Args:
        model: The model.
        size: The number of parts.

    Raises:
        MisconfigurationException: If there is no plan, or if it cannot divide the heads of the model.
    """
    if callable(own := getattr(model, PLAN, None)):
        plan: Any = own()
        if not isinstance(plan, Mapping) or not plan or not all(isinstance(style, str) for style in plan.values()):
            raise MisconfigurationException(
                f"{type(model).__name__}.{PLAN}() must return a dict that gives names of layers a style, such as "
                f'{{"layers.*.up": "colwise", "layers.*.down": "rowwise"}}, got {plan!r}.'
            )
        return plan
    found: dict[str, str] = {}
    for path, config, plan in tensor_parallel_plans(model):
        for name in ("num_attention_heads", "num_key_value_heads"):
            number = getattr(config, name, None)
            if isinstance(number, int) and number % size:
                raise MisconfigurationException(
                    f"tensor_parallel_size={size} cannot divide {name}={number} of {path or type(model).__name__} "
                    "evenly."
                )
        if dropout := [name for name in _DROPOUT_OF_HEADS if getattr(config, name, None)]:
            rank_zero_warn(
                f"{dropout[0]}={getattr(config, dropout[0])} of {path or type(model).__name__}: under "
                f"tensor_parallel_size={size}, the heads of each part have the same dropout masks as those of the "
                "other parts. Set it to 0 for results that do not depend on the number of parts."
            )
        found.update(plan)
    if not found:
        raise MisconfigurationException(
            f"tensor_parallel_size={size} divides layers by a plan, but {type(model).__name__} has none: it contains "
            f"no model of transformers with a tp_plan. Define a method {PLAN}() that returns a dict, such as "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}; see docs/tensor_parallel.md.'
        )
    return found


def _share_random_state(group: Any, device: torch.device, *, is_first: bool) -> None:
    """Give all pipelines of a replica the state of the random generators of the first one.

    Args:
        group: The drivers of the pipelines.
        device: The device of this driver, whose generator is shared too.
        is_first: Whether this is the first pipeline.
    """
    states: list[Any] = [None]
    if is_first:
        states = [(np.random.get_state(), random_state(device))]
    torch.distributed.broadcast_object_list(states, torch.distributed.get_global_rank(group, 0), group)
    of_numpy, others = states[0]
    np.random.set_state(of_numpy)
    set_random_state(others, device)
