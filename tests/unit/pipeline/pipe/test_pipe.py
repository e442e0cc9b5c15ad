"""``Pipe`` within one process, against the same layers called plainly, in float64."""

import copy
import functools
import gc
import operator
import pickle
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc

from strategies.pipeline import NoChunk, Pipe, WithDevice, is_checkpointing, is_recomputing
from strategies.pipeline.stage.calling import call_layer
from strategies.pipeline.stage.layers import RECOMPUTE_MODES as MODES

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module", autouse=True)
def others_are_no_garbage() -> None:
    """Has the collector look at the objects of these tests only, not at all that earlier ones have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not rpc.api._is_current_rpc_agent_set()  # no Pipe is left, so neither is its private RPC


def assert_same_training(pipe: nn.Module, plain: nn.Module, *inputs: Any, steps: int = 3) -> None:
    """Trains both and compares outputs, every parameter and every buffer."""
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (pipe, plain)]
    for _ in range(steps):
        outputs = [pipe(*inputs).local_value(), plain(*inputs)]
        torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            (output * torch.arange(output.numel()).view_as(output)).mean().backward()
            optimizer.step()
    theirs = plain.state_dict()
    for name, own in pipe.state_dict().items():
        torch.testing.assert_close(own, theirs[name], rtol=1e-9, atol=1e-9)


class CountsCalls(nn.Module):
    """The identity; counts how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("mode", MODES)
def test_trains_as_one_process(mode, rows):
    plain = nn.Sequential(
        nn.Linear(3, 8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        nn.LayerNorm(8),
        nn.Linear(8, 2),
    )
    pipe = Pipe(copy.deepcopy(plain), chunks=4, checkpoint=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # batches that do not divide, or are small, are nothing to warn of
        assert_same_training(pipe, plain, torch.rand(rows, 3))


@pytest.mark.parametrize(("mode", "recomputed"), [("always", 2), ("except_last", 1), ("never", 0)])
def test_recomputes(mode, recomputed):
    counting = CountsCalls()
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), counting), chunks=2, checkpoint=mode)
    pipe(torch.rand(4, 3)).local_value().sum().backward()
    assert counting.calls == 2 + recomputed
    pipe.eval()(torch.rand(4, 3)).local_value().sum().backward()
    assert counting.calls == 4 + recomputed


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.by).tanh()


def test_attributes_that_change_between_a_call_and_its_backward_pass():
    """A micro-batch is recomputed with those of its call, however often."""
    grads = []
    for mode in MODES:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), Scales())
        output = Pipe(net, chunks=2, checkpoint=mode)(torch.randn(4, 3)).local_value()
        net[1].by = 3.0
        for _ in range(2):
            output.square().sum().backward(retain_graph=True)
            assert net[1].by == 3.0
        grads.append(net[0].weight.grad)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-12, atol=1e-12)


class MovesItsCentre(nn.Module):
    """Subtracts a centre, which moves after every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("centre", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        y = (x - self.centre).square()
        self.calls += 1
        if self.calls % 2 == 0:
            self.centre += 1
        return y


def test_a_buffer_that_changes_in_some_micro_batches_only():
    torch.manual_seed(0)
    net, x, grads = nn.Sequential(nn.Linear(3, 3), MovesItsCentre()), torch.randn(6, 3), []
    for mode in MODES:
        layers = copy.deepcopy(net)
        pipe = Pipe(layers, chunks=3, checkpoint=mode)
        for _ in range(4):
            pipe(x).local_value().sum().backward()
        grads.append(layers[0].weight.grad)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-12, atol=1e-12)


def test_dropout_is_recomputed_with_the_same_masks():
    grads = []
    for mode in MODES:
        torch.manual_seed(1)
        pipe = Pipe(nn.Sequential(nn.Linear(4, 64), nn.Dropout(), nn.Linear(64, 1)), chunks=3, checkpoint=mode)
        x = torch.ones(5, 4, requires_grad=True)
        first, second = (pipe(x).local_value() for _ in range(2))
        assert not torch.equal(first, second)  # each pass draws others
        first.sum().backward()
        grads.append([x.grad, *(p.grad for p in pipe.parameters())])
    for others in grads[1:]:
        assert all(map(torch.equal, grads[0], others))


@pytest.mark.parametrize("mode", MODES)
def test_a_lazy_norm_counts_each_micro_batch_once(mode):
    norm = nn.LazyBatchNorm1d()
    pipe = Pipe(nn.Sequential(norm, nn.Linear(3, 2)), chunks=4, checkpoint=mode)
    for _ in range(2):
        pipe(torch.rand(8, 3)).local_value().sum().backward()
    assert norm.num_batches_tracked == 8


@pytest.mark.parametrize("mode", MODES)
def test_deferred_batch_norm(mode):
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    pipe = Pipe(copy.deepcopy(plain), chunks=4, checkpoint=mode, deferred_batch_norm=True)
    pipe = copy.deepcopy(pipe)
    for _ in range(2):
        x = torch.rand(11, 3)
        plain(x)
        pipe(x).local_value().sum().backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(pipe.get_buffer(name), buffer, rtol=1e-9, atol=1e-9)


class Raises(nn.Module):
    """Raises in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise LookupError("of the second micro-batch")
        return x


