"""ZeROStrategy against DDP with the plain optimizer, on two and three processes."""

import itertools
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_job
import zero_nets as nets
from harness import run
from parity import alike
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from scripts import Script
from torch import nn
from torch.utils.data import DataLoader

from strategies import StrategyPlugin, ZeROStrategy
from strategies.checkpoint import save_and_load
from trainer import Trainer

# With two ranks there is one order to add their gradients in. With three, float64 shows that nothing else differs;
# float32 and below round, and 16-bit passes carry that on.
ROUNDED = {"types": 1e-2, "types, clipped": 1e-2, "bf16-mixed": 1e-3, "16-mixed": 1e-3, "16-mixed, clipped": 1e-3}
SEVERAL_SUMS = {"manual": 1e-14, "thawed": 1e-12, "running statistics": 1e-13}
"""Cases in which DDP adds in another order: what is averaged already, all rows at once, a metric over ranks."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 0}, r"stage must be 1, 2 or 3, got 0\."),
        ({"stage": 3, "overlap_with_ddp": True}, "overlap_with_ddp=True has no effect under stage=3"),
        ({"stage": 3, "bucket_cap_mb": 8.0}, "bucket_cap_mb=8.0 has no effect under stage=3"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be more than 0, got 0"),
    ],
)
def test_constructor_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        ZeROStrategy(**arguments)


def test_clipping_needs_a_training() -> None:
    with pytest.raises(RuntimeError, match="optimizers are divided only within fit"):
        ZeROStrategy().clip_grad_norm_(1.0)


def test_fulfils_the_contract_itself() -> None:
    for member in StrategyPlugin.__abstractmethods__ - {"root_device"}:
        if member in vars(StrategyPlugin):
            assert vars(ZeROStrategy)[member].__doc__


class AddsGroup(Callback):
    """Trains more parameters from the beginning of each fit on; notes how many have states when training begins."""

    num_states = 0

    def on_fit_start(self, trainer: Any, model: Any) -> None:
        trainer.optimizers[0].add_param_group({"params": [*model.backbone.parameters()]})

    def on_train_start(self, trainer: Any, model: Any) -> None:
        self.num_states = len(trainer.optimizers[0].state)


class Backbone(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters())


def trainer_of_one_process(
    strategy: Any, epochs: int = 1, callbacks: Sequence[Callback] = (), **options: Any
) -> Trainer:
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def group_that_is_added_before_states_are_loaded() -> list[int]:
    numbers = []
    for epochs, ckpt_path in ((1, None), (2, "a.ckpt")):
        adds = AddsGroup()
        trainer = trainer_of_one_process(ZeROStrategy(stage=2), epochs, [adds])
        trainer.fit(Backbone(), DataLoader(torch.ones(4, 3), 2), ckpt_path=ckpt_path)
        trainer.save_checkpoint("a.ckpt")
        numbers.append(adds.num_states)
    return numbers


LEFT_BY_LIGHTNING = ("env", "port", "process_group")


def test_states_of_a_group_that_a_callback_adds_anew() -> None:
    assert run(group_that_is_added_before_states_are_loaded, allow=LEFT_BY_LIGHTNING) == [0, 4]


class Fails(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad gradient")


class NotesGradients(Backbone):
    """Optimizes manually, and notes gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[list[torch.Tensor]] = []

    def note(self) -> None:
        self.seen.append([p.grad.clone() for p in self.parameters() if p.grad is not None])


class CatchesErrors(NotesGradients):
    """The second of three backward passes fails between the layers. Notes the gradients after each pass."""

    def __init__(self, clears: bool) -> None:
        super().__init__()
        self.clears = clears

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(100 * self.head(self.backbone(batch)).sum())
        self.note()
        with pytest.raises(ValueError, match="bad gradient"):
            self.manual_backward(self.head(Fails.apply(self.backbone(batch))).sum())
        self.note()
        if self.clears:
            optimizer.zero_grad()
        self.manual_backward(self.head(self.backbone(batch)).sum())
        self.note()
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def gradients_of_options(make: Callable[[], NotesGradients]) -> list[list[list[torch.Tensor]]]:
    """What a model notes in one process without ZeRO, and under stages 1 and 2."""
    seen = []
    for strategy in (SingleDeviceStrategy("cpu"), ZeROStrategy(stage=1), ZeROStrategy(stage=2)):
        torch.manual_seed(0)
        model = make()
        trainer_of_one_process(strategy).fit(model, DataLoader(torch.ones(4, 3), 2))
        seen.append(model.seen)
    return seen


