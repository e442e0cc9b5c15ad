"""ZeRO (Rajbhandari et al., arXiv:1910.02054): data parallelism whose ranks divide the optimizer state among them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, device
from torch.optim import Optimizer

from strategies.base import StrategyPlugin
from strategies.checkpoint.ranks import RankStates, own_tensors, save_over_ranks
from strategies.checkpoint.store import load_sharded, without_values
from strategies.checkpoint.writer import snapshot
from strategies.common.torch_compat import broadcast_coalesced, default_group, verify_shapes_across_ranks
from strategies.lightning.checks import as_misconfiguration, check_dense_gradients, check_state_dict_type
from strategies.lightning.compat import (
    CheckpointIO,
    ClusterEnvironment,
    MisconfigurationException,
    Precision,
    TrainerFn,
    is_stand_in,
    optimizers_to_device,
    pl,
    rank_zero_warn,
    sync_module_states,
    unwrapped,
)
from strategies.lightning.hooks import (
    GradientOperations,
    Undo,
    follow_precision,
    overridden_gradient_hooks,
    steps_may_run_in_backward,
)
from strategies.optim.calls import MethodCall, follow_methods
from strategies.optim.restricted import check_optimizer_states
from strategies.optim.trial import check_divisible
from strategies.sharding.optimizers import ShardedOptimizers


class ZeROStrategy(StrategyPlugin, pl.strategies.DDPStrategy):
    """Keeps one copy of the model in each process, and divides optimizer state and steps among the processes.

    Each of N ranks owns whole parameters, about 1/N of their bytes, and steps those. The optimizer is the user's own
    object; it holds state for the parameters of its rank only, also after ``fit``. Every optimizer can be divided that
    computes the update of each parameter from that parameter's gradient and state.

    The points of the contract (:class:`~strategies.base.StrategyPlugin`):

    * ``setup_environment`` joins the process group, and makes every rank end with rank 0.
    * ``setup`` copies the weights of rank 0 to every rank and divides the optimizers of ``configure_optimizers``.
    * ``barrier`` waits for all ranks.
    * ``pre_backward`` makes the backward pass reduce gradients, bucket by bucket.
    * ``post_optimizer_step`` sends the new values of the parameters from their owners to all ranks.
    * ``save_checkpoint`` writes from rank 0, where ``optimizer_state`` has gathered all states, or from every rank.
    * ``teardown`` releases parameters and optimizers.

    Args:
        stage: What is divided. 1 (default): the optimizer state. 2: gradients too; each gradient is reduced to the rank
            that owns its parameter and is ``None`` on the other ranks after the backward pass.
        overlap_with_ddp: If ``True``, each bucket of parameters is stepped as soon as its gradients are reduced, and
            its new values are sent while the backward pass goes on. If gradients are read before the step (clipping, a
            gradient scaler, manual optimization, an overridden hook such as ``on_before_optimizer_step`` or
            ``optimizer_step``), steps wait for the end of the backward pass. Default: ``False``.
        parameters_as_bucket_view: If ``True``, parameters are views into the buffers in which new values travel, which
            saves a copy of them. Default: ``False``.
        find_unused_parameters: If ``True``, a backward pass may leave out parameters; otherwise that is an error.
            Default: ``False``.
        broadcast_buffers: If ``True`` (default), buffers such as running statistics are copied from rank 0 before each
            forward pass.
        bucket_cap_mb: Size of a bucket of gradients in MiB. Default: 4.
        state_dict_type: ``"full"`` (default): a checkpoint is one file, which rank 0 gathers and writes. ``"sharded"``:
            a checkpoint is a directory into which every rank writes its own part; ``python -m strategies.consolidate``
            turns it into one file.
        async_save: If ``True``, training goes on while a checkpoint is written from a copy in host memory. Default:
            ``False``.
        accelerator: As in Lightning's ``DDPStrategy``; set by the Trainer by default.
        parallel_devices: The device of each rank on this host; set by the Trainer by default.
        cluster_environment: Tells rank and address of each process; found by the Trainer by default.
        checkpoint_io: Writes and reads files; by default one that replaces files atomically.
        precision_plugin: Precision of the training; set by the Trainer by default.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default the one that fits the device.
        timeout: How long a collective operation may take, a ``timedelta``. Default: torch's, 30 minutes for gloo.
        start_method: How the other ranks of this host start: ``"popen"`` (default) runs the script again; ``"spawn"``,
            ``"fork"`` and ``"forkserver"`` start them from this process.

    Raises:
        MisconfigurationException: If a setting is out of range; at the start of training, if an optimizer cannot be
            divided.
    """

    is_distributed = True
    """Whether samplers divide the data; Lightning's own attribute warns that it is deprecated."""

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
        accelerator: Any | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = dist.default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        if stage not in (1, 2):
            more = " (to divide parameters as well, use Lightning's strategy='fsdp' or ModelParallelStrategy)"
            raise MisconfigurationException(f"stage must be 1 or 2, got {stage!r}{more if stage == 3 else ''}.")
        if not bucket_cap_mb > 0:
            raise MisconfigurationException(f"bucket_cap_mb must be more than 0, got {bucket_cap_mb!r}.")
        check_state_dict_type(state_dict_type, checkpoint_io)
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
        self._overlap, self._as_view = overlap_with_ddp, parameters_as_bucket_view
        self._find_unused, self._broadcast_buffers = find_unused_parameters, broadcast_buffers
        self._bucket_bytes = int(bucket_cap_mb * 2**20)
        self._groups: tuple[Any, Any] | None = None  # for gradients and values; for states, on gloo
        self._saving_group: Any | None = None
        self._sharded: ShardedOptimizers | None = None
        self._states: RankStates | None = None
        self._communicates, self._buffers_may_differ = True, True
        self._undo: list[Undo] = []

    def setup_environment(self) -> None:
        """Join the process group; from then on this rank ends with rank 0."""
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Copy the weights of rank 0 to every rank, and divide the optimizers.

        Raises:
            MisconfigurationException: If an optimizer needs all parameters at once, or has none.
        """
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        model = self.lightning_module
        assert model is not None
        plain = dict.fromkeys(map(unwrapped, self.optimizers))
        optimizers = [optimizer for optimizer in plain if not is_stand_in(optimizer)]
        with as_misconfiguration():
            for optimizer in optimizers:
                check_divisible(optimizer)
        check_dense_gradients(model)
        if self._groups is None:  # kept for the life of the process group, which outlives a fit
            on_host = dist.get_backend() == "gloo"
            gloo = default_group() if on_host else dist.new_group(timeout=self._timeout, backend="gloo")
            self._groups = dist.new_group(timeout=self._timeout), gloo
        sharded = self._sharded = ShardedOptimizers(
            optimizers,
            dict(model.named_parameters()),
            self._groups[0],
            whole_gradients=self.stage == 1,
            step_in_backward=self._overlap and steps_may_run_in_backward(trainer, model, self.precision_plugin),
            parameters_as_bucket_view=self._as_view,
            find_unused_parameters=self._find_unused,
            bucket_bytes=self._bucket_bytes,
        )
        self._states = RankStates(self._sharded.ownership, self._groups[1])
        self._undo = [self._sharded.close]
        for own in optimizers:
            around = [wrapper for wrapper in self._lightning_optimizers if wrapper.optimizer is own]
            follow_methods(own, self._call_method, around)  # also after fit, when states are still divided
        if self.stage == 2:
            self._undo += follow_precision(
                self.precision_plugin,
                GradientOperations(self._sharded.clip_grad_norm, lambda *_: sharded.any_rank),
            )
            if hooks := overridden_gradient_hooks(trainer, model):
                rank_zero_warn(
                    f"{', '.join(hooks)}: under stage=2 each rank has the gradients of its own parameters only; the "
                    "others are None. To clip, use self.trainer.strategy.clip_grad_norm_(max_norm)."
                )

    def configure_ddp(self) -> None:
        """Check that all ranks have the same parameters, and copy the values of rank 0; the model is not wrapped."""
        assert self.model is not None
        verify_shapes_across_ranks(default_group(), list(self.model.parameters()))
        sync_module_states(self.model)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        super().barrier(name)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the model with the buffers of rank 0."""
        self._share_buffers()
        self._buffers_may_differ = self._communicates
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the model with the buffers of rank 0."""
        self._share_buffers()
        return super().validation_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Make the backward pass of this loss reduce gradients, unless more gradients are accumulated first."""
        self._running().reducer.follow(closure_loss, communicate=self._communicates)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within this, backward passes accumulate gradients on each rank and do not reduce them."""
        self._communicates = False
        try:
            yield
        finally:
            self._communicates = True

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
        """The state dict that one process would have, on rank 0; empty on the others. Every rank calls this.

        For a sharded checkpoint each rank has its own states, and rank 0 also those of the others, without values.
        """
        plain = unwrapped(optimizer)
        if self._sharded is None or self._states is None or plain not in self._sharded.optimizers:
            return super().optimizer_state(optimizer)
        return self._states.state_dict(plain, values=self._state_dict_type == "full")

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write on rank 0, which has gathered the other ranks' states; or on every rank, if sharded."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._states is not None:
            self._states.forget()

    def _save_sharded(self, checkpoint: dict[str, Any], path: Path) -> None:
        if not dist.is_initialized():
            if self.is_global_zero:
                super()._save_sharded(checkpoint, path)
            return
        if self._saving_group is None:  # not used by anything else: a thread may use it while training continues
            self._saving_group = dist.new_group(backend="gloo")
        group, own = self._saving_group, own_tensors(checkpoint, self._saving_group)
        if self._writer.in_background:
            self._writer.wait()
            checkpoint, own = snapshot(without_values(checkpoint)), snapshot(own)
        self._writer.save(partial(save_over_ranks, checkpoint, path, own, group))

    def _load_sharded(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        # Each rank reads its own optimizer states in load_optimizer_state_dict, when it is known which they are.
        checkpoint, self._shards = load_sharded(path, ["state_dict"], weights_only)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's share of each optimizer's state, saved by any strategy with any number of ranks."""
        self._running()
        assert self._states is not None
        plain, states = [unwrapped(own) for own in self.optimizers], checkpoint["optimizer_states"]
        check_optimizer_states(plain, states)
        self._states.load([None if is_stand_in(own) else own for own in plain], states, self._shards)
        optimizers_to_device(self.optimizers, self.root_device)

    def teardown(self) -> None:
        """Release parameters and optimizers; who owns which parameter stays known for a checkpoint after ``fit``."""
        for undo in self._undo:
            undo()
        self._undo = []
        if not dist.is_initialized():  # a rank has failed, and the groups have ended
            self._groups = self._saving_group = self._states = None
        super().teardown()

    def _running(self) -> ShardedOptimizers:
        if self._sharded is None:
            raise RuntimeError("optimizers are divided only within fit")
        return self._sharded

    def _share_buffers(self) -> None:
        """Copy the buffers of rank 0, if a step that communicates may have changed them since the last time."""
        model = self.lightning_module
        if self._broadcast_buffers and self._buffers_may_differ and self._sharded is not None and model is not None:
            buffers = list(model.buffers())
            assert self._groups is not None
            if buffers:
                broadcast_coalesced(self._groups[0], buffers, 250 * 2**20, 0)
        self._buffers_may_differ = False
