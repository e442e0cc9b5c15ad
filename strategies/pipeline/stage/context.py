"""What a pass inherits from the thread that started it: autocast, default dtype, anomaly detection, numeric settings.

These settings are local to a thread or a process, so the driver captures them and every stage enters them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PassContext:
    """The driver's settings at the start of a pass; picklable."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype
    matmul_precision: str
    deterministic: bool
    deterministic_warn_only: bool
    cudnn_benchmark: bool
    anomaly: bool
    anomaly_check_nan: bool
    inference: bool

    @classmethod
    def capture(cls, device_type: str) -> "PassContext":
        """Reads the settings of the calling thread for the CPU and ``device_type``."""
        return cls(
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted({"cpu", device_type})
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            anomaly=torch.is_anomaly_enabled(),
            anomaly_check_nan=torch.is_anomaly_check_nan_enabled(),
            inference=torch.is_inference_mode_enabled(),
        )

    def apply(self) -> None:
        """Sets what is global to a process; called by workers, whose process is the pass's alone."""
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warn_only)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.autograd.set_detect_anomaly(self.anomaly, self.anomaly_check_nan)

    @contextmanager
    def entered(self, *, grad: bool) -> Iterator[None]:
        """Enters what is the thread's (autocast, inference and grad mode) and the default dtype, for a forward pass."""
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield
