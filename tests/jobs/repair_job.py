"""Runs whose workers are killed in chosen batches and phases, and what such a run comes to."""

import itertools
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from parity import accelerator, placed
from pytorch_lightning.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from strategies import Recovery, RPCSequentialStrategy
from strategies.checkpoint.consolidate import consolidate
from strategies.lightning.compat import unwrapped
from trainer import Trainer

STAGES, EPOCHS, BATCHES, ROWS = 3, 2, 7, 6
MAX_RESTARTS = 20

Kills = Mapping[int, Sequence[str]]
"""For batches, counted over all epochs: phase and rank of workers that are killed in it, such as ``forward-1``."""


def strike(phase: str) -> None:
    """Kill this process if it is a worker that is to end here, once or always; or let it hang."""
    name, _, rank = Path("/proc/self/comm").read_text().strip().rpartition("-")
    order = Path(f"kill-{phase}-{rank}")
    if name != "relay-worker":
        return
    if order.exists() or Path(f"always-{phase}-{rank}").exists():
        order.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)
    hang = Path(f"kill-hang-{rank}")
    if phase == "forward" and hang.exists():
        hang.unlink()
        time.sleep(1000)


class Killable(nn.Linear):
    """Ends its process where a test says so; counts its calls, and keeps a tensor of the last one."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.calls, self.mean = 0, torch.zeros(())

    def forward(self, rows: Tensor) -> Tensor:
        strike("forward" if self.training else "validation")
        self.calls += self.training
        self.mean = rows.detach().mean()
        if rows.requires_grad:
            rows.register_hook(lambda grad: strike("backward"))
        return super().forward(rows)

    def _save_to_state_dict(self, *args: Any) -> None:
        strike("state_dict")
        super()._save_to_state_dict(*args)

    def get_extra_state(self) -> Tensor:
        strike("teardown")
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        strike("snapshot")
        return self.__dict__


_stepped: set[int] = set()
"""The optimizer steps that this process has made."""


class KillableAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        number = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
        strike("again" if number in _stepped else "step")
        _stepped.add(number)
        return super().step(closure)


class HookCalls(Callback):
    """Writes down every call of every hook."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


def _noting(name: str) -> Any:
    def hook(self: HookCalls, trainer: Any, model: Any, *args: Any) -> None:
        told = [arg if isinstance(arg, int) else plain(arg) for arg in args]
        self.calls.append((name, trainer.current_epoch, trainer.global_step, told))

    return hook


_UNUSED = ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
for _name in [name for name in vars(Callback) if name.startswith("on_") and name not in _UNUSED]:
    setattr(HookCalls, _name, _noting(_name))


