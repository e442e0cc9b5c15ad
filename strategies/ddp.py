"""Data parallelism: Lightning's DDP under the contract, with communication hooks by name, on gloo too."""

import inspect
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.overrides.distributed import _register_ddp_comm_hook
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from strategies.base import StrategyPlugin
from strategies.common.names import did_you_mean

# What each hook sends, and the backends on which it works: measured on gloo (torch 2.13: fp16 halves the traffic at a
# relative error of 5e-4 per gradient, torch itself refuses bf16); NCCL's by torch's documentation.
_HOOKS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "fp16_compress": default_hooks.fp16_compress_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
}
_WORKS_ON = {
    "gloo": ("none", "fp16_compress", "powersgd"),
    "nccl": ("none", "fp16_compress", "bf16_compress", "powersgd"),
}
_POWERSGD_START = 1000  # torch's own default


class DDPStrategy(StrategyPlugin, pl.strategies.DDPStrategy):
    """One copy of the model per process; gradients are averaged during the backward pass.

    What it does at each point of the contract: ``setup_environment`` joins the process group, and ties every rank to
    the life of rank 0; ``setup`` wraps the model
    into ``DistributedDataParallel`` and registers the communication hook; ``barrier`` waits for all ranks;
    ``pre_backward`` readies the reducer under manual optimization; ``post_optimizer_step`` has nothing to do, since
    every rank has stepped on the same averaged gradients; ``save_checkpoint`` writes from rank 0, whose state is
    everyone's; ``teardown`` unwraps the model.

    Args:
        comm_hook: how gradients travel: ``"none"`` (as they are), ``"fp16_compress"``, ``"bf16_compress"`` (half the
            bytes) or ``"powersgd"`` (low-rank, with error feedback; Vogels et al., arXiv:1905.13727).
        powersgd_rank: rank of PowerSGD's approximation.
        powersgd_start_step: number of first steps (at least 2) that PowerSGD leaves uncompressed.
        async_save: go on training while a checkpoint is written, from a copy in host memory.
        kwargs: Lightning's arguments, such as ``process_group_backend``, and those of ``DistributedDataParallel``, such
            as ``find_unused_parameters``.

    Raises:
        TypeError: for a keyword that neither Lightning's ``DDPStrategy`` nor ``DistributedDataParallel`` has.
        ValueError: for an unknown ``comm_hook``, or settings of PowerSGD without it.
        MisconfigurationException: when the Trainer is built, for a hook that the backend cannot do.
    """

    is_distributed = True
    """As in Lightning, whose own warns that it is deprecated."""

    def __init__(
        self,
        *,
        comm_hook: str = "none",
        powersgd_rank: int | None = None,
        powersgd_start_step: int | None = None,
        async_save: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_keywords(kwargs)
        if comm_hook not in _HOOKS:
            raise ValueError(f"unknown comm_hook {comm_hook!r}{did_you_mean(comm_hook, _HOOKS)}")
        if comm_hook != "none" and kwargs.get("ddp_comm_hook") is not None:
            raise ValueError(f"comm_hook={comm_hook!r} and ddp_comm_hook are both given; drop one of them")
        if comm_hook != "powersgd" and (powersgd_rank is not None or powersgd_start_step is not None):
            raise ValueError(f"powersgd_rank and powersgd_start_step need comm_hook='powersgd', got {comm_hook!r}")
        if powersgd_rank is not None and powersgd_rank < 1:
            raise ValueError(f"powersgd_rank must be at least 1, got {powersgd_rank}")
        if powersgd_start_step is not None and powersgd_start_step < 2:
            raise ValueError(f"powersgd_start_step must be at least 2, got {powersgd_start_step}")
        if (period := kwargs.get("model_averaging_period")) is not None and period < 1:
            raise ValueError(f"model_averaging_period must be at least 1, got {period!r}")
        super().__init__(**kwargs)
        self.comm_hook, self._async_save = comm_hook, async_save
        self._powersgd_rank = powersgd_rank or 1
        self._powersgd_start_step = powersgd_start_step or _POWERSGD_START

    def setup_environment(self) -> None:
        """Join the process group."""
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the model for training, with the communication hook; bring every rank to the weights of rank 0."""
        super().setup(trainer)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        super().barrier(name)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Ready the reducer, which under manual optimization does not see the forward pass."""
        super().pre_backward(closure_loss)

    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Nothing: every rank has made the same step."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write from rank 0; every rank holds the whole state."""
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """Unwrap the model. The process group stays, for the next ``fit`` or ``test`` of this process."""
        super().teardown()

    def _configure_launcher(self) -> None:
        # Called when the Trainer is built: devices and backend are known, and no process has been started.
        if self.comm_hook != "none":
            works = _WORKS_ON.get(backend := self._get_process_group_backend(), ("none",))
            if self.comm_hook not in works:
                raise MisconfigurationException(
                    f"comm_hook={self.comm_hook!r} does not work on the backend {backend!r}; on {backend} use one of: "
                    f"{', '.join(works)}"
                )
        super()._configure_launcher()

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only, and passes over a ddp_comm_hook of the user's on CPU in silence.
        assert isinstance(self.model, DistributedDataParallel)
        hook, state = _HOOKS[self.comm_hook] or self._ddp_comm_hook, self._ddp_comm_state
        if self.comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=self._powersgd_rank,
                start_powerSGD_iter=self._powersgd_start_step,
            )
        _register_ddp_comm_hook(self.model, state, hook, self._ddp_comm_wrapper)


def _check_keywords(keywords: dict[str, Any]) -> None:
    """Refuse a typo here; Lightning hands what it does not know to ``DistributedDataParallel``, after the launch."""
    own = inspect.signature(DDPStrategy).parameters
    lightnings = inspect.signature(pl.strategies.DDPStrategy).parameters
    torchs = set(inspect.signature(DistributedDataParallel).parameters) - {"module", "device_ids"}
    valid = {*own, *lightnings, *torchs} - {"kwargs"}
    for keyword in keywords:
        if keyword not in valid:
            raise TypeError(f"DDPStrategy has no argument {keyword!r}{did_you_mean(keyword, valid)}")
