"""What ``verify`` refuses before any process starts, models with fewer blocks, and what a certificate says."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from verified_nets import VerifiedData, VerifiedNet, Writing

from strategies import Recovery, RPCSequentialStrategy, ZeROStrategy
from trainer import Trainer, verify
from trainer.verification.blocks import (
    check_blocks,
    is_built_later,
    kept_blocks,
    lists_of,
    shorten,
    shorten_when_built,
)
from trainer.verification.certificate import EQUAL, WRONG, Certificate, FirstDifference
from trainer.verification.certificate_report import as_dict, lines_of, print_certificate, write_certificate
from trainer.verification.compare import rounding_of
from trainer.verification.runner import VerifiedStrategy, kept_arguments


class NoStep(LightningModule):
    pass


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
    "strategy": ({"strategy": "auto", "devices": 1}, "compares RPCSequentialStrategy, DDPStrategy and ZeROStrategy"),
    "model": ({"model": NoStep()}, "verify trains the model, but NoStep has no training_step"),
    "no batches": ({"datamodule": None}, "VerifiedNet has no train_dataloader"),
    "hosts": ({"num_nodes": 2, "strategy": "ddp"}, "one host, got num_nodes=2"),
    "sync_batchnorm": ({"sync_batchnorm": True, "strategy": "ddp"}, "cannot compare sync_batchnorm=True"),
    "blocks": ({"blocks": 9}, "no two of its 7 layers in a row are alike"),
    "json": ({"json": "nowhere/found.json"}, "there is no folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_a_process_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    changed, message = REFUSED[name]
    arguments = {
        "model": VerifiedNet(),
        "datamodule": VerifiedData(),
        "strategy": "rpc_sequential",
        "devices": 2,
        "accelerator": "cpu",
        **changed,
    }
    with pytest.raises(MisconfigurationException, match=message):
        verify(**arguments)


def test_no_model() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="rpc_sequential", logger=False)
    no_model: Any = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="must be a LightningModule, got Linear"):
        trainer.verify(no_model)


def test_a_strategy_can_be_made_again_with_one_stage() -> None:
    given = RPCSequentialStrategy(
        [2, 2], microbatches=3, schedule="zbv", deferred_batch_norm=True, recovery=Recovery(1)
    )
    verified = VerifiedStrategy(given, 2)
    assert verified.run(None).strategy == (
        RPCSequentialStrategy,
        {"balance": [2, 2], "microbatches": 3, "schedule": "zbv", "deferred_batch_norm": True, "recovery": Recovery(1)},
    )
    kind, arguments = verified.with_one_stage(None, {"microbatches": 3}).strategy or (None, {})
    assert arguments == {"balance": "even", "microbatches": 3, "schedule": "1f1b", "deferred_batch_norm": True}
    assert kind is RPCSequentialStrategy and kind(**arguments)


def test_batches_are_divided_among_ranks_and_replicas() -> None:
    assert VerifiedStrategy(ZeROStrategy(stage=2), 4).ranks == 4
    assert VerifiedStrategy(RPCSequentialStrategy(data_parallel_size=2), 4).ranks == 2


def test_pipelines_that_divide_layers_train_on_the_same_batches() -> None:
    verified = VerifiedStrategy(RPCSequentialStrategy(data_parallel_size=2, tensor_parallel_size=3), 12)
    assert (verified.ranks, verified.num_parts, verified.num_stages) == (2, 3, 2)
    assert verified.run(None).num_parts == 3
    reference = verified.with_one_stage(None, {})
    assert (reference.devices, reference.num_parts) == (2, 1)


def test_arguments_of_the_runs() -> None:
    average = EMAWeightAveraging()
    given = {
        "precision": "64-true",
        "max_epochs": 90,
        "logger": True,
        "callbacks": [EarlyStopping("loss"), Writing(), average],
        "gradient_clip_val": 1.0,
    }
    kept, notes = kept_arguments(given)
    assert kept == {"precision": "64-true", "gradient_clip_val": 1.0, "callbacks": [average]}
    assert notes == ["Callbacks that were left out: Writing."]


# Fewer blocks


class Blocks(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
        self.body.num_layers, self.depth = 5, 7


def test_a_shorter_list_of_blocks() -> None:
    model = Blocks()
    shorten(model, [["body.layers"]], 2)
    assert [len(model.body.layers), model.body.num_layers, model.depth] == [2, 2, 7]
    assert list(dict(model.body.layers.named_children())) == ["0", "1"]
    mixed = Blocks()
    mixed.body.layers = nn.Sequential(nn.Embedding(3, 2), *mixed.body.layers, nn.Linear(2, 3))
    shorten(mixed, [["body.layers"]], 2)
    assert [type(layer).__name__ for layer in mixed.body.layers] == ["Embedding", "Linear", "Linear", "Linear"]
    assert [layer.out_features for layer in list(mixed.body.layers)[1:]] == [2, 2, 3]
    with pytest.raises(
        MisconfigurationException, match=r"'body.layers' has 5 blocks that are alike in a row; give 1 to 5"
    ):
        check_blocks(Blocks(), [["body.layers"]], 6)
    with pytest.raises(
        MisconfigurationException, match=r"leaves 1 layer in 'body.layers' for 3 stages; give at least 3"
    ):
        check_blocks(Blocks(), [["body.layers"]], 1, 3)
    with pytest.raises(MisconfigurationException, match="'body' of Blocks is Module"):
        check_blocks(model, [["body"]], 1)
    with pytest.raises(MisconfigurationException, match="'heads' of Blocks is not there"):
        check_blocks(model, [["heads"]], 1)


def test_layers_that_repeat_in_groups_are_shortened() -> None:
    model = Blocks()
    groups = [layer for _ in range(6) for layer in (nn.Linear(2, 2), nn.ReLU())]
    model.body.layers = nn.Sequential(nn.Linear(3, 2), *groups, nn.Linear(2, 4))
    shorten(model, [["body.layers"]], 2)
    kinds = ["Linear", *["Linear", "ReLU"] * 2, "Linear"]
    assert [type(layer).__name__ for layer in model.body.layers] == kinds
    assert model.body.layers(torch.ones(1, 3)).shape == (1, 4)
    model.body.layers = nn.Sequential(nn.Linear(3, 2), *groups)
    with pytest.raises(MisconfigurationException, match="6 groups of 2 layers that are alike in a row; give 1 to 6"):
        check_blocks(model, [["body.layers"]], 7)


class TwoLists(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Blocks().body, Blocks().body
        del self.decoder.layers[3:]
        self.config = SimpleNamespace(num_layers=5, num_decoder_layers=3)


def test_each_of_several_lists_is_shortened() -> None:
    model, lists = TwoLists(), [["encoder.layers"], ["decoder.layers"]]
    assert lists_of(model, ["encoder.layers", "decoder.layers"]) == (("encoder.layers",), ("decoder.layers",))
    said = "Of the blocks of 'encoder.layers' and 'decoder.layers', only the first 2 of each were run."
    assert kept_blocks(model, lists, 2) == said
    assert kept_blocks(model, lists, 4) == (
        "Of the blocks of 'encoder.layers', only the first 4 were run. All layers of 'decoder.layers' were run."
    )
    shorten(model, lists, 2)
    assert [len(model.encoder.layers), len(model.decoder.layers)] == [2, 2]
    assert vars(model.config) == {"num_layers": 2, "num_decoder_layers": 2}
    with pytest.raises(MisconfigurationException, match=r"at most 5 blocks that are alike in a row; give 1 to 5"):
        check_blocks(TwoLists(), lists, 6)
    with pytest.raises(
        MisconfigurationException, match=r"leaves 1 layer in 'encoder.layers' for 3 stages; give at least 3"
    ):
        check_blocks(TwoLists(), lists, 1, 3)


class Later(LightningModule):
    """Its blocks are large enough to be built without memory, and made in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.Module | None = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.Sequential(nn.Linear(3, 90), *(nn.Linear(90, 90) for _ in range(5)), nn.Linear(90, 2))


