"""Blocks of an ``nn.ModuleList`` whose calls are deferred and run stage by stage, here all in one process."""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from strategies.pipeline.partition.blocks.deferred_blocks import DeferredBlocks
from strategies.pipeline.partition.blocks.deferred_calls import DeferredCalls, KnownCalls
from strategies.pipeline.partition.blocks.expected import ExpectedOutputs
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.stage.microbatch.split import NoChunk, merge, split


class Block(nn.Module):
    """Takes a mask, a scale and a bias, and returns a tensor."""

    def __init__(self, kind: str = "full") -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, hidden: Tensor, mask: Tensor | None = None, *, bias: Tensor, scale: float = 1.0) -> Tensor:
        hidden = hidden + scale * torch.tanh(self.linear(hidden)) + bias
        return hidden if mask is None else hidden * mask


class TupleBlock(Block):
    """Returns the hidden state, a bias for the next block, statistics, and nothing."""

    def forward(self, hidden: Tensor, bias: Tensor | None = None) -> Any:
        hidden = hidden + torch.tanh(self.linear(hidden)) + (0 if bias is None else bias)
        return hidden, hidden.mean(-1, keepdim=True), None


class Loop(nn.Module):
    """A model that calls its blocks by ``run``."""

    def __init__(self, blocks: list[nn.Module], run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.embed, self.run = nn.ModuleList(blocks), nn.Linear(4, 4), run
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, self.embed(x))


@contextmanager
def deferred(model: Loop, balance: list[int]) -> Iterator[list[list[Any]]]:
    """Run the calls of the blocks through stages in this process; yields the tables that enter the stages."""
    tables: list[list[Any]] = []

    def run(value: Any, find_rows: Any, list_number: int) -> Any:
        for stage in cut(model.blocks, balance):
            tables.append(value[0])
            value = blocks.call(stage, value, lambda place, given: None)
        return value

    blocks = DeferredBlocks(model.blocks, run)
    blocks.start()
    try:
        yield tables
    finally:
        blocks.end()


def equals_one_process(model: Loop, balance: list[int], x: Tensor) -> list[list[Any]]:
    """Compare outputs and all gradients with those of a plain call."""

    def grads(output: Any) -> list[Tensor | None]:
        model.zero_grad()
        sum(t.square().sum() for t in (output if isinstance(output, tuple) else (output,))).backward()
        return [p.grad for p in model.parameters()]

    expected = model(x)
    expected_grads = grads(expected)
    with deferred(model, balance) as tables:
        found = model(x)
    found_grads = grads(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for one, other in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return tables


def looping(model: Loop, hidden: Tensor) -> Tensor:
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    for number, block in enumerate(model.blocks[:]):
        hidden = block(hidden, mask if block.kind == "masked" else None, bias=model.bias, scale=number + 0.5)
    return hidden.tanh()


def with_tuples(model: Loop, hidden: Tensor) -> tuple[Tensor, ...]:
    bias, statistics = None, []
    for block in model.blocks:
        outputs = block(hidden, bias)
        hidden, bias, nothing = outputs
        assert nothing is None and len(outputs) == 3
        assert outputs[0].shape == (3, 4) and outputs[0].dtype == torch.float32 and isinstance(outputs[0], Tensor)
        statistics.append(bias)
    return hidden, *statistics[1:]


X = torch.arange(12.0).reshape(3, 4) / 12


@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 1, 1]])
def test_masks_biases_and_numbers_of_each_block(balance: list[int]) -> None:
    model = Loop([Block(), Block("masked"), Block(), Block("masked")], looping)
    tables = equals_one_process(model, balance, X)
    # The bias, which every block takes, is in the table once; of the hidden states the current one only.
    assert [sum(isinstance(entry, Tensor) for entry in table) for table in tables] == [3] * len(balance)


@pytest.mark.parametrize("balance", [[3], [1, 1, 1]])
def test_blocks_that_return_tuples(balance: list[int]) -> None:
    equals_one_process(Loop([TupleBlock() for _ in range(3)], with_tuples), balance, X)


def test_hidden_states_that_the_model_collects() -> None:
    def run(model: Loop, hidden: Tensor) -> tuple[Tensor, ...]:
        collected = (hidden,)
        for block in model.blocks:
            hidden = block(hidden, bias=model.bias)
            collected += (hidden,)
        return collected

    equals_one_process(Loop([Block() for _ in range(3)], run), [1, 1, 1], X)


def test_a_block_is_itself_again_after_the_end() -> None:
    model = Loop([Block(), Block()], looping)
    with deferred(model, [1, 1]):
        pass
    assert type(model.blocks[0](X, bias=model.bias)) is Tensor


