"""What ``test_pipe_rpc.py`` runs in three processes: worker0, which has the ``Pipe``, worker1 and worker2."""

import copy
import gc
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rpc_workers import rpc_workers
from skip_nets import u_net
from torch import Tensor, nn
from torch.distributed import rpc

from strategies.pipeline import Pipe, WithDevice, pop, skippable, stash
from strategies.pipeline.stage.layers import RECOMPUTE_MODES as MODES

NAP_SECONDS = 0.15


def placed(net: nn.Sequential, *places: str | None) -> nn.Sequential:
    """The same layers, on ``w1``, ``w2`` or here."""
    return nn.Sequential(
        *(
            layer if place is None else WithDevice(layer, place.replace("w", "worker") + "/cpu")
            for layer, place in zip(net, places, strict=True)
        )
    )


def trained(pipe: nn.Module, rows: int = 7) -> dict[str, Any]:
    """Five steps with Adam in two groups, a scheduler and clipping; everything that comes of them."""
    layers = list(pipe)
    groups = [list(layers[0].parameters()), [p for layer in layers[1:] for p in layer.parameters()]]
    optimizer = torch.optim.Adam([{"params": groups[0], "lr": 0.02}, {"params": groups[1]}], lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if isinstance(pipe, Pipe):
        pipe.follow(optimizer)
    torch.manual_seed(5)
    batches = [torch.rand(rows, 2, 8) for _ in range(5)]
    losses, norms, input_grads = [], [], []
    torch.manual_seed(6)
    for x in batches:
        x.requires_grad_()
        output = pipe(x)
        output = output.local_value() if isinstance(pipe, Pipe) else output
        loss = (output * torch.arange(output.numel()).view_as(output)).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(
            pipe.clip_grad_norm_(optimizer, 1.0)
            if isinstance(pipe, Pipe)
            else nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
        )
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        input_grads.append(x.grad)
    return {
        "losses": losses,
        "norms": norms,
        "input_grads": input_grads,
        "state": dict(pipe.state_dict()),
        "optimizer": optimizer.state_dict()["state"],
    }


def parity() -> dict[str, Any]:
    """A U-Net over three processes, with skips from worker 1 to 2 and from here to here; and one process."""
    places = [None, None, "w1", "w1", "w2", "w2", None, "w1"]
    net = u_net()
    net[3] = nn.GroupNorm(2, 12)
    found: dict[str, Any] = {"plain": trained(copy.deepcopy(net))}
    for mode in MODES:
        found[mode] = trained(Pipe(placed(copy.deepcopy(net), *places), chunks=3, checkpoint=mode))
    random = u_net()
    random[4].p = 0.5
    settings: dict[str, Any] = {"chunks": 3, "deferred_batch_norm": True}
    found["random, here"] = trained(Pipe(copy.deepcopy(random), **settings))
    for mode in MODES:
        pipe = Pipe(placed(copy.deepcopy(random), *places), checkpoint=mode, **settings)
        found[f"random, {mode}"] = trained(pipe)
    return found


class Naps(nn.Module):
    """The identity, which takes its time, both ways; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.counted += 1
        result: Tensor = _Nap.apply(x)
        return result


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(NAP_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(NAP_SECONDS)
        return grads[0]


def overlap() -> dict[str, float]:
    """Seconds of a forward and of a backward pass, in naps, of 4 micro-batches over two workers and this process."""
    pipe = Pipe(placed(nn.Sequential(Naps(), Naps(), Naps()), "w1", "w2", None), chunks=4, checkpoint="never")
    x = torch.rand(4, 1, requires_grad=True)
    pipe(x).local_value().sum().backward()  # what runs for the first time takes longer
    start = time.perf_counter()
    output = pipe(x).local_value()
    middle = time.perf_counter()
    output.sum().backward()
    return {
        "forward": (middle - start) / NAP_SECONDS,
        "backward": (time.perf_counter() - middle) / NAP_SECONDS,
    }


class DrawsTwice(nn.Module):
    """Multiplies by two random numbers, and takes its time between them."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.rand_like(x)
        time.sleep(NAP_SECONDS / 5)
        return x * first * torch.rand_like(x)


class SlowSGD(torch.optim.SGD):
    """Takes its time in a step."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(NAP_SECONDS / 5)
        return super().step(closure)


def one_worker() -> dict[str, Any]:
    """Two steps with two partitions on one worker that draw random numbers, and with all of them here."""
    net = nn.Sequential(nn.Linear(4, 4), DrawsTwice(), nn.Identity(), DrawsTwice(), nn.Linear(4, 4))
    found = {}
    for places in (["w1", "w1", None, "w1", "w1"], [None] * 5):
        pipe = Pipe(placed(copy.deepcopy(net), *places), chunks=4, checkpoint="always")
        optimizer = SlowSGD(pipe.parameters(), lr=0.1)
        pipe.follow(optimizer)
        torch.manual_seed(1)
        for _ in range(2):
            pipe(torch.rand(8, 4)).local_value().sum().backward()
            optimizer.step()
        found["on one worker" if places[0] else "here"] = dict(pipe.state_dict())
    return found


class FailsGoingBack(nn.Module):
    """Raises in the backward pass of the third micro-batch that goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        output = x * self.weight
        if output.requires_grad:
            output.register_hook(self._look)
        return output

    def _look(self, grad: Tensor) -> None:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("on the way back")


class Fails(nn.Module):
    """Raises on the second row."""

    def forward(self, x: Tensor) -> Tensor:
        if x.flatten()[0] == 1:
            raise LookupError("row 1")
        return x * 2


class StaysHere(NamedTuple):
    """A value that no other process can read."""

    value: Tensor

    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise LookupError("this value cannot be read here")


class SendsWhatStays(nn.Module):
    def forward(self, x: Tensor) -> StaysHere:
        return StaysHere(x)


class Takes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def errors() -> dict[str, Any]:
    """An error in each place, and whether the Pipe goes on after it."""
    found: dict[str, Any] = {}
    for places in (("w1", "w2", None), (None, "w1", "w2"), ("w2", None, "w1")):
        naps = Naps()
        pipe = Pipe(placed(nn.Sequential(naps, Fails(), nn.Linear(1, 1)), *places), chunks=8)
        caught = raised(lambda pipe=pipe: pipe(torch.arange(8.0).view(8, 1)))
        calls = pipe.state_dict()["0.counted"].clone()
        ones = torch.full((8, 1), 3.0)
        output = pipe(ones).local_value()
        output.sum().backward()
        expected = [8 * 6.0, 8.0]
        optimizer = pipe.follow(torch.optim.SGD(pipe.parameters(), 1.0))
        before = copy.deepcopy(pipe.state_dict())
        optimizer.step()
        after = pipe.state_dict()
        grads = [(before[name] - after[name]).item() for name in ("2.weight", "2.bias")]
        found[str(places)] = {**caught, "calls": calls.item(), "grads": grads, "expected": expected}
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    pipe = Pipe(placed(copy.deepcopy(net), "w1", "w2", None), chunks=2)
    optimizer = pipe.follow(torch.optim.SGD(pipe.parameters(), 1.0))
    x = torch.rand(4, 1)
    output = pipe(x).local_value()
    wrong = {**net.state_dict(), "1.weight": torch.ones(2, 2)}
    found["wrong state"] = [raised(lambda: pipe.load_state_dict(wrong)), raised(lambda: pipe(x))]
    output.sum().backward()
    optimizer.step()
    net(x).sum().backward()
    torch.optim.SGD(net.parameters(), 1.0).step()
    found["pass before it"] = {name: (value, net.state_dict()[name]) for name, value in pipe.state_dict().items()}
    for place in ("w1", None):
        pipe = Pipe(placed(nn.Sequential(nn.Linear(1, 1), FailsGoingBack(), Naps()), "w2", place, "w1"), chunks=6)
        loss = pipe(torch.rand(6, 1)).local_value().sum()
        found[f"back, {place}"] = raised(loss.backward)
        pipe.zero_grad()
        found[f"back, {place}, again"] = raised(lambda pipe=pipe: pipe(torch.rand(6, 1)).local_value().sum().backward())
    pipe = Pipe(placed(nn.Sequential(SendsWhatStays(), Takes(), nn.Linear(1, 1)), "w1", "w2", None), chunks=2)
    begin = time.monotonic()
    found["not delivered"] = {**raised(lambda: pipe(torch.rand(6, 1))), "seconds": time.monotonic() - begin}
    return found


def raised(call: Callable[[], Any]) -> dict[str, str]:
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error), "cause": str(error.__cause__)}
    return {"type": "nothing", "message": "", "cause": ""}


