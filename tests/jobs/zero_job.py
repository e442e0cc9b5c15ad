"""A user's script under ZeRO: each case is trained by DDP with the plain optimizer and by ZeRO with each option.

Run as ``python zero_job.py RANKS WHAT RESULTS [...]``, see the end. Lightning starts the other processes by running it
once more.
"""

import logging
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import zero_blocks as blocks
import zero_nets as nets
import zero_odd_nets as odd
from pytorch_lightning.callbacks import Callback, EMAWeightAveraging
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy

from strategies import DDPStrategy, ZeROStrategy
from strategies.checkpoint import save_and_load
from trainer import Trainer

QUIET = {
    "accelerator": "cpu",
    "max_epochs": nets.EPOCHS,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 1, overlap": {"stage": 1, "overlap_with_ddp": True},
    "stage 1, views": {"stage": 1, "parameters_as_bucket_view": True},
    "stage 2": {"stage": 2, "bucket_cap_mb": 1e-4},
    "stage 2, overlap": {"stage": 2, "overlap_with_ddp": True, "bucket_cap_mb": 0.2},
    "stage 2, overlap, views": {"stage": 2, "overlap_with_ddp": True, "parameters_as_bucket_view": True},
    "stage 3": {"stage": 3},
}
IN_PARTS: dict[str, dict[str, Any]] = {
    "in parts": {"state_dict_type": "sharded"},
    "in parts, async": {"state_dict_type": "sharded", "async_save": True, "stage": 2},
    "stage 3, in parts, async": {"state_dict_type": "sharded", "async_save": True, "stage": 3},
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    make: Callable[[], pl.LightningModule]
    trainer: Callable[[], Mapping[str, Any]] = dict
    strategy: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """What only DDP needs."""


def scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


CASES = {
    "groups and schedulers": Case(nets.Groups),
    "accumulated": Case(nets.Net, lambda: {"accumulate_grad_batches": 3}),
    "layer without optimizer, accumulated": Case(nets.LayerWithoutOptimizer, lambda: {"accumulate_grad_batches": 2}),
    "clipped by norm": Case(nets.Net, lambda: {"gradient_clip_val": 0.01}),
    "manual": Case(nets.Manual, strategy={"find_unused_parameters": True}),
    "clipped by value": Case(nets.Net, lambda: {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    "one bias, clipped by value": Case(nets.OneBias),
    "clipped by the model": Case(nets.OwnClipping),
    "zeroed and accumulated": Case(nets.OverriddenZeroGrad, lambda: {"accumulate_grad_batches": 3}),
    "unused": Case(nets.Leaky, strategy={"find_unused_parameters": True}),
    "running statistics": Case(nets.Normalised, lambda: {"accumulate_grad_batches": 2}),
    "hook after steps": Case(nets.PostHook),
    "counted": Case(nets.Counted),
    "no elements": Case(nets.WithoutElements),
    "initial state": Case(nets.InitialState),
    "types": Case(nets.MixedTypes),
    "types, clipped": Case(nets.MixedTypes, lambda: {"gradient_clip_val": 0.01}),
    "bf16-mixed": Case(nets.Float32, lambda: {"precision": "bf16-mixed"}),
    "16-mixed": Case(nets.Infinite, scaled),
    "16-mixed, clipped": Case(nets.Infinite, lambda: {**scaled(), "gradient_clip_val": 0.01}),
    "modes": Case(nets.Modes),
    "no optimizer": Case(nets.NoOptimizer),
    "own step": Case(odd.OwnStep),
    "added group": Case(odd.AddedGroup),
    "added before a step": Case(odd.AddedBeforeStep, lambda: {"gradient_clip_val": 0.01}),
    "frozen and accumulated": Case(
        odd.FrozenWhileAccumulating, lambda: {"accumulate_grad_batches": 2}, ddp={"find_unused_parameters": True}
    ),
    "thawed": Case(nets.Thawed, lambda: {"callbacks": [nets.Thaws()]}),
    "blocks": Case(blocks.Blocks),
    "blocks, accumulated and clipped": Case(
        blocks.Blocks, lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
    ),
    "blocks, steps of one entry": Case(blocks.StepsOfOneEntry),
    "blocks, clipped by the largest": Case(blocks.ClipsByLargest),
    "blocks left out": Case(blocks.LeavesOutBlock, strategy={"find_unused_parameters": True}),
}
NOT_BY_ROWS = (
    *("manual", "one bias, clipped by value", "unused", "no elements", "types", "types, clipped", "no optimizer"),
    "own step",
)
"""Cases that stage 3 refuses."""
SOME = {name: list(OPTIONS)[1:6:4] for name in ("groups and schedulers", "accumulated", "manual")}
SOME["added before a step"] = ["stage 2, overlap, views"]
SOME["frozen and accumulated"] = ["stage 2, overlap"]
SOME["one bias, clipped by value"] = ["stage 2"]
SOME["layer without optimizer, accumulated"] = ["stage 2"]
SOME["modes"] = ["stage 2, overlap"]
SOME["types, clipped"] = ["stage 2"]
SOME["blocks"] = ["stage 3"]
ALL = {name: [option for option in OPTIONS if option != "stage 3" or name not in NOT_BY_ROWS] for name in CASES}
ALL.update({name: ["stage 3"] for name in ALL if name.startswith("blocks")})
STAGE_1 = (
    *("clipped by norm", "manual", "unused", "running statistics", "hook after steps", "counted"),
    *("16-mixed, clipped", "added group", "added before a step", "frozen and accumulated"),
)
"""Cases that are trained under stage 1 too before a merge; most is the same as under stage 2."""
MOST = {
    name: [o for o in options if o in ("stage 2", "stage 3") or (o == "stage 1, overlap" and name in STAGE_1)]
    for name, options in ALL.items()
}
WANTED = {"some": SOME, "most": MOST, "all": ALL}


def fit(case: Case, strategy: Any, ranks: int, ckpt_path: Path | None = None, **more: Any) -> tuple[Any, Trainer]:
    model = case.make()
    if ranks > 1 and int(os.environ.get("LOCAL_RANK", "0")):  # its weights have to become those of rank 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    trainer = Trainer(devices=ranks, strategy=strategy, **{**QUIET, **case.trainer(), **more})
    trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer


def outcome(model: Any, trainer: Trainer, folder: Path) -> dict[str, Any]:
    """What every rank can say about a training, and the checkpoint that it came to."""
    trainer.save_checkpoint(folder / "one.ckpt")
    checkpoint = torch.load(folder / "one.ckpt", weights_only=True)
    strategy, values = trainer.strategy, torch.cat([whole(p).double().flatten() for p in model.parameters()])
    sizes = [torch.tensor(sum(tensor_bytes(optimizer.state))) for optimizer in trainer.optimizers]
    own_memory = all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    return {
        "values": strategy.all_gather(values),  # [ranks, elements]
        "state_dict": checkpoint["state_dict"],
        "optimizers": checkpoint["optimizer_states"],
        "state_bytes": strategy.all_gather(torch.stack(sizes)).reshape(-1, len(sizes)),  # [ranks, optimizers]
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "hooks_left": [len(optimizer._optimizer_step_pre_hooks) for optimizer in trainer.optimizers],
        "own_memory": own_memory,
        "steps": model.steps,
    }


def whole(parameter: Any) -> torch.Tensor:
    return getattr(parameter.detach(), "full_tensor", parameter.detach)()


def tensor_bytes(state: Any) -> list[int]:
    """Of moments and the like; counters are left out."""
    of_parameters = [of_one for key, of_one in state.items() if isinstance(key, torch.Tensor)]
    return [value.nbytes for of_one in of_parameters for name, value in of_one.items() if name != "step" and value.ndim]


def compared(ranks: int, folder: Path, wanted: Mapping[str, list[str]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, options in wanted.items():
        case = CASES[name]
        seen[name] = {"ddp": outcome(*fit(case, DDPStrategy(**case.strategy, **case.ddp), ranks), folder)}
        for option in options:
            strategy = ZeROStrategy(**OPTIONS[option], **case.strategy)
            seen[name][option] = outcome(*fit(case, strategy, ranks), folder)
        if name == "thawed":
            alone = Case(partial(nets.ThawedInOneProcess, ranks), case.trainer)
            seen[name]["ddp"] = outcome(*fit(alone, SingleDeviceStrategy("cpu"), 1), folder)
    return seen


def watched(ranks: int) -> dict[str, Any]:
    """What a model sees of its gradients."""
    options = {name: OPTIONS[name] for name in ("stage 1", "stage 2", "stage 2, overlap, views")}
    case = Case(odd.Watching, lambda: {"accumulate_grad_batches": 3, "max_epochs": 1})
    seen = {name: fit(case, ZeROStrategy(**option), ranks)[0].seen for name, option in options.items()}
    for name, make in {"bare": odd.BareBackward, "known": odd.ManualBackward, "failed": odd.FailedBackward}.items():
        model, _ = fit(Case(make), ZeROStrategy(stage=2, bucket_cap_mb=1e-4), ranks)
        seen[name] = [p.detach() for p in model.parameters()]
    return seen


def refused(ranks: int) -> dict[str, str]:
    """The messages of what cannot be trained."""
    cases: dict[str, Any] = {
        "LBFGS": partial(odd.Refused, torch.optim.LBFGS),
        "no gradient": odd.LeavesOut,
        "reentrant": odd.Reentrant,
        "sparse": odd.Sparse,
        "evaluates twice": partial(odd.Refused, odd.EvaluatesTwice),
        "evaluates twice later": partial(odd.Refused, odd.EvaluatesTwiceLater),
        "draws": partial(odd.Refused, odd.DrawsLater),
        "mixes sums": odd.MixesSums,
        "which": odd.ClipsWhich,
    }
    said = {}
    for name, make in cases.items():
        try:
            fit(Case(make), ZeROStrategy(stage=2, bucket_cap_mb=1e-4), ranks)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def refused_by_rows(ranks: int) -> dict[str, Any]:
    """The messages of what stage 3 refuses; the model is whole after those of the set-up."""
    cases: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
        "manual": (nets.Manual, {}),
        "copies": (nets.Net, {"callbacks": [EMAWeightAveraging()]}),
        "scalar": (partial(blocks.Changed, blocks.scalar), {}),
        "types": (partial(blocks.Changed, blocks.two_types), {}),
        "compiled": (partial(blocks.Changed, blocks.compiled), {}),
        "not by element": (partial(blocks.Changed, optimizer=blocks.adafactor), {}),
        "kept": (partial(blocks.Changed, optimizer=blocks.of_kept), {}),
        "no gradient": (blocks.OneLeftOut, {}),
        "other blocks": (blocks.OtherBlocks, {}),
    }
    said: dict[str, Any] = {}
    for name, (make, arguments) in cases.items():
        model, trained = make(), name in ("no gradient", "other blocks")
        before = [parameter.detach().clone() for parameter in model.parameters()]
        trainer = Trainer(devices=ranks, strategy=ZeROStrategy(stage=3), **{**QUIET, **arguments})
        try:
            trainer.fit(model)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        if trained:
            assert all(parameter.is_meta for parameter in model.parameters()), name
        else:
            assert all(map(torch.equal, before, model.parameters())), name
    return said


def built_late(ranks: int, folder: Path) -> dict[str, Any]:
    """Models built in ``configure_model``, which stay divided; on ``meta`` from a checkpoint, and from their seeds."""
    start, seen = folder / "start.ckpt", {}
    on = {device: Case(partial(blocks.BuiltLate, device)) for device in ("cpu", "meta")}
    seen["ddp"] = outcome(*fit(on["cpu"], DDPStrategy(), ranks), folder)
    fit(on["cpu"], DDPStrategy(), ranks, max_epochs=1)[1].save_checkpoint(start)
    seen["ddp, start"] = outcome(*fit(on["cpu"], DDPStrategy(), ranks, start), folder)
    runs = [("cpu", None, "full"), ("meta", start, "full"), ("meta", start, "sharded"), ("meta", None, "full")]
    for device, path, form in runs:
        strategy = ZeROStrategy(stage=3, state_dict_type=form)
        model, trainer = fit(on[device], strategy, ranks, path)
        if form == "sharded":
            trainer.save_checkpoint(folder / "parts")
            trainer = Trainer(devices=ranks, strategy=ZeROStrategy(stage=3), **QUIET)
            trainer.validate(on["meta"].make(), ckpt_path=folder / "parts", verbose=False)
            seen["validated anew"] = {name: value.item() for name, value in trainer.callback_metrics.items()}
            continue
        assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        name = f"{device}, {path and path.stem}"
        seen[name] = outcome(model, trainer, folder)
        trainer.validate(model, verbose=False)
        seen[f"{name}, validated"] = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return seen


def read(path: Path) -> Any:
    return save_and_load.load_sharded(path)[0] if path.is_dir() else torch.load(path, weights_only=True)


class SavesInValidation(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: Trainer, model: Any) -> None:
        trainer.save_checkpoint(self.path)


def saved_after_fit(ranks: int, folder: Path) -> list[Any]:
    """The optimizer states in a checkpoint after ``fit``, and in one of a later validation; also those in parts."""
    seen = []
    for form in ("full", "sharded"):
        files = [folder / f"{form}_{when}.ckpt" for when in ("before", "within", "after")]
        model, trainer = fit(Case(blocks.Blocks), ZeROStrategy(stage=3, state_dict_type=form), ranks, max_epochs=1)
        trainer.save_checkpoint(files[0])
        trainer.callbacks.append(SavesInValidation(files[1]))
        trainer.validate(model, verbose=False)
        trainer.save_checkpoint(files[2])
        (optimizer,) = trainer.optimizers
        assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())
        seen.append([read(file)["optimizer_states"] for file in files])
    return seen


def unsaved(ranks: int, folder: Path) -> dict[str, Any]:
    """What every rank says of checkpoints in parts that one rank cannot write, and whether the one before is whole."""
    model, trainer = fit(Case(odd.SavesMore), ZeROStrategy(**IN_PARTS["in parts"]), ranks, max_epochs=1)
    last, path = trainer.global_rank == ranks - 1, folder / "in_parts"
    trainer.save_checkpoint(path)
    said: dict[str, Any] = {}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10 if last else unlimited[0], unlimited[1]))
    said["file too large"] = said_of(lambda: trainer.save_checkpoint(path))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    model.more = last
    said["more on one rank"] = said_of(lambda: trainer.save_checkpoint(path))
    if trainer.is_global_zero:
        left, parts = save_and_load.load_sharded(path)[0]["state_dict"], list(path.iterdir())
        said["left"] = all(torch.equal(left[name], value) for name, value in model.state_dict().items())
        said["files"] = len(parts)
    return said


def said_of(action: Callable[[], object]) -> list[str]:
    """The error of each rank."""
    try:
        action()
        said = ""
    except RuntimeError as error:
        said = str(error)
    everyone = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, said)
    return everyone


