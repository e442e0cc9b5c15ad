"""Ranks that have divided the optimizer states: a group of one, or threads. ZeRO's tests have processes."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import alike
from torch import nn
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric

from strategies.checkpoint import save_and_load
from strategies.checkpoint.divided_rows import RowStates, read_rows
from strategies.checkpoint.ranks import DividedStates, RankStates, own_tensors, save_over_ranks
from strategies.checkpoint.references import Unread
from strategies.launch.session import join_group
from strategies.sharding.divided_optimizers import Ownership
from strategies.sharding.model import ShardedModel


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def checkpoint_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_saved_and_loaded(group: Any, tmp_path: Path) -> None:
    model, optimizer = trained()
    states = RankStates(Ownership([optimizer], 0, 1), group)
    alike(states.state_dict(optimizer, values=True), optimizer.state_dict(), tolerance=0.0)
    alike(states.state_dict(optimizer, values=False), optimizer.state_dict(), tolerance=0.0)
    checkpoint, path = checkpoint_of(model, optimizer), tmp_path / "a.ckpt"
    own = own_tensors(checkpoint, dict(model.named_parameters()), group)
    assert own.keys() == save_and_load.sharded_tensors(checkpoint).keys()
    save_over_ranks(checkpoint, path, own, group)
    alike(save_and_load.load_sharded(path)[0], checkpoint, tolerance=0.0)
    bare, shards = save_and_load.load_sharded(path, ["state_dict"])
    _, other = trained()
    for state in other.state.values():
        state["exp_avg"].zero_()
    states = RankStates(Ownership([other], 0, 1), group)
    states.load([other], bare["optimizer_states"], Unread(shards, bare))
    alike(other.state_dict(), optimizer.state_dict(), tolerance=0.0)


def test_all_but_parameters_is_that_of_rank_0() -> None:
    """A mean of one rank and a variance of another one belong to no model."""
    metric = MeanMetric()
    metric.persistent(True)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2), metric)
    parameters, checkpoint = dict(model.named_parameters()), {"state_dict": model.state_dict()}
    ranks: list[Any] = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2) for rank in range(2)]
    first, second = (own_tensors(checkpoint, parameters, rank).keys() for rank in ranks)
    assert first | second == {f"state_dict.{name}" for name in model.state_dict()} and not first & second
    assert second and second <= {f"state_dict.{name}" for name in parameters}


def test_gathered_states_follow_the_optimizer_until_they_are_forgotten(group: Any) -> None:
    _, optimizer = trained()
    states = RankStates(Ownership([optimizer], 0, 1), group)
    gathered = states.state_dict(optimizer, values=True)
    before, weight = gathered["state"][0]["exp_avg"], optimizer.param_groups[0]["params"][0]
    optimizer.state[weight] = {**optimizer.state[weight], "exp_avg": torch.zeros(4, 3)}
    states.refresh(optimizer)
    assert gathered["state"][0]["exp_avg"] is before and not before.any()
    states.forget()
    optimizer.state[weight] = {**optimizer.state[weight], "exp_avg": torch.ones(4, 3)}
    states.refresh(optimizer)
    assert not before.any()


@pytest.mark.parametrize("left", [{}, {"exp_avg": torch.zeros(4, 3)}], ids=["read", "loaded"])
def test_what_a_rank_has_of_parameters_that_it_does_not_own_is_not_saved(left: dict[str, Any], tmp_path: Path) -> None:
    """Reading ``optimizer.state[p]`` leaves an empty state; ``load_state_dict`` leaves one that no step changes."""
    optimizers = [trained()[1] for _ in range(2)]

    def saved_by(rank: int) -> list[dict[str, Any]]:
        optimizer = optimizers[rank]
        ownership = Ownership([optimizer], rank, 2)
        optimizer.state.update({p: dict(left) for p, owner in ownership.owners.items() if owner != rank})
        states = RankStates(ownership, join_group(f"{tmp_path.as_uri()}/ranks", rank, 2, 30))
        return [states.state_dict(optimizer, values=values).get("state", {}) for values in (True, False)]

    whole = trained()[1].state_dict()["state"]
    with ThreadPoolExecutor(2) as threads:
        (full, mine), (_, theirs) = threads.map(saved_by, range(2))
    alike(full, whole, tolerance=0.0)
    alike({0: mine[0], **theirs}, whole, tolerance=0.0)
    assert mine.keys() == whole.keys() and mine[1].keys() == whole[1].keys()
    assert all(value.is_meta for value in mine[1].values())


def test_what_cannot_be_saved(group: Any, tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint, path = checkpoint_of(model, optimizer), tmp_path / "a.ckpt"
    own = own_tensors(checkpoint, dict(model.named_parameters()), group)
    save_over_ranks(checkpoint, path, own, group)
    del own["state_dict.bias"]
    own["state_dict.more"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"only rank 0 has \['state_dict.bias'\], only other ranks .*_dict.more"):
        save_over_ranks({**checkpoint, "epoch": 4}, path, own, group)
    assert save_and_load.load_sharded(path)[0]["epoch"] == 3 and len(os.listdir(path)) == 2
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"could not be saved: rank 0: (NotADirectory|FileExists)Error"):
        save_over_ranks(checkpoint, tmp_path / "file" / "a.ckpt", own, group)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def loaded(change: Callable[[dict[str, Any]], Any], group: Any, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dict of a divided model from a sharded checkpoint that a hook changes, and the expected one."""
    torch.manual_seed(0)
    save_and_load.save_sharded({"state_dict": layers().state_dict()}, path)
    expected = save_and_load.load_sharded(path)[0]["state_dict"]
    change(expected)
    checkpoint, shards = save_and_load.load_sharded(path, ())
    unread, state = Unread(shards, checkpoint), checkpoint["state_dict"]
    change(state)
    model = layers()
    divided = ShardedModel(model, group, group, device=torch.device("cpu"), find_unused=False)
    model.load_state_dict(divided.with_rows(read_rows(unread, state, divided.parameters, group)))
    found = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    return found, dict(expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update({"0.weight": state["2.weight"], "2.weight": state["0.weight"]}),
        lambda state: state.update({"0.weight": state["2.weight"]}),
        lambda state: state.update({"0.weight": state["2.weight"].t(), "0.bias": state["2.weight"][1]}),
        lambda state: state.update({"0.weight": torch.zeros(4, 4), "1.running_mean": state["1.running_var"]}),
    ],
    ids=["renamed", "at two places", "views", "replaced"],
)
def test_weights_that_on_load_checkpoint_replaces(
    change: Callable[[dict[str, Any]], Any], group: Any, tmp_path: Path
) -> None:
    found, expected = loaded(change, group, tmp_path / "a.ckpt")
    alike(found, expected, tolerance=0.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update({"0.weight": torch.zeros_like(state["0.weight"])}),
        lambda state: state.update({"0.weight": state["0.weight"] * 0.5}),
        lambda state: state["0.weight"].zero_(),
    ],
    ids=["zeros_like", "computed", "in place"],
)
def test_weights_that_on_load_checkpoint_computes_from_no_values(
    change: Callable[[dict[str, Any]], Any], group: Any, tmp_path: Path
) -> None:
    said = r"on_load_checkpoint or a hook .* has copied, converted or computed state_dict\.0\.weight of the sharded"
    with pytest.raises(RuntimeError, match=said):
        loaded(change, group, tmp_path / "a.ckpt")


