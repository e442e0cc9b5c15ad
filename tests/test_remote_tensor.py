"""What stands for a parameter or buffer of another stage can be read, and refuses what would do nothing."""

import copy
import pickle
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
    parameter.grad = None
    assert parameter.grad is None and "RemoteParameter" in repr(parameter)
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


def test_gradients_of_all_parameters() -> None:
    """What leaves out parameters without a gradient must not take those of other stages for such."""
    model = nn.Linear(2, 3)
    model(torch.ones(1, 2)).sum().backward()
    model.weight = remote()
    assert [p.grad is None for p in model.parameters()] == [True, False]
    torch.optim.SGD(model.parameters(), 0.1).step()
    for function in (clip_grad_norm_, clip_grad_value_):
        with pytest.raises(
            RuntimeError, match=r"gradient of parameter 1\.weight .* is on another stage .*max_norm=inf"
        ):
            function(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 1\.weight .* is on another stage"):
        grad_norm(model, 2)


def test_loading_leaves_it_alone() -> None:
    """A state dict is loaded after the values have been sent to where they belong, and are left without values."""
    with torch.no_grad():
        assert type(remote().copy_(torch.empty(3, 2, device="meta"))) is RemoteParameter
