"""The cost of layers: what is counted, for every kind of layer, and that the model is left as it was."""

import copy
import random
import time
import weakref

import numpy
import pytest
import torch
from sleep_layer import READ_SECONDS, Sleep, only_sleep_takes_time, slept
from torch import nn

from strategies.pipeline.partition.balance import balance_by_size, balance_by_time
from strategies.pipeline.partition.profiling import layer_seconds, layer_sizes

FLOAT_BYTES = 4


class Call(nn.Module):
    """A layer made of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, value):
        return self.function(value)


def sizes(module, sample, *, chunks=1, param_scale=0.0):
    return layer_sizes(module, sample, chunks=chunks, param_scale=param_scale, device=None)


# --- time


def test_time_includes_the_backward_pass(monkeypatch):
    only_sleep_takes_time(monkeypatch)
    module = nn.Sequential(nn.Linear(2, 2), Sleep(0.0, 0.03), nn.Linear(2, 2), nn.Linear(2, 2))
    seconds = layer_seconds(module, torch.rand(3, 2), timeout_seconds=0.1, device=None)
    assert [*map(sum, seconds)] == pytest.approx([0.0, 0.03, 0.0, 0.0], abs=20 * READ_SECONDS)


def test_time_excludes_the_first_passes(monkeypatch):
    """A pass that imports or compiles something does not count, wherever it stands."""
    only_sleep_takes_time(monkeypatch)

    class SlowStart(nn.Module):
        passes = 0

        def forward(self, value):
            self.passes += 1
            return slept(value, 0.1 if self.passes <= 2 else 0.001, 0.0)

    seconds = layer_seconds(nn.Sequential(SlowStart(), SlowStart()), torch.rand(1), timeout_seconds=0.01, device=None)
    assert [*map(sum, seconds)] == pytest.approx([0.001] * 2, abs=20 * READ_SECONDS)


def test_timeout_bounds_the_measurement(monkeypatch):
    only_sleep_takes_time(monkeypatch)
    module = nn.Sequential(*(Sleep(0.01) for _ in range(4)))

    def duration(timeout):
        start = time.perf_counter()
        balance_by_time(2, module, torch.rand(1), timeout=timeout)
        return time.perf_counter() - start

    fewest = 4 * 5 * 0.01  # two passes to warm up and three that count, of each layer
    assert duration(0.001) == pytest.approx(fewest, rel=0.1)
    assert duration(0.5) == pytest.approx(4 * 2 * 0.01 + 0.5, rel=0.1)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda:0"))


class Gpu:
    """A GPU with its own time: a process launches work on it, which takes longer than the launch."""

    LAUNCH_SECONDS = 0.001

    def __init__(self, monkeypatch):
        self.seconds, self.pending, self.events = 0.0, 0.0, []
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(time, "perf_counter", lambda: self.seconds)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.empty(0))
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)

    def launch(self, name, seconds):
        self.seconds += self.LAUNCH_SECONDS
        self.pending += seconds
        self.events.append(name)

    def synchronize(self, device):
        assert device == torch.device("cuda:0")
        self.seconds, self.pending = self.seconds + self.pending, 0.0
        self.events.append("wait")


class Launches(nn.Module):
    """A layer whose forward and backward passes take some seconds of a GPU."""

    def __init__(self, gpu, forward_seconds, backward_seconds):
        super().__init__()
        self.gpu, self.forward_seconds, self.backward_seconds = gpu, forward_seconds, backward_seconds

    def __deepcopy__(self, memo):
        return Launches(self.gpu, self.forward_seconds, self.backward_seconds)

    def forward(self, value):
        self.gpu.launch("F", self.forward_seconds)
        output = value * 1
        output.register_hook(lambda grad: self.gpu.launch("B", self.backward_seconds))
        return output


def test_the_clock_waits_for_the_gpu_around_each_pass(monkeypatch):
    """Without the waits, each pass would take the time of its launch, or that of work of the layer before."""
    gpu = Gpu(monkeypatch)
    layers = nn.Sequential(*(Launches(gpu, k, 2 * k) for k in (5, 1, 1, 2)))
    sample = torch.ones(2, 3).as_subclass(OnGpu).requires_grad_()
    seconds = layer_seconds(layers, sample, timeout_seconds=0.1, device=None)
    launches = 2 * Gpu.LAUNCH_SECONDS
    assert [*map(sum, seconds)] == pytest.approx([15 + launches, 3 + launches, 3 + launches, 6 + launches])
    assert gpu.events[:6] == ["wait", "F", "wait", "wait", "B", "wait"]
    assert gpu.events == gpu.events[:6] * (len(gpu.events) // 6)
    assert balance_by_time(2, layers, sample) == [1, 3]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    without = layer_seconds(layers, sample, timeout_seconds=0.1, device=None)
    assert [*map(sum, without)] == pytest.approx([launches] * 4)


# --- size


def test_size_of_activations():
    """Autograd's savings and the output, without the input and without parameters."""
    module = nn.Sequential(
        nn.Linear(10, 20),  # its output; it saves its input
        nn.ReLU(),  # its output, which it saves as well
        nn.Sigmoid(),
        nn.ReLU(inplace=True),  # nothing of its own
        nn.Flatten(),  # a view
        nn.Linear(20, 5),
    )
    rows = 8
    assert sizes(module, torch.rand(rows, 10)) == [n * rows * FLOAT_BYTES for n in (20, 20, 20, 0, 0, 5)]
    assert sizes(module, torch.rand(rows, 10), chunks=4) == [n * 2 * FLOAT_BYTES for n in (20, 20, 20, 0, 0, 5)]