def divided_states(kind: str, optimizer: torch.optim.Optimizer, group: Any) -> DividedStates:
    return RowStates(group) if kind == "rows" else RankStates(Ownership([optimizer], 0, 1), group)


@pytest.mark.parametrize("kind", ["rows", "parameters"])
def test_optimizer_states_that_on_load_checkpoint_replaces(kind: str, group: Any, tmp_path: Path) -> None:
    model, optimizer = trained()
    save_and_load.save_sharded(checkpoint_of(model, optimizer), path := tmp_path / "a.ckpt")
    (bare, shards), (whole, _) = save_and_load.load_sharded(path, ["state_dict"]), save_and_load.load_sharded(path)
    unread = Unread(shards, bare)
    for checkpoint in (bare, whole):
        first, second = checkpoint["optimizer_states"][0]["state"].values()
        first["exp_avg"] = torch.zeros(4, 3)
        second["exp_avg"], second["exp_avg_sq"] = second.pop("exp_avg_sq"), second.pop("exp_avg")
    divided_states(kind, optimizer, group).load([optimizer], bare["optimizer_states"], unread)
    alike(optimizer.state_dict(), whole["optimizer_states"][0], tolerance=0.0)

    bare["optimizer_states"][0]["state"][1]["exp_avg"].mul_(2)
    with pytest.raises(
        RuntimeError, match=r"has copied, converted or computed optimizer_states\.0\.state\.1\.exp_avg of the sharded"
    ):
        divided_states(kind, optimizer, group).load([optimizer], bare["optimizer_states"], unread)
    alike(optimizer.state_dict(), whole["optimizer_states"][0], tolerance=0.0)
