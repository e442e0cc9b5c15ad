"""Models that are built in ``configure_model`` or ``init_module``: the driver never has the layers of other stages."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from strategies import Recovery, RPCSequentialStrategy
from strategies.checkpoint.save_and_load import save_sharded
from trainer import Trainer

ROWS = torch.randn(12, 160, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(97, (12, 6), generator=torch.Generator().manual_seed(1))


class Layers(LightningModule):
    """Layers of 100 KiB, built when Lightning asks for them, and a late initialisation of all."""

    def __init__(self, *, at_once: bool = False, lr: float = 0.1) -> None:
        super().__init__()
        self.lr, self.layers = lr, None
        self.seen: dict[str, bool] = {}
        if at_once:
            self.build()

    def build(self) -> None:
        width = ROWS.shape[1]
        self.head = nn.Linear(width, width)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(5)])
        self.layers[4][0].weight = self.head.weight  # tied to the driver
        self.apply(self._init)
        with torch.device("cpu"):
            self.tables = {"scale": torch.linspace(0.5, 1.5, 5000)}  # an attribute of 20 kB

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1, a=-0.2, b=0.2)

    def configure_model(self) -> None:
        if self.layers is None:
            self.build()

    def forward(self, rows: Tensor) -> Tensor:
        assert self.layers is not None
        return self.head(self.layers(rows)) * self.tables["scale"][-1]

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        return self(rows).pow(2).mean()

    def validation_step(self, rows: Tensor, batch_idx: int) -> None:
        self.log("val", self(rows).pow(2).mean())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.seen = {name: p.is_meta for name, p in self.named_parameters()}  # before a worker has started
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Llama(Layers):
    """A model of Hugging Face, which initialises all of its layers at the end."""

    def build(self) -> None:
        config = LlamaConfig(
            hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128, vocab_size=97
        )
        self.layers = LlamaForCausalLM(config)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        assert self.layers is not None
        return self.layers(input_ids=tokens, labels=tokens).loss


class Saving(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)

    on_test_end = on_train_end


class Pretrained(Llama):
    """Weights from a folder of Hugging Face."""

    def __init__(self, folder: Path) -> None:
        super().__init__(lr=0.01)
        self.folder = folder

    def build(self) -> None:
        self.layers = LlamaForCausalLM.from_pretrained(self.folder, dtype=torch.float64)


def make_trainer(devices: int, strategy: Any = "auto", steps: int = 2, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def train(model: LightningModule, data: Tensor, trainer: Trainer, **settings: Any) -> None:
    torch.manual_seed(5)
    trainer.fit(model, DataLoader(data, batch_size=6), **settings)


def assert_equal(model: nn.Module, twin: nn.Module, *, tolerance: float) -> None:
    values, expected = dict(model.named_parameters()), dict(twin.named_parameters())
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(values[name], value, rtol=0, atol=tolerance), name


def pipeline(**settings: Any) -> RPCSequentialStrategy:
    return RPCSequentialStrategy(**{"module": "layers", "microbatches": 2, "gather_on_end": True, **settings})


@pytest.mark.parametrize(("lr", "precision", "tolerance"), [(0.0, "32-true", 0.0), (0.1, "64-true", 1e-9)])
def test_layers_are_built_where_they_live(lr: float, precision: str, tolerance: float) -> None:
    expected = Layers(lr=lr)
    rows = ROWS.double() if lr else ROWS
    train(expected, rows, make_trainer(1, precision=precision))
    model = Layers(lr=lr)
    strategy = pipeline(balance=[2, 2, 1])
    train(model, rows, make_trainer(3, strategy, precision=precision))
    assert model.seen["layers.0.0.weight"]  # no memory on the driver
    assert_equal(model, expected, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_blocks_of_a_hugging_face_model(schedule: str) -> None:
    expected = Llama()
    train(expected, TOKENS, make_trainer(1, precision="64-true"))
    model = Llama()
    train(
        model, TOKENS, make_trainer(2, pipeline(module=None, schedule=schedule), precision="64-true")
    )  # balance by size
    assert any(meta for name, meta in model.seen.items() if ".layers.0." in name)
    assert_equal(model, expected, tolerance=1e-9)


@pytest.mark.slow
def test_from_pretrained(tmp_path: Path) -> None:
    source = Llama()
    source.build()
    assert source.layers is not None
    source.layers.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = Pretrained(tmp_path)
    train(expected, TOKENS, make_trainer(1, precision="64-true"))
    model = Pretrained(tmp_path)
    train(model, TOKENS, make_trainer(2, pipeline(module=None, schedule="1f1b"), precision="64-true"))
    assert sum(model.seen.values()) == 6  # those above 16 KiB in two blocks
    assert_equal(model, expected, tolerance=1e-9)


@pytest.mark.slow
def test_init_module_and_the_measured_balance() -> None:
    torch.manual_seed(5)
    expected = Layers(at_once=True, lr=0.0)
    train(expected, ROWS, make_trainer(1))
    trainer = make_trainer(2, pipeline(balance="by_time"))
    torch.manual_seed(5)
    with trainer.init_module():
        model = Layers(at_once=True, lr=0.0)
    model.example_input_array = ROWS[:4]
    assert model.layers is not None and model.layers[0][0].weight.is_meta
    again = Layers(at_once=True, lr=0.0)
    assert not any(p.is_meta for p in again.parameters())  # only within the context
    train(model, ROWS, trainer)
    assert_equal(model, expected, tolerance=0.0)


class EditsCheckpoint(Layers):
    """Changes weights of a checkpoint before they are loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            if "layers.1" in name:
                state[name].mul_(2)  # in place
            else:
                state[name] = state[name] * 3  # other tensors, in memory that the first ones have left


