"""``trainer.plan``: measure a model in this process and predict ways to run it as a pipeline, without training.

data or example input ─────▶ a micro-batch of each size ──▶ costs of layers and of the driver's part ─┐
configure_optimizers ──▶ bytes of states, seconds of a step ──────────────────────────────────────────┴─▶ rows
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.joined_lists import lengths_of, lists_of
from strategies.common.names import did_you_mean
from strategies.common.patching import unchanged
from strategies.launch.allocator import all_freed_memory_kept
from strategies.launch.limits import room_on_host
from strategies.launch.workers import num_cores, share_of_threads
from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.compat import (
    CombinedLoader,
    LightningDataModule,
    LightningModule,
    MisconfigurationException,
    Precision,
    Trainer,
    attached,
    collect_rng_states,
    connect,
    copy_of,
    is_overridden,
    is_stand_in,
    set_rng_states,
    takes_batch_idx,
    transferred,
    unwrapped,
)
from strategies.lightning.features.loss_weights import check_loss_weight
from strategies.lightning.features.per_microbatch import check_automatic_optimization, num_gradient_sets, split_for
from strategies.lightning.features.pipelines.tensor_parallel import plan_of
from strategies.lightning.finding_blocks import described, find_module, find_path
from strategies.lightning.hooks import collect_logs
from strategies.lightning.launch.replicated_strategy import ReplicatedStrategy
from strategies.lightning.loader_order import kept_order
from strategies.lightning.options import Options
from strategies.lightning.partitioning import FoundExample, find_example, is_called_in_reverse, measuring, with_threads
from strategies.optim.costs import StepCost, StepCosts
from strategies.optim.restricted import parameters_of
from strategies.optim.trial import check_by_element, check_divisible
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.partition.memory import Need, Sizes, needs_of
from strategies.pipeline.partition.model_costs import Costs
from strategies.pipeline.partition.profiling import now
from strategies.pipeline.partition.sequential import (
    Pipelined,
    check_balance,
    check_lists,
    cut,
    even_balance,
)
from strategies.pipeline.recovery.recovery import MOST_LOGGED_BYTES
from strategies.pipeline.schedule.planned import AUTO
from strategies.pipeline.schedule.program import ranks_of
from strategies.pipeline.schedule.tables import SCHEDULES, Placement
from strategies.pipeline.transport.slots import NUM_SLOTS
from strategies.planning.action_costs import DriverPart, PlannedLayer, group_seconds, model_costs
from strategies.planning.automatic import input_bytes, measure_actions
from strategies.planning.plan_rows import Measured, PlanRow, best_row, plan_row
from strategies.sharding.gathered_layers import ReplicaGroup
from strategies.sharding.single_rank import as_single_rank, as_single_replica

_MeasuredCosts: TypeAlias = Costs[PlannedLayer, DriverPart]

MAX_MICROBATCHES = 32
"""Maximum number of micro-batches of a sweep."""

BUDGET_SECONDS = 2.0
"""Time limit for all passes of all layers for one size, in addition to the warm-up and the first few passes."""

CACHE_BYTES = 48 * 2**20
"""More than the caches of common processors hold for one core. Written before each measured optimizer step."""


@dataclass(frozen=True)
class PlanChoices:
    """The options that a plan compares.

    Attributes:
        stages: Numbers of processes.
        microbatches: Numbers of micro-batches; ``None`` for powers of two that divide the rows of a batch.
        schedules: Names of schedules; ``None`` for all that the model and the settings of the strategy allow.
        memory_limit_bytes: Maximum memory of a process.

    Raises:
        MisconfigurationException: If a number is out of range, or a name unknown.
    """

    stages: Sequence[int]
    microbatches: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, values, least in (
            ("stages", self.stages, 2),
            ("microbatches", self.microbatches, 1),
            ("memory_limit_bytes", None if self.memory_limit_bytes is None else [self.memory_limit_bytes], 1),
        ):
            wrong: list[Any] = [
                each for each in values or () if not isinstance(each, int) or isinstance(each, bool) or each < least
            ]
            if wrong or (values is not None and not values):
                raise MisconfigurationException(
                    f"{name} must be whole numbers of at least {least}, got {wrong[0] if wrong else values!r}."
                )
        for schedule in self.schedules or ():
            if schedule == AUTO:
                raise MisconfigurationException(
                    "schedules names 'auto', but a plan compares the schedules from which schedule='auto' chooses: "
                    f"{', '.join(SCHEDULES)}. Leave it out."
                )
            if schedule not in SCHEDULES:
                raise MisconfigurationException(
                    f"Unknown schedule {schedule!r}{did_you_mean(str(schedule), SCHEDULES)}"
                )
        if self.schedules is not None and not self.schedules:
            raise MisconfigurationException(f"schedules is empty; name some of {', '.join(SCHEDULES)}.")


@dataclass(frozen=True)
class PipelineOptions:
    """The settings of a pipeline strategy that a plan uses.

    Attributes:
        path: Dotted path of the pipelined module, or those of several lists; ``None`` to find it.
        balance: The number of layers of each chunk; ``"even"``; ``None`` to find it.
        settings: Micro-batches, recomputation and chunks.
        device: The device of the driver.
        num_replicas: Number of replicas of the pipeline.
        num_parts: Number of pipelines of each replica, which divide its layers.
        zero_stage: What the replicas of a stage divide among themselves.
        num_nodes: Number of hosts.
        loss_weight: How micro-batches are weighted.
        microbatch_tokens: The largest number of tokens of a micro-batch of rows of similar length. A plan has
            micro-batches of equally many rows, and says so.
        only_auto: Names of given settings that apply to ``schedule="auto"`` only.
        num_snapshots: Number of snapshots that each process keeps.
        gathers_on_end: Whether the driver gets the whole model after the run; ``None`` if it does so when it had the
            whole model before.
    """

    path: str | Sequence[str] | None
    balance: Sequence[int] | Literal["even"] | None
    settings: Settings
    device: torch.device
    num_replicas: int = 1
    num_parts: int = 1
    zero_stage: int = 0
    num_nodes: int = 1
    loss_weight: str = "rows"
    microbatch_tokens: int | None = None
    only_auto: Sequence[str] = ()
    num_snapshots: int = 0
    gathers_on_end: bool | None = None

    @property
    def num_pipelines(self) -> int:
        """The number of pipelines of all replicas."""
        return self.num_replicas * self.num_parts

    @property
    def num_shares(self) -> int:
        """The number of replicas that divide the optimizer states among themselves."""
        return self.num_replicas if self.zero_stage in (1, 2) else 1

    @property
    def num_steppers(self) -> int:
        """The number of replicas that divide an optimizer's step among themselves."""
        return self.num_replicas if self.zero_stage else 1

    @property
    def num_owners(self) -> int:
        """The number of replicas that divide the averaged gradients among themselves."""
        return self.num_replicas if self.zero_stage == 2 else 1

    @classmethod
    def of(cls, given: Options, ranks: ReplicatedStrategy, num_nodes: int) -> "PipelineOptions":
        """Return what a plan uses of the options of a strategy.

        Args:
            given: The options.
            ranks: The strategy.
            num_nodes: Number of hosts.
        """
        return cls(
            given.module,
            given.given_balance,
            given.settings,
            ranks.root_device,
            ranks.world_size,
            given.tensor_parallel_size,
            given.zero_stage,
            num_nodes,
            given.loss_weight,
            given.microbatch_tokens,
            [name for name in ("max_microbatches", "memory_limit_bytes") if getattr(given.order, name) is not None],
            NUM_SLOTS if given.recovery is not None and given.recovery.max_restarts else 0,
            given.gather_on_end,
        )


@dataclass(frozen=True)
class PlanTable:
    """The ways to run a model as a pipeline.

    Attributes:
        rows: One row for each way, in the order of stages, micro-batches and schedules.
        best: The best row.
        path: Dotted path of the pipelined module, or those of several lists.
        layers: The number of its layers, and their classes.
        measured_on: A description of what was measured.
        notes: What a reader must know about the figures.
        options: The settings of the strategy.
    """

    rows: list[PlanRow]
    best: PlanRow
    path: str | list[str]
    layers: str
    measured_on: str
    options: PipelineOptions
    notes: list[str] = field(default_factory=list)


def plan_table(
    trainer: Trainer, model: LightningModule, data: Any, options: PipelineOptions, choices: PlanChoices
) -> PlanTable:
    """Measure a model and predict every requested way to run it. Nothing is trained, and no process starts.

    Args:
        trainer: The Trainer, to which the model is attached temporarily.
        model: The model. Its ``setup`` hook runs; apart from the effects of this hook, the model does not change.
        data: A data module or a loader of training batches, on which ``training_step`` is measured; by default the
            model's ``train_dataloader``. Without either, ``forward`` is measured on ``example_input_array``, or
            otherwise, for a Hugging Face model, on an input made from its configuration.
        options: The settings of the strategy.
        choices: What to compare.

    Raises:
        MisconfigurationException: If the choices do not fit the model, or if there is no input to measure it on.
    """
    precision = trainer.precision_plugin
    is_late = is_overridden("configure_model", model)
    is_whole = not is_late and not is_on_meta(model)
    converts = type(precision).convert_module is not Precision.convert_module
    if is_late or converts or options.device.type != "cpu":
        model = copy_of(model)
    with attached(trainer, model, data), _set_up(model, data):
        early = {name for name, _ in model.named_parameters()}
        model = _prepared(trainer, model, options.device, is_late=is_late)
        late = [name for name, _ in model.named_parameters() if name not in early]
        if options.num_parts > 1 and late:
            raise MisconfigurationException(
                f"tensor_parallel_size={options.num_parts} divides values, but configure_model of "
                f"{type(model).__name__} makes {late[0]}, in a run without memory. Build the model in __init__."
            )
        loader = _training_loader(model, data)
        with kept_order(loader.flattened if loader is not None else ()):
            return _ModelPlan(trainer, model, loader, options, choices, is_whole=is_whole).table()


