"""Pipeline parallelism for an unmodified ``LightningModule``: connects Lightning to :mod:`strategies.pipeline`."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.base import StrategyPlugin
from strategies.checkpoint.references import InSafetensors, references_in_file, references_in_shards
from strategies.checkpoint.stages import StageStates
from strategies.checkpoint.store import load_sharded, local_path, read_tensors
from strategies.checkpoint.validate import DescribeStage, check_fit, no_stage, stages_by_name
from strategies.checkpoint.writer import snapshot
from strategies.common.names import did_you_mean
from strategies.common.torch_compat import BatchNorm, default_group
from strategies.common.transformers_compat import lazy_safetensors, switch_off_cache, switch_off_recomputation
from strategies.common.trees import flat, with_tensors
from strategies.launch.rounds import Rounds, shared_store
from strategies.launch.workers import fork_server, share_of_threads
from strategies.lightning import checks
from strategies.lightning.checkpoints import AtomicCheckpointIO
from strategies.lightning.compat import (
    CheckpointIO,
    ClusterEnvironment,
    LightningModule,
    MisconfigurationException,
    Precision,
    PyTorchProfiler,
    Trainer,
    TrainerFn,
    is_stand_in,
    rank_zero_info,
    rank_zero_warn,
    unwrapped,
)
from strategies.lightning.hooks import (
    Undo,
    after_backward,
    collect_logs,
    follow_optimizers,
    follow_precision,
    operations_over_stages,
    scaler_of,
    without_logs,
)
from strategies.lightning.launch.rank_launcher import RanksLauncher
from strategies.lightning.launch.replicas import ReplicatedStrategy
from strategies.lightning.loss_weights import LossWeights, has_own_weights
from strategies.lightning.moving_layers import check_movable, moves
from strategies.lightning.partitioning import BALANCE_MODES, find_balance, find_module, find_path, is_reversed
from strategies.lightning.per_microbatch import TrainingStepPerMicrobatch, num_gradient_sets
from strategies.lightning.profiler import ProfiledStages
from strategies.lightning.search_settings import DEFAULT_MICROBATCHES, SearchSettings, fits, with_schedule
from strategies.lightning.summary import show_stages
from strategies.lightning.weight_averaging import average_on_stages, find_copies
from strategies.optim.restricted import check_optimizer_states
from strategies.optim.trial import check_divisible
from strategies.pipeline.construction.initialise import initialise
from strategies.pipeline.construction.recording import Construction
from strategies.pipeline.construction.stored import FileReference
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.partition.memory import DevicePlacement, check_memory
from strategies.pipeline.partition.sequential import Pipelined, check_balance, cut
from strategies.pipeline.recovery.repairs import Repair
from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.pipeline.stage.layers import Seeds
from strategies.pipeline.state.remote_tensor import RemoteParameter
from strategies.pipeline.state.stand_ins import (
    replace_parameter,
    without_layers,
    without_meta_tensors,
    without_stand_ins,
)
from strategies.pipeline.transport.slots import NUM_SLOTS
from strategies.sharding.states import gather_state_dict

if TYPE_CHECKING:
    from strategies.planning.plan import PlanTable
    from strategies.planning.rebalancing import Rebalancing


class RPCSequentialStrategy(StrategyPlugin, ReplicatedStrategy):
    """Divides the layers of a model into stages and trains each stage in a process of its own.

    The process that runs the script is the driver: it runs Lightning's loop, the loss and the last stage. The other
    stages run in worker processes, which the driver starts and which run nothing of the script. Under torchrun or SLURM
    the workers are the other ranks, which leave the script at the first ``fit``. The Trainer's ``devices`` times
    ``num_nodes`` is the number of stages times the number of replicas.

    The points of the contract (:class:`~strategies.base.StrategyPlugin`):

    * ``setup_environment`` connects the replicas.
    * ``setup`` checks model and settings, runs ``configure_optimizers`` on the whole model, starts the workers, and
      sends them their layers and the user's optimizers, restricted to their parameters.
    * ``barrier`` waits for the other replicas.
    * ``pre_backward`` does nothing: the backward pass of the loss runs those of all stages, or releases the gradients
      that they have computed. After it the replicas average their gradients.
    * ``post_optimizer_step`` sends new values to the other replicas if they divide the steps; workers step within the
      optimizer's own step.
    * ``save_checkpoint`` writes what Lightning gathered through ``state_dict`` and ``optimizer_state``.
    * ``teardown`` returns weights and optimizer states to the user's objects and ends the workers.

    ``schedule="auto"`` measures, before the first ``fit``, the forward and backward passes of every layer, what the
    driver runs outside the layers, the transfer between two processes, and a step of AdamW, which stands for that of
    the model's optimizer. It searches schedule, balance and order of passes on a simulator. It takes the model's
    ``example_input_array`` for a batch (see ``balance_mode``). One line says what was chosen and why. The choice is
    kept for later runs, stored in checkpoints and used again on resuming.

    Args:
        balance: Number of layers of each stage, or ``"even"`` for equal numbers. ``None`` (default) finds the numbers
            by ``balance_mode``: the exact optimum for the measured costs, with no empty stage. After ``setup`` the
            attribute ``balance`` is the list in use. If stages have several chunks of layers (see
            ``chunks_per_stage``), it has one number for each chunk, in the order of the layers.
        microbatches: Number of parts into which each batch is split; the stages work on different parts at the same
            time. More parts shorten the time for which stages are idle, but each part must be large enough to be
            computed efficiently. The number of rows need not be divisible by it. Default: 8. ``"auto"``, under
            ``schedule="auto"`` only: the number with which a batch takes least time. Tensors, dicts, dataclasses and
            lists are split along the rows; if the model has a method ``split_batch(batch, num_microbatches)``, that
            is called instead.
        checkpoint: Which micro-batches are recomputed in the backward pass instead of keeping their activations:
            ``"always"``, ``"except_last"`` (default; all but the last) or ``"never"`` (fastest, if memory allows).
            Under the first two, gradient checkpointing of a Hugging Face model is off in the blocks during ``fit``,
            because the stages recompute them; under ``"never"`` it stays on.
        balance_mode: ``"balance_by_size"`` (default; bytes of parameters and activations) or ``"balance_by_time"``
            (measured time of forward and backward passes). Both measure each layer and, as a cost of the last stage,
            what the driver runs outside the layers (embedding, norm, head, logits; the loss if ``forward`` returns it).
            Under ``schedule="gpipe"``, the time of that part does not count, because the stages wait while it runs.
            Both use the model's ``example_input_array``. Without it, a model of Hugging Face is measured on an input
            made from its configuration. For other models only the parameters count then, and all layers must have the
            same class and shapes.
        pipelined_backward: If ``True`` (default), a stage runs the backward passes of the micro-batches one after
            another, so that stages overlap. If ``False``, it runs them in one call of autograd, after the following
            stage has finished its backward passes.
        rpc_timeout_sec: Seconds for which a process may be idle while another process waits for it. After that it is
            declared hung and ended, and the error contains its Python stack. A process that computes may take ten
            times as long. Default: 60.
        schedule: Order of the passes. Under ``"gpipe"`` (default), all forward passes precede all backward passes, and
            ``training_step`` runs once for the batch, so it may compute any loss over the batch. Under all other
            schedules, ``training_step`` runs once per micro-batch and is suspended where it calls the pipelined
            module, and its results are means weighted by ``loss_weight``. They need less memory or time:

            * ``"1f1b"``: each backward pass as early as possible. The first stage keeps the activations of as many
              micro-batches as there are stages.
            * ``"interleaved"``: 1F1B with several chunks of layers per stage. The stages are idle for less time at the
              start and at the end of a batch, and send more.
            * ``"zb-h1"``: 1F1B in which the weight gradients of linear layers, attention, convolutions and embeddings
              wait until a stage would be idle.
            * ``"zbv"``: ``"zb-h1"`` with two chunks per stage; the driver has the first and the last chunk.
            * ``"v-half"``: the chunks of ``"zbv"``, with about half of the activations of 1F1B.
            * ``"auto"``: the fastest of these schedules, or a custom order found by search, for the measured times of
              the layers; see ``docs/choose_a_strategy.md``.
            * A custom table: the path of a CSV file in the format of ``torch.distributed.pipelining``, or a function
              ``(processes, microbatches) -> table``; see
              :func:`~strategies.pipeline.schedule.custom.custom_table`.
        chunks_per_stage: Number of chunks of consecutive layers in each stage, under ``"interleaved"`` (default: 2)
            and ``"zb-h1"`` (default: 1). The model needs at least one layer per chunk. Under ``"auto"``, the largest
            number that may be chosen (default: 2).
        data_plane: How stages exchange activations and gradients. ``"auto"`` (default) is ``"gloo"``: through the
            memory of the hosts. ``"nccl"``: from GPU to GPU, if no two stages share a GPU; it has never run
            (``docs/gpu.md``), so it is never chosen automatically. For tests on CPUs, ``"simulated"`` runs the code of
            ``"nccl"`` by the rules of NCCL and reports tensors that are changed while they are being sent;
            ``"simulated-serial"`` does the same on devices that run one operation at a time.
        max_microbatches: With ``microbatches="auto"``, the largest number that may be chosen. Default: 32.
        memory_limit_bytes: With ``schedule="auto"``, what each process may take for activations and for parameters,
            which count four times, as with Adam and its gradients. They count five times where a run holds two sets of
            gradients (``docs/decisions/098-two-sets-of-gradients.md``). A fifth is added for what allocators keep.
            Default: no limit.
        deferred_batch_norm: If ``True``, the running statistics of BatchNorm layers are updated once per batch from all
            of its rows; otherwise once per micro-batch. In both cases BatchNorm normalises each micro-batch by its
            own statistics. Default: ``False``.
        module: Dotted path of the ``nn.Sequential`` or ``nn.ModuleList`` in the model. ``None`` (default) finds it:
            ``sequential_module``, else the list of blocks of a Hugging Face model, else the only ``nn.ModuleList`` with
            at least one layer per stage, else the only such ``nn.Sequential``. The blocks of an ``nn.ModuleList`` are
            called by the model's own ``forward``, which runs on the driver.
        loss_weight: How much each micro-batch counts in losses, gradients, logged and returned means, where
            ``training_step`` runs once per micro-batch. ``"rows"`` (default): by its number of rows, for a loss that is
            a mean over rows; accumulated batches and replicas count the same, as in Lightning. ``"tokens"``: by its
            number of labels other than -100, for a loss that is a mean over these; accumulated batches and replicas
            count by their tokens too. The labels are the micro-batch's entry or attribute ``"shift_labels"``, or else
            ``"labels"``, without the first of each row if the model contains a Hugging Face model whose loss shifts
            them. If the model has a method ``microbatch_weight(microbatch) -> float``, the weights that it returns are
            used like numbers of tokens, whatever ``loss_weight`` is. See ``docs/inputs.md``.
        data_parallel_size: Number of replicas of the pipeline, each with ``devices / data_parallel_size`` stages and
            its share of the data. Each stage averages its gradients with the same stage of the other replicas.
            Default: 1.
        shard_optimizer_states: If ``True``, the replicas of a stage divide its optimizer states and steps among them
            (ZeRO stage 1). After a step, each replica sends its new values to the other replicas. Default: ``False``.
        state_dict_type: ``"full"`` (default): a checkpoint is one file, which the driver writes as it receives tensor
            after tensor. ``"sharded"``: a checkpoint is a directory into which every stage writes its own part;
            ``python -m strategies.checkpoint.consolidate`` turns it into one file.
        async_save: If ``True``, training goes on while a checkpoint is written from a copy in host memory. Default:
            ``False``.
        max_restarts: How many lost workers one ``fit``, ``validate``, ``test`` or ``predict`` may repair. When a worker
            has died or hung, new workers take over from the last snapshot, and the driver sends them again what it has
            sent since then. The script runs on, with the results of an undisturbed run. For pipelines on CPUs of one
            host under Linux; see ``docs/lost_workers.md``. Default: 0, one error ends the run.
        snapshot_every_n_steps: With ``max_restarts``, the number of optimizer steps after which every worker copies its
            part of the model and of the optimizer states into memory that outlives it. After a loss, new workers
            repeat the computation since the last copy. Default: 1.
        verify_every_n_steps: The workers compute every n-th optimizer step a second time, from a copy of the state
            before it. If a value or a weight differs in one bit, an error names the stage: a layer is not
            deterministic, or a core or its memory is faulty. The driver's own layers are not verified. For the same
            pipelines as ``max_restarts``; see ``docs/lost_workers.md``. Default: 0, no step is verified.
        rebalance: ``"auto"``: at the end of each training epoch, or every ``rebalance_every_n_steps``, layers may move
            to other stages. They move if recorded steps predict that this saves ``rebalance_threshold`` of the time of
            the passes, such as when the process of a stage has become slow. Losses and weights are those of a run
            without it. For one pipeline whose workers the strategy starts, on CPUs; see ``docs/monitor.md``. Default:
            ``None``.
        rebalance_every_n_steps: With ``rebalance="auto"``, the number of batches after which layers may move. Default:
            at the end of each epoch.
        rebalance_threshold: With ``rebalance="auto"``, the predicted share that must be saved. Default: 0.1.
        gather_on_end: Whether weights and optimizer states of all stages come back to the driver when a run ends.
            ``None`` (default): unless the model was built without memory, in ``configure_model`` or
            ``trainer.init_module()``, so that the driver need not hold it. Values that have not come back are only in
            the checkpoints of the run, and reading such a weight raises an error that says so.
        accelerator: As in Lightning's strategies; set by the Trainer by default.
        parallel_devices: The devices of this host; set by the Trainer by default.
        cluster_environment: Tells rank and address of each process; found by the Trainer by default.
        checkpoint_io: Writes and reads files; by default one that replaces files atomically.
        precision_plugin: Precision of the training; set by the Trainer by default.

    Raises:
        MisconfigurationException: If a setting has another type or value than listed above.
    """

    def __init__(
        self,
        balance: list[int] | Literal["even"] | None = None,
        microbatches: int | Literal["auto"] = DEFAULT_MICROBATCHES,
        checkpoint: str = "except_last",
        balance_mode: str = "balance_by_size",
        pipelined_backward: bool = True,
        rpc_timeout_sec: float = 60.0,
        *,
        schedule: str | Path | Callable[[int, int], Any] = "gpipe",
        chunks_per_stage: int | None = None,
        data_plane: str = "auto",
        max_microbatches: int | None = None,
        memory_limit_bytes: int | None = None,
        deferred_batch_norm: bool = False,
        module: str | None = None,
        loss_weight: Literal["rows", "tokens"] = "rows",
        data_parallel_size: int = 1,
        shard_optimizer_states: bool = False,
        state_dict_type: str = "full",
        async_save: bool = False,
        max_restarts: int = 0,
        snapshot_every_n_steps: int = 1,
        verify_every_n_steps: int = 0,
        rebalance: Literal["auto"] | None = None,
        rebalance_every_n_steps: int | None = None,
        rebalance_threshold: float | None = None,
        gather_on_end: bool | None = None,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        with checks.as_misconfiguration():
            self._choices = SearchSettings(schedule, microbatches, max_microbatches, memory_limit_bytes)
            self._settings = self._given_settings = Settings(
                microbatches=self._choices.given_microbatches,
                checkpoint=checkpoint,
                schedule=schedule,
                chunks_per_stage=chunks_per_stage,
                pipelined_backward=pipelined_backward,
                deferred_batch_norm=deferred_batch_norm,
                rpc_timeout_sec=rpc_timeout_sec,
                data_plane=data_plane,
            )
        if balance_mode not in BALANCE_MODES:
            raise MisconfigurationException(
                f"Unknown balance_mode {balance_mode!r}{did_you_mean(str(balance_mode), BALANCE_MODES)}"
            )
        checks.check_loss_weight(loss_weight, self._settings)
        self._rebalancing: Rebalancing | None = None
        given = (rebalance, rebalance_every_n_steps, rebalance_threshold)
        if any(each is not None for each in given):
            from strategies.planning.rebalancing import rebalancing_of

            self._rebalancing = rebalancing_of(*given, self._settings)
        checks.check_replicas(data_parallel_size, shard_optimizer_states)
        self._recovery = checks.checked_recovery(max_restarts, snapshot_every_n_steps, verify_every_n_steps)
        checks.check_state_dict_type(state_dict_type, checkpoint_io)
        parallel = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        super().__init__(data_parallel_size, *parallel)
        self.balance: Sequence[int] | Literal["even"] | None = balance
        self._timeout = timedelta(seconds=self._settings.patience_seconds)
        self._given_balance, self._balance_mode, self._given_path = balance, balance_mode, module
        self._module_path = module or "sequential_module"
        self._is_reversed = False
        self._planned: PlannedSchedule | None = None  # what schedule="auto" has chosen
        self._loss_weight = loss_weight
        self._pipeline: Pipeline | None = None
        self._seeds: Seeds | None = None  # go on over several fits
        self._state_dict_type, self._async_save = state_dict_type, async_save
        self._stage_states: StageStates | None = None
        self._per_microbatch: TrainingStepPerMicrobatch | None = None
        self._divides_states, self._gathers_on_end = shard_optimizer_states, gather_on_end
        self._repairs: Sequence[Repair] = ()
        if rebalance is not None:
            gathers = gather_on_end is not False
            check_movable(
                "rebalance='auto'",
                replicas=data_parallel_size,
                is_external=False,
                devices=[],
                gathers=gathers,
                profiles=False,
            )
        self._gathers = True
        self._rebalanced: list[int] | None = None  # the balance that rebalancing has found
        self._undo: list[Undo] = []
        self._construction = Construction()
        self._references: dict[int, FileReference] = {}  # to the weights of the checkpoint that is being loaded
        self._profiled: ProfiledStages | None = None
        self._batch_norms: dict[str, BatchNorm] = {}
        self._has_warned_of_batch_norm = False

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Within this, a model is built without memory for its large tensors; each process builds those of its stage.

        The context of ``configure_model`` and of ``trainer.init_module()``. Values are the same as without it. Files
        of ``safetensors`` that ``from_pretrained`` loads are read by these processes too.
        """

        def later(path: str, key: str, like: Tensor) -> Tensor:
            return self._construction.stored_tensor(InSafetensors.of(path, key), like)

        with (
            super().tensor_init_context(empty_init),
            torch.device("cpu"),
            lazy_safetensors(later),
            self._construction.recording(),
        ):
            yield

    def setup_environment(self) -> None:
        """Prepare the driver's device and connect the replicas; workers start in ``setup``, when the model is known.

        The fork server starts here, unless layers will be timed: then it starts in ``setup``, when they have been.
        """
        super().setup_environment()
        by_time = self._given_balance is None and self._balance_mode == "balance_by_time"
        if not by_time and not self._given_settings.is_auto:
            self._start_fork_server()

    def plan(
        self,
        trainer: Trainer,
        model: LightningModule,
        data: Any = None,
        *,
        stages: Sequence[int] | None = None,
        microbatches: Sequence[int] | None = None,
        schedules: Sequence[str] | None = None,
        memory_limit_bytes: int | None = None,
    ) -> "PlanTable":
        """Predict time and memory of ways to run a model, without starting a process; see ``trainer.Trainer.plan``."""
        from strategies.planning.plan import PipelineOptions, PlanChoices, plan_table

        num_stages = len(self.devices)
        limit = memory_limit_bytes if memory_limit_bytes is not None else self._choices.memory_limit_bytes
        choices = PlanChoices(
            stages if stages is not None else [max(2, num_stages)],
            microbatches,
            schedules,
            limit,
        )
        options = PipelineOptions(
            self._given_path,
            self._given_balance,
            self._given_settings,
            self.root_device,
            self.world_size,
            self.world_size if self._divides_states else 1,
            trainer.num_nodes,
            self._loss_weight,
            [name for name in ("max_microbatches", "memory_limit_bytes") if getattr(self._choices, name) is not None],
            NUM_SLOTS if self._recovery is not None else 0,
            self._gathers_on_end,
        )
        return plan_table(trainer, model, data, options, choices)

    def setup(self, trainer: Trainer) -> None:
        """Check everything, then start the workers and send them their stages.

        Raises:
            MisconfigurationException: If model, balance and devices do not fit together, if a stage cannot fit into
                memory, or if the run needs something that a pipeline cannot do. No worker has been started then.
        """
        model, accelerator = self.lightning_module, self.accelerator
        assert model is not None and accelerator is not None and self.parallel_devices is not None
        accelerator.setup(trainer)
        profiler = cast(Any, trainer).profiler
        self._profiled = ProfiledStages(profiler, model) if isinstance(profiler, PyTorchProfiler) else None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._settings = self._given_settings
        module = self._checked_module(trainer, model, fitting)
        built_here = not any(tensor.is_meta for _, tensor in _tensors_of(module))
        self._gathers = built_here if self._gathers_on_end is None else self._gathers_on_end
        if fitting and self._rebalancing is not None:
            self._check_can_rebalance("rebalance='auto'")
            self._rebalancing.begin()
        if self._recovery is not None:
            checks.check_repairs_of_run(trainer, num_stages=len(self.devices))
        balance = self._prepare_model(model, module, fitting)
        self._start_fork_server()
        optimizers = self._prepare_optimizers(trainer, fitting)
        self._seeds = self._seeds or Seeds.ahead_of_the_process()
        replicas = self.replicas(self._settings.patience_seconds, divide_states=self._divides_states and fitting)
        recovery = self._recovery if len(self.devices) > 1 else None
        with checks.as_misconfiguration():
            pipeline = self._pipeline = Pipeline(
                module,
                balance,
                self.devices,
                self._settings,
                optimizers=optimizers,
                model=model,
                seeds=self._seeds,
                replicas=replicas,
                world=self.world,
                copies=find_copies(trainer, module, self._module_path),
                skips_infinite_steps=scaler_of(self.precision_plugin) is not None,
                path=self._module_path,
                is_reversed=self._is_reversed,
                construction=self._construction,
                gathers_on_end=self._gathers,
                recovery=recovery,
                together=self._rounds() if recovery is not None and self.is_distributed else None,
            )
            self._repairs = pipeline.repairs
            self._check_memory(pipeline)
            pipeline.start()
        self._connect(trainer, pipeline, model, balance)

    def _rounds(self) -> Callable[[], Rounds]:
        """Return a function that connects to what the drivers of all replicas agree on when they repair a lost worker.

        Raises:
            ValueError: If the default process group has no TCP store.
        """
        connect, seconds = shared_store(f"relay {self._rendezvous}"), self._settings.patience_seconds
        return lambda: Rounds(connect(), self.global_rank, self.world_size, seconds)

    def _check_memory(self, pipeline: Pipeline) -> None:
        """Check that every stage fits into memory, as long as all layers are in this process.

        Raises:
            ValueError: If one does not.
        """
        model, optimizers = self.lightning_module, pipeline.optimizers.optimizers
        assert model is not None
        check_memory(
            DevicePlacement.of(model, pipeline.stages, self.devices, self.stages_on_host()),
            optimizers,
            num_shares=self.world_size if self._divides_states else 1,
            gradient_sets=num_gradient_sets(model.trainer, model, optimizers) if self._settings.interleaves else 1,
            num_snapshots=NUM_SLOTS if self._recovery is not None and len(self.devices) > 1 else 0,
            communicators=pipeline.num_communicators,
        )

    def _check_can_rebalance(self, what: str) -> None:
        """Check that layers can move between the stages of this run.

        Raises:
            MisconfigurationException: If they cannot.
        """
        check_movable(
            what,
            replicas=self._num_replicas,
            is_external=self.world is not None,
            devices=self.devices,
            gathers=self._gathers,
            profiles=self._profiled is not None,
        )

    @property
    def _stage_of_chunk(self) -> Sequence[int]:
        """The number of the stage of each chunk of layers."""
        with checks.as_misconfiguration():
            return self._settings.programs(len(self.devices)).rank_of

    @property
    def pipeline(self) -> Pipeline | None:
        """The running pipeline; ``None`` outside of a run."""
        return self._pipeline

    def _start_fork_server(self) -> None:
        """Start the process that forks the workers, if there is none: it imports torch while this one goes on."""
        if self.world is None and len(self.devices) > 1:
            fork_server(share_of_threads(len(self.stages_on_host())))

    def _checked_module(self, trainer: Trainer, model: LightningModule, fitting: bool) -> Pipelined:
        """Check model, callbacks and loggers, and return the part of the model that is pipelined."""
        if fitting:
            checks.check_callbacks(trainer)
            checks.check_automatic_optimization(model, self._settings.schedule)
            checks.check_loggers(trainer)
        self._module_path = find_path(model, self._given_path, len(self.devices), len(self._stage_of_chunk))
        self._initialise(model)
        module = find_module(model, self._module_path, self._construction)
        if isinstance(module, nn.Sequential):
            checks.warn_of_time_first(module, self._module_path)
        elif fitting:
            checks.check_layer_drop(model, self._module_path)
            checks.warn_of_router_loss(model, self._settings)
            checks.warn_of_compiled_model(self._module_path)
        self._batch_norms = {
            f"{self._module_path}.{name}": child
            for name, child in module.named_modules()
            if isinstance(child, BatchNorm)
        }
        checks.check_deferred_batch_norm(self._settings, self._batch_norms, self._module_path)
        return module

    def _prepare_model(self, model: LightningModule, module: Pipelined, fitting: bool) -> list[int]:
        """Convert the model to its precision, find the balance, and build and move the driver's part to its device."""
        checks.check_mixed_precision(self.precision_plugin, self.devices)
        with self._construction.recording():
            self.model = self.precision_plugin.convert_module(model)
        inside = set(module.modules())
        built: dict[int, torch.UntypedStorage] = {}
        self._build([child for child in model.modules() if child not in inside], built)
        with without_layers(module, list(module._modules)):
            self.model_to_device()
        with self._construction.reading(module):
            self._is_reversed = is_reversed(model, module, self.root_device, self.precision_plugin)
            balance = self.balance = self._found_balance(model, module, fitting)
        *elsewhere, here = cut(module, balance, self._stage_of_chunk, is_reversed=self._is_reversed)
        self._build(here.modules(), built)
        with without_layers(module, [name for stage in elsewhere for name in stage._modules]):
            self.model_to_device()
        return balance

    def _found_balance(self, model: LightningModule, module: Pipelined, fitting: bool) -> list[int]:
        """Return the number of layers of each chunk, the same on all replicas; find the schedule before, if need be."""
        settings, planned, given, num_stages = self._settings, self._planned, self._given_balance, len(self.devices)
        measuring: dict[str, Any] = {
            "num_stages": num_stages,
            "device": self.root_device,
            "precision": self.precision_plugin,
            "in_reverse": self._is_reversed,
            "num_processes": len(self.stages_on_host()),
        }
        if settings.is_auto:
            sets = num_gradient_sets(model.trainer, model) if fitting else 1
            if planned is None or not fits(planned, num_stages, len(module), given, settings, self._choices, sets):
                planned = None
                if fitting and num_stages > 1:
                    from strategies.planning.automatic import find_schedule

                    planned = find_schedule(
                        model,
                        module,
                        given=given,
                        settings=settings,
                        choices=self._choices,
                        gradient_sets=sets,
                        **measuring,
                    )
                    planned = self._planned = self.broadcast(planned)
            if planned is not None:
                self._settings = with_schedule(settings, planned)
                return planned.balance
        num_chunks = len(self._stage_of_chunk)
        kept = self._rebalanced
        if kept is not None and len(kept) == num_chunks and sum(kept) == len(module):
            return kept
        if settings.is_auto and given is not None and len(given) != num_chunks:
            given = "even"  # nothing is trained, and the given numbers are those of more chunks
        balance = find_balance(
            model,
            module,
            path=self._module_path,
            num_chunks=num_chunks,
            given=given,
            mode=self._balance_mode,
            settings=settings,
            **measuring,
        )
        return self.broadcast(balance)  # each replica has measured other times

    def _initialise(self, model: LightningModule) -> None:
        """Initialise modules that the user has built on the ``meta`` device and no checkpoint has given values."""
        if any(isinstance(tensor, RemoteParameter) for _, tensor in _tensors_of(model)):
            return  # an earlier run has trained them
        if self._has_tensors_to_build() and (names := initialise(model, self._construction)):
            rank_zero_warn(
                f"{len(names)} modules of {type(model).__name__} are on the meta device, such as {names[0]!r}, and no "
                "checkpoint has given them values. They get initial values from _init_weights or reset_parameters, "
                "each with a seed made of its name."
            )

    def _build(self, modules: Iterable[nn.Module], built: dict[int, torch.UntypedStorage]) -> None:
        """Give modules on the driver their values, if they have been recorded and not built."""
        model = self.lightning_module
        assert model is not None
        self._construction.build(modules, partial(replace_parameter, model, ()), built)

    def _prepare_optimizers(self, trainer: Trainer, fitting: bool) -> list[Optimizer]:
        """Run ``configure_optimizers``, if the run trains, and return the user's optimizers."""
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if not fitting:
            return []
        optimizers = [own for own in map(unwrapped, self.optimizers) if not is_stand_in(own)]
        if self._divides_states:
            with checks.as_misconfiguration():
                for optimizer in optimizers:
                    check_divisible(optimizer)
        return optimizers

    def _connect(self, trainer: Trainer, pipeline: Pipeline, model: LightningModule, balance: Sequence[int]) -> None:
        """Make Lightning's objects reach all stages, until ``teardown``."""
        self._stage_states = StageStates(pipeline, model, self._module_path)
        if self._profiled is not None:
            self._profiled.follow(pipeline)
        if self._settings.interleaves:
            counts = self._loss_weight == "tokens" or has_own_weights(model)
            weights = LossWeights(model, self._sum_over_replicas, self.world_size) if counts else None
            steps = TrainingStepPerMicrobatch(
                model, pipeline, self.precision_plugin, self._settings.microbatches, weights
            )
            self._per_microbatch, collecting = steps, [collect_logs(model, steps.collector)]
        else:
            self._per_microbatch, collecting = None, []
        self._undo = collecting  # added to step by step, so that what is done when an error occurs is undone
        if isinstance(pipeline.module, nn.ModuleList):
            self._undo += switch_off_cache(model)
        if trainer.state.fn == TrainerFn.FITTING:
            self._undo += self._recompute_once(pipeline.module)
        self._undo += show_stages(trainer, pipeline.module, pipeline.stages)
        self._undo += follow_optimizers(pipeline.optimizers, self._lightning_optimizers, self._refresh_states)
        if self.world_size > 1:
            self._undo.append(after_backward(self.precision_plugin, self._after_backward))
        self._undo += follow_precision(self.precision_plugin, operations_over_stages(pipeline.optimizers))
        self._undo += self._stage_states.check_before_loading()
        self._undo += average_on_stages(trainer, pipeline.reading_late)

    def _recompute_once(self, module: Pipelined) -> list[Undo]:
        """Switch off gradient checkpointing of a Hugging Face model's blocks if the stages recompute them."""
        mode = self._settings.checkpoint
        undo = switch_off_recomputation(module) if mode != "never" else []
        if undo:
            rank_zero_info(
                f"RPCSequentialStrategy switches off gradient checkpointing of the blocks in {self._module_path!r} "
                f"during fit: its stages recompute them, because checkpoint={mode!r}. With checkpoint='never' each "
                "block recomputes itself."
            )
        return undo

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._recovery is not None:
            checks.check_repairs(devices=self.parallel_devices or (), num_hosts=self.num_nodes)
            if self.world is not None and self._recovery.max_restarts:
                self._launcher = RanksLauncher(self.world, replace_workers=True)

    def rebalance(self, balance: Sequence[int]) -> None:
        """Move layers, with their optimizer states and gradients, so that stages have other numbers of layers.

        Possible within ``fit`` between two batches, such as in ``on_train_batch_end`` or ``on_train_epoch_end``. Losses
        and weights are those of a run without it. The balance is kept for later runs of this strategy.

        Args:
            balance: The number of layers of each stage (of each chunk, if stages have several).

        Raises:
            MisconfigurationException: If the numbers do not fit the layers, if a stage would not fit into memory, or if
                layers cannot move in this run; it goes on with the balance that it had.
            RuntimeError: If no training runs, or a batch is on its way through the pipeline.
        """
        pipeline, model = self._running(), self.lightning_module
        if model is None or model.trainer.state.fn != TrainerFn.FITTING:
            raise RuntimeError("layers can move to other stages within fit only")
        self._check_can_rebalance("rebalance()")
        self._rebalance(pipeline, balance, "")

    def _rebalance(self, pipeline: Pipeline, balance: Sequence[int], why: str) -> None:
        stage_of = self._stage_of_chunk
        with checks.as_misconfiguration():
            per_stage = len(stage_of) // len(self.devices)
            numbers = check_balance(balance, len(pipeline.module), len(self.devices), chunks_per_stage=per_stage)
            before = pipeline.balance
            if numbers == before:
                return
            self._writer.settle()  # stages may be writing
            if self._stage_states is not None:
                self._stage_states.forget()
            begin = time.perf_counter()
            pipeline.rebalance(numbers, partial(self._check_memory, pipeline))
        self.balance = self._rebalanced = numbers
        seconds = time.perf_counter() - begin
        rank_zero_info(
            f"RPCSequentialStrategy: balance {numbers} instead of {before}: {moves(before, numbers, stage_of)} "
            f"({seconds:.1f} s){why}."
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Move layers to other stages if that is due and worthwhile; record the batch if it is its turn."""
        rebalancing, model = self._rebalancing, self.lightning_module
        if rebalancing is None or model is None or len(self.devices) < 2:
            return
        pipeline = self._running()
        found = rebalancing.before_batch(pipeline, model.current_epoch)
        if found is not None:
            names = [*(f"stage {i}" for i in range(len(self.devices) - 1)), "the driver"]
            why = found.described(names, least_gain=0.0).removesuffix(".")
            try:
                self._rebalance(pipeline, found.better, f"; {why}")
            except MisconfigurationException as error:
                rank_zero_warn(f"The balance stays {found.balance} from now on: {error}")
                self._rebalancing = None
                return
        trainer = model.trainer
        rebalancing.begin_batch(
            pipeline, trainer.fit_loop.epoch_loop.total_batch_idx, float(trainer.num_training_batches)
        )

    def on_validation_start(self) -> None:
        """Stop recording the last batch."""
        if self._rebalancing is not None:
            self._rebalancing.stop()

    def on_train_end(self) -> None:
        """Stop recording the last batch."""
        if self._rebalancing is not None:
            self._rebalancing.stop()

    @property
    def repairs(self) -> Sequence[Repair]:
        """The repairs of lost workers in the present run, or in the last one if no run is under way."""
        return self._repairs

    def model_to_device(self) -> None:
        """Move the part of the model that is on the driver to the driver's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other replicas. The stages of a replica need no barrier, because its driver calls them."""
        super().barrier(name)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` once for the batch, or once per micro-batch."""
        model = self.lightning_module
        assert model is not None
        if self._batch_norms and not self._has_warned_of_batch_norm:
            self._has_warned_of_batch_norm = checks.warn_of_batch_norm(model, self._batch_norms, self._settings)
        pipeline = self._running()
        if self._per_microbatch is None:
            # A second call of a step that steps its optimizers itself would do that too.
            repeat = self._repeat_training_step if model.automatic_optimization else None
            with pipeline.step(repeat, args, kwargs):
                output = super().training_step(*args, **kwargs)
        else:
            if not model.automatic_optimization:  # switched off since the start
                checks.check_automatic_optimization(model, self._settings.schedule)
            batch, *rest = (*args, *kwargs.values())
            with pipeline.step():
                output = self._per_microbatch(batch, rest)
        return output

    def _repeat_training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` once more, for some rows of the batch, without logging anything."""
        model = self.lightning_module
        assert model is not None
        checks.check_repeatable(model)
        undo = without_logs(model)
        try:
            return super().training_step(*args, **kwargs)
        finally:
            undo()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step``."""
        with self._evaluating():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step``."""
        with self._evaluating():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step``."""
        with self._evaluating():
            return super().predict_step(*args, **kwargs)

    def _evaluating(self) -> AbstractContextManager[None]:
        """Return a context for a step of an evaluation; within ``fit``, the training steps are looked at."""
        model = self.lightning_module
        fits = model is None or model.trainer.state.fn == TrainerFn.FITTING
        return nullcontext() if fits else self._running().step()

    def _sum_over_replicas(self, numbers: Sequence[float]) -> list[float]:
        summed = self.reduce(torch.tensor(numbers, dtype=torch.float64), reduce_op="sum")
        return cast(list[float], summed.tolist())

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: the backward pass of the loss runs the backward pass of every stage."""

    def _after_backward(self) -> None:
        """Average gradients over the replicas, unless more gradients are accumulated first."""
        if self._averages_gradients:
            weights = self._per_microbatch.loss_weights if self._per_microbatch is not None else None
            self._running().average_grads(None if weights is None else weights.share_of_replica())

    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Send new values to the other replicas, if they divide the steps; workers have stepped already."""
        if self._pipeline is not None:
            self._pipeline.optimizers.after_step(optimizer)
        if self._stage_states is not None and self._stage_states.has_gathered:
            self._stage_states.forget()

    def _clipping(self) -> Callable[[Optimizer, float, float], Tensor]:
        return checks.as_misconfiguration()(self._running().optimizers.clip_grad_norm)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of every stage, on the first replica only, which writes.

        Values of other stages are fetched when they are read or written. A step that is verified is verified before.
        """
        if self._pipeline is not None:
            self._pipeline.verify()
        if not self.is_global_zero:
            return {}
        states = self._stage_states
        return super().lightning_module_state_dict() if states is None else states.weights()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of an optimizer over all stages, as in one process; on the first replica only."""
        if not (self.is_global_zero or self._divides_states):
            return {}
        own = unwrapped(optimizer)
        if self._stage_states is not None and not is_stand_in(own):
            state = self._stage_states.optimizer_state(own)
            return state if self.is_global_zero else {}
        if self._divides_states and not is_stand_in(own) and torch.distributed.is_initialized():  # after fit
            return gather_state_dict(own, default_group())
        return super().optimizer_state(optimizer)

    def _refresh_states(self) -> None:
        if self._stage_states is not None:
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
        if self._planned is not None and is_resumable:
            checkpoint.setdefault("relay", {})["schedule"] = self._planned.state()
        if self._stage_states is None or self._state_dict_type == "sharded" or not self.is_global_zero:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif (
            type(self.checkpoint_io) is AtomicCheckpointIO
            and storage_options is None
            and (path := local_path(filepath))
        ):
            self._save(partial(self._stage_states.prepare_file, path=path), checkpoint)
        else:
            self._stage_states.gather(checkpoint)
            super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._stage_states is not None:
            self._stage_states.forget()

    def _private_tensors(self) -> list[Tensor]:
        return self._stage_states.gathered_tensors() if self._stage_states is not None else []

    def _save_sharded(self, checkpoint: dict[str, Any], path: Path) -> None:
        if not self.is_global_zero:
            return
        if self._stage_states is None:
            super()._save_sharded(checkpoint, path)
        else:
            self._save(partial(self._stage_states.prepare_sharded, path=path), checkpoint)

    def _save(self, prepare: Callable[..., Callable[[], None]], checkpoint: dict[str, Any]) -> None:
        """Write a checkpoint, in the background from copies that every process makes of its own part."""
        if self._writer.in_background:
            self._writer.wait()  # before there is another copy
            copied = snapshot(checkpoint)
            self._writer.save(prepare(copied, needs_copy=True))
        else:
            self._writer.save(prepare(checkpoint, needs_copy=False))

    def load_checkpoint(self, checkpoint_path: str | Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; training that is resumed from it draws the random numbers that would have come next.

        Weights of layers that have not been built are left in the file, from which the processes of these layers read
        them.
        """
        path, self._references = local_path(checkpoint_path), {}
        io = self.checkpoint_io
        if isinstance(io, AtomicCheckpointIO) and path is not None and path.is_file():
            with io.mapping_files():  # the optimizer states of other stages are never in memory here
                checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            if self._has_tensors_to_build() or checkpoint.get("optimizer_states"):
                self._references = references_in_file(path, checkpoint, weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        model, relay = self.lightning_module, checkpoint.get("relay", {})
        if model is not None and model.trainer.state.fn == TrainerFn.FITTING:
            if (state := relay.get("seeds")) is not None:
                self._seeds = self._seeds or Seeds(0)
                self._seeds.load_state_dict(state)
            if (state := relay.get("schedule")) is not None and self._pipeline is None:
                self._planned = PlannedSchedule.from_state(state)
        return checkpoint

    def _load_sharded(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        # The weights are read here, but for layers that have not been built, which other processes may get. Each stage
        # reads its own optimizer states in load_optimizer_state_dict, when it has its layers.
        if not self._has_tensors_to_build():
            checkpoint, self._shards = load_sharded(path, ["state_dict"], weights_only)
            return checkpoint
        checkpoint, self._shards = load_sharded(path, [], weights_only)
        model, state = self.lightning_module, checkpoint["state_dict"]
        assert model is not None
        later = {name for name, tensor in _tensors_of(model) if tensor.is_meta}
        here = {
            name: tensor
            for name, tensor in flat(state, "state_dict").items()
            if name.removeprefix("state_dict.") not in later
        }
        checkpoint["state_dict"] = with_tensors(state, read_tensors(self._shards, here), "state_dict")
        self._references = references_in_shards(self._shards, checkpoint["state_dict"])
        return checkpoint

    def _has_tensors_to_build(self) -> bool:
        """Return whether the model has tensors without memory; from now on operations on them can be recorded."""
        model = self.lightning_module
        if model is None or self._stage_states is not None:
            return False
        without_stand_ins(model)
        found = [tensor for _, tensor in _tensors_of(model) if tensor.is_meta]
        for tensor in found:
            self._construction.adopt(tensor)
        return bool(found)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint; those of layers that have not been built are read when they are."""
        if not self._has_tensors_to_build():
            super().load_model_state_dict(checkpoint, strict)
            return
        with self._construction.references.used(self._references), self._construction.recording():
            super().load_model_state_dict(checkpoint, strict)

    def _check_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        model, given = self.lightning_module, self._given_balance
        if self._stage_states is not None or model is None:
            return  # load_state_dict of the model checks by itself then
        module = dict(model.named_modules()).get(self._module_path)
        stage_of: DescribeStage = no_stage
        chunks = self._stage_of_chunk
        numbers = [] if given is None or given == "even" else given
        if len(numbers) == len(chunks) and isinstance(module, Pipelined):
            stage_of = stages_by_name(cut(module, numbers, chunks), f"{self._module_path}.")
        check_fit(model, state, strict=strict, stage_of=stage_of)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each stage the optimizer states of its parameters, which it reads itself if they are in local files."""
        references, self._references = self._references, {}
        if self._shards is None or self._stage_states is None:
            with self._running().optimizers.references.used(references):
                super().load_optimizer_state_dict(checkpoint)
            return
        check_optimizer_states([unwrapped(own) for own in self.optimizers], checkpoint["optimizer_states"])
        self._stage_states.load_optimizer_states(checkpoint["optimizer_states"], self._shards)

    def rpc_save_model(self, trainer: Trainer, save_model_fn: Callable[[Trainer, Any], Any], filepath: Any) -> None:
        """Call ``save_model_fn(trainer, filepath)`` while the model has the weights of every stage.

        As in Lightning 1.3: within the call, the pipelined module of ``trainer.lightning_module`` is a plain
        ``nn.Sequential`` or ``nn.ModuleList`` with the values of every stage, which can be pickled, copied or exported.
        Layers of other stages are copies: changing them does not change the run.
        """
        with self._stage_states.whole_module() if self._stage_states is not None else nullcontext():
            save_model_fn(trainer, filepath)

    def teardown(self) -> None:
        """Return weights and optimizer states to the user's objects, end the workers, and remove all hooks.

        With ``gather_on_end=False``, what the workers hold is not returned.
        """
        self._writer.settle()  # stages may be writing
        if self._rebalancing is not None:
            self._rebalancing.begin()  # an error may have ended a batch that is recorded
        self._stage_states = self._per_microbatch = None
        undo, self._undo, self._batch_norms = self._undo, [], {}
        pipeline, self._pipeline = self._pipeline, None
        model = self.lightning_module
        try:
            try:
                with ExitStack() as undoing:  # all of them, also if one raises
                    for function in reversed(undo):
                        undoing.callback(function)
                if self._profiled is not None:
                    self._profiled.end()
            finally:
                if pipeline is not None:
                    pipeline.close(is_failing=self._has_failed())
        except Exception as error:
            if not self._has_failed():
                self._end_writer(is_first=False)
                raise
            rank_zero_warn(f"The weights of some stages could not be fetched ({error!r}).")
        finally:
            with without_meta_tensors(model) if model is not None else nullcontext():
                super().teardown()

    def _running(self) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError("the pipeline is not running; this is possible only within fit")
        return self._pipeline


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