@pytest.mark.slow
def test_a_checkpoint_that_a_hook_changes(tmp_path: Path) -> None:
    rows = ROWS.double()
    trainer = make_trainer(1, precision="64-true")
    train(Layers(), rows, trainer)
    trainer.save_checkpoint(path := tmp_path / "x.ckpt")
    expected, model = EditsCheckpoint(), EditsCheckpoint()
    train(expected, rows, make_trainer(1, steps=3, precision="64-true"), ckpt_path=path)
    resumed = make_trainer(3, pipeline(balance=[2, 2, 1]), steps=3, precision="64-true")
    train(model, rows, resumed, ckpt_path=path)
    assert_equal(model, expected, tolerance=1e-9)


class TransposesCheckpoint(Layers):
    """Transposes weights of a checkpoint before they are loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state.update({name: value.t() for name, value in state.items() if value.dim() == 2})


@pytest.mark.slow
def test_a_sharded_checkpoint_whose_weights_a_hook_transposes(tmp_path: Path) -> None:
    rows, path = ROWS.double(), tmp_path / "x"
    trainer = make_trainer(1, precision="64-true")
    train(Layers(), rows, trainer)
    trainer.save_checkpoint(plain := tmp_path / "x.ckpt")
    save_sharded(torch.load(plain, weights_only=True), path)
    expected, model = TransposesCheckpoint(), TransposesCheckpoint()
    train(expected, rows, make_trainer(1, steps=3, precision="64-true"), ckpt_path=path)
    train(model, rows, make_trainer(2, pipeline(balance=[2, 3]), steps=3, precision="64-true"), ckpt_path=path)
    assert_equal(model, expected, tolerance=1e-9)


class Holder:
    """An object that is no module."""

    def __init__(self) -> None:
        self.table = torch.randn(80, 80)


class Holds(Layers):
    def configure_model(self) -> None:
        super().configure_model()
        self.holder = Holder()


def test_a_tensor_that_no_module_holds() -> None:
    message = (
        r"1 large tensors that were made in configure_model .* such as one of shape \[80, 80\], are held by objects"
    )
    with pytest.warns(UserWarning, match=message):
        train(Holds(), ROWS, make_trainer(2, pipeline(balance=[2, 3])))


class OnMeta(Layers):
    """Built on the ``meta`` device."""

    def configure_model(self) -> None:
        if self.layers is None:
            with torch.device("meta"):
                self.build()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_each_process_reads_its_own_layers_of_a_checkpoint(form: str, tmp_path: Path) -> None:
    rows = ROWS.double()
    expected = Layers()
    trainer = make_trainer(1, precision="64-true")
    train(expected, rows, trainer)
    trainer.save_checkpoint(plain := tmp_path / "plain.ckpt")
    ended = make_trainer(1, precision="64-true", steps=4)
    train(expected, rows, ended, ckpt_path=plain)
    (validated,) = ended.validate(expected, DataLoader(rows, batch_size=6), verbose=False)

    path = tmp_path / "ended"
    for kind in (Layers, OnMeta):  # of one process, and its own form
        model = kind()
        resumed = make_trainer(3, pipeline(balance=[2, 2, 1], state_dict_type=form), precision="64-true", steps=4)
        resumed.callbacks.append(Saving(path))
        train(model, rows, resumed, ckpt_path=plain)
        assert model.seen["layers.0.0.weight"]
        assert_equal(model, expected, tolerance=1e-9)

        evaluated = kind()
        trainer = make_trainer(3, pipeline(balance=[2, 2, 1]), precision="64-true")
        (found,) = trainer.validate(evaluated, DataLoader(rows, batch_size=6), ckpt_path=path, verbose=False)
        assert found["val"] == pytest.approx(validated["val"], rel=1e-9)


def test_layers_on_the_meta_device_without_a_checkpoint() -> None:
    values = []
    for balance in ([2, 3], [4, 1]):
        model = OnMeta(lr=0.0)
        with pytest.warns(UserWarning, match=r"6 modules of OnMeta are on the meta device, such as 'head', and no che"):
            train(model, ROWS, make_trainer(2, pipeline(balance=balance)))
        values.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        assert torch.equal(values[1][name], value) and 0 < value.abs().max() < 0.2, name
    assert not torch.equal(values[0]["layers.0.0.weight"], values[0]["layers.1.0.weight"])


class LosesAWorker(Layers):
    """Kills a worker after the second step of the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.has_killed = False

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2 and not self.has_killed:
            self.has_killed = True
            workers = [p for p in psutil.Process().children(recursive=True) if "worker" in p.cmdline()]
            workers[-1].kill()