class SavesInFit(Callback):
    """Saves at the end of each epoch, beside what goes on then."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, model: Any) -> None:
        trainer.save_checkpoint(self.path)


def resumed(ranks: int, strategy: Any, epochs: int, start: Path | None, end: Path) -> None:
    fit(Case(nets.Shared), strategy, ranks, max_epochs=epochs, ckpt_path=start, callbacks=[SavesInFit(end)])


if __name__ == "__main__":
    ranks, what, results = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seen: Any = None
    if what in WANTED:
        seen = compared(ranks, results.parent, WANTED[what])
    elif what == "others":
        seen = {
            "watched": watched(ranks),
            "refused": refused(ranks),
            "refused by rows": refused_by_rows(ranks),
            "built late": built_late(ranks, results.parent),
            "saved after fit": saved_after_fit(ranks, results.parent),
            "unsaved": unsaved(ranks, results.parent),
        }
    elif what == "doomed":
        fit(Case(odd.Doomed), "zero", ranks)
    else:  # strategies, separated by slashes: each trains for an epoch, from where the one before has saved
        for k, name in enumerate(what.split("/"), int(sys.argv[4])):
            made = DDPStrategy() if name == "ddp" else ZeROStrategy(**{**OPTIONS, **IN_PARTS}[name])
            start, end = (results.with_name(f"{number}.ckpt") for number in (k, k + 1))
            resumed(ranks, made, k + 1, start if start.exists() else None, end)
    if torch.distributed.get_rank() == 0 and seen is not None:
        torch.save(seen, results)
    torch.distributed.destroy_process_group()