def test_the_first_error_ends_the_pass_and_not_the_pipe():
    before, after = CountsCalls(), CountsCalls()
    norm = nn.BatchNorm1d(1)
    pipe = Pipe(nn.Sequential(norm, before, Raises(), after), chunks=8, deferred_batch_norm=True)
    with pytest.raises(LookupError, match="second micro-batch"):
        pipe(torch.rand(16, 1))
    assert (before.calls, after.calls) == (3, 0)  # the fourth did not get here, the first no further
    x = torch.rand(16, 1)
    pipe(x).local_value().sum().backward()
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean(0), rtol=1e-9, atol=1e-9)  # nothing of the failed pass


def test_order_of_a_pass():
    order = []

    class Notes(nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.i, self.m = i, 0

        def forward(self, x: Tensor) -> Tensor:
            order.append((self.m, self.i))
            self.m += 1
            return x

    Pipe(nn.Sequential(Notes(0), Notes(1)), chunks=3)(torch.rand(3))
    assert order == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]


class Mixed(nn.Module):
    """Takes and returns tensors and others."""

    def forward(self, a: Tensor, factor: float, b: Tensor | None, whole: Tensor) -> tuple[Any, ...]:
        return (a if b is None else a + b) * factor + whole.sum(), factor, b, whole


@pytest.mark.parametrize("mode", MODES)
def test_several_inputs_and_outputs(mode):
    pipe = Pipe(nn.Sequential(Mixed(), Mixed()), chunks=5, checkpoint=mode)
    a, b, whole = (torch.rand(10, 3, requires_grad=True) for _ in range(3))
    out, factor, b_out, whole_out = pipe(a, 2.0, b, NoChunk(whole)).local_value()
    torch.testing.assert_close(out, ((a + b) * 2 + whole.sum() + b) * 2 + whole.sum())
    assert factor == [2.0] * 5
    assert torch.equal(b_out, b)
    assert torch.equal(whole_out, torch.cat([whole] * 5))
    out.sum().backward()
    torch.testing.assert_close(whole.grad, torch.full_like(whole, 3.0 * out.numel()))
    torch.testing.assert_close(b.grad, torch.full_like(b, 6.0))
    assert pipe(a, 2.0, None, NoChunk(whole)).local_value()[2] == [None] * 5
    different = pipe(torch.rand(3, 1), 1.0, None, torch.rand(6, 1)).local_value()  # as many parts as the other
    assert (len(different[0]), len(different[3]), different[1]) == (3, 6, [1.0] * 3)


@pytest.mark.parametrize("mode", MODES)
def test_backward_of_the_reference(mode):
    net = nn.Sequential(Lambda(lambda x: (x * 2, torch.tensor([False]))), Lambda(lambda x, flag: x * 3))
    x = torch.rand(1, requires_grad=True)
    Pipe(net, checkpoint=mode)(x).backward()
    assert x.grad == 6


