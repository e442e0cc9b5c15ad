"""What the driver finds changed on its copies of a worker's layers."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strategies.pipeline.state.mirror import Mirror, plain_attributes
from strategies.pipeline.state.objects import objects_of


def layers_and_mirror() -> tuple[nn.Sequential, Mirror]:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)))
    return layers, Mirror(layers, "stage 0")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_script_module_without_changes() -> None:
    mirror = Mirror(nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)), "stage 0")
    assert mirror.changes() == ({}, None) and not mirror.has_changed()


def test_attributes_and_flags_are_told_once() -> None:
    layers, mirror = layers_and_mirror()
    assert mirror.changes() == ({}, None)
    for rate in (0.1, 0.2, 0.3):  # each may get the address of the one before
        layers[1][0].p = rate + 0.01
        layers.eval() if rate == 0.2 else layers.train()
        layers[0].bias.requires_grad_(rate == 0.2)
        attributes, trained = mirror.changes()
        modes = {k: {"training": rate != 0.2} for k in range(5)} if rate > 0.1 else {}
        modes.setdefault(3, {})["p"] = rate + 0.01
        assert attributes == modes and trained == [True, rate == 0.2, True, True]
        assert mirror.changes() == ({}, None)


def test_numbers_of_numpy_are_sent() -> None:
    layers, mirror = layers_and_mirror()
    for rate in np.linspace(0.1, 0.3, 3):
        layers[1][0].p = rate
        (changed,) = mirror.changes()[0].values()
        assert changed == {"p": rate} and type(changed["p"]) is np.float64


def test_an_equal_value_under_another_name_is_a_change() -> None:
    layers, mirror = layers_and_mirror()
    layers[0].first = flag = "a flag"
    assert mirror.changes()[0] == {1: {"first": flag}}
    del layers[0].first
    layers[0].second = flag
    assert mirror.changes()[0] == {1: {"second": flag}}
    layers[0].second = "".join(["a", " flag"])  # another object, the same value
    assert mirror.changes() == ({}, None)


class Calibrated(nn.Module):
    """Sets numbers in its first forward pass, one of which was NaN before, one a list, and one absent."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kind, self.own = float("nan"), ["none"], float("nan")

    def forward(self) -> None:
        self.scale, self.kind, self.calls, self.own, self.both = 3.0, "found", 1, 2.0, 1


def test_what_a_layer_sets_first_in_a_worker_comes_back() -> None:
    here = nn.Sequential(Calibrated())
    mirror, there = Mirror(here, "stage 0"), deepcopy(here)
    there[0]()
    here.eval()
    changed, _ = mirror.changes()
    assert changed == {0: {"training": False}, 1: {"training": False}}  # the worker keeps its scale
    here[0].own, here[0].both = 5.0, 7  # what user code sets on the driver stays
    mirror.take_back(plain_attributes(there), objects_of(there))
    assert (here[0].scale, here[0].kind, here[0].calls) == (3.0, "found", 1)
    assert (here[0].own, here[0].both) == (5.0, 7)


class Receives:
    """Receives what a mirror sends, as a stage does."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def send(self, *command: Any) -> None:
        self.commands.append(command)


def send_buffers(*mirrors: Mirror) -> list[Receives]:
    stages = [Receives() for _ in mirrors]
    for mirror, stage in zip(mirrors, stages, strict=True):
        mirror.send_buffers(stage)
    for mirror in mirrors:
        mirror.restore_stand_ins()
    return stages


def test_another_tensor_assigned_to_a_buffer_is_a_change() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(2)).to("meta")
    mirror = Mirror(layers, "stage 0")
    for value, is_change in ((float("nan"), False), (2.0, True)):
        layers[0].running_mean = torch.full((2,), float("nan"))
        send_buffers(mirror)
        assert not mirror.has_changed()
        layers[0].running_mean = torch.full((2,), value)
        assert mirror.has_changed() == is_change


def test_a_buffer_that_this_process_uses_too_is_sent_when_it_changes() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(2))
    mirror = Mirror(layers, "stage 0", list(layers.buffers()))
    layers[0].running_mean.add_(1)
    assert mirror.has_changed()
    layers[0].running_var = torch.full((2,), 3.0)
    assert [name for name, _ in mirror.shared_changes()] == ["0.running_mean", "0.running_var"]
    send_buffers(mirror)
    assert not mirror.has_changed() and not [*mirror.shared_changes()]
    assert layers[0].running_var.tolist() == [3, 3]
    layers[0].running_var = torch.ones(4)  # such as a longer table
    send_buffers(mirror)
    assert not [*mirror.shared_changes()]


def test_a_tensor_assigned_to_a_buffer_of_two_stages_is_sent_to_both() -> None:
    norm = nn.BatchNorm1d(2).to("meta")
    mirrors = [Mirror(nn.Sequential(norm), f"stage {i}") for i in range(2)]
    norm.running_mean = torch.ones(2)
    for stage in send_buffers(*mirrors):
        ((_, _, values),) = stage.commands
        assert values["0.running_mean"].tolist() == [1, 1]
    assert norm.running_mean.is_meta


def add_hook(layers: nn.Sequential) -> None:
    layers[0].register_forward_hook(lambda *_: None)


def add_layer(layers: nn.Sequential) -> None:
    layers[1].append(nn.Identity())


def replace_layer(layers: nn.Sequential) -> None:
    layers[1][0] = nn.Dropout(0.5)


def replace_parameter(layers: nn.Sequential) -> None:
    layers[0].weight = nn.Parameter(torch.ones(2, 2))


def replace_buffer(layers: nn.Sequential) -> None:
    layers[1][1].running_mean = torch.ones(2)


@pytest.mark.parametrize("change", [add_hook, add_layer, replace_layer, replace_parameter, replace_buffer])
def test_another_structure_is_refused_each_time(change: Callable[[Any], None]) -> None:
    layers, mirror = layers_and_mirror()
    change(layers)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"stage 0, .*has another layer, parameter, buffer or hook"):
            mirror.changes()
