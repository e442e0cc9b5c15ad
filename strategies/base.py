"""The contract of Relay's strategies: a thin layer on Lightning's own ``Strategy``.

A plug-in names this class first and the Lightning strategy that it builds on second::

    class DDPStrategy(StrategyPlugin, pytorch_lightning.strategies.DDPStrategy): ...
    class RPCSequentialStrategy(StrategyPlugin, ReplicatedStrategy): ...  # which is a ParallelStrategy

The seven members below are abstract, so every plug-in states in one place, and documents, what it does at each point of
a run. Their bodies here pass the call on, so a plug-in reaches Lightning's behaviour with ``super()``.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.plugins import CheckpointIO
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer.states import TrainerStatus
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from strategies.checkpoint import shards
from strategies.checkpoint.background import Background, check_links, snapshot, wait_before_looking
from strategies.checkpoint.io import AtomicCheckpointIO, local_path
from strategies.checkpoint.validate import check_fit
from strategies.launch.lifeline import Lifeline
from strategies.lightning.arguments import check_backend, checked
from strategies.lightning.compat import is_stand_in, unwrapped
from strategies.lightning.loading import convert
from strategies.lightning.loopback import LoopbackEnvironment, connect, on_loopback
from strategies.lightning.script_launcher import in_place_of, met
from strategies.optim.restricted import check_optimizer_states, parameters_of


class StrategyPlugin(Strategy):
    """What each strategy of Relay owns, in the order of a run.

    One thing is done here for all of them: ``post_optimizer_step`` hangs on the user's own optimizer objects.
    Lightning's ``Strategy.optimizer_step`` is no place for it, because a ``LightningModule`` that calls
    ``self.optimizers(use_pl_optimizer=False).step()`` never gets there.
    """

    _step_handles: tuple[RemovableHandle, ...] = ()
    _async_save = False
    _state_dict_type = "full"
    _background: Background | None = None
    _lifeline: Lifeline | None = None
    _waiting: Sequence[Callable[[], None]] = ()
    _timeout: timedelta | None = None  # of the process group
    _on_loopback: ExitStack | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            own = cast(Any, cls)
            own.__init__ = checked(own.__init__)  # of Relay's own; a user's subclass takes what it likes

    def _configure_launcher(self) -> None:
        # Called when the Trainer is built: the environment is known, and no process has been started.
        ranks, start_method = cast(Any, self), getattr(self, "_start_method", "popen")
        check_backend(getattr(self, "_process_group_backend", None))
        if hasattr(self, "cluster_environment"):
            ranks.cluster_environment = on_loopback(ranks.cluster_environment, ranks.num_nodes, start_method)
        super()._configure_launcher()
        self._launcher = in_place_of(self._launcher)

    @abstractmethod
    def setup_environment(self) -> None:
        """Start what the run needs before the model is set up, such as process groups; ranks then end with rank 0."""
        model = self.lightning_module
        trainer = model.trainer if self._async_save and model is not None else None
        if trainer is not None:
            check_links(trainer)
        ranks = cast(Any, self)  # all of ours are parallel strategies
        in_group = getattr(ranks, "is_distributed", True)  # a single pipeline is in none
        if in_group and isinstance(getattr(ranks, "cluster_environment", None), LoopbackEnvironment):
            self._on_loopback = connect(ranks, self._timeout or default_pg_timeout)
        super().setup_environment()
        if ranks.world_size > 1:
            self._lifeline = Lifeline(ranks.broadcast(f"relay/lifeline/{uuid4().hex}"))
        met(self.launcher)
        if self._async_save:
            self._background = Background()
        if self._background is not None and trainer is not None:
            self._waiting = wait_before_looking(trainer, self._background)

    @abstractmethod
    def setup(self, trainer: Trainer) -> None:
        """Prepare model, optimizers and processes; raise errors of configuration before any process starts."""
        super().setup(trainer)

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Return when every process of the strategy has come here; ``name`` is for messages only."""
        cast(Any, super()).barrier(name)  # abstract in Lightning's Strategy, concrete in the one behind this class

    @abstractmethod
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Called with the loss (a scalar) before each backward pass."""
        super().pre_backward(closure_loss)

    @abstractmethod
    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after every step of ``optimizer``, the object that ``configure_optimizers`` returned.

        It follows each step, under automatic and manual optimization, and also when the user steps the bare
        optimizer. A step that a gradient scaler skips is no step.
        """

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write one complete checkpoint, whatever process the state lives in. Every process calls it.

        With ``async_save`` a copy of it is written while training goes on. Outside of a run it is written at once.

        Raises:
            Exception: With ``async_save`` also what went wrong with the checkpoint before.
        """
        if self._state_dict_type == "sharded":
            if storage_options is not None:
                raise TypeError('state_dict_type="sharded" takes no storage_options: it does not use the CheckpointIO.')
            if (path := local_path(filepath)) is None:
                raise ValueError(
                    f'state_dict_type="sharded" writes into directories of this machine only, got {filepath}.'
                )
            self._save_in_parts(checkpoint, path)
        elif self._background is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            self._background.wait()  # before there is another copy
            copy = snapshot(checkpoint, self._private_tensors())
            self._background.save(partial(self.checkpoint_io.save_checkpoint, copy, filepath, storage_options))

    @abstractmethod
    def teardown(self) -> None:
        """End what ``setup`` started. Safe at any stage of set-up; never masks the first error."""
        self._remove_step_hooks()
        if self._lifeline is not None:
            self._lifeline.end()
            self._lifeline = None
        background, self._background = self._background, None
        for undo in self._waiting:
            undo()
        self._waiting = ()
        try:
            if background is not None:
                background.end()
        except Exception as error:
            model = self.lightning_module
            if model is None or model.trainer.state.status != TrainerStatus.INTERRUPTED:
                raise
            rank_zero_warn(f"A checkpoint could not be saved ({error!r}).")
        finally:
            if self._on_loopback is not None:
                self._on_loopback.close()
                self._on_loopback = None
            super().teardown()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, optimizer: Optimizer | None = None) -> Tensor:
        """Scale gradients so that their common norm, over all processes that have some, is at most ``max_norm``.

        For an overridden ``configure_gradient_clipping``; what ``torch.nn.utils.clip_grad_norm_`` is in one process.

        Args:
            max_norm: The largest norm.
            norm_type: The p of the p-norm; may be ``inf``.
            optimizer: Whose parameters; may be left out if there is only one.

        Returns:
            The total norm before clipping, a scalar.

        Raises:
            MisconfigurationException: If it is not clear which optimizer is meant.
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
        """What clips the gradients of an optimizer; here every process has all of them."""
        return lambda optimizer, *norm: torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), *norm)

    def remove_checkpoint(self, filepath: str | Any) -> None:
        """Remove a checkpoint, but not before the one that takes its place is there."""
        remove = partial(super().remove_checkpoint, filepath)
        if self._background is None:
            remove()
        else:
            self._background.after_saving(remove)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, else one that replaces files atomically."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # does nothing where it wraps one of the user's
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _private_tensors(self) -> list[Tensor]:
        """Of what has been gathered for the next checkpoint, the tensors that nobody else knows."""
        return []

    def load_checkpoint(self, checkpoint_path: str | Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, a file or one in parts, as every process needs it."""
        if self._background is not None:
            try:
                self._background.wait()  # it may be the one that is being written
            finally:
                self.barrier("load_checkpoint")  # by the first rank, which alone waits for that
        local = local_path(checkpoint_path)
        if local is not None and shards.is_sharded(local):
            return self._load_in_parts(local, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _save_in_parts(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write a checkpoint in parts, this process's and those of others. Here there is one part only."""
        own = shards.flat({part: checkpoint[part] for part in shards.PARTS if part in checkpoint})
        shards.save(path, checkpoint, [shards.plan(own)], lambda home, plans: [shards.write(home, plans[0], own)])

    def _load_in_parts(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint in parts."""
        return shards.load(path, weights_only=weights_only)[0]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint, all of them or none, in the precision in which the model trains.

        Raises:
            RuntimeError: If names or shapes are not those of the model; it is as it was then. A model with a
                ``load_state_dict`` of its own is asked nothing before.
        """
        convert(self)
        assert self.lightning_module is not None
        if type(self.lightning_module).load_state_dict is nn.Module.load_state_dict:  # another one knows what to do
            self._check_weights(checkpoint["state_dict"], strict)
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states of a checkpoint, all of them or none.

        Raises:
            ValueError: If they belong to other optimizers than those of the model.
        """
        check_optimizer_states([unwrapped(own) for own in self.optimizers], checkpoint["optimizer_states"])
        super().load_optimizer_state_dict(checkpoint)

    def _check_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        """Refuse weights that are not those of the model."""
        assert self.lightning_module is not None
        check_fit(self.lightning_module, state, strict=strict)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers. Assigning them (Lightning does in ``setup``) hangs ``post_optimizer_step`` on each."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        vars(Strategy)["optimizers"].__set__(self, optimizers)
        # Lightning assigns the same list twice in a set-up, and a user may keep an optimizer over several fits.
        self._remove_step_hooks()
        own = {id(optimizer): optimizer for optimizer in map(unwrapped, optimizers) if not is_stand_in(optimizer)}
        self._step_handles = tuple(
            optimizer.register_step_post_hook(lambda stepped, args, kwargs: self.post_optimizer_step(stepped))
            for optimizer in own.values()
        )

    def _remove_step_hooks(self) -> None:
        for handle in self._step_handles:
            handle.remove()
        self._step_handles = ()