def test_what_it_refuses():
    with pytest.raises(TypeError, match=r"takes an nn\.Sequential"):
        Pipe(nn.ModuleList([nn.Linear(1, 1)]))
    same = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"layer 0 is in the nn\.Sequential twice"):
        Pipe(nn.Sequential(same, same))
    model = nn.Sequential(nn.Linear(1, 1), Mixed())
    for chunks in (0, -1):
        with pytest.raises(ValueError, match="chunks must be at least 1"):
            Pipe(model, chunks=chunks)
    for chunks in (2.5, "four", None, "4"):
        with pytest.raises(TypeError, match="chunks must be a whole number"):
            Pipe(model, chunks=chunks)
    assert Pipe(model, chunks=42.0).chunks == 42
    with pytest.raises(ValueError, match=r"Unknown checkpoint 'INVALID'.*always, except_last, never"):
        Pipe(model, checkpoint="INVALID")
    with pytest.raises(TypeError, match="deferred_batch_norm must be True or False"):
        Pipe(model, deferred_batch_norm="no")
    with pytest.raises(ValueError, match="layer 0, a Sequential, has tensors on cpu, meta"):
        Pipe(nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))))
    with pytest.raises(ValueError, match="input 0 is on meta, but the first layer is on cpu"):
        Pipe(model)(torch.rand(1, 1, device="meta"))
    pair = torch.rand(2, 1), torch.rand(2, 1)
    for inputs in (("hello", True), (pair,), (list(pair), list(pair)), ()):
        with pytest.raises(TypeError, match="needs a tensor among its inputs"):
            Pipe(model)(*inputs)
    with pytest.raises(TypeError, match="NoChunk is for tensors"):
        NoChunk(3)
    with pytest.raises(RuntimeError, match=r"Found different number of chunks.*3, 4 rows give \[3, 4\] micro-batches"):
        Pipe(nn.Sequential(Mixed()), chunks=5)(torch.rand(3, 1), 1.0, None, torch.rand(4, 1))
    with pytest.raises(ValueError, match="input 0 of Pipe has no dimension"):
        Pipe(nn.Sequential(nn.Identity()), chunks=2)(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"partition 0 on cpu \(layers 0 to 0: Lambda\) returned str"):
        Pipe(nn.Sequential(Lambda(lambda x: "hello"), nn.Identity()))(torch.rand(1))
    with pytest.raises(ValueError, match="a tensor without rows"):
        Pipe(nn.Sequential(Lambda(torch.sum)), chunks=2)(torch.rand(2))
    with pytest.raises(ValueError, match="device must be like"):
        WithDevice(same, "worker1/nowhere")
    with pytest.raises(ValueError, match="gives a rank; give the RPC name"):
        WithDevice(same, "rank:1/cpu")
    with pytest.raises(TypeError, match="takes a module"):
        WithDevice(torch.relu, "cpu")


class Lambda(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def test_is_like_the_sequential():
    layers = OrderedDict(chunks=nn.Linear(1, 2), b=nn.Sequential(nn.Linear(2, 2)), c=nn.Linear(2, 1))
    plain = nn.Sequential(copy.deepcopy(layers))
    pipe = Pipe(nn.Sequential(OrderedDict({**layers, "c": WithDevice(layers["c"], "cpu")})), chunks=2)
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in pipe.named_children()] == list(layers)
    assert list(pipe) == [pipe[0], pipe[1], pipe[-1]] == list(layers.values())
    assert (len(pipe), pipe.chunks, pipe.devices) == (3, 2, [torch.device("cpu")] * 3)
    assert pipe.b is layers["b"]
    assert isinstance(pipe[1:], nn.Sequential) and list(pipe[1:]) == list(pipe)[1:]
    with pytest.raises(IndexError):
        pipe[3]
    pipe.load_state_dict(plain.state_dict())
    twin = copy.deepcopy(pipe)
    assert_same_training(twin, plain, torch.rand(4, 1))
    pickled = pickle.loads(pickle.dumps(twin))
    assert torch.equal(pickled(torch.ones(2, 1)).local_value(), twin(torch.ones(2, 1)).local_value())
    twin.b = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="a layer of Pipe has been replaced"):
        twin(torch.rand(1, 1))
    empty = Pipe(nn.Sequential())
    assert empty(torch.tensor(42)).local_value() == 42


