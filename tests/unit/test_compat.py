"""The private names of torch, Lightning and torchmetrics that Relay uses exist in the installed versions.

A new version may drop a private name without notice. Each name is listed here with its use, so that a failure tells
which version no longer has it and what is affected. Private names may be used in the three ``compat`` modules only, and
where a class of Relay extends a class of these packages.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import pytest
from paths import ROOT

_TORCH_COMPAT = Path("strategies/common/torch_compat.py")
_LIGHTNING_COMPAT = Path("strategies/lightning/compat.py")
_TRANSFORMERS_COMPAT = Path("strategies/common/transformers_compat.py")
_LIGHTNING_CLI = Path("trainer/cli/lightning_cli.py")

_IN_TORCH_COMPAT = {
    "torch.Tensor._version": "notice whether a layer has changed its input in place",
    "torch.UntypedStorage._cdata": "tell whether two tensors share a storage",
    "torch.storage.TypedStorage._untyped_storage": "leave the values of large tensors out of a pickle",
    "torch.storage.TypedStorage(_internal)": "put the values of large tensors into what was pickled without them",
    "torch._C.DisableTorchFunctionSubclass": "read facts of stand-ins without calling their operators",
    "torch._foreach_norm": "compute the norms of gradients as clip_grad_norm_ does",
    "torch._ops.OpOverload._schema": "name an operator for another process",
    "torch._ops.OpOverload._overloadname": "name an operator for another process",
    "torch.Tensor._backward_hooks": "refuse hooks on parameters that go to a worker",
    "torch.Tensor._post_accumulate_grad_hooks": "refuse hooks on parameters that go to a worker",
    "torch.nn.Module._forward_pre_hooks": "notice and remove hooks of a layer",
    "torch.nn.Module._forward_hooks": "notice and remove hooks of a layer",
    "torch.nn.Module._backward_pre_hooks": "notice that hooks of a layer have changed",
    "torch.nn.Module._backward_hooks": "notice that hooks of a layer have changed",
    "torch.nn.Module._parameters": "give parameters to the copies of DataParallel",
    "torch.nn.Module._state_dict_hooks": "copy a module without the pipeline's own hooks",
    "torch.nn.Module._load_state_dict_pre_hooks": "copy a module without the pipeline's own hooks",
    "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks": "apply hooks to a state dict before it is divided",
    "torch.nn.Module._non_persistent_buffers_set": "check a state dict before it is loaded",
    "torch.nn.Module._compiled_call_impl": "take over calls of blocks; warn that compile() is lost",
    "torch.nn.Module._call_impl": "run a block whose calls are taken over",
    "torch.Tensor._make_wrapper_subclass": "make a placeholder for the output of a block that has not run",
    "torch.Tensor._make_subclass": "make a fetched sparse gradient read-only",
    "torch.Tensor._indices": "count the bytes of a sparse tensor",
    "torch.Tensor._values": "tell whether two sparse tensors share their values; count the bytes of a sparse tensor",
    "torch.nn.Module._apply": "move a copy of the model whose layers are on workers",
    "torch.distributed._composable.contract.REGISTRY_KEY": "make a model whole again after ZeRO stage 3",
    "torch.distributed._composable.contract.STATE_KEY": "make a model whole again after ZeRO stage 3",
    "torch.distributed._composable_state._module_state_mapping": "make a model whole again after ZeRO stage 3",
    "torch._C._are_functorch_transforms_active": "compute weight gradients at once in a transformed function",
    "torch._C._will_engine_execute_node": "refuse torch.autograd.grad through a pipeline",
    "torch._C._current_graph_task_id": "tell one backward pass from the next under ZeRO",
    "torch.autograd.Variable._execution_engine": "run code at the end of a backward pass under ZeRO",
    "torch.distributed.autograd._current_context": "tell whether a RemoteModule is used in distributed autograd",
    "torch.distributed.autograd._init": "join RPC without init_rpc",
    "torch.autograd._profiler_enabled": "label layers in a trace",
    "torch.autograd._enable_record_function": "keep communication out of a trace",
    "torch._subclasses.fake_tensor.FakeTensorMode": "find the places of tensors in a checkpoint without reading them",
    "torch.UntypedStorage._checkpoint_offset": "find the places of tensors in a checkpoint without reading them",
    **dict.fromkeys(
        (
            "torch._C._len_torch_function_stack",
            "torch._C._pop_torch_function_stack",
            "torch._C._push_on_torch_function_stack",
            "torch._C._len_torch_dispatch_stack",
            "torch._C._pop_torch_dispatch_stack",
            "torch._C._push_on_torch_dispatch_stack",
            "torch._C._autograd._top_saved_tensors_default_hooks",
            "torch._C._autograd._pop_saved_tensors_default_hooks",
            "torch._C._autograd._push_saved_tensors_default_hooks",
        ),
        "keep modes that training_step has entered away from code that runs while it is suspended",
    ),
    "torch.amp.GradScaler._unscale_grads_": "divide the gradients of all stages by the loss scale",
    "torch.distributed.distributed_c10d._world": "start anew after a rank has failed",
    "torch.distributed.distributed_c10d._get_default_group": "use the default process group",
    "torch.distributed.distributed_c10d._get_default_store": "notice the end of rank 0",
    "torch.distributed.ProcessGroup._get_backend": "read the time-out of a group",
    "torch.distributed.ProcessGroup._allgather_base": "gather a weight over a private process group, without copies",
    "torch.distributed.ProcessGroup._set_default_backend": "connect a private process group",
    "torch.distributed.ProcessGroup._register_backend": "connect a private process group",
    "torch.distributed.ProcessGroupGloo._set_default_timeout": "set the time-out of a private process group",
    "torch.distributed.ProcessGroupGloo._Options": "connect a private process group",
    "torch.distributed.ProcessGroupGloo._Options._devices": "choose the network interface",
    "torch.distributed.ProcessGroupGloo._Options._timeout": "set the time-out for connecting",
    "torch.distributed._broadcast_coalesced": "broadcast the buffers of a model",
    "torch.distributed.utils._verify_param_shape_across_processes": "check that ranks have the same model",
    "torch.distributed.remote_device._remote_device": "read the address of a RemoteModule or a WithDevice",
    "torch.distributed.rpc.api._is_current_rpc_agent_set": "tell whether RPC is initialised",
    "torch.distributed.rpc.api._get_current_rpc_agent": "list the RPC workers",
    "torch.distributed.rpc.api._init_rpc_states": "join RPC without init_rpc",
    "torch.distributed.rpc._init_counter": "refuse a second RPC session",
    "torch.distributed.rpc._init_rpc_backend": "start RPC for a Pipe in one process",
    "torch.distributed.rpc.TensorPipeRpcBackendOptions(_transports)": "use TCP for RPC",
    "torch.distributed.rpc.TensorPipeRpcBackendOptions(_channels)": "open no listening sockets for tensors",
    "torch.nn.modules.batchnorm._BatchNorm": "find BatchNorm layers",
    "torch.nn.modules.batchnorm._NormBase": "find layers with running statistics",
    "torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX": "find the extra states in a state dict",
    "torch.nn.modules.module._has_any_global_hook": "tell whether a layer runs torch's code only",
    "torch.utils._python_dispatch.TorchDispatchMode": "find the operations on values of workers",
    **{
        f"torch.utils._pytree.{name}": "walk through nested structures of tensors"
        for name in (
            "SequenceKey",
            "keystr",
            "TreeSpec",
            "register_pytree_node",
            "tree_flatten",
            "tree_flatten_with_path",
            "tree_leaves",
            "tree_map",
            "tree_map_only",
            "tree_map_with_path",
            "tree_unflatten",
        )
    },
    "torch.utils.data._utils.worker._generate_state": "seed numpy in the workers of a resumed loader",
    "torch.utils.data.DataLoader._index_sampler": "resume a loader in the middle of an epoch",
    "torch.utils.data.DataLoader._iterator": "keep persistent workers of a training loader apart from the user's",
    "torch.utils.data.DataLoader._get_iterator": "tell whether a loader draws indices as torch does",
    "torch.utils.data.RandomSampler._num_samples": "tell whether the order of samples can be drawn again",
}

_FABRIC, _LIGHTNING = "lightning_fabric", "pytorch_lightning"
_RESULT = f"{_LIGHTNING}.trainer.connectors.logger_connector.result"

_IN_LIGHTNING_COMPAT = {
    f"{_LIGHTNING}.LightningModule._trainer": "connect a model to a Trainer for a plan",
    f"{_LIGHTNING}.Trainer._data_connector": "connect a model to a Trainer for a plan",
    f"{_LIGHTNING}.Trainer._signal_connector": "requeue a job",
    f"{_LIGHTNING}.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn": "requeue a job",
    f"{_LIGHTNING}.loops._EvaluationLoop": "resume a run",
    f"{_LIGHTNING}.loops.training_epoch_loop._TrainingEpochLoop._should_accumulate": "tell when nothing is logged",
    f"{_LIGHTNING}.loops._EvaluationLoop._has_run": "resume a run",
    f"{_FABRIC}.utilities.distributed._DatasetSamplerWrapper": "find the user's sampler in a resumed run",
    f"{_FABRIC}.utilities.distributed._destroy_dist_connection": "end an NCCL group at exit",
    f"{_FABRIC}.utilities.distributed._distributed_is_initialized": "tell whether replicas are connected",
    f"{_FABRIC}.utilities.distributed._init_dist_connection": "connect replicas",
    f"{_FABRIC}.utilities.distributed._set_num_threads_if_needed": "divide the cores among ranks",
    f"{_FABRIC}.utilities.distributed._sync_ddp_if_available": "reduce logged values over replicas",
    f"{_FABRIC}.utilities.optimizer._optimizers_to_device": "load optimizer states under ZeRO",
    f"{_FABRIC}.utilities.seed._collect_rng_states": "leave random states as they were after a plan",
    f"{_FABRIC}.utilities.seed._set_rng_states": "leave random states as they were after a plan",
    f"{_FABRIC}.utilities.types._Stateful": "recognise loaders and datasets with state_dict",
    f"{_LIGHTNING}.core.optimizer._MockOptimizer": "recognise a model without optimizers",
    f"{_LIGHTNING}.loops.fetchers._DataFetcher": "resume a run",
    f"{_LIGHTNING}.loops.fetchers._DataLoaderIterDataFetcher": "resume a run",
    f"{_LIGHTNING}.loops.fetchers._PrefetchDataFetcher": "resume a run",
    f"{_LIGHTNING}.loops.fit_loop._FitLoop": "resume a run",
    f"{_LIGHTNING}.loops.training_epoch_loop._TrainingEpochLoop": "resume a run",
    f"{_LIGHTNING}.overrides.distributed._register_ddp_comm_hook": "register communication hooks of DDP on CPU",
    f"{_LIGHTNING}.overrides.distributed._sync_module_states": "copy the weights of rank 0 under ZeRO",
    f"{_LIGHTNING}.plugins.io.wrapper._WrappingCheckpointIO": "write files atomically inside a wrapping CheckpointIO",
    f"{_LIGHTNING}.strategies.launchers._MultiProcessingLauncher": "start ranks whose errors name a lost host",
    f"{_LIGHTNING}.strategies.launchers._SubprocessScriptLauncher": "start ranks and watch them",
    f"{_LIGHTNING}.strategies.launchers.launcher._Launcher": "start ranks",
    f"{_LIGHTNING}.trainer.connectors.checkpoint_connector._CheckpointConnector": "resume a run",
    f"{_LIGHTNING}.trainer.connectors.data_connector._DataLoaderSource": "resume a run",
    f"{_LIGHTNING}.trainer.connectors.logger_connector._LoggerConnector": "resume a run",
    f"{_RESULT}._Metadata": "resume epoch means",
    f"{_RESULT}._ResultCollection": "resume epoch means",
    f"{_RESULT}._ResultMetric": "resume epoch means",
    f"{_RESULT}._Sync": "resume epoch means",
    f"{_LIGHTNING}.utilities.argparse._defaults_from_env_vars": "accept PL_TRAINER_* variables",
    f"{_LIGHTNING}.utilities.combined_loader._SUPPORTED_MODES": "resume several loaders",
    f"{_LIGHTNING}.utilities.combined_loader._ModeIterator._idx": "resume several loaders",
    f"{_LIGHTNING}.utilities.combined_loader._MaxSizeCycle._consumed": "resume several loaders",
    f"{_LIGHTNING}.utilities.combined_loader._shutdown_workers_and_reset_iterator": "resume persistent workers",
    f"{_LIGHTNING}.utilities.combined_loader.CombinedLoader._mode": "resume several loaders",
    f"{_LIGHTNING}.strategies.DDPStrategy._start_method": "tell how ranks start",
    f"{_LIGHTNING}.strategies.DDPStrategy._process_group_backend": "check the name of a backend",
    f"{_LIGHTNING}.strategies.DDPStrategy._get_process_group_backend": "connect ranks on the loopback interface",
    f"{_LIGHTNING}.Trainer._run_stage": "tell an error of set-up from one of the run",
    f"{_LIGHTNING}.Trainer._logger_connector": "resume metrics",
    f"{_LIGHTNING}.loops.fit_loop._FitLoop._combined_loader": "find the size of the smallest batch",
    f"{_LIGHTNING}.strategies.strategy.Strategy._lightning_module": "connect a model to a Trainer for a plan",
    f"{_LIGHTNING}.loops.training_epoch_loop._TrainingEpochLoop._batches_that_stepped": "count steps as loggers do",
    f"{_LIGHTNING}.trainer.connectors.logger_connector._LoggerConnector._callback_metrics": "resume metrics",
    "torchmetrics.Metric._defaults": "resume epoch means",
    "torchmetrics.Metric._forward_cache": "log a metric once for all micro-batches",
    f"{_FABRIC}.utilities.distributed._DatasetSamplerWrapper._sampler": "find the user's sampler in a resumed run",
    f"{_LIGHTNING}.LightningModule._apply_batch_transfer_handler": "prepare the example input for the summary",
    f"{_LIGHTNING}.LightningModule._on_before_batch_transfer": "prepare the example input for the summary",
    f"{_LIGHTNING}.LightningModule._device": "place a replica of DataParallel",
    f"{_LIGHTNING}.callbacks.WeightAveraging._average_model": "divide the average of weights over stages",
    f"{_LIGHTNING}.callbacks.StochasticWeightAveraging._average_model": "divide the average of weights over stages",
    f"{_LIGHTNING}.loggers.TensorBoardLogger._log_graph": "refuse to trace a model whose layers are on workers",
    f"{_LIGHTNING}.callbacks.ModelSummary._summary": "show stages in the summary",
    f"{_LIGHTNING}.callbacks.ModelSummary._max_depth": "show stages in the summary",
    f"{_LIGHTNING}.profilers.PyTorchProfiler._register": "label the modules of the driver in a trace",
    f"{_LIGHTNING}.profilers.PyTorchProfiler._record_module_names": "label the modules of the driver in a trace",
    f"{_LIGHTNING}.profilers.PyTorchProfiler._emit_nvtx": "make traces of stages",
    f"{_LIGHTNING}.profilers.PyTorchProfiler._export_to_chrome": "make traces of stages",
    f"{_LIGHTNING}.profilers.PyTorchProfiler._profiler_kwargs": "make traces of stages",
    f"{_LIGHTNING}.profilers.PyTorchProfiler._prepare_filename": "name the traces of stages",
    "jsonargparse._typehints.ActionTypeHint._typehint": "tell which type an argument expects",
}

_LAUNCHERS = f"{_LIGHTNING}.strategies.launchers"
_STRATEGY = f"{_LIGHTNING}.strategies.strategy.Strategy"
_DDP = f"{_LIGHTNING}.strategies.ddp.DDPStrategy"
_FIT_LOOP = f"{_LIGHTNING}.loops.fit_loop._FitLoop"
_EPOCH_LOOP = f"{_LIGHTNING}.loops.training_epoch_loop._TrainingEpochLoop"
_COMBINED = f"{_LIGHTNING}.utilities.combined_loader.CombinedLoader"
_SUMMARY = f"{_LIGHTNING}.utilities.model_summary.model_summary.ModelSummary"
_MODULE = "torch.nn.modules.module.Module"

_IN_TRANSFORMERS_COMPAT = {
    "transformers.PreTrainedModel._no_split_modules": "find the blocks of a model",
    "transformers.utils.output_capturing._active_collector": "bring back what hooks capture in blocks",
    "transformers.utils.output_capturing.install_output_capuring_hook": "find the hooks that capture outputs",
}

_AUTOMATIC = f"{_LIGHTNING}.loops.optimization.automatic._AutomaticOptimization"
_EXTENDED = {
    "argparse._ActionsContainer._actions": "list the keys of a configuration",
    "jsonargparse._core.ArgumentParser._subcommands_action": "list the keys of a configuration",
    f"{_LIGHTNING}.cli.LightningCLI._add_instantiators": "tell which constructor has refused its arguments",
    f"{_LIGHTNING}.cli.LightningCLI._prepare_subcommand_parser": "build the parser of the chosen command only",
    f"{_LIGHTNING}.cli.LightningCLI._parse_ckpt_path": "explain a checkpoint that cannot be read",
    f"{_LIGHTNING}.cli.LightningCLI._run_subcommand": "explain a refused configuration",
    f"{_FABRIC}.plugins.environments.lightning.LightningEnvironment._main_port": "hold the port of a run",
    f"{_FIT_LOOP}._combined_loader": "resume a run",
    f"{_FIT_LOOP}._combined_loader_states_to_load": "resume a run",
    f"{_FIT_LOOP}._data_fetcher": "resume a run",
    f"{_FIT_LOOP}._data_source": "resume a run",
    f"{_FIT_LOOP}._last_train_dl_reload_epoch": "resume a run",
    f"{_FIT_LOOP}._load_combined_loader_states": "resume a run",
    f"{_FIT_LOOP}._restarting": "resume a run",
    f"{_EPOCH_LOOP}._num_ready_batches_reached": "resume a run",
    f"{_LIGHTNING}.loops.loop._Loop._restarting": "resume a run",
    f"{_EPOCH_LOOP}._results": "resume epoch means",
    f"{_EPOCH_LOOP}._save_loggers_on_train_batch_end": "tell that a batch has ended",
    f"{_EPOCH_LOOP}._skip_next_val": "resume a run",
    f"{_DDP}._ddp_comm_hook": "register communication hooks of DDP on CPU",
    f"{_DDP}._ddp_comm_state": "register communication hooks of DDP on CPU",
    f"{_DDP}._ddp_comm_wrapper": "register communication hooks of DDP on CPU",
    f"{_DDP}._register_ddp_hooks": "register communication hooks of DDP on CPU",
    f"{_DDP}._setup_model": "divide a model under ZeRO stage 3",
    f"{_DDP}._timeout": "set the time-out of ZeRO's groups",
    f"{_LIGHTNING}.strategies.parallel.ParallelStrategy._layer_sync": "convert BatchNorm layers in time",
    f"{_LAUNCHERS}.subprocess_script._SubprocessScriptLauncher._call_children_scripts": "start ranks",
    f"{_STRATEGY}._checkpoint_io": "write files atomically",
    f"{_STRATEGY}._configure_launcher": "check settings when the Trainer is built, and start ranks",
    f"{_STRATEGY}._launcher": "start ranks",
    f"{_STRATEGY}._lightning_optimizers": "follow calls of the user's optimizers",
    f"{_LIGHTNING}.trainer.connectors.checkpoint_connector._CheckpointConnector._loaded_checkpoint": "resume a run",
    f"{_LIGHTNING}.trainer.connectors.checkpoint_connector._CheckpointConnector._restore_modules_and_callbacks": (
        "resume a run"
    ),
    f"{_LIGHTNING}.trainer.trainer.Trainer._checkpoint_connector": "resume a run",
    f"{_LIGHTNING}.trainer.trainer.Trainer._logger_connector": "resume a run",
    f"{_COMBINED}._iterator": "resume several loaders",
    f"{_COMBINED}._limits": "resume several loaders",
    f"{_COMBINED}._mode": "resume several loaders",
    f"{_COMBINED}._state_dicts": "resume several loaders",
    f"{_SUMMARY}._flop_counter": "show stages in the summary",
    f"{_SUMMARY}._forward_example_input": "show stages in the summary",
    f"{_SUMMARY}._get_summary_data": "show stages in the summary",
    f"{_SUMMARY}._model": "show stages in the summary",
    f"{_MODULE}._apply": "refuse to convert layers in other processes",
    f"{_MODULE}._load_from_state_dict": "load layers in other processes",
    f"{_MODULE}._save_to_state_dict": "save layers in other processes",
    **{
        f"torch.storage.TypedStorage.{name}": "write a checkpoint whose values are fetched one after another"
        for name in ("_fake_device", "_pickle_storage_type", "_size", "_untyped_storage")
    },
}
"""What a class of Relay overrides, or reads from ``self``, of a base class in another package."""

_ACCEPTED = {
    "_parameters",  # of nn.Module, which much of PyTorch's ecosystem reads
    "_buffers",
    "_modules",
    "_fields",  # of named tuples, public
    "_replace",  # of named tuples, public
    "_exit",  # of os, public
    "_getframe",  # of sys, public
    "_current_frames",  # of sys, public
    "_relay_rpc",  # Relay's own mark on an RRef
}

_DISTRIBUTIONS = {"lightning_fabric": "pytorch_lightning"}
"""Packages that another distribution installs."""

_ALL = {**_IN_TORCH_COMPAT, **_IN_LIGHTNING_COMPAT, **_IN_TRANSFORMERS_COMPAT, **_EXTENDED}


Nodes: TypeAlias = Sequence[ast.AST]
"""All nodes of a tree, walked through once for all tests."""


@pytest.mark.parametrize("path", _ALL)
def test_a_private_name_exists(path: str) -> None:
    package = path.split(".")[0]
    installed = "Python" if package == "argparse" else f"{package} {version(_DISTRIBUTIONS.get(package, package))}"
    assert _exists(path), f"{installed} no longer has {path} (used to {_ALL[path]})"


def test_the_package_lightning_has_the_same_private_names() -> None:
    paths = [_in_lightning(path) for path in (*_IN_LIGHTNING_COMPAT, *_EXTENDED)]
    assert any(path.startswith("lightning.fabric.") for path in paths)
    assert not [path for path in paths if not _exists(path)], f"lightning {version('lightning')} has another name"


def _in_lightning(path: str) -> str:
    """A path of pytorch_lightning in the package lightning."""
    return path.replace(f"{_LIGHTNING}.", "lightning.pytorch.").replace(f"{_FABRIC}.", "lightning.fabric.")


@pytest.mark.parametrize(
    ("path", "exists"),
    [
        ("torch.distributed.rpc.api._init_rpc_states", True),
        ("torch.distributed.rpc.api._gone", False),
        ("torch.gone._name", False),
        ("torch.nn.Module._gone", False),
        ("torch.distributed.rpc.TensorPipeRpcBackendOptions(_gone)", False),
        (f"{_LIGHTNING}.callbacks.ModelSummary._max_depth", True),
        (f"{_LIGHTNING}.callbacks.ModelSummary._max", False),
    ],
)
def test_a_missing_name_is_noticed(path: str, exists: bool) -> None:
    assert _exists(path) is exists


def _exists(path: str) -> bool:
    """Whether a module, class or instance has a name; ``path(name)`` asks for an argument of a constructor."""
    path, _, argument = path.rstrip(")").partition("(")
    parts = path.split(".")
    for number in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:number]))
        except ImportError:
            continue
        break
    else:
        return False
    for position, name in enumerate(parts[number:], number):
        if not hasattr(found, name):
            return position == len(parts) - 1 and inspect.isclass(found) and _instances_have(found, name)
        found = getattr(found, name)
    return not argument or argument in inspect.signature(found.__init__).parameters


def _instances_have(cls: type, name: str) -> bool:
    return any(_declares(base, name) for base in cls.__mro__)


def _declares(cls: type, name: str) -> bool:
    """Whether a class itself, not a base, has an attribute, declares it, or assigns it in one of its methods."""
    if name in vars(cls) or name in vars(cls).get("__annotations__", {}):
        return True
    return re.search(rf"\bself\.{name}\b[^=\n(]*=(?!=)", _source(cls)) is not None


def _source(cls: type) -> str:
    """The source of a class, empty if there is none; ``inspect.getsource`` would parse the module for each class."""
    try:
        return _sources_in(inspect.getsourcefile(cls)).get(cls.__qualname__, "")
    except (OSError, TypeError):
        return ""


@functools.cache
def _sources_in(file: str | None) -> dict[str, str]:
    """The sources of the classes that a file defines, those in functions included, by qualified name."""
    if file is None:
        return {}
    lines = Path(file).read_text().splitlines(keepends=True)
    return {
        name: "".join("".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes)
        for name, nodes in _classes_in(file).items()
    }


@functools.cache
def _classes_in(file: str) -> dict[str, list[ast.ClassDef]]:
    """The classes that a file defines, those in functions included, by qualified name."""
    found: dict[str, list[ast.ClassDef]] = {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                name = prefix + child.name
                found.setdefault(name, []).append(child)
                look(child, f"{name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                look(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.stmt | ast.ExceptHandler):  # an expression defines no class
                look(child, prefix)

    look(ast.parse(Path(file).read_text()), "")
    return found


def _nodes_of(cls: type) -> Nodes:
    """All nodes of the definition of one of Relay's classes."""
    file = inspect.getsourcefile(cls)
    assert file is not None
    return [node for definition in _classes_in(file).get(cls.__qualname__, []) for node in ast.walk(definition)]


