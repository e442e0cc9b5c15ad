"""``Trainer``: Lightning's Trainer with Relay's strategies by name and exact resumption."""

import functools
import inspect
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import strategies
from strategies.commands.folding import fold_when_shown
from strategies.common.names import PLUGINS, did_you_mean
from strategies.lightning.checkpoints import load_as_relay
from strategies.lightning.compat import (
    MisconfigurationException,
    RunningStage,
    Strategy,
    StrategyRegistry,
    check_package,
    defaults_from_env_vars,
    pl,
)
from strategies.lightning.launch.environment import explained_gpus
from trainer.resume.loops import (
    ResumingCheckpointConnector,
    ResumingEpochLoop,
    ResumingFitLoop,
    ResumingLoggerConnector,
)

if TYPE_CHECKING:
    from strategies.planning.plan import PlanTable
    from trainer.verification.certificate import Certificate

_Init = TypeVar("_Init", bound=Callable[..., None])
_Run = TypeVar("_Run", bound=Callable[..., Any])


def _with_signature_of(original: _Init) -> Callable[[Callable[..., None]], _Init]:
    """Give a constructor the signature of ``original`` for type checkers, ``inspect`` and the command line.

    Lightning's decorator inside accepts positional arguments and takes defaults from ``PL_TRAINER_*`` variables.
    """
    return lambda init: cast(_Init, defaults_from_env_vars(functools.wraps(original)(init)))


