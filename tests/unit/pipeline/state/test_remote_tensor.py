"""What stands for a parameter or buffer of another stage: reading fetches values, changes are refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from answered import Answered
from pytorch_lightning.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from strategies.optim.calls import track_steps
from strategies.pipeline.control.commands import NamedParameters, StageCommands
from strategies.pipeline.state.remote_operations import HeldValues
from strategies.pipeline.state.remote_tensor import FetchedTensor, RemoteParameter, remote_buffer, remote_parameter
from strategies.pipeline.state.stand_ins import move_to_meta

STAGE = "stage 0 (layers 0 to 1: Linear, BatchNorm1d)"


class Stage:
    """A stage that lives in this process: layers with gradients, and the commands that read and clear them."""

    description = STAGE

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
        self.layers(torch.rand(4, 2, dtype=torch.float64)).pow(2).sum().backward()
        self.version, self.num_reads, self.in_pass = 0, 0, False
        self.uses: list[tuple[str, bool]] = []

    def on_use(self, what: str, in_pass: bool) -> None:
        self.uses.append((what, in_pass))

    def readable(self) -> "Stage":
        return self

    def ask(self, command: Callable[..., Any], reference: Any) -> Answered:
        assert command is StageCommands.value
        self.num_reads += 1
        value = HeldValues([self.layers, self.layers], {}).value(reference)
        return Answered(None if value is None else value.detach().clone().requires_grad_(value.requires_grad))

    def send_zero_grad(self, name: str, set_to_none: bool, module: int = 0) -> None:
        if module:  # a copy of the layers, which has no gradients
            return
        nn.ParameterList([dict(self.layers.named_parameters())[name]]).zero_grad(set_to_none)

    def send(self, command: Callable[..., Any], parameters: NamedParameters, change: Callable[..., Any]) -> None:
        assert command is StageCommands.change_grads
        change([self.layers.get_parameter(name) for name in parameters.names])

    def stand_ins(self) -> nn.Sequential:
        """Layers as the driver keeps them."""
        copied = copy.deepcopy(self.layers)
        move_to_meta(copied, copied, [], stage=self)
        return copied


@pytest.fixture
def stage() -> Stage:
    return Stage()


def remote(*, requires_grad: bool = True) -> Any:
    return remote_parameter(
        "1.weight", nn.Parameter(torch.ones(3, 2, dtype=torch.float64), requires_grad=requires_grad)
    )


def test_clearing_gradients_of_a_copy_leaves_those_of_the_model(stage: Stage) -> None:
    copied = copy.deepcopy(stage.layers)
    move_to_meta(copied, copied, [], stage=stage, module=1)
    copied.zero_grad()
    copied[0].weight.grad = None
    assert all(p.grad is not None for p in stage.layers.parameters())


def test_facts_of_a_fetched_tensor_outlast_its_values(stage: Stage) -> None:
    grad = stage.stand_ins()[0].weight.grad
    assert grad is not None
    stage.version += 1
    assert (grad.shape, grad.numel(), grad.dtype, grad.requires_grad) == ((3, 2), 6, torch.float64, False)
    with pytest.raises(RuntimeError, match="was read before that stage ran another command"):
        grad.norm()


def test_what_can_be_read_and_set_without_values() -> None:
    parameter = remote()
    assert isinstance(parameter, nn.Parameter) and parameter.is_meta and parameter.requires_grad
    assert (list(parameter.shape), parameter.dtype, parameter.numel()) == ([3, 2], torch.float64, 6)
    parameter.requires_grad_(False)
    assert not parameter.requires_grad and not remote(requires_grad=False).requires_grad
    assert "RemoteParameter" in repr(parameter)
    layer = nn.Linear(2, 3)
    layer.weight = parameter
    assert dict(layer.named_parameters())["weight"] is parameter and len(layer.state_dict()) == 2


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda p: p.norm().item(),
    "float": lambda p: float(p.detach().mean()),
    "bool": lambda p: bool(p.isnan().any()),
    "numpy": lambda p: p.detach().numpy(),
    "asarray": lambda p: numpy.asarray(p.data),
    "list": lambda p: p.tolist(),
    "copy": lambda p: p.detach().cpu().clone(),
    "data": lambda p: p.data.norm(),
    "cast": lambda p: p.detach().to(torch.float32),
    "index": lambda p: p[0].sum().item(),
    "iterate": lambda p: [row.sum().item() for row in p],
    "chunks": lambda p: [chunk.tolist() for chunk in p.chunk(2)],
    "histogram": lambda p: p.detach().float().flatten().histc(4),
    "stack": lambda p: torch.stack([p, p]).sum(),
    "equal": lambda p: torch.equal(p, p.detach()),
    "format": lambda p: f"{p.flatten()[0]:.3f}",
    "foreach": lambda p: torch._foreach_norm([p.detach(), p.detach()]),
    "average": lambda p: torch.zeros(p.shape, dtype=p.dtype).lerp_(p.detach(), 0.5),
    "copied": lambda p: torch.empty(p.shape, dtype=p.dtype).copy_(p.detach()),
    "out": lambda p: torch.add(p.detach(), 1.0, out=torch.zeros(p.shape, dtype=p.dtype)),
    "unique": lambda p: torch.unique(p.detach()),
    "device": lambda p: torch.zeros((), device=p.device) + p.norm().detach(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "gradient": lambda p: None if p.grad is None else p.grad.data.norm(1).item(),
    "total": lambda p: None if p.grad is None else torch.nn.utils.get_total_norm([p.grad, p.grad]),
    "gradient histogram": lambda p: None if p.grad is None else p.grad.data.cpu().clone().float().histc(4).tolist(),
    "likes": lambda p: (torch.zeros_like(p), p.new_ones(2)),
}


@pytest.mark.parametrize("way", READS)
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.running_mean"])
def test_reading_fetches_values(stage: Stage, name: str, way: str) -> None:
    own, stand_in = (
        dict([*layers.named_parameters(), *layers.named_buffers()])[name]
        for layers in (stage.layers, stage.stand_ins())
    )
    if name == "1.running_mean" and way == "stack":
        own, stand_in = own.clone(), stand_in.view(3)  # a view of a buffer, too
    expected, actual = READS[way](own), READS[way](stand_in)
    assert str(actual) == str(expected) and type(actual) is type(expected)
    assert stage.num_reads == {"likes": 0, "stack": 2, "equal": 2, "foreach": 2}.get(way, stage.num_reads)
    assert stage.num_reads <= 3


def test_views_show_the_values_of_the_moment(stage: Stage) -> None:
    weight = stage.stand_ins()[0].weight
    views = [weight.detach(), weight.data, weight.t(), weight.view(-1)[1:], weight.detach().unbind()[2]]
    expected = [read(stage.layers[0].weight.detach() * 2) for read in (_same, _same, Tensor.t, _tail, _third)]
    assert stage.num_reads == 0
    with torch.no_grad():
        stage.layers[0].weight.mul_(2)
    for view, value in zip(views, expected, strict=True):
        assert view.is_meta and torch.equal(view.clone(), value)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _tail(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[1:]


def _third(tensor: Tensor) -> Tensor:
    return tensor[2]


def test_a_copy_that_is_outdated_is_refused(stage: Stage) -> None:
    """What one process would show as it is now, or as it was, depending on how the optimizer clears gradients."""
    weight = stage.stand_ins()[0].weight
    taken = [weight.grad, weight.grad[0], weight.detach().cpu()]
    kept = [each.clone() for each in taken]
    stage.version += 1
    for each in taken:
        with pytest.raises(RuntimeError, match=r"parameter 0.weight .* of stage 0 .* was read before .*\.clone\(\)"):
            each.norm()
    assert [type(each) for each in kept] == [Tensor] * 3 and all(each.norm() > 0 for each in kept)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "clamp_": lambda p: p.clamp_(0, 1),
    "mul_": lambda p: p.mul_(2),
    "(__ipow__|pow_)": lambda p: p.__ipow__(2),
    "__ilshift__": lambda p: p.__ilshift__(2),
    "normal_": lambda p: nn.init.normal_(p),
    "copy_": lambda p: p.copy_(torch.ones(3, 2)),
    "__setitem__": lambda p: p.__setitem__(0, 1.0),
    "data": lambda p: setattr(p, "data", torch.ones(3, 2)),
    "lerp_": lambda p: p.detach().view(-1).lerp_(torch.ones(6), 0.5),
    "fill_": lambda p: p.data[0].fill_(1.0),
    "add": lambda p: torch.add(torch.ones(3, 2), 1, out=p.detach()),
    "_foreach_mul_": lambda p: torch._foreach_mul_([torch.ones(3), p], 2.0),
    "relu": lambda p: nn.functional.relu(p, inplace=True),
    "backward .*": lambda p: p[0, 0].backward(),
    "register_hook": lambda p: p.register_hook(print),
    "register_post_accumulate_grad_hook": lambda p: p.register_post_accumulate_grad_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_would_change_nothing(stage: Stage, name: str) -> None:
    stand_in = stage.stand_ins()[0].weight
    with torch.no_grad(), pytest.raises(RuntimeError, match=rf"`{name}` on parameter 0\.weight \[3, 2\], .* stage 0 "):
        CHANGES[name](stand_in)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"on parameter 1\.weight \[3, 2\], which is on another"):
        CHANGES[name](remote())


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda grad: grad.mul_(0.5),
    "zero_": lambda grad: grad.data.zero_(),
    "clamp_": lambda grad: grad.detach()[0].clamp_(0, 1),
    "_foreach_mul_": lambda grad: torch._foreach_mul_([torch.ones(2), grad], 0.5),
    "__setitem__": lambda grad: grad.__setitem__(0, 1.0),
    "data": lambda grad: setattr(grad, "data", torch.ones(3, 2)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_cannot_be_changed_here(stage: Stage, name: str) -> None:
    grad = stage.stand_ins()[0].weight.grad
    assert type(grad) is FetchedTensor and stage.num_reads == 1
    with pytest.raises(
        RuntimeError, match=rf"`{name}` on the gradient of parameter 0\.weight .*clip_grad_norm_\(\.\.\."
    ):
        GRADIENTS[name](grad)
    with pytest.raises(ValueError, match="read-only"):
        grad.numpy()[0] = 1.0


SPARSE_READS: list[Callable[[Any], Any]] = [
    lambda grad: (grad.is_sparse, grad.is_coalesced(), grad.layout, grad.shape),
    lambda grad: grad.to_dense(),
    lambda grad: grad.data.norm(2).item(),
    lambda grad: grad.coalesce().values(),
    lambda grad: grad.clone().mul_(2).to_dense(),
    lambda grad: copy.deepcopy(grad).to_dense(),
    lambda grad: torch.ones(3, 2) + grad,
]


def test_a_sparse_gradient(stage: Stage) -> None:
    """Such as that of ``nn.Embedding(sparse=True)``."""
    grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2, dtype=torch.float64), (3, 2), check_invariants=True)
    stage.layers[0].weight.grad = grad
    fetched = stage.stand_ins()[0].weight.grad
    assert type(fetched) is FetchedTensor
    for read in SPARSE_READS:
        assert str(read(fetched)) == str(read(grad))
    changes: list[Callable[[Any], Any]] = [
        lambda grad: grad.mul_(0.5),
        lambda grad: grad.data.mul_(0.5),
        lambda grad: grad.detach()._values().mul_(0.5),
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match=r"`mul_` on the gradient of parameter 0\.weight "):
            change(fetched)
    stage.version += 1
    with pytest.raises(RuntimeError, match="was read before that stage ran another command"):
        fetched.to_dense()


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, weight: nn.functional.linear(x, weight),
    "view": lambda x, weight: x @ weight.t()[:, 1:].view(2, 2),
    "twice": lambda x, weight: (x @ weight.mT) * weight.sum(1) + weight.norm(),
    "embedding": lambda x, weight: nn.functional.embedding(torch.tensor([0, 2, 0]), weight) * x[:3],
    "list": lambda x, weight: torch.cat([x, weight, weight.clone()]),
    "detached": lambda x, weight: x * weight.detach()[0] + weight[1],
}


@pytest.mark.parametrize("name", USES)
def test_gradients_of_a_loss_made_of_values_go_to_the_stage(stage: Stage, name: str) -> None:
    stand_ins, plain = stage.stand_ins(), stage.layers[0].weight.detach().clone().requires_grad_()
    before = stage.layers[0].weight.grad.clone()
    given = [torch.arange(8.0, dtype=torch.float64).view(4, 2).requires_grad_() for _ in range(2)]
    losses = [
        USES[name](x, weight).square().sum() for x, weight in zip(given, (stand_ins[0].weight, plain), strict=True)
    ]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*[x.grad for x in given], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stage.layers[0].weight.grad - before, plain.grad, rtol=1e-12, atol=1e-12)


def test_a_frozen_parameter_gets_no_gradient(stage: Stage) -> None:
    weight, before = stage.stand_ins()[0].weight.requires_grad_(False), stage.layers[0].weight.grad.clone()
    x = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    nn.functional.linear(x, weight).sum().backward()
    assert x.grad is not None and torch.equal(stage.layers[0].weight.grad, before)


def test_the_gradient_of_a_parameter_alone_is_refused(stage: Stage) -> None:
    weight = stage.stand_ins()[0].weight
    loss = torch.ones((), requires_grad=True) + 0.1 * weight.norm()
    with pytest.raises(RuntimeError, match=r"`grad .*` on parameter 0\.weight"):
        torch.autograd.grad(loss, [weight], allow_unused=True)


def test_a_buffer_with_a_graph_is_a_result(stage: Stage) -> None:
    mean = stage.stand_ins()[1].running_mean
    stage.layers[1].running_mean = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"buffer 1.running_mean .* stage 0 .*requires a gradient.*Return it"):
        mean.clone()


def test_buffers() -> None:
    norm = nn.BatchNorm1d(3)
    for name, buffer in dict(norm.named_buffers()).items():
        norm._buffers[name] = remote_buffer(name, buffer)
    assert norm.num_batches_tracked.dtype == torch.int64 and norm.running_var.is_meta
    assert len(norm.state_dict()) == 5
    with pytest.raises(RuntimeError, match=r"`zero_` on buffer running_mean \[3\], which is on another stage"):
        norm.reset_running_stats()


class Own(torch.optim.Optimizer):
    """An optimizer of a user, which leaves out what has no gradient."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad)


