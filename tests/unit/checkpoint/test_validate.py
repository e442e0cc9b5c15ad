"""A state dict that does not fit is refused by name and stage, and changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torchmetrics import MeanMetric

from strategies.checkpoint.validate import check_fit, stages_by_name
from strategies.pipeline.partition.sequential import cut


class Renames(nn.Module):
    """Takes what an older version saved: its ``weight`` was called ``w``; also has an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = "nothing"
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
        if f"{prefix}w" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), Renames())


def test_a_state_that_fits() -> None:
    module, state = small(), small().state_dict()
    check_fit(module, state)
    check_fit(module, {"0.weight": state["0.weight"]}, strict=False)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        check_fit(module, {"0.weight": torch.ones(3, 1)}, strict=False)


def test_what_a_layer_knows_to_do_is_left_to_it() -> None:
    """A name of old, and a BatchNorm of before it counted batches."""
    module, state = small(), small().state_dict()
    old = {("2.w" if name == "2.weight" else name): value for name, value in state.items()}
    del old["1.num_batches_tracked"]
    before = module[1].running_mean, module[2].weight
    check_fit(module, old)
    assert (module[1].running_mean, module[2].weight) == before  # the same objects
    assert "set_extra_state" not in vars(module[2])
    module.load_state_dict(old)


@pytest.mark.parametrize("strict", [True, False])
def test_shapes(strict: bool) -> None:
    module, state = small(), small().state_dict()
    state["0.weight"] = torch.zeros(7, 2)
    state["2._extra_state"] = "something"
    before = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    with pytest.raises(RuntimeError, match=r"nothing of it has been loaded:\n  size mismatch for 0.weight: .*\[7, 2\]"):
        check_fit(module, state, strict=strict)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert module[2].extra == "nothing"


def test_names_and_stages() -> None:
    module, state = small(), small().state_dict()
    del state["1.weight"], state["0.bias"]
    state |= {"0.foreign": torch.ones(1), "behind.weight": torch.ones(1), "2._extra_state": "something"}
    whole = nn.ModuleDict({"layers": module})
    message = (
        "the state dict does not fit ModuleDict, and nothing of it has been loaded:\n"
        "  missing in stage 0 (layers 0 to 0: Linear): layers.0.bias\n"
        "  missing in stage 1 (layers 1 to 2: BatchNorm1d, Renames): layers.1.weight\n"
        "  unexpected in stage 0 (layers 0 to 0: Linear): layers.0.foreign\n"
        "  unexpected keys: layers.behind.weight"
    )
    named = {f"layers.{name}": value for name, value in state.items()}
    with pytest.raises(RuntimeError) as raised:
        check_fit(whole, named, stage_of=stages_by_name(cut(module, [1, 2]), "layers."))
    assert str(raised.value) == message
    assert module[2].extra == "nothing"
    check_fit(whole, named, strict=False)


def test_layers_without_a_shape_yet() -> None:
    def lazy() -> nn.Sequential:
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), Renames())

    made = lazy()
    made[:2](torch.randn(4, 2))
    state = made.state_dict()
    check_fit(lazy(), state)
    check_fit(lazy(), lazy().state_dict())
    check_fit(module := lazy(), {("2.w" if name == "2.weight" else name): value for name, value in state.items()})
    assert is_lazy(module[0].weight) and is_lazy(module[1].running_mean)
    module.load_state_dict(state)
    assert torch.equal(module[0].weight, made[0].weight)
    with pytest.raises(RuntimeError, match=r"missing keys: 0\.bias"):
        check_fit(module := lazy(), {name: value for name, value in state.items() if name != "0.bias"})
    assert is_lazy(module[0].weight)


def test_a_lazy_buffer_of_integers() -> None:
    """A layer without values, which tries the name of old, has such a buffer too; integers require no gradients."""

    class Counts(LazyModuleMixin, Renames):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", UninitializedBuffer(dtype=torch.int64))

    module, state = Counts(), {"w": torch.ones(2), "counts": torch.tensor([3, 4]), "_extra_state": "something"}
    check_fit(module, dict(state))
    assert is_lazy(module.counts)
    module.load_state_dict(state)
    assert module.counts.tolist() == [3, 4]


def test_what_a_layer_keeps_among_its_attributes() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()
            self.metric.persistent(True)

    one, other = Keeping(), Keeping()
    one.metric.update(5.0)
    with pytest.raises(RuntimeError, match="unexpected keys: foreign"):
        check_fit(other, {**one.state_dict(), "foreign": torch.ones(1)})
    assert other.metric.mean_value == 0
    other.metric.update(3.0)
    assert other.metric.compute() == 3
