"""Averaging over replicas, by two threads that stand for the same stage of two pipelines."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from strategies.launch import session
from strategies.launch.session import join_group
from strategies.pipeline.optim.replicas import Averaging

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
LARGE = 600_000
"""Elements; more than travel together with others."""


def averaged(folder: Path, stages: list[tuple[list[nn.Parameter], list[Tensor]]]) -> None:
    """Averages as often as there are replicas, one of which each of ``stages`` belongs to."""

    def one(number: int) -> None:
        parameters, buffers = stages[number]
        group = join_group(f"{folder.as_uri()}/stage", number, len(stages), 30)
        Averaging(group, lambda: parameters, lambda: buffers).average()

    with ThreadPoolExecutor(len(stages)) as threads:
        list(threads.map(one, range(len(stages))))


def with_grads(grads: list[Any]) -> list[nn.Parameter]:
    parameters = []
    for grad in grads:
        like = torch.zeros(3, 2) if grad is None else torch.zeros(grad.shape, dtype=grad.dtype)
        parameters.append(nn.Parameter(like))
        parameters[-1].grad = grad
    return parameters


def test_every_kind_of_gradient(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def grads() -> list[Tensor]:
        made = [torch.randn(4, 3, generator=generator).to(dtype) for dtype in DTYPES]
        made += [torch.randn(LARGE, generator=generator), torch.randn(LARGE // 2, 2, generator=generator).t()]
        return [*made, torch.randn((), generator=generator), torch.empty(0, 2)]

    ours, theirs = grads(), grads()
    expected = [(a / 2 + b / 2).clone() for a, b in zip(ours, theirs, strict=True)]
    replicas = with_grads(ours), with_grads(theirs)
    averaged(tmp_path, [(parameters, []) for parameters in replicas])
    for parameters in replicas:
        for parameter, mean in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.grad, mean)


class CountingGroup:
    """A process group that counts its all-reduces."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.num_messages = group, 0
        self.rank, self.size = group.rank, group.size

    def allreduce(self, *arguments: Any) -> Work:
        self.num_messages += 1
        return self._group.allreduce(*arguments)


def test_small_gradients_share_a_message(tmp_path: Path) -> None:
    """One message agrees on which gradients there are, then one for each dtype of small ones and each large one."""
    group = CountingGroup(join_group(f"{tmp_path.as_uri()}/one", 0, 1, 30))
    num_messages: list[int] = []

    def count(wait: Callable[[], Any]) -> None:
        num_messages.append(group.num_messages)
        wait()

    small = [torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.float64) for _ in range(5)]
    parameters = with_grads([*small, torch.ones(LARGE), torch.ones(LARGE)])
    Averaging(cast(ProcessGroup, group), lambda: parameters, list, wait=count).average()
    assert num_messages == [1, 1 + 4]


def test_a_sum_that_float16_cannot_hold(tmp_path: Path) -> None:
    replicas = [with_grads([torch.full((2,), 60_000.0, dtype=torch.float16)]) for _ in range(2)]
    averaged(tmp_path, [(parameters, []) for parameters in replicas])
    assert all(parameter.grad.tolist() == [60_000, 60_000] for parameters in replicas for parameter in parameters)


def rows(*where: int) -> Tensor:
    """The sparse gradient of an embedding of which these rows were used, some more than once."""
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor(where)).sum().backward()
    assert embedding.weight.grad is not None
    return embedding.weight.grad


def test_gradients_that_not_all_replicas_have(tmp_path: Path) -> None:
    """None anywhere, in one replica only, sparse in both or in one, sparse and dense."""
    ours = with_grads([None, torch.ones(3, 2), None, rows(0, 0), None, rows(1)])
    theirs = with_grads([None, None, torch.ones(3, 2), rows(0, 2), rows(2), torch.ones(3, 2)])
    averaged(tmp_path, [(ours, []), (theirs, [])])
    for parameters in (ours, theirs):
        assert parameters[0].grad is None
        assert [parameter.grad.is_sparse for parameter in parameters[1:]] == [False, False, True, True, False]
        found = [parameter.grad.to_dense().tolist() for parameter in parameters[1:]]
        half, none = [0.5, 0.5], [0.0, 0.0]
        assert found[:2] == [[half] * 3] * 2
        assert found[2:] == [[[1.5, 1.5], none, half], [none, none, half], [half, [1.0, 1.0], half]]


def test_buffers_become_those_of_the_first_replica(tmp_path: Path) -> None:
    kinds = (torch.bool, torch.float64, torch.float8_e4m3fn, torch.int64, torch.complex64, torch.float32)

    def buffers(value: int) -> list[Tensor]:
        made = [torch.full((3,), value).to(dtype) for dtype in kinds]
        return [*made, torch.full((4, 2), float(value)).t(), torch.tensor(value), torch.empty(0)]

    ours, theirs = buffers(1), buffers(0)
    averaged(tmp_path, [([], ours), ([], theirs)])
    for buffer, kept in zip(theirs, ours, strict=True):
        assert torch.equal(buffer.to(torch.complex64), kept.to(torch.complex64))
    assert [buffer.flatten()[:1].tolist() for buffer in ours] == [b.flatten()[:1].tolist() for b in buffers(1)]