class AddsPair(nn.Module):
    """Takes a pair as one argument, as torchgpipe's layers do."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class Mean(nn.Module):
    """Takes a list, of any length."""

    def forward(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values).mean(0)


class Swaps(nn.Module):
    def __init__(self, kind: type, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer or nn.Tanh()

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.kind((self.layer(b), a))


class Forks(nn.Module):
    """Returns two tensors."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.kind((self.layer(x), x * 2))


@pytest.mark.parametrize("mode", MODES)
def test_what_a_layer_returns_is_what_the_next_one_takes(mode):
    x = torch.rand(5, 3)
    for kind, last in ((tuple, Adds()), (tuple, AddsPair()), (list, Adds()), (list, Mean())):
        inner = nn.Sequential(Swaps(kind, nn.Linear(3, 3)), Swaps(kind))
        net = nn.Sequential(Forks(kind), inner, last, nn.Linear(3, 1))
        pipe = Pipe(copy.deepcopy(net), chunks=2, checkpoint=mode)
        called = []
        pipe[1].register_forward_hook(lambda module, args, output, called=called: called.append((module, len(args))))
        pair = net[1][1](*net[1][0](*net[0](x)))
        expected = net[3](net[2](*pair) if isinstance(last, Adds) else net[2](pair))
        output = pipe(x).local_value()
        assert called == [(pipe[1], 2)] * 2 and "forward" not in vars(pipe[1])  # hooks on it run
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(output.square().sum(), list(pipe.parameters()))
        torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), list(net.parameters())))
        output = Pipe(nn.Sequential(net[0]), 2)(x).local_value()  # joined entry by entry
        assert type(output) is kind and torch.equal(output[1], x * 2)


