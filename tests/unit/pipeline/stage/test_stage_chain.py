"""Three stages in one process, one behind the other, against the same layers called plainly, in float64."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from skip_nets import u_net
from stage_parts import CPU, WIDTH, Block, Cache, Last, assert_same_gradients
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies.pipeline import NoChunk
from strategies.pipeline.partition.sequential import cut
from strategies.pipeline.schedule.tables import Action
from strategies.pipeline.stage.edges import Edges, Mailbox, Ports
from strategies.pipeline.stage.layers import RECOMPUTE_MODES as MODES
from strategies.pipeline.stage.layers import Layers, PassContext
from strategies.pipeline.stage.microbatch.split import merge, pack_objects, split, unpack_objects
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.stage import Chunk, Stage

pytestmark = pytest.mark.usefixtures("float64")


def assert_alike(layers: nn.Sequential, balance: list[int], make_input: Callable[[Tensor], Any], shape: Any) -> None:
    """In every mode, twice in a row: outputs, gradients of parameters and of the input."""
    for mode in MODES:
        plain, chained = copy.deepcopy(layers), copy.deepcopy(layers)
        chain = Chain(chained, balance, mode)
        for number in range(2):
            x = torch.rand(shape, requires_grad=True)
            same = x.detach().clone().requires_grad_()
            expected = plain(make_input(same * 1))
            expected.square().sum().backward()
            output, grads = chain.run(make_input(x), number)
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(torch.cat(grads), same.grad, rtol=1e-10, atol=1e-10)
            assert_same_gradients(chained, plain)


class Chain:
    """Stages that hand their values to each other through mailboxes, as messages would."""

    def __init__(self, module: nn.Sequential, balance: list[int], mode: str) -> None:
        forward, backward = ([Mailbox(copies=True) for _ in range(len(balance) + 1)] for _ in range(2))
        self.feed, self.outputs, self.fed_back, self.output_grads = forward[0], forward[-1], backward[0], backward[-1]
        self.mode = mode
        self.stages = []
        cuts = zip(cut(module, balance), pairwise(forward), pairwise(backward), strict=True)
        for i, (layers, ports, grads) in enumerate(cuts):
            chunk = Layers(layers, layers.spans[0].start, CPU)
            self.stages.append(
                Stage({i: Chunk(chunk, Ports(ports[0], ports[1], grads[1], grads[0]))}, Edges(0, [0], None))
            )

    def run(self, input: Any, number: int) -> tuple[Any, list[Tensor]]:
        """The output, and the gradient of the sum of its squares for the tensor in the input that wants one."""
        parts = split(pack_objects(input), 3)
        this = Pass(number, len(parts), True, self.mode, 1, PassContext.capture("cpu"))
        outputs = []
        with torch.no_grad():
            for m, part in enumerate(parts):
                flags = [t.requires_grad for t in tree_leaves(pack_objects(input)) if isinstance(t, Tensor)]
                self.feed.send((part, {}), number, m, requires_grad=flags)
                for i, stage in enumerate(self.stages):
                    stage.run([Action("F", m, i)], this)
                output, left = self.outputs.receive(number, m)
                assert not left
                outputs.append(output)
                self.output_grads.send([2 * output.detach()], number, m)
            for m in range(len(parts)):
                for i, stage in reversed(list(enumerate(self.stages))):
                    stage.run([Action("B", m, i)], this)
        assert [stage.num_kept for stage in self.stages] == [0] * len(self.stages)
        return unpack_objects(merge(outputs)), [self.fed_back.receive(number, m)[0] for m in range(len(parts))]


def test_skip_connections() -> None:
    layers = u_net()
    layers[3] = nn.GroupNorm(2, 12)  # BatchNorm sees micro-batches
    for balance in ([2, 2, 4], [1, 1, 6], [2, 4, 2]):
        assert_alike(layers, balance, lambda x: x, (5, 2, 8))


def test_objects_that_layers_change() -> None:
    """Each micro-batch has a cache of its own, which it fills once however often it is run; gradients go through it."""
    layers = nn.Sequential(*(Block(number) for number in range(4)), Last())
    for balance in ([1, 2, 2], [2, 1, 2]):
        assert_alike(layers, balance, lambda x: (x, Cache()), (5, 3, WIDTH))


class Appends(nn.Linear):
    """Changes the dict and the list that it gets, and what it finds in them."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        given["seen"].append(super().forward(given.pop("x")))
        given["steps"] = given.get("steps", 0) + 1
        return {**given, "x": sum(given["seen"]).tanh()}


class Unwraps(nn.Module):
    def forward(self, given: dict[str, Any]) -> Tensor:
        assert given["steps"] == len(given["seen"]) == 3
        return given["x"]


def test_containers_that_layers_change() -> None:
    layers = nn.Sequential(Appends(), Appends(), Appends(), Unwraps())
    assert_alike(layers, [1, 1, 2], lambda x: {"x": x, "seen": []}, (5, WIDTH))


def test_blocks_of_hugging_face() -> None:
    """With a cache, which training has no use for, and tensors of shape ``[1, …]`` that all rows share."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=4, attn_implementation="eager"
    )
    rotary = LlamaRotaryEmbedding(config)

    class LlamaBlock(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.block = LlamaDecoderLayer(config, number)

        def forward(self, given: dict[str, Any]) -> dict[str, Any]:
            length = given["x"].shape[1]
            mask = torch.full((1, 1, length, length), -1e9).triu(1)
            x = self.block(
                given["x"],
                attention_mask=mask,
                past_key_values=given["cache"],
                position_embeddings=given["positions"],
                use_cache=True,
            )
            return {**given, "x": x}

    class Head(nn.Linear):
        def forward(self, given: dict[str, Any]) -> Tensor:
            assert given["cache"].get_seq_length() == given["x"].shape[1]
            return super().forward(given["x"])

    def make_input(x: Tensor) -> dict[str, Any]:
        cos, sin = rotary(x, torch.arange(x.shape[1])[None])
        return {"x": x, "positions": (NoChunk(cos), NoChunk(sin)), "cache": transformers.DynamicCache()}

    layers = nn.Sequential(*(LlamaBlock(number) for number in range(4)), Head(8, 2)).double()
    assert_alike(layers, [1, 2, 2], make_input, (5, 12, 8))
