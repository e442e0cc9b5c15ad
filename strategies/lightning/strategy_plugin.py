"""The contract of Relay's strategies, on top of Lightning's ``Strategy``.

A plug-in inherits from this class first and from a Lightning strategy second::

    class DDPStrategy(StrategyPlugin, pytorch_lightning.strategies.DDPStrategy): ...
    class RPCSequentialStrategy(StrategyPlugin, ReplicatedStrategy): ...  # which is a ParallelStrategy

The contract is the seven abstract methods of :class:`StrategyPlugin`, in the order of a run:

    setup_environment ─▶ setup ─▶ { pre_backward ─▶ post_optimizer_step }* ─▶ save_checkpoint ─▶ teardown
                                    barrier, at any time

Each plug-in overrides all seven methods and documents what it does in each. The bodies in this module contain what all
strategies share, and then call Lightning's method. A plug-in calls them with ``super()``.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from strategies.checkpoint.background import BackgroundWriter, Writer, snapshot
from strategies.checkpoint.references import Unread
from strategies.checkpoint.save_and_load import check_can_be_sharded, is_sharded, load_sharded, local_path, save_sharded
from strategies.checkpoint.validate import check_fit
from strategies.launch.host_links import HostLinks
from strategies.launch.process_ends import await_gloo_at_exit
from strategies.launch.rank_monitor import Rank0Watch, check_connections, note_lost_connection
from strategies.launch.rounds import shared_store
from strategies.lightning.arguments import check_backend, checked
from strategies.lightning.checkpoints import AtomicCheckpointIO, check_links, convert_model, wait_before_naming
from strategies.lightning.compat import (
    PACKAGE,
    CheckpointIO,
    LightningEnvironment,
    MisconfigurationException,
    Strategy,
    Trainer,
    TrainerStatus,
    WrappingCheckpointIO,
    check_package,
    given_backend_of,
    is_stand_in,
    other_package,
    rank_zero_warn,
    start_method_of,
    trainer_of,
    unwrapped,
)
from strategies.lightning.launch.environment import check_num_processes, is_external
from strategies.lightning.launch.loopback import (
    LoopbackEnvironment,
    connect,
    listening_towards,
    on_loopback,
    place_in_group,
)
from strategies.lightning.launch.requeue import requeue_after_batch, requeues
from strategies.lightning.launch.script_launcher import in_place_of, mark_entered
from strategies.optim.calls import after_steps
from strategies.optim.restricted import check_optimizer_states, parameters_of


class StrategyPlugin(Strategy):
    """The methods that every strategy of Relay implements, and the code that all strategies share.

    A hook on the user's optimizer objects calls ``post_optimizer_step``. Lightning's ``Strategy.optimizer_step`` does
    not suffice: a ``LightningModule`` bypasses it with ``self.optimizers(use_pl_optimizer=False).step()``.

    This class has no constructor, so the command line sees the arguments of each strategy. The constructor of a plug-in
    sets ``_state_dict_type`` and ``_async_save``.
    """

    _state_dict_type = "full"
    """The format of checkpoints: ``"full"`` (one file) or ``"sharded"`` (a directory)."""
    _async_save = False
    """Whether checkpoints are written in the background, from a copy in host memory."""
    _writer = Writer()  # a background writer exists only during a run, so that no error is lost
    _unread: Unread | None = None
    """The tensors of the sharded checkpoint being loaded that have not been read yet."""
    _timeout: timedelta | None = None
    """Time limit for operations of the process group."""
    _undo_step_hooks: tuple[Callable[[], None], ...] = ()
    """Functions that remove the step hooks of the optimizers."""
    averages_gradients = True
    """Whether backward passes average gradients over the processes; not within :meth:`block_backward_sync`."""
    _rank_0_watch: Rank0Watch | None = None
    _rpc_timeout_sec: float | None = None
    """How long another host may be unreachable. ``None`` for a pipeline, which watches the hosts itself."""
    _host_links: HostLinks | None = None
    _undo_hooks: Sequence[Callable[[], None]] = ()
    _listening: ExitStack | None = None
    """Restores the environment variables that select the interface of process groups."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            own = cast(Any, cls)
            own.__init__ = checked(own.__init__)  # Relay's strategies only; a user's subclass takes any arguments

    def __repr__(self) -> str:
        # A Trainer of the other Lightning package refuses the strategy, and its message shows only this text.
        cls, other = type(self), other_package()
        order = "" if other is None else f", which was imported before {other}"
        return f"<{cls.__module__}.{cls.__qualname__} of {PACKAGE}{order}>"

    # The contract

    @abstractmethod
    def setup_environment(self) -> None:
        """Start what the run needs before the model is set up, such as process groups.

        From here on, all other ranks end when rank 0 ends.
        """
        model = self.lightning_module
        trainer = None if model is None else model.trainer
        if trainer is not None:
            given = cast(Any, trainer)
            check_package(given.callbacks, given.loggers, given.profiler, getattr(given, "datamodule", None))
            if self._async_save:
                check_links(trainer)
        ranks = cast(Any, self)  # every strategy of Relay is a ParallelStrategy
        has_group = getattr(ranks, "num_pipelines", 2) > 1  # a single pipeline has no process group
        if has_group:
            check_connections()
        if has_group and isinstance(getattr(ranks, "cluster_environment", None), LoopbackEnvironment):
            self._listening = connect(ranks, self._timeout or default_pg_timeout)
        elif self._rpc_timeout_sec is not None and ranks.num_nodes > 1:
            self._listening = listening_towards(ranks.cluster_environment.main_address)
        super().setup_environment()
        rank, size = place_in_group(ranks)  # a process that the launcher has started knows its rank now
        if size > 1:
            await_gloo_at_exit()
            key = ranks.broadcast(f"relay/rank-0/{uuid4().hex}")
            self._rank_0_watch = Rank0Watch(key)
            if self._rpc_timeout_sec is not None and ranks.num_nodes > 1:
                address = ranks.cluster_environment.main_address
                self._host_links = HostLinks(shared_store(key), "hosts", rank, size, address, self._rpc_timeout_sec)
                self._host_links.wait_until_connected()
        mark_entered(self.launcher)
        if self._async_save:
            self._writer = BackgroundWriter()
            if trainer is not None:
                self._undo_hooks = wait_before_naming(trainer, self._writer)
        if trainer is not None and requeues(environment := getattr(ranks, "cluster_environment", None)):
            undo = requeue_after_batch(trainer, environment, size if has_group else 1, self._saving_at_once)
            self._undo_hooks = [*self._undo_hooks, *undo]

    @abstractmethod
    def setup(self, trainer: Trainer) -> None:
        """Prepare the model, the optimizers and the processes of the strategy.

        Errors of the user's configuration are raised before any process is started.
        """
        super().setup(trainer)

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Wait until every process of the strategy has called this; ``name`` appears in error messages only."""
        cast(Any, super()).barrier(name)  # abstract in Lightning's Strategy, but not in the plug-in's second base class

    @abstractmethod
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepare a backward pass. Lightning calls this before each backward pass, with the loss, a scalar."""
        super().pre_backward(closure_loss)

    @abstractmethod
    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Run after a step of ``optimizer``, one of the objects that ``configure_optimizers`` returned.

        Runs after each step under automatic and manual optimization, also when the user steps the optimizer directly.
        It does not run for a step that a gradient scaler skips.
        """

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write one complete checkpoint, whichever processes hold the state. Every process calls this.

        With ``async_save``, a thread writes a copy of the checkpoint during a run while training continues.

        Args:
            checkpoint: The checkpoint that Lightning collected with ``lightning_module_state_dict`` and
                ``optimizer_state``.
            filepath: The file, or the directory of a sharded checkpoint.
            storage_options: Passed to the ``CheckpointIO``; not supported for sharded checkpoints.

        Raises:
            Exception: With ``async_save``, also the error of the previous checkpoint.
        """
        if self._state_dict_type == "sharded":
            if storage_options is not None:
                raise TypeError('state_dict_type="sharded" takes no storage_options: it does not use the CheckpointIO.')
            if (path := local_path(filepath)) is None:
                raise ValueError(
                    f'state_dict_type="sharded" writes to directories of this machine only, got {filepath}.'
                )
            check_can_be_sharded(checkpoint)
            self._save_sharded(checkpoint, path)
        elif not self._writer.in_background:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            self._writer.wait()  # so that there is only one copy at a time
            copy = snapshot(checkpoint, self._private_tensors())
            self._writer.save(partial(self.checkpoint_io.save_checkpoint, copy, filepath, storage_options))

    @abstractmethod
    def teardown(self) -> None:
        """End what ``setup_environment`` and ``setup`` started.

        Can be called at any point of the set-up. After an error or an interrupt, errors of the teardown become
        warnings, so that the user sees the first error.
        """
        self._remove_step_hooks()
        if self._host_links is not None:
            self._host_links.end()
            self._host_links = None
        if self._rank_0_watch is not None:
            self._rank_0_watch.end()
            self._rank_0_watch = None
        for undo in self._undo_hooks:
            undo()
        self._undo_hooks = ()
        try:
            self._end_writer(is_first=not self._has_failed())
        finally:
            if self._listening is not None:
                self._listening.close()
                self._listening = None
            super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """If the process group has lost a connection, note this, so that no later call waits for the group."""
        note_lost_connection(exception)
        super().on_exception(exception)

    @contextmanager
    def _saving_at_once(self) -> Iterator[None]:
        """Context in which no checkpoint is written in the background."""
        self._writer.settle()
        before, self._writer = self._writer, Writer()
        try:
            yield
        finally:
            self._writer = before

    def _has_failed(self) -> bool:
        """Whether an error has ended the run. Errors of its teardown must not hide that error."""
        model = self.lightning_module
        trainer = None if model is None else trainer_of(model)  # none if the launcher refused to run
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    def _end_writer(self, *, is_first: bool) -> None:
        """Wait for the checkpoint being written. Its error becomes a warning unless it ``is_first``."""
        writer, self._writer = self._writer, Writer()
        try:
            writer.end()
        except Exception as error:
            if is_first:
                raise
            rank_zero_warn(f"A checkpoint could not be saved ({error!r}).")

    # Start-up

    def _configure_launcher(self) -> None:
        # Called when the Trainer is built: devices and environment are known, and no process has been started.
        self._check_devices()
        ranks, start_method = cast(Any, self), start_method_of(self)
        check_backend(given_backend_of(self))
        if hasattr(self, "num_nodes"):  # the strategy has several processes
            ranks.cluster_environment = on_loopback(ranks.cluster_environment, ranks.num_nodes, start_method)
            is_lightnings = isinstance(ranks.cluster_environment, LightningEnvironment | None)
            if self._rpc_timeout_sec is not None and not is_lightnings and is_external(ranks.cluster_environment):
                check_num_processes(ranks.cluster_environment, len(ranks.parallel_devices), ranks.num_nodes)
        super()._configure_launcher()
        self._launcher = in_place_of(self._launcher, self, start_method)

    def _check_devices(self) -> None:
        """Refuse devices on which the strategy does not work. Called when the Trainer is built."""

    def model_to_device(self) -> None:
        """Move the model to the device of this process."""
        assert self.model is not None
        self.model.to(self.root_device)

    # Gradients

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within this, backward passes accumulate gradients in each process and do not average them."""
        before, self.averages_gradients = self.averages_gradients, False
        try:
            with cast(Any, super()).block_backward_sync():  # of ParallelStrategy
                yield
        finally:
            self.averages_gradients = before

    # Optimizers

    def _set_optimizers(self, optimizers: list[Optimizer]) -> None:
        vars(Strategy)["optimizers"].__set__(self, optimizers)
        # Lightning assigns the same list twice during set-up, and a user may keep an optimizer for several fits.
        self._remove_step_hooks()
        own = {id(optimizer): optimizer for optimizer in map(unwrapped, optimizers) if not is_stand_in(optimizer)}
        self._undo_step_hooks = tuple(after_steps(optimizer, self.post_optimizer_step) for optimizer in own.values())

    optimizers: list[Optimizer] = vars(Strategy)["optimizers"].setter(_set_optimizers)
    """The user's optimizers. Lightning assigns them in ``setup``; the assignment adds the step hook to each."""

    def _remove_step_hooks(self) -> None:
        for undo in self._undo_step_hooks:
            undo()
        self._undo_step_hooks = ()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, optimizer: Optimizer | None = None) -> Tensor:
        """Scale the gradients so that their total norm over all processes is at most ``max_norm``.

        Call this from an overridden ``configure_gradient_clipping``. The result equals that of
        ``torch.nn.utils.clip_grad_norm_`` in one process.

        Args:
            max_norm: The maximum total norm.
            norm_type: The p of the p-norm; may be ``inf``.
            optimizer: The optimizer whose parameters are clipped. Required if there are several optimizers.

        Returns:
            The total norm before clipping, a scalar.

        Raises:
            MisconfigurationException: If there are several optimizers and none is given.
        """
        clip = self._clipping()
        if optimizer is None:
            if (number := len(self.optimizers)) != 1:
                raise MisconfigurationException(
                    f"There are {number} optimizers; say whose gradients to clip: clip_grad_norm_(..., optimizer=...)"
                )
            optimizer = self.optimizers[0]
        if is_stand_in(optimizer):
            clip = StrategyPlugin._clipping(self)
        return clip(unwrapped(optimizer), float(max_norm), float(norm_type))

    def _clipping(self) -> Callable[[Optimizer, float, float], Tensor]:
        """The function that clips the gradients of an optimizer. By default, this process holds all gradients."""
        return lambda optimizer, *norm: torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), *norm)

    # Checkpoints

    def _save_sharded(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write a sharded checkpoint. Every process calls this. By default, this process holds the whole checkpoint."""
        if self._writer.in_background:
            self._writer.wait()
            checkpoint = snapshot(checkpoint)
        self._writer.save(partial(save_sharded, checkpoint, path))

    def _private_tensors(self) -> list[Tensor]:
        """Tensors gathered for the next checkpoint. Nothing else refers to them, so a snapshot does not copy them."""
        return []

    def remove_checkpoint(self, filepath: str | Any) -> None:
        """Remove a checkpoint as soon as the checkpoint being written is complete."""
        self._writer.after_saving(partial(super().remove_checkpoint, filepath))

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's ``CheckpointIO``, or by default one that replaces files atomically."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # no effect if it wraps a CheckpointIO of the user
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def load_checkpoint(self, checkpoint_path: str | Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, a file or a directory. Every process calls this and gets the part that it needs."""
        self._unread = None
        if self._writer.in_background:
            try:
                self._writer.wait()  # the checkpoint to load may be the one being written
            finally:
                self.barrier("load_checkpoint")  # only the first rank waits for the file
        local = local_path(checkpoint_path)
        if local is not None and is_sharded(local):
            return self._load_sharded(local, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _load_sharded(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a sharded checkpoint. By default, this process reads the whole checkpoint."""
        return load_sharded(path, weights_only=weights_only)[0]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint, all or none, in the precision in which the model trains.

        Raises:
            RuntimeError: If names or shapes differ from those of the model. The model is then unchanged. A model that
                overrides ``load_state_dict`` is not checked.
        """
        convert_model(self)
        assert self.lightning_module is not None
        if type(self.lightning_module).load_state_dict is nn.Module.load_state_dict:
            self._check_weights(checkpoint["state_dict"], strict)
        super().load_model_state_dict(checkpoint, strict)

    def _check_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        """Raise an error if ``state`` does not fit the model."""
        assert self.lightning_module is not None
        check_fit(self.lightning_module, state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states of a checkpoint, all or none.

        Raises:
            ValueError: If the states do not belong to the optimizers of the model.
        """
        check_optimizer_states([unwrapped(own) for own in self.optimizers], checkpoint["optimizer_states"])
        super().load_optimizer_state_dict(checkpoint)
