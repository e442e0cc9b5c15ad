"""What stands for a parameter or buffer of another stage can be read, and refuses what would do nothing."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_lightning.utilities import grad_norm
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from strategies.pipeline.remote_tensor import RemoteParameter, remote_buffer, remote_parameter


def remote(*, requires_grad: bool = True) -> Any:
    return remote_parameter(
        "1.weight", nn.Parameter(torch.ones(3, 2, dtype=torch.float64), requires_grad=requires_grad)
    )


def test_what_can_be_read_and_set() -> None:
    parameter = remote()
    assert isinstance(parameter, nn.Parameter) and parameter.is_meta and parameter.requires_grad
    assert (list(parameter.shape), parameter.dtype, parameter.numel()) == ([3, 2], torch.float64, 6)
    parameter.requires_grad_(False)
    assert not parameter.requires_grad and not remote(requires_grad=False).requires_grad
    assert "RemoteParameter" in repr(parameter)
    layer = nn.Linear(2, 3)
    layer.weight = parameter
    assert dict(layer.named_parameters())["weight"] is parameter and len(layer.state_dict()) == 2
    assert (parameter * 2).is_meta and torch.empty(3, 2, dtype=torch.float64).add_(1).shape == parameter.shape


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("clamp_", lambda p: p.clamp_(0, 1)),
        ("mul_", lambda p: p.mul_(2)),
        ("normal_", lambda p: nn.init.normal_(p)),
        ("copy_", lambda p: p.copy_(torch.ones(3, 2))),
        ("__setitem__", lambda p: p.__setitem__(0, 1.0)),
        ("data", lambda p: p.data),
        ("data", lambda p: setattr(p, "data", torch.ones(3, 2))),
        ("grad", lambda p: setattr(p, "grad", torch.ones(3, 2))),
        ("grad", lambda p: setattr(p, "grad", None)),
        ("add_", lambda p: torch.ones(3, 2).mul_(0.9).add_(p, alpha=0.1)),
        ("_foreach_lerp_", lambda p: torch._foreach_lerp_([torch.ones(3, 2)], [p], 0.1)),
        ("lerp_", lambda p: p.detach().clone().lerp_(torch.ones(3, 2), 0.5)),
        ("copy_", lambda p: p.copy_(p.detach().clone())),
        ("add", lambda p: torch.add(torch.ones(3, 2), p, out=torch.ones(3, 2))),
        ("register_hook", lambda p: p.register_hook(print)),
        ("register_post_accumulate_grad_hook", lambda p: p.register_post_accumulate_grad_hook(print)),
        ("item", lambda p: p.norm().item()),
        ("numpy", lambda p: p.detach().numpy()),
        ("equal", lambda p: torch.equal(p, p)),
        ("_foreach_mul_", lambda p: torch._foreach_mul_([torch.ones(3), p], 2.0)),
        ("copy.deepcopy", copy.deepcopy),
        ("pickle", pickle.dumps),
    ],
)
def test_what_would_do_nothing(name: str, change: Any) -> None:
    message = (
        rf"`{name}` on parameter 1\.weight \[3, 2\], which lives on another stage .*only layers and optimizers change"
    )
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        change(remote())


def test_buffers() -> None:
    norm = nn.BatchNorm1d(3)
    for name, buffer in dict(norm.named_buffers()).items():
        norm._buffers[name] = remote_buffer(name, buffer)
    assert norm.num_batches_tracked.dtype == torch.int64 and norm.running_var.is_meta
    assert len(norm.state_dict()) == 5
    with pytest.raises(RuntimeError, match=r"`zero_` on buffer running_mean \[3\], which lives on another stage"):
        norm.reset_running_stats()


class Own(torch.optim.Optimizer):
    """An optimizer of a user, which leaves out what has no gradient."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad)


def test_gradients_of_all_parameters() -> None:
    """What leaves out parameters without a gradient must not take those of other stages for such."""
    model = nn.Linear(2, 3)
    model(torch.ones(1, 2)).sum().backward()
    model.weight = remote()
    for optimizer in (torch.optim.SGD(model.parameters(), 0.1), Own(model.parameters(), {})):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    users: list[Callable[[], Any]] = [
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: clip_grad_value_(model.parameters(), 1.0),
        lambda: grad_norm(model, 2),
        lambda: [p.grad for p in model.parameters()],
        model.zero_grad,
    ]
    for use in users:
        with pytest.raises(RuntimeError, match=r"gradient of parameter 1\.weight .* is on another .*call zero_grad"):
            use()


def test_loading_leaves_it_alone() -> None:
    """A state dict is loaded after the values have been sent to where they belong, and are left without values."""
    with torch.no_grad():
        assert type(remote().copy_(torch.empty(3, 2, device="meta"))) is RemoteParameter
