"""A file whose values are read one after another has the bytes that ``torch.save`` writes from all of them."""

import io
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strategies.checkpoint import streaming
from strategies.checkpoint.streaming import LateTensors


class Elsewhere:
    """Tensors on the ``meta`` device, and their values."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.kept: list[Tensor] = []
        self.most_alive = 0

    def put(self, value: Tensor) -> Tensor:
        bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self.values[id(bare)] = value
        self.kept.append(bare)
        return bare

    def has(self, tensor: Tensor) -> bool:
        return id(tensor) in self.values

    def read(self, tensors: list[Tensor]) -> Iterator[Tensor]:
        storages: list[Any] = []
        for tensor in tensors:
            value = self.values[id(tensor)].clone()
            storages.append(weakref.ref(value))
            yield value
            del value
            self.most_alive = max(self.most_alive, sum(storage() is not None for storage in storages))


def checkpoint() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "float": torch.randn(3, 4, generator=generator),
        "channels last": torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        "transposed": torch.randn(4, 5, generator=generator).t(),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "bfloat16": torch.randn(5, generator=generator).bfloat16(),
        "float8": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        "uint16": torch.arange(7).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64, generator=generator),
        "bool": torch.ones(3, dtype=torch.bool),
    }
    state = OrderedDict(tensors)
    state["tied"] = state["float"]
    vars(state)["_metadata"] = OrderedDict({"": {"version": 1}})  # as state_dict() sets it
    return {"state_dict": state, "epoch": 3, "states": [{"exp_avg": torch.ones(3)}]}


def test_the_bytes_of_torch_save() -> None:
    whole, late, elsewhere = checkpoint(), checkpoint(), Elsewhere()
    for name in list(late["state_dict"])[:-1:2]:
        late["state_dict"][name] = elsewhere.put(late["state_dict"][name])
    late["state_dict"]["tied"] = late["state_dict"]["float"]
    expected, written = io.BytesIO(), io.BytesIO()
    torch.save(whole, expected)
    streaming.save(late, written, LateTensors(elsewhere.has, elsewhere.read))
    assert written.getvalue() == expected.getvalue()
    assert zipfile.ZipFile(written).testzip() is None


def test_readable_by_memory_map_and_one_value_at_a_time(tmp_path: Path) -> None:
    elsewhere = Elsewhere()
    values = [torch.full((1000,), float(k)) for k in range(5)]
    with open(tmp_path / "a.ckpt", "wb") as file:
        late = LateTensors(elsewhere.has, elsewhere.read)
        streaming.save([elsewhere.put(value) for value in values], file, late)
    read = torch.load(tmp_path / "a.ckpt", weights_only=True, mmap=True)
    assert all(torch.equal(a, b) for a, b in zip(read, values, strict=True))
    assert elsewhere.most_alive <= 1


def test_values_in_another_layout_are_copied_and_others_are_refused() -> None:
    elsewhere = Elsewhere()
    bare, file = elsewhere.put(torch.arange(6.0).view(2, 3)), io.BytesIO()
    elsewhere.values[id(bare)] = torch.arange(6.0).view(3, 2).t().contiguous().t().t()
    late = LateTensors(elsewhere.has, elsewhere.read)
    streaming.save(bare, file, late)
    assert torch.equal(torch.load(io.BytesIO(file.getvalue())), elsewhere.values[id(bare)])
    for other in (torch.zeros(5), torch.zeros(2, 3, dtype=torch.float64)):
        elsewhere.values[id(bare)] = other
        with pytest.raises(RuntimeError, match=r"a tensor changed from \[2, 3\] torch.float32 to"):
            streaming.save(bare, io.BytesIO(), late)
