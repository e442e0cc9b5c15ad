"""More of what ``test_pipe_rpc.py`` runs: uses out of the ordinary, refusals, RPC that comes and goes."""

import copy
import gc
import os
import time
import weakref
from collections import UserDict
from collections.abc import Callable
from threading import Timer
from typing import Any

import psutil
import torch
from pipe_job import NAP_SECONDS, Naps, placed, raised
from rpc_workers import rpc_workers
from torch import Tensor, nn
from torch.distributed import rpc
from torch.utils._pytree import tree_leaves

from strategies.pipeline import NoChunk, Pipe, WithDevice, is_checkpointing, is_recomputing
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.stage.layers import RECOMPUTE_MODES as MODES


def odds() -> dict[str, Any]:
    """Uses that are out of the ordinary."""
    found: dict[str, Any] = {}
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 1))
    plain = copy.deepcopy(net)
    pipe = Pipe(placed(net, "w1", "w1", "w2", None), chunks=2)
    x = torch.rand(5, 2)
    pipe.eval()
    plain.eval()
    with torch.no_grad():
        output = pipe(x).local_value()
        found["eval"] = (output - plain(x)).abs().max().item(), output.requires_grad
    found["empty"] = list(pipe(torch.rand(0, 2)).local_value().shape)
    twice = [pipe(x).local_value(), pipe(x.flip(0)).local_value()]
    (twice[0].sum() + twice[1].square().sum()).backward()
    (plain(x).sum() + plain(x.flip(0)).square().sum()).backward()
    optimizer = pipe.follow(torch.optim.SGD(pipe.parameters(), 1.0))
    other = torch.optim.SGD(plain.parameters(), 1.0)
    optimizer.step()
    other.step()
    found["two passes"] = difference(pipe, plain)
    found["second backward"] = raised(twice[0].sum().backward)
    pipe.zero_grad()
    optimizer.step()
    found["zero_grad of the Pipe"] = difference(pipe, plain)
    for parameter in (*pipe[0].parameters(), *plain[0].parameters()):
        parameter.requires_grad_(False)
    for model in (pipe, plain):
        out = model(x).local_value() if model is pipe else model(x)
        out.sum().backward()
    optimizer.step()
    other.zero_grad()
    plain(x).sum().backward()
    other.step()
    found["frozen in mid-run"] = difference(pipe, plain)
    pipe(x)  # never goes back
    gc.collect()
    pipe(x).local_value().sum().backward()
    found["kept"] = [remote.ask(StageCommands.num_kept).wait() for remote in pipe._engine.remotes]
    pipe.load_state_dict({name: torch.full_like(value, 2) for name, value in plain.state_dict().items()})
    found["loaded"] = [value.double().mean().item() for value in pipe.state_dict().values()]
    found["keys"] = list(pipe.state_dict()) == list(plain.state_dict())
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    found["double"] = raised(pipe.double)
    found["deepcopy"] = raised(lambda: copy.deepcopy(pipe))
    found["followed twice"] = raised(lambda: pipe.follow(optimizer))
    return found


