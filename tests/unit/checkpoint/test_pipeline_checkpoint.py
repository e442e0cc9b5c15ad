"""A pipeline's state is gathered under the names of one process, written by its stages and loaded by them.

The stage of a worker is in this process, behind a remote stage that calls it at once.
"""

import itertools
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from answered import Answered
from parity import alike
from torch import nn
from torch.optim import AdamW, Optimizer

from strategies.checkpoint import pipeline_checkpoint
from strategies.checkpoint.background import snapshot
from strategies.checkpoint.pipeline_checkpoint import StageStates
from strategies.checkpoint.references import Unread
from strategies.checkpoint.save_and_load import load_sharded, save_sharded, sharded_tensors
from strategies.common.activity import Activity
from strategies.common.errors import WorkerLost
from strategies.pipeline.control import shelf
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.parts import Part, PartKind, Piece
from strategies.pipeline.optim.optimizers import PipelineOptimizers
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.state.held import HeldState
from strategies.pipeline.state.shelved import ShelvedTensor
from strategies.pipeline.state.stage_state import StageState
from strategies.pipeline.state.state_dict import StateOfStages
from strategies.pipeline.worker.hosted import HostedStage
from strategies.sharding.divided_layers import PlannedModel, TensorGroup, connect


class Stage(HostedStage):
    """A worker's stage without a data plane."""

    def __init__(self, layers: nn.Sequential, optimizer: Optimizer, numbers: list[int]) -> None:
        (own,) = cut(layers, [len(layers)])
        self.held = HeldState(StageState(own, numbers=[numbers]), [optimizer], torch.device("cpu"))
        self._activity = Activity()


class Remote:
    """Calls the stage at once, in place of RPC."""

    description = "stage 0"
    version = 0
    in_pass = False
    on_use = staticmethod(lambda what, in_pass: None)

    def __init__(self, stage: Stage) -> None:
        self.stage, self.process = stage, SimpleNamespace(description="process 7")
        self.has_ended = False
        self.fetched: list[list[Piece]] = []
        self._numbers = itertools.count()

    def new_number(self) -> int:
        return next(self._numbers)

    def ask(self, command: Any, *arguments: Any) -> Answered:
        if command is StageCommands.shelved:
            self.fetched.append(arguments[1])
        return Answered(getattr(self.stage, command.__name__)(*arguments))

    send = ask

    def readable(self) -> "Remote":
        return self

    def beside(self, function: Any, *arguments: Any, is_logged: bool = False) -> Any:
        reference = SimpleNamespace(local_value=lambda: SimpleNamespace(hosted=self.stage))
        done: torch.futures.Future[Any] = torch.futures.Future()
        try:
            done.set_result(function(reference, *arguments))
        except Exception as error:
            done.set_exception(WorkerLost("stage 0 was killed") if self.has_ended else error)
        return done


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.outside = nn.Linear(2, 2)


def trained() -> tuple[Model, AdamW]:
    model = Model()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1))
    model.outside(model.layers(torch.randn(5, 3))).sum().backward()
    optimizer.step()
    return model, optimizer


class TwoStages:
    """The same training as :func:`trained`, with the first two layers on a worker."""

    def __init__(self, cls: type[AdamW] = AdamW) -> None:
        whole, stepped = trained()
        there = deepcopy(whole.layers[:2])
        self.model = deepcopy(whole)
        self.model.layers[:2].to("meta")
        self.optimizer = cls(self.model.parameters(), lr=torch.tensor(0.1))
        of_stage = cls(there.parameters())
        states = deepcopy(stepped.state_dict()["state"])
        for number, parameter in enumerate(self.model.parameters()):
            if not parameter.is_meta:
                self.optimizer.state[parameter] = states[number]
        for number, parameter in enumerate(there.parameters()):
            of_stage.state[parameter] = states[number]
        self.stage = Stage(there, of_stage, [0, 1, 2, 3])
        self.remote = Remote(self.stage)
        remotes: Any = [self.remote]
        stages = cut(self.model.layers, [2, len(self.model.layers) - 2])
        optimizers = PipelineOptimizers([self.optimizer], lambda parameter: "", lambda: None)
        optimizers.connect(remotes, [[[0, 1, 2, 3]]])
        state = StateOfStages(self.model.layers, stages, remotes)
        self.pipeline: Any = SimpleNamespace(
            remotes=remotes,
            stages=stages,
            optimizers=optimizers,
            states=[state],
            divided=None,
            module=self.model.layers,
            wait=lambda: None,
        )
        self.states = StageStates(self.pipeline, self.model, "layers")

    def checkpoint(self) -> dict[str, Any]:
        states = self.states.optimizer_state(self.optimizer)
        return {"state_dict": self.states.weights(), "optimizer_states": [states], "epoch": 3}

    def gathered(self) -> dict[str, Any]:
        checkpoint = self.checkpoint()
        self.states.gather(checkpoint)
        return checkpoint


