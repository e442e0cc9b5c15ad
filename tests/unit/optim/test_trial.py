"""Which optimizers can be divided over processes, found by steps of small copies: without processes."""

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import prodigyopt
import pytest
import schedulefree
import torch
from parity_parts import Lamb
from torch import Tensor, nn, optim
from torch.optim import SGD, Optimizer

from strategies.optim.trial import check_by_element, check_divisible

COUPLES = "cannot be divided over processes: what it does to one parameter depends on parameters in other processes"


class NormalisedTogether(SGD):
    """Divides all gradients by their common norm."""

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else None
        for grad in grads:
            grad.div_(norm)
        super().step()


class NormalisedByGroup(SGD):
    """Divides the gradients of each group by the norm of the group, from the sixth step on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.number = 0

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        self.number += 1
        for group in self.param_groups:
            norms = [p.grad.norm() for p in group["params"]]
            for p in group["params"]:
                p.grad.div_(torch.stack(norms).norm() if self.number > 5 else 1.0)
        super().step()


class SharesBetweenGroups(SGD):
    """Steps each group by the largest gradient of the first one."""

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        largest = max([p.grad.abs().max().item() for p in self.param_groups[0]["params"]], default=1.0)
        for group in self.param_groups[1:]:
            for p in group["params"]:
                p.grad.div_(largest)
        super().step()


class LeavesOutAll(SGD):
    """Makes no step if any gradient is infinite."""

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        if all(p.grad.isfinite().all() for group in self.param_groups for p in group["params"]):
            super().step()


class CountsTogether(SGD):
    """Keeps a hyperparameter that depends on all of its parameters."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["largest"] = max([p.abs().max().item() for p in group["params"]], default=0.0)


class MeasuresVectors(SGD):
    """Keeps the mean norm of its vectors of several elements, which is not a number in a process that has none."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            norms = [p.norm().item() for p in group["params"] if p.dim() == 1 and len(p) > 1]
            group["norm"] = sum(norms) / len(norms) if norms else float("nan")


class Noisy(SGD):
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p))
        super().step()


class NoisyByNumpy(SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(float(np.random.uniform(-1, 1)))


class Around(Optimizer):
    """As Lookahead is written: an optimizer that steps another one."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


class NeedsClosure(SGD):
    def step(self, closure: Any) -> None:
        super().step(closure)


class UsesClosure(SGD):
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "give me a closure"
        super().step(closure)


class EvaluatesTwice(SGD):
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        super().step(closure)


class ChangesFirst(schedulefree.AdamWScheduleFreeClosure):
    """Steps by a closure if it gets one."""

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            super().step(closure)


class NeedsBatchSize(SGD):
    def step(self, batch_size: int, closure: Any = None) -> None:
        super().step(closure)


class StepsByTheLoss(SGD):
    """Multiplies its steps by the loss, which it gets from the closure."""

    def step(self, closure: Any = None) -> None:
        loss = 1.0 if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(loss)
        super().step()


