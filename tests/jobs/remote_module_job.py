"""Two processes, the first of which uses modules on the second; what it saw is returned as plain types and tensors."""

import gc
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed.autograd as dist_autograd
from parity_layers import Migrates
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future
from torch.multiprocessing import ProcessExitedException

import strategies
from examples.distributed_basics.launch import launch, remote_procedure_calls
from strategies.remote.commands import ModuleCommands

STEPS = 6


class Net(nn.Module):
    """Several inputs and outputs, a buffer, something frozen, a keyword; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.norm = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.frozen.requires_grad_(False)
        self.relu = nn.ReLU(inplace=True)
        self.double()

    def forward(self, x: Tensor, both: dict[str, Tensor], *, factor: float = 1.0) -> tuple[Tensor, dict[str, Any]]:
        x = self.relu(x)  # in place, on an input
        hidden = self.norm(self.frozen(self.first(x).tanh()) + both["y"]) * factor
        return hidden, {"rows": len(x), "whole": both["whole"] * 2, "sum": hidden.sum(1)}


class Around(nn.Module):
    """A model that has a part elsewhere."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(4, 1)

    def forward(self, x: Tensor, both: dict[str, Tensor]) -> Tensor:
        hidden, others = self.inner(x, both, factor=0.5)
        return self.own(hidden).sum() + others["sum"].square().sum()

    def look(self, module: nn.Module) -> None:
        """What ``apply`` is given."""


class Fails(nn.Module):
    """Raises where its argument says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        if where == "constructor":
            raise KeyError("no such table")

    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("in the layer")


class Hides(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(hidden=super().forward(x))


class Exits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        sys.exit("a layer exits")


def model(inner: Callable[[], nn.Module]) -> Around:
    torch.manual_seed(0)
    return Around(inner()).double()


def trained(net: Around, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Losses, gradients of the inputs and everything of a model after some steps, two calls of it in each."""
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(1)
    losses, grads = [], []
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss: Any = 0
        for rows in (5, 3):
            x, y = (torch.randn(rows, n, dtype=torch.float64, generator=generator) for n in (3, 4))
            x.requires_grad_()
            loss = loss + net(x.clone(), {"y": y, "whole": torch.arange(3)})
            grads.append(x)
        loss.backward()
        for each in (*optimizers, *schedulers):
            each.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "input_grads": [x.grad for x in grads],
        "grads": {n: p.grad for n, p in (*net.inner.named_parameters("inner"), *net.own.named_parameters("own"))},
        "requires_grad": [p.requires_grad for p in net.inner.parameters()],
        "buffers": dict(net.inner.named_buffers()),
        "state": dict(net.state_dict()),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "evaluated": net.eval()(torch.ones(1, 3).double(), {"y": torch.ones(1, 4).double(), "whole": torch.ones(1)}),
    }


def optimizer(inner: nn.Module, cls: Any, **options: Any) -> torch.optim.Optimizer:
    if isinstance(inner, strategies.RemoteModule):
        return inner.optimizer(cls, **options)
    return cls(inner.parameters(), **options)


