"""An optimizer restricted to the parameters of one stage, taken apart for the way there and put together again."""

import functools
import gc
import pickle
import sys
import weakref
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR

from strategies.optim.calls import added_methods, hyperparameters
from strategies.optim.gradients import norms_of_gradients
from strategies.optim.restricted import (
    check_optimizer_states,
    load_states,
    move_states,
    numbers_of,
    parameters_of,
    put_together,
    restricted,
    taken_apart,
)


def two_layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(3, 4), nn.Linear(4, 2)


def two_groups(first: nn.Module, second: nn.Module, **arguments: Any) -> AdamW:
    """Weights decay, biases do not; the numbers of first and second are interleaved."""
    weights = [first.weight, second.weight]
    return AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": [first.bias, second.bias], "lr": 0.5, "name": "biases"}],
        lr=0.01,
        weight_decay=0.0,
        **arguments,
    )


def step(optimizer: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
    optimizer.step()


def test_groups_stay_and_state_is_shared() -> None:
    first, second = two_layers()
    whole = two_groups(first, second)
    step(whole)
    part = restricted(whole, list(second.parameters()))
    assert type(part) is AdamW
    assert hyperparameters(part) == hyperparameters(whole)
    assert [[id(p) for p in group["params"]] for group in part.param_groups] == [[id(second.weight)], [id(second.bias)]]
    assert [id(p) for p in part.state] == [id(second.weight), id(second.bias)]
    assert part.state[second.weight] is whole.state[second.weight]
    assert part.defaults == whole.defaults
    # The original keeps everything.
    assert len(parameters_of(whole)) == 4 and len(whole.state) == 4


def test_an_empty_group_keeps_its_place() -> None:
    first, second = two_layers()
    whole = AdamW([{"params": first.parameters(), "lr": 1.0}, {"params": second.parameters(), "lr": 2.0}])
    part = restricted(whole, list(second.parameters()))
    assert [len(group["params"]) for group in part.param_groups] == [0, 2]
    assert [group["lr"] for group in part.param_groups] == [1.0, 2.0]
    step(part)
    nothing = restricted(whole, [])
    nothing.step()
    nothing.zero_grad()
    assert parameters_of(nothing) == []


def test_groups_are_not_shared() -> None:
    first, second = two_layers()
    whole = two_groups(first, second)
    part = restricted(whole, list(second.parameters()))
    part.param_groups[0]["lr"] = 7.0
    assert whole.param_groups[0]["lr"] == 0.01


def test_what_is_common_to_all_parameters_is_not_shared() -> None:
    first, second = two_layers()
    whole, number = two_groups(first, second), torch.zeros(())
    for group in whole.param_groups:
        group["t"] = number
    whole.state["t"] = number
    whole.state["more"] = {"t": 0, "bias": second.bias}
    part = restricted(whole, list(second.parameters()))
    part.param_groups[0]["t"] += 1
    part.state["more"]["t"] += 1
    assert part.param_groups[1]["t"] == part.state["t"] == 1  # still one tensor
    assert number == whole.state["more"]["t"] == 0 and part.state["more"]["bias"] is second.bias


def test_parts_step_what_the_whole_steps() -> None:
    outcomes = []
    for split in (False, True):
        first, second = two_layers()
        whole = two_groups(first, second)
        step(whole)
        parts = [restricted(whole, list(layer.parameters())) for layer in (first, second)] if split else [whole]
        for part in parts:
            step(part)
            step(part)
        outcomes.append([p.detach().clone() for p in (*first.parameters(), *second.parameters())])
    for actual, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert torch.equal(actual, expected)


def test_numbers_are_those_of_the_state_dict() -> None:
    first, second = two_layers()
    whole = two_groups(first, second)
    step(whole)
    assert [id(p) for p in parameters_of(whole)] == [
        id(p) for p in (first.weight, second.weight, first.bias, second.bias)
    ]
    assert numbers_of(whole, list(first.parameters())) == [0, 2]
    assert numbers_of(whole, [second.bias, second.weight]) == [1, 3]  # in the order of the optimizer
    assert numbers_of(whole, []) == []
    for number, parameter in enumerate(parameters_of(whole)):
        assert torch.equal(whole.state_dict()["state"][number]["exp_avg"], whole.state[parameter]["exp_avg"])


def test_what_a_scheduler_patched_in_stays_behind() -> None:
    first, second = two_layers()
    whole = two_groups(first, second)
    scheduler = LinearLR(whole, 0.1)
    assert "step" in vars(whole)
    calls: list[str] = []
    whole.register_step_pre_hook(lambda *args: calls.append("pre"))
    whole.register_step_post_hook(lambda *args: calls.append("post"))
    vars(whole)["zero_grad"] = lambda set_to_none=True: calls.append("zero_grad")
    part = restricted(whole, list(second.parameters()))
    assert "step" not in vars(part) and "zero_grad" not in vars(part)
    step(part)
    part.zero_grad()
    assert calls == [] and second.weight.grad is None
    assert "step" in vars(whole)
    step(whole)
    assert calls == ["pre", "post"]
    scheduler.step()


class Decorated(SGD):
    """A subclass with attributes of its own, which ``Optimizer.__getstate__`` would lose."""

    def __init__(self, params: Any, lr: float, *, factor: float) -> None:
        super().__init__(params, lr)
        self.factor, self.num_steps = factor, 0
        self.extra = [torch.tensor(factor)]

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for parameter in parameters_of(self):
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor)
        return super().step(closure)


