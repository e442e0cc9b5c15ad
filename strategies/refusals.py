"""What a pipeline cannot do (yet), each said in one message before it could go wrong."""

from typing import Any

from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.plugins import ClusterEnvironment
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS, Optimizer


def check_launch(environment: ClusterEnvironment | None, num_nodes: int) -> None:
    """Checks that this is the only process of the run.

    Raises:
        MisconfigurationException: If processes have been started from outside, or are to be on several hosts.
    """
    processes = 1
    ours = isinstance(environment, LightningEnvironment)  # a replica's process looks like one from outside
    if environment is not None and not ours and environment.creates_processes_externally:
        processes = environment.world_size()
    if num_nodes > 1 or processes > 1:
        raise MisconfigurationException(
            "RPCSequentialStrategy starts its processes itself, on one host; got "
            f"num_nodes={num_nodes} and {processes} processes started from outside ({type(environment).__name__}). Run "
            "a single process with num_nodes=1: torchrun, SLURM and several hosts are not supported yet."
        )


def check_callbacks(trainer: Any) -> None:
    """Checks that no callback averages or prunes weights, which it would do on the driver's stage alone.

    Raises:
        MisconfigurationException: If one does.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging | ModelPruning):
            raise MisconfigurationException(
                f"RPCSequentialStrategy does not support {type(callback).__name__} yet: it would work on the weights "
                "of the last stage only. Leave it out."
            )


def check_automatic_optimization(model: LightningModule, schedule: str) -> None:
    """Checks that Lightning makes the steps, if the schedule runs ``training_step`` once per micro-batch.

    Raises:
        MisconfigurationException: If the model makes them itself.
    """
    if schedule != "gpipe" and not model.automatic_optimization:
        raise MisconfigurationException(
            f"schedule={schedule!r} runs training_step once per micro-batch, so manual optimization would step after "
            "each of them. Use schedule='gpipe', or automatic optimization."
        )


def check_loggers(trainer: Any) -> None:
    """Checks that no logger wants to trace the model, which would see the driver's stage alone.

    Raises:
        MisconfigurationException: If one does.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and logger._log_graph:
            raise MisconfigurationException(
                f"{type(logger).__name__}(log_graph=True) traces the model in one process, and its layers live in "
                "several. Leave log_graph out; the model summary shows which layer is where."
            )


def check_deferred_batch_norm(module: nn.Module, path: str) -> None:
    """Checks that ``deferred_batch_norm`` has something to defer.

    Raises:
        MisconfigurationException: If not.
    """
    if not any(isinstance(child, _BatchNorm) for child in module.modules()):
        raise MisconfigurationException(
            f"deferred_batch_norm=True has no effect: {path} has no BatchNorm layer. Leave it out."
        )


def warn_of_time_first(module: nn.Sequential, path: str) -> None:
    """Warns if a layer takes time as the first dimension, which a pipeline splits as the batch."""
    for name, layer in module.named_children():
        if getattr(getattr(layer, "self_attn", layer), "batch_first", True) is False:
            rank_zero_warn(
                f"Layer {name} of {path}, a {type(layer).__name__}, has batch_first=False, so its first dimension "
                "is time; a pipeline splits the first dimension into micro-batches. Give it batch_first=True."
            )
            return


def check_optimizer(optimizer: Optimizer) -> None:
    """Checks that each process can step its own parameters by itself.

    Raises:
        MisconfigurationException: If it cannot.
    """
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            "RPCSequentialStrategy cannot run LBFGS: it evaluates the loss several times within a step and needs all "
            "parameters in one process. Use an optimizer that makes one update from one gradient, such as AdamW."
        )
    inner = [type(value).__name__ for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if inner:
        raise MisconfigurationException(
            f"RPCSequentialStrategy cannot run {type(optimizer).__name__}, which steps another optimizer ({inner[0]}) "
            "within its own step: the other stages would not hear of that. Return the inner optimizer."
        )


def check_loss(loss: Tensor | Any) -> None:
    """Checks that a loss has a value.

    Raises:
        MisconfigurationException: If it was computed from parameters that live on another stage.
    """
    if isinstance(loss, Tensor) and loss.is_meta:
        raise MisconfigurationException(
            "The loss was computed from parameters of layers that live on other processes (their values are not "
            "here), for example by a penalty on weights. Use the optimizer's weight_decay, or compute such a term "
            "within a layer."
        )