def test_two_passes_one_after_the_other() -> None:
    model = Loop([Block(), Block()], lambda m, h: looping(m, looping(m, h)))
    equals_one_process(model, [1, 1], X)


class Collecting(Block):
    """Returns the hidden state and a mean of its positions, whose length is not that of the hidden state."""

    def forward(self, hidden: Tensor, *others: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        hidden = hidden + scale * torch.tanh(self.linear(hidden)) + sum(other.mean() for other in others)
        return hidden, hidden.mean(1)


def test_later_passes_may_have_other_constants_lengths_and_arguments() -> None:
    """Descriptions of calls are used again where nothing but tensors has changed."""
    described: list[str] = []

    def run(model: Loop, hidden: Tensor) -> Tensor:
        mean = None
        for number, block in enumerate(model.blocks):
            others = (mean, *model.given) if mean is not None and model.passes_mean else model.given
            hidden, mean = block(hidden, *others, scale=model.scale + number)
        return hidden + mean.unsqueeze(1)

    model = Loop([Collecting() for _ in range(3)], run)
    expected_of = ExpectedOutputs.of

    def of(self: ExpectedOutputs, name: str, *args: Any) -> Any:
        described.append(name)
        return expected_of(self, name, *args)

    passes = [
        (2.0, 5, False, 0),
        (2.0, 5, False, 0),  # as before
        (3.0, 5, False, 0),  # another constant
        (2.0, 7, False, 0),  # another length, which the shape of an output follows
        (2.0, 5, True, 0),  # an output of a block as another argument
        (2.0, 5, False, 1),  # a tensor of the model in its place
        *((2.0, 7, False, 0), (2.0, 5, True, 0), (2.0, 5, False, 1)),
    ]
    with deferred(model, [1, 2]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpectedOutputs, "of", of)
        found = []
        for scale, length, passes_mean, num_given in passes:
            model.scale, model.passes_mean = scale, passes_mean
            model.given = [torch.full((2, 4), 0.5)] * num_given
            described.append("pass")
            found.append(model(torch.linspace(0, 1, 2 * length * 4).reshape(2, length, 4)))
    for output, (scale, length, passes_mean, num_given) in zip(found, passes, strict=True):
        model.scale, model.passes_mean, model.given = scale, passes_mean, [torch.full((2, 4), 0.5)] * num_given
        expected = model(torch.linspace(0, 1, 2 * length * 4).reshape(2, length, 4))
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
    per_pass = " ".join(described).split("pass")[1:]
    assert [len(names.split()) for names in per_pass] == [2, 0, 2, 2, 1, 2, 0, 0, 0]


class NeedsValues(nn.Module):
    """Its code cannot run on the ``meta`` device, so its output is guessed. Returns what ``returns`` makes of it."""

    def __init__(self, returns: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, hidden: Tensor) -> Tensor:
        return self.returns(hidden + 0 * hidden.sum().item())


def one_after_the_other(model: Loop, hidden: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden)
    return hidden


def test_a_guess_is_of_the_dtype_that_the_model_was_told() -> None:
    """Autocast has no effect on the ``meta`` device, so the model is told float32 for an output in bfloat16."""
    as_told, not_as_told = (
        Loop([nn.Linear(4, 4), NeedsValues(returns), nn.Linear(4, 4)], one_after_the_other)
        for returns in (torch.Tensor.float, lambda hidden: hidden)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        equals_one_process(as_told, [1, 2], X)
        with (
            deferred(not_as_told, [1, 2]),
            pytest.raises(RuntimeError, match=r"\[\*, \[4\]\] and torch.bfloat16, .* \[\*, \[4\]\] and torch.float32"),
        ):
            not_as_told(X)


def test_a_block_that_changes_the_shape_of_its_argument() -> None:
    class Widens(NeedsValues):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden.sum().item()
            return hidden.unsqueeze_(2)

    model = Loop([nn.Linear(4, 4), Widens(torch.tanh), nn.Tanh()], one_after_the_other)
    with deferred(model, [2, 1]), pytest.raises(RuntimeError, match=r"block blocks.1 returned .*, \[4, 1\]\]"):
        model(X)


def test_an_argument_that_the_prediction_changes_is_named() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = [torch.zeros(())]

        def forward(self, hidden: Tensor, number: Tensor) -> Tensor:
            self.number[0].add_(1)
            return hidden + 1

    def run(model: Loop, hidden: Tensor) -> Tensor:
        for block in model.blocks:
            hidden = block(hidden, block.number[0])
        return hidden

    with (
        deferred(model := Loop([Counts(), Counts()], run), [1, 1]),
        pytest.raises(RuntimeError, match=r"the model has changed argument '1' .* of block blocks.0 in place"),
    ):
        model(X)


def adds_between(model: Loop, hidden: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden, bias=model.bias) + 1
    return hidden


def one_twice(model: Loop, hidden: Tensor) -> Tensor:
    first = model.blocks[0](hidden, bias=model.bias)
    return model.blocks[0](first, bias=model.bias)


def one_skipped(model: Loop, hidden: Tensor) -> Tensor:
    hidden = model.blocks[0](hidden, bias=model.bias)
    return model.blocks[2](hidden, bias=model.bias)


def backwards(model: Loop, hidden: Tensor) -> Tensor:
    for block in reversed(model.blocks):
        hidden = block(hidden, bias=model.bias)
    return hidden


def changes_an_argument(model: Loop, hidden: Tensor) -> Tensor:
    position = torch.zeros(4)
    for block in model.blocks:
        position += 1
        hidden = block(hidden, bias=position)
    return hidden


def changes_the_last_argument(model: Loop, hidden: Tensor) -> Tensor:
    for block, bias in zip(model.blocks, torch.eye(3, 4), strict=True):
        hidden = block(hidden, bias=bias)
        bias.zero_()
    return hidden


def freezes_by_no_grad(model: Loop, hidden: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        with torch.set_grad_enabled(number > 0):
            hidden = block(hidden, bias=model.bias)
    return hidden


def casts_some(model: Loop, hidden: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        with torch.autocast("cpu", enabled=number > 0, dtype=torch.bfloat16):
            hidden = block(hidden, bias=model.bias)
    return hidden


def checkpoints(model: Loop, hidden: Tensor, *, use_reentrant: bool) -> Tensor:
    for block in model.blocks:
        hidden = checkpoint(partial(block, bias=model.bias), hidden, use_reentrant=use_reentrant)
    return hidden


def ends_early(model: Loop, hidden: Tensor) -> Tensor:
    return model.blocks[0](hidden, bias=model.bias).tanh()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (adds_between, "uses the output of block blocks.0 in (__add__|add)"),
        (changes_an_argument, r"has changed argument 'bias' \(shape \[4\]\) of block blocks.0 in place"),
        (changes_the_last_argument, r"has changed argument 'bias' \(shape \[4\]\) of block blocks.0 in place"),
        (freezes_by_no_grad, "blocks.1 is called under a different grad mode than block blocks.0"),
        (casts_some, "blocks.1 is called under a different autocast or other setting than block blocks.0"),
        (partial(checkpoints, use_reentrant=False), "blocks.0 is called within torch.utils.checkpoint"),
        (partial(checkpoints, use_reentrant=True), "blocks.0 is called within torch.utils.checkpoint"),
        (ends_early, "uses the output of block blocks.0 in tanh"),
        (one_twice, "calls block blocks.0 a second time"),
        (one_skipped, "calls block blocks.2 before block 1"),
        (backwards, "calls block blocks.2 first and so runs its blocks in the reverse order"),
    ],
)
def test_what_cannot_be_deferred_is_refused(run: Callable[..., Any], message: str) -> None:
    model = Loop([Block() for _ in range(3)], run)
    with deferred(model, [1, 2]), pytest.raises(RuntimeError, match=message):
        model(X)


def test_blocks_on_a_gpu_run_under_the_same_settings() -> None:
    names = ["0", "1"]
    blocks = nn.ModuleList(Block() for _ in names)
    calls = DeferredCalls("blocks", names, blocks, ExpectedOutputs(blocks, "blocks"), KnownCalls())
    with FakeTensorMode():
        value = torch.empty(2, 4, device="cuda")
        calls.defer("0", (value,), {})
        assert calls.defer("1", (calls.last_output(),), {})


class KeyValueCache:
    """A cache, recognised by the name of its class."""


class Notes:
    """An object that a block changes."""

    def __init__(self) -> None:
        self.kept: list[int] = []


class ChangingBlock(nn.Module):
    """Changes its argument in place."""

    def forward(self, hidden: Tensor, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            kept.add_(1)
        elif isinstance(kept, Notes):
            kept.kept.append(1)
        elif isinstance(kept, list):
            kept.append(hidden)
        elif isinstance(kept, dict | UserDict):
            hidden = hidden + kept.get("sum", 0)
            kept["sum"] = hidden
        return hidden + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (KeyValueCache, "block blocks.0 gets a key-value cache as argument 'kept' .*use_cache=False"),
        (lambda: torch.zeros(4), "block blocks.0 changed its argument 'kept', a tensor, in place"),
        (Notes, "block blocks.0 changed its argument 'kept', a Notes, in place"),
        (dict, "block blocks.0 changed its argument 'kept', a dict, in place"),
        (list, "block blocks.0 changed its argument 'kept', a list, in place"),
        (UserDict, "block blocks.0 changed its argument 'kept', a UserDict, in place"),
        (lambda: nn.Linear(4, 4), "block blocks.0 gets a module as argument 'kept'"),
    ],
)
def test_arguments_that_a_block_would_change_elsewhere_are_refused(make: Callable[[], Any], message: str) -> None:
    def run(model: Loop, hidden: Tensor) -> Tensor:
        kept = make()
        for block in model.blocks:
            hidden = block(hidden, kept=kept)
        return hidden

    model = Loop([ChangingBlock(), ChangingBlock()], run)
    with deferred(model, [1, 1]), pytest.raises(RuntimeError, match=message):
        model(X)


class Counter(nn.Module):
    """Returns how often it has been called."""

    num_calls = 0

    def forward(self, hidden: Tensor) -> tuple[Tensor, int]:
        self.num_calls += 1
        return hidden + 1, self.num_calls


def test_a_number_that_a_block_returns_from_its_state_is_refused() -> None:
    def run(model: Loop, hidden: Tensor) -> Tensor:
        for block in model.blocks:
            hidden, number = block(hidden)
            hidden = hidden if number == 1 else hidden.tanh()
        return hidden

    model = Loop([Counter(), Counter()], run)
    with deferred(model, [1, 1]):
        model(X)
        with pytest.raises(RuntimeError, match=r"blocks\.0 returned 2, but the model, .* told that it returns 1"):
            model(X)


class Kind(Enum):
    SINGLE, DOUBLE = torch.float32, torch.float64


@dataclasses.dataclass
class Options:
    dtype: torch.dtype


class Converts(nn.Module):
    """Returns the hidden state in the dtype that an argument names."""

    def forward(self, hidden: Tensor, kind: Any) -> Tensor:
        dtype = kind.value if isinstance(kind, Kind) else kind.dtype if isinstance(kind, Options) else kind
        return hidden.tanh().to(dtype)


@pytest.mark.parametrize("kind", [lambda dtype: dtype, Kind, Options])
def test_a_later_pass_may_give_another_dtype_as_an_argument(kind: Callable[[torch.dtype], Any]) -> None:
    def run(model: Loop, hidden: Tensor) -> Tensor:
        for block in model.blocks:
            hidden = block(hidden, kind(model.dtype))
            assert hidden.dtype == model.dtype
        return hidden

    model = Loop([Converts(), Converts()], run)
    with deferred(model, [1, 1]):
        for dtype in (torch.float32, torch.float64, torch.float32):
            model.dtype = dtype
            assert model(X).dtype == dtype


class ConvertsLater(nn.Module):
    """Returns the hidden state, and from the second call on in float64."""

    num_calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        return hidden.double() if self.num_calls > 1 else hidden + 1


def test_a_dtype_that_the_model_was_not_told_is_refused() -> None:
    model = Loop([ConvertsLater(), nn.Tanh()], one_after_the_other)
    with deferred(model, [1, 1]):
        model(X)
        with pytest.raises(RuntimeError, match=r"blocks\.0 returned a tensor of torch.float64, .* told torch.float32"):
            model(X)


class Attend(nn.Module):
    """Attends from one tensor to another one; returns a tensor like its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, context: Tensor, hidden: Tensor) -> Tensor:
        return hidden + torch.softmax(hidden @ self.linear(context).T, -1) @ context


def test_the_shape_of_an_output_is_known_where_two_arguments_were_alike_at_first() -> None:
    lengths = [2, 3]

    def run(model: Loop, hidden: Tensor) -> Tensor:
        hidden, context = hidden[1:], hidden[: lengths.pop(0)]
        for block in model.blocks:
            hidden = block(context, hidden)
            assert hidden.shape == (2, 4)
        return hidden

    model = Loop([Attend(), Attend()], run)
    with deferred(model, [1, 1]):
        model(X)
        model(X)


class ValueBlock(nn.Module):
    """Needs values, so its output is not known in advance."""

    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, hidden: Tensor) -> Any:
        return self.returns(hidden * hidden.sum().item())


@pytest.mark.parametrize("returns", [lambda h: (h, h), lambda h: h[:, :2], lambda h: h.double()])
def test_a_wrong_guess_of_an_output_is_refused(returns: Callable[[Tensor], Any]) -> None:
    def run(model: Loop, hidden: Tensor) -> Any:
        for block in model.blocks:
            hidden = block(hidden)
        return hidden

    equals_one_process(Loop([ValueBlock(lambda h: h + 1), ValueBlock(lambda h: h)], run), [1, 1], X)
    model = Loop([ValueBlock(returns), ValueBlock(lambda h: h)], run)
    with (
        deferred(model, [1, 1]),
        pytest.raises(RuntimeError, match=r"block blocks\.0 returned .* told that it returns"),
    ):
        model(X)


def test_finding_an_output_in_advance_leaves_the_block_as_it_was() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.dropout, self.last = nn.BatchNorm1d(4), nn.Dropout(0.5), None
            self.all: list[Tensor] = []
            self.nested: dict[str, list[Tensor]] = {"x": []}
            self.seen: set[Tensor] = set()

        def forward(self, hidden: Tensor) -> Tensor:
            self.last = hidden.detach()
            self.all.append(self.last)
            self.nested["x"] += [self.last]
            self.seen.add(self.last)
            return self.dropout(self.norm(hidden))

    def run(model: Loop, hidden: Tensor) -> Tensor:
        for block in model.blocks:
            hidden = block(hidden)
        return hidden

    models = [Loop([Remembers(), Remembers()], run) for _ in range(2)]
    torch.manual_seed(1)
    expected = models[0](X)
    torch.manual_seed(1)
    with deferred(models[1], [1, 1]):
        assert torch.equal(models[1](X), expected)
    for one, other in zip(models[0].blocks, models[1].blocks, strict=True):
        assert torch.equal(one.last, other.last)
        assert other.all == other.nested["x"] == [*other.seen] == [other.last]
        assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


class Heads(nn.Module):
    """Takes a tensor whose first dimension is the rows, twice the rows, or something else."""

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        return hidden + other.mean()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (lambda hidden: hidden, [True, None]),
        (lambda hidden: hidden + 1, [True, True, None]),
        (lambda hidden: torch.zeros(3, 4), [True, False, None]),  # as many as rows, but it stays
        (lambda hidden: torch.zeros(1, 4), [True, False, None]),
        (
            lambda hidden: hidden.repeat(2, 1),
            r"argument '1' \(shape \[6, 4\]\) of block blocks.0 has one row",
        ),
    ],
)
def test_which_arguments_have_rows(other: Callable[[Tensor], Tensor], expected: Any) -> None:
    found: list[Any] = []

    def run(value: Any, find_rows: Any, list_number: int) -> Any:
        found.append(find_rows())
        return blocks.call(cut(model.blocks, [2])[0], value, lambda place, given: None)

    def loop(model: Loop, hidden: Tensor) -> Tensor:
        given = other(hidden)
        for block in model.blocks:
            hidden = block(hidden, given)
        return hidden

    model = Loop([Heads(), Heads()], loop)
    blocks = DeferredBlocks(model.blocks, run, "blocks", model)
    blocks.start()
    try:
        if isinstance(expected, str):
            with pytest.raises(RuntimeError, match=expected):
                model(X)
            with torch.no_grad():
                model(X)
            assert found == [None]  # an evaluation is not split
            return
        assert model(X).shape == (3, 4)
        model(torch.cat([X, X]))
        assert [len(one) for one in found] == [len(expected)] * 2
        assert [one[: len(expected) - 1] for one in found] == [expected[:-1]] * 2
    finally:
        blocks.end()


# What a review found to be silently wrong under gpipe or in evaluation


@contextmanager
def split_in_two(model: Loop) -> Iterator[list[Any]]:
    """Run the blocks of ``model`` on two micro-batches where the rows are clear; yields what was found of each pass."""
    found: list[Any] = []

    def run(value: Any, find_rows: Any, list_number: int) -> Any:
        rows = find_rows()
        found.append(rows)
        table, plan = value
        parts = [value]
        if rows is not None:
            pairs = zip(table, rows, strict=True)
            marked = [NoChunk(entry) if isinstance(entry, Tensor) and not has else entry for entry, has in pairs]
            parts = split((marked, plan), 2)
        (stage,) = cut(model.blocks, [len(model.blocks)])
        return merge([blocks.call(stage, part, lambda place, given: None) for part in parts])

    blocks = DeferredBlocks(model.blocks, run, "blocks", model)
    blocks.start()
    try:
        yield found
    finally:
        blocks.end()


class Loads(nn.Module):
    """Returns a statistic of its experts beside the hidden state; may use the number of rows that it is given."""

    def forward(self, hidden: Tensor, rows: int | None = None) -> Any:
        if rows is not None:
            return hidden.reshape(rows, -1).tanh().reshape(hidden.shape)
        return hidden.tanh(), hidden.sum(0)


class AttendsByHeads(nn.Module):
    """Returns the attention of two heads beside the hidden state, in the order of the heads."""

    def forward(self, hidden: Tensor, rows: int | None = None) -> Any:
        return hidden.tanh(), torch.cat([hidden, hidden.exp()])


class EndsByHeads(AttendsByHeads):
    def forward(self, hidden: Tensor, rows: int | None = None) -> Tensor:
        return torch.cat(super().forward(hidden))


def sums_loads(model: Loop, hidden: Tensor) -> Tensor:
    loads = []
    for block in model.blocks:
        hidden, load = block(hidden)
        loads.append(load)
    return hidden.sum() + torch.stack(loads).square().sum()


def gives_rows(model: Loop, hidden: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden, len(hidden))
    return hidden


ROWS = torch.arange(24.0).reshape(6, 4) / 24


def ends_by_heads(model: Loop, hidden: Tensor) -> Tensor:
    return model.blocks[1](model.blocks[0](hidden)[0])


@pytest.mark.parametrize(
    ("first", "last", "run", "message"),
    [
        (Loads, Loads, sums_loads, "in stack, but it does not have one row per sample"),
        (AttendsByHeads, AttendsByHeads, sums_loads, "in stack, but it does not have one row per sample"),
        (AttendsByHeads, EndsByHeads, ends_by_heads, "output of block blocks.1 does not have one row per sample"),
        (Loads, Loads, gives_rows, "argument '1' of block blocks.0 depends on the number of rows"),
    ],
)
def test_what_has_no_rows_is_not_joined(
    first: type[nn.Module], last: type[nn.Module], run: Callable[..., Any], message: str
) -> None:
    model = Loop([first(), last()], run)
    expected = model(ROWS)
    with split_in_two(model) as found:
        with pytest.raises(RuntimeError, match=f"{message}.*schedule='1f1b'"):
            model(ROWS)
        with torch.no_grad():
            torch.testing.assert_close(model(ROWS), expected)
    assert found[-1] is None


def test_a_square_mask_may_be_of_rows_or_of_positions() -> None:
    class Masked(Loop):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            hidden = self.embed(x)
            for block in self.blocks:
                hidden = block(hidden, mask, bias=self.bias)
            return hidden

    model = Masked([Block(), Block()], looping)
    with split_in_two(model) as found:
        with pytest.raises(RuntimeError, match=r"tensor of shape \[4, 4\], which may have rows or positions"):
            model(ROWS[:4, :3].repeat(1, 2)[:, :4], torch.ones(4, 4))
        model(ROWS[:3], torch.ones(4))
    assert found[0][:3] == [True, False, False]


class Prompted(Loop):
    """Gives its blocks a tensor that all rows share."""

    def __init__(self) -> None:
        super().__init__([Heads(), Heads()], looping)
        self.prompt = nn.Parameter(torch.arange(24.0).reshape(6, 4))

    def forward(self, x: Tensor, prompt: Tensor) -> Any:
        hidden, prompt = self.embed(x), prompt * 2
        for block in self.blocks:
            hidden = block(hidden, prompt)
        return hidden


@pytest.mark.parametrize("given", [lambda prompt: NoChunk(prompt * 1), lambda prompt: prompt])
def test_a_shared_argument_with_as_many_entries_as_rows_is_not_split(given: Callable[[Tensor], Tensor]) -> None:
    model = Prompted()
    expected = model(ROWS, given(model.prompt))
    with split_in_two(model) as found:
        torch.testing.assert_close(model(ROWS, given(model.prompt)), expected)
    assert found[0][:2] == [True, False]


def test_a_batch_may_be_a_buffer_of_the_model() -> None:
    model = Loop([Block(), Block()], looping)
    model.register_buffer("points", ROWS)
    expected = model(model.points)
    with split_in_two(model):
        torch.testing.assert_close(model(model.points), expected)


@pytest.mark.parametrize("sizes", [(4, 6), (6, 4)])
def test_a_shared_argument_with_as_many_entries_as_rows_is_known_from_other_batches(sizes: tuple[int, int]) -> None:
    model = Prompted()
    first, second = (ROWS[:size] for size in sizes)
    expected = model(second, model.prompt * 1)
    with split_in_two(model) as found:
        model(first, model.prompt * 1)
        with pytest.raises(RuntimeError, match=r"argument '1' \(shape \[6, 4\]\) of block blocks.0 .* as NoChunk"):
            model(second, model.prompt * 1)
        with torch.no_grad():
            torch.testing.assert_close(model(second, model.prompt * 1), expected)
    assert found[-1] is None
    with split_in_two(model):
        for rows in (first, second):
            model(rows, NoChunk(model.prompt * 1))


def test_arguments_that_change_in_inference_mode_are_noticed() -> None:
    def changes(model: Loop, hidden: Tensor) -> Tensor:
        bias = model.bias + 0
        for block in model.blocks:
            hidden = block(hidden, bias=bias)
            bias.mul_(2)
        return hidden

    model = Loop([Block(), Block()], changes)
    with deferred(model, [1, 1]), torch.inference_mode(), pytest.raises(RuntimeError, match="changed argument 'bias'"):
        model(X)


def test_a_second_call_leaves_no_trace_in_attributes() -> None:
    class Counts(Loop):
        def forward(self, x: Tensor) -> Any:
            self.count += 1
            self.kept.append(1)
            return looping(self, self.embed(x))

    model = Counts([Block(), Block()], looping)
    model.count, model.kept = 0, []
    with split_in_two(model) as found:
        model(ROWS)
    assert (model.count, model.kept) == (1, [1]) and found[0][0]


def test_padding_in_one_half_of_a_batch() -> None:
    """Models of Hugging Face drop a mask without zeros."""

    class Padded(Loop):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            hidden, given = self.embed(x), None if bool(mask.all()) else mask
            for block in self.blocks:
                hidden = block(hidden, given, bias=self.bias)
            return hidden

    model = Padded([Block(), Block()], looping)
    mask = torch.tensor([[1.0]] * 5 + [[0.0]])
    expected = model(ROWS, mask)
    with split_in_two(model) as found:
        torch.testing.assert_close(model(ROWS, mask), expected)
    assert found[0][:2] == [True, True]


def test_lengths_that_a_block_changes() -> None:
    class Halves(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden[:, ::2] if hidden.shape[1] > 4 else hidden + 1

    def run(model: Loop, hidden: Tensor) -> Tensor:
        wide = model.wide
        hidden = torch.cat([hidden] * wide, 1)
        for block in model.blocks:
            hidden = block(hidden)
        return hidden

    model = Loop([Halves(), Halves()], run)
    model.wide = 1
    with deferred(model, [1, 1]):
        model(X)
        model.wide = 4
        with pytest.raises(RuntimeError, match=r"returned a tensor of shape \[\*, \[8\]\], but the model"):
            model(X)


@pytest.mark.parametrize("read", ["requires_grad", "grad_fn", "is_leaf"])
def test_what_autograd_would_know_cannot_be_read(read: str) -> None:
    def run(model: Loop, hidden: Tensor) -> Any:
        return getattr(model.blocks[0](hidden, bias=model.bias), read)

    model = Loop([Block(), Block()], run)
    with deferred(model, [1, 1]), pytest.raises(RuntimeError, match=f"output of block blocks.0 in {read}"):
        model(X)


def test_a_first_block_that_changes_its_input_in_place_is_refused() -> None:
    class InPlace(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.relu_()

    def run(model: Loop, hidden: Tensor) -> Tensor:
        first = hidden
        for block in model.blocks:
            hidden = block(hidden)
        return hidden + first

    model = Loop([InPlace(), InPlace()], run)
    with deferred(model, [1, 1]), pytest.raises(RuntimeError, match=r"block blocks\.0 changed its argument '0'"):
        model(X)


@dataclasses.dataclass
class Statistics:
    """What a block may return beside its hidden state: neither a tensor nor a plain value."""

    mean: float = 0.0


class ObjectBlock(nn.Module):
    def forward(self, hidden: Tensor) -> Any:
        return hidden + 1, Statistics()


def test_an_object_in_an_output_is_refused() -> None:
    def run(model: Loop, hidden: Tensor) -> Tensor:
        for block in model.blocks:
            hidden, _ = block(hidden)
        return hidden

    model = Loop([ObjectBlock(), ObjectBlock()], run)
    with deferred(model, [1, 1]), pytest.raises(RuntimeError, match=r"block blocks\.0 returns a Statistics, which is"):
        model(X)


# Blocks that are called outside of any module's forward


@contextmanager
def stepping(model: nn.Module, blocks: nn.ModuleList, step: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yields a function that runs a step of the training; what was found to have rows is noted in ``model.found``."""

    def run(value: Any, find_rows: Any, list_number: int) -> Any:
        model.found.append(find_rows())
        return deferring.call(cut(blocks, [len(blocks)])[0], value, lambda place, given: None)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with deferring.step(step, args, kwargs):
            return step(*args, **kwargs)

    model.found = []
    deferring = DeferredBlocks(blocks, run, "blocks", model)
    deferring.start()
    try:
        yield watched
    finally:
        deferring.end()


def encodes(model: Loop, batch: dict[str, Any], batch_idx: int = 0) -> Tensor:
    model.num_steps = getattr(model, "num_steps", 0) + 1
    x = batch.pop("x").mul_(1)  # a second call finds the batch as it was
    return looping(model, model.embed(x)) * batch["scale"]


def test_the_call_of_a_step_tells_the_rows() -> None:
    model = Loop([Block(), Block()], looping)
    with stepping(model, model.blocks, partial(encodes, model)) as step:
        step({"x": ROWS.clone(), "scale": 2.0}, batch_idx=0)
        step({"x": ROWS[:4].clone(), "scale": 2.0})
    assert [found[:2] for found in model.found] == [[True, False]] * 2
    assert model.num_steps == 2  # the probe leaves no trace


class Batch(dict[str, Any]):
    """A batch that is no plain dict, as those of Hugging Face."""


def test_rows_in_a_batch_that_is_an_object() -> None:
    model = Loop([Block(), Block()], looping)
    with stepping(model, model.blocks, lambda batch: looping(model, model.embed(batch["x"]))) as step:
        step(Batch(x=ROWS))
    assert model.found[0][0] is True


def test_a_module_that_contains_the_blocks_comes_before_the_step() -> None:
    model = Loop([Block(), Block()], looping)
    with stepping(model, model.blocks, lambda batch: model(batch[:2])) as step:
        step(ROWS)
    assert model.found[0][:2] == [True, False]


def test_a_call_of_a_part_of_the_model_tells_the_rows() -> None:
    model = nn.Sequential(Loop([Block(), Block()], looping))
    found: list[Any] = []

    def run(value: Any, find_rows: Any, list_number: int) -> Any:
        found.append(find_rows())
        return blocks.call(cut(model[0].blocks, [2])[0], value, lambda place, given: None)

    blocks = DeferredBlocks(model[0].blocks, run, "0.blocks", model)
    blocks.start()
    try:
        model[0](ROWS)
    finally:
        blocks.end()
    assert found[0][:2] == [True, False]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda model, batch: looping(model, model.embed(model.data)),
            "neither a module that contains the blocks nor training_step was called with tensors that have rows",
        ),
        (
            lambda model, batch: looping(model, looping(model, model.embed(batch["x"]))[None]),
            "has called the blocks before in the same call, with different kinds of arguments",
        ),
        (
            lambda model, batch: looping(model, model.embed(batch["x"].reshape(6, 4))),
            r"fails when it is called with half of the rows \(RuntimeError: shape",
        ),
    ],
)
def test_a_step_that_does_not_tell_the_rows(step: Any, message: str) -> None:
    model = Loop([Block(), Block()], looping)
    model.data = ROWS
    batch = {} if message.startswith("neither") else {"x": ROWS}
    with (
        stepping(model, model.blocks, partial(step, model)) as run,
        pytest.raises(RuntimeError, match=f"not clear how to split the batch into micro-batches: .*{message}"),
    ):
        run(batch)