def test_size_counts_what_autograd_keeps_and_not_what_it_frees():
    def keeps_three(value):
        return value.exp().exp().exp()

    def frees_two(value):
        value.exp().exp()
        return value * 2

    # In a layer of its own the input of exp() is not kept, its result is.
    module = nn.Sequential(nn.Linear(4, 4), Call(keeps_three), Call(frees_two))
    assert sizes(module, torch.rand(2, 4)) == [n * 8 * FLOAT_BYTES for n in (1, 3, 1)]


def test_size_of_parameters():
    layer = nn.Linear(10, 10, bias=False)
    frozen = nn.Linear(10, 10, bias=False).requires_grad_(False)
    module = nn.Sequential(layer, frozen)
    activations = 10 * FLOAT_BYTES
    parameters = 100 * FLOAT_BYTES
    assert sizes(module, torch.rand(1, 10), param_scale=3) == [3 * parameters + activations, parameters + activations]
    assert sizes(module, torch.rand(1, 10), param_scale=0) == [activations] * 2


def test_size_does_not_depend_on_the_random_state():
    def grow(value):
        return value.repeat(1, int(torch.randint(1, 50, ()))) if value.shape[1] < 100 else value

    module = nn.Sequential(*(Call(grow) for _ in range(4)))
    found = set()
    for seed in range(5):
        torch.manual_seed(seed)
        found.add(tuple(sizes(module, torch.ones(2, 1))))
    assert len(found) == 1


# --- what a model may consist of


class Twin(nn.Module):
    def forward(self, value):
        return value, {"detached": value.detach(), "name": "twin", "nothing": None}


class Join(nn.Module):
    def forward(self, value):
        return value[0] + value[1]["detached"]