def test_blocks_of_configure_model_have_the_values_of_the_whole_model() -> None:
    torch.manual_seed(0)
    whole, short = Later(), Later()
    whole.configure_model()
    assert is_built_later(short, None) and not is_built_later(whole, None)
    shorten_when_built(short, None, 2, is_pipeline=False)
    torch.manual_seed(0)
    for _ in range(2):  # Lightning calls the hook for fit and for predict
        short.configure_model()
    wanted = whole.layers.state_dict()
    kept = ["0", "1", "2", "6"]
    assert [type(layer).__name__ for layer in short.layers] == ["Linear"] * 4
    for layer, name in zip(short.layers, kept, strict=True):
        assert torch.equal(layer.weight, wanted[f"{name}.weight"])


# What it says

_SOUND = Certificate(EQUAL, "RPCSequentialStrategy", "one process", rounding_of("64-true", "float64"))


def test_a_certificate_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    origin = FirstDifference(
        0, "gradients", "net.2", "stage 0", 0.5, 0.25, "the gradient of weight is 0.5 times", "the hooks"
    )
    found = Certificate(
        WRONG,
        "RPCSequentialStrategy",
        "one process",
        rounding_of("64-true", "float64"),
        largest={"losses": (3, 0.0, 0.0), "gradients": (2, 0.25, 2.5e8), "checkpoint": (1, float("inf"), float("inf"))},
        origin=origin,
        notes=["Only a part."],
        explained=1e-15,
    )
    assert lines_of(found)[-1] == (
        "In step 1, gradients of 'net.2' on stage 0: the gradient of weight is 0.5 times. The largest difference is "
        "0.5 (2.5e-01 of the largest value). Look at the hooks."
    )
    write_certificate(found, tmp_path / "found.json")
    read = json.loads((tmp_path / "found.json").read_text())
    assert (read["verdict"], read["origin"]["stage"]) == ("wrong", "stage 0")
    assert read["compared"]["checkpoint"] == {"values": 1, "largest": "missing", "in_limits": "missing"}
    print_certificate(found)
    said = capsys.readouterr().out
    assert "Verdict: wrong" in said and "missing" in said and "2.5e-01" in said
    assert not found.is_right and _SOUND.is_right
    assert as_dict(_SOUND)["origin"] is None


def test_the_strategy_keeps_the_arguments_that_it_was_given() -> None:
    strategy: Any = ZeROStrategy(stage=2)  # the constructor's wrapper adds the attribute
    assert strategy.given_arguments == {"stage": 2}