@pytest.mark.parametrize(
    ("module", "listed"), [(_TORCH_COMPAT, _IN_TORCH_COMPAT), (_LIGHTNING_COMPAT, _IN_LIGHTNING_COMPAT)]
)
def test_the_lists_name_what_a_compat_module_uses(module: Path, listed: dict[str, str]) -> None:
    tree = _nodes(module)
    imported = {path for path, _ in _private_imports(tree)}
    arguments = {keyword.arg for keyword in tree if isinstance(keyword, ast.keyword) and keyword.arg}
    used = ({name for name, _ in _private_attributes(tree)} - _names_defined_in(tree)) | set(
        filter(_is_private, arguments)
    )
    private_parts = {path: [part for part in re.split(r"[.()]", path) if _is_private(part)] for path in listed}
    assert imported <= set(listed)
    assert used <= {part for parts in private_parts.values() for part in parts}
    assert [path for path, parts in private_parts.items() if parts[-1] not in used and path not in imported] == []


def test_no_other_module_uses_a_private_name() -> None:
    found = []
    for path in _modules():
        if path in (_TORCH_COMPAT, _LIGHTNING_COMPAT, _TRANSFORMERS_COMPAT):
            continue
        tree = _nodes(path)
        own = _names_defined_in(tree) | _ACCEPTED
        found += [f"{path}:{line} imports {name}" for name, line in _private_imports(tree)]
        found += [f"{path}:{line} uses {name}" for name, line in _private_attributes(tree) if name not in own]
    assert not found, "Use a public name, or add the private one to a compat module:\n" + "\n".join(found)


