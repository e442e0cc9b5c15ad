"""Adapters of ``peft`` on a frozen model of Hugging Face train as in one process; checkpoints may hold them alone."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import adapters_job
import pytest
import torch
from adapter_parts import Adapted, base_model, loader
from harness import run
from parity import Outcome, compare, fit, on_cpus, one_device
from peft import PeftModel
from pytorch_lightning import Callback
from safetensors.torch import load_file
from scripts import Script

from strategies import RPCSequentialStrategy
from strategies.pipeline.control.parts import PartKind
from strategies.pipeline.control.shelf import captured

SETTINGS: dict[str, Any] = {"schedule": "1f1b", "microbatches": 3, "balance": "even"}
NUM_EPOCHS = 2


def pipeline(**options: Any) -> RPCSequentialStrategy:
    return RPCSequentialStrategy(**{**SETTINGS, **options})


class SavesInFit(Callback):
    """Writes a checkpoint after the first epoch, and the adapters in the second one."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint, self.adapters = folder / "adapters.ckpt", folder / "adapters"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.checkpoint)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net.save_pretrained(self.adapters)


class LooksAtWorkers(Callback):
    """Notes the names of the gradients on each worker, and for how many parameters it has optimizer states."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        remotes = trainer.strategy.pipeline.remotes
        self.num_gradients = [
            sum(g is not None for g in captured(remote, PartKind.GRADS).values()) for remote in remotes
        ]


def trained(strategy: Any, devices: int, folder: Path, ckpt_path: Path | None = None) -> tuple[Outcome, SavesInFit]:
    saves = SavesInFit(folder)
    outcome = fit(
        lambda: Adapted(adapters_only=True),
        strategy,
        devices,
        train=loader,
        val=loader,
        callbacks=[saves],
        ckpt_path=None if ckpt_path is None else str(ckpt_path),
    )
    return outcome, saves


def equal(actual: Outcome, expected: Outcome) -> None:
    """Asserts that two trainings came to the same to the last bit."""
    compare(actual, expected, 0.0)


def adapters_in_files() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        single, of_single = trained(one_device(), 1, folder / "single")
        whole, of_whole = trained(pipeline(), 2, folder / "whole")
        compare(whole, single)
        adapters = [*whole.model.trained]
        assert len(adapters) == 16 and all("lora_" in key for key in adapters)
        frozen = [p for p in whole.model.parameters() if not p.requires_grad]
        assert frozen and all(p.grad is None for p in frozen)
        assert len(whole.optimizers[0]["state"]) == len(adapters)

        # A checkpoint of the adapters alone: its keys, and a run that goes on from it.
        checkpoint = torch.load(of_whole.checkpoint, map_location="cpu", weights_only=True)
        assert [*checkpoint["state_dict"]] == adapters
        resumed, _ = trained(pipeline(), 2, folder / "resumed", of_whole.checkpoint)
        assert resumed.model.loaded == adapters
        assert resumed.losses == whole.losses[3:]
        resumed.losses = whole.losses
        equal(resumed, whole)
        alone = Adapted.load_from_checkpoint(of_whole.checkpoint, strict=False, adapters_only=True)
        for key, value in checkpoint["state_dict"].items():
            assert torch.equal(alone.state_dict()[key].double(), value.float().double()), key

        # save_pretrained within fit and after it, and what loads that.
        files = [load_file(saves.adapters / "adapter_model.safetensors") for saves in (of_whole, of_single)]
        assert files[0].keys() == files[1].keys() and len(files[0]) == len(adapters)
        for key in files[0]:
            torch.testing.assert_close(files[0][key], files[1][key], rtol=1e-9, atol=1e-9, msg=key)
        whole.model.net.save_pretrained(folder / "after")
        again = PeftModel.from_pretrained(base_model().double(), folder / "after")
        expected = {key.removeprefix("net."): value for key, value in whole.parameters.items()}
        for key, value in again.named_parameters():
            assert torch.equal(value, expected[key].to(value.dtype)), key

        # Merging the adapters into the base.
        merged, expected_merged = (outcome.model.net.merge_and_unload() for outcome in (whole, single))
        for key, value in merged.state_dict().items():
            torch.testing.assert_close(value, expected_merged.state_dict()[key], rtol=1e-9, atol=1e-9, msg=key)


def test_adapters_train_and_are_saved() -> None:
    run(adapters_in_files)


def adapters_in_shards() -> None:
    options = {"state_dict_type": "sharded", "async_save": True}
    with tempfile.TemporaryDirectory() as folder:
        whole, saves = trained(pipeline(**options), 2, Path(folder) / "whole")
        resumed, _ = trained(pipeline(**options), 2, Path(folder) / "resumed", saves.checkpoint)
        assert saves.checkpoint.is_dir() and resumed.model.loaded == [*whole.model.trained]
        assert resumed.losses == whole.losses[3:]
        resumed.losses = whole.losses
        equal(resumed, whole)


def dropout_masks() -> None:
    make = partial(Adapted, lora_dropout=0.5)
    two = fit(make, pipeline(checkpoint="never"), 2, train=loader)
    equal(fit(make, pipeline(checkpoint="always"), 3, train=loader), two)


@pytest.mark.slow
@pytest.mark.parametrize("function", [adapters_in_shards, dropout_masks])
def test_shards_and_dropout(function: Callable[[], None]) -> None:
    run(function)


# A sweep


CASES: dict[str, dict[str, Any]] = {
    "every block": {},
    "the first block": {"layers_to_transform": [0]},
    "the last block": {"layers_to_transform": [3]},
    "the head too": {"modules_to_save": ["lm_head"]},
    "the embedding too": {"modules_to_save": ["embed_tokens"]},
}
"""Options of LoRA. With one block, stages before or after it train nothing."""


def sweep() -> dict[str, list[list[int]]]:
    """Returns, by case, the number of gradients on each worker of two and of three stages."""
    return {case: gradients_on_workers(partial(Adapted, **options)) for case, options in CASES.items()}


def gradients_on_workers(make: Callable[[], Adapted]) -> list[list[int]]:
    single = fit(make, one_device(), 1, train=loader)
    counted = []
    for stages, schedule in ((2, "1f1b"), (3, "gpipe")):
        looks = LooksAtWorkers()
        compare(fit(make, pipeline(schedule=schedule), stages, train=loader, callbacks=[looks]), single)
        counted.append(looks.num_gradients)
    return counted


@pytest.mark.slow
def test_what_is_trained() -> None:
    counted = run(sweep, timeout_seconds=300)
    assert counted == {
        "every block": [[8], [8, 4]],
        "the first block": [[4], [4, 0]],
        "the last block": [[0], [0, 0]],
        "the head too": [[8], [8, 4]],
        "the embedding too": [[8], [8, 4]],
    }


# ZeRO


def launched() -> None:
    """Lightning's launcher starts the running script once more for each rank, so they run one of their own."""
    with tempfile.TemporaryDirectory() as folder:
        assert Script(adapters_job.__file__, folder).wait(timeout=200) == 0


@on_cpus
@pytest.mark.slow
def test_zero() -> None:
    run(launched, timeout_seconds=240)