def expected() -> dict[str, Any]:
    model, optimizer = trained()
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}


def test_gathered() -> None:
    two = TwoStages()
    checkpoint = two.checkpoint()
    elsewhere = [key for key, tensor in sharded_tensors(checkpoint).items() if isinstance(tensor, ShelvedTensor)]
    assert len(elsewhere) == 7 + 4 * 3  # parameters and buffers of two layers, and what Adam has for four parameters
    assert two.remote.fetched == [] and len(two.stage.held.shelf) == 2
    two.states.gather(checkpoint)
    assert not any(tensor.is_meta for tensor in sharded_tensors(checkpoint).values())
    assert checkpoint["state_dict"]._metadata == expected()["state_dict"]._metadata
    alike(checkpoint, expected(), tolerance=0.0)
    received = {id(tensor) for tensor in two.states.gathered_tensors()}
    assert elsewhere == [key for key, tensor in sharded_tensors(checkpoint).items() if id(tensor) in received]
    two.states.forget()
    assert two.states.gathered_tensors() == [] and two.stage.held.shelf == {}


def test_a_divided_weight_that_is_not_saved() -> None:
    def leave_out(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del state["outside.weight"]

    two = TwoStages()
    two.model.register_state_dict_post_hook(leave_out)
    two.pipeline.divided = PlannedModel(two.model, {"outside": "colwise_gather_output"}, 0, 1)
    connect(TensorGroup(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))))
    try:
        weights = two.gathered()["state_dict"]
    finally:
        connect(None)
    saved = {name: value for name, value in expected()["state_dict"].items() if name != "outside.weight"}
    alike(dict(weights), saved, tolerance=0.0)


def test_what_hooks_see_of_other_stages() -> None:
    two = TwoStages()
    weight, moments = two.stage.held.layers[0].weight, two.stage.held.optimizers[0].state
    state = two.checkpoint()["state_dict"]
    late = state["layers.0.weight"]
    assert late.shape == (4, 3) and late.dtype == torch.float32 and late.device.type == "cpu"
    assert torch.equal(late, weight) and late.norm() == weight.norm() and torch.equal(late.detach()[1], weight[1])
    assert torch.equal(deepcopy(late), weight) and (late.cpu().numpy() == weight.detach().numpy()).all()
    assert torch.equal({**state}["layers.1.running_mean"].half(), two.stage.held.layers[1].running_mean.half())
    with pytest.raises(RuntimeError, match=r"`mul_` on 0.weight \[4, 3\] of a checkpoint.*is on stage 0"):
        late.mul_(2)
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(late, weight), "as in one process, it follows the model"
    assert moments


def test_what_was_gathered_follows_the_stages() -> None:
    two = TwoStages()
    weight, moments = two.stage.held.layers[0].weight, two.stage.held.optimizers[0].state
    checkpoint = two.checkpoint()
    states = checkpoint["optimizer_states"][0]["state"][0]
    before = checkpoint["state_dict"]["layers.0.weight"], states["exp_avg"]
    weight.data = torch.zeros(4, 3)
    moments[weight] = {"exp_avg": torch.zeros(4, 3), "more": {"sum": torch.ones(2)}}
    assert all(tensor.any() for tensor in before)
    two.states.refresh()
    assert not any(tensor.any() for tensor in before) and len(two.stage.held.shelf) == 2
    assert states.keys() == {"exp_avg", "more"} and torch.equal(states["more"]["sum"], torch.ones(2))


