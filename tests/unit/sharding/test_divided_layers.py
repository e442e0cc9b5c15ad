"""How a plan divides the layers of a model, in one process; ``test_tensor_parallel_runs.py`` trains with it."""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.sharding.divided_layers import PlannedModel, TensorGroup, TensorPart


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.down(self.up(x).relu()))
        return out


class Words(nn.Module):
    """An embedding, blocks, and a head that may be tied to the embedding."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.table, self.blocks, self.head = (
            nn.Embedding(6, 4, padding_idx=4),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(4, 6),
        )
        if is_tied:
            self.head.weight = self.table.weight


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
HEAD = {"head": "colwise_gather_output"}


@pytest.mark.parametrize(
    "part", [TensorPart(-1), TensorPart(-2), TensorPart(-2, packed=2), TensorPart(-1, packed=3)], ids=str
)
def test_parts_make_the_whole(part: TensorPart) -> None:
    whole = torch.arange(12 * 12).view(12, 12)
    parts = [part.of(whole, rank, 2) for rank in range(2)]
    assert torch.equal(part.joined(parts), whole)
    assert parts[0].shape[part.dim] == 6 and parts[0].data_ptr() != whole.data_ptr()


def test_packed_tensors_are_divided_one_by_one() -> None:
    gate_and_up = torch.arange(8).view(8, 1)
    assert TensorPart(-2, packed=2).of(gate_and_up, 1, 2).flatten().tolist() == [2, 3, 6, 7]


def test_copies_of_the_model_are_divided_in_the_same_way() -> None:
    model = Words(is_tied=True)
    average = copy.deepcopy(model)
    whole = model.table.weight.detach().clone()
    divided = PlannedModel(model, {**PLAN, **HEAD}, 1, 2, [average])
    for (name, own), other in zip(model.named_parameters(), average.parameters(), strict=True):
        assert other.shape == own.shape and torch.equal(other, own), name
    assert average.head.weight is average.table.weight and torch.equal(average.head.weight, whole[3:])
    divided.restore(None)
    with pytest.raises(RuntimeError, match="this Words holds only a part of its weights"):
        average.state_dict()


def test_each_rank_has_its_part() -> None:
    whole = Words()
    model = Words()
    model.load_state_dict(whole.state_dict())
    divided = PlannedModel(model, PLAN, 1, 2)
    assert sorted(divided.parts) == sorted(
        f"blocks.{i}.{name}" for i in range(2) for name in ("up.weight", "up.bias", "down.weight")
    )
    block, before = model.blocks[1], whole.blocks[1]
    assert isinstance(block, Block) and isinstance(before, Block)
    assert torch.equal(block.up.weight, before.up.weight[4:]) and torch.equal(block.up.bias, before.up.bias[4:])
    assert torch.equal(block.down.weight, before.down.weight[:, 4:])
    assert torch.equal(block.down.bias, before.down.bias) and block.up.out_features == block.down.in_features == 4
    assert model.head.weight.shape == (6, 4)


def test_whole_weights_are_loaded_as_parts() -> None:
    whole, model = Words(is_tied=True).state_dict(), Words(is_tied=True)
    average = copy.deepcopy(model)
    divided = PlannedModel(model, {**PLAN, **HEAD}, 1, 2, [average])
    around = nn.Sequential(average)
    model.load_state_dict(whole)
    around.load_state_dict({f"0.{name}": value for name, value in whole.items()})
    for name, own in model.state_dict().items():
        part = divided.parts.get(name)
        assert torch.equal(own, whole[name] if part is None else part.of(whole[name], 1, 2)), name
        assert torch.equal(average.state_dict()[name], own), name
    assert whole["table.weight"].shape == (6, 4)
    parts = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(parts)
    assert all(torch.equal(own, parts[name]) for name, own in model.state_dict().items())
    with pytest.raises(
        RuntimeError, match=r"head\.bias: copying a param with shape torch\.Size\(\[7\]\) from checkpoint"
    ):
        model.load_state_dict({**whole, "head.bias": torch.ones(7)})
    divided.remove_hooks()
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        model.load_state_dict(whole)


def test_a_state_dict_may_leave_parameters_out_but_not_rename_them() -> None:
    model = Words(is_tied=True)
    divided = PlannedModel(model, {**PLAN, **HEAD}, 0, 2)
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("blocks.0.")}
    given = divided.parts_in({**state, "_extra_state": "unknown, but no tensor", "metric.total": torch.ones(())})
    assert given == {name: state[name] for name in divided.parts if name in state} and len(given) == 6
    message = (
        r"Words has other, a name that the model does not have, with the shape of the part of blocks\.\d\.\w+\.weight"
    )
    for some in (state, model.state_dict()):
        with pytest.raises(RuntimeError, match=message):
            divided.parts_in({**some, "other": model.blocks.state_dict()["0.up.weight"].clone()})


@pytest.mark.parametrize("number", [-100, -1, 6, 9])
@pytest.mark.parametrize("plan", [{"table": "embedding_rowwise"}, HEAD], ids=["in the plan", "tied"])
@pytest.mark.parametrize("rank", [0, 1])
def test_entries_that_no_rank_has(rank: int, plan: dict[str, str], number: int) -> None:
    model, ids = Words(is_tied=plan is HEAD), torch.tensor([[0, 5], [number, 2]])
    with pytest.raises(IndexError, match="index out of range in self"):
        model.table(ids)
    divided = PlannedModel(model, plan if plan is HEAD else {**plan, **HEAD}, rank, 2)
    with pytest.raises(IndexError, match="index out of range in self"):
        model.table(ids)
    divided.restore(None)


def test_what_the_log_says() -> None:
    model = Words()
    number = sum(parameter.numel() for parameter in model.parameters())
    said = PlannedModel(model, {**PLAN, **HEAD}, 0, 2).described()
    own = sum(parameter.numel() for parameter in model.parameters())
    assert said == (
        f"each pipeline has {own} of {number} parameters; table, blocks.*, blocks.*.down, blocks.*.norm are whole"
    )


def test_hooks_and_sizes_go_at_the_end() -> None:
    model = Words()
    divided = PlannedModel(model, {**PLAN, "table": "embedding_rowwise"}, 1, 2)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert model.table.padding_idx == 1 and model.table.num_embeddings == 3
    with pytest.raises(RuntimeError, match=r"holds a part of its weights, and computes only together with the other"):
        block(torch.ones(2, 4))
    assert block.down.bias is not None  # also after the error
    divided.restore(None)
    assert block.up.out_features == 8 and model.table.padding_idx == 4 and model.table.num_embeddings == 6
    assert not block.up._forward_pre_hooks and not block.down._forward_hooks
    with pytest.raises(RuntimeError, match=r"this Words holds only a part of its weights, because the run with tensor"):
        model.state_dict()


def test_a_tied_embedding_is_divided_with_the_head() -> None:
    model = Words(is_tied=True)
    divided = PlannedModel(model, HEAD, 0, 2)
    assert sorted(divided.parts) == ["head.bias", "head.weight", "table.weight"]
    assert model.table.weight is model.head.weight and model.table.num_embeddings == 3


def test_states_of_an_optimizer() -> None:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters())
    whole = {n: {"step": torch.tensor(1.0), "exp_avg": torch.rand_like(p)} for n, p in enumerate(model.parameters())}
    divided = PlannedModel(model, PLAN, 1, 2)
    own = divided.own_states(optimizer, whole)
    for number, parameter in enumerate(model.parameters()):
        assert own[number]["exp_avg"].shape == parameter.shape and own[number]["step"] == 1


REFUSED: Mapping[str, tuple[dict[str, str], str]] = {
    "name": ({"blocks.*.upp": "colwise"}, r"names blocks\.\*\.upp, but Words has no such layer or parameter"),
    "style": ({"blocks.*.up": "columnwise"}, r"gives blocks\.\*\.up the style 'columnwise'; supported are colwise"),
    "layer": (
        {"blocks.*.norm": "colwise"},
        r"divides blocks\.0\.norm, a LayerNorm, but this style needs an nn\.Linear",
    ),
    "parameter": ({"blocks.*.scale": "rowwise"}, r"divides the parameter blocks\.0\.scale, but does not say what the"),
    "experts": ({"blocks.*": "moe_tp_experts"}, r"gives blocks\.0 the style 'moe_tp_experts', .* divides none of its"),
    "table": ({"head": "embedding_rowwise"}, r"divides head, a Linear, but this style needs an nn\.Embedding"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plans_that_do_not_fit(name: str) -> None:
    plan, message = REFUSED[name]
    model = Words()
    with pytest.raises(ValueError, match=message):
        PlannedModel(model, plan, 0, 2)
    assert model.head.weight.shape == (6, 4) and not model.head._forward_hooks


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("plan", [{"table": "embedding_rowwise"}, HEAD], ids=["in the plan", "tied"])
def test_embeddings_that_need_the_whole_table(option: dict[str, Any], plan: dict[str, str]) -> None:
    model = Words()
    model.table = nn.Embedding(6, 4, **option)
    model.head.weight = model.table.weight
    with pytest.raises(ValueError, match="divides table, an embedding with max_norm, scale_grad_by_freq or sparse"):
        PlannedModel(model, plan, 0, 2)


def test_sizes_that_do_not_divide() -> None:
    message = r"tensor_parallel_size=4 cannot divide head\.weight of shape \[6, 4\]: 6 is not a multiple of 4"
    with pytest.raises(ValueError, match=message):
        PlannedModel(Words(), HEAD, 0, 4)


def test_ties_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"in two ways, in dimensions -2 and -1: it is tied to another layer"):
        PlannedModel(Words(is_tied=True), {"table": "embedding_rowwise", "head": "rowwise_split_input"}, 0, 2)
    model = Words()
    model.extra = nn.Bilinear(4, 4, 1)
    model.extra.weight = model.head.weight
    with pytest.raises(
        ValueError, match=r"extra\.weight is a parameter that .* the plan says nothing of extra, a Bili"
    ):
        PlannedModel(model, HEAD, 0, 2)


def test_tensors_without_values() -> None:
    with torch.device("meta"):
        model = Words()
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight has no values yet.*Build the model outside of"):
        PlannedModel(model, PLAN, 0, 2)


def on_two_ranks(function: Callable[[TensorGroup], Any]) -> list[Any]:
    """Call a function in two threads, which are the ranks of a group."""
    store = dist.HashStore()

    def call(rank: int) -> Any:
        return function(TensorGroup(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))))

    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(call, range(2))]


ODD_DTYPES = (torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", (*ODD_DTYPES, torch.bfloat16, torch.complex64), ids=str)
def test_tensors_of_every_dtype_reach_the_other_ranks(dtype: torch.dtype) -> None:
    values = [torch.tensor([[0, 1], [1, 1]]).to(dtype), torch.tensor([[1, 1], [0, 0]]).to(dtype)]

    def exchanged(group: TensorGroup) -> list[Tensor]:
        own = values[group.rank]
        return [group.of_first(own), *group.parts(own.T)]

    for first, *parts in on_two_ranks(exchanged):
        for received, sent in zip((first, *parts), (values[0], *(value.T for value in values)), strict=True):
            assert received.dtype == dtype and torch.equal(received.to(torch.complex128), sent.to(torch.complex128))


@pytest.mark.parametrize("dtype", ODD_DTYPES, ids=str)
def test_whole_parameters_of_every_dtype_are_compared(dtype: torch.dtype) -> None:
    def compared(group: TensorGroup, differs: bool) -> None:
        model = Words()
        model.fixed = nn.Parameter(torch.tensor([0, group.rank * differs]).to(dtype), requires_grad=False)
        divided = PlannedModel(model, HEAD, group.rank, 2)
        assert divided.first_different([*model.parameters()], {}, group) is None
        divided.check_equal({"fixed": model.fixed.detach()}, group)

    on_two_ranks(lambda group: compared(group, False))
    with pytest.raises(RuntimeError, match="the pipelines of tensor_parallel_size have trained fixed, of which each"):
        on_two_ranks(lambda group: compared(group, True))