STASHED: list[Any] = []
"""In a worker: weak references to what layers have stashed there."""


@skippable(stash=["x"])
class Stashes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = x * 2
        STASHED.append(weakref.ref(skip.untyped_storage()))
        yield stash("x", skip)
        del skip
        return x + 1


@skippable(pop=["x"])
class Pops(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("x")
        STASHED.append(weakref.ref(skip.untyped_storage()))
        return x + skip


def num_alive() -> int:
    """How many of the skips are still there, in this process."""
    gc.collect()
    return sum(reference() is not None for reference in STASHED)


def freed() -> dict[str, list[int]]:
    """How many skips are alive on each worker after a forward pass, and after the backward pass."""
    found = {}
    for mode in ("never", "always"):
        net = nn.Sequential(Stashes(), nn.Linear(2, 2), Pops())
        pipe = Pipe(placed(net, "w1", None, "w2"), chunks=2, checkpoint=mode)
        output = pipe(torch.rand(4, 2, requires_grad=True)).local_value()
        alive = [rpc.rpc_sync(f"worker{k}", num_alive) for k in (1, 2)]
        output.sum().backward()
        found[mode] = alive + [rpc.rpc_sync(f"worker{k}", num_alive) for k in (1, 2)]
    return found


def two_processes() -> list[dict[str, Any]]:
    """A small U-Net half on another process, and in one."""
    torch.set_default_dtype(torch.float64)
    net = u_net()
    net[3] = nn.GroupNorm(2, 12)
    with rpc_workers(1):
        pipe = Pipe(placed(copy.deepcopy(net), None, "w1", "w1", "w1", None, None, "w1", None), chunks=3)
        return [trained(pipe), trained(net)]


def everything() -> dict[str, Any]:
    """All of them, in one set of processes."""
    from pipe_odds_job import mixed, odds, optimizers, partitions, refusals

    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    with rpc_workers(2):
        found: dict[str, Any] = {}
        for job in (parity, overlap, one_worker, errors, freed, odds, optimizers, partitions, refusals, mixed):
            found[job.__name__] = job()
            gc.collect()
        return found
