"""Models built without memory have, once their recipes are replayed, the values of one process."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig

from strategies.pipeline.construction.recipe import Recipe
from strategies.pipeline.construction.without_memory import Construction


class Rate(nn.Module):
    """A layer whose construction reads values, makes a mask and clones."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.lin = nn.Linear(6, 6)
        with torch.no_grad():
            self.lin.weight[2:4] *= 3
            self.lin.weight[0] = torch.tensor([1.0, 2, 3, 4, 5, 6])
        self.scale = nn.Parameter(self.lin.weight.detach().abs().mean(1))
        self.largest = self.lin.weight.max().item()
        self.rows = self.lin.weight.tolist()
        self.array = self.lin.bias.detach().numpy().copy().tolist()
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)))
        position, step = torch.arange(5).unsqueeze(1), torch.exp(torch.arange(0, 4, 2) * -0.5)
        table = torch.zeros(5, 4)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * step), torch.cos(position * step)
        self.register_buffer("table", table)
        self.clones = nn.ModuleList(copy.deepcopy(self.lin) for _ in range(2))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.lin.weight
        self.devices = {str(p.device) for p in self.parameters()}


def initialised() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)], nn.Embedding(7, 3, padding_idx=1), nn.LayerNorm(4))
    orthogonal = [0, 2]

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.8, a=-1, b=1)
            nn.init.zeros_(module.bias)

    model.apply(init)
    for i in orthogonal:
        nn.init.orthogonal_(model[i].weight)
    nn.init.xavier_uniform_(model[1].weight)
    return model


class Edits(nn.Module):
    """A layer whose construction changes single elements, converts, and draws in unusual ways."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        with torch.no_grad():
            self.a.weight[torch.tensor([0, 1])] = 0.0
            self.a.weight[self.a.weight > 0.2] = 0.5
            self.a.weight[3:5] = 3.0
            self.a.weight[5, 0] = -1.0
            self.b.weight.data.cpu().mul_(2)
            torch.as_tensor(self.b.weight.data).add_(0.1)
            self.b.weight.copy_(torch.where(self.b.weight > 0, self.b.weight, 0.25))
            nn.init.sparse_(self.c.weight, 0.3)
            nn.init.eye_(self.c.weight.data[:, :6])
            self.c.weight.add_(torch.rand(6, 6, generator=generator) + torch.randperm(6, generator=generator))
        nn.init.dirac_(kernel := torch.empty(4, 4, 3))
        self.kernel = nn.Parameter(kernel)
        self.table = nn.Embedding(5, 3)
        self.table.weight.data = torch.arange(15.0).view(5, 3)
        self.fresh = nn.Parameter(self.a.weight.new(4, 4).normal_())
        self.as_b = nn.Parameter(self.c.weight.to(self.b.weight).to("cpu"))
        self.counts = nn.Parameter(torch.poisson(self.b.weight.detach().abs() * 9, generator))
        self.text = f"{self.a.weight[0, 0]:.3f}"
        self.differ = self.a.weight.data_ptr() != self.b.weight.data_ptr()
        self.distance = self.a.weight[1].data_ptr() - self.a.weight.data_ptr()
        self.norm = nn.BatchNorm1d(40)
        self.norm(torch.randn(30, 40))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "rate": Rate,
    "edits": Edits,
    "init": initialised,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3),
    "lstm": lambda: nn.LSTM(4, 5, 2),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "double": lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double(),
    "gpt2": lambda: AutoModel.from_config(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=6)),
    "bert": lambda: AutoModel.from_config(
        BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=11)
    ),
    "llama": lambda: AutoModel.from_config(
        LlamaConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=11)
    ),
}


def built(model: nn.Module, construction: Construction) -> dict[str, Tensor]:
    found = {}
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if construction.knows(tensor):
            recipe: Recipe = pickle.loads(pickle.dumps(construction.recipe(tensor)))
            found[name] = construction.view(tensor).on(recipe.replay())
        else:
            found[name] = tensor.detach()
    return found


@pytest.mark.parametrize("small_bytes", [-1, 60])
@pytest.mark.parametrize("kind", BUILDERS)
def test_values_and_random_state_of_one_process(kind: str, small_bytes: int) -> None:
    build = BUILDERS[kind]
    torch.manual_seed(3)
    expected = build()
    state, drawn = torch.get_rng_state(), torch.rand(3)
    torch.manual_seed(3)
    construction = Construction(small_bytes)
    with construction.without_memory():
        model = build()
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(torch.rand(3), drawn)
    torch.manual_seed(11)  # replays do not depend on the generator, and leave it alone
    values = built(model, construction)
    assert torch.initial_seed() == 11 and torch.equal(torch.rand(1), torch.manual_seed(11) and torch.rand(1))
    wanted = {**dict(expected.named_parameters(remove_duplicate=False)), **dict(expected.named_buffers())}
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        assert values[name].dtype == value.dtype and torch.equal(values[name], value), name
    unbuilt = [p for p in model.parameters() if construction.knows(p)]
    assert unbuilt and all(p.is_meta for p in unbuilt)
    if isinstance(model, Rate) and isinstance(expected, Rate):
        assert model.devices == {"cpu"}
        for name in ("rates", "largest", "rows", "array"):
            assert getattr(model, name) == getattr(expected, name)
    if isinstance(model, Edits) and isinstance(expected, Edits):
        for name in ("text", "differ", "distance"):
            assert getattr(model, name) == getattr(expected, name)


def test_what_is_overwritten_is_not_computed() -> None:
    construction = Construction(-1)
    with construction.without_memory():
        linear = nn.Linear(4, 4, bias=False)
        nn.init.normal_(linear.weight)
    assert len(construction.recipe(linear.weight).steps) == 1


def test_an_array_refuses_changes() -> None:
    with Construction(-1).without_memory():
        array = nn.Linear(4, 4).weight.detach().numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 5


@pytest.mark.parametrize("rows", [1, 64])
def test_a_copy_of_a_layer_can_run_before_its_weights_are_built(rows: int) -> None:
    torch.manual_seed(3)
    expected = nn.Linear(4, rows)
    torch.manual_seed(3)
    construction = Construction(60)
    with construction.without_memory():
        linear = nn.Linear(4, rows)
    assert any(map(construction.knows, linear.parameters())) == (rows > 1)
    with construction.reading(linear):
        output = copy.deepcopy(linear)(torch.ones(1, 4))
    assert torch.equal(output, expected(torch.ones(1, 4)))
    assert any(map(construction.knows, linear.parameters())) == (rows > 1)


def test_nested_contexts_add_each_step_once() -> None:
    construction = Construction(-1)
    with construction.without_memory(), construction.without_memory():
        weight = torch.ones(4).mul_(2)
    assert construction.values(weight).tolist() == [2] * 4


def test_what_cannot_be_built_later() -> None:
    construction = Construction(60)
    with construction.without_memory():
        linear = nn.Linear(6, 6)
        with pytest.raises(RuntimeError, match=r"`_foreach_mul_` changes large and small tensors in place at once"):
            torch._foreach_mul_([p.data for p in linear.parameters()], 2.0)
        with pytest.raises(RuntimeError, match=r"`add_` takes a tensor of shape \[6, 6\] on the meta device, which"):
            linear.weight.data.add_(torch.ones(6, 6, device="meta"))
        with pytest.raises(RuntimeError, match=r"a view with the conjugate or the negative values"):
            torch.zeros(6, 6, dtype=torch.complex64).conj().add(1)
        with pytest.raises(RuntimeError, match=r"`resize_` on a tensor of 144 bytes"):
            linear.weight.data.resize_(50)