def both_ways(inner: nn.Module, cls: Any, **options: Any) -> dict[str, Any]:
    """Trains a model around a module that is here or elsewhere."""
    torch.manual_seed(0)
    start = Net().state_dict()
    net = model(lambda: inner)
    assert not inner.load_state_dict(start).missing_keys
    own = torch.optim.SGD(net.own.parameters(), lr=0.1)
    return trained(net, [optimizer(inner, cls, **options), own])


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def attempt(function: Callable[[], Any]) -> tuple[str, str, str]:
    """Type, message and cause of what a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), str(error.__cause__)
    return "nothing", "", ""


def mistakes(Remote: Any) -> dict[str, tuple[str, str, str]]:
    """What each mistake is told."""
    linear = Remote("owner", nn.Linear, args=(2, 2))
    x = torch.ones(1, 2)
    loss = linear(x).sum()
    loss.backward(retain_graph=True)
    state = {"weight": torch.zeros(2, 2), "bias": torch.zeros(3)}
    around = nn.Sequential(linear)
    return {
        "wrong name": attempt(lambda: Remote("ownr/cpu", nn.Linear, args=(1, 1))),
        "no name": attempt(lambda: Remote("cpu", nn.Linear, args=(1, 1))),
        "no device": attempt(lambda: Remote("owner/gpu", nn.Linear, args=(1, 1))),
        "no callers": attempt(lambda: Remote("owner", nn.Linear, args=(1, 1), num_callers=0)),
        "cannot be pickled": attempt(lambda: Remote("owner", nn.Linear, args=(threading.Lock(), 1))),
        "constructor": attempt(lambda: Remote("owner", Fails, args=("constructor",))),
        "no module": attempt(lambda: Remote("owner", dict)),
        "forward": attempt(lambda: Remote("owner", Fails, args=("forward",))(x)),
        "forward_async": attempt(lambda: Remote("owner", Fails, args=("forward",)).forward_async(x).wait()),
        "exit": attempt(lambda: Remote("owner", Exits)(x)),
        "arguments": attempt(lambda: linear(x, x)),
        "hidden input": attempt(lambda: linear(SimpleNamespace(x=x.clone().requires_grad_()))),
        "hidden output": attempt(lambda: Remote("owner", Hides, args=(1, 1))(torch.ones(1, 1))),
        "second backward": attempt(loss.backward),
        "autograd.grad": attempt(lambda: torch.autograd.grad(linear(x.requires_grad_()).sum(), x)),
        "local optimizer": attempt(lambda: torch.optim.SGD(linear.parameters(), lr=1.0)),
        "clipping": attempt(lambda: torch.nn.utils.clip_grad_norm_(linear.parameters(), 0.1)),
        "optimizer": attempt(lambda: linear.optimizer(torch.optim.SGD, lr=-1.0)),
        "shape": attempt(lambda: around.load_state_dict({f"0.{name}": value for name, value in state.items()})),
        "missing caller": attempt(lambda: impatient(Remote("owner", nn.Linear, args=(1, 1), num_callers=2).zero_grad)),
        "keys": attempt(lambda: around.load_state_dict({"0.weight": torch.zeros(2, 2), "0.wait": x})),
    }


def impatient(function: Callable[[], Any]) -> None:
    """Calls it with a time-out of one second for RPC."""
    before = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(1.0)
    try:
        function()
    finally:
        rpc._set_rpc_timeout(before)


def graphs(Remote: Any) -> list[int]:
    """How many graphs the owner keeps: none without gradients, one a call, none after backward or when dropped."""
    linear, numbers = Remote("owner", nn.Linear, args=(2, 2)), []

    def count() -> None:
        gc.collect()
        numbers.append(linear._client.call(ModuleCommands.num_graphs))

    with torch.no_grad():
        linear(torch.ones(1, 2))
    count()
    outputs = [linear(torch.ones(1, 2)) for _ in range(3)]
    count()
    outputs.pop().sum().backward()
    count()
    outputs.clear()
    count()
    return numbers


def others(Remote: Any) -> dict[str, Any]:
    """The rest, one by one."""
    dropout = Remote("owner/cpu", lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))  # found by no name
    modes = {mode: dropout.train(mode)(torch.ones(50, 4)) for mode in (True, False)}
    table = Remote("rank:1", nn.Embedding, args=(5, 2), kwargs={"sparse": True})
    step = table.optimizer(torch.optim.SparseAdam, lr=0.1)
    before = table.state_dict()["weight"]
    future = table.forward_async(torch.tensor([[1, 3]]))
    future.wait().sum().backward()
    (grad,) = (p.grad for p in table.parameters())
    assert grad is not None
    step.step()
    changed = (table.state_dict()["weight"] != before).any(1).tolist()
    table.zero_grad()
    here = Remote("caller", nn.Linear, args=(2, 1))
    here(torch.ones(1, 2)).sum().backward()
    table.requires_grad_(False)
    converted = [here.state_dict()["weight"].dtype]
    for convert in (here.double, lambda: here.to("cpu"), here.half):
        convert()
        converted.append(here.state_dict()["weight"].dtype)
    return {
        "modes": modes,
        "is_future": isinstance(future, Future),
        "sparse": (grad.is_sparse, grad.to_dense()),
        "changed": changed,
        "zeroed": [p.grad for p in table.parameters()],
        "frozen": table(torch.tensor([1])).requires_grad,
        "own process": [p.grad for p in here.parameters()],
        "dtypes": converted,
        "in words": repr(nn.Sequential(table)),
        "counted": len(list(nn.Sequential(table, nn.Linear(1, 1)).parameters())),
    }


def initialised(module: nn.Module, gain: float = 1.0) -> None:
    """What a user gives to ``apply``: draws from both generators."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight, gain=gain)
        nn.init.constant_(module.bias, random.random())
    elif isinstance(module, nn.BatchNorm1d):
        module.momentum = 0.3
        nn.init.uniform_(module.weight)