def check_gradients_of_options(plain: list[list[torch.Tensor]], *options: list[list[torch.Tensor]]) -> None:
    for seen in options:
        for before, after in zip(plain, seen, strict=True):
            assert len(before) == 4 and all(map(torch.equal, before, after))


def passes_that_fail() -> list[list[list[list[torch.Tensor]]]]:
    return [gradients_of_options(partial(CatchesErrors, clears)) for clears in (True, False)]


def test_gradients_after_a_backward_pass_that_failed_are_those_of_one_process() -> None:
    for seen in run(passes_that_fail, allow=LEFT_BY_LIGHTNING):
        check_gradients_of_options(*seen)


class TwoPlayers(NotesGradients):
    """The two turns of a GAN. In the second one, gradients accumulate while the averages of the first one are kept."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        with first.toggle_model():
            self.manual_backward(self.head(self.backbone(batch)).sum())
            first.step()
        second.zero_grad()
        for last in (False, True):
            with second.toggle_model(sync_grad=last):
                self.manual_backward(self.head(self.backbone(batch)).square().sum())
        self.note()
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in (self.head, self.backbone)]


def two_players() -> list[list[list[torch.Tensor]]]:
    return gradients_of_options(TwoPlayers)


def test_gradients_accumulate_beside_averages_of_frozen_parameters() -> None:
    check_gradients_of_options(*run(two_players, allow=LEFT_BY_LIGHTNING))


class Scale(nn.Module):
    """A layer without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Any) -> Any:
        return self.scale * x


class FailsLater(Backbone):
    """Fails in the second batch, as long as ``fails`` is set. Some layers are within a block."""

    fails = True

    def __init__(self) -> None:
        super().__init__()
        self.backbone: Any = nn.Sequential(nn.Linear(3, 3), Scale())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and batch_idx == 1:
            raise ValueError("bad batch")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def runs_without_values() -> list[str]:
    """What a model says that a failed run has left without values, and one that was built on ``meta``."""
    model, data, said = FailsLater(), DataLoader(torch.ones(4, 3), 2), []
    before = trainer_of_one_process(ZeROStrategy(stage=3), epochs=0)
    before.fit(model, data)
    before.save_checkpoint("a.ckpt")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="bad batch"):
        trainer_of_one_process(ZeROStrategy(stage=3)).fit(model, data)
    around, bare = FailsLater(), FailsLater().to("meta")
    around.backbone = model.backbone
    for call, lacking in ((Trainer.fit, model), (Trainer.test, model), (Trainer.fit, around), (Trainer.fit, bare)):
        lacking.fails = False
        with pytest.raises(ValueError, match="or load a checkpoint that has it") as error:
            call(trainer_of_one_process(ZeROStrategy(stage=3)), lacking, data)
        said.append(str(error.value).partition(". ")[0])
    for lacking in (model, FailsLater().to("meta")):
        lacking.fails = False
        trainer_of_one_process(ZeROStrategy(stage=3)).test(lacking, data, ckpt_path="a.ckpt", verbose=False)
        assert all(torch.equal(zero_job.whole(value), saved[name]) for name, value in lacking.state_dict().items())
    return said


def test_a_model_that_a_failed_run_has_left_without_values_needs_a_checkpoint() -> None:
    lost = "has no values: an earlier run with stage=3 divided it and then failed"
    assert run(runs_without_values, allow=LEFT_BY_LIGHTNING) == [
        *[f"weight of backbone.0 {lost}"] * 3,
        "scale of backbone.1 is on the meta device, but Scale has no method reset_parameters to initialise it",
    ]


def failing_with_synchronised_norms() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    around, data = FailsLater(), DataLoader(torch.ones(4, 3), 2)
    around.backbone, around.fails = model, False
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        trainer_of_one_process(ZeROStrategy(stage=3), sync_batchnorm=True).fit(around, data)
    assert type(around.backbone[1]).__name__ == "_BatchNormXd"  # Lightning's, in place of the synchronised one
    with pytest.raises(ValueError, match="has no values: an earlier run with stage=3 divided it"):
        trainer_of_one_process(ZeROStrategy(stage=3)).fit(around, data)


def test_synchronised_norms_in_a_run_that_fails() -> None:
    run(failing_with_synchronised_norms, allow=LEFT_BY_LIGHTNING)


def start_job(*arguments: str, **kwargs: Any) -> Script:
    return Script(zero_job.__file__, *arguments, num_copies=int(arguments[0]) - 1, **kwargs)