class StepsAllItKnows(SGD):
    """Does not look at its groups, but leaves out what has no gradient."""

    def __init__(self, params: Any) -> None:
        self.all = list(params)
        super().__init__(self.all, 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for p in self.all:
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


class WithoutClosure(SGD):
    def step(self) -> None:
        super().step()


class CountsWithTheFirst(Optimizer):
    """As those of heavyball: nested states, the number of elements of a group, and that of steps with its first one."""

    relies_on_it = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            states = [self.state[p].setdefault(0, {}) for p in group["params"]]
            group.setdefault("elements", sum(p.numel() for p in group["params"]))
            first = states[0] if states else {}
            group["count"] = first["step"] = (first.get("step", 0) if self.relies_on_it else group["count"]) + 1
            for p, state in zip(group["params"], states, strict=True):
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(group["lr"] / group["count"] * mean)


class ReliesOnTheNumber(CountsWithTheFirst):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = 1.0 / max(1, group["elements"])


class ReliesOnTheFirst(CountsWithTheFirst):
    """Counts only there: from a checkpoint of one process, other processes would begin at zero."""

    relies_on_it = True


class Lars(Optimizer):
    """Layer-wise adaptive rates (You et al., 2017): the norms of one parameter and its gradient scale its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.norm() / (p.grad.norm() + 1e-8) * p.grad)


SHAPES = ((5, 7), (7,), (4, 4), (1,), (2, 3, 2, 2), ())


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def in_groups(make: Any, *sizes: int) -> Any:
    def made(p: Sequence[Tensor]) -> Optimizer:
        parts = iter(p)
        groups = [{"params": [next(parts) for _ in range(size)]} for size in sizes]
        return make([*groups, {"params": list(parts)}])

    return made


def two_stages(optimizer: Optimizer) -> list[list[Tensor]]:
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    return [everything[:2], everything[2:]]


@pytest.mark.parametrize("divided", ["stages", "ranks"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (optim.LBFGS, r"LBFGS\.step needs an argument \(closure\)"),
        (EvaluatesTwice, "EvaluatesTwice evaluates the loss several times within a step"),
        (NormalisedTogether, f"NormalisedTogether {COUPLES}"),
        (in_groups(NormalisedByGroup, 4), f"NormalisedByGroup {COUPLES}"),
        (in_groups(SharesBetweenGroups, 1, 2), f"SharesBetweenGroups {COUPLES}"),
        (LeavesOutAll, f"LeavesOutAll {COUPLES}"),
        (CountsTogether, f"CountsTogether {COUPLES}.* 'largest' of parameter group 0 differed"),
        (MeasuresVectors, f"MeasuresVectors {COUPLES}.* 'norm' of parameter group 0 differed"),
        (Lamb, f"Lamb {COUPLES}.*set the Trainer's gradient_clip_val"),
        (partial(Lamb, max_grad_norm=1e3), f"Lamb {COUPLES}"),
        (partial(prodigyopt.Prodigy, lr=1.0), f"Prodigy {COUPLES}"),
        (partial(prodigyopt.Prodigy, slice_p=3), f"Prodigy {COUPLES}"),
        (Noisy, r"Noisy draws random numbers in its step \(from torch's generator on the CPU\)"),
        (NoisyByNumpy, r"NoisyByNumpy draws random numbers in its step \(from numpy\.random\)"),
        (ReliesOnTheNumber, f"ReliesOnTheNumber {COUPLES}"),
        (ReliesOnTheFirst, f"ReliesOnTheFirst {COUPLES}"),
        (lambda p: Around(SGD(p)), r"Around steps another optimizer \(SGD\) within its own step"),
        (NeedsClosure, r"NeedsClosure\.step needs an argument \(closure\), but each process steps its own parameters"),
        (UsesClosure, r"UsesClosure cannot be tried on small copies of its parameters \(AssertionError: give me a"),
        (NeedsBatchSize, r"NeedsBatchSize\.step needs an argument \(batch_size\)"),
        (StepsByTheLoss, f"StepsByTheLoss {COUPLES}"),
        (schedulefree.AdamWScheduleFreeClosure, r"AdamWScheduleFreeClosure\.step needs an argument \(closure\)"),
        (ChangesFirst, "ChangesFirst changes parameters within its step before it evaluates the loss"),
    ],
)
def test_refused(make: Any, message: str, divided: str) -> None:
    optimizer = make(parameters())
    with pytest.raises(ValueError, match=message):
        check_divisible(optimizer, two_stages(optimizer) if divided == "stages" else None)


def test_nothing_to_divide() -> None:
    empty = SGD([{"params": []}])
    with pytest.raises(ValueError, match="SGD has no parameters"):
        check_divisible(empty)
    check_divisible(empty, [[], []])


def test_what_one_process_couples_alone() -> None:
    """A stage that has all parameters of an optimizer, or of a group, may couple them."""
    p = parameters()
    everything_on_the_driver, everything_on_a_worker = [[], p], [p, []]
    check_divisible(Lamb(p), everything_on_the_driver)
    check_divisible(Lamb(p), everything_on_a_worker)
    check_divisible(prodigyopt.Prodigy(p), everything_on_the_driver)
    with pytest.raises(ValueError, match=f"Prodigy {COUPLES}"):  # its step size is a hyperparameter of the driver
        check_divisible(prodigyopt.Prodigy(p), everything_on_a_worker)
    by_group = in_groups(NormalisedByGroup, 3)(p)
    check_divisible(by_group, [p[:3], p[3:]])
    with pytest.raises(ValueError, match=f"NormalisedByGroup {COUPLES}"):
        check_divisible(by_group, [p[:2], p[2:]])


def test_one_process_may_draw() -> None:
    p = parameters()
    check_divisible(Noisy(p), [p])


TORCH = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
DIVISIBLE: dict[str, Any] = {
    **{name: getattr(optim, name) for name in TORCH},
    **{f"{name}, foreach": partial(getattr(optim, name), foreach=True) for name in TORCH},
    "AdamW, fused": partial(optim.AdamW, fused=True, amsgrad=True),
    "Adagrad, state": partial(optim.Adagrad, initial_accumulator_value=0.1, lr_decay=0.1),
    "rate in a tensor": partial(optim.AdamW, lr=torch.tensor(1e-3)),
    "groups": lambda p: SGD([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}, {"params": []}], 0.2, 0.9, nesterov=True),
    "a group for each parameter": lambda p: optim.AdamW(
        [{"params": [one], "lr": 0.1 / k} for k, one in enumerate(p, 1)]
    ),
    "names": lambda p: optim.AdamW([(f"p{k}", one) for k, one in enumerate(p)]),
    "Muon": lambda p: optim.Muon([p[0], p[2]]),
    "Lars": Lars,
    "StepsAllItKnows": StepsAllItKnows,
    "WithoutClosure": partial(WithoutClosure, lr=0.1),
    "CountsWithTheFirst": CountsWithTheFirst,
    "Lamb, no clipping": partial(Lamb, max_grad_norm=None),
    "AdamWScheduleFree": partial(schedulefree.AdamWScheduleFree, warmup_steps=3),
    "AdamWScheduleFree, loops": partial(schedulefree.AdamWScheduleFree, foreach=False),
    "SGDScheduleFree": partial(schedulefree.SGDScheduleFree, weight_decay=0.1),
    "RAdamScheduleFree": schedulefree.RAdamScheduleFree,
    "AdamWScheduleFree, groups": in_groups(schedulefree.AdamWScheduleFree, 1, 2),
}


IN_BFLOAT16 = ("Adafactor", "Adam", "AdamW, fused", "Muon", "SGDScheduleFree")
FOREACH = ("Adafactor, foreach", "AdamW, foreach", "SGD, foreach")
"""Those that are tried in bfloat16, or with ``foreach``, in `make unit`; slow tests try all of them."""

IN_UNIT = [name for name in DIVISIBLE if not name.endswith(", foreach") or name in FOREACH]
OF_EVERY_TYPE = [
    pytest.param(name, dtype, marks=[pytest.mark.slow] * (name not in (IN_BFLOAT16 if half else IN_UNIT)))
    for name in DIVISIBLE
    for half, dtype in enumerate((torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("name", "dtype"), OF_EVERY_TYPE)
def test_divisible_and_left_as_it_was(name: str, dtype: torch.dtype) -> None:
    own = [nn.Parameter(p.detach().to(dtype)) for p in parameters()]
    optimizer = DIVISIBLE[name](own)
    for p in own:
        p.grad = torch.ones_like(p)
    if dtype is torch.float32:
        if hasattr(optimizer, "train"):
            optimizer.train()
        optimizer.step()
        for p in own:  # some change it
            p.grad = torch.ones_like(p)
    before, values = str(optimizer.state_dict()), [p.detach().clone() for p in own]
    state = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    check_divisible(optimizer)
    used = [p for p in own if any(p is one for group in optimizer.param_groups for one in group["params"])]
    for parts in ([used[:2], used[2:]], [used, []], [[], used]):
        check_divisible(optimizer, parts)
    check_divisible(optimizer, [used[:1], [], used[1:2], used[2:]])
    assert str(optimizer.state_dict()) == before
    assert all(torch.equal(p, value) for p, value in zip(own, values, strict=True))
    assert all(p.grad is not None and torch.equal(p.grad, torch.ones_like(p)) for p in own)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), str(np.random.get_state())) == state[1:]


NOT_BY_ELEMENT = ("Adafactor", "Adafactor, foreach", "Muon", "Lars", "Lamb, no clipping")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_UNIT)) for name in DIVISIBLE]
)
def test_divisible_by_rows(name: str) -> None:
    own = parameters()
    optimizer = DIVISIBLE[name](own)
    check_divisible(optimizer)
    before, values = str(optimizer.state_dict()), [p.detach().clone() for p in own]
    if name in NOT_BY_ELEMENT:
        with pytest.raises(ValueError, match=rf"{type(optimizer).__name__} cannot be used under stage=3.*in a trial"):
            check_by_element(optimizer, "stage=3", "stage=2")
    else:
        check_by_element(optimizer, "stage=3", "stage=2")
    assert str(optimizer.state_dict()) == before
    assert all(torch.equal(p, value) for p, value in zip(own, values, strict=True))


def test_scalars_do_not_hide_the_parameters_that_follow_them() -> None:
    scalars = [nn.Parameter(torch.randn(())) for _ in range(20)]
    with pytest.raises(ValueError, match="Lars cannot be used under stage=3"):
        check_by_element(DIVISIBLE["Lars"]([*scalars, *parameters()[:1]]), "stage=3", "stage=2")
    check_by_element(optim.AdamW(scalars), "stage=3", "stage=2")


@pytest.mark.parametrize("others", [2, 0])
def test_parameters_without_elements(others: int) -> None:
    """Of an adapter of rank 0, for example: in a process that has only these, AdamW makes no state."""
    empty, here = [nn.Parameter(torch.zeros(size, 3)) for size in (0, 0)], parameters()[:others]
    optimizer = optim.AdamW([empty[0], *here, empty[1]])
    check_divisible(optimizer)
    check_divisible(optimizer, [[empty[0]], [*here, empty[1]]])
    check_by_element(optimizer, "stage=3", "stage=2")


def test_sparse_gradients() -> None:
    check_divisible(optim.SparseAdam(parameters()[:3]), [parameters()[:1], []])


def test_parameters_without_values() -> None:
    """Those of layers in other processes."""
    elsewhere = [nn.Parameter(torch.empty(3, 4, device="meta")) for _ in range(2)]
    here = parameters()
    check_divisible(optim.AdamW([*elsewhere, *here]), [elsewhere, here])
    with pytest.raises(ValueError, match=f"Lamb {COUPLES}"):
        check_divisible(Lamb([*elsewhere, *here]), [elsewhere, here])


def test_large_models_cost_no_more() -> None:
    p = [nn.Parameter(torch.empty(10_000, 10_000, device="meta")) for _ in range(400)]
    one_by_one = [{"params": [one], "weight_decay": 0.1 * (one.ndim > 1)} for one in p[:100]]
    for groups in (p, one_by_one):
        start = time.process_time()
        check_divisible(optim.AdamW(groups, foreach=True), [p[:50], p[50:]])
        assert time.process_time() - start < 5