def applied(inner: nn.Module) -> dict[str, Any]:
    """A model around a module after ``apply``, a step of the module's buffers, and the next random numbers."""
    net = model(lambda: inner)
    torch.manual_seed(3)
    random.seed(3)
    assert net.apply(partial(initialised, gain=0.5)) is net
    drawn = [torch.rand(1).item(), random.random()]
    net(torch.ones(2, 3).double(), {"y": torch.arange(8.0).view(2, 4).double(), "whole": torch.ones(1)})
    return {"state": dict(net.state_dict()), "drawn": drawn}


class PlainSGD(torch.optim.SGD):
    """Which torch does not replace by a compiled one."""


def like_torchs(Remote: Any) -> dict[str, Any]:
    """What ``torch.distributed.nn.RemoteModule`` has."""
    from torch.distributed.optim import DistributedOptimizer  # compiles functions, which takes a second a process

    seen: dict[str, Any] = {"applied": applied(Remote("owner", Net))}
    linear = Remote("owner", nn.Linear, kwargs={"in_features": 3, "out_features": 2}, args=None)
    start = {name: value.clone() for name, value in linear.state_dict().items()}
    reference = linear.get_module_rref()
    assert reference is linear.module_rref
    reference.rpc_sync().eval()
    x = torch.ones(2, 3)
    seen["by reference"] = {
        "same": torch.equal(reference.rpc_sync().forward(x), linear(x)),
        "training": [rpc.rpc_sync("owner", is_training, args=(reference,)), linear.training],
        "type": type(reference.to_here()).__name__,
    }
    seen["parameters"] = [
        [r.to_here().shape for r in remote.remote_parameters(recurse)]
        for remote in (linear, Remote("owner", nn.Sequential, args=(nn.Linear(1, 2),)))
        for recurse in (True, False)
    ]
    optimizer = DistributedOptimizer(PlainSGD, linear.remote_parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        with dist_autograd.context() as context:
            loss = linear(x).square().sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
            losses.append(loss.item())
    seen["distributed optimizer"] = start, losses
    twin = Remote.init_from_module_rref("owner", reference)
    twin(x).sum().backward()
    seen["twin"] = {
        "grads": [torch.equal(p.grad, q.grad) for p, q in zip(twin.parameters(), linear.parameters(), strict=True)],
        "in words": repr(twin),
    }
    shared = Remote("owner", nn.Linear, args=(1, 1), num_callers=2)
    seen["twin"]["num_callers"] = Remote.init_from_module_rref("owner", shared.module_rref)._client.num_callers
    foreign = Remote.init_from_module_rref("rank:1", rpc.remote("owner", nn.Linear, args=(3, 1)))
    seen["foreign"] = list(foreign.train(False)(x).shape)
    seen["sent"] = sent(Remote)
    names: list[str] = []
    around = Around(linear)
    mistakes: dict[str, Callable[[], Any]] = {
        "register_parameter": lambda: linear.register_parameter("extra", nn.Parameter(x)),
        "register_buffer": lambda: linear.register_buffer("extra", x),
        "add_module": lambda: linear.add_module("extra", nn.Linear(1, 1)),
        "parameter": lambda: setattr(linear, "weight", nn.Parameter(x)),
        "module": lambda: setattr(linear, "extra", nn.Linear(1, 1)),
        "share_memory": linear.share_memory,
        "changed": lambda: linear.apply(lambda module: names.append(type(module).__name__)),
        "method": lambda: around.apply(around.look),
        "apply": lambda: linear.apply(lambda module: module.missing),
        "not the owner": lambda: Remote.init_from_module_rref("caller", reference),
        "other device": lambda: Remote.init_from_module_rref("owner/meta", reference),
        "no module": lambda: Remote.init_from_module_rref("owner", rpc.remote("owner", int)),
    }
    seen["refused"] = {name: attempt(function) for name, function in mistakes.items()}
    return seen


def sent(Remote: Any) -> dict[str, Any]:
    """What another process finds in a module with an attribute and a hook, and what this one is told."""
    linear, x = Remote("owner", nn.Linear, args=(3, 2)).eval(), torch.ones(2, 3)
    own = sorted(vars(linear))
    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        rpc.rpc_sync("owner", attributes, args=(linear,))
    linear.scale = 3
    linear.register_forward_hook(lambda module, args, output: output * module.scale)  # cannot be pickled
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        there = rpc.rpc_sync("owner", attributes, args=(linear,))
        output = rpc.rpc_sync("owner", called, args=(linear, x))
    return {
        "attributes": (there, own),
        "training": rpc.rpc_sync("owner", getattr, args=(linear, "training")),
        "told": [str(each.message) for each in (*quiet, *told[:1])],
        "same": torch.equal(output * 3, linear(x)),
    }


def attributes(module: nn.Module) -> list[str]:
    return sorted(vars(module))


def called(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x).detach()
    return result


def is_training(module: Any) -> bool:
    """Whether the module behind the ``RRef`` is in training mode."""
    return bool(module.local_value().training)


def two_callers(Remote: Any) -> dict[str, Any]:
    """Two threads stand for two processes that train one module together."""
    shared = Remote("owner", nn.Linear, args=(2, 1), num_callers=2)
    start = {name: value.clone() for name, value in shared.state_dict().items()}
    inputs = [torch.full((3, 2), value, requires_grad=True) for value in (1.0, 2.0)]

    def train(x: Tensor) -> None:
        optimizer = shared.optimizer(torch.optim.SGD, lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            shared(x).square().mean().backward()
            optimizer.step()

    with ThreadPoolExecutor(2) as callers:
        list(callers.map(train, inputs))
    return {"start": start, "end": dict(shared.state_dict()), "input_grads": [x.grad for x in inputs]}


def saved(Remote: Any) -> dict[str, Any]:
    """An optimizer of one process goes on elsewhere, and back."""
    torch.manual_seed(0)
    one = nn.Linear(2, 2).double()
    first = torch.optim.Adam(one.parameters(), lr=0.1)
    there = Remote("owner", nn.Linear, args=(2, 2)).double()
    second = there.optimizer(torch.optim.Adam, lr=0.5)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = module(torch.ones(3, 2).double()).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0

    step(one, first)
    there.load_state_dict(one.state_dict())
    second.load_state_dict(first.state_dict())
    step(there, second)
    one.load_state_dict(there.state_dict())
    first.load_state_dict(second.state_dict())
    step(one, first)
    step(there, second)
    return {"one": one.state_dict(), "there": dict(there.state_dict()), "lr": second.param_groups[0]["lr"]}


def versioned() -> nn.Module:
    """Two layers that were saved in another way by earlier versions of their classes."""
    return nn.Sequential(Migrates(2), nn.BatchNorm1d(2))


def migrated(inner: nn.Module) -> dict[str, Any]:
    """Loads a state without versions, and what was saved after that; then one which lacks an entry of its version."""
    net, generator = nn.Sequential(inner), torch.Generator().manual_seed(0)
    net.load_state_dict(
        {
            "0.0.matrix": torch.rand(2, 2, generator=generator),
            "0.0.bias": torch.zeros(2),
            **{f"0.1.{name}": torch.rand(2) for name in ("weight", "bias", "running_mean", "running_var")},
        }
    )
    state = net.state_dict()
    net.load_state_dict(state)
    weight, metadata = net.state_dict()["0.0.weight"], dict(state._metadata)
    del state["0.1.num_batches_tracked"]
    return {"weight": weight, "metadata": metadata, "incomplete": attempt(lambda: net.load_state_dict(state))[1]}


class Tells(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def telling() -> nn.Module:
    torch.manual_seed(0)
    return Tells(2, 2)


def in_contexts(inner: nn.Module, around: Callable[[], Any] = nullcontext) -> dict[str, Any]:
    """What a module computes and sees under autocast, also within ``around``, and in inference mode."""
    x = torch.ones(3, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output, *told = inner(x)
        with around():
            told += [inner(x)[0].dtype]
    output.float().square().sum().backward()
    with torch.inference_mode():
        told += inner(x)[1:]
    return {"output": output.detach(), "told": told, "grads": [x.grad, *(p.grad for p in inner.parameters())]}


def program(rank: int, num_processes: int, file: str) -> None:
    Remote = strategies.RemoteModule
    seen: dict[str, Any] = {"no RPC": attempt(lambda: Remote("owner", nn.Linear, args=(1, 1)))}
    with remote_procedure_calls(["caller", "owner"][rank], rank, num_processes):
        if rank == 0:
            seen["imports Lightning"] = "pytorch_lightning" in sys.modules
            for name, (cls, options) in OPTIMIZERS.items():
                seen[name] = both_ways(Remote("owner/cpu", Net), cls, **options)
            seen |= {"mistakes": mistakes(Remote), "graphs": graphs(Remote), "saved": saved(Remote)}
            seen["migrated"] = migrated(Remote("owner", versioned))
            seen["in contexts"] = in_contexts(Remote("owner", telling), dist_autograd.context)
            linear = Remote("owner", nn.Linear, args=(1, 1))
            seen |= {**others(Remote), "two callers": two_callers(Remote), "like torch's": like_torchs(Remote)}
            tree = [psutil.Process(), *psutil.Process().parent().children()]
            sockets = [c for process in tree for c in process.net_connections("inet") if c.status == "LISTEN"]
            seen["listening on"] = sorted({c.laddr.ip for c in sockets})
    if rank == 0:
        seen["after RPC"] = attempt(lambda: linear(torch.ones(1, 1)))
        torch.save(seen, file)


class Dies(nn.Module):
    def forward(self, x: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def bereaved(rank: int, num_processes: int, file: str) -> None:
    with remote_procedure_calls(["caller", "owner"][rank], rank, num_processes):
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # with which the launcher ends who is left
            remote = strategies.RemoteModule("owner", Dies)
            torch.save([attempt(lambda: remote(torch.ones(1))), attempt(remote.state_dict)], file)
            os._exit(0)


def owner_dies() -> list[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seen.pt"
        try:
            launch(bereaved, 2, str(file))
        except ProcessExitedException:
            told: list[tuple[str, str, str]] = torch.load(file)
            return told
    raise AssertionError("the owner was to die")


def on_a_gpu(rank: int, num_processes: int, file: str) -> None:
    with remote_procedure_calls(["caller", "owner"][rank], rank, num_processes):
        if rank == 0:
            cls, options = OPTIMIZERS["AdamW"]  # on a GPU, torch's SGD with nesterov changes gradients in its step
            seen = both_ways(strategies.RemoteModule("owner/cuda:0", Net), cls, **options)
            linear = strategies.RemoteModule("owner/cuda:0", nn.Linear, args=(2, 2))
            x = torch.ones(1, 2, device="cuda:0", requires_grad=True)
            y = linear(x)
            y.sum().backward()
            assert x.grad is not None
            torch.save({**seen, "devices": [str(y.device), str(x.grad.device)]}, file)


def gpu_job() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        launch(on_a_gpu, 2, f"{folder}/seen.pt")
        seen: dict[str, Any] = torch.load(f"{folder}/seen.pt")
        return seen


def job() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seen.pt"
        launch(program, 2, str(file))
        seen: dict[str, Any] = torch.load(file)
        return seen
