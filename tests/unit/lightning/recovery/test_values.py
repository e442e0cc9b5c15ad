"""Values of Python objects that are remembered and restored."""

import itertools
import queue
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.regression import SpearmanCorrCoef

from strategies.lightning.recovery.values import RememberedValues


class Slotted:
    __slots__ = ("__hidden", "later", "number")

    def __init__(self) -> None:
        self.number, self.__hidden = 1, [1]

    def change(self) -> None:
        self.number, self.later = 2, 3
        self.__hidden.append(2)

    def values(self) -> Any:
        return self.number, list(self.__hidden), hasattr(self, "later")


@dataclass
class Progress:
    ready: int = 0
    inner: "Progress | None" = None


class Names(list[str]):
    """A list with an attribute."""

    owner = ""


def memory(*elsewhere: Any, foreign: tuple[type, ...] = ()) -> RememberedValues:
    return RememberedValues(elsewhere, foreign)


def holder(**attributes: Any) -> tuple[str, SimpleNamespace]:
    return "self", SimpleNamespace(**attributes)


def test_values_come_back_in_the_same_objects() -> None:
    numbers, table, members = [1, [2]], {"a": {"b": 1}}, {1, 2}
    small, large = torch.arange(3.0), torch.arange(5000.0)
    history, array, counts = deque([1], maxlen=3), np.zeros(2), Counter("aab")
    name, own = holder(
        number=1,
        text="a",
        numbers=numbers,
        table=table,
        members=members,
        pair=(numbers, small),
        large=large,
        history=history,
        array=array,
        counts=counts,
        lists=defaultdict(list, a=[1]),
        progress=Progress(inner=Progress()),
        slotted=Slotted(),
    )
    taken = memory().take([(name, own)])
    own.number, own.text, own.new = 2, "b", 3
    numbers[1].append(3)
    numbers.append(4)
    table["a"]["b"], table["c"] = 2, 5
    members.add(3)
    small.add_(1)
    large.zero_()
    history.extend([2, 3, 4])
    array += 1
    counts["a"] = 7
    own.lists["b"].append(1)
    own.progress.inner.ready = 4
    own.slotted.change()
    own.table = {}
    del own.history
    taken.restore()
    assert (own.number, own.text, hasattr(own, "new")) == (1, "a", False)
    assert own.numbers is numbers and numbers == [1, [2]]
    assert own.table is table and table == {"a": {"b": 1}}
    assert members == {1, 2} and own.pair[1] is small
    assert small.tolist() == [0, 1, 2] and torch.equal(large, torch.arange(5000.0))
    assert own.history is history and list(history) == [1] and history.maxlen == 3
    assert array.tolist() == [0, 0] and counts == Counter("aab")
    assert own.lists == {"a": [1]} and own.progress.inner.ready == 0
    assert own.slotted.values() == (1, [1], False)
    assert taken.changed() == []


def test_each_moment_has_its_own_values() -> None:
    """A large tensor is copied once for several moments, unless it has changed."""
    name, own = holder(total=torch.zeros(5000), losses=[])
    known = memory()
    moments = []
    for step in range(4):
        moments.append(known.take([(name, own)]))
        own.losses.append(float(step))
        if step == 1:
            own.total += 1
    for step, (moment, expected) in reversed(list(enumerate(zip(moments, (0.0, 0.0, 1.0, 1.0), strict=True)))):
        moment.restore()
        assert own.total.unique().tolist() == [expected] and own.losses == [float(n) for n in range(step)]
    for moment in (moments[3], moments[0], moments[2]):
        moment.restore()
    assert own.total.unique().tolist() == [1] and own.losses == [0.0, 1.0]


def test_order_cycles_and_subclasses() -> None:
    ordered, names = OrderedDict(a=1, b=2), Names(["x"])
    cycle: list[Any] = [ordered, names]
    cycle.append(cycle)
    taken = memory().take([holder(cycle=cycle)])
    ordered.move_to_end("a")
    names.owner = "somebody"
    names.append("y")
    cycle.clear()
    taken.restore()
    assert list(ordered) == ["a", "b"] and names == ["x"] and names.owner == ""
    assert cycle[0] is ordered and cycle[2] is cycle