def optimizers() -> dict[str, float]:
    """How far a Pipe is from one process after two steps of optimizers that ``follow`` gets in different states."""
    x = torch.rand(6, 2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        output = model(x).local_value() if isinstance(model, Pipe) else model(x)
        optimizer.zero_grad()
        output.square().sum().backward()
        optimizer.step()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), 0.1)

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.5)

    def resumed(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adam(model)
        optimizer.load_state_dict(copy.deepcopy(saved))
        return optimizer

    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

    trained = net()
    step(trained, earlier := adam(trained))
    saved = earlier.state_dict()

    def compared(make: Callable[[nn.Module], Any], before: Callable[[nn.Module, Any], Any] | None) -> float:
        """Makes the optimizer before the Pipe and calls ``before``; or after it, if this is ``None``."""
        layers = net()
        plain = copy.deepcopy(layers)
        other, optimizer = make(plain), None if before is None else make(layers)
        held = None if before is None else (before(plain, other), before(layers, optimizer))
        pipe = Pipe(placed(layers, "w1", None, "w2"), chunks=2)
        optimizer = pipe.follow(make(pipe) if optimizer is None else optimizer)
        assert not any(parameter.is_meta for parameter in optimizer.state)  # the workers have these states
        for _ in range(2):
            step(pipe, optimizer)
            step(plain, other)
        del held
        states = zip(*(tree_leaves(each.state_dict()["state"]) for each in (optimizer, other)), strict=True)
        return max(difference(pipe, plain), *((one - same).abs().max().item() for one, same in states))

    return {
        "a loss is alive": compared(adam, lambda net, _: net(x).sum()),
        "a weak reference is alive": compared(adam, lambda net, _: weakref.ref(net[2].weight)),
        "its constructor makes states": compared(adagrad, lambda net, own: None),
        "its constructor makes states of stand-ins": compared(adagrad, None),
        "it has loaded a state of stand-ins": compared(resumed, None),
        "it has stepped": compared(adam, step),
        "it has stepped, and a loss is alive": compared(adam, lambda net, own: (step(net, own), net(x).sum())),
    }


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest between their states."""
    theirs = other.state_dict()
    return max((value - theirs[name]).abs().max().item() for name, value in one.state_dict().items())


def refusals() -> dict[str, Any]:
    """What cannot be, and what is said about it."""
    found: dict[str, Any] = {}
    pipe = Pipe(placed(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), "w1", None))
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    pipe(torch.rand(2, 1)).local_value().sum().backward()
    found["step of one that is not followed"] = raised(optimizer.step)
    found["zero_grad of one that is not followed"] = raised(optimizer.zero_grad)
    found["torch's clipping"] = raised(lambda: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0))
    second = Pipe(placed(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), "w1", None))
    of_both = torch.optim.SGD([*pipe.parameters(), *second.parameters()], 0.1)
    found["two"] = raised(lambda: pipe.follow(of_both))
    found["unknown worker"] = raised(lambda: Pipe(nn.Sequential(WithDevice(nn.Linear(1, 1), "worker9/cpu"))))
    tied = nn.Linear(1, 1)
    other = nn.Linear(1, 1)
    other.weight = tied.weight
    found["shared"] = raised(lambda: Pipe(placed(nn.Sequential(tied, nn.Tanh(), other), "w1", None, None)))
    stuck = nn.Linear(1, 1)
    stuck.lock = (n for n in range(3))
    found["not picklable"] = raised(lambda: Pipe(placed(nn.Sequential(stuck), "w1")))
    found["no device there"] = raised(lambda: Pipe(nn.Sequential(WithDevice(nn.Linear(1, 1), "worker1/cuda:7"))))
    found["after all that"] = raised(lambda: pipe(torch.rand(2, 1)).local_value().sum().backward())
    return found


class Mixes(nn.Module):
    """Takes and returns tensors and other values."""

    def forward(self, a: Tensor, factor: float, b: Tensor | None, whole: Tensor) -> tuple[Any, ...]:
        return (a if b is None else a + b) * factor + whole.sum(), factor, b, whole


class Doubles(nn.Module):
    """In place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Chooses(nn.Module):
    """Also returns integers, which have no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.argmax(1)


class LooksUp(nn.Module):
    """Adds the rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"sum": x + self.table(places)}


class Only(nn.Module):
    """Hands on the first value."""

    def forward(self, x: Tensor, rest: Any) -> Tensor:
        return x


class Fills(nn.Module):
    """Adds what it computes to an object, and uses all that is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, cache: UserDict) -> tuple[Tensor, UserDict]:
        cache[len(cache)] = self.linear(x)
        return sum(cache.values()), cache


class Forks(nn.Module):
    """Returns a list of two, which the next layer takes as two arguments."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x, x * 2]


class Swaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        return [self.linear(b), a]


