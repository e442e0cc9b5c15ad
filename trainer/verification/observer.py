"""The callback that observes a run, under any strategy, through Lightning's public interface.

A step is complete when it is over: at the end of its last batch, or when another optimizer is about to step.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from strategies.common.torch_compat import BatchNorm, TorchDispatchMode
from strategies.lightning.compat import Callback, LightningModule, Trainer, unwrapped
from strategies.sharding.divided_layers import tensor_group
from trainer.verification.observed_run import ObservedRun, ObservedStep, leaves, on_host

NOT_COMPARED = ("callbacks", "loops", "relay", "pytorch-lightning_version", "datamodule")
"""Keys of a checkpoint that describe the run rather than the model."""


def seed_of_batch(seed: int, batch: int) -> int:
    """Return the seed for the random numbers of a batch, which is the same for every number of ranks."""
    return (seed * 1_000_003 + batch) % 2**32


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


class ValuesObserver(Callback):
    """Observes losses, values, states, logged values, one validation batch and the checkpoint.

    Args:
        name: The name of the run, for messages.
        seed: Together with the number of a batch, it seeds the random numbers of this batch.
        folder: The folder for the temporary checkpoint.
        ranks: Number of ranks among which batches are divided, if one process runs the batches of all ranks.
        steps: Number of steps after which the run stops early; ``None`` to make all steps.
        advance: Called after each step.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        folder: Path,
        *,
        ranks: int = 1,
        steps: int | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        self.observed = ObservedRun(name, has_gradients=False, stopped_after=steps)
        self._seed, self._folder, self._ranks, self._advance = seed, folder, ranks, advance
        self._step: ObservedStep | None = None
        self._num_steps = 0
        self._kept_buffers: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the initial values and how the model is divided."""
        observed = self.observed
        observed.initial = values_of(trainer, pl_module)
        observed.buffers = [name for name, _ in pl_module.named_buffers(remove_duplicate=False)]
        observed.stage_of = stages_of(trainer, pl_module)
        observed.ties = ties_of(pl_module)
        observed.numbered = numbers_of(trainer, pl_module)
        observed.facts = {**facts_of(trainer), **routers_of(pl_module)}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed the generators for the batch."""
        seed_generators(seed_of_batch(self._seed, batch_idx * trainer.world_size + trainer.global_rank))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss, and the step if the batch has completed a step."""
        if self._ranks > 1:
            self._keep_buffers_of_first_rank(pl_module, batch_idx)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided the loss by the number of batches of a step.
        share = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self.observed.losses.append(float(loss) * share if isinstance(loss, Tensor | float) else None)
        self.observed.logged.append(leaves(dict(trainer.callback_metrics)))
        if trainer.global_step > self._num_steps:
            if self._step is None:  # no hook has begun the step
                self._begin(ObservedStep(len(self.observed.losses)))
            self._end_step(trainer, pl_module)
            self._num_steps = trainer.global_step
            if self._advance is not None:
                self._advance(self._num_steps)
            if self.observed.stopped_after is not None and self._num_steps >= self.observed.stopped_after:
                trainer.should_stop = True  # max_steps is that of all runs, because schedules may depend on it

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Seed the generators: every rank validates the same batch, and one process validates it for each rank."""
        seed_generators(seed_of_batch(self._seed, 0))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note the output of ``validation_step``."""
        name = f"output of loader {dataloader_idx}" if dataloader_idx else "output"
        self.observed.validation.update(leaves(outputs, name) if outputs is not None else {})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the metrics of the validation."""
        known = self.observed.logged[-1] if self.observed.logged else {}
        now = leaves(dict(trainer.callback_metrics))
        self.observed.validation.update({name: value for name, value in now.items() if name not in known})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the logged values of the epoch, and write a checkpoint."""
        now = leaves(dict(trainer.callback_metrics))
        of_validation = self.observed.validation
        self.observed.logged_of_epoch = [{name: value for name, value in now.items() if name not in of_validation}]
        path = self._folder / "verified.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            self.observed.facts["checkpoint"] = str(path)

    def _begin(self, step: ObservedStep) -> None:
        self._step = step
        self.observed.steps.append(step)

    def _end_step(self, trainer: Trainer, model: LightningModule) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        step.values = values_of(trainer, model)
        for number, optimizer in enumerate(trainer.optimizers):
            state = trainer.strategy.optimizer_state(optimizer)
            step.states.update(leaves(state.get("state", {}), str(number)))

    def _keep_buffers_of_first_rank(self, model: LightningModule, batch: int) -> None:
        """Undo changes to buffers by batches of all ranks except the first, as under DDP."""
        buffers = dict(model.named_buffers())
        if batch % self._ranks == 0:
            self._kept_buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            return
        for name, kept in self._kept_buffers.items():
            if not torch.equal(buffers[name], kept):
                self.observed.keeps_first_buffers = True
                buffers[name].copy_(kept)


class GradientsObserver(ValuesObserver):
    """Observes gradients and norms too, in a hook that makes some strategies wait for the end of the backward pass.

    Args:
        args: As for :class:`ValuesObserver`.
        kwargs: As for :class:`ValuesObserver`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observed.has_gradients = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the gradients before clipping, and their norm as the strategy computes it."""
        self._end_step(trainer, pl_module)  # the step of another optimizer
        step = ObservedStep(len(self.observed.losses) + 1, hyperparameters=hyperparameters_of(trainer))
        step.gradients = gradients_of(trainer, pl_module)
        step.norm = norm_of(trainer, unwrapped(optimizer))
        self._begin(step)


def values_of(trainer: Trainer, model: LightningModule) -> dict[str, Tensor]:
    """Return parameters and buffers of all stages. Every rank calls this, and the first rank gets the values."""
    state = trainer.strategy.lightning_module_state_dict()
    values = {name: on_host(value) for name, value in state.items() if isinstance(value, Tensor)}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in values and not (type(buffer) is Tensor and buffer.is_meta):
            values[name] = on_host(buffer)  # a buffer that is not in the state dict
    return values


def gradients_of(trainer: Trainer, model: LightningModule) -> dict[str, Tensor | None]:
    """Return the whole gradient of every parameter. Every rank calls this."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        found[name] = None if parameter.grad is None else on_host(parameter.grad)
    pipeline = getattr(trainer.strategy, "pipeline", None)
    if pipeline is not None and pipeline.divided is not None:
        own = {name: gradient for name, gradient in found.items() if gradient is not None}
        found |= pipeline.divided.whole_weights(own, tensor_group())
    return found