MODELS = {
    "embedding": (lambda: [nn.Embedding(11, 6), nn.Flatten(), nn.Linear(18, 2)], lambda: torch.randint(11, (5, 3))),
    "tuples": (lambda: [nn.Linear(3, 3), Twin(), Join(), nn.Linear(3, 1)], lambda: torch.rand(5, 3)),
    "tuple sample": (lambda: [Call(lambda pair: pair[0] * pair[1]), nn.Linear(3, 1)], lambda: (torch.rand(5, 3), 2.0)),
    "frozen": (
        lambda: [nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)],
        lambda: torch.rand(5, 3),
    ),
    "no gradient": (
        lambda: [nn.Linear(3, 3), Call(lambda value: value.argmax(1)), nn.Embedding(3, 2)],
        lambda: torch.rand(5, 3),
    ),
    "no parameters": (lambda: [nn.ReLU(), nn.Flatten()], lambda: torch.rand(5, 3, 2)),
    "in place": (
        lambda: [nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True)],
        lambda: torch.rand(5, 3) - 0.5,
    ),
    "dropout and batch norm": (
        lambda: [
            nn.Conv2d(2, 3, 3),
            nn.BatchNorm2d(3),
            nn.Dropout(),
            nn.Flatten(),
            nn.BatchNorm1d(12),
            nn.Linear(12, 2),
        ],
        lambda: torch.rand(5, 2, 4, 4),
    ),
    "one row": (lambda: [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)], lambda: torch.rand(1, 3)),
    "tied": (lambda: [layer := nn.Linear(3, 3), nn.ReLU(), layer], lambda: torch.rand(5, 3)),
    "one layer per stage": (lambda: [nn.Linear(3, 3), nn.Linear(3, 3)], lambda: torch.rand(5, 3)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("by", ["size", "time"])
def test_every_kind_of_layer_and_nothing_changes(name, by):
    make_layers, make_sample = MODELS[name]
    module = nn.Sequential(*make_layers())
    module[0].eval()
    sample = make_sample()
    before = copy.deepcopy(
        (module.state_dict(), [child.training for child in module.modules()], sample, torch.get_rng_state())
    )
    python_state, numpy_state = random.getstate(), str(numpy.random.get_state())
    grad_mode = torch.is_grad_enabled()

    if by == "size":
        balance = balance_by_size(2, module, sample, chunks=2)
    else:
        balance = balance_by_time(2, module, sample, timeout=0.001)

    assert len(balance) == 2 and min(balance) >= 1 and sum(balance) == len(module)
    state, modes, sample_before, generator_state = before
    assert state.keys() == module.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())
    assert modes == [child.training for child in module.modules()]
    torch.testing.assert_close(sample, sample_before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert (random.getstate(), str(numpy.random.get_state())) == (python_state, numpy_state)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.is_grad_enabled() == grad_mode


def test_random_state_is_kept_when_a_layer_fails():
    def draw_and_fail(value):
        torch.rand(1), random.random(), numpy.random.rand()
        raise ArithmeticError("no")

    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    with pytest.raises(ArithmeticError):
        balance_by_size(1, nn.Sequential(Call(draw_and_fail)), torch.rand(2))
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(numpy.random.get_state())) == before[1:]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_measures_training_also_where_gradients_are_off(mode):
    module = nn.Sequential(nn.Linear(4, 4), Call(lambda value: value.exp().exp()))
    expected = sizes(module, torch.rand(2, 4))
    with mode():
        assert sizes(module, torch.rand(2, 4)) == expected
        assert layer_seconds(module, torch.rand(2, 4), timeout_seconds=0.001, device=None)


def test_layers_are_measured_in_training_mode():
    modes = []

    class NotesMode(nn.Module):
        def forward(self, value):
            modes.append(self.training)
            return value

    module = nn.Sequential(NotesMode()).eval()
    balance_by_size(1, module, torch.rand(2))
    balance_by_time(1, module, torch.rand(2), timeout=0.001)
    assert len(modes) > 2 and all(modes)


@pytest.mark.parametrize("by", ["size", "time"])
def test_one_layer_is_copied_at_a_time(by):
    living = weakref.WeakSet()
    most = 0

    class Counted(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            living.add(self)

        def __deepcopy__(self, memo):
            nonlocal most
            twin = Counted()
            most = max(most, len(living) - 4)
            return twin

    module = nn.Sequential(*(Counted() for _ in range(4)))
    if by == "size":
        balance_by_size(2, module, torch.rand(2, 3))
    else:
        balance_by_time(2, module, torch.rand(2, 3), timeout=0.001)
    assert most == 1


def test_device():
    """Layers that live elsewhere are measured where they are to run; meta tensors stand for another device."""
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    on_meta = layer_sizes(module, torch.rand(3, 4), chunks=1, param_scale=2.0, device="meta")
    assert on_meta == sizes(module, torch.rand(3, 4), param_scale=2.0)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


@pytest.mark.gpu
def test_cuda():
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 8)]
    on_cpu = sizes(nn.Sequential(*layers), torch.rand(16, 64), param_scale=2.0)
    module = nn.Sequential(*layers).cuda()
    sample = torch.rand(16, 64, device="cuda")
    generator_state = torch.cuda.get_rng_state()
    assert len(sizes(module, sample.cpu(), param_scale=2.0)) == len(on_cpu)
    assert balance_by_time(2, module, sample, timeout=0.1)
    assert torch.equal(torch.cuda.get_rng_state(), generator_state)
    assert {parameter.device.type for parameter in module.parameters()} == {"cuda"}
    slow = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 64))
    seconds = layer_seconds(slow, torch.rand(4096, 4096), timeout_seconds=0.5, device="cuda")
    assert sum(seconds[1]) > 2 * sum(seconds[3])  # only if the clock waits for the device
