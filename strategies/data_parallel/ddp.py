"""Data parallelism: Lightning's ``DDPStrategy`` with communication hooks that have names and also work on gloo."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from strategies.common.names import did_you_mean
from strategies.launch.session import check_timeout
from strategies.lightning.compat import MisconfigurationException, backend_of, pl, register_ddp_comm_hook
from strategies.lightning.strategy_plugin import StrategyPlugin

# The communication hooks, and the backends on which each works. The entries for gloo were measured: with torch 2.13,
# fp16 halves the traffic with a relative error of 5e-4 per gradient, and torch refuses bf16. The entries for NCCL come
# from torch's documentation.
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
    """Keeps one copy of the model in each process and averages gradients during the backward pass.

    The methods of the contract (:class:`~strategies.lightning.strategy_plugin.StrategyPlugin`):

    * ``setup_environment`` joins the process group, and makes every rank end with rank 0.
    * ``setup`` wraps the model into ``DistributedDataParallel`` and registers the communication hook.
    * ``barrier`` waits for all ranks.
    * ``pre_backward`` prepares the reducer under manual optimization.
    * ``post_optimizer_step`` does nothing, because every rank has made the same step.
    * ``save_checkpoint`` writes from rank 0, which has the same state as every other rank.
    * ``teardown`` unwraps the model.

    Args:
        comm_hook: How gradients are sent. ``"none"`` (default) sends them unchanged. ``"fp16_compress"`` and
            ``"bf16_compress"`` send half the bytes of float32; the second does not work on gloo. ``"powersgd"`` sends a
            low-rank approximation with error feedback (Vogels et al., arXiv:1905.13727).
        powersgd_rank: Rank of PowerSGD's approximation, at least 1. Default: 1.
        powersgd_start_step: Number of initial steps, at least 2, in which PowerSGD sends gradients uncompressed.
            Default: 1000.
        async_save: If ``True``, training continues while a checkpoint is written from a copy in host memory. Default:
            ``False``.
        rpc_timeout_sec: With several hosts, the seconds for which a host may be unreachable. After that, an error on
            every process of either side names both hosts. Default: 60.
        **kwargs: Other arguments of Lightning's ``DDPStrategy``, such as ``process_group_backend``, and of
            ``DistributedDataParallel``, such as ``find_unused_parameters``.

    Raises:
        TypeError: If neither Lightning's ``DDPStrategy`` nor ``DistributedDataParallel`` has a keyword of this name.
        ValueError: If ``comm_hook`` is unknown, if settings of PowerSGD are out of range or given without PowerSGD, or
            if ``rpc_timeout_sec`` is not above 0.
        MisconfigurationException: When the Trainer is built, if the backend does not support the hook.
    """

    is_distributed = True
    """Whether samplers divide the data. Overridden because Lightning's attribute warns that it is deprecated."""

    def __init__(
        self,
        *,
        comm_hook: str = "none",
        powersgd_rank: int | None = None,
        powersgd_start_step: int | None = None,
        async_save: bool = False,
        rpc_timeout_sec: float = 60.0,
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
        check_timeout(rpc_timeout_sec)
        super().__init__(**kwargs)
        self._rpc_timeout_sec = rpc_timeout_sec
        self.comm_hook, self._async_save = comm_hook, async_save
        self._powersgd_rank = powersgd_rank or 1
        self._powersgd_start_step = powersgd_start_step or _POWERSGD_START

    def setup_environment(self) -> None:
        """Join the process group; from then on this rank ends with rank 0."""
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the model for training, which copies the weights of rank 0, and register the communication hook."""
        super().setup(trainer)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        super().barrier(name)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepare the reducer, which under manual optimization does not see the forward pass."""
        super().pre_backward(closure_loss)

    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Do nothing: every rank has made the same step."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write from rank 0; every rank has the whole state."""
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """Unwrap the model. The process group stays, for the next ``fit`` or ``test`` of this process."""
        super().teardown()

    def _check_devices(self) -> None:
        if self.comm_hook != "none":
            works = _WORKS_ON.get(backend := backend_of(self), ("none",))
            if self.comm_hook not in works:
                raise MisconfigurationException(
                    f"comm_hook={self.comm_hook!r} does not work on the backend {backend!r}; on {backend} use one of: "
                    f"{', '.join(works)}"
                )

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only, and silently ignores the user's ddp_comm_hook on CPU.
        assert isinstance(self.model, DistributedDataParallel)
        hook, state = _HOOKS[self.comm_hook] or self._ddp_comm_hook, self._ddp_comm_state
        if self.comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=self._powersgd_rank,
                start_powerSGD_iter=self._powersgd_start_step,
            )
        register_ddp_comm_hook(self.model, state, hook, self._ddp_comm_wrapper)


def _check_keywords(keywords: dict[str, Any]) -> None:
    """Refuse unknown keywords before the launch; Lightning passes them to ``DistributedDataParallel`` after it."""
    own = inspect.signature(DDPStrategy).parameters
    lightnings = inspect.signature(pl.strategies.DDPStrategy).parameters
    torchs = set(inspect.signature(DistributedDataParallel).parameters) - {"module", "device_ids"}
    valid = {*own, *lightnings, *torchs} - {"kwargs"}
    for keyword in keywords:
        if keyword not in valid:
            raise TypeError(f"DDPStrategy has no argument {keyword!r}{did_you_mean(keyword, valid)}")
