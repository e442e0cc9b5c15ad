"""What ``self.log`` has summed up over an epoch, so that a run resumed in its middle has the mean over all of it."""

from collections.abc import Callable
from typing import Any

from pytorch_lightning.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)

_ARGUMENTS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")


class ResumableResults(_ResultCollection):
    """Lightning's logged values of training, whose sums can be saved; objects of torchmetrics keep their own."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self._resumed: dict[str, dict[str, Any]] = {}

    def state(self) -> dict[str, dict[str, Any]]:
        """The sums of all logged tensors, as plain types and tensors."""
        return {
            key: {
                "arguments": {name: getattr(metric.meta, name) for name in _ARGUMENTS}
                | {"reduce_fx": metric.meta.reduce_fx.__name__},
                "sync": {"_should": metric.meta.sync.should, "rank_zero_only": metric.meta.sync.rank_zero_only},
                "values": {name: getattr(metric, name).detach().cpu() for name in metric._defaults},
            }
            for key, metric in self.items()
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
        }

    def resume(self, state: dict[str, dict[str, Any]], reduce: Callable[..., Any]) -> None:
        """Goes on from what :meth:`state` gave, also where nothing is logged any more; ``reduce`` is the strategy's."""
        for key, saved in state.items():
            metadata = _Metadata(**saved["arguments"])
            metadata.sync = _Sync(fn=reduce, **saved["sync"])
            self[key] = _ResultMetric(metadata, is_tensor=True)
            self._take(key, saved["values"])
        self._resumed = {key: saved["values"] for key, saved in state.items()}

    def end_epoch(self) -> None:
        """Forgets what has been resumed."""
        self._resumed = {}

    def log(self, fx: str, name: str, *arguments: Any, **keywords: Any) -> None:
        if f"{fx}.{name}" in self._resumed:
            del self[f"{fx}.{name}"]  # arguments may be others now
        super().log(fx, name, *arguments, **keywords)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self._take(key, self._resumed.pop(key, {}))
        super().update_metrics(key, value, batch_size)

    def _take(self, key: str, values: dict[str, Any]) -> None:
        metric = self[key]
        for name in values.keys() & metric._defaults.keys():
            setattr(metric, name, values[name].to(metric.device))
        metric.has_reset = False