def _checked(original: _Run) -> _Run:
    """Make ``fit``, ``validate``, ``test`` or ``predict`` refuse objects of the other package of Lightning.

    An error that ends the program is shown without the frames of Relay and Lightning.
    """

    @functools.wraps(original)
    def run(self: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        check_package(*args, *kwargs.values())
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            fold_when_shown(error)
            raise

    return cast(_Run, run)


def _is_training(trainer: pl.Trainer) -> bool:
    """Return whether a Trainer trains. Lightning reads this a dozen times per step, and compares enums as text."""
    stage = trainer.state.stage
    return stage is RunningStage.TRAINING or stage == RunningStage.TRAINING


class Trainer(pl.Trainer):
    """Lightning's ``Trainer`` with the same arguments, whose ``strategy`` also takes Relay's names.

    It is a subclass of ``lightning.pytorch.Trainer`` if ``lightning`` has been imported first, and otherwise of
    ``pytorch_lightning.Trainer``. Modules, data modules, callbacks and all other objects must be of the same package.

    A run that is resumed with ``fit(ckpt_path=...)`` continues with the batch, random numbers and metrics that would
    have come next, also in the middle of an epoch (:mod:`trainer.resume`).

    Args:
        strategy: One of Relay's names (``"ddp"``, ``"zero"``, ``"rpc_sequential"``, ``"dp"``), a name that Lightning
            knows (``"auto"``, ``"fsdp"``, ...), or an instance of a strategy.
        **kwargs: The other arguments of Lightning's ``Trainer``.

    Raises:
        MisconfigurationException: If an object is of the other package of Lightning.
        TypeError: If Lightning's Trainer has no such keyword.
        ValueError: If neither Relay nor Lightning knows the name of the strategy.
    """

    @_with_signature_of(pl.Trainer.__init__)
    def __init__(self, **kwargs: Any) -> None:
        known = inspect.signature(pl.Trainer).parameters
        for keyword in kwargs:
            if keyword not in known:
                raise TypeError(  # Python's own message, and the nearest names
                    f"Trainer.__init__() got an unexpected keyword argument {keyword!r}{did_you_mean(keyword, known)}"
                )
        check_package(*kwargs.values())
        self._given = dict(kwargs)
        name = kwargs.get("strategy")
        if isinstance(name, str):
            kwargs["strategy"] = resolve_strategy(name)
        try:
            super().__init__(**kwargs)
        except MisconfigurationException as error:  # its message shows the instance where the user gave a name
            error.args = tuple(str(arg).replace(repr(kwargs.get("strategy")), repr(name)) for arg in error.args)
            if isinstance(kwargs.get("strategy"), strategies.RPCSequentialStrategy):
                raise explained_gpus(error, kwargs.get("num_nodes", 1)) from error
            raise
        load_as_relay(self.strategy)
        lightnings = self.fit_loop
        self.fit_loop = ResumingFitLoop(self, lightnings.min_epochs, lightnings.max_epochs)
        self.fit_loop.epoch_loop = ResumingEpochLoop(
            self, lightnings.epoch_loop.min_steps, lightnings.epoch_loop.max_steps
        )
        self._logger_connector = ResumingLoggerConnector(self)
        self._checkpoint_connector = ResumingCheckpointConnector(self)

    # Lightning reads these dozens of times a step, through Python functions that read one another.
    training = cast(property, pl.Trainer.training).getter(_is_training)
    lightning_module: Any = property(attrgetter("strategy.lightning_module"))
    precision_plugin: Any = property(attrgetter("strategy.precision_plugin"))
    lr_scheduler_configs: Any = property(attrgetter("strategy.lr_scheduler_configs"))
    num_training_batches: Any = property(attrgetter("fit_loop.max_batches"))
    current_epoch: Any = property(attrgetter("fit_loop.epoch_progress.current.completed"))

    def plan(
        self,
        model: pl.LightningModule,
        datamodule: Any = None,
        *,
        stages: list[int] | int | None = None,
        microbatches: list[int] | int | None = None,
        schedules: list[str] | str | None = None,
        memory_limit_bytes: int | None = None,
        json: str | Path | None = None,
        picture: str | Path | None = None,
    ) -> "PlanTable":
        """Predict time and memory of ways to run a model as a pipeline, without training it, and print them.

        The model is measured in this process: ``training_step`` on a batch of the data, or otherwise ``forward`` on
        ``example_input_array``. No process is started, and the model does not change. The strategy must be
        ``"rpc_sequential"``. Its other settings (``balance``, ``checkpoint``, ``module``, ...) apply to every row.

        Args:
            model: The model.
            datamodule: The source of training batches: a ``LightningDataModule``, or a loader.
            stages: Numbers of processes of a pipeline. Default: the Trainer's devices for each pipeline, at least 2.
            microbatches: Numbers of micro-batches. Default: the powers of two from 2 to 32 that divide the rows.
            schedules: Names of schedules. Default: all that the model allows.
            memory_limit_bytes: Maximum memory of a process. Rows that need more are marked. Default: no limit.
            json: Path of a file for all figures.
            picture: Path of an SVG file for the predicted timetable of the best row.

        Returns:
            The rows, as :class:`~strategies.planning.plan.PlanTable`.

        Raises:
            MisconfigurationException: If the strategy is not ``"rpc_sequential"``, or if the choices do not fit the
                model.
        """
        from trainer.plan_report import check_path, report

        if not isinstance(model, pl.LightningModule):
            raise TypeError(f"`model` must be a LightningModule, got {type(model).__name__}.")
        check_package(model, datamodule)
        plan = getattr(self.strategy, "plan", None)
        if plan is None:
            raise MisconfigurationException(
                f"A plan compares ways to run a pipeline, but the strategy is {type(self.strategy).__name__}. Set "
                "strategy='rpc_sequential'."
            )
        for name, path, ending in (("json", json, ""), ("picture", picture, ".svg")):
            check_path(name, path, ending)
        table = plan(
            self,
            model,
            datamodule,
            stages=[stages] if isinstance(stages, int) else stages,
            microbatches=[microbatches] if isinstance(microbatches, int) else microbatches,
            schedules=[schedules] if isinstance(schedules, str) else schedules,
            memory_limit_bytes=memory_limit_bytes,
        )
        if self.is_global_zero:
            report(table, json=json, picture=picture)
        return table

    def verify(
        self,
        model: pl.LightningModule,
        datamodule: Any = None,
        *,
        steps: int = 3,
        blocks: int | None = None,
        json: str | Path | None = None,
    ) -> "Certificate":
        """Train a few steps in one process and under the strategy, compare all results by name, and print the verdict.

        Each run is a separate process, in float64 if the model allows it. Model, data and this Trainer do not change,
        and files are written only to a temporary folder. Loggers and callbacks are left out, except callbacks that
        average weights.

        Args:
            model: The model.
            datamodule: The source of batches: a ``LightningDataModule``, or loaders of training batches. Default: the
                model's loaders.
            steps: Number of optimizer steps.
            blocks: Number of the model's blocks to keep, if the model does not fit in one process. Default: all.
            json: Path of a file for the certificate.

        Returns:
            The verdict, as :class:`~trainer.verification.certificate.Certificate`.

        Raises:
            MisconfigurationException: Before any process starts, if something cannot be verified.
            RuntimeError: If the model does not train in one process, or not under the strategy.
        """
        from trainer.plan_report import check_path
        from trainer.verification.certificate_report import print_certificate, write_certificate
        from trainer.verification.runner import verify_run

        if not isinstance(model, pl.LightningModule):
            raise TypeError(f"`model` must be a LightningModule, got {type(model).__name__}.")
        check_package(model, datamodule)
        check_path("json", json, "")

        def report(certificate: "Certificate") -> None:
            print_certificate(certificate)
            if json is not None:
                write_certificate(certificate, json)

        return verify_run(
            type(self),
            self._given,
            self.strategy,
            self.num_devices,
            model,
            datamodule,
            steps=steps,
            blocks=blocks,
            report=report,
        )

    fit = _checked(pl.Trainer.fit)
    validate = _checked(pl.Trainer.validate)
    test = _checked(pl.Trainer.test)
    predict = _checked(pl.Trainer.predict)


def verify(
    model: pl.LightningModule,
    datamodule: Any = None,
    *,
    strategy: str | Strategy,
    steps: int = 3,
    blocks: int | None = None,
    json: str | Path | None = None,
    **kwargs: Any,
) -> "Certificate":
    """Compare a strategy with one process, for a model and its data; see :meth:`Trainer.verify`.

    Args:
        model: The model, which is left unchanged.
        datamodule: A ``LightningDataModule``, or loaders of training batches. Default: the model's own loaders.
        strategy: ``"rpc_sequential"``, ``"ddp"`` or ``"zero"``, or an instance of one of these strategies.
        steps: Number of optimizer steps.
        blocks: Number of blocks to keep of the model. Default: all.
        json: Path of a file for the certificate.
        **kwargs: Other arguments of the Trainer, such as ``devices``, ``precision`` and ``gradient_clip_val``.

    Returns:
        The verdict, as :class:`~trainer.verification.certificate.Certificate`.
    """
    trainer = Trainer(strategy=strategy, logger=False, enable_checkpointing=False, **kwargs)
    return trainer.verify(model, datamodule, steps=steps, blocks=blocks, json=json)


def resolve_strategy(name: str) -> Strategy | str:
    """Return Relay's strategy of a name, with default settings, or the name itself if it is one of Lightning's.

    Raises:
        ValueError: If neither Relay nor Lightning knows the name.
    """
    plugin, lightning_names = PLUGINS.get(name.lower()), ["auto", *StrategyRegistry.available_strategies()]
    if plugin is not None:
        strategy: Strategy = getattr(strategies, plugin)()
        return strategy
    if name.lower() not in lightning_names:
        class_paths = [f"strategies.{cls}" for cls in PLUGINS.values()]
        raise ValueError(
            f"unknown strategy {name!r}{did_you_mean(name, [*PLUGINS, *lightning_names, *class_paths], or_list=False)} "
            f"(Relay's strategies: {', '.join(PLUGINS)}; any other name is looked up in Lightning)"
        )
    return name