def test_no_other_module_imports_lightning() -> None:
    # Else a process could use both packages of Lightning, whose classes are not each other's.
    found = [
        f"{path}:{line} imports {name}"
        for path in _modules()
        if path not in (_LIGHTNING_COMPAT, _LIGHTNING_CLI)
        for name, line in _imports(_nodes(path))
        if name.split(".")[0] in ("pytorch_lightning", "lightning_fabric", "lightning")
    ]
    assert not found, f"Import the name from {_LIGHTNING_COMPAT}:\n" + "\n".join(found)


def test_packages_import_only_what_is_declared() -> None:
    declared = _declared_dependencies()
    for path in _modules():
        for node in _nodes(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for package in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                assert package in declared, f"{path} imports {package}, which pyproject.toml does not declare"


def _declared_dependencies() -> set[str]:
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["tensorboard"], *extras["ray"]]
    names = {requirement.split(">")[0].split("[")[0].replace("-", "_") for requirement in required}
    assert "torch" in names
    names = {"PIL" if name == "pillow" else name for name in names}
    names |= {"yaml", "lightning_utilities", "lightning_fabric"}  # dependencies of pytorch-lightning
    return names | {"trainer", "strategies"}


def _modules() -> list[Path]:
    found = [path for package in ("strategies", "trainer") for path in (ROOT / package).rglob("*.py")]
    return [path.relative_to(ROOT) for path in found]