def launch(ranks: int, what: str, timeout_seconds: float) -> Any:
    """Runs in the harness's child, since Lightning's launcher starts the running script once more for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.pt"
        assert start_job(str(ranks), what, str(results)).wait(timeout_seconds) == 0
        return torch.load(results)


def check_case(name: str, outcomes: dict[str, Any], ranks: int) -> None:
    """Compares values, optimizer states and metrics of each option with those of DDP."""
    in_order = (0 if ranks == 2 else ROUNDED.get(name, 1e-9)) or SEVERAL_SUMS.get(name, 0)
    reference = outcomes.pop("ddp")
    accumulates = "accumulated" in name or name == "running statistics"
    if name != "no optimizer":
        assert accumulates == (reference["steps"] < nets.STEPS_PER_EPOCH * nets.EPOCHS)
    for option, outcome in outcomes.items():
        where = f"{name}, {option}, {ranks} ranks"
        tolerance = in_order if option != "stage 3" else max(in_order, ROUNDED.get(name, 1e-9))  # of several sums, too
        assert all(torch.equal(outcome["values"][0], values) for values in outcome["values"]), where
        alike(outcome["state_dict"], reference["state_dict"], tolerance, where)
        assert outcome["metrics"] == pytest.approx(reference["metrics"], rel=tolerance), where
        assert outcome["steps"] == reference["steps"]
        if name == "no optimizer":
            assert outcome["optimizers"] == reference["optimizers"] == [{}]
            continue
        for ours, plain in zip(outcome["optimizers"], reference["optimizers"], strict=True):
            assert ours["param_groups"] == plain["param_groups"], where
            assert list(ours["state"]) == list(plain["state"]), where  # in the same order, too
            alike(ours["state"], plain["state"], tolerance, where)  # with the same types
        # Each rank has a part, and nothing twice: what the plain optimizer has on one rank, they have together.
        assert torch.equal(outcome["state_bytes"].sum(0), reference["state_bytes"][0]), where
        assert outcome["state_bytes"].max() < reference["state_bytes"].max(), where
        assert not any(outcome["hooks_left"])
        assert outcome["own_memory"], where


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def some(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    return request.param, run(launch, request.param, "some", 140.0, timeout_seconds=150)


@pytest.mark.parametrize("name", zero_job.SOME)
def test_ranks_train_as_ddp_does(some: tuple[int, dict[str, Any]], name: str) -> None:
    ranks, outcomes = some
    check_case(name, outcomes[name], ranks)


@pytest.fixture(
    scope="module",
    params=[pytest.param("most", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.nightly)],
    ids="{} options".format,
)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run(launch, 2, request.param, 580.0, timeout_seconds=600)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", zero_job.ALL)
def test_every_case_trains_as_ddp_does(options: dict[str, Any], name: str) -> None:
    check_case(name, options[name], 2)


@pytest.fixture(scope="module")
def others() -> dict[str, Any]:
    return run(launch, 2, "others", 230.0, timeout_seconds=240)


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_what_is_communicated_when(others: dict[str, Any]) -> None:
    seen = others["watched"]
    # Gradients of 8 parameters: each rank's own until the third batch, or the last; then averages, of which under
    # stage 2 each rank has its own half.
    for option, number in {"stage 1": 8, "stage 2": 4, "stage 2, overlap, views": 4}.items():
        waits, steps = (8, False), (number, number == 8)
        assert seen[option] == [waits, waits, steps] * 3 + [steps], option
    for bare, failed, known in zip(seen["bare"], seen["failed"], seen["known"], strict=True):
        assert torch.equal(bare, known) and torch.equal(failed, known)


def check_refusals(said: dict[str, str], expected: dict[str, str]) -> None:
    assert said.keys() == expected.keys()
    for name, message in expected.items():
        assert said[name].startswith(message), name


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_what_cannot_be_trained_is_refused(others: dict[str, Any]) -> None:
    expected = {
        "LBFGS": "MisconfigurationException: LBFGS.step needs an argument (closure)",
        "no gradient": "RuntimeError: the backward pass gave no gradient to second.bias, second.weight",
        "reentrant": "RuntimeError: parameter second.bias got a gradient twice in one backward pass",
        "sparse": "MisconfigurationException: Layer table makes sparse gradients",
        "evaluates twice": "MisconfigurationException: EvaluatesTwice evaluates the loss several times within a step",
        "evaluates twice later": "RuntimeError: EvaluatesTwiceLater evaluates the loss several times within a step",
        "draws": "RuntimeError: DrawsLater draws random numbers in its step (from torch's generator on the CPU)",
        "mixes sums": "RuntimeError: a backward pass without communication would add to the gradient of second.",
        "which": "MisconfigurationException: There are 2 optimizers; say whose gradients to clip",
    }
    check_refusals(others["refused"], expected)


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_models_built_in_configure_model(others: dict[str, Any]) -> None:
    seen = others["built late"]
    for name, reference in {"cpu, None": "ddp", "meta, start": "ddp, start"}.items():
        check_case("built late", {"ddp": seen[reference], "stage 3": seen[name]}, 2)
    assert seen["validated anew"] == seen["meta, start, validated"]
    made = seen["meta, None"]["values"]
    assert made.isfinite().all() and torch.equal(made[0], made[1])


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_what_cannot_be_divided_by_rows_is_refused(others: dict[str, Any]) -> None:
    expected = {
        "manual": "MisconfigurationException: stage=3 needs automatic optimization",
        "copies": "MisconfigurationException: stage=3 does not support EMAWeightAveraging",
        "scalar": "MisconfigurationException: stage=3 cannot divide parameter temperature of Changed by rows: it is a",
        "types": "MisconfigurationException: stage=3 sends the gradients of a block together, but blocks.1 of Changed",
        "compiled": "MisconfigurationException: blocks.1 is compiled",
        "not by element": "MisconfigurationException: Adafactor cannot be used under stage=3",
        "kept": "MisconfigurationException: SGD has 39 parameters that are not divided",
        "no gradient": "RuntimeError: the backward pass gave no gradient to unused",
        "other blocks": "RuntimeError: the ranks have not run the same blocks of the model",
    }
    check_refusals(others["refused by rows"], expected)


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_optimizer_states_of_fit_in_a_checkpoint_of_a_later_validation(others: dict[str, Any]) -> None:
    for after_fit, *later in others["saved after fit"]:
        assert after_fit[0]["state"]
        for states in later:
            alike(states, after_fit, tolerance=0.0)


@pytest.mark.slow
def test_no_rank_survives_a_killed_rank_0() -> None:
    # The harness fails where a process is left.
    assert "rank 1: rank 0 is gone, so this process ends as well" in run(doomed, timeout_seconds=90)


def doomed() -> str:
    job = start_job("2", "doomed", "unused", stderr=subprocess.PIPE)
    _, said = job.communicate(timeout=80)  # rank 1 holds the other end of the pipe
    assert job.returncode == -signal.SIGKILL
    return str(said)


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_checkpoint_in_parts_that_one_rank_cannot_write(others: dict[str, Any]) -> None:
    said = others["unsaved"]
    both = said["file too large"]
    assert all("could not be saved" in words and "rank 1: " in words for words in both), both
    more = "only other ranks have ['optimizer_states.0.state.more']"
    assert all(more in words for words in said["more on one rank"]), said
    assert said["left"] and said["files"] == 2  # meta.pt and its shards


def chain() -> list[dict[str, Any]]:
    """An epoch under each of several strategies, each resumed from the one before; and the same in one process."""
    with tempfile.TemporaryDirectory() as folder:
        stations = [
            *[(2, "stage 2, overlap, views"), (2, "stage 3, in parts, async"), (3, "in parts, async"), (3, "stage 3")],
            *[(2, "in parts"), (2, "ddp"), (2, "stage 3")],
        ]
        number, forms = len(stations), [False, True, True, False, True, False, False]
        files = [Path(folder) / f"{k}.ckpt" for k in range(number + 2)]
        k = 0
        for ranks, those in itertools.groupby(stations, lambda station: station[0]):  # which need no new processes
            names = [name for _, name in those]
            assert start_job(str(ranks), "/".join(names), str(files[0]), str(k)).wait(timeout=200) == 0, names
            k += len(names)
        torch.set_num_threads(1)
        for start in (files[number], None):
            zero_job.resumed(1, SingleDeviceStrategy("cpu"), number + 1, start, files[-1] if start else files[0])
        assert [save_and_load.is_sharded(file) for file in files[1 : number + 1]] == forms
        return [torch.load(file, weights_only=True) for file in (files[-1], files[0])]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_resuming_on_other_numbers_of_ranks_and_under_other_strategies() -> None:
    chained, uninterrupted = run(chain, timeout_seconds=400)
    alike(chained["state_dict"], uninterrupted["state_dict"], 1e-9, "state_dict")
    (ours,), (plain,) = (checkpoint["optimizer_states"] for checkpoint in (chained, uninterrupted))
    assert ours["param_groups"] == plain["param_groups"]
    alike(ours["state"], plain["state"], 1e-9, "optimizer state")
    assert chained["lr_schedulers"] == uninterrupted["lr_schedulers"]
    assert chained["global_step"] == uninterrupted["global_step"]
