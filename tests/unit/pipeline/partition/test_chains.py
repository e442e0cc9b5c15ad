from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from strategies.pipeline.partition.chains import chains_of


class Net(nn.Module):
    def __init__(self, code: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
        self.pool, self.code = nn.Identity(), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (lambda net, x: net.third(net.second(net.first(x))), [("first", "second", "third")]),
        (lambda net, x: net.second(net.pool(net.first(x))), [("first", "pool", "second"), ("third",)]),
        (lambda net, x: net.pool(net.second(net.first(x))), [("first", "second"), ("third",)]),
        (lambda net, x: net.third(torch.relu(net.second(net.first(x)))), [("first", "second"), ("third",)]),
        (lambda net, x: net.first(x) + net.second(net.first(x)), [("first",), ("second",), ("third",)]),
        (lambda net, x: net.second(y := net.first(x)) + y, [("first",), ("second",), ("third",)]),
        (lambda net, x: net.first(net.third(net.second(x))), [("second", "third", "first")]),
        (lambda net, x: net.second(net.first(x)) if x.sum() > 0 else x, [("first",), ("second",), ("third",)]),
    ],
)
def test_what_is_called_one_after_another(
    code: Callable[[Net, Tensor], Tensor], expected: list[tuple[str, ...]]
) -> None:
    whole = nn.ModuleDict({"net": Net(code)})
    paths = [f"net.{name}" for name in ("first", "second", "third")]
    assert chains_of(whole, paths) == [tuple(f"net.{name}" for name in chain) for chain in expected]
    assert chains_of(whole, paths[:1]) == [("net.first",)]


def in_training(code: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """Return code that runs only in training."""
    return lambda net, x: code(net, x) if net.training else x


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            lambda net, x: net.second(in_training(lambda net, x: net.pool(x))(net, net.first(x))),
            [("first",), ("second",), ("third",)],
        ),
        (
            lambda net, x: in_training(lambda net, x: net.third(x))(net, net.second(net.first(x))),
            [("first", "second"), ("third",)],
        ),
        (
            lambda net, x: net.third(net.second(net.first(x)) if net.training else net.first(x)),
            [("first",), ("second",), ("third",)],
        ),
    ],
)
@pytest.mark.parametrize("is_training", [True, False])
def test_only_what_is_called_one_after_another_in_training_and_in_evaluation_is_joined(
    code: Callable[[Net, Tensor], Tensor], expected: list[tuple[str, ...]], is_training: bool
) -> None:
    net = Net(code).train(is_training)
    net.second.train(not is_training)
    modes = [module.training for module in net.modules()]
    assert chains_of(net, ["first", "second", "third"]) == expected
    assert [module.training for module in net.modules()] == modes


def test_tracing_leaves_the_random_state() -> None:
    net = Net(lambda net, x: net.second(net.first(x + torch.randn(1))))
    before = torch.get_rng_state()
    assert chains_of(net, ["first", "second"]) == [("first", "second")]
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_of_different_modules() -> None:
    whole = nn.Sequential(Net(lambda net, x: net.first(x)), Net(lambda net, x: net.second(x)))
    assert chains_of(whole, ["0.first", "1.second"]) == [("0.first", "1.second")]