@pytest.mark.parametrize("needs_copy", [False, True])
def test_one_file_that_is_written_as_it_arrives(tmp_path: Path, needs_copy: bool, monkeypatch: Any) -> None:
    two, path, whole = TwoStages(), tmp_path / "a.ckpt", tmp_path / "whole.ckpt"
    monkeypatch.setattr(shelf, "_MESSAGE_BYTES", 20)
    checkpoint = two.checkpoint()
    checkpoint["mine"] = checkpoint["state_dict"]["layers.1.bias"] = torch.full((4,), 7.0)
    state = checkpoint["state_dict"]
    checkpoint["again"] = [(state["layers.1.weight"],), state["layers.0.weight"][0]]
    in_one = expected()
    in_one["mine"] = in_one["state_dict"]["layers.1.bias"] = torch.full((4,), 7.0)
    in_one["again"] = [(in_one["state_dict"]["layers.1.weight"],), in_one["state_dict"]["layers.0.weight"][0].clone()]
    write = two.states.prepare_file(snapshot(checkpoint) if needs_copy else checkpoint, path, needs_copy=needs_copy)
    if needs_copy:
        with torch.no_grad():
            two.stage.held.layers[0].weight.zero_()  # as the next step does
    write()
    with open(whole, "wb") as file:
        torch.save(in_one, file)
    read = torch.load(path, weights_only=True)
    alike(read, torch.load(whole, weights_only=True), tolerance=0.0)
    assert read["again"][0][0] is read["state_dict"]["layers.1.weight"]
    if not needs_copy:
        assert path.read_bytes() == whole.read_bytes() and {
            sum(p.stop - p.start for p in sent) for sent in two.remote.fetched
        } <= set(range(21))
    del checkpoint, state, write
    two.states.forget()
    assert two.stage.held.shelf == {}