class Adds(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class CountsPhases(nn.Module):
    """Counts how often it is run for the first time of two, and for the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(2)  # no buffer, which a recomputation would not change

    def forward(self, x: Tensor) -> Tensor:
        self.counts += torch.tensor([is_checkpointing(), is_recomputing()])
        return x

    def get_extra_state(self) -> Tensor:
        return self.counts

    def set_extra_state(self, state: Tensor) -> None:
        self.counts = state


def partitions() -> dict[str, Any]:
    """Hooks on partitions here and elsewhere, names of the original, and what layers elsewhere know of recomputing."""
    found: dict[str, Any] = {}
    net = nn.Sequential(nn.Linear(2, 2), CountsPhases(), nn.Linear(2, 1))
    state = {name: torch.rand_like(value) for name, value in net.state_dict().items()}
    pipe = Pipe(placed(net, None, "w1", "w2"), chunks=3)
    pipe.load_state_dict(
        {
            "partitions.0.0.weight": state["0.weight"],
            "partitions.0.0.bias": state["0.bias"],
            "partitions.0.1._extra_state": torch.zeros(2),
            "partitions.1.0.weight": state["2.weight"],
            "partitions.1.0.bias": state["2.bias"],
        }
    )
    found["loaded"] = [
        bool(torch.equal(pipe.state_dict()[f"2.{name}"], state[f"2.{name}"])) for name in ("weight", "bias")
    ]
    shapes: list[Any] = []
    pipe.partitions[0].register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    pipe(torch.rand(3, 2)).local_value().sum().backward()
    found["shapes"] = shapes
    found["phases"] = pipe.state_dict()["1._extra_state"].tolist()
    pipe.partitions[1].register_forward_hook(lambda module, args, output: None)
    found["hook elsewhere"] = raised(lambda: pipe(torch.rand(3, 2)))
    return found


def mixed() -> dict[str, bool]:
    """Whether values of all kinds are the same over processes as in one: outputs, and gradients of inputs."""
    a, b, whole = (torch.rand(7, 3, requires_grad=True) for _ in range(3))
    linear = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    cases: dict[str, tuple[nn.Sequential, tuple[str | None, ...], tuple[Any, ...]]] = {
        "others": (nn.Sequential(Mixes(), Mixes(), Mixes()), ("w1", "w2", None), (a, 2.0, b, NoChunk(whole))),
        "None": (nn.Sequential(Mixes(), Mixes()), ("w1", "w2"), (a, 2.0, None, NoChunk(whole))),
        "in place": (nn.Sequential(Doubles(), nn.Linear(3, 3)), ("w1", None), (torch.rand(7, 3),)),
        "in place, here": (nn.Sequential(Doubles(), nn.Linear(3, 3)), (None, "w1"), (torch.rand(7, 3),)),
        "object": (nn.Sequential(Fills(), Fills(), Fills(), Only()), ("w1", "w1", "w2", "w2"), (a, UserDict())),
        "object, back": (nn.Sequential(Fills(), Fills(), Only()), ("w1", None, "w1"), (a, UserDict())),
        "integers": (nn.Sequential(nn.Linear(3, 5), Chooses(), LooksUp()), ("w1", "w2", "w1"), (a,)),
        "only integers": (nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 2)), ("w1", "w2"), (torch.arange(7),)),
        "lists": (nn.Sequential(Forks(), nn.Sequential(Swaps(), Swaps()), Adds()), ("w1", "w2", None), (a,)),
        "frozen": (nn.Sequential(nn.Linear(3, 5).requires_grad_(False), nn.ReLU()), ("w1", "w2"), (torch.rand(7, 3),)),
        "autocast": (linear.float(), ("w1", None), (torch.rand(7, 3, dtype=torch.float32),)),
    }
    found = {}
    for mode in MODES:
        for name, (net, places, inputs) in cases.items():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "autocast"):
                here = _outcome(Pipe(copy.deepcopy(net), 3, mode), inputs)
                over = _outcome(Pipe(placed(copy.deepcopy(net), *places), 3, mode), inputs)
            found[f"{name}, {mode}"] = len(here) == len(over) and all(map(_equal, here, over))
    return found


def _outcome(pipe: Pipe, inputs: tuple[Any, ...]) -> list[Any]:
    torch.manual_seed(4)
    tensors = [value.tensor if isinstance(value, NoChunk) else value for value in inputs]
    wanting = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]
    for tensor in wanting:
        tensor.grad = None
    given = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    outputs = tree_leaves(pipe(*given).local_value())
    losses = [
        (t.double() * torch.arange(t.numel()).view_as(t)).sum() for t in outputs if getattr(t, "requires_grad", 0)
    ]
    if losses:
        torch.stack(losses).sum().backward()
    return [*outputs, *(tensor.grad for tensor in wanting)]


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.requires_grad == other.requires_grad and one.dtype == other.dtype and torch.allclose(one, other, 1e-9)


def killed() -> dict[str, Any]:
    """A worker that dies in the middle of a pass."""
    found: dict[str, Any] = {}
    with rpc_workers(2, graceful=False) as workers:
        pipe = Pipe(placed(nn.Sequential(nn.Linear(1, 1), Naps(), nn.Linear(1, 1)), "w1", "w2", None), chunks=4)
        pipe(torch.rand(1, 1))
        timer = Timer(NAP_SECONDS * 1.5, workers[1].kill)
        timer.start()
        start = time.perf_counter()
        found["forward"] = raised(lambda: pipe(torch.rand(4, 1)))
        found["seconds"] = time.perf_counter() - start
        found["next"] = raised(lambda: pipe(torch.rand(4, 1)))
        timer.join()
    return found


def private_rpc() -> dict[str, Any]:
    """Without ``init_rpc`` of the user's; and with one of theirs afterwards."""
    found: dict[str, Any] = {}
    pipe = Pipe(nn.Sequential(nn.Linear(1, 1)))
    twin = copy.deepcopy(pipe)
    found["while a Pipe lives"] = listening()
    reference = pipe(torch.rand(2, 1))
    del pipe, twin
    gc.collect()
    found["value"] = list(reference.local_value().shape)
    del reference
    gc.collect()
    found["afterwards"] = listening(), rpc.api._is_current_rpc_agent_set()
    with rpc_workers(1):
        found["sum"] = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist()
        found["local"] = list(Pipe(nn.Sequential(nn.Linear(1, 1)))(torch.rand(2, 1)).local_value().shape)
        found["placed"] = raised(lambda: Pipe(placed(nn.Sequential(nn.Linear(1, 1)), "w1")))
        gc.collect()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.getcwd()}/rpc")
    found["as another rank"] = raised(lambda: rpc.init_rpc("a", rank=1, world_size=2, rpc_backend_options=options))
    return found


def listening() -> list[str]:
    """The addresses on which this process listens."""
    return [connection.laddr.ip for connection in psutil.Process().net_connections() if connection.status == "LISTEN"]
