"""Pipeline parallelism for an unmodified ``LightningModule``: connects Lightning to :mod:`strategies.pipeline`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.checkpoint.background import snapshot
from strategies.checkpoint.references import Unread
from strategies.checkpoint.save_and_load import load_sharded, local_path
from strategies.checkpoint.validate import DescribeStage, check_fit, no_stage, stages_by_name
from strategies.common.torch_compat import default_group
from strategies.launch.workers import fork_server, share_of_threads
from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.checkpoints import AtomicCheckpointIO, check_state_dict_type
from strategies.lightning.compat import (
    CheckpointIO,
    ClusterEnvironment,
    LightningModule,
    Precision,
    Trainer,
    TrainerFn,
    is_stand_in,
    rank_zero_warn,
    unwrapped,
)
from strategies.lightning.features.averages import WeightAverages
from strategies.lightning.features.batch_norm import BatchNormLayers
from strategies.lightning.features.feature import (
    ImportedIfAskedFor,
    KindOfFeature,
    MemoryArguments,
    PipelineArguments,
    features_of,
    overriding,
)
from strategies.lightning.features.gradient_hooks import HooksOnParameters
from strategies.lightning.features.kept_seeds import LayerSeeds
from strategies.lightning.features.layers.block_settings import HuggingFaceModels, TransformerEncoders
from strategies.lightning.features.layers.construction import ModelConstruction
from strategies.lightning.features.layers.division import Division
from strategies.lightning.features.layers.moving_layers import check_can_move, move_layers
from strategies.lightning.features.per_microbatch import StepsPerMicrobatch
from strategies.lightning.features.pipelines.divided_parameters import DividedParameters
from strategies.lightning.features.pipelines.replicas import AveragedReplicas
from strategies.lightning.features.pipelines.tensor_parallel import TensorParallel
from strategies.lightning.features.precision import PrecisionOnStages
from strategies.lightning.features.profiler import ProfilerOnStages
from strategies.lightning.features.recovery import LostWorkers
from strategies.lightning.features.summary import SummaryOfStages
from strategies.lightning.finding_blocks import find_module
from strategies.lightning.hooks import Undo, follow_optimizers, without_logs
from strategies.lightning.launch.replicated_strategy import ReplicatedStrategy
from strategies.lightning.options import Options, Rebalance, Schedule
from strategies.lightning.partitioning import is_called_in_reverse
from strategies.lightning.run import Preparation, Run, TrainingStep, stages_of_chunks
from strategies.lightning.search_settings import DEFAULT_MICROBATCHES
from strategies.lightning.strategy_plugin import StrategyPlugin
from strategies.lightning.whole_batch import TrainingStepPerBatch
from strategies.optim.restricted import check_optimizer_states, parameters_of
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.optim.clipping import clip_grad_norm
from strategies.pipeline.partition.memory import DevicePlacement, check_memory
from strategies.pipeline.partition.sequential import Pipelined, cut
from strategies.pipeline.recovery.repairs import Recovery, Repair
from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.pipeline.state.stand_ins import without_layers, without_meta_tensors
from strategies.sharding.gathered_states import gather_state_dict

if TYPE_CHECKING:
    from strategies.planning.plan import PlanTable

FEATURES: Sequence[KindOfFeature] = (
    ProfilerOnStages,
    StepsPerMicrobatch,
    HuggingFaceModels,
    TransformerEncoders,
    SummaryOfStages,
    AveragedReplicas,
    DividedParameters,
    TensorParallel,
    LostWorkers,
    PrecisionOnStages,
    BatchNormLayers,
    HooksOnParameters,
    LayerSeeds,
    WeightAverages,
    ImportedIfAskedFor("strategies.planning.rebalancing", "Rebalancing", ("rebalance",)),
)
"""What a pipeline can do besides training, in the order in which the strategy calls the features.