@pytest.mark.parametrize("needs_copy", [False, True])
def test_written_and_read_by_the_stages(tmp_path: Path, needs_copy: bool) -> None:
    two, path = TwoStages(), tmp_path / "a.ckpt"
    checkpoint = two.checkpoint()
    assert checkpoint["state_dict"]["layers.0.weight"].is_meta and not checkpoint["state_dict"]["outside.bias"].is_meta
    write = two.states.prepare_sharded(checkpoint, path, needs_copy=needs_copy)
    if needs_copy:
        with torch.no_grad():
            two.stage.held.layers[0].weight.zero_()  # as the next step does
    write()
    assert sorted(file.name for file in path.rglob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    alike(load_sharded(path)[0], expected(), tolerance=0.0)
    del checkpoint, write
    two.states.forget()
    assert not two.stage.held.shelf

    other = TwoStages()
    for optimizer in (other.optimizer, other.stage.held.optimizers[0]):
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    bare, shards = load_sharded(path, ["state_dict"])
    other.states.load_optimizer_states(bare["optimizer_states"], Unread(shards, bare))
    alike(other.gathered()["optimizer_states"], expected()["optimizer_states"], tolerance=0.0)
    assert not other.stage.held.states_read


def renamed(state: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    states = {k: {new if name == old else name: v for name, v in own.items()} for k, own in state["state"].items()}
    return {**state, "state": states}


class Renames(AdamW):
    """Has other names in its state dict."""

    def state_dict(self) -> dict[str, Any]:
        return renamed(super().state_dict(), "exp_avg", "mean")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(renamed(state, "mean", "exp_avg"))


class TellsStates(TwoStages):
    """Notes the states of the worker after each ``load_state_dict``."""

    def __init__(self, cls: type[AdamW]) -> None:
        super().__init__(cls)
        self.seen: list[dict[Any, Any]] = []
        if cls is AdamW:
            self.optimizer.register_state_dict_post_hook(lambda own, state: renamed(state, "exp_avg", "mean"))
            self.optimizer.register_load_state_dict_pre_hook(lambda own, state: renamed(state, "mean", "exp_avg"))
        self.optimizer.register_load_state_dict_post_hook(lambda own: self.seen.append(self.states_there()))

    def states_there(self) -> dict[Any, Any]:
        return dict(self.stage.held.capture(Part(PartKind.OPTIMIZER, 0)))

    def clear(self) -> None:
        for optimizer in (self.optimizer, self.stage.held.optimizers[0]):
            optimizer.state.clear()


@pytest.mark.parametrize("cls", [AdamW, Renames], ids=["hooks", "overridden methods"])
def test_what_an_optimizer_changes_in_its_state_dict(cls: type[AdamW], tmp_path: Path) -> None:
    """The changes apply to the states of all stages, and are undone for all of them."""
    plain = expected()["optimizer_states"][0]
    full, sharded = TellsStates(cls), TellsStates(cls)
    checkpoint = full.gathered()
    alike(checkpoint["optimizer_states"][0], renamed(plain, "exp_avg", "mean"), tolerance=0.0)
    save_sharded(checkpoint, tmp_path / "a.ckpt")
    bare, shards = load_sharded(tmp_path / "a.ckpt", ["state_dict"])
    full.clear()
    sharded.clear()
    full.pipeline.optimizers.load_state_dict(full.optimizer, checkpoint["optimizer_states"][0])
    sharded.states.load_optimizer_states(bare["optimizer_states"], Unread(shards, bare))
    for two in (full, sharded):
        here = {n: two.optimizer.state[p] for n, p in enumerate(two.model.parameters()) if not p.is_meta}
        alike({**two.states_there(), **here}, plain["state"], tolerance=0.0)
        assert [states.keys() for states in two.seen] == [two.states_there().keys()]


def load_changed(change: Callable[[dict[int, Any]], Any], two: TwoStages, path: Path) -> Any:
    """Load optimizer states of a sharded checkpoint that a hook changes, and return the expected ones."""
    save_sharded(expected(), path)
    whole, (bare, shards) = load_sharded(path)[0], load_sharded(path, ["state_dict"])
    unread = Unread(shards, bare)
    for checkpoint in (whole, bare):
        change(checkpoint["optimizer_states"][0]["state"])
    two.states.load_optimizer_states(bare["optimizer_states"], unread)
    return whole["optimizer_states"]


@pytest.mark.parametrize("first", [0, 4], ids=["on a worker", "on the driver"])
def test_optimizer_states_that_on_load_checkpoint_replaces(first: int, tmp_path: Path) -> None:
    def change(states: dict[int, Any]) -> None:
        a, b, c, d = range(first, first + 4)
        states[a]["exp_avg"] = torch.zeros(states[a]["exp_avg"].shape)
        states[a]["more"] = {"of the hook": torch.ones(2)}
        states[b]["exp_avg"], states[b]["exp_avg_sq"] = states[b].pop("exp_avg_sq"), states[b].pop("exp_avg")
        states[c], states[d] = states[d], states[c]

    two = TwoStages()
    states = load_changed(change, two, tmp_path / "a.ckpt")
    alike(two.gathered()["optimizer_states"], states, tolerance=0.0)


@pytest.mark.parametrize("number", [0, 4], ids=["on a worker", "on the driver"])
@pytest.mark.parametrize(
    "change",
    [lambda own: own.update(exp_avg=torch.zeros_like(own["exp_avg"])), lambda own: own["exp_avg"].zero_()],
    ids=["zeros_like", "in place"],
)
def test_optimizer_states_that_on_load_checkpoint_computes_from_no_values(
    change: Callable[[Any], Any], number: int, tmp_path: Path
) -> None:
    two = TwoStages()
    named = (
        rf"has copied, converted or computed optimizer_states\.0\.state\.{number}\.exp_avg of the sharded checkpoint"
    )
    with pytest.raises(RuntimeError, match=named):
        load_changed(lambda states: change(states[number]), two, tmp_path / "a.ckpt")
    alike(two.gathered()["optimizer_states"], expected()["optimizer_states"], tolerance=0.0)


def test_a_stage_that_cannot_write(tmp_path: Path) -> None:
    two, path = TwoStages(), tmp_path / "a.ckpt"
    two.states.prepare_sharded(two.checkpoint(), path, needs_copy=False)()
    write = two.states.prepare_sharded({**two.checkpoint(), "epoch": 4}, path, needs_copy=False)
    two.stage.held.shelf.clear()
    named = rf"stage 0, process 7, could not write its part of the checkpoint {path}: "
    with pytest.raises(RuntimeError, match=named) as raised:
        write()
    assert isinstance(raised.value.__cause__, KeyError), "the traceback shows where it failed"
    two.remote.has_ended = True
    with pytest.raises(WorkerLost, match="stage 0 was killed"):
        write()
    assert load_sharded(path)[0]["epoch"] == 3 and len(list(path.iterdir())) == 2
    write = two.states.prepare_sharded(two.checkpoint(), tmp_path / "first.ckpt", needs_copy=False)
    two.stage.held.shelf.clear()
    with pytest.raises(WorkerLost, match="stage 0 was killed"):
        write()
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_of_the_part_of_the_driver_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two, write_shard = TwoStages(), pipeline_checkpoint.write_shard
    write = two.states.prepare_sharded(two.checkpoint(), tmp_path / "a.ckpt", needs_copy=False)

    def fails_on_the_driver(shards: Path, plan: Any, tensors: dict[str, Any]) -> Any:
        if "state_dict.outside.bias" in tensors:
            raise IndexError("of the driver")
        return write_shard(shards, plan, tensors)

    monkeypatch.setattr(pipeline_checkpoint, "write_shard", fails_on_the_driver)
    with pytest.raises(IndexError, match=r"^of the driver$"):
        write()
    two.stage.held.shelf.clear()
    two.remote.has_ended = True  # the stage is lost at the same time
    with pytest.raises(IndexError, match=r"^of the driver$"):
        write()
    assert not [*tmp_path.iterdir()]


def test_what_does_not_fit_reaches_no_stage() -> None:
    two = TwoStages()
    undo = two.states.check_before_loading()
    state = {name: value + 1 for name, value in expected()["state_dict"].items()}
    weight = state.pop("layers.2.weight")
    with pytest.raises(RuntimeError, match=r"missing in stage 1 \(layers 2 to 2: Linear\): layers.2.weight"):
        two.model.load_state_dict(state)
    alike(two.gathered()["state_dict"], dict(expected()["state_dict"]), tolerance=0.0)
    two.model.load_state_dict({**state, "layers.2.weight": weight})
    alike(two.gathered()["state_dict"], {**state, "layers.2.weight": weight}, tolerance=0.0)
    for function in undo:
        function()
    assert "load_state_dict" not in vars(two.model)


def test_a_pipeline_that_has_ended_keeps_its_module() -> None:
    two = TwoStages()
    pipelined, two.pipeline.states = two.model.layers, []
    with two.states.whole_module():
        assert two.model.layers is pipelined


def test_values_are_sent_to_a_stage_by_way_of_the_cpu() -> None:
    two, whole = TwoStages(), expected()
    weights = {
        name: t.to("meta" if name[:8] in ("layers.0", "layers.1") else "cpu") for name, t in whole["state_dict"].items()
    }
    with pytest.raises(NotImplementedError, match="meta"):  # which has no values to copy to the CPU
        two.model.load_state_dict(weights)
    (states,) = whole["optimizer_states"]
    for number in range(4):
        states["state"][number]["exp_avg"] = states["state"][number]["exp_avg"].to("meta")
    with pytest.raises(NotImplementedError, match="meta"):
        two.pipeline.optimizers.load_state_dict(two.optimizer, states)
