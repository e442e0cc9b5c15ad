"""What a rank does, noted as Lightning calls the strategy, for the error of rank 0 should this rank be killed."""

from collections.abc import Callable
from typing import Any

from pytorch_lightning.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from strategies.pipeline.activity import Note


class Phases(Strategy):
    """Notes where a run is, and passes each call on."""

    note: Note | None = None
    """Given by the launcher to ranks that another one watches."""

    def doing(self, what: str) -> None:
        """Notes what begins now."""
        if self.note is not None:
            self.note.write(f"in {what}")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.doing("training step")
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.doing("validation step")
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self.doing("test step")
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self.doing("prediction step")
        return super().predict_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self.doing("backward pass")
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.doing("saving a checkpoint")
        return super().lightning_module_state_dict()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        if self.note is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def passes_then_step() -> Any:
            result = closure()
            self.doing("optimizer step")
            return result

        return super().optimizer_step(optimizer, passes_then_step, model, **kwargs)

    def teardown(self) -> None:
        self.doing("teardown")
        super().teardown()