class Adds(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class AddsByMethod(nn.Module):
    forward = functools.partialmethod(Adds.forward)


class AddsByObject(nn.Module):
    forward = operator.add


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("last", [lambda: torch.jit.script(Adds()), AddsByMethod, AddsByObject])
def test_a_forward_that_is_no_plain_function(last):
    net = nn.Sequential(Forks(tuple), last())
    x = torch.rand(5, 3)
    # Products of matrices with other numbers of rows may be rounded differently.
    torch.testing.assert_close(Pipe(net, chunks=2)(x).local_value(), sum(net[0](x)))


class NotesPhase(nn.Module):
    """Notes whether it is recomputed, or will be."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((is_checkpointing(), is_recomputing()))
        return x


def test_a_layer_can_tell_that_it_is_recomputed():
    forward, first, again = (False, False), (True, False), (False, True)
    expected = {
        "always": [first, first, again, again],
        "except_last": [first, forward, again],
        "never": [forward, forward],
    }
    for mode in MODES:
        notes = NotesPhase()
        pipe = Pipe(nn.Sequential(nn.Linear(1, 1), nn.Sequential(notes)), chunks=2, checkpoint=mode)
        pipe(torch.rand(2, 1)).local_value().sum().backward()
        assert notes.seen == expected[mode]
        notes.seen.clear()
        pipe.eval()(torch.rand(2, 1)).local_value().sum().backward()
        notes(torch.rand(1))
        assert notes.seen == [forward] * 3


@pytest.mark.parametrize("mode", MODES)
def test_hooks_on_partitions(mode):
    """Each micro-batch goes through them: they see and may change what goes in and out, and its gradients."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    pipe = copy.deepcopy(Pipe(copy.deepcopy(plain), chunks=2, checkpoint=mode))
    assert isinstance(pipe.partitions, nn.ModuleList) and len(pipe.partitions) == 3
    assert list(pipe.partitions[0]) == [pipe[0]]
    assert list(pipe.state_dict()) == list(plain.state_dict())
    seen: dict[str, list[Any]] = {"in": [], "out": [], "back": []}
    for model, partition in ((pipe, pipe.partitions[1]), (plain, plain[1])):
        notes = seen if model is pipe else {name: [] for name in seen}
        partition.register_forward_pre_hook(lambda module, args, to=notes: to["in"].append((module, args[0].shape)))
        partition.register_forward_hook(lambda module, args, output: output * 3)
        partition.register_forward_hook(lambda module, args, output, to=notes: to["out"].append(output.requires_grad))
        partition.register_full_backward_hook(lambda module, into, out, to=notes: to["back"].append(out[0].shape))
    assert_same_training(pipe, plain, torch.rand(4, 3), steps=1)
    runs = {"never": 2, "except_last": 3, "always": 4}[mode]
    assert seen["in"] == [(pipe.partitions[1], (2, 4))] * runs
    assert seen["out"] == [True] * runs
    assert seen["back"] == [(2, 4)] * 2
    pipe.eval()
    assert not pipe.partitions[1].training
    with torch.no_grad():
        pipe(torch.rand(2, 3))
    assert seen["out"][-1] is False


def test_a_replaced_layer_of_a_partition_is_refused():
    replacements = [
        lambda pipe: pipe.partitions[0].__setitem__(0, nn.Linear(1, 1)),
        lambda pipe: pipe.partitions.__setitem__(1, nn.Sequential(nn.Linear(1, 1))),
        lambda pipe: pipe.partitions[1].append(nn.Linear(1, 1)),
        lambda pipe: pipe.partitions.append(nn.Sequential()),
        lambda pipe: setattr(pipe, "partitions", nn.ModuleList([*pipe.partitions])),
    ]
    for replace in replacements:
        pipe = Pipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
        pipe(torch.rand(1, 1))
        replace(pipe)
        with pytest.raises(RuntimeError, match="a layer of Pipe has been replaced"):
            pipe(torch.rand(1, 1))


def saved_by_the_original(net: nn.Sequential, ends: list[int], *, flat: bool) -> OrderedDict[str, Tensor]:
    """The ``state_dict`` of torch's ``Pipe`` (``flat``: layers of an inner Sequential count), or of torchgpipe's.

    Args:
        net: The layers.
        ends: Where partitions end.
        flat: Which of the two.
    """
    state: OrderedDict[str, Tensor] = OrderedDict()
    for partition, (start, end) in enumerate(zip([0, *ends], [*ends, len(net)], strict=True)):
        children = list(net.named_children())[start:end]
        if flat:
            layers = [part for _, layer in children for part in (layer if type(layer) is nn.Sequential else [layer])]
            children = [(str(place), layer) for place, layer in enumerate(layers)]
        for name, layer in children:
            state |= {f"partitions.{partition}.{name}.{key}": value for key, value in layer.state_dict().items()}
    return state


def test_loads_what_the_original_saved():
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    layers = OrderedDict(a=nn.Linear(1, 2), b=nn.ReLU(), c=inner, norm=nn.BatchNorm1d(2), e=nn.Linear(2, 2))
    for net in (nn.Sequential(layers), nn.Sequential(*layers.values())):
        for ends in ([1, 2, 3, 4], [3], [1, 4], []):
            for flat in (True, False):
                saved = saved_by_the_original(net, ends, flat=flat)
                ours = copy.deepcopy(net)
                for tensor in ours.state_dict().values():
                    tensor.zero_()
                model = nn.ModuleDict({"pipe": Pipe(ours, chunks=2)})
                loaded = OrderedDict(
                    sorted((f"pipe.{key}", value) for key, value in saved.items())
                )  # as safetensors do
                assert not any(model.load_state_dict(loaded))
                for name, value in net.state_dict().items():
                    assert torch.equal(model["pipe"].state_dict()[name], value), (name, ends, flat)
                net.load_state_dict(model["pipe"].state_dict())
    deferred = saved_by_the_original(net, [2], flat=True)
    norm = next(key for key in deferred if key.endswith("running_mean"))
    deferred |= {norm.replace("running_mean", name): torch.ones(2) for name in ("sum", "sum_squares")}
    Pipe(net).load_state_dict(deferred)
    other = saved_by_the_original(nn.Sequential(*net, nn.Linear(2, 2)), [2], flat=True)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="the saved layers are not the layers of this Pipe"):
            Pipe(net).load_state_dict(other, strict=strict)


