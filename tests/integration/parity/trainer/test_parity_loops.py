"""Every loop of the Trainer, once and several times, runs over stages as it runs in one process."""

from functools import partial
from typing import Any

import pytest
from harness import run
from parity import WIDTH, Small, alike, batches
from parity_layers import Limited, Noting
from parity_trainers import Make, everywhere, state_of
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.nn.functional import mse_loss


class Model(Small):
    """Builds its layers late, at a nested place; every stage of two or three has one that notes its mode."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        self.model = nn.Module()
        self.head = nn.Linear(WIDTH, 2)

    def configure_model(self) -> None:
        if hasattr(self.model, "layers"):
            return
        linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        layers = [linear[0], Noting(), nn.LayerNorm(WIDTH), Noting(), linear[1], Noting()]
        layers[3].eval()  # and Lightning is to leave it so
        self.model.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model.layers(x))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", mse_loss(self(batch[0]), batch[1]), batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"rows": len(batch[0]), "y": self(batch[0])}


class Diary(Callback):
    """Writes down what happened when, and in which mode every module was."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        for name in vars(Callback):
            if name.startswith("on_") and name not in ("on_save_checkpoint", "on_load_checkpoint", "on_exception"):
                setattr(self, name, self._entry(name))

    def _entry(self, name: str) -> Any:
        def write(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            numbers = [arg for arg in args if isinstance(arg, int)]
            modes = "".join("ET"[module.training] for module in model.modules())
            self.lines.append(f"{name}{numbers} epoch {trainer.current_epoch} step {trainer.global_step} {modes}")

        return write

    def count(self, hook: str) -> int:
        return sum(line.startswith(hook + "[") for line in self.lines)


def results(model: Model, trainer: Any, diary: Diary, returned: Any = None) -> dict[str, Any]:
    """What there is to compare after a run of a loop; the diary starts anew."""
    assert not any(parameter.is_meta for parameter in model.parameters())
    lines, diary.lines = diary.lines, []
    return {
        "returned": returned,
        "metrics": dict(trainer.callback_metrics),
        "logged": dict(trainer.logged_metrics),
        "losses": list(model.losses),
        "state": state_of(model),
        "modes": [module.training for module in model.modules()],
        "diary": lines,
        "callbacks": len(trainer.callbacks),
    }


def evaluation_data() -> list[Any]:
    return [batches((7, 6, 2, 5), seed=1), batches((4, 1, 8), seed=2)]


def each_loop(make: Make) -> dict[str, Any]:
    model, diary = Model(), Diary()
    trainer = make(
        max_epochs=2,
        limit_train_batches=5,
        val_check_interval=2,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        limit_test_batches=0.5,
        limit_predict_batches=2,
        callbacks=[diary],
    )
    found = {}
    trainer.fit(model, batches((8, 8, 5, 2, 7, 9, 6)), batches((7, 6, 4), seed=1))
    found["fit"] = results(model, trainer, diary)
    returned: Any = trainer.test(model, evaluation_data(), verbose=False)
    found["test"] = results(model, trainer, diary, returned)
    returned = trainer.predict(model, evaluation_data())
    found["predict"] = results(model, trainer, diary, returned)
    return found


def all_loops() -> list[dict[str, Any]]:
    return everywhere(each_loop, stages=[3], module="model.layers", checkpoint="never")


def short_loop(make: Make, **limits: Any) -> dict[str, Any]:
    diary = Diary()
    trainer = make(callbacks=[diary], **{"max_epochs": 2, **limits})
    model = Model()
    trainer.fit(model, batches((8, 3, 5, 6)), batches((4, 4, 6), seed=1))
    return {"run": results(model, trainer, diary), "steps": trainer.global_step}


def short_loops() -> list[list[dict[str, Any]]]:
    limits: list[dict[str, Any]] = [
        {"fast_dev_run": 2},
        {"overfit_batches": 2, "check_val_every_n_epoch": 2, "max_epochs": 4},
        {"limit_train_batches": 0.75, "limit_val_batches": 0.67, "val_check_interval": 0.7, "num_sanity_val_steps": -1},
    ]
    options: dict[str, Any] = {"stages": [2], "module": "model.layers", "checkpoint": "never"}
    return [everywhere(partial(short_loop, **each), **options) for each in limits]


class Fragile(Small):
    """Cannot take more than ten rows: a layer of its first stage fails."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[1] = Limited(10)


def again_and_again(make: Make) -> dict[str, Any]:
    model, trainer, other = Fragile(), make(max_epochs=1), make(max_epochs=2)
    found: dict[str, Any] = {}

    def note(name: str, of: Any) -> None:
        optimizers = [optimizer.state_dict() for optimizer in of.optimizers]
        found[name] = list(model.losses), state_of(model), optimizers, of.current_epoch, of.global_step

    trainer.fit(model, batches(), batches(seed=1))
    note("once", trainer)
    failing = make(max_epochs=3)
    with pytest.raises(RuntimeError, match="too many rows"):
        failing.fit(model, batches((5, 50)))
    note("failed", failing)
    other.fit(model, batches((4, 6)))
    note("by another Trainer after that", other)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches(), batches(seed=1))
    note("twice", trainer)
    found["validated"] = trainer.validate(model, batches((4, 6), seed=2), verbose=False)
    return found


def repeated() -> list[dict[str, Any]]:
    return everywhere(again_and_again, stages=[2])


# All of it is one launch


def everything() -> dict[str, Any]:
    return {"loops": all_loops(), "short loops": short_loops(), "several runs": repeated()}


@pytest.fixture(scope="module")
def found() -> Any:
    return run(everything, timeout_seconds=170)


def test_every_loop(found: Any) -> None:
    """Also: layers built in ``configure_model`` at a nested path, and their modes as each stage saw them."""
    single, pipeline = found["loops"]
    alike(pipeline, single)

    names = [f"model.layers.{k}.rows" for k in (1, 3, 5)]
    rows = {loop: [single[loop]["state"][name].tolist() for name in names] for loop in single}
    trained, checked, validated = 2 * (8 + 8 + 5 + 2 + 7), 7, 2 * 2 * (7 + 6)
    assert rows["fit"][0] == rows["fit"][2] == [checked + validated, trained]
    assert rows["fit"][1] == [checked + validated + trained, 0]
    assert rows["test"][0] == [rows["fit"][0][0] + 7 + 6 + 4, trained]
    assert rows["predict"][0] == [rows["test"][0][0] + 7 + 6 + 4 + 1, trained]
    assert len(single["test"]["returned"]) == 2 and len(single["predict"]["returned"][1]) == 2
    assert any(line.startswith("on_sanity_check_start") for line in single["fit"]["diary"])


def test_shortened_loops(found: Any) -> None:
    runs = found["short loops"]
    for single, pipeline in runs:
        alike(pipeline, single)
    assert [single["steps"] for single, _ in runs] == [2, 8, 6]
    assert [sum("on_validation_start" in line for line in single["run"]["diary"]) for single, _ in runs] == [1, 3, 3]


def test_several_runs_and_trainers(found: Any) -> None:
    single, pipeline = found["several runs"]
    alike(pipeline, single)
    assert [len(single[moment][0]) for moment in ("once", "failed", "twice")] == [4, 5, 13]