@functools.cache
def _nodes(path: Path) -> Nodes:
    return tuple(ast.walk(ast.parse((ROOT / path).read_text())))


def _is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def _private_imports(tree: Nodes) -> Iterator[tuple[str, int]]:
    for name, line in _imports(tree):
        if name.split(".")[0] not in ("strategies", "trainer") and any(map(_is_private, name.split("."))):
            yield name, line


def _imports(tree: Nodes) -> Iterator[tuple[str, int]]:
    """The full names that import statements and calls of ``import_module`` name, with their lines."""
    for node in tree:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
            (name,) = node.args
            yield ast.literal_eval(name) if isinstance(name, ast.Constant) else "", node.lineno


def _private_attributes(tree: Nodes) -> Iterator[tuple[str, int]]:
    """Private attributes of other objects than ``self``, read, set, or named by a string."""
    for node in tree:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if not _is_of_self(node):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call):
            function = _last_name(node.func)
            named = node.args[1:2] if function in ("getattr", "setattr", "hasattr", "delattr", "replaced") else []
            named = node.args if function == "attrgetter" else named
            names = [arg.value for arg in named if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            parts = [part for name in names for part in name.split(".")]
            yield from ((part, node.lineno) for part in parts if _is_private(part))


def _last_name(node: ast.AST) -> str:
    """``c`` of ``c`` and of ``a.b.c``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_of_self(node: ast.Attribute) -> bool:
    of = node.value
    if isinstance(of, ast.Call):
        return isinstance(of.func, ast.Name) and of.func.id == "super" and not of.args
    return isinstance(of, ast.Name) and of.id in ("self", "cls")


def _names_defined_in(tree: Nodes) -> set[str]:
    """The names that a module defines: functions, classes, variables, and attributes of its own objects."""
    names = set()
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_of_self(node):
            names.add(node.attr)
    return names


def test_the_list_names_what_classes_extend() -> None:
    found = {path for cls in _own_classes() for path in _extended_by(cls)}
    assert found == set(_EXTENDED)


def _own_classes() -> Iterator[type]:
    for package in ("strategies", "trainer"):
        root = importlib.import_module(package)
        for info in pkgutil.walk_packages(root.__path__, f"{package}."):
            needs_ray = info.name == "strategies.ray" and importlib.util.find_spec("ray") is None  # an extra
            if not info.name.endswith("__main__") and not needs_ray:
                module = importlib.import_module(info.name)
                yield from (
                    cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == info.name
                )


def _extended_by(cls: type) -> Iterator[str]:
    """The private names of classes of other packages that a class of Relay overrides, or reads from ``self``."""
    others = [
        base for base in cls.__mro__ if not _is_own(base) and base.__module__ not in ("builtins", "abc", "typing")
    ]
    tree = _nodes_of(cls)
    reached = {node.attr for node in tree if isinstance(node, ast.Attribute) and _is_of_self(node)}
    names = reached | _names_defined_in(tree)
    for name in sorted(name for name in names if _is_private(name) and name not in _ACCEPTED):
        owner = next((base for base in others if _declares(base, name)), None)
        if owner is not None:
            yield f"{owner.__module__}.{owner.__qualname__}.{name}"


def _is_own(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("strategies", "trainer")