def clip_by_hand(parameters: list[Any]) -> None:
    """As many projects do it, without looking where the gradients are."""
    total = torch.stack([p.grad.norm() for p in reversed(parameters)]).norm()
    for parameter in parameters:
        parameter.grad.data.mul_(1.0 / (total + 1e-6))


def test_gradients_of_all_parameters(stage: Stage) -> None:
    """What leaves out parameters without a gradient must not take those of other stages for such."""
    model = nn.Linear(2, 3).double()
    model.weight = stage.stand_ins()[0].weight
    model.bias.grad = torch.ones_like(model.bias)
    for optimizer in (torch.optim.SGD(model.parameters(), 0.1), Own(model.parameters(), {})):
        undo = track_steps(optimizer)  # as each optimizer that the stages follow
        optimizer.step()
        undo()
        optimizer.zero_grad(set_to_none=False)
    assert stage.num_reads == 0
    model.bias.grad.fill_(2.0)
    with pytest.raises(RuntimeError, match=r"`sub_` on parameter 0\.weight .* stage 0 "):
        Own([model.weight], {}).step()  # which no stage follows
    model.bias.grad.fill_(2.0)
    users: list[Callable[[], Any]] = [
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: clip_grad_value_(model.parameters(), 1.0),
        lambda: clip_by_hand(list(model.parameters())),
        lambda: [setattr(p, "grad", p.grad * 0.5) for p in model.parameters()],
    ]
    for use in users:
        with pytest.raises(RuntimeError, match=r"gradient of parameter 0\.weight .*stage 0 .*call zero_grad"):
            use()
    assert torch.equal(model.bias.grad, torch.full((3,), 2.0, dtype=torch.float64))
    stage.num_reads = 0
    stage.layers[0].bias.grad = model.bias.grad
    assert grad_norm(model, 2) == grad_norm(stage.layers[0], 2) and stage.num_reads == 0  # known since the last time
    stage.version += 1
    grad_norm(model, 2)
    assert stage.num_reads == 1


