"""Sums of logged values, saved so that a run resumed in the middle of an epoch logs means over the whole epoch."""

from collections.abc import Callable
from typing import Any

from strategies.lightning.compat import ResultCollection, ResultMetadata, ResultMetric, ResultSync, metric_defaults

_ARGUMENTS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")


class ResumableResults(ResultCollection):
    """Lightning's logged values of training, whose sums can be saved. Metrics of torchmetrics save their own state."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self._resumed: dict[str, dict[str, Any]] = {}

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the sums of all logged tensors, as plain types and tensors."""
        return {
            key: {
                "arguments": {name: getattr(metric.meta, name) for name in _ARGUMENTS}
                | {"reduce_fx": metric.meta.reduce_fx.__name__},
                "sync": {"_should": metric.meta.sync.should, "rank_zero_only": metric.meta.sync.rank_zero_only},
                "values": {name: getattr(metric, name).detach().cpu() for name in metric_defaults(metric)},
            }
            for key, metric in self.items()
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
        }

    def resume(self, state: dict[str, dict[str, Any]], reduce: Callable[..., Any]) -> None:
        """Restore what :meth:`state` returned, including values that are not logged again.

        Args:
            state: The saved sums.
            reduce: The ``reduce`` method of the strategy.
        """
        for key, saved in state.items():
            metadata = ResultMetadata(**saved["arguments"])
            metadata.sync = ResultSync(fn=reduce, **saved["sync"])
            self[key] = ResultMetric(metadata, is_tensor=True)
            self._take(key, saved["values"])
        self._resumed = {key: saved["values"] for key, saved in state.items()}

    def end_epoch(self) -> None:
        """Forget the restored sums."""
        self._resumed = {}

    def log(self, fx: str, name: str, *arguments: Any, **keywords: Any) -> None:
        if f"{fx}.{name}" in self._resumed:
            del self[f"{fx}.{name}"]  # arguments may have changed
        super().log(fx, name, *arguments, **keywords)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if key in self._resumed:
            self._take(key, self._resumed.pop(key))
        super().update_metrics(key, value, batch_size)

    def _take(self, key: str, values: dict[str, Any]) -> None:
        metric = self[key]
        for name in values.keys() & set(metric_defaults(metric)):
            setattr(metric, name, values[name].to(getattr(metric, name).device))
        metric.has_reset = False