def test_metrics_go_back() -> None:
    """Sums, lists of tensors, and what a metric keeps of its last call."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.error = MeanSquaredError()
            self.several = MetricCollection([MeanSquaredError(), SpearmanCorrCoef()])

    model, known = Model(), memory()
    batches = [(torch.randn(8), torch.randn(8)) for _ in range(3)]

    def update(batch: tuple[Tensor, Tensor]) -> None:
        model.error(*batch)
        model.several.update(*batch)

    def values() -> Any:
        return model.error.compute(), model.several.compute(), model.error._update_count

    update(batches[0])
    taken = known.take([(name or "self", module) for name, module in model.named_modules()])
    for batch in batches[1:]:
        update(batch)
    expected = values()
    for batch in batches:
        update(batch)
    taken.restore()
    for batch in batches[1:]:
        update(batch)
    assert values() == expected


def test_generators_go_on_from_where_they_were() -> None:
    generators = {
        "torch": (torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g).item()),
        "python": (random.Random(1), lambda g: g.random()),
        "numpy": (np.random.default_rng(1), lambda g: g.random()),
        "old": (np.random.RandomState(1), lambda g: g.random()),
    }
    own = SimpleNamespace(**{name: generator for name, (generator, _) in generators.items()})
    taken = memory().take([("self", own)])
    first = {name: draw(generator) for name, (generator, draw) in generators.items()}
    taken.restore()
    assert {name: draw(generator) for name, (generator, draw) in generators.items()} == first


def test_tensors_of_every_kind() -> None:
    with torch.inference_mode():
        inference = torch.zeros(5000)
    graph = torch.ones(2, requires_grad=True) * 2
    name, own = holder(inference=inference, graph=graph, grown=torch.zeros(2))
    taken = memory().take([(name, own)])
    with torch.inference_mode():
        inference.add_(1)
    with torch.no_grad():
        graph.add_(1)
    own.grown.resize_(4)
    taken.restore()
    assert not inference.any() and own.graph is graph and graph.tolist() == [2, 2] and graph.grad_fn is not None
    assert own.grown.tolist() == [0, 0]


def test_what_somebody_else_restores_stays() -> None:
    class Trainer:
        calls = 0

    weight, layer, trainer = nn.Parameter(torch.zeros(2)), nn.Linear(1, 1), Trainer()
    name, own = holder(params=[weight], layers=[layer], trainer=trainer, meta=torch.empty(3, device="meta"))
    taken = memory(weight, layer, foreign=(Trainer,)).take([(name, own)])
    with torch.no_grad():
        weight += 1
    layer.name, trainer.calls = "kept", 1
    taken.restore()
    assert weight.tolist() == [1, 1] and layer.name == "kept" and trainer.calls == 1


def test_attributes_of_a_module_without_its_tensors_children_and_hooks() -> None:
    module = nn.BatchNorm1d(2)
    taken = memory(*module.buffers()).take([("self.norm", module)])
    module.momentum, module.note = 0.5, "new"
    module.eval()
    module.register_forward_hook(print)
    module.child = nn.Linear(1, 1)
    taken.restore()
    assert module.momentum == 0.1 and not hasattr(module, "note") and module.training
    assert len(module._forward_hooks) == 1 and isinstance(module.child, nn.Linear)


def test_changes_that_cannot_be_undone_are_named(tmp_path: Path) -> None:
    big = torch.zeros(17 << 20)
    with open(tmp_path / "log", "w") as file:
        teacher = nn.Linear(100, 100)
        name, own = holder(
            file=file, numbers=itertools.count(), big=big, teacher=[teacher], steps=(n for n in range(3)), same=[1]
        )
        known = memory()
        taken = known.take([(name, own)])
        assert taken.changed() == ["self.numbers", "self.steps"]  # nobody can tell
        file.write("a")
        file.flush()
        big.add_(1)
        with torch.no_grad():
            teacher.weight.add_(1)
        own.same.append(2)
        assert set(taken.changed()) == {"self.file", "self.numbers", "self.big", "self.teacher", "self.steps"}
        assert known.taken_as_unchanged == {}


def test_watching_a_batch() -> None:
    batch = {"x": torch.zeros(5000), "y": torch.zeros(2)}
    known = memory()
    watched, copied = known.take([("the batch", (batch, 0))], copies_tensors=False), known.take([("", (batch, 0))])
    assert watched.changed() == []
    batch.pop("y").add_(1)
    batch["x"].add_(1)
    assert watched.changed() == ["the batch"] and copied.changed() == []
    copied.restore()
    assert not batch["x"].any() and not batch["y"].any()


def test_what_is_too_much_is_taken_as_unchanged() -> None:
    data, history, array = [[n] for n in range(6000)], [0.5] * 100_000, np.zeros(1 << 20)
    known = memory()
    name, own = holder(data=data, history=history, array=array, other=[1])
    for _ in range(2):
        taken = known.take([(name, own)])
        assert taken.changed() == []
    own.history.append(1.0)
    own.other.append(2)
    assert taken.changed() == []
    data.append([6000])
    assert taken.changed() == ["self.data"]
    taken.restore()
    assert len(own.history) == 100_000 and own.other == [1]
    assert known.taken_as_unchanged == {
        "self.data": "holds very many objects",
        "self.array": "is or holds a NumPy array of more than 4 MiB",
    }


def test_objects_of_unknown_classes_are_named() -> None:
    known = memory()
    known.take([holder(view=memoryview(b"abc"), path=Path("a"), kind=int, function=len, dtype=torch.float)])
    assert known.taken_as_unchanged == {"self.view": "is or holds a builtins.memoryview"}


class Prefetcher:
    """Has a thread that fills a queue."""

    def __init__(self) -> None:
        self.taken, self.ready = 0, queue.Queue[int]()
        self.thread = threading.Thread(target=self._fill, daemon=True)
        self.thread.start()

    def _fill(self) -> None:
        for number in range(3):
            self.ready.put(number)

    def take(self) -> int:
        self.taken += 1
        return self.ready.get(timeout=10)


def test_what_threads_use_stays_and_is_named() -> None:
    """To put back the attributes of a queue or an event would take away what a thread has put in, or let it wait."""
    known, numbers = memory(), queue.Queue[int]()
    name, own = holder(
        event=threading.Event(),
        numbers=[numbers],
        lock=threading.Lock(),
        condition=threading.Condition(),
        several=threading.Semaphore(2),
        prefetcher=Prefetcher(),
        count=[1],
    )
    assert own.prefetcher.take() == 0
    taken = known.take([(name, own)])
    own.event.set()
    numbers.put(1)
    own.several.acquire()
    own.count.append(2)
    assert own.prefetcher.take() == 1
    taken.restore()
    assert own.event.is_set() and own.count == [1] and own.several._value == 1
    assert numbers.unfinished_tasks == 1 and numbers.get(timeout=1) == 1
    assert own.prefetcher.taken == 2 and own.prefetcher.take() == 2
    assert known.taken_as_unchanged == {
        "self.event": "is or holds a threading.Event",
        "self.numbers": "is or holds a queue.Queue",
        "self.condition": "is or holds a threading.Condition",
        "self.several": "is or holds a threading.Semaphore",
        "self.prefetcher": "is or holds a queue.Queue",
    }
    assert taken.changed() == []


def test_the_iterator_of_a_loader_with_workers_counts_as_changed() -> None:
    loader = torch.utils.data.DataLoader(list(range(4)), num_workers=1)
    known, (name, own) = memory(), holder(stream=iter(loader))
    assert known.take([(name, own)]).changed() == ["self.stream"]


@pytest.mark.parametrize("value", [1, "a", list[int], int | str, None, torch.float, (1, 2), nn.Linear, len])
def test_what_cannot_change_costs_nothing(value: Any) -> None:
    assert memory().take([holder(value=value)]).num_kept == 1