class Clears(nn.Sequential):
    """Overrides ``zero_grad``, as a user's module may."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


def test_clearing_gradients_reaches_the_stage(stage: Stage) -> None:
    model, (linear, norm) = Clears(stage.stand_ins(), nn.Linear(3, 1)), stage.layers
    model[1].bias.grad = torch.ones(1)
    model.zero_grad(set_to_none=False)
    for parameter in (linear.weight, norm.bias, model[1].bias):
        assert parameter.grad is not None and not parameter.grad.any()
    model[0][0].zero_grad()
    assert linear.weight.grad is None and linear.bias.grad is None and norm.bias.grad is not None
    model[0][1].bias.grad = None
    assert norm.bias.grad is None and norm.weight.grad is not None and model[1].bias.grad is not None
    with pytest.raises(
        RuntimeError, match=r"gradient of parameter 1\.weight .* which clearing it here would leave out"
    ):
        remote().grad = None


def test_loading_leaves_it_alone() -> None:
    """A state dict is loaded after the values have been sent to where they belong, and are left without values."""
    with torch.no_grad():
        assert type(remote().copy_(torch.empty(3, 2, device="meta"))) is RemoteParameter


def test_a_stage_hears_of_operations_that_combine_its_tensors_with_others(stage: Stage) -> None:
    linear, _ = stage.stand_ins()
    linear.weight.norm(), linear.weight.t(), linear.bias.clone() + 1, (linear.weight.sum() + torch.ones(())).item()
    assert not stage.uses
    linear(torch.ones(1, 2, dtype=torch.float64))
    assert stage.uses == [(f"parameter 0.weight [3, 2] of {STAGE}", False)]
