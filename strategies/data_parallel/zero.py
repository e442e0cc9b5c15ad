"""ZeRO (Rajbhandari et al., arXiv:1910.02054): data parallelism whose ranks divide states instead of copying them.

stage 1, 2     each rank owns some whole parameters             ShardedOptimizers, RankStates
stage 3        each rank owns some rows of every parameter      ShardedModel, RowOptimizers, RowStates

Who owns which parameter and its state: :mod:`strategies.sharding.divided_optimizers`.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import Tensor, device, nn
from torch.optim import Optimizer

from strategies.checkpoint.background import snapshot
from strategies.checkpoint.divided_rows import RowStates, read_rows
from strategies.checkpoint.ranks import DividedStates, RankStates, own_tensors, save_over_ranks
from strategies.checkpoint.references import Unread
from strategies.checkpoint.save_and_load import load_sharded, without_values
from strategies.common.torch_compat import broadcast_coalesced, default_group, verify_shapes_across_ranks
from strategies.launch.session import check_timeout
from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.checkpoints import check_state_dict_type
from strategies.lightning.compat import (
    CheckpointIO,
    ClusterEnvironment,
    LightningModule,
    MisconfigurationException,
    ModelPruning,
    Precision,
    StochasticWeightAveraging,
    TrainerFn,
    WeightAveraging,
    is_stand_in,
    optimizers_to_device,
    pl,
    rank_zero_warn,
    set_device,
    sync_module_states,
    unwrapped,
)
from strategies.lightning.hooks import (
    GradientOperations,
    Undo,
    after_backward,
    follow_precision,
    overridden_gradient_hooks,
    steps_may_run_in_backward,
)
from strategies.lightning.strategy_plugin import StrategyPlugin
from strategies.optim.calls import MethodCall, follow_methods
from strategies.optim.restricted import check_optimizer_states, parameters_of
from strategies.optim.trial import check_by_element, check_divisible
from strategies.pipeline.state.stand_ins import without_meta_tensors
from strategies.sharding.initialise import note_lost_values
from strategies.sharding.model import ShardedModel
from strategies.sharding.optimizers import ShardedOptimizers
from strategies.sharding.row_optimizers import RowOptimizers, check_parameters


class ZeROStrategy(StrategyPlugin, pl.strategies.DDPStrategy):
    """Trains on different data in each process, and divides optimizer states and steps among the processes.

    Under stages 1 and 2, each process has a copy of the model. Each of N ranks owns whole parameters, with about 1/N of
    the bytes of the model, and steps only these. An optimizer can be divided if it computes the update of each
    parameter from the gradient and the state of this parameter.

    Under stage 3, each of N ranks has 1/N of the rows of every parameter, gradient and optimizer state. The parameters
    of a block of the model are gathered while the block runs. An optimizer can be divided if it computes the update of
    each element from the gradient and the state of this element.

    The optimizer stays the user's object. It holds only the state of its rank, even after ``fit``. A model built in
    ``__init__`` is whole on every rank after ``fit``; a model built in ``configure_model`` stays divided under stage 3.

    The methods of the contract (:class:`~strategies.lightning.strategy_plugin.StrategyPlugin`):

    * ``setup_environment`` joins the process group, and makes every rank end with rank 0.
    * ``setup`` copies the weights of rank 0 to every rank, divides the model under stage 3, and divides the optimizers
      of ``configure_optimizers``.
    * ``barrier`` waits for all ranks.
    * ``pre_backward`` makes the backward pass reduce gradients, bucket by bucket or block by block.
    * ``post_optimizer_step`` sends the new values of the parameters from their owners to all ranks. Under stage 3 it
      sends nothing.
    * ``save_checkpoint`` writes from rank 0, where ``optimizer_state`` has gathered all states, or from every rank.
    * ``teardown`` releases parameters and optimizers, and makes the model whole.

    Args:
        stage: What is divided. 1 (default): the optimizer states. 2: the gradients too; each gradient is reduced to the
            rank that owns its parameter and is ``None`` on the other ranks after the backward pass. 3: parameters,
            gradients and optimizer states, each by rows (``torch.distributed.fsdp.fully_shard``).
        overlap_with_ddp: If ``True``, the owner of a bucket of parameters steps them as soon as their gradients are
            reduced, and sends the new values while the backward pass continues. Steps wait for the end of the backward
            pass if gradients are read before the step. Clipping, a gradient scaler, manual optimization, and an
            overridden hook such as ``on_before_optimizer_step`` or ``optimizer_step`` read them. Not for stage 3.
            Default: ``False``.
        parameters_as_bucket_view: If ``True``, parameters are views into the buffers that carry new values, which saves
            a copy of the parameters. Not for stage 3. Default: ``False``.
        find_unused_parameters: If ``True``, a backward pass may leave out parameters; otherwise this is an error.
            Under stage 3, all ranks must still run the same blocks. Default: ``False``.
        broadcast_buffers: If ``True`` (default), buffers such as running statistics are copied from rank 0 before each
            forward pass.
        bucket_cap_mb: Size of a bucket of gradients in MiB. Not for stage 3. Default: 4.
        state_dict_type: Form of a checkpoint. ``"full"`` (default) is one file, which rank 0 gathers and writes.
            ``"sharded"`` is a directory into which every rank writes its own part;
            ``python -m strategies.checkpoint.consolidate`` turns it into one file.
        async_save: If ``True``, training continues while a checkpoint is written from a copy in host memory. Default:
            ``False``.
        rpc_timeout_sec: With several hosts, the seconds for which a host may be unreachable. After that, an error on
            every process of either side names both hosts. Default: 60.
        accelerator: As in Lightning's ``DDPStrategy``; set by the Trainer by default.
        parallel_devices: The device of each rank on this host; set by the Trainer by default.
        cluster_environment: Provides the rank and the address of each process; found by the Trainer by default.
        checkpoint_io: Writes and reads files; by default, it replaces files atomically.
        precision_plugin: Precision of the training; set by the Trainer by default.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default, the backend that fits the device.
        timeout: How long a collective operation may take, a ``timedelta``. Default: torch's, 30 minutes for gloo.
        start_method: How the other ranks of this host start: ``"popen"`` (default) runs the script again; ``"spawn"``,
            ``"fork"`` and ``"forkserver"`` start them from this process.

    Raises:
        MisconfigurationException: If a setting is out of range or has no effect. At the start of training, also if the
            model or an optimizer cannot be divided.
    """

    is_distributed = True
    """Whether samplers divide the data. Overridden because Lightning's attribute warns that it is deprecated."""

    def __init__(
        self,
        *,
        stage: int = 1,
        overlap_with_ddp: bool = False,
        parameters_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 4.0,
        state_dict_type: str = "full",
        async_save: bool = False,
        rpc_timeout_sec: float = 60.0,
        accelerator: Any | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = dist.default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        if stage not in (1, 2, 3):
            raise MisconfigurationException(f"stage must be 1, 2 or 3, got {stage!r}.")
        if stage == 3:
            _check_effect(
                overlap_with_ddp=(overlap_with_ddp, False),
                parameters_as_bucket_view=(parameters_as_bucket_view, False),
                bucket_cap_mb=(bucket_cap_mb, 4.0),
            )
        if not bucket_cap_mb > 0:
            raise MisconfigurationException(f"bucket_cap_mb must be more than 0, got {bucket_cap_mb!r}.")
        check_state_dict_type(state_dict_type, checkpoint_io)
        with as_misconfiguration():
            check_timeout(rpc_timeout_sec)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.stage, self._state_dict_type, self._async_save = stage, state_dict_type, async_save
        self._rpc_timeout_sec = rpc_timeout_sec
        self._overlap, self._as_view = overlap_with_ddp, parameters_as_bucket_view
        self._find_unused, self._broadcast_buffers = find_unused_parameters, broadcast_buffers
        self._bucket_bytes = int(bucket_cap_mb * 2**20)
        self._groups: tuple[Any, Any] | None = None  # one for gradients and values; one for states, on gloo
        self._saving_group: Any | None = None
        self._sharded: ShardedOptimizers | RowOptimizers | None = None
        self._states: DividedStates | None = None
        self._divided: ShardedModel | None = None  # under stage 3, while the model is divided
        self._made_before: set[int] = set()
        self._restores_late: bool | None = None
        self._buffers_may_differ = True
        self._undo: list[Undo] = []

    def setup_environment(self) -> None:
        """Join the process group; from then on this rank ends with rank 0."""
        super().setup_environment()
        model = self.lightning_module
        self._made_before = set() if model is None else set(map(id, model.parameters()))
        self._restores_late = None

    def setup(self, trainer: pl.Trainer) -> None:
        """Copy the weights of rank 0 to every rank, divide the optimizers, and under stage 3 divide the model.

        Raises:
            MisconfigurationException: If the model or an optimizer cannot be divided, or if an optimizer has no
                parameters.
        """
        if self._groups is None:  # they live as long as the process group, which outlives a fit
            on_host = dist.get_backend() == "gloo"
            gloo = default_group() if on_host else dist.new_group(timeout=self._timeout, backend="gloo")
            self._groups = dist.new_group(timeout=self._timeout), gloo
        model = self.lightning_module
        assert model is not None
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._restores_late = self.restore_checkpoint_after_setup  # Lightning reads it before and after setup
        if self.stage < 3:
            super().setup(trainer)
        else:
            check_divided_run(trainer, model)
            if is_fitting and self._layer_sync:
                self.model = self._layer_sync.apply(model)
            # DDP's method would broadcast parameters that are already divided.
            super(pl.strategies.DDPStrategy, self).setup(trainer)
        if is_fitting:
            try:
                self._divide_optimizers(trainer, model)
            except MisconfigurationException:  # on every rank
                if self._divided is not None:
                    self._divided.gather()
                    self._divided = None
                raise
        elif self._divided is not None and isinstance(self._sharded, RowOptimizers):
            self._sharded.divide_again(self._divided)  # for checkpoints, which have the states of an earlier fit

    def model_to_device(self) -> None:
        """Move the model to the device; under stage 3, each block moves when it is divided."""
        if self.stage < 3:
            super().model_to_device()

    def _setup_model(self, model: nn.Module) -> Any:
        """Divide the model, unless an earlier run has left it divided."""
        assert isinstance(model, pl.LightningModule)
        assert self._groups is not None
        if self._divided is None or self._divided.model is not model:
            with as_misconfiguration():
                self._divided = ShardedModel(
                    model, *self._groups, device=self.root_device, find_unused=self._find_unused
                )
            set_device(model, self.root_device)
        return _CalledModule(model)

    def _divide_optimizers(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        plain = dict.fromkeys(map(unwrapped, self.optimizers))
        optimizers = [optimizer for optimizer in plain if not is_stand_in(optimizer)]
        with as_misconfiguration():
            for optimizer in optimizers:
                if self.stage == 3:
                    check_parameters(optimizer)
                alone = self.world_size == 1
                check_divisible(optimizer, [parameters_of(optimizer)] if alone else None)
                if self.stage == 3 and not alone:
                    check_by_element(optimizer, "stage=3", "stage=2")
        check_dense_gradients(model)
        assert self._groups is not None
        sharded: ShardedOptimizers | RowOptimizers
        if self._divided is not None:
            with as_misconfiguration():
                sharded = RowOptimizers(optimizers, self._divided, self._groups[0])
            self._states = RowStates(self._groups[1])
            self._undo = follow_precision(
                self.precision_plugin,
                GradientOperations(sharded.clip_grad_norm, sharded.start_unscaling, sharded.clip_grad_value),
            )
            self._undo.append(after_backward(self.precision_plugin, self._divided.after_backward))
        else:
            sharded = ShardedOptimizers(
                optimizers,
                dict(model.named_parameters()),
                self._groups[0],
                whole_gradients=self.stage == 1,
                step_in_backward=self._overlap and steps_may_run_in_backward(trainer, model, self.precision_plugin),
                parameters_as_bucket_view=self._as_view,
                find_unused_parameters=self._find_unused,
                bucket_bytes=self._bucket_bytes,
            )
            self._states = RankStates(sharded.ownership, self._groups[1])
            self._undo = [sharded.close]
            if self.stage == 2:
                self._undo += follow_precision(
                    self.precision_plugin,
                    GradientOperations(sharded.clip_grad_norm, lambda *_: sharded.any_rank, sharded.clip_grad_value),
                )
        self._sharded = sharded
        for own in optimizers:
            around = [wrapper for wrapper in self._lightning_optimizers if wrapper.optimizer is own]
            follow_methods(own, self._call_method, around)  # after fit as well, when states are still divided
        if self.stage > 1 and (hooks := overridden_gradient_hooks(trainer, model)):
            has = (
                "its rows of every gradient"
                if self.stage == 3
                else "the gradients of its own parameters only; the others are None"
            )
            rank_zero_warn(
                f"{', '.join(hooks)}: under stage={self.stage} each rank has {has}. To clip, use "
                "self.trainer.strategy.clip_grad_norm_(max_norm)."
            )

    def configure_ddp(self) -> None:
        """Check that all ranks have the same parameters, and copy the values of rank 0. DDP does not wrap the model."""
        assert self.model is not None
        verify_shapes_across_ranks(default_group(), list(self.model.parameters()))
        sync_module_states(self.model)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        super().barrier(name)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the model with the buffers of rank 0."""
        self._share_buffers()
        self._buffers_may_differ = self.averages_gradients
        with nullcontext() if self._divided is None else self._divided.training_step():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the model with the buffers of rank 0."""
        self._share_buffers()
        return super().validation_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Make the backward pass of this loss reduce gradients, unless more gradients are accumulated first."""
        self._running().follow(closure_loss, communicate=self.averages_gradients)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward pass. If it fails, leave the gradients in a state from which training can continue."""
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        except Exception:  # an interrupt or the loss of a rank ends the run, and must not wait for the other ranks
            self._end_failed_pass()
            raise

    def post_backward(self, closure_loss: Tensor) -> None:
        """End a pass whose error ``backward`` of the model has caught."""
        self._end_failed_pass()

    def _end_failed_pass(self) -> None:
        if isinstance(self._sharded, ShardedOptimizers):
            self._sharded.reducer.end_failed_pass()

    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Send the new values of the parameters from their owners to all ranks."""
        if self._sharded is None:
            return
        if optimizer not in self._sharded.optimizers:
            raise RuntimeError(
                f"{type(optimizer).__name__} replaced another optimizer during fit, so its parameters are not divided "
                "among the ranks. Change the parameter groups or the state of the first optimizer instead."
            )
        self._sharded.after_step(optimizer)
        if self._states is not None:
            self._states.forget()

    def _call_method(self, optimizer: Optimizer, call: MethodCall) -> Any:
        result = self._running().call_method(optimizer, call)
        if self._states is not None:
            self._states.refresh(optimizer)
        return result

    def _clipping(self) -> Callable[[Optimizer, float, float], Tensor]:
        return self._running().clip_grad_norm

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict as in one process on rank 0, and an empty dict elsewhere. Every rank calls this.

        For a sharded checkpoint, each rank returns its own states. Rank 0 also returns entries without values for the
        states of the other ranks.
        """
        plain = unwrapped(optimizer)
        if self._sharded is None or self._states is None or plain not in self._sharded.optimizers:
            return super().optimizer_state(optimizer)
        return self._states.state_dict(plain, values=self._state_dict_type == "full")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the model. Every rank calls this.

        Under stage 3, rank 0 gathers it in host memory, and the tensors on the other ranks have no values. For a
        sharded checkpoint, each rank returns its own rows.
        """
        state = super().lightning_module_state_dict()
        if self._divided is None or self._state_dict_type == "sharded":
            return state
        return self._divided.whole_state(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write on rank 0, which has gathered the states of the other ranks; or on every rank, if sharded."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._states is not None:
            self._states.forget()

    def _save_sharded(self, checkpoint: dict[str, Any], path: Path) -> None:
        if not dist.is_initialized():
            if self.is_global_zero:
                super()._save_sharded(checkpoint, path)
            return
        if self._saving_group is None:  # only for saving: a thread may use it while training continues
            self._saving_group = cast(Any, dist.new_group(backend="gloo"))
        assert self.lightning_module is not None
        parameters = {name for name, _ in self.lightning_module.named_parameters(remove_duplicate=False)}
        group, own = self._saving_group, own_tensors(checkpoint, parameters, self._saving_group)
        if self._writer.in_background:
            self._writer.wait()
            checkpoint, own = snapshot(without_values(checkpoint)), snapshot(own)
        self._writer.save(partial(save_over_ranks, checkpoint, path, own, group))

    def _load_sharded(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        # Each rank reads its optimizer states in load_optimizer_state_dict, when the rank knows which it owns.
        # If the model is already divided, each rank reads its rows in load_model_state_dict.
        keys = ["state_dict"] if self._divided is None else []
        checkpoint, shards = load_sharded(path, keys, weights_only)
        self._unread = Unread(shards, checkpoint)
        return checkpoint

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are loaded into the divided model, because it was built without values."""
        if self._restores_late is not None:
            return self._restores_late
        model = self.lightning_module
        return self._divided is not None or (model is not None and any(p.is_meta for p in model.parameters()))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint, all or none; under stage 3, only the rows of this rank."""
        if self._divided is not None:
            state = checkpoint["state_dict"]
            if self._unread is not None:
                assert self._groups is not None
                state = read_rows(self._unread, state, self._divided.parameters, self._groups[1])
            checkpoint = {**checkpoint, "state_dict": self._divided.with_rows(state)}
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of each optimizer's state, saved by any strategy with any number of ranks."""
        self._running()
        assert self._states is not None
        plain, states = [unwrapped(own) for own in self.optimizers], checkpoint["optimizer_states"]
        check_optimizer_states(plain, states)
        if isinstance(self._sharded, ShardedOptimizers):
            self._sharded.take_in()  # groups that a callback has added before the states are loaded
        self._states.load([None if is_stand_in(own) else own for own in plain], states, self._unread)
        optimizers_to_device(self.optimizers, self.root_device)

    def teardown(self) -> None:
        """Release parameters and optimizers. The owner of each parameter stays known for a checkpoint after ``fit``."""
        for undo in self._undo:
            undo()
        self._undo = []
        model, divided = self.lightning_module, self._divided
        has_failed = model is None or self._has_failed() or not dist.is_initialized()
        if model is not None and divided is not None:
            self.model = model
            if not has_failed and divided.is_from(self._made_before):
                divided.gather()
                self._divided = None
        if isinstance(self._sharded, RowOptimizers):
            self._sharded.close()
        if not dist.is_initialized():  # a rank has failed, and the groups have ended
            self._groups = self._saving_group = self._states = None
        if has_failed and divided is not None:
            divided.give_up()
            if model is not None and self._layer_sync is not None:
                self.model = self._layer_sync.revert(model)  # other modules, which Lightning makes from the parameters
                note_lost_values(model)
            self._divided = None
        with without_meta_tensors(model) if model is not None else nullcontext():
            super().teardown()

    def _running(self) -> ShardedOptimizers | RowOptimizers:
        if self._sharded is None:
            raise RuntimeError("optimizers are divided only within fit")
        return self._sharded

    def _share_buffers(self) -> None:
        """Copy the buffers of rank 0, if a step may have changed them since the last copy."""
        model = self.lightning_module
        if self._broadcast_buffers and self._buffers_may_differ and self._sharded is not None and model is not None:
            buffers = list(model.buffers())
            assert self._groups is not None
            if buffers:
                broadcast_coalesced(self._groups[0], buffers, 250 * 2**20, 0)
        self._buffers_may_differ = False


class _CalledModule(nn.Module):
    """Makes Lightning run the steps of a model within a call of the model, whose hooks gather its parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _check_effect(**settings: tuple[Any, Any]) -> None:
    """Refuse settings, given as value and default, that have no effect under stage 3."""
    given = [f"{name}={value!r}" for name, (value, default) in settings.items() if value != default]
    if given:
        raise MisconfigurationException(
            f"{', '.join(given)} has no effect under stage=3, which sends the gradients of a block together. Leave it "
            "out, or use stage=2."
        )


def check_divided_run(trainer: Any, model: LightningModule) -> None:
    """Check that a run works with a model whose parameters are divided by rows (ZeRO stage 3).

    Raises:
        MisconfigurationException: If optimization is manual, or if a callback copies or prunes the model.
    """
    if not model.automatic_optimization:
        raise MisconfigurationException(
            "stage=3 needs automatic optimization: it gathers parameters for training_step as a whole, in which manual "
            "optimization would change them. Use stage=2."
        )
    for callback in trainer.callbacks:
        if isinstance(callback, ModelPruning | StochasticWeightAveraging | WeightAveraging):
            raise MisconfigurationException(
                f"stage=3 does not support {type(callback).__name__}, which works on whole parameters, but each rank "
                "has some rows of each. Leave it out, or use stage=2."
            )


def check_dense_gradients(model: nn.Module) -> None:
    """Check that no layer makes sparse gradients, which do not fit into the buffers that carry gradients.

    Raises:
        MisconfigurationException: If a layer makes sparse gradients.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise MisconfigurationException(
                f"Layer {name} makes sparse gradients, which do not fit into buckets. Leave out sparse=True, "
                "or use strategy='ddp'."
            )