def _prepared(trainer: Trainer, model: LightningModule, device: torch.device, *, is_late: bool) -> LightningModule:
    """Return a model with its layers, in the precision and on the device of the training.

    If layers of ``configure_model`` would take more than half of the memory of this host, they are built on the
    ``meta`` device.
    """
    if is_late:
        model = _built(trainer, model)
    model = cast(LightningModule, trainer.precision_plugin.convert_module(model))
    if is_on_meta(model):
        if not is_late:
            model = copy_of(model)
        model = model.to("meta")  # including parts outside the layers, so that they can be measured together
    else:
        model = model.to(device)
    connect(trainer, model)
    return model


def _built(trainer: Trainer, model: LightningModule) -> LightningModule:
    """Return a model whose ``configure_model`` has run."""
    trial = copy_of(model)
    connect(trainer, trial)
    try:
        with torch.device("meta"):
            trial.configure_model()
    except Exception:  # the hook needs values, which tensors on the meta device do not have
        sizes = []
    else:
        sizes = [parameter.nbytes for parameter in trial.parameters()]
    if sum(sizes) > room_on_host().size_bytes // 2:
        return trial
    connect(trainer, model)
    model.configure_model()
    return model


def is_on_meta(model: nn.Module) -> bool:
    """Return whether some parameters or buffers of a model have no memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def _set_up(model: LightningModule, data: Any) -> Iterator[None]:
    """Call the hooks that prepare model and data for training. Does not change the random state."""
    states = collect_rng_states()
    holders = [holder for holder in (data, model) if isinstance(holder, LightningDataModule | LightningModule)]
    try:
        for holder in holders:
            holder.prepare_data()
            holder.setup("fit")
        yield
        for holder in holders:
            holder.teardown("fit")
    finally:
        set_rng_states(states)


def _lists_in(model: nn.Module, where: Sequence[Sequence[str]]) -> list[str]:
    """Return the paths of lists as ``module=...`` takes them, without single layers between two of them."""
    return [path for paths in where for path in paths if isinstance(model.get_submodule(path), Pipelined)]


def _training_loader(model: LightningModule, data: Any) -> CombinedLoader | None:
    """Return the batches on which ``training_step`` is measured; ``None`` if there are none, or no such method."""
    if not model.automatic_optimization or not is_overridden("training_step", model):
        return None
    if data is None and is_overridden("train_dataloader", model):
        data = model
    if data is None:
        return None
    return CombinedLoader(data.train_dataloader() if hasattr(data, "train_dataloader") else data, "max_size_cycle")


class _TrainingStepModule(nn.Module):
    """Runs ``training_step`` of a model on a batch.

    Args:
        model: The model.

    Attributes:
        described: The name of the call for messages.
    """

    def __init__(self, model: LightningModule) -> None:
        super().__init__()
        self.model, self.described = model, f"{type(model).__name__}.training_step"
        self._numbers = (0,) if takes_batch_idx(model) else ()

    def forward(self, batch: Any) -> Any:
        output = self.model.training_step(batch, *self._numbers)
        return {"loss": output} if isinstance(output, Tensor) else output


@dataclass(frozen=True)
class _Input:
    """The input on which the model is measured.

    Attributes:
        found: The part of the model that takes the input, and the input.
        rows: The number of rows of a batch; 0 if each micro-batch has the rows of a generated input.
        numbers: The numbers of micro-batches to compare.
        described: A description.
        first: Returns the first micro-batch, given their number; ``None`` for the first rows.
    """

    found: FoundExample
    rows: int
    numbers: list[int]
    described: str
    first: Callable[[int], Any] | None = None


class _ModelPlan:
    """The measurement of one model.

    Args:
        trainer: The Trainer to which the model is attached.
        model: The model.
        loader: The batches of training; ``None`` if ``forward`` is measured.
        options: The settings of the strategy.
        choices: What to compare.
        is_whole: Whether the driver has the whole model before the run.
    """

    def __init__(
        self,
        trainer: Trainer,
        model: LightningModule,
        loader: CombinedLoader | None,
        options: PipelineOptions,
        choices: PlanChoices,
        *,
        is_whole: bool,
    ) -> None:
        self._trainer, self._model, self._loader = trainer, model, loader
        self._options, self._choices = options, choices
        self._precision = trainer.precision_plugin
        where = find_path(model, options.path, min(choices.stages), several=True)
        self._module: Pipelined = find_module(model, where, needs_values=False)
        self._described, self._lengths = described(where), lengths_of(self._module)
        self._path = where if isinstance(where, str) else _lists_in(model, where)
        inside = set(self._module.modules())
        self._outside = [module for module in model.modules() if module not in inside]
        self._on_meta = is_on_meta(model)
        self._device = torch.device("meta") if self._on_meta else options.device
        self._is_whole = is_whole
        self._notes: list[str] = []

    def table(self) -> PlanTable:
        """Check the choices, measure, and predict every row."""
        ways, choices = self._ways(), self._choices
        given = self._of_training() or self._of_forward()
        optimizers = self._optimizers(min(choices.stages))
        whole = Sizes(optimizers, self._options.num_shares).need(self._model.modules())
        with self._as_one_rank():
            given, costs = self._costs(given, ways)
            in_reverse = is_called_in_reverse(self._model, self._module, self._device, self._precision)
            sizes = Sizes(optimizers, self._options.num_shares)
            known = {}
            for threads, measured in costs.items():
                with with_threads(threads), all_freed_memory_kept():
                    known[threads] = self._measured(given, measured, sizes, whole, optimizers, in_reverse=in_reverse)
            self._note_snapshots(next(iter(next(iter(known.values())).values())))
            rows = []
            for stages, schedule, chunks in ways:
                for number in given.numbers:
                    with as_misconfiguration():  # such as chunks that share a BatchNorm layer
                        rows.append(
                            plan_row(
                                known[self._threads(stages)][number],
                                stages,
                                schedule,
                                chunks,
                                balance=self._balance(stages, chunks),
                                memory_limit_bytes=choices.memory_limit_bytes,
                                cores=self._cores(),
                            )
                        )
        self._note(costs)
        self._note_cores(ways)
        self._note_whole(rows)
        rows.sort(key=lambda row: (row.stages, row.microbatches))
        kinds = dict.fromkeys(type(layer).__name__ for layer in self._module)
        return PlanTable(
            rows=rows,
            best=best_row(rows),
            path=self._path,
            layers=f"{len(self._module)} layers: {', '.join(kinds)}",
            measured_on=given.described,
            options=self._options,
            notes=[*dict.fromkeys(self._notes)],
        )

    # Processes and cores

    @contextmanager
    def _as_one_rank(self) -> Iterator[None]:
        """Context in which the model has the parts of one of the ranks that divide its layers or their parameters."""
        parts, replicas = self._options.num_parts, self._options.num_replicas
        if parts > 1:
            plan = plan_of(self._model, parts)
            seconds = None if self._on_meta else group_seconds(parts)
            divided = as_single_rank(self._model, plan, parts, seconds)
            what = f"pipelines that divide the layers (tensor_parallel_size={parts}); their times include the sums over"
        elif self._options.zero_stage == 3 and replicas > 1:
            layers = chain(*lists_of(self._module))
            seconds = None if self._on_meta else group_seconds(replicas, ReplicaGroup)
            divided = as_single_replica(self._model, layers, replicas, seconds)
            what = "replicas that divide the parameters (zero_stage=3); their times include what is gathered from"
            self._notes.append(
                "a process also holds the whole weights of the layer that it computes, which are not counted"
            )
        else:
            yield
            return
        with ExitStack() as stack:
            with as_misconfiguration():
                stack.enter_context(divided)
            yield
        self._notes.append(
            f"figures are those of one of the {max(parts, replicas)} {what} the others, as long as it takes between "
            "threads of this process"
        )

    def _num_processes(self, stages: int) -> int:
        """Return the number of processes on a host."""
        return -(-stages * self._options.num_pipelines // self._options.num_nodes)

    def _threads(self, stages: int) -> int:
        """Return the number of threads of each process."""
        return share_of_threads(self._num_processes(stages))

    def _cores(self) -> float:
        """Return the number of cores for the processes of one pipeline."""
        if self._options.device.type != "cpu":
            return math.inf
        return num_cores() * self._options.num_nodes / self._options.num_pipelines

    # What to compare

    def _ways(self) -> list[tuple[int, str, int]]:
        """Return numbers of stages, names of schedules, and numbers of chunks per stage.

        Raises:
            MisconfigurationException: If the model has too few layers, or does not allow a schedule.
        """
        num, numbers = min(self._lengths), sorted(set(self._choices.stages))
        layers = " and ".join(map(str, self._lengths))
        what = f"{self._described} {'have' if len(self._lengths) > 1 else 'has'} {layers} layers"
        if numbers[-1] > num:
            raise MisconfigurationException(
                f"stages={numbers[-1]}, but {what}, and each stage needs one"
                f"{' of each list' if len(self._lengths) > 1 else ''}. Ask for at most {num} stages, or divide the "
                "layers further."
            )
        ways, schedules = [], self._schedules()
        for stages in numbers:
            for schedule in schedules:
                chunks = self._chunks(schedule)
                if stages * chunks <= num:
                    self._balance(stages, chunks)  # raises an error if the given balance does not fit
                    ways.append((stages, schedule, chunks))
                else:
                    self._notes.append(
                        f"{schedule} with {stages} stages is left out: its {stages * chunks} chunks need a layer each, "
                        f"but there are {layers}."
                    )
        if not ways:
            raise MisconfigurationException(
                f"{what}, too few for {', '.join(schedules)} with {numbers[0]} stages, each of "
                "which has several chunks of layers. Ask for '1f1b' or 'gpipe', or divide the layers further."
            )
        return ways

    def _schedules(self) -> list[str]:
        given, options = self._choices.schedules, self._options
        schedules = [*dict.fromkeys(given if given is not None else SCHEDULES)]
        if given is None and not self._model.automatic_optimization:
            self._notes.append("the model steps its optimizers itself, which only gpipe allows")
            schedules = ["gpipe"]
        elif given is None and options.loss_weight == "tokens":
            self._notes.append("gpipe is left out, because it does not weight micro-batches (loss_weight='tokens')")
            schedules.remove("gpipe")
        lists = len(self._lengths)
        if given is None and lists > 1:
            left_out = [schedule for schedule in schedules if SCHEDULES[schedule].lists is None]
            schedules = [schedule for schedule in schedules if schedule not in left_out]
            if left_out:
                self._notes.append(f"{' and '.join(left_out)} are left out, because they are for one list of layers")
        for schedule in schedules:
            check_automatic_optimization(self._model, schedule)
            settings = replace(options.settings, schedule=schedule, chunks=None, pipelined_backward=True)
            check_loss_weight(options.loss_weight, settings)
            with as_misconfiguration():
                settings.check_lists(lists)
        if not options.settings.pipelined_backward:
            self._notes.append("all rows assume pipelined_backward=True")
        if options.microbatch_tokens is not None:
            self._notes.append(
                "all rows assume micro-batches of equally many rows, with all columns; what "
                f"microbatch_tokens={options.microbatch_tokens} saves is not counted"
            )
        return schedules

    def _chunks(self, schedule: str) -> int:
        least, default, most = SCHEDULES[schedule].chunks
        given = self._options.settings.chunks
        return given if given is not None and least <= given <= most else default

    def _balance(self, stages: int, chunks: int) -> list[int] | None:
        """Return the given balance if it has this number of chunks."""
        given, lists = self._options.balance, len(self._lengths)
        if given is None:
            return None
        if given == "even":
            return even_balance(self._lengths, stages * chunks)
        if len(given) != stages * chunks * lists:
            return None
        with as_misconfiguration():
            balance = check_balance(given, len(self._module), stages, chunks=chunks * lists)
            check_lists(balance, self._lengths)
            return balance

    def _numbers(self, rows: int, least_rows: int) -> list[int]:
        """Return the numbers of micro-batches to compare.

        Args:
            rows: The number of rows of a batch; 0 if it is not known.
            least_rows: The most micro-batches that these rows can be split into.
        """
        given = self._choices.microbatches
        if not rows:
            # Without times, the best of several batch sizes cannot be chosen.
            default = [self._options.settings.microbatches] if self._on_meta else [2, 4, 8, 16]
            return sorted(set(given or default))
        if given is not None:
            if (most := max(given)) > least_rows:
                raise MisconfigurationException(
                    f"microbatches={most}, but the batch has {rows} rows, and each micro-batch needs one. Ask "
                    f"for at most {rows}, or give larger batches."
                )
            return sorted(set(given))
        powers = [2**k for k in range(1, 32) if 2**k <= min(rows, MAX_MICROBATCHES) and not rows % 2**k]
        return powers or [min(rows, self._options.settings.microbatches)]

    # Input

    def _of_training(self) -> _Input | None:
        """Return the first batch of training, for ``training_step``; ``None`` if there is none."""
        model = self._model
        if self._loader is None:
            return None
        batches = [batch for batch, *_ in islice(self._loader, 1)]
        self._loader.reset()  # ends its workers
        if not batches:
            raise MisconfigurationException("A plan measures training_step on a batch, but there are no training data.")
        batch = transferred(self._trainer, model, batches[0], self._device)
        rows = sum(split_for(model, batch, 1).sizes)
        return _Input(
            FoundExample(_TrainingStepModule(model), (batch,), is_made=False),
            rows,
            self._numbers(rows, rows),
            f"training_step on a batch of {rows} rows",
            lambda number: (split_for(model, batch, number).parts[0],),
        )

    def _of_forward(self) -> _Input:
        """Return an example for ``forward``."""
        model = self._model
        found = find_example(model, self._module, self._device, self._precision)
        if found is None:
            needed = "set `self.example_input_array`"
            if model.automatic_optimization:
                needed = f"give a data module, or {needed}"
            raise MisconfigurationException(
                f"A plan measures the layers, which needs an input: {needed} on {type(model).__name__} to a batch of "
                "inputs."
            )
        if found.is_made:
            described = f"an input made from the configuration, with {found.rows} rows for each micro-batch"
            return _Input(found, 0, self._numbers(0, 0), described)
        described = f"example_input_array, used as a batch of {found.rows} rows; a loss outside forward is not counted"
        return _Input(found, found.rows, self._numbers(found.rows, found.rows), described)

    def _costs(
        self, given: _Input, ways: Sequence[tuple[int, str, int]]
    ) -> tuple[_Input, dict[int, dict[int, _MeasuredCosts]]]:
        """Return the measured input, and the costs by threads of a process and number of micro-batches."""
        if given.first is None:
            return given, self._costs_of(given, ways)
        undo = collect_logs(self._model, lambda: lambda *args: None)
        try:
            return given, self._costs_of(given, ways)
        except Exception as error:  # the user's code, which may need a running loop
            reason = f"{type(self._model).__name__}.training_step cannot be measured on its own"
            kind = "" if isinstance(error, MisconfigurationException) else f"{type(error).__name__}: "
            reason += f" ({kind}{error})"
            if self._model.example_input_array is None:
                raise MisconfigurationException(
                    f"{reason}. Set `self.example_input_array` to a batch of inputs; then forward is measured instead."
                ) from error
            self._notes.append(f"{reason}, so forward is measured")
        finally:
            undo()
        given = self._of_forward()
        return given, self._costs_of(given, ways)

    def _costs_of(self, given: _Input, ways: Sequence[tuple[int, str, int]]) -> dict[int, dict[int, _MeasuredCosts]]:
        found: dict[int, dict[int, _MeasuredCosts]] = {}
        for stages, *_ in ways:
            threads = self._threads(stages)
            if threads in found:
                continue
            with (
                as_misconfiguration(),
                unchanged(self._model.modules()),
                measuring(self._model, self._num_processes(stages), self._precision),
            ):
                found[threads] = measure_actions(
                    self._model,
                    self._module,
                    given.found,
                    given.numbers,
                    device=self._device,
                    budget_seconds=BUDGET_SECONDS * len(given.numbers),
                    split=given.first,
                )
        return found

    # Optimizers

    def _optimizers(self, stages: int) -> list[Optimizer]:
        """Return the optimizers of ``configure_optimizers``, and assign them to the strategy."""
        strategy: Any = self._trainer.strategy
        strategy.setup_optimizers(self._trainer)
        optimizers = [own for own in map(unwrapped, strategy.optimizers) if not is_stand_in(own)]
        if not optimizers:
            self._notes.append("configure_optimizers returns no optimizer, so none is counted")
        elif set(self._model.parameters()).isdisjoint(chain(*map(parameters_of, optimizers))):
            raise MisconfigurationException(
                f"configure_optimizers of {type(self._model).__name__} returns {type(optimizers[0]).__name__} over no "
                "parameter of the model that a plan measures, which may be a copy of the given one. Make the optimizer "
                "in configure_optimizers, over self.parameters()."
            )
        balance = even_balance(self._lengths, stages)
        *workers, _ = cut(self._module, balance, [*range(stages)] * len(self._lengths))
        rest = dict.fromkeys(self._model.parameters())
        parts = []
        for stage in workers:
            own = [parameter for parameter in stage.parameters() if parameter in rest]
            parts.append(own)
            rest = {parameter: None for parameter in rest if parameter not in set(own)}
        with as_misconfiguration():
            for optimizer in [] if self._on_meta else optimizers:  # a trial needs values
                check_divisible(optimizer, [*parts, [*rest]])
                if (size := self._options.num_parts) > 1:
                    check_by_element(optimizer, f"tensor_parallel_size={size}", "tensor_parallel_size=1")
                if self._options.zero_stage == 3:
                    check_by_element(optimizer, "zero_stage=3", "zero_stage=2")
        return optimizers

    def _measured(
        self,
        given: _Input,
        costs: dict[int, _MeasuredCosts],
        sizes: Sizes,
        whole: Need,
        optimizers: Sequence[Optimizer],
        *,
        in_reverse: bool,
    ) -> dict[int, Measured]:
        """Return the measurements of the model by number of micro-batches, with the costs of optimizer steps.

        Args:
            given: The input.
            costs: The costs by number of micro-batches.
            sizes: The sizes of a process.
            whole: What the driver holds before and after the run, when it has all layers.
            optimizers: The optimizers.
            in_reverse: Whether the first stage has the last layers.
        """
        layers = [*self._module][:: -1 if in_reverse else 1]
        num_bytes = sum(tensor.nbytes for tensor in self._module.parameters()) // min(self._choices.stages)
        others = torch.zeros(0 if self._on_meta else min(num_bytes, CACHE_BYTES), dtype=torch.uint8)
        clock = partial(now, [self._device])
        steps = [StepCosts(optimizer, partial(others.add_, 1), clock) for optimizer in optimizers]

        def step(modules: Sequence[nn.Module]) -> StepCost:
            own = dict.fromkeys(p for module in modules for p in module.parameters(recurse=False))
            each = [costs.of(own) for costs in steps]
            extra = max(each, key=lambda cost: cost.extra_bytes, default=StepCost())
            return replace(extra, seconds=sum(cost.seconds for cost in each) / self._options.num_steppers)

        def needs(balance: Sequence[int], placement: Placement) -> list[Need]:
            stages = cut(self._module, balance, ranks_of(placement), is_reversed=in_reverse)
            return needs_of(stages, self._outside, sizes)

        of_layers = [sizes.need(layer.modules()) for layer in layers], [step([*layer.modules()]) for layer in layers]
        outside = sizes.need(self._outside), step(self._outside)
        gathers = self._options.gathers_on_end
        for each, optimizer in zip(steps, optimizers, strict=True):
            if each.refused is not None:
                self._notes.append(
                    f"a step of {type(optimizer).__name__} is not counted, because a copy of it cannot be stepped "
                    f"({type(each.refused).__name__}: {each.refused})"
                )
        return {
            number: Measured(
                layers=cost.layers[::-1] if in_reverse else cost.layers,
                driver=cost.driver,
                needs=of_layers[0],
                outside=outside[0],
                needs_of=needs,
                steps=of_layers[1],
                outside_step=outside[1],
                transfer=0.0 if self._on_meta else model_costs(cost, in_reverse=in_reverse).transfer,
                microbatches=number,
                checkpoint=self._options.settings.checkpoint,
                rows=given.rows or given.found.rows * number,
                input_bytes=input_bytes(given.found, number),
                gradient_sets=num_gradient_sets(self._trainer, self._model, optimizers, self._options.num_owners),
                num_owners=self._options.num_owners,
                has_times=not self._on_meta,
                start_bytes=whole.parameters if self._is_whole else 0,
                end_bytes=whole.parameters + whole.states if gathers or (gathers is None and self._is_whole) else 0,
                lengths=self._lengths,
            )
            for number, cost in costs.items()
        }

    def _note_snapshots(self, measured: Measured) -> None:
        """Add a note about the memory of snapshots."""
        need = sum(measured.needs, measured.outside)
        if num := self._options.num_snapshots:
            size = num * need.total / 2**20
            self._notes.append(
                f"recovery takes {size:,.1f} MiB of memory on all processes together, which is not in these "
                f"figures: {num} copies of parameters, gradients and optimizer states. The driver also keeps what it "
                f"has sent since the last snapshot, up to {MOST_LOGGED_BYTES / 2**20:.0f} MiB and the values of a batch"
            )

    def _note_cores(self, ways: Sequence[tuple[int, str, int]]) -> None:
        """Add notes if processes share cores."""
        for stages in dict.fromkeys(stages for stages, *_ in ways):
            if not self._on_meta and stages > self._cores():
                number = self._num_processes(stages)
                self._notes.append(
                    f"with {stages} stages, {number} processes share the {num_cores()} cores of a host; their times "
                    "include this"
                )

    def _note_whole(self, rows: Sequence[PlanRow]) -> None:
        """Add a note with a remedy if the driver cannot hold the whole model at the start or at the end."""
        limit = self._choices.memory_limit_bytes
        drivers = [row.processes[-1] for row in rows]
        for when, ways_out in (
            ("start", "build its layers in configure_model, so that each process builds only its layers"),
            ("end", "set gather_on_end=False, or build its layers in configure_model"),
        ):
            most = max(driver.start_bytes if when == "start" else driver.end_bytes for driver in drivers)
            if limit is not None and most > limit:
                self._notes.append(
                    f"at the {when} of a run the driver holds the whole model, {most / 2**20:,.1f} MiB, which is more "
                    f"than the limit; {ways_out}"
                )

    def _note(self, costs: dict[int, dict[int, _MeasuredCosts]]) -> None:
        """Add notes that explain the figures."""
        for measured in costs.values():
            for cost in measured.values():
                if cost.not_measured:
                    self._notes.append(f"the code outside the layers is not measured: {cost.not_measured}")
        if self._options.num_replicas > 1 and self._options.zero_stage < 3:
            self._notes.append(
                f"figures are those of one of {self._options.num_replicas} replicas, without averaging gradients"
            )
        if self._on_meta:
            self._notes.append(
                "there are only bytes and no times, because the model has parameters without memory (on the meta "
                "device) and cannot run"
            )
