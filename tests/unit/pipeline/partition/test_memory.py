"""What stages need, the smallest sufficient number of stages, and refusals of what no host has."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim

from strategies.launch.limits import room_on_host
from strategies.pipeline.partition.memory import DevicePlacement, Need, Sizes, check_memory, nbytes_of, smallest_number
from strategies.pipeline.partition.sequential import cut

MEBI = 2**20
CPU = torch.device("cpu")


class Model(nn.Module):
    """Square layers with an embedding and a head around them; shapes only, unless ``device`` says otherwise.

    Args:
        mebi: The size of each layer.
        layers: How many.
    """

    def __init__(self, mebi: int, layers: int, device: str = "meta") -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(mebi * 256, 1024, bias=False, device=device) for _ in range(layers)])
        self.embed = nn.Embedding(256, 1024, device=device)
        self.register_buffer("table", torch.empty(MEBI // 4, device=device))

    def placed(self, balance: list[int]) -> DevicePlacement:
        return DevicePlacement.of(self, cut(self.blocks, balance), [CPU] * len(balance), [*range(len(balance))])


def test_a_stage_needs_parameters_gradients_and_states() -> None:
    model = Model(8, 4)
    sizes = Sizes([optim.AdamW(model.parameters())])
    assert sizes.need(model.blocks[:3].modules()) == Need(24 * MEBI, 24 * MEBI, 48 * MEBI)
    assert sizes.need([model, model.embed]) == Need(2 * MEBI, MEBI, 2 * MEBI)  # the buffer is not trained
    twice = Sizes([optim.AdamW(model.parameters())], gradient_sets=2)
    assert twice.need(model.blocks[:3].modules()) == Need(24 * MEBI, 48 * MEBI, 48 * MEBI)
    assert Sizes([]).need(model.modules()) == Need(34 * MEBI, 0, 0)
    assert Sizes([optim.AdamW(model.parameters())], num_shares=2).need(model.embed.modules()).states == MEBI


def test_what_need_not_be_there_at_once_does_not_count() -> None:
    model = Model(8, 4)
    model.blocks[0].requires_grad_(False)
    both = [optim.SGD(model.blocks[:2].parameters(), 0.1), optim.Adam(model.blocks[2:].parameters())]
    assert Sizes(both).need(model.blocks.modules()) == Need(32 * MEBI, 16 * MEBI, 32 * MEBI)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    assert Sizes([]).need([first, second]).parameters == 64  # shared within one process


def test_a_tensor_made_of_others_has_their_size() -> None:
    class Packed(torch.Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scales"], None

    packed = torch.empty(100, 100).as_subclass(Packed)
    vars(packed).update(codes=torch.empty(5000, dtype=torch.uint8), scales=torch.empty(100))
    assert nbytes_of(packed) == 5400


def test_sparse_and_quantized_tensors_have_the_size_of_their_parts() -> None:
    eye = torch.eye(4)
    assert nbytes_of(eye.to_sparse()) == 2 * 4 * 8 + 4 * 4  # two indices and a value each
    assert nbytes_of(eye.to_sparse_csr()) == 5 * 8 + 4 * 8 + 4 * 4
    assert nbytes_of(eye.to_sparse_bsc((2, 2))) == 3 * 8 + 2 * 8 + 8 * 4
    assert nbytes_of(torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8)) == 16


@pytest.mark.parametrize(
    ("costs", "limit", "last", "balance"),
    [
        ([1] * 12, 12, 0, [12]),
        ([1] * 12, 4, 0, [4, 4, 4]),
        ([1] * 12, 4, 3, [4, 4, 3, 1]),
        ([1] * 12, 4, 4, None),
        ([5, 1, 1], 4, 0, None),
        ([3, 1, 1, 3], 4, 0, [2, 2]),
    ],
)
def test_the_smallest_number_of_stages(costs: list[int], limit: int, last: int, balance: list[int] | None) -> None:
    assert smallest_number(costs, limit, last=last) == balance


def test_what_no_host_has_is_refused_and_what_fits_is_not() -> None:
    room = room_on_host().size_bytes // MEBI
    huge = Model(room // 5, 8)  # 1.6 times what there is, which other programs change
    with pytest.raises(ValueError, match=r"The 2 stages on this host need at least [\d,]+ MiB of parameters") as raised:
        check_memory(huge.placed([4, 4]))
    assert "use several hosts, with torchrun or SLURM" in str(raised.value)
    assert re.search(r"With [\d,]+ MiB for a stage per host, 2 stages suffice \(balance=\[4, 4\]\)", str(raised.value))
    elsewhere = huge.placed([4, 2, 2])
    check_memory(DevicePlacement(elsewhere.stages, elsewhere.outside, elsewhere.devices, on_host=[2]))
    half = Model(room // 16, 8)
    check_memory(half.placed([4, 4]))
    with pytest.raises(ValueError, match=r"of gradients, [\d,]+ MiB of optimizer states"):
        check_memory(half.placed([4, 4]), [optim.AdamW(half.parameters())])
    trained = Model(room // 20, 8)
    sgd = [optim.SGD(trained.parameters(), lr=0.1)]
    check_memory(trained.placed([4, 4]), sgd)
    with pytest.raises(ValueError, match=r"Gradients count twice, .* schedule='gpipe' needs them once"):
        check_memory(trained.placed([4, 4]), sgd, gradient_sets=2)


def test_snapshots_that_no_host_has_are_refused() -> None:
    model = Model(room_on_host().size_bytes // MEBI // 16, 8)
    adamw = [optim.AdamW(model.parameters())]
    third = Model(room_on_host().size_bytes // MEBI // 48, 8)  # 4 times that are needed, and 8 times for copies
    check_memory(third.placed([4, 4]), [optim.AdamW(third.parameters())])
    message = r"at least [\d,]+ MiB \(.*\) together, and [\d,]+ MiB are needed for 2 snapshots of the 2 stages on"
    with pytest.raises(ValueError, match=rf"{message} this host, but only .*\. Leave recovery out"):
        check_memory(third.placed([4, 4]), [optim.AdamW(third.parameters())], num_snapshots=2)
    with pytest.raises(ValueError, match=r"of optimizer states\) together, but only"):
        check_memory(model.placed([4, 4]), adamw, num_snapshots=2)
    check_memory(third.placed([4, 4]), num_snapshots=2)


def test_what_this_process_already_holds_counts_as_room() -> None:
    model = Model(64, 4, device="cpu")
    check_memory(model.placed([2, 2]), [optim.SGD(model.parameters(), lr=0.1)])


class Gpus:
    """GPUs by what ``torch.cuda`` says of them: the memory of each, which is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mebi: int) -> None:
        self.mebi = mebi
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.mebi * MEBI, self.mebi * MEBI))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        properties = SimpleNamespace(total_memory=mebi * MEBI)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def on_gpus(model: Model, balance: list[int], replicas: int = 1) -> DevicePlacement:
    stages = len(balance)
    devices = [torch.device("cuda", (i + 1) % stages) for i in range(stages)]
    return DevicePlacement.of(model, cut(model.blocks, balance), devices, [*range(stages)] * replicas)


def test_a_stage_that_no_gpu_has_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 100)
    model = Model(24, 8)
    check_memory(on_gpus(model, [4, 4]))
    with pytest.raises(ValueError, match=r"Stage 0 .* on cuda:1 needs at least 120 MiB of parameters, but 100 MiB are"):
        check_memory(on_gpus(model, [5, 3]))


def test_replicas_on_a_host_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 100)
    check_memory(on_gpus(Model(24, 8), [4, 4], replicas=2))


def test_communicators_count_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle one of three stages has two neighbours, and four communicators of 12 MiB."""
    Gpus(monkeypatch, 140)
    model, links = Model(24, 12), [4, 4, 4]
    placement = on_gpus(model, [4, 4, 4])
    check_memory(placement)
    check_memory(placement, communicators=[2, 3, 2])
    with pytest.raises(ValueError) as raised:
        check_memory(placement, communicators=links)
    assert (
        "on cuda:1 needs at least 96 MiB of parameters, and 48 MiB for the buffers of 4 NCCL communicators "
        "(data_plane='nccl', at least 12 MiB each), but 140 MiB are free. With 92 MiB for a stage per GPU, 4 "
        "stages are needed at least (balance=[3, 3, 3, 3])"
    ) in str(raised.value)