class BlocksThatHooksSee(PreTrainedModel):
    """Runs blocks that are not deferred, deferred blocks, and again blocks that are not deferred."""

    config_class = PretrainedConfig

    def __init__(self, recorders: list[OutputRecorder]) -> None:
        type(self)._can_record_outputs = {"hidden_states": recorders}
        super().__init__(PretrainedConfig())
        torch.manual_seed(0)
        self.before, self.blocks, self.after = (nn.ModuleList(Block() for _ in range(n)) for n in (1, 3, 1))
        self.blocks[0] = Unseen()
        self.bias = nn.Parameter(torch.randn(4))

    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, hidden: Tensor, **kwargs: Any) -> BaseModelOutput:
        for block in (*self.before, *self.blocks, *self.after):
            hidden = block(hidden, bias=self.bias)
        return BaseModelOutput(last_hidden_state=hidden)


class Unseen(nn.Linear):
    """A block of a class without hooks."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        return super().forward(hidden) + bias


@pytest.mark.parametrize("selection", [True, [0, 1]])
@pytest.mark.parametrize("layer", ["before", "blocks", "after", "blocks.1", None])
@pytest.mark.parametrize("takes_input", [True, False])
@pytest.mark.parametrize("kinds", [[Block], [nn.Linear], [Block, nn.Linear], [Block, Unseen]])
def test_hidden_states_are_those_that_hooks_of_transformers_capture(
    kinds: list[type[nn.Module]], takes_input: bool, layer: str | None, selection: bool | list[int]
) -> None:
    """The hooks are in every block or some, or within blocks; other blocks may fill the same hidden states."""
    model = BlocksThatHooksSee(
        [
            OutputRecorder(kind, layer_name=layer, capture_initial_hidden_state=takes_input is (number == 0))
            for number, kind in enumerate(kinds)
        ]
    )

    def states_and_grads() -> Any:
        model.zero_grad()
        states = model(X, output_hidden_states=selection).hidden_states
        sum(n * state.square().sum() for n, state in enumerate(states, 1) if state is not None).backward()
        return states, [p.grad for p in model.parameters()]

    expected, expected_grads = states_and_grads()
    with deferred(model, [1, 2]):
        found, found_grads = states_and_grads()
    assert [state is None for state in found] == [state is None for state in expected]
    torch.testing.assert_close(
        [state for state in found if state is not None], [state for state in expected if state is not None]
    )
    assert [grad is None for grad in found_grads] == [grad is None for grad in expected_grads]
    torch.testing.assert_close(*([g for g in grads if g is not None] for grads in (found_grads, expected_grads)))