def plain(value: Any) -> Any:
    """What can be compared by ``==``, to the last bit."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.detach().double().tolist()]
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


class Net(pl.LightningModule):
    """Keeps what would be wrong if something were left out."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        last = [nn.Linear(6, 6), Killable(), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 6), nn.Linear(6, 1)]
        self.sequential_module = nn.Sequential(
            *(nn.Linear(4, 6), Killable(), nn.Dropout(0.2), Killable(), nn.BatchNorm1d(6), nn.Tanh()), *last
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.error = MeanSquaredError()
        self.seen: list[tuple[int, float]] = []
        self.norms: dict[int, list[float]] = {}
        self.total = torch.zeros(())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rows, targets = batch
        noisy = rows + 0.01 * torch.randn_like(rows)
        if self.logger is not None and self.trainer.strategy.rows_at_once:
            self.logger.log_metrics({"direct": float(noisy.sum())}, step=1000 + self.global_step)
        outputs = self.sequential_module(noisy) * self.scale
        loss = (outputs - targets).square().mean()
        self.error(outputs.detach().float(), targets.float())
        self.total += loss.detach().cpu()
        self.seen.append((self.global_step, float(loss)))
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]  # none while statistics are updated
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        self.norms.setdefault(self.current_epoch, []).append(norm)
        self.log("norm", norm)

    def on_train_end(self) -> None:
        """Comes after the callbacks, of which some save a checkpoint."""
        for order in Path().glob("at-end-*"):
            order.rename(order.name.replace("at-end", "kill-teardown"))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.sequential_module(batch[0]) * self.scale - batch[1]).square().mean())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        noisy = batch[0] + torch.randn_like(batch[0])
        self.log("test_loss", (self.sequential_module(noisy) * self.scale - batch[1]).square().mean(), on_step=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.sequential_module(batch[0]) * self.scale

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = KillableAdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, EPOCHS * BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ManualNet(Net):
    """Two optimizers, one of which steps every other batch, with gradients that stay meanwhile; steps its schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        self.lr_schedulers().step()
        self.log("rate", first.param_groups[0]["lr"])
        return loss

    def configure_optimizers(self) -> Any:
        second = [*self.sequential_module[0].parameters(), self.scale]
        others = [p for p in self.parameters() if all(p is not own for own in second)]
        first = KillableAdamW(others, lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(first, 0.1, EPOCHS * BATCHES)
        return [first, torch.optim.SGD(second, lr=0.01, momentum=0.9)], [schedule]


class BlockNet(Net):
    """Loops over its layers itself, and changes its batch in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._modules.pop("sequential_module"))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        batch[0].mul_(1.5)
        batch.append(batch[0])
        loss = super().training_step(batch[:2], batch_idx)
        batch[1].zero_()
        return loss

    def sequential_module(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TwoListsNet(Net):
    """Loops over two lists of layers, with code between them."""

    def __init__(self) -> None:
        super().__init__()
        layers = [*self._modules.pop("sequential_module")]
        self.first, self.second = nn.ModuleList(layers[:6]), nn.ModuleList(layers[6:])

    def sequential_module(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        x = 0.5 * x + self.scale
        for block in self.second:
            x = block(x)
        return x


class SlowAgain(nn.Linear):
    """Is slow in a process that has taken over from another."""

    def forward(self, rows: Tensor) -> Tensor:
        first = Path(f"first-{Path('/proc/self/comm').read_text().strip()}")
        if not first.exists():
            first.write_text(str(os.getpid()))
        if first.read_text() != str(os.getpid()):
            time.sleep(0.2)
        return super().forward(rows)


class SlowAgainNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[0] = SlowAgain(4, 6)
        for path in Path().glob("first-*"):
            path.unlink()


class SometimesNet(Net):
    """Changes every other batch in place."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx % 2 == 0:
            batch[0].mul_(1.5)
        return super().training_step(batch, batch_idx)


class Clipper(Callback):
    """Changes weights, buffers and states of the last stage between steps, in ways that torch does not count."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        model.scale.data.clamp_(-0.9, 0.9)
        for parameter in model.sequential_module[-1].parameters():
            parameter.data.clamp_(-0.05, 0.05)
            trainer.optimizers[0].state[parameter]["exp_avg"].data.mul_(0.5)
        model.sequential_module[8].running_mean.data.mul_(0.5)


class Scaler(Callback):
    """Changes gradients of the last stage before each optimizer step."""

    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and not parameter.is_meta:
                parameter.grad.mul_(0.5 + 0.25 * (trainer.global_step % 3))


class StreamNet(Net):
    """Has a generator, which cannot be copied, and takes a value of it in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = (0.01 * number for number in itertools.count())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + next(self.stream)


class Halver(Callback):
    """Changes gradients of the last stage before the next batch adds to them."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0 and model.scale.grad is not None:
            model.scale.grad.data.mul_(0.5)


class Meddler(Callback):
    """Changes weights, a rate, a mode and the balance between steps."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            model.sequential_module[2].p = 0.4
        if batch_idx == 3:
            model.load_state_dict(
                {
                    name: value * 0.9 if value.is_floating_point() else value
                    for name, value in model.state_dict().items()
                }
            )
            model.sequential_module[4].eval()
        if batch_idx == 4:
            trainer.strategy.rebalance([3, 3, 6] if trainer.current_epoch == 0 else [2, 4, 6])


class Strategy(RPCSequentialStrategy):
    rows_at_once = True
    """Whether ``training_step`` runs once for the whole batch."""


class Executioner(Callback):
    """Tells workers to end, or ends them in a hook."""

    def __init__(self, kills: Kills) -> None:
        self.kills = {number: list(orders) for number, orders in kills.items()}

    def take(self, trainer: Any, name: str) -> list[str]:
        """Orders for this batch that begin with a name, each once."""
        orders = self.kills.get(trainer.fit_loop.epoch_loop.total_batch_idx, [])
        taken = [order for order in orders if order.startswith("on_") == bool(name) and order.startswith(name)]
        orders[:] = [order for order in orders if order not in taken]
        return taken

    def on_sanity_check_start(self, trainer: Any, model: Any) -> None:
        for order in [order for order in self.kills.get(0, []) if order.startswith("sanity")]:
            self.kills[0].remove(order)
            Path(f"kill-validation-{order[-1]}").touch()

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        for order in self.take(trainer, ""):
            Path(order if order.startswith(("at-end", "always")) else f"kill-{order}").touch()


def _killing(name: str) -> Any:
    def hook(self: Executioner, trainer: Any, model: Any, *args: Any) -> None:
        if trainer.sanity_checking:
            return
        for order in self.take(trainer, f"{name}-"):
            trainer.strategy.pipeline.workers.kill(int(order[-1]))

    return hook


for _name in ("batch_end", "epoch_end", "end"):
    setattr(Executioner, f"on_train_{_name}", _killing(f"on_train_{_name}"))
Executioner.on_save_checkpoint = _killing("on_save_checkpoint")
for _name in ("start", "batch_start", "batch_end", "end"):
    setattr(Executioner, f"on_validation_{_name}", _killing(f"on_validation_{_name}"))


def fit(
    kills: Kills,
    every_n_steps: int,
    *,
    net: type[Net] = Net,
    trainer_class: Any = Trainer,
    schedule: str = "gpipe",
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    scaler: bool = False,
    options: Mapping[str, Any] | None = None,
    stages: int = STAGES,
    replicas: int = 1,
    parts: int = 1,
    ckpt_path: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """What a fit of two epochs of seven batches comes to.

    Args:
        kills: Which workers are killed.
        every_n_steps: ``snapshot_every_n_steps``; 0: lost workers are not repaired.
        net: The model.
        trainer_class: Of Relay or of Lightning.
        schedule: Of the pipeline.
        callbacks: More callbacks.
        scaler: Whether the loss is scaled.
        options: More arguments of the strategy.
        stages: Number of stages.
        replicas: Number of replicas.
        parts: Number of pipelines that divide the layers of a replica.
        ckpt_path: The checkpoint with which it begins.
        settings: More arguments of the Trainer.
    """
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":  # others come at any time
        for name in ("logs", "saved"):
            shutil.rmtree(name, ignore_errors=True)
    pl.seed_everything(1, verbose=False)
    model = net()
    has_six_chunks = schedule in ("interleaved", "zbv") or issubclass(net, TwoListsNet)
    balance = [5, 7] if stages == 2 else [2] * 6 if has_six_chunks else [2, 4, 6]
    repairs = {"recovery": Recovery(MAX_RESTARTS, every_n_steps)} if every_n_steps else {}
    strategy = Strategy(
        balance,
        microbatches=2,
        schedule=schedule,
        data_parallel_size=replicas,
        tensor_parallel_size=parts,
        **{**repairs, **(options or {})},
    )
    strategy.rows_at_once = schedule == "gpipe"
    if scaler:
        kind = "cpu" if accelerator() == "cpu" else "cuda"
        scaler_of_losses = torch.amp.GradScaler(kind, init_scale=2.0**20)
        settings["plugins"] = [MixedPrecision("16-mixed", kind, scaler=scaler_of_losses)]
    hooks = HookCalls()
    trainer = trainer_class(
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[
            Executioner(kills),
            hooks,
            LearningRateMonitor("step"),
            EarlyStopping("val_loss", patience=5),
            ModelCheckpoint("saved", "{step}", every_n_train_steps=3, save_top_k=-1, save_last=True),
            ModelCheckpoint("saved", "best-{epoch}", monitor="val_loss"),
            *callbacks(),
        ],
        logger=CSVLogger("logs", name="", version=0),
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{
            **placed(strategy, stages * replicas * parts),
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            **settings,
        },
    )
    generator = torch.Generator().manual_seed(2)
    number = replicas * (BATCHES * ROWS - 1)
    rows, targets = (torch.randn(number, width, generator=generator) for width in (4, 1))
    data = TensorDataset(rows, targets)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(data, ROWS, shuffle=True), DataLoader(data, ROWS), ckpt_path=ckpt_path)
    told = [str(warning.message) for warning in said]
    return {
        "losses": model.seen,
        "norms": model.norms,
        "total": float(model.total),
        "weights": plain(model.state_dict()),
        "calls": [(layer.calls, plain(layer.mean)) for layer in model.modules() if isinstance(layer, Killable)],
        "optimizers": [plain(unwrapped(optimizer).state_dict()) for optimizer in trainer.optimizers],
        "schedules": [plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "metrics": plain(trainer.callback_metrics),
        "csv": Path("logs", "version_0", "metrics.csv").read_text() if trainer.is_global_zero else "",
        "hooks": hooks.calls,
        "counters": plain(trainer.fit_loop.state_dict()),
        "checkpoints": {path.name: read(path) for path in sorted(Path("saved").glob("*"))},
        "random": [plain(torch.rand(2)), random.random()],
        "repairs": [repair.lost for repair in strategy.repairs],
        "warnings": told,
        "left": [str(path) for path in Path().glob("kill-*")],
    }


def read(path: Path) -> Any:
    """What a checkpoint holds."""
    if not path.is_file():
        consolidate(path, path, weights_only=False)
    return plain(torch.load(path, weights_only=False))


_SAID = ("repairs", "warnings")


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two fits, or parts of them, differ."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        names = [name for name in expected if where or name not in _SAID]
        return [line for name in names for line in differences(found[name], expected[name], f"{where}/{name}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for place, (a, b) in pairs for line in differences(a, b, f"{where}/{place}")]
    same = found == expected or (found != found and expected != expected)  # not a number
    return [] if same else [f"{where}: {found!r:.400} instead of {expected!r:.400}"]


def disturbed(cases: Sequence[tuple[Kills, int]], **options: Any) -> list[tuple[list[str], list[str]]]:
    """For each case, in what it differs from an undisturbed fit, and what was lost and repaired."""
    expected = fit({}, 0, **options)
    answers = []
    for kills, every_n_steps in cases:
        found = fit(kills, every_n_steps, **options)
        answers.append((differences(found, expected), found["repairs"]))
    return answers


def verified(every_n_steps: int, kills: Kills, **options: Any) -> list[str]:
    """In what a fit whose steps are verified differs from one that does nothing twice."""
    expected = fit({}, 0, **options)
    recovery = Recovery(MAX_RESTARTS if kills else 0, verify_every_n_steps=every_n_steps)
    settings = {**options.pop("options", {}), "recovery": recovery}
    return differences(fit(kills, 0, options=settings, **options), expected)


class Hasty(Killable):
    """Depends on the time. (Python's, numpy's and torch's generators are seeded in each pass.)"""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * (1 + 1e-3 * (time.perf_counter() % 1))


class KeepsOne(Callback):
    """Keeps a checkpoint as it was written."""

    def on_train_end(self, trainer: Any, model: Any) -> None:
        Path("saved", "step=6.ckpt").rename("first")


class TakesItAway(Callback):
    """Takes away the checkpoint with which the fit has begun."""

    def on_train_start(self, trainer: Any, model: Any) -> None:
        Path("first").rename("gone")


class SlowToRestore(nn.Linear):
    """Takes its time when a snapshot is restored."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(0.2)
        super().__setstate__(state)


class SlowToRestoreNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[0] = SlowToRestore(4, 6)


class GoesBack(Callback):
    """Loads optimizer states from a checkpoint in the middle of the fit, and deletes it."""

    def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint("kept.ckpt")
            trainer.strategy.load_optimizer_state_dict(trainer.strategy.load_checkpoint("kept.ckpt"))
            Path("kept.ckpt").unlink()


def resumed(kills: Kills, form: str, **options: Any) -> tuple[list[str], list[str]]:
    """In what a fit that begins with a checkpoint differs from an undisturbed one, and what was lost.

    The checkpoint is gone as soon as it has been loaded.
    """
    options["state_dict_type"] = form
    settings: dict[str, Any] = {"net": SlowToRestoreNet, "accumulate_grad_batches": 1}
    fit({}, 0, callbacks=lambda: [KeepsOne()], options={"state_dict_type": form}, **settings)
    expected = fit({}, 0, ckpt_path="first", options={"state_dict_type": form}, **settings)
    found = fit(kills, 100, ckpt_path="first", callbacks=lambda: [TakesItAway()], options=options, **settings)
    return differences(found, expected), found["repairs"]


class StrikesInEvaluation(Callback):
    """Kills the first worker in the second batch, and the last worker before the third batch."""

    def _strike(self, trainer: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            Path("kill-validation-0").touch()
        elif batch_idx == 2:
            pipeline = trainer.strategy.pipeline
            pipeline.workers.kill(len(pipeline.remotes) - 1)

    def on_validation_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._strike(trainer, batch_idx)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


def evaluate(
    *,
    is_disturbed: bool,
    net: type[Net] = Net,
    balance: Sequence[int] = (2, 4, 6),
    pipelines: int = 1,
    max_restarts: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """What ``validate``, ``test`` and ``predict`` come to."""
    pl.seed_everything(1, verbose=False)
    model, hooks = net(), HookCalls()
    repairs = {"recovery": Recovery(max_restarts)} if is_disturbed else {}
    strategy = Strategy([*balance], microbatches=2, **repairs, **options)
    trainer = Trainer(
        **placed(strategy, len(balance) * pipelines),
        strategy=strategy,
        callbacks=[hooks, *([StrikesInEvaluation()] if is_disturbed else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(2)
    rows, targets = (torch.randn(BATCHES * ROWS - 1, width, generator=generator) for width in (4, 1))
    loader = DataLoader(TensorDataset(rows, targets), ROWS)
    numbers, found = [], {}
    for name in ("validate", "test", "predict"):
        found[name] = plain(getattr(trainer, name)(model, loader))
        numbers.append(len(strategy.repairs))
    return {
        **found,
        "hooks": hooks.calls,
        "weights": plain(model.state_dict()),
        "random": [plain(torch.rand(2)), random.random()],
        "left": [str(path) for path in Path().glob("kill-*")],
        "repairs": numbers,
        "warnings": [],
    }