def test_a_subclass_keeps_its_attributes_over_a_pickle() -> None:
    first, second = two_layers()
    whole = Decorated([*first.parameters(), *second.parameters()], 0.1, factor=2.0)
    step(whole)
    LinearLR(whole, 0.1)
    cargo = second, taken_apart(restricted(whole, list(second.parameters())))
    layer, parts = pickle.loads(cloudpickle.dumps(cargo))
    arrived = put_together(*parts)
    assert type(arrived) is Decorated
    assert (arrived.factor, arrived.num_steps, arrived.extra) == (2.0, 1, [torch.tensor(2.0)])
    assert [id(p) for p in parameters_of(arrived)] == [id(p) for p in layer.parameters()]  # what is shared stays shared
    step(arrived)
    expected = restricted(whole, list(second.parameters()))
    step(expected)
    assert arrived.num_steps == 2
    assert torch.equal(layer.weight, second.weight)
    arrived.register_step_post_hook(lambda *args: None)  # hooks work again
    step(arrived)


@pytest.mark.parametrize("arguments", [{"amsgrad": True}, {"foreach": True}, {"fused": True}, {"maximize": True}])
def test_state_and_options_over_a_pickle(arguments: dict[str, Any]) -> None:
    first, second = two_layers()
    whole = two_groups(first, second, **arguments)
    step(whole)
    layer, parts = pickle.loads(cloudpickle.dumps((second, taken_apart(restricted(whole, list(second.parameters()))))))
    arrived = put_together(*parts)
    step(arrived)
    step(whole)
    assert torch.equal(layer.weight, second.weight) and torch.equal(layer.bias, second.bias)


def test_states_are_loaded_as_load_state_dict_does_it() -> None:
    first, second = two_layers()
    source = two_groups(first, second)
    step(source)
    state = source.state_dict()["state"]
    target = restricted(two_groups(first, second), list(second.parameters()))
    load_states(target, {0: {name: v.double() for name, v in state[1].items()}, 1: state[3]})
    assert target.state[second.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(target.state[second.weight]["exp_avg"], state[1]["exp_avg"])
    assert torch.equal(target.state[second.bias]["exp_avg_sq"], state[3]["exp_avg_sq"])
    load_states(target, {})
    assert not target.state


def test_what_wraps_the_method_of_all_optimizers_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    own = Optimizer.load_state_dict

    @functools.wraps(own)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        called.append(self)
        own(self, state_dict)

    monkeypatch.setattr(Optimizer, "load_state_dict", load_state_dict)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    load_states(optimizer, {0: {"momentum_buffer": torch.full((2,), 3.0)}})
    assert called == [optimizer]
    assert next(iter(optimizer.state.values()))["momentum_buffer"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_of_gradients(norm_type: float) -> None:
    given = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    given[0].grad, given[2].grad = torch.tensor([3.0, -4.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])
    norms = norms_of_gradients(given, norm_type)
    assert norms[1] is None
    for k in (0, 2):
        norm, grad = norms[k], given[k].grad
        assert isinstance(norm, Tensor) and isinstance(grad, Tensor)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(grad, norm_type))
    assert norms_of_gradients(given[1:2], norm_type) == [None]
    assert norms_of_gradients([], norm_type) == []


def test_classes_of_a_notebook_are_let_go() -> None:
    def made() -> weakref.ref[type[Optimizer]]:
        class WithModes(SGD):
            def eval(self) -> None:
                """Such as Schedule-Free optimizers have."""

        assert added_methods(WithModes([nn.Parameter(torch.ones(1))])) == ("eval",)
        return weakref.ref(WithModes)

    reference = made()
    gc.collect()
    assert reference() is None


def adam(*sizes: int) -> Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes]
    optimizer = AdamW(groups)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_states_of_other_optimizers_are_refused() -> None:
    one, other = adam(2, 1), adam(1, 2)
    check_optimizer_states([one, other], [adam(2, 1).state_dict(), adam(1, 2).state_dict()])
    with pytest.raises(ValueError, match=r"the states of 1 optimizers, but configure_optimizers returned 2"):
        check_optimizer_states([one, other], [one.state_dict()])
    with pytest.raises(ValueError, match=r"optimizer 1, a AdamW, has groups of \[1, 2\] .* is for groups of \[2, 1\]"):
        check_optimizer_states([one, other], [one.state_dict()] * 2)
    foreign = one.state_dict()
    foreign["state"][7] = foreign["state"][0]
    with pytest.raises(ValueError, match=r"optimizer 0, a AdamW, has 3 parameters, .* unexpected entries \[7\]; noth"):
        check_optimizer_states([one], [foreign])


@pytest.mark.parametrize("capturable", [False, True])
def test_states_move_to_the_devices_of_their_parameters(capturable: bool) -> None:
    first, second = two_layers()
    optimizer = two_groups(first, second)
    step(optimizer)
    for group in optimizer.param_groups:
        group["capturable"] = capturable
    states = [dict(optimizer.state[p]) for p in parameters_of(optimizer)]
    for parameter, state in zip(parameters_of(optimizer), states, strict=True):
        moved = torch.empty_like(parameter, device="meta", requires_grad=True)
        torch.utils.swap_tensors(parameter, moved)
        optimizer.state[parameter] = state
    move_states(optimizer)
    for state in optimizer.state.values():
        assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "meta"
        assert state["step"].device.type == ("meta" if capturable else "cpu")