@pytest.mark.slow
def test_the_repair_of_a_lost_worker() -> None:
    rows = ROWS.double()
    expected = Layers()
    train(expected, rows, make_trainer(1, precision="64-true", steps=4))
    model = LosesAWorker()
    strategy = pipeline(balance=[2, 2, 1], recovery=Recovery(1))
    train(model, rows, make_trainer(3, strategy, precision="64-true", steps=4))
    assert model.has_killed and len(strategy.repairs) == 1
    assert_equal(model, expected, tolerance=1e-9)


class CannotArrive(nn.Module):
    """A layer that raises an error in the process of its stage."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot be unpickled here")

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_layers_that_have_left_come_back_if_the_start_fails() -> None:
    model = Layers(at_once=True)
    assert model.layers is not None
    model.layers[2] = CannotArrive()  # on the second stage; the first one has arrived by then
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(Exception, match="cannot be unpickled here"):
        train(model, ROWS, make_trainer(3, pipeline(balance=[2, 2, 1])))
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta and torch.equal(parameter, before[name]), name


class Tokens(nn.Module):
    """A layer with a parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.table.sum()


def test_values_that_nothing_gives() -> None:
    with torch.device("meta"):
        model = Layers(at_once=True)
        assert model.layers is not None
        model.layers[1] = Tokens()
    with pytest.raises(MisconfigurationException, match=r"1 parameters or buffers of Layers have no values .*1\.table"):
        train(model, ROWS, make_trainer(2, pipeline(balance=[2, 3])))


def test_layers_that_stay_on_their_workers(tmp_path: Path) -> None:
    rows, path = ROWS.double(), tmp_path / "last.ckpt"
    expected, model = Layers(), Layers()
    train(expected, rows, make_trainer(1, precision="64-true"))
    trainer = make_trainer(3, pipeline(balance=[2, 2, 1], gather_on_end=None), precision="64-true")
    trainer.callbacks.append(Saving(path))
    train(model, rows, trainer)
    assert model.layers is not None and not trainer.optimizers[0].state.get(model.layers[0][0].weight)
    for read in (
        lambda: model.layers[0][0].weight.sum(),
        lambda: model.state_dict(),
        lambda: trainer.save_checkpoint(tmp_path / "late.ckpt"),
    ):
        with pytest.raises(RuntimeError, match="were not brought back when the run ended, because gather_on_end"):
            read()
    assert os.listdir(tmp_path) == ["last.ckpt"]
    with pytest.raises(MisconfigurationException, match=r"stayed on the workers of an earlier run.*ckpt_path"):
        trainer.validate(model, DataLoader(rows, batch_size=6), verbose=False)
    with pytest.raises(RuntimeError, match="states of AdamW were not brought back when fit ended, because gather_on_e"):
        trainer.test(model, DataLoader(rows, batch_size=6), ckpt_path=path, verbose=False)
    saved = Layers(at_once=True).double()
    saved.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert_equal(saved, expected, tolerance=1e-9)