def test_stays_where_it_is():
    pipe = Pipe(nn.Sequential(nn.Linear(1, 1)))
    calls = [pipe.cuda, pipe.cpu, lambda: pipe.to("meta"), lambda: pipe.to(torch.device("meta")), lambda: pipe.to(0)]
    calls += [lambda: pipe.to(device="meta"), lambda: pipe.to(torch.rand(1)), lambda: pipe.to(tensor=torch.rand(1))]
    calls += [lambda: nn.ModuleList([pipe]).to("meta")]
    for call in calls:
        with pytest.raises(TypeError, match="would move layers that have fixed devices"):
            call()
    assert pipe.half()[0].weight.dtype == torch.half
    assert pipe.to(torch.double).to(dtype=torch.float)[0].weight.dtype == torch.float
    nn.ModuleList([pipe]).to("cpu")


def test_one_graph():
    """What autograd can do with a plain module."""
    plain = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), Lambda(lambda x: (x[:, 0], x[:, 1])))
    x = torch.rand(4, 2, requires_grad=True)
    for mode in MODES:
        pipe = Pipe(copy.deepcopy(plain), chunks=2, checkpoint=mode)
        hooked = []
        pipe[0].weight.register_hook(hooked.append)
        reference = pipe(x)
        assert isinstance(reference, rpc.RRef) and torch.equal(reference.to_here()[0], reference.local_value()[0])
        outputs = reference.to_here()
        own = torch.autograd.grad(outputs[0].sum(), [x, *pipe.parameters()], create_graph=mode == "never")
        others = torch.autograd.grad(plain(x)[0].sum(), [x, *plain.parameters()], create_graph=True)
        torch.testing.assert_close(own, others, rtol=1e-9, atol=1e-9)
        if mode == "never":
            own, others = (torch.autograd.grad(g[0].square().sum(), x)[0] for g in (own, others))
            torch.testing.assert_close(own, others, rtol=1e-9, atol=1e-9)
        first, second = pipe(x).local_value(), pipe(x).local_value()  # two passes, then one backward pass through each
        hooked.clear()
        (first[0].sum() + second[1].sum()).backward()
        sum(plain(x)).sum().backward()
        torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad, rtol=1e-9, atol=1e-9)
        assert len(hooked) == 1
        plain.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_odd_inputs(mode):
    doubling = Lambda(lambda x: x.mul_(2))
    model = nn.Sequential(nn.Identity(), doubling, nn.Linear(3, 3))
    pipe = Pipe(model, chunks=3, checkpoint=mode)
    for x in (torch.rand(3, 4).t(), torch.rand(0, 3), torch.rand(1, 3).expand(4, 3).clone()):
        expected = model[2](2 * x)
        out = pipe(x).local_value()
        torch.testing.assert_close(out, expected)
        weight_grad = torch.autograd.grad(expected.sum(), model[2].weight)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), model[2].weight), weight_grad)
    leaf = torch.rand(4, 3, requires_grad=True)
    before = leaf.detach().clone()
    pipe(leaf * 1.0).local_value().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * model[2].weight.sum(0).expand(4, 3))
    assert torch.equal(before, leaf)
    with torch.inference_mode():
        assert not pipe(torch.rand(4, 3)).local_value().requires_grad
    with torch.no_grad():
        assert not pipe(torch.rand(4, 3)).local_value().requires_grad
    embedding = Pipe(nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1)), chunks=3, checkpoint=mode)
    embedding(torch.arange(5)).local_value().sum().backward()
    assert all(p.grad is not None for p in embedding.parameters())
    frozen = Pipe(nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.ReLU()), chunks=3, checkpoint=mode)
    assert not frozen(torch.rand(4, 3)).local_value().requires_grad


def test_code_of_a_notebook_is_let_go():
    def made():
        class Sum(nn.Module):
            def forward(self, a, b):
                return a + b

        assert call_layer(Sum(), (torch.ones(1), torch.ones(1))).item() == 2
        return weakref.ref(Sum.forward)

    reference = made()
    gc.collect()
    assert reference() is None