To add or remove a feature, add or remove its file and its line here.
"""

INTRINSIC_OPTIONS = (
    *("balance", "module", "microbatches", "checkpoint", "schedule", "rpc_timeout_sec", "data_plane"),
    *("state_dict_type", "async_save", "gather_on_end"),
)
"""The options that take effect without any of these features."""


class RPCSequentialStrategy(StrategyPlugin, ReplicatedStrategy):
    """Splits the layers of a model into stages and trains each stage in a separate process.

    The process that runs the script is the driver: it runs Lightning's loop, the loss and the last stage. The driver
    starts one worker process for each other stage; workers do not run the script. Under torchrun or SLURM, the other
    ranks are the workers, and they leave the script at the first ``fit``. The Trainer's ``devices`` times ``num_nodes``
    is the number of stages times the number of replicas.

    The methods of the contract (:class:`~strategies.lightning.strategy_plugin.StrategyPlugin`):

    * ``setup_environment`` connects the replicas.
    * ``setup`` checks the model and the settings, runs ``configure_optimizers`` on the whole model and starts the
      workers. It sends each worker its layers and the user's optimizers, restricted to the parameters of these layers.
    * ``barrier`` waits for the other replicas.
    * ``pre_backward`` does nothing. The backward pass of the loss runs the backward passes of all stages, or releases
      the gradients that the stages have already computed. The replicas then average their gradients.
    * ``post_optimizer_step`` sends the new values to the other replicas if ``zero_stage`` is not 0. The workers step
      while the optimizer steps on the driver.
    * ``save_checkpoint`` writes what Lightning gathered through ``state_dict`` and ``optimizer_state``.
    * ``teardown`` returns weights and optimizer states to the user's objects and ends the workers.

    Before the first ``fit``, ``schedule="auto"`` measures the forward and backward passes of every layer, the code that
    the driver runs outside the layers, and the transfer between two processes. It also measures a step of AdamW, in
    place of the model's optimizer. It then searches for a schedule, a balance and an order of passes with a simulator.
    It uses the model's ``example_input_array`` as the batch (see ``balance``). It logs one line that states the choice
    and the reason. The strategy keeps the choice for later runs, stores it in checkpoints and uses it again when
    training resumes.

    Args:
        balance: Number of layers of each stage, or how to find these numbers. ``"by_size"`` (default) balances the
            bytes of parameters and activations, ``"by_time"`` the measured time of forward and backward passes, and
            ``"even"`` gives equal numbers. The first two give the exact optimum for the measured costs, with no empty
            stage. Both measure each layer. They also measure what the driver runs outside the layers (embedding, norm,
            head, logits; the loss if ``forward`` returns it) and add this to the cost of the last stage. Under
            ``schedule="gpipe"``, the time of that part does not count, because the stages wait while it runs. Both use
            the model's ``example_input_array``. Without it, a Hugging Face model is measured on an input built from its
            configuration. For any other model without it, only the parameters count, and all layers must have the same
            class and shapes. After ``setup``, the attribute ``balance`` is the list in use. If stages have several
            chunks of layers, the list has one number for each chunk, in the order of the layers.
        microbatches: Number of parts into which each batch is split. The stages work on different parts at the same
            time. More parts reduce the idle time of the stages, but each part must be large enough to be computed
            efficiently. The number of rows need not be divisible by it. ``"auto"``, under ``schedule="auto"`` only,
            chooses the number that minimises the time of a batch. Tensors, dicts, dataclasses and lists are split along
            the rows. If the model has a method ``split_batch(batch, num_microbatches)``, the strategy calls it instead.
            Default: 8.
        checkpoint: Which micro-batches are recomputed in the backward pass instead of keeping their activations:
            ``"always"``, ``"except_last"`` (default) or ``"never"`` (fastest, if memory allows). ``"except_last"``
            keeps the activations of the last micro-batch, and of those whose backward pass follows at once: under all
            schedules but ``gpipe``, nothing is recomputed in the last stage. Under the first two, gradient
            checkpointing of a Hugging Face model is off in the blocks during ``fit``, because the stages recompute the
            blocks. Under ``"never"`` it stays on.
        schedule: Order of the passes. To set its options, pass a :class:`~strategies.lightning.options.Schedule`, such
            as ``Schedule("interleaved", chunks=2)``. Under ``"gpipe"`` (default), all forward passes precede all
            backward passes. ``training_step`` runs once for the batch, so it may compute any loss over the batch. Under
            all other schedules, ``training_step`` runs once per micro-batch and is suspended where it calls the
            pipelined module. Its results are averaged with the weights that ``loss_weight`` selects. These schedules
            need less memory or time:

            * ``"1f1b"``: each backward pass as early as possible. The first stage keeps the activations of as many
              micro-batches as there are stages.
            * ``"interleaved"``: 1F1B with several chunks of layers per stage. The stages are idle for less time at the
              start and at the end of a batch, but they communicate more.
            * ``"zb-h1"``: 1F1B in which the weight gradients of linear layers, attention and convolutions wait
              until a stage would be idle.
            * ``"zbv"``: ``"zb-h1"`` with two chunks per stage; the driver has the first and the last chunk.
            * ``"v-half"``: the chunks of ``"zbv"``, with about half of the activations of 1F1B.
            * ``"auto"``: the fastest of these schedules, or a custom order found by search, for the measured times of
              the layers; see ``docs/choose_a_strategy.md``.
            * A custom table: the path of a CSV file in the format of ``torch.distributed.pipelining``, or a function
              ``(processes, microbatches) -> table``; see
              :func:`~strategies.pipeline.schedule.custom.custom_table`.
        rpc_timeout_sec: Seconds for which a process may be idle while another process waits for it. After that, the
            process is declared hung and ended, and the error contains its Python stack. A process that computes may
            take ten times as long. With several hosts, also the seconds for which a host may be unreachable. After
            that, an error on every process of either side names both hosts. Default: 60.
        data_plane: How stages exchange activations and gradients. ``"auto"`` (default) selects ``"gloo"``, which
            transfers them through host memory. ``"nccl"`` transfers them from GPU to GPU, if no two stages share a GPU.
            It has never run (``docs/gpu.md``), so ``"auto"`` never selects it. For tests on CPUs, ``"simulated"`` runs
            the code of ``"nccl"`` under the rules of NCCL and reports tensors that change during a transfer.
            ``"simulated-serial"`` does the same on devices that run one operation at a time.
        deferred_batch_norm: If ``True``, the running statistics of BatchNorm layers are updated once per batch from all
            of its rows; otherwise once per micro-batch. In both cases BatchNorm normalises each micro-batch with the
            statistics of this micro-batch. Default: ``False``.
        module: Dotted path of the ``nn.Sequential`` or ``nn.ModuleList`` in the model. ``None`` (default) finds it. The
            first choice is ``sequential_module``, the second are the lists of blocks of a Hugging Face model. The third
            are the ``nn.ModuleList`` with at least one layer per stage, and the last are such ``nn.Sequential``, where
            several that the model calls in a row count as one. The model's own ``forward``, which runs on the driver,
            calls the blocks of an ``nn.ModuleList``. Under ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` and ``"zb-h1"``
            there may be several lists, ``["encoder.layers", "decoder.layers"]``: each has layers on every stage.
            ``balance`` then has the numbers of layers of the first list, followed by those of the second. See
            ``docs/models.md``.
        loss_weight: Weight of each micro-batch in losses, gradients and means (logged or returned), where
            ``training_step`` runs once per micro-batch. ``"rows"`` (default) uses its number of rows, for a loss that
            is a mean over rows. Accumulated batches and replicas then all have the same weight, as in Lightning.
            ``"tokens"`` uses its number of labels other than -100, for a loss that is a mean over these labels.
            Accumulated batches and replicas are then weighted by their tokens too. The labels are the micro-batch's
            entry or attribute ``"shift_labels"``, or else ``"labels"``. The first label of each row does not count in
            ``"labels"`` if the model contains a Hugging Face model whose loss shifts the labels. If the model has a
            method ``microbatch_weight(microbatch) -> float``, its return values replace the numbers of tokens, whatever
            ``loss_weight`` is. See ``docs/inputs.md``.
        microbatch_tokens: Under the schedules that run ``training_step`` once per micro-batch, the largest number of
            tokens of a micro-batch, with padding. Each training batch is then split into rows of similar length, as
            many micro-batches as take the least time, and columns that only have padding are cut off. The batch must be
            a mapping with an ``attention_mask``, such as a Hugging Face tokenizer returns, padded on the right.
            ``None`` (default) splits the rows in order into ``microbatches`` parts.
        data_parallel_size: Number of replicas of the pipeline, each with ``devices / data_parallel_size`` stages and
            its share of the data. Each stage averages its gradients with the same stage of the other replicas.
            Default: 1.
        tensor_parallel_size: Number of pipelines that divide the weights of each layer of a replica, and see the same
            rows. ``devices`` is then the number of stages times ``tensor_parallel_size`` times ``data_parallel_size``.
            The layers are divided by the plan of a Hugging Face model (``tp_plan``) or by the one that the model's
            method ``tensor_parallel_plan()`` returns; every pipeline computes what has no plan. See
            ``docs/tensor_parallel.md``. Default: 1.
        zero_stage: What the replicas of a stage divide among themselves (ZeRO). 0 (default): nothing. 1: the optimizer
            states and steps. After a step, each replica sends its new values to the other replicas. 2: the averaged
            gradients too. Once per step, after the backward passes, each gradient is summed for the replica that steps
            the parameter, and is ``None`` in the other replicas. 3: parameters with at least two dimensions, with their
            gradients and optimizer states. A layer gathers its weights when it runs, and again in its backward pass.
            All replicas need the same number of micro-batches; see ``docs/choose_a_strategy.md``.
        state_dict_type: Form of a checkpoint. ``"full"`` (default) is one file, which the driver writes while it
            receives the tensors one by one. ``"sharded"`` is a directory into which every stage writes its own part;
            ``python -m strategies.checkpoint.consolidate`` turns it into one file.
        async_save: If ``True``, training continues while a checkpoint is written from a copy in host memory. Default:
            ``False``.
        recovery: How lost workers are replaced and which steps are computed a second time, such as
            :class:`Recovery(max_restarts=3) <strategies.pipeline.recovery.repairs.Recovery>`. It needs Linux; see
            ``docs/lost_workers.md``. Default: ``None``, the first error ends the run.
        rebalance: ``"auto"`` allows layers to move to other stages at the end of each training epoch. They move if
            recorded steps predict that this saves a tenth of the time of the passes, for example after the process of a
            stage has become slow. A :class:`~strategies.lightning.options.Rebalance` sets the interval and the share of
            time, such as ``Rebalance(every_n_steps=100)``. Losses and weights equal those of a run without it. For one
            pipeline whose workers the strategy starts, on CPUs; see ``docs/monitor.md``. Default: ``None``.
        gather_on_end: Whether the weights and optimizer states of all stages return to the driver when a run ends.
            ``None`` (default): they return unless the model was built without memory, in ``configure_model`` or
            ``trainer.init_module()``, because the driver may be unable to hold it. Values that have not returned exist
            only in the checkpoints of the run, and reading such a weight raises an error that says so.
        accelerator: As in Lightning's strategies; set by the Trainer by default.
        parallel_devices: The devices of this host; set by the Trainer by default.
        cluster_environment: Provides the rank and the address of each process; found by the Trainer by default.
        checkpoint_io: Writes and reads files; by default, it replaces files atomically.
        precision_plugin: Precision of the training; set by the Trainer by default.

    Raises:
        MisconfigurationException: If an argument has a type or value that is not listed above.
    """

    def __init__(
        self,
        balance: list[int] | Literal["even", "by_size", "by_time"] = "by_size",
        microbatches: int | Literal["auto"] = DEFAULT_MICROBATCHES,
        checkpoint: str = "except_last",
        *,
        schedule: Schedule | str | Path | Callable[[int, int], Any] = "gpipe",
        rpc_timeout_sec: float = 60.0,
        data_plane: str = "auto",
        deferred_batch_norm: bool = False,
        module: str | list[str] | None = None,
        loss_weight: Literal["rows", "tokens"] = "rows",
        microbatch_tokens: int | None = None,
        data_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        zero_stage: Literal[0, 1, 2, 3] = 0,
        state_dict_type: str = "full",
        async_save: bool = False,
        recovery: Recovery | None = None,
        rebalance: Rebalance | Literal["auto"] | None = None,
        gather_on_end: bool | None = None,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.options = Options(
            balance,
            microbatches,
            checkpoint,
            schedule,
            rpc_timeout_sec,
            data_plane,
            deferred_batch_norm,
            module,
            loss_weight,
            microbatch_tokens,
            data_parallel_size,
            tensor_parallel_size,
            zero_stage,
            state_dict_type,
            async_save,
            recovery,
            rebalance,
            gather_on_end,
        )
        settings = self.options.settings
        check_state_dict_type(state_dict_type, checkpoint_io)
        self._division, self._construction = Division(self.options, _search), ModelConstruction(gather_on_end)
        parameters = signature(RPCSequentialStrategy.__init__).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        self.features = [
            self._division,
            self._construction,
            *features_of(FEATURES, self.options, INTRINSIC_OPTIONS, defaults),
        ]
        """What a run can do besides training. Features can be added before the first run; see CONTRIBUTING.md."""
        parallel = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        replaces_workers = recovery is not None and recovery.max_restarts > 0
        super().__init__(data_parallel_size, tensor_parallel_size, *parallel, replaces_workers=replaces_workers)
        self._timeout = timedelta(seconds=settings.patience_seconds)
        self._state_dict_type, self._async_save = state_dict_type, async_save
        self._run: Run | None = None
        self._ending = ExitStack()
        self._repairs: Sequence[Repair] = ()

    # Before a run

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context in which a model is built without memory for its large tensors; each process builds its stage later.

        Lightning enters it for ``configure_model`` and ``trainer.init_module()``. The values are the same as without
        it. Each process also reads its part of the ``safetensors`` files that ``from_pretrained`` loads.
        """
        with super().tensor_init_context(empty_init), self._construction.without_memory():
            yield

    def setup_environment(self) -> None:
        """Prepare the driver's device and connect the replicas; workers start in ``setup``, when the model is known.

        The fork server starts here, unless the strategy times the layers. It then starts in ``setup``, after they have
        been timed.
        """
        super().setup_environment()
        if not self.options.balances_by_time and not self.options.settings.is_auto:
            self._start_fork_server()

    def _start_fork_server(self) -> None:
        """Start the process that forks the workers, if there is none. It imports torch while this process continues."""
        if self.world is None and len(self.devices) > 1:
            fork_server(share_of_threads(len(self.stages_on_host())))

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
        """Predict time and memory of several ways to run a model, in this process; see ``trainer.Trainer.plan``."""
        from strategies.planning.plan import PipelineOptions, PlanChoices, plan_table

        limit = memory_limit_bytes if memory_limit_bytes is not None else self.options.order.memory_limit_bytes
        numbers = stages if stages is not None else [max(2, len(self.devices))]
        choices = PlanChoices(numbers, microbatches, schedules, limit)
        return plan_table(trainer, model, data, PipelineOptions.of(self.options, self, trainer.num_nodes), choices)

    # A run

    def setup(self, trainer: Trainer) -> None:
        """Check the model and the settings, then start the workers and send them their stages.

        Raises:
            MisconfigurationException: If model, balance and devices do not fit together, if a stage does not fit into
                memory, or if the run needs something that a pipeline cannot do. It is raised before a worker starts.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        prepared = self._prepared(trainer)
        for feature in self.features:
            feature.check(prepared)
        for feature in self.features:
            self._end_by(feature.prepare(prepared))
        prepared, balance, is_reversed = self._divided(prepared)
        self._start_fork_server()
        optimizers = self._configured_optimizers(prepared)
        pipeline = self._start_pipeline(prepared, balance, optimizers, is_reversed=is_reversed)
        self._run = run = Run.of(
            prepared,
            pipeline,
            training_step=self._training_step_of(prepared, pipeline),
            check_memory=partial(self._check_memory, prepared, pipeline),
            move=self._move,
            before_batch=overriding(self.features, "on_train_batch_start"),
            after_batches=overriding(self.features, "on_batches_end"),
        )
        for feature in self.features:
            self._end_by(feature.begin(run))
        self._end_by(follow_optimizers(pipeline.optimizers, self._lightning_optimizers, run.states.refresh))
        self._end_by(run.states.check_before_loading())

    def _prepared(self, trainer: Trainer) -> Preparation:
        """Find the pipelined part of the model."""
        model, options = self.lightning_module, self.options
        assert model is not None and self.parallel_devices is not None
        where = self._division.find(model, len(self.devices))
        self._construction.initialise(model)
        module = find_module(model, where, self._construction.construction)
        gathers = self._construction.gathers(module)
        path = where if isinstance(where, str) else ""
        return Preparation(self, options, options.settings, trainer, model, module, path, gathers)

    def _divided(self, prepared: Preparation) -> tuple[Preparation, list[int], bool]:
        """Convert the model to its precision, divide its layers, build the driver's part and move it to its device.

        Returns:
            The preparation with its schedule, the number of layers of each chunk, and whether the first stage has the
            last layers.
        """
        model, module, construction = prepared.model, prepared.module, self._construction.construction
        with construction.without_memory():
            self.model = self.precision_plugin.convert_module(model)
        inside, build = set(module.modules()), self._construction.builder(model)
        build(child for child in model.modules() if child not in inside)
        with without_layers(module, list(module._modules)):
            self.model_to_device()
        with construction.reading(module):
            is_reversed = is_called_in_reverse(model, module, self.root_device, self.precision_plugin)
            with ExitStack() as measuring:
                for feature in self.features:
                    measuring.enter_context(feature.measuring(prepared))
                settings, balance = self._division.divide(prepared, is_reversed=is_reversed)
        prepared = prepared.with_settings(settings)
        *elsewhere, here = cut(module, balance, prepared.stage_of_chunk, is_reversed=is_reversed)
        build(here.modules())
        with without_layers(module, [name for stage in elsewhere for name in stage._modules]):
            self.model_to_device()
        return prepared, balance, is_reversed

    def _configured_optimizers(self, prepared: Preparation) -> list[Optimizer]:
        """Run ``configure_optimizers``, if the run trains, and return the user's optimizers."""
        if prepared.is_fitting:
            self.setup_optimizers(prepared.trainer)
        self.setup_precision_plugin()
        if not prepared.is_fitting:
            return []
        return [own for own in map(unwrapped, self.optimizers) if not is_stand_in(own)]

    def _start_pipeline(
        self, prepared: Preparation, balance: list[int], optimizers: Sequence[Optimizer], *, is_reversed: bool
    ) -> Pipeline:
        """Start the workers and send them their stages."""
        arguments = PipelineArguments()
        with as_misconfiguration():
            for feature in self.features:
                arguments.update(feature.arguments(prepared, optimizers))
            pipeline = Pipeline(
                prepared.module,
                balance,
                prepared.devices,
                prepared.settings,
                optimizers=optimizers,
                model=prepared.model,
                world=self.world,
                path=prepared.path,
                is_reversed=is_reversed,
                await_writes=lambda: self._writer.settle(),
                repeating=partial(without_logs, prepared.model),
                **arguments,
            )
            self._ending.callback(lambda: pipeline.close(is_failing=self._has_failed()))
            self._repairs = pipeline.repairs
            self._check_memory(prepared, pipeline)
            pipeline.start()
        return pipeline

    def _check_memory(self, prepared: Preparation, pipeline: Pipeline) -> None:
        """Check that every stage fits into memory, while all layers are still in this process.

        Raises:
            ValueError: If a stage does not fit.
        """
        arguments, optimizers = MemoryArguments(), pipeline.optimizers.optimizers
        for feature in self.features:
            arguments.update(feature.memory(prepared, optimizers))
        placement = DevicePlacement.of(prepared.model, pipeline.stages, self.devices, self.stages_on_host())
        check_memory(placement, optimizers, communicators=pipeline.num_communicators, **arguments)

    def _training_step_of(self, prepared: Preparation, pipeline: Pipeline) -> TrainingStep:
        """Return the object that runs ``training_step``: that of a feature, or Lightning's method for whole batches."""
        for feature in self.features:
            if (step := feature.training_step(prepared, pipeline)) is not None:
                return step
        assert not prepared.settings.interleaves, "a feature runs training_step once per micro-batch"
        return TrainingStepPerBatch(prepared.model, pipeline, super().training_step)

    def _end_by(self, undo: Iterable[Undo]) -> None:
        """Call functions when the run ends, the last one first. They are called even if the iterable raises later."""
        for function in undo:
            self._ending.callback(function)

    def teardown(self) -> None:
        """Return weights and optimizer states to the user's objects, end the workers, and remove all hooks.

        With ``gather_on_end=False``, the values that the workers hold are not returned.
        """
        self._writer.settle()  # stages may be writing
        self._run = None
        model = self.lightning_module
        try:
            self._ending.close()
        except Exception as error:
            if not self._has_failed():
                self._end_writer(is_first=False)
                raise
            rank_zero_warn(f"The weights of some stages could not be fetched ({error!r}).")
        finally:
            with without_meta_tensors(model) if model is not None else nullcontext():
                super().teardown()

    @property
    def run(self) -> Run:
        """The present run, which exists from ``setup`` to ``teardown``.

        Raises:
            RuntimeError: If no run exists.
        """
        if self._run is None:
            raise RuntimeError("the pipeline is not running; this is possible only within fit")
        return self._run

    @property
    def pipeline(self) -> Pipeline | None:
        """The running pipeline; ``None`` outside a run."""
        return None if self._run is None else self._run.pipeline

    @property
    def repairs(self) -> Sequence[Repair]:
        """The repairs of lost workers in the present run, or in the last run if none is under way."""
        return self._repairs

    # Layers that move

    @property
    def balance(self) -> Sequence[int] | Literal["even", "by_size", "by_time"]:
        """The number of layers of each chunk that is in use; before the first run, the value that the user gave."""
        return self._division.balance

    def rebalance(self, balance: Sequence[int]) -> None:
        """Move layers, with their optimizer states and gradients, to stages according to a new balance.

        Call it within ``fit`` between two batches, such as in ``on_train_batch_end`` or ``on_train_epoch_end``. Losses
        and weights equal those of a run without the call. Later runs of this strategy use the same balance.

        Args:
            balance: The number of layers of each stage (of each chunk, if stages have several).

        Raises:
            MisconfigurationException: If the numbers do not fit the layers, if a stage would not fit into memory, or if
                layers cannot move in this run. The run continues with its previous balance.
            RuntimeError: If no training runs, or a batch is passing through the pipeline.
        """
        if not self.run.is_fitting:
            raise RuntimeError("layers can move to other stages within fit only")
        check_can_move("rebalance()", self.run)
        self._move(balance, "")

    def _move(self, balance: Sequence[int], why: str) -> None:
        if move_layers(self.run, balance, why):
            self._division.move_to(self.run.pipeline.balance)

    # Batches

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the features that follow batches that a batch begins."""
        for function in self.run.before_batch:
            function(self.run)

    def on_validation_start(self) -> None:
        """Tell the features that follow batches that the last one is over."""
        for function in self.run.after_batches:
            function(self.run)

    def on_train_end(self) -> None:
        """Tell the features that follow batches that the last one is over."""
        for function in self.run.after_batches:
            function(self.run)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` once for the batch, or once per micro-batch."""
        return self.run.training_step(args, kwargs)

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
        """Return the context of a step of an evaluation; within ``fit``, only training steps have a context."""
        return nullcontext() if self.run.is_fitting else self.run.pipeline.step()

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other replicas. The workers of a replica need no barrier, because its driver calls them."""
        super().barrier(name)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: the backward pass of the loss runs the backward pass of every stage."""

    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Send new values to the other replicas, if the replicas divide the steps. The workers have already stepped."""
        if self._run is None:
            return
        self._run.pipeline.optimizers.after_step(optimizer)
        if self._run.states.has_gathered:
            self._run.states.forget()

    def _clipping(self) -> Callable[[Optimizer, float, float], Tensor]:
        return as_misconfiguration()(partial(clip_grad_norm, self.run.pipeline.optimizers))

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of every stage on the first replica, which writes the checkpoint; else an empty dict.

        Values of other stages are fetched when they are read or written. A pending verification of a step runs first.
        """
        if self._run is not None:
            self._run.pipeline.verify()
        if self.global_rank > 0 and (self._run is None or self.options.zero_stage < 3):
            return {}
        weights = super().lightning_module_state_dict() if self._run is None else self._run.states.weights()
        return weights if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of an optimizer over all stages, as in one process, on the first replica only.

        Raises:
            RuntimeError: In an evaluation after ``fit``, if the states stayed on the workers of ``fit``.
        """
        divides, run = self.options.zero_stage in (1, 2), self._run
        is_fitting = run is not None and run.is_fitting
        if not (self.global_rank == 0 or divides or (is_fitting and self.options.zero_stage == 3)):
            return {}
        own = unwrapped(optimizer)
        if is_stand_in(own):
            return super().optimizer_state(optimizer)
        if run is not None and run.is_fitting:
            state = run.states.optimizer_state(own)
            return state if self.is_global_zero else {}
        if run is not None and not run.gathers and any(p.is_meta for p in parameters_of(own)):
            raise RuntimeError(
                f"the states of {type(own).__name__} were not brought back when fit ended, because gather_on_end is "
                "False or the model was built without memory (in configure_model), so this run cannot save them. Save "
                "the checkpoint within fit, or save_checkpoint(..., weights_only=True), or pass "
                "RPCSequentialStrategy(gather_on_end=True) if the model fits into this process"
            )
        if divides and torch.distributed.is_initialized():  # after fit
            return gather_state_dict(own.state_dict(), default_group())
        return super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint, for which Lightning has gathered the state of every stage.

        The key ``relay`` holds what features need to resume, such as the position of the layers' random number
        generators, unless the checkpoint holds weights only.
        """
        if "optimizer_states" in checkpoint:
            for feature in self.features:
                if state := feature.state():
                    checkpoint.setdefault("relay", {}).update(state)
        if self._run is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        states, path = self._run.states, local_path(filepath)
        if self._state_dict_type == "sharded" or not self.is_global_zero:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif type(self.checkpoint_io) is AtomicCheckpointIO and storage_options is None and path:
            self._save(partial(states.prepare_file, path=path), checkpoint)
        else:
            states.gather(checkpoint)
            super().save_checkpoint(checkpoint, filepath, storage_options)
        states.forget()

    def _private_tensors(self) -> list[Tensor]:
        return [] if self._run is None else self._run.states.gathered_tensors()

    def _save_sharded(self, checkpoint: dict[str, Any], path: Path) -> None:
        if not self.is_global_zero:
            return
        if self._run is None:
            super()._save_sharded(checkpoint, path)
        else:
            self._save(partial(self._run.states.prepare_sharded, path=path), checkpoint)

    def _save(self, prepare: Callable[..., Callable[[], None]], checkpoint: dict[str, Any]) -> None:
        """Write a checkpoint; in the background, from copies that every process makes of its part."""
        if self._writer.in_background:
            self._writer.wait()  # so that no second copy is in memory
            copied = snapshot(checkpoint)
            self._writer.save(prepare(copied, needs_copy=True))
        else:
            self._writer.save(prepare(checkpoint, needs_copy=False))

    def load_checkpoint(self, checkpoint_path: str | Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint. Training that resumes from it draws the random numbers that would have come next.

        Weights of layers that have not been built stay in the file. The processes that build these layers read them.
        """
        path, io = local_path(checkpoint_path), self.checkpoint_io
        self._construction.take_references()
        if isinstance(io, AtomicCheckpointIO) and path is not None and path.is_file():
            with io.mapping_files():  # the driver never holds the optimizer states of other stages in memory
                checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            if self._has_tensors_to_build() or checkpoint.get("optimizer_states"):
                self._construction.refer_to(path, checkpoint, weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        model, state = self.lightning_module, checkpoint.get("relay", {})
        if model is not None and model.trainer.state.fn == TrainerFn.FITTING:
            for feature in self.features:
                feature.load_state(state, is_running=self._run is not None)
        return checkpoint

    def _load_sharded(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        # The driver reads the weights, except weights of layers that have not been built, because another process may
        # get these layers. Each stage reads its optimizer states in load_optimizer_state_dict, when it has its layers.
        if self.options.tensor_parallel_size > 1:  # each driver takes its part of whole tensors
            return load_sharded(path, weights_only=weights_only)[0]
        if self._has_tensors_to_build():
            assert self.lightning_module is not None
            checkpoint, self._unread = self._construction.load_sharded(self.lightning_module, path, weights_only)
        else:
            checkpoint, shards = load_sharded(path, ["state_dict"], weights_only)
            self._unread = Unread(shards, checkpoint)
        return checkpoint

    def _has_tensors_to_build(self) -> bool:
        """Return whether the model has tensors without memory, and prepare recipes for them."""
        model = self.lightning_module
        return model is not None and self._run is None and self._construction.adopt(model)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint. Weights of layers that have not been built are read when they are built."""
        with self._construction.loading() if self._has_tensors_to_build() else nullcontext():
            super().load_model_state_dict(checkpoint, strict)

    def _check_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        model, given = self.lightning_module, self.options.balance
        if self._run is not None or model is None:
            return  # load_state_dict of the model makes these checks then
        where, chunks = self._division.where, stages_of_chunks(self.options.settings, len(self.devices))
        module = dict(model.named_modules()).get(where) if isinstance(where, str) else None
        stage_of: DescribeStage = no_stage
        numbers = given if isinstance(given, list | tuple) else []
        if len(numbers) == len(chunks) and isinstance(module, Pipelined):
            stage_of = stages_by_name(cut(module, numbers, chunks), f"{where}.")
        check_fit(model, state, strict=strict, stage_of=stage_of)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each stage the optimizer states of its parameters. A stage reads them itself from local files."""
        run, references = self.run, self._construction.take_references()
        if self._unread is None:
            with run.pipeline.optimizers.references.used(references):
                super().load_optimizer_state_dict(self._own_part(run, checkpoint))
        else:
            check_optimizer_states([unwrapped(own) for own in self.optimizers], checkpoint["optimizer_states"])
            run.states.load_optimizer_states(checkpoint["optimizer_states"], self._unread)
        run.pipeline.after_loading()

    def _own_part(self, run: Run, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint with this pipeline's part of the optimizer states, if pipelines divide layers."""
        divided = run.pipeline.divided
        if divided is None:
            return checkpoint
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        own = [{**state, "state": divided.own_states(unwrapped(its), state["state"])} for its, state in pairs]
        return {**checkpoint, "optimizer_states": own}

    def rpc_save_model(self, trainer: Trainer, save_model_fn: Callable[[Trainer, Any], Any], filepath: Any) -> None:
        """Call ``save_model_fn(trainer, filepath)`` while the model has the weights of every stage.

        The method has the interface of Lightning 1.3. Within the call, the pipelined module of
        ``trainer.lightning_module`` is a plain ``nn.Sequential`` or ``nn.ModuleList`` with the values of every stage,
        which can be pickled, copied or exported. Layers of other stages are copies on the CPU, so a change to them does
        not affect the run. To call the model where the driver's stage is on a GPU, move a copy of it to one device.
        """
        with nullcontext() if self._run is None else self._run.states.whole_module():
            save_model_fn(trainer, filepath)


def _search(*args: Any, **kwargs: Any) -> PlannedSchedule:
    """Search for a schedule. The planning tools are imported here because only the search needs them."""
    from strategies.planning.automatic import find_schedule

    return find_schedule(*args, **kwargs)
