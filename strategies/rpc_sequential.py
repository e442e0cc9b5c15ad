"""Pipeline parallelism for an unmodified ``LightningModule``: the Lightning side of :mod:`strategies.pipeline`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.plugins import CheckpointIO, ClusterEnvironment, Precision
from pytorch_lightning.profilers import PyTorchProfiler
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.base import StrategyPlugin
from strategies.checkpoint.stages import StageStates
from strategies.checkpoint.store import load_sharded
from strategies.checkpoint.validate import DescribeStage, check_fit, no_stage, stages_by_name
from strategies.checkpoint.writer import snapshot
from strategies.common.names import did_you_mean
from strategies.common.torch_compat import BatchNorm, default_group
from strategies.lightning import checks
from strategies.lightning.compat import is_stand_in, unwrapped
from strategies.lightning.following import follow
from strategies.lightning.gradients import follow_precision
from strategies.lightning.per_microbatch import training_step_per_microbatch
from strategies.lightning.profiler import ProfiledStages
from strategies.lightning.replicas import ReplicatedStrategy
from strategies.lightning.restarts import Restarts
from strategies.lightning.stages_of_model import BALANCE_MODES, as_misconfiguration, find_balance, find_module
from strategies.lightning.summary import show_stages
from strategies.lightning.weight_averaging import average_on_stages, averages_weights, find_copies
from strategies.optim.restricted import check_optimizer_states
from strategies.optim.trial import check_divisible
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.stage.randomness import Seeds
from strategies.pipeline.state.stand_ins import without_layers, without_meta_tensors
from strategies.sharding.states import gather_state_dict


class RPCSequentialStrategy(StrategyPlugin, ReplicatedStrategy):
    """Cuts an ``nn.Sequential`` of the model into stages and trains them on one process each.

    The process that runs the script is the driver: it keeps the Lightning loop, the loss and the last stage. The other
    stages live in worker processes, which it starts itself and which run nothing of the script; under torchrun or SLURM
    they are the other ranks, which leave the script at the first ``fit``. ``devices`` of the Trainer, times
    ``num_nodes``, is the number of stages, times that of replicas.

    What it does at the points of the contract (:class:`~strategies.base.StrategyPlugin`):

    * ``setup`` checks model and settings, runs ``configure_optimizers`` on the whole model, then starts the workers and
      ships their layers together with the user's optimizers, restricted to their parameters.
    * ``pre_backward`` has nothing to do: the backward pass itself leads the stages, or releases the gradients that
      they have computed. After it they are averaged over the replicas.
    * ``post_optimizer_step`` brings new values to the other replicas, if they divide the steps; workers have stepped
      within the optimizer's own step.
    * ``save_checkpoint`` writes what Lightning gathered through ``state_dict`` and ``optimizer_state``.
    * ``teardown`` brings weights and optimizer states back into the user's objects and ends the workers.

    Args:
        balance: Number of layers of each stage, or ``"even"`` for the same number in each; by default found by
            ``balance_mode``. After set-up the list in use.
        microbatches: Into how many parts each batch is split. More parts leave stages idle for less time, but each
            part must be large enough to be computed efficiently.
        checkpoint: Which micro-batches are recomputed in the backward pass instead of keeping their activations:
            ``"always"``, ``"except_last"`` (all but the last) or ``"never"``.
        balance_mode: ``"balance_by_size"`` (bytes of parameters and activations) or ``"balance_by_time"`` (measured
            time of each layer); both need ``example_input_array`` on the model. Layers that are all of one class and
            shape are counted instead if there is none.
        pipelined_backward: Run the backward passes of the micro-batches one after another, so that stages overlap. If
            ``False``, each stage runs them in one call of autograd, after the stage behind it has finished all.
        rpc_timeout_sec: Seconds for which a process that others wait for may do nothing before it is given up.
        schedule: In which order micro-batches go through the stages. ``"gpipe"``: all forward passes, then all backward
            passes, around one ``training_step``. ``"1f1b"``: backward as soon as possible, which needs less memory;
            ``training_step`` runs once per micro-batch, and results are means weighted by rows.
        deferred_batch_norm: Update the running statistics of BatchNorm once per batch instead of once per micro-batch.
        module: Dotted path of the ``nn.Sequential`` within the model.
        data_parallel_size: Number of replicas of the pipeline, which divide ``devices`` and the data among them.
        shard_optimizer_states: The replicas of a stage divide its optimizer states, and the steps, among them (ZeRO).
        state_dict_type: ``"full"``: a checkpoint is one file, gathered stage by stage and written by this process.
            ``"sharded"``: it is a directory, into which every stage writes its own part; ``python -m
            strategies.consolidate`` makes one file of it.
        async_save: Go on training while a checkpoint is written, from a copy in host memory.
        max_restarts: How often one ``fit`` may go on by itself after a worker has died or hung: from the last
            checkpoint. For one pipeline whose workers the strategy starts.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As in Lightning's
            strategies; usually left to the Trainer.

    Raises:
        MisconfigurationException: If a setting is not one of those above.
    """

    def __init__(
        self,
        balance: list[int] | Literal["even"] | None = None,
        microbatches: int = 8,
        checkpoint: str = "except_last",
        balance_mode: str = "balance_by_size",
        pipelined_backward: bool = True,
        rpc_timeout_sec: float = 60.0,
        *,
        schedule: str = "gpipe",
        deferred_batch_norm: bool = False,
        module: str = "sequential_module",
        data_parallel_size: int = 1,
        shard_optimizer_states: bool = False,
        state_dict_type: str = "full",
        async_save: bool = False,
        max_restarts: int = 0,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        with as_misconfiguration():
            self._settings = Settings(
                microbatches=microbatches,
                checkpoint=checkpoint,
                schedule=schedule,
                pipelined_backward=pipelined_backward,
                deferred_batch_norm=deferred_batch_norm,
                rpc_timeout_sec=rpc_timeout_sec,
            )
        if balance_mode not in BALANCE_MODES:
            raise MisconfigurationException(
                f"Unknown balance_mode {balance_mode!r}{did_you_mean(str(balance_mode), BALANCE_MODES)}"
            )
        checks.check_counts(data_parallel_size, shard_optimizer_states, max_restarts)
        checks.check_state_dict_type(state_dict_type, checkpoint_io)
        parallel = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        super().__init__(data_parallel_size, *parallel)
        self.balance: Sequence[int] | Literal["even"] | None = balance
        self._timeout = timedelta(seconds=self._settings.patience_seconds)
        self._given_balance, self._balance_mode, self._module_path = balance, balance_mode, module
        self._pipeline: Pipeline | None = None
        self._seeds: Seeds | None = None  # go on over several fits
        self._state_dict_type, self._async_save = state_dict_type, async_save
        self._stage_states: StageStates | None = None
        self._divides_states = shard_optimizer_states
        self._restarts = Restarts(max_restarts, self._settle_writer, self._abandon) if max_restarts else None
        self._averages_gradients = True
        self._undo: list[Callable[[], Any]] = []
        self._profiled: ProfiledStages | None = None
        self._batch_norms: dict[str, BatchNorm] = {}
        self._has_warned_of_batch_norm = False

    def setup_environment(self) -> None:
        """Prepares the driver's device and connects the replicas; workers start in ``setup``, with the model known."""
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Checks everything, then starts the workers and ships their stages.

        Raises:
            MisconfigurationException: If model, balance and devices do not fit together, or the run needs what a
                pipeline cannot do; no process has been started then.
        """
        model, accelerator = self.lightning_module, self.accelerator
        assert model is not None and accelerator is not None and self.parallel_devices is not None
        accelerator.setup(trainer)
        profiler = cast(Any, trainer).profiler
        self._profiled = ProfiledStages(profiler, model) if isinstance(profiler, PyTorchProfiler) else None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            checks.check_callbacks(trainer)
            checks.check_automatic_optimization(model, self._settings.schedule)
            checks.check_loggers(trainer)
        module = find_module(model, self._module_path)
        checks.warn_of_time_first(module, self._module_path)
        self._batch_norms = {
            f"{self._module_path}.{name}": child
            for name, child in module.named_modules()
            if isinstance(child, BatchNorm)
        }
        checks.check_deferred_batch_norm(self._settings, self._batch_norms, self._module_path)
        self.model = self.precision_plugin.convert_module(model)
        balance = self.balance = find_balance(
            model,
            module,
            num_stages=len(self.devices),
            given=self._given_balance,
            mode=self._balance_mode,
            microbatches=self._settings.microbatches,
            device=self.root_device,
            convert=self.precision_plugin.convert_input,
        )
        with without_layers(module, sum(balance[:-1])):
            self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        own = [o for o in self._plain_optimizers() if not is_stand_in(o)] if fitting else []
        with as_misconfiguration():
            for optimizer in own if self._divides_states else []:
                check_divisible(optimizer)
        self._seeds = self._seeds or Seeds.ahead_of_the_process()
        if fitting and self._restarts is not None:
            self._restarts.model_is_whole(model, own)
        with as_misconfiguration():
            self._pipeline = Pipeline(
                module,
                balance,
                self.devices,
                self._settings,
                optimizers=own,
                model=model,
                seeds=self._seeds,
                replicas=self.replicas(self._settings.patience_seconds, divide_states=self._divides_states and fitting),
                world=self.world,
                copies=find_copies(trainer, module, self._module_path),
            )
            self._pipeline.start()
        self._stage_states = StageStates(self._pipeline, model, self._module_path)
        if self._profiled is not None:
            self._profiled.follow(self._pipeline)
        self._undo = [
            show_stages(trainer, module, balance),
            *follow(self._pipeline.optimizers, self._lightning_optimizers, self._refresh_states),
            *follow_precision(self.precision_plugin, self._pipeline.optimizers, self._after_backward),
            *self._stage_states.check_before_loading(),
            *average_on_stages(trainer),
        ]

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._restarts is not None:
            checks.check_restarts(self.world is not None)
            self._launcher = self._restarts

    def on_train_start(self) -> None:
        """Makes the checkpoint from which a run can begin once more."""
        if self._restarts is not None and self.lightning_module is not None:
            self._restarts.training_begins(self.lightning_module.trainer)

    def model_to_device(self) -> None:
        """Moves what lives on the driver to its device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Waits for the other replicas; the stages of one are led by its driver, so there is nothing to wait for."""
        super().barrier(name)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``training_step`` once for the batch, or once per micro-batch if the schedule interleaves them."""
        model = self.lightning_module
        assert model is not None
        if self._batch_norms and not self._has_warned_of_batch_norm:
            self._has_warned_of_batch_norm = checks.warn_of_batch_norm(model, self._batch_norms, self._settings)
        if self._settings.schedule == "gpipe":
            return super().training_step(*args, **kwargs)
        checks.check_automatic_optimization(model, self._settings.schedule)
        batch, *rest = (*args, *kwargs.values())
        return training_step_per_microbatch(
            model, self._running(), self.precision_plugin, self._settings.microbatches, batch, rest
        )

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Does nothing: the backward pass of the loss itself runs that of every stage."""

    def _after_backward(self) -> None:
        """Averages gradients over the replicas, unless more are to be accumulated first."""
        if self._averages_gradients:
            self._running().average_grads()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within this, gradients stay each replica's own."""
        self._averages_gradients = False
        try:
            yield
        finally:
            self._averages_gradients = True

    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Brings new values to the other replicas, if they divide the steps; workers have stepped along."""
        if self._pipeline is not None:
            self._pipeline.optimizers.after_step(optimizer)
        if self._stage_states is not None:
            self._stage_states.forget()

    def _clipping(self) -> Callable[[Optimizer, float, float], Tensor]:
        return as_misconfiguration()(self._running().optimizers.clip_grad_norm)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of every stage, gathered one stage after another; on the first replica only, which writes."""
        if not self.is_global_zero:
            return {}
        if self._stage_states is None:
            return super().lightning_module_state_dict()
        # With an average there are two sets of weights. The stages would write one; the driver gathers and writes both.
        assert self.lightning_module is not None
        values = self._state_dict_type == "full" or averages_weights(self.lightning_module.trainer)
        return self._stage_states.weights(values=values)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of an optimizer over all stages, as in one process; on the first replica only."""
        if not (self.is_global_zero or self._divides_states):
            return {}
        own = unwrapped(optimizer)
        if self._stage_states is not None and not is_stand_in(own):
            state = self._stage_states.optimizer_state(own, values=self._state_dict_type == "full")
            return state if self.is_global_zero else {}
        if self._divides_states and not is_stand_in(own) and torch.distributed.is_initialized():  # after fit
            return gather_state_dict(own, default_group())
        return super().optimizer_state(optimizer)

    def _refresh_states(self) -> None:
        if (
            self._stage_states is not None and self._state_dict_type == "full"
        ):  # if sharded, stages write what they have
            self._stage_states.refresh()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint, for which Lightning has gathered the state of every stage.

        The position of the layers' random number generators goes to the key ``relay``, unless the checkpoint holds
        weights only.
        """
        is_resumable = "optimizer_states" in checkpoint
        if self._seeds is not None and is_resumable:
            checkpoint.setdefault("relay", {})["seeds"] = self._seeds.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._stage_states is not None:
            self._stage_states.forget()
        if is_resumable and self._restarts is not None:
            self._restarts.checkpoint_saved(filepath)

    def _private_tensors(self) -> list[Tensor]:
        return self._stage_states.gathered_tensors() if self._stage_states is not None else []

    def _save_sharded(self, checkpoint: dict[str, Any], path: Path) -> None:
        stages, in_background = self._stage_states, self._writer.in_background
        if not self.is_global_zero:
            if stages is not None and self._divides_states:
                stages.join_first_replica()
        elif stages is None:
            super()._save_sharded(checkpoint, path)
        else:
            if in_background:
                self._writer.wait()
                checkpoint = snapshot(checkpoint)
            self._writer.save(stages.prepare_sharded(checkpoint, path, needs_copy=in_background))

    def load_checkpoint(self, checkpoint_path: str | Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; training that is resumed from it draws the random numbers that would have come next."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        model, state = self.lightning_module, checkpoint.get("relay", {}).get("seeds")
        if state is not None and model is not None and model.trainer.state.fn == TrainerFn.FITTING:
            self._seeds = self._seeds or Seeds(0)
            self._seeds.load_state_dict(state)
        return checkpoint

    def _load_sharded(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        # The model is whole in this process at this time, so the weights are read here. Each stage reads its own
        # optimizer states in load_optimizer_state_dict, when it has its layers.
        checkpoint, self._shards = load_sharded(path, ["state_dict"], weights_only)
        return checkpoint

    def _check_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        model, given = self.lightning_module, self._given_balance
        if self._stage_states is not None or model is None:
            return  # load_state_dict of the model checks by itself then
        module = dict(model.named_modules()).get(self._module_path)
        stage_of: DescribeStage = no_stage
        if given is not None and given != "even" and isinstance(module, nn.Sequential):
            stage_of = stages_by_name(cut(module, given), f"{self._module_path}.")
        check_fit(model, state, strict=strict, stage_of=stage_of)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each stage the optimizer states of its parameters; of a sharded checkpoint it reads them itself."""
        if self._shards is None or self._stage_states is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        check_optimizer_states([unwrapped(own) for own in self.optimizers], checkpoint["optimizer_states"])
        self._stage_states.load_optimizer_states(checkpoint["optimizer_states"], self._shards)

    def rpc_save_model(self, trainer: Trainer, save_model_fn: Callable[[Trainer, Any], Any], filepath: Any) -> None:
        """Call ``save_model_fn(trainer, filepath)`` while the model has the weights of every stage.

        As in Lightning 1.3: within the call, the pipelined module of ``trainer.lightning_module`` is a plain
        ``nn.Sequential`` with the values of every stage, which can be pickled, copied or exported. Layers of other
        stages are copies: changing them does not change the run.
        """
        with self._stage_states.whole_module() if self._stage_states is not None else nullcontext():
            save_model_fn(trainer, filepath)

    def teardown(self) -> None:
        """Brings weights and optimizer states back, ends the workers, and leaves the user's objects as they were."""
        self._writer.settle()  # stages may be writing
        self._stage_states = None
        for undo in self._undo:
            undo()
        self._undo, self._batch_norms = [], {}
        pipeline, self._pipeline = self._pipeline, None
        model = self.lightning_module
        try:
            try:
                if self._profiled is not None:
                    self._profiled.end()
            finally:
                if pipeline is not None:
                    pipeline.finish()
        except Exception as error:
            if model is None or model.trainer.state.status != TrainerStatus.INTERRUPTED:
                raise
            rank_zero_warn(f"The weights of some stages could not be brought back ({error!r}).")
        finally:
            with without_meta_tensors(model) if model is not None else nullcontext():
                super().teardown()

    def _settle_writer(self) -> None:
        self._writer.settle()

    def _abandon(self) -> None:
        self._writer.settle()
        self._stage_states = None
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.abandon()

    def _running(self) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError("the pipeline is not running; this is possible only within fit")
        return self._pipeline

    def _plain_optimizers(self) -> list[Optimizer]:
        return [unwrapped(optimizer) for optimizer in self.optimizers]