def test_a_replica_may_be_late_for_longer_than_connecting_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's messages between two know another time-out than its collectives: that with which they have connected."""
    monkeypatch.setattr(session, "_CONNECT_SECONDS", 3.0)  # of which gloo takes a fifth

    def one(number: int) -> dict[int, Any]:
        averaging = Averaging(join_group(f"{tmp_path.as_uri()}/late", number, 2, 30), list, list)
        time.sleep(1.0 * number)
        return averaging.gathered({number: {"step": torch.ones(2)}})

    with ThreadPoolExecutor(2) as threads:
        whole, nothing = threads.map(one, range(2))
    assert list(whole) == [0, 1] and whole[1]["step"].tolist() == [1, 1] and not nothing


def in_replicas(folder: Path, count: int, one: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What each of several replicas comes to."""

    def joined(number: int) -> Any:
        return one(join_group(f"{folder.as_uri()}/stage", number, count, 30))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(joined, range(count)))


@pytest.mark.parametrize("count", [2, 3])
def test_only_its_owner_has_a_gradient(tmp_path: Path, count: int) -> None:
    """Large and small gradients, transposed, empty, sparse, in one replica only; one parameter has no owner."""

    def grads(replica: int) -> list[Any]:
        generator = torch.Generator().manual_seed(replica)
        made: list[Any] = [torch.randn(4, 3, generator=generator).to(dtype) for dtype in DTYPES]
        made += [torch.randn(LARGE, generator=generator), torch.randn(LARGE // 2, 2, generator=generator).t()]
        made += [torch.randn((), generator=generator), torch.empty(0, 2), rows(replica), rows(0, replica)]
        return [*made, torch.ones(3, 2) if replica else None, None, torch.randn(5, generator=generator)]

    every = [grads(replica) for replica in range(count)]
    expected = []
    for own in zip(*every, strict=True):
        dense = [grad.to_dense() / count for grad in own if grad is not None]
        expected.append(torch.stack(dense).sum(0) if dense else None)

    def one(group: ProcessGroup) -> list[Any]:
        parameters = with_grads(every[group.rank()])
        owners: dict[Tensor, int] = {p: k % count for k, p in enumerate(parameters[:-1])}
        averaging = Averaging(group, lambda: parameters, list, owners=owners)
        averaging.average()
        assert averaging.means == [p for p, k in owners.items() if k == group.rank() and p.grad is not None]
        return [None if parameter.grad is None else parameter.grad.to_dense() for parameter in parameters]

    found = in_replicas(tmp_path, count, one)
    for k, mean in enumerate(expected):
        last = k == len(expected) - 1
        for replica in range(count):
            if mean is not None and (last or k % count == replica):
                rounding = 2 * torch.finfo(mean.dtype).eps  # of two sums of three numbers of at most 1
                torch.testing.assert_close(found[replica][k], mean, rtol=rounding, atol=rounding)
            else:
                assert found[replica][k] is None


@pytest.mark.parametrize("follows", [True, False])
def test_gradients_of_two_passes_add_up(tmp_path: Path, follows: bool) -> None:
    """Averaged after each pass; in the second pass, the owner of the first parameter does not use it."""

    def one(group: ProcessGroup) -> list[Any]:
        replica = group.rank()
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
        owners: dict[Tensor, int] = {p: k % 2 for k, p in enumerate(parameters)}
        averaging = Averaging(group, lambda: parameters, list, owners=owners, follows_autograd=follows)
        for number in (1, 10):
            if not follows:
                averaging.before_backward()
            first = 0 if number == 1 or replica else 1
            loss = sum((k + 1) * number * (replica + 1) * parameters[k].sum() for k in range(first, 4))
            assert isinstance(loss, Tensor)
            loss.backward()
            averaging.average()
        return [None if p.grad is None else p.grad.tolist() for p in parameters]

    first, second = in_replicas(tmp_path, 2, one)
    mean = (1 + 2) / 2
    assert first == [[mean + 20 / 2] * 2, None, [3 * mean * 11] * 2, None]
    assert second == [None, [2 * mean * 11] * 2, None, [4 * mean * 11] * 2]


def test_cleared_averages_are_forgotten(tmp_path: Path) -> None:
    def one(group: ProcessGroup) -> list[float]:
        parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
        owners: dict[Tensor, int] = {parameter: k for k, parameter in enumerate(parameters)}
        averaging = Averaging(group, lambda: parameters, list, owners=owners, follows_autograd=True)
        for _ in range(3):
            for k, parameter in enumerate(parameters):
                (parameter * (4.0 + group.rank())).sum().backward()
                if k:
                    averaging.average()
            found = [p.grad.item() for p in parameters if p.grad is not None]
            parameters[0].grad = None
            torch.optim.SGD(parameters).zero_grad(set_to_none=False)
        return found

    assert in_replicas(tmp_path, 2, one) == [[4.5], [4.5]]
