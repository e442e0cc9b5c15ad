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
        self._before_batch: dict[str, dict[str, Any] | None] = {}
        """The values before the current batch of each metric that the batch has logged; ``None`` if it had none."""

    def begin_batch(self) -> None:
        """Note that a batch begins."""
        self._before_batch = {}

    def state(self, *, before_batch: bool = False) -> dict[str, dict[str, Any]]:
        """Return the sums of all logged tensors, as plain types and tensors.

        Args:
            before_batch: Leave out what the current batch has logged.
        """
        earlier = self._before_batch if before_batch else {}
        return {
            key: {
                "arguments": {name: getattr(metric.meta, name) for name in _ARGUMENTS}
                | {"reduce_fx": metric.meta.reduce_fx.__name__},
                "sync": {"_should": metric.meta.sync.should, "rank_zero_only": metric.meta.sync.rank_zero_only},
                "values": {name: value.cpu() for name, value in values.items()},
            }
            for key, metric in self.items()
            if _is_summed(metric) and (values := earlier.get(key, _values(metric))) is not None
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
        if _is_summed(metric := self[key]) and key not in self._before_batch:
            self._before_batch[key] = _values(metric)
        super().update_metrics(key, value, batch_size)

    def _take(self, key: str, values: dict[str, Any]) -> None:
        metric = self[key]
        for name in values.keys() & set(metric_defaults(metric)):
            setattr(metric, name, values[name].to(getattr(metric, name).device))
        metric.has_reset = False


def _is_summed(metric: ResultMetric) -> bool:
    return bool(metric.is_tensor and metric.meta.on_epoch)


def _values(metric: ResultMetric) -> dict[str, Any] | None:
    """Return a copy of the sums of a metric; ``None`` if nothing has been logged since its last reset."""
    if metric.has_reset:
        return None
    return {name: getattr(metric, name).detach().clone() for name in metric_defaults(metric)}