def hyperparameters_of(trainer: Trainer) -> dict[str, Any]:
    """Return the settings of every parameter group, by optimizer, group and name."""
    found: dict[str, Any] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        for place, group in enumerate(unwrapped(optimizer).param_groups):
            own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found.update(leaves(own, f"{number}.{place}"))
    return found


def norm_of(trainer: Trainer, optimizer: Optimizer) -> float | None:
    """Return the global norm as the strategy computes it, without changing the gradients."""
    clip = getattr(trainer.strategy, "clip_grad_norm_", None)
    if clip is not None:
        return float(clip(float("inf"), optimizer=optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return float(nn.utils.clip_grad_norm_(parameters, float("inf")))


def stages_of(trainer: Trainer, model: LightningModule) -> dict[str, str]:
    """Return the stage of each parameter and buffer of a pipeline, by name; an empty dict for any other strategy."""
    pipeline = getattr(trainer.strategy, "pipeline", None)
    if pipeline is None or len(pipeline.stages) < 2:
        return {}
    paths = {id(module): path for path, module in model.named_modules()}
    path = paths.get(id(pipeline.module), "")  # layers of several lists have their names in the model
    last = f"stage {len(pipeline.stages) - 1} (the driver)"
    stage_of_layer = {
        f"{path}.{name}".strip("."): last if i == len(pipeline.stages) - 1 else f"stage {i}"
        for i, stage in enumerate(pipeline.stages)
        for name in stage._modules
    }
    names = [
        name
        for name, _ in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    ]
    return {
        name: next((stage for layer, stage in stage_of_layer.items() if name.startswith(f"{layer}.")), last)
        for name in names
    }


def ties_of(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def numbers_of(trainer: Trainer, model: nn.Module) -> dict[str, str]:
    """Return the names of the optimizers' parameters, by optimizer number and parameter number in its state dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for number, optimizer in enumerate(trainer.optimizers):
        own = [p for group in unwrapped(optimizer).param_groups for p in group["params"]]
        found.update({f"{number}.{place}": names[id(p)] for place, p in enumerate(own) if id(p) in names})
    return found


def facts_of(trainer: Trainer) -> dict[str, Any]:
    """Return how the model is divided."""
    pipeline = getattr(trainer.strategy, "pipeline", None)
    if pipeline is None:
        return {}
    settings = pipeline.settings
    return {
        "balance": list(pipeline.balance),
        "microbatches": settings.microbatches,
        "schedule": settings.schedule,
        "recomputed": settings.checkpoint,
    }


def routers_of(model: nn.Module) -> dict[str, Any]:
    """Return the name of the first module that adds the auxiliary loss of routers, if such a module exists."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False) is True:
            return {"router": name}
    return {}


# What only a run in one process can observe


class StepWatch:
    """Watches the first ``training_step`` of a model in one process.

    It notes which modules draw random numbers, the floating-point types, and the order of the gradients.

    Args:
        model: The model.
        observed: Receives what is observed.
    """

    def __init__(self, model: LightningModule, observed: ObservedRun) -> None:
        self._model, self._observed = model, observed
        self._handles: list[RemovableHandle] = []
        self._before: list[dict[str, Any]] = []
        self._mode = _Narrowest()

    def begin(self) -> None:
        """Start watching; :meth:`end` stops it."""
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_: self._before.append(_generators())))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: self._note_order(names[id(p)]))
                self._handles.append(hook)
        self._observed.norm_layers = [
            name
            for name, module in self._model.named_modules()
            if isinstance(module, BatchNorm) and (module.training or module.running_mean is None)
        ]
        self._whole = _generators()

    def forward(self) -> "_Narrowest":
        """Return a context for ``training_step`` that watches types."""
        return self._mode

    def end(self) -> None:
        """Stop watching; called when the step is over."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._observed.narrowest = self._mode.narrowest

    def end_of_forward(self) -> None:
        """Note random numbers that are drawn outside modules."""
        for kind, state in _generators().items():
            if not _same(self._whole[kind], state) and not self._observed.draws.get(kind):
                self._observed.draws[kind] = ["training_step"]

    def _note_order(self, name: str) -> None:
        if name not in self._observed.order:
            self._observed.order.append(name)

    def _after(self, module: nn.Module, *_: Any) -> None:
        before, now = self._before.pop(), _generators()
        changed = [kind for kind, state in now.items() if not _same(before[kind], state)]
        for kind in changed:
            inner = self._observed.draws.setdefault(kind, [])
            name = next(name for name, each in self._model.named_modules() if each is module)
            if not any(known.startswith(f"{name}.") or known == name for known in inner) and name:
                inner.append(name)


class _Narrowest(TorchDispatchMode):
    """Notes the least precise floating-point type among the results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.narrowest = "float64"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
                name = str(value.dtype).removeprefix("torch.")
                with suppress(TypeError):
                    if torch.finfo(value.dtype).eps > torch.finfo(getattr(torch, self.narrowest)).eps:
                        self.narrowest = name
        return result


def _generators() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "random": random.getstate()}


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor):
        return torch.equal(before, now)
    if isinstance(before, tuple) and isinstance(before[0], str):  # the state of numpy's generator
        return bool(numpy.array_equal(before[1], now[1])) and before[2:] == now[2:]
    return bool(before == now)
