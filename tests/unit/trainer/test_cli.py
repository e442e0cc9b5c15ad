"""The command line: what it takes, what it saves, and the one line that it says to a mistake."""

import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import cli_models
import pytest
import torch
import yaml
from cli_models import CONFIG
from jsonargparse import Namespace
from paths import ROOT
from pytorch_lightning.callbacks import ModelCheckpoint

from trainer.cli import main
from trainer.cli.parser import Parser
from trainer.cli.parser_messages import condense, unknown_class, unknown_key
from trainer.cli.saved_config import SaveConfigBesideCheckpoints

ONE_DEVICE = "--trainer.strategy=auto"  # a run of it needs no process group in the process of the tests


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["trainer"])
    # seed_everything leaves its seed in the environment.
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "broken.py").write_text("import not_installed")
    return tmp_path


def test_the_command_relay_is_this_one() -> None:
    """``.ci/run installed`` looks for it in an installed package."""
    (value,) = re.findall(r'^relay = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert EntryPoint("relay", value, "console_scripts").load() is main


def replaced(old: str, new: str) -> list[str]:
    """The command with one mistake in the file."""
    assert old in CONFIG
    Path("config.yaml").write_text(CONFIG.replace(old, new, 1))
    return ["fit", "--config=config.yaml"]


def option(*options: str) -> list[str]:
    """The command with one mistake on the command line."""
    return ["fit", "--config=config.yaml", *options]


MISTAKES: dict[str, tuple[Callable[..., list[str]], tuple[str, ...], str]] = {
    "key of the Trainer": (
        replaced,
        ("max_epochs", "max_epoch"),
        "unknown key 'trainer.max_epoch'; did you mean 'max_epochs'?",
    ),
    "top-level key": (replaced, ("\ntrainer:", "\ntrainr:"), "unknown key 'trainr'; did you mean 'trainer'?"),
    "key of the model": (
        replaced,
        ("    width: 16\n", "    width: 16\n    widht: 16\n"),
        "config.yaml: cli_models.Net: unknown key 'widht'; did you mean 'width'?",
    ),
    "key of the strategy": (
        replaced,
        ("comm_hook", "comm_hok"),
        "config.yaml: strategies.data_parallel.ddp.DDPStrategy: unknown key 'comm_hok'; did you mean 'comm_hook'?",
    ),
    "key of the pipeline": (
        option,
        ("--trainer.strategy=rpc_sequential", "--trainer.strategy.init_args.micro_batches=4"),
        "strategies.rpc_sequential.RPCSequentialStrategy: unknown key 'micro_batches'; did you mean 'microbatches'?",
    ),
    "key of torch's DDP": (
        option,
        ("--trainer.strategy.init_args.find_unused_params=true",),
        "strategies.data_parallel.ddp.DDPStrategy: unknown key 'find_unused_params'; "
        "did you mean 'find_unused_parameters'?",
    ),
    "class_path misspelt": (
        replaced,
        ("class_path: cli_models.Net", "class_pth: cli_models.Net"),
        "config.yaml: model: expected class_path and init_args, got 'class_pth'; did you mean 'class_path'?",
    ),
    "init_args misspelt": (
        replaced,
        ("    init_args:\n      comm_hook", "    init_arg:\n      comm_hook"),
        "config.yaml: trainer.strategy: expected class_path and init_args, got 'init_arg'; did you mean 'init_args'?",
    ),
    "init_args of the data misspelt": (
        replaced,
        ("  init_args:\n    rows", "  init_arg:\n    rows"),
        "config.yaml: pytorch_lightning.core.datamodule.LightningDataModule: unknown key 'init_arg'; did you mean 'in",
    ),
    "Trainer without arguments": (
        replaced,
        (CONFIG[CONFIG.index("trainer:") :], "trainer: 3\n"),
        "trainer: expected the arguments of the Trainer, got 3",
    ),
    "no such checkpoint": (
        option,
        (ONE_DEVICE, "--ckpt_path=none.ckpt"),
        "Checkpoint file not found: none.ckpt",
    ),
    "folder in place of a checkpoint": (
        option,
        (ONE_DEVICE, "--ckpt_path=."),
        "ckpt_path: Is a directory: ",
    ),
    "no such class": (
        replaced,
        ("cli_models.Net", "cli_models.Nett"),
        "config.yaml: model: cannot import 'cli_models.Nett': cli_models has no 'Nett'; did you mean 'Net'?",
    ),
    "no such module": (
        replaced,
        ("cli_models.Net", "cli_model.Net"),
        "config.yaml: model: cannot import 'cli_model.Net': no module 'cli_model'; did you mean 'cli_models'?",
    ),
    "no such strategy class": (
        replaced,
        ("strategies.DDPStrategy", "strategies.DPStrategy"),
        "config.yaml: trainer.strategy: cannot import 'strategies.DPStrategy': strategies has no 'DPStrategy'; did "
        "you mean 'DDPStrategy'",
    ),
    "no such submodule": (
        replaced,
        ("strategies.DDPStrategy", "strategies.data_paralel.DDPStrategy"),
        "config.yaml: trainer.strategy: cannot import 'strategies.data_paralel.DDPStrategy': strategies has no "
        "'data_paralel'; did you mean 'data_parallel'",
    ),
    "module that cannot import": (
        replaced,
        ("cli_models.Net", "broken.Net"),
        "config.yaml: model: cannot import 'broken.Net': No module named 'not_installed'",
    ),
    "argument missing": (
        option,
        ("--model=cli_models.Demanding",),
        "cli_models.Demanding: the following arguments are required: depth",
    ),
    "abstract class": (
        option,
        ("--trainer.strategy=strategies.StrategyPlugin", "--trainer.strategy.x=1"),
        "trainer.strategy: Expected an instantiatable class, but strategies.StrategyPlugin is abstract",
    ),
    "no subclass": (
        replaced,
        ("cli_models.Net", "cli_models.Data"),
        "config.yaml: model: Import path cli_models.Data does not correspond to a subclass of LightningModule",
    ),
    "type in the model": (
        replaced,
        ("width: 16", "width: wide"),
        "config.yaml: cli_models.Net: width: expected int, got wide",
    ),
    "type in the Trainer": (
        option,
        ("--trainer.max_epochs=three",),
        "trainer.max_epochs: expected int or null, got three",
    ),
    "type within a list": (
        option,
        ("--trainer.strategy=rpc_sequential", "--trainer.strategy.balance=[1,x]"),
        "strategies.rpc_sequential.RPCSequentialStrategy: balance: expected 'by_size' or 'by_time' or 'even' or list[i",
    ),
    "type of many": (
        option,
        ("--trainer.limit_train_batches=most",),
        "trainer.limit_train_batches: expected float or int or null, got most",
    ),
    "bad YAML": (
        replaced,
        ("  devices: 1\n", "  devices: [1\n"),
        "config.yaml: Problems parsing config: while parsing ",
    ),
    "no such file": (lambda: ["fit", "--config=missing.yaml"], (), "config: File does not exist: "),
    "no such interpolation": (
        replaced,
        ("${model.init_args.width}", "${model.init_args.widht}"),
        "data.init_args.width: Interpolation key 'model.init_args.widht' not found",
    ),
    "abbreviated option": (option, ("--trainer.max_epoch=3",), "unknown key 'trainer.max_epoch'; did you mean 'max_ep"),
    "option of no group": (option, ("--trainr.max_epochs=3",), "unknown key 'trainr'; did you mean 'trainer'?"),
    "stray argument": (option, ("extra",), "unexpected argument 'extra'"),
    "option of the strategy": (
        option,
        ("--trainer.strategy.comm_hok=none",),
        "strategies.data_parallel.ddp.DDPStrategy: unknown key 'comm_hok'; did you mean 'comm_hook'",
    ),
    "strategy's name": (
        option,
        ("--trainer.strategy=dpp",),
        "unknown strategy 'dpp'; did you mean 'dp' or 'ddp'? (Relay's strategies: ddp, rpc_sequential",
    ),
    "argument for a name": (
        lambda: [
            *replaced(CONFIG[CONFIG.index("  strategy:") :], "  strategy: ddp\n"),
            "--trainer.strategy.init_args.comm_hook=none",
        ],
        (),
        "trainer.strategy: the name 'ddp' takes no arguments; to give some, write class_path: strategies.DDPStrategy",
    ),
    "class by its short name": (
        option,
        ("--optimizer=Adamm",),
        "optimizer: unknown class 'Adamm'; did you mean 'Adam' or 'AdamW' or 'NAdam'?",
    ),
    "key of an optimizer": (
        option,
        ("--optimizer=Adam", "--optimizer.lrr=1"),
        "torch.optim.adam.Adam: unknown key 'lrr'; did you mean 'lr'?",
    ),
    "key of a callback": (
        option,
        ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitr=x"),
        "pytorch_lightning.callbacks.early_stopping.EarlyStopping: unknown key 'monitr'; did you mean 'monitor'?",
    ),
    "hook": (
        option,
        ("--trainer.strategy.init_args.comm_hook=fp16",),
        "unknown comm_hook 'fp16'; did you mean 'fp16_compress'?",
    ),
    "hook on gloo": (
        option,
        ("--trainer.strategy.init_args.comm_hook=bf16_compress",),
        "comm_hook='bf16_compress' does not work on the backend 'gloo'; on gloo use one of: none, fp16_compress, power",
    ),
    "microbatches": (
        option,
        ("--trainer.strategy=rpc_sequential", "--trainer.strategy.microbatches=0"),
        "microbatches must be a whole number of at least 1, got 0.",
    ),
    "accelerator": (
        option,
        ("--trainer.accelerator=gpux",),
        "You selected an invalid accelerator name: `accelerator='gpux'`. Available names are: ",
    ),
    "devices": (option, ("--trainer.devices=two",), "`devices` selected with `CPUAccelerator` should be an int > 0."),
    "value that a constructor refuses": (replaced, ("width: 16", "width: 7"), "width must be even, got 7 ("),
    "set-up": (option, (ONE_DEVICE, "--model.trouble=setup"), "the model refuses its set-up ("),
    "set-up, Lightning's": (
        option,
        (ONE_DEVICE, "--model=pytorch_lightning.LightningModule"),
        "No `training_step()` method defined. Lightning `Trainer` expects as minimum a `training_step()`, ",
    ),
    "subcommand": (lambda: ["fti"], (), "argument subcommand: invalid choice: 'fti' (choose from 'fit', 'validate', "),
    "no subcommand": (
        list,
        (),
        'expected "subcommand" to be one of {fit,validate,test,predict,plan, ...}, but it was not',
    ),
    "plan of another strategy": (
        lambda: ["plan", "--config=config.yaml"],
        (),
        "A plan compares ways to run a pipeline, but the strategy is DDPStrategy. Set strategy='rpc_sequential'.",
    ),
    "schedule of a plan": (
        lambda: ["plan", "--config=config.yaml", "--trainer.strategy=rpc_sequential", "--schedules=1f2b"],
        (),
        "Unknown schedule '1f2b'; did you mean '1f1b'?",
    ),
    "model of a plan": (
        lambda: ["plan", "--config=config.yaml", "--trainer.strategy=rpc_sequential", "--stages=2"],
        (),
        "Net has no nn.Sequential or nn.ModuleList with at least 2 layers",
    ),
    "number of a plan": (
        lambda: ["plan", "--config=config.yaml", "--trainer.strategy=rpc_sequential", "--stages=two"],
        (),
        "stages: expected int or list[int] or null, got two",
    ),
    "strategy to verify": (
        lambda: ["verify", "--config=config.yaml", ONE_DEVICE],
        (),
        "verify compares RPCSequentialStrategy, DDPStrategy and ZeROStrategy with one process, got Single",
    ),
    "steps to verify": (
        lambda: ["verify", "--config=config.yaml", "--steps=0"],
        (),
        "steps must be a whole number of at least 1, got 0.",
    ),
    "no model": (lambda: ["fit"], (), "the following arguments are required: fit.model. Give a configuration with "),
}


OTHERS_LIKE_THESE = (
    *(
        "key of the strategy",
        "key of torch's DDP",
        "option of the strategy",
        "key of an optimizer",
        "no such submodule",
    ),
    *(
        "no such strategy class",
        "no such module",
        "argument missing",
        "type in the Trainer",
        "type of many",
        "microbatches",
    ),
    *("option of no group", "stray argument", "hook", "devices", "schedule of a plan", "number of a plan", "no model"),
    "steps to verify",
)
"""Found at the same place as another one that is not marked slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in OTHERS_LIKE_THESE)) for name in MISTAKES]
)
def test_a_mistake_ends_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, arguments, message = MISTAKES[name]
    with pytest.raises(SystemExit) as end:
        main(command(*arguments))
    assert end.value.code == 2
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert said.err.endswith(lines[0] + "\n")  # nothing below it
    assert lines[0].startswith(f"error: {message}")
    assert "Traceback" not in said.err + said.out
    assert "\x02" not in lines[0]


def test_a_crash_keeps_its_traceback() -> None:
    with pytest.raises(Exception, match="broken in training"):
        main(option(ONE_DEVICE, "--model.trouble=training"))
    with pytest.raises(TypeError, match="a bug in the constructor"):
        main(option(ONE_DEVICE, "--model.trouble=constructor"))


def test_print_config_resolves_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(option("--trainer.strategy.init_args.comm_hook=fp16_compress", "--model.width=4", "--print_config"))
    assert end.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["strategy"]["class_path"] == "strategies.DDPStrategy"
    assert config["trainer"]["strategy"]["init_args"]["comm_hook"] == "fp16_compress"
    assert config["model"]["init_args"]["width"] == 4


def test_a_name_can_be_given_arguments_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(option("--trainer.strategy=ddp", "--trainer.strategy.comm_hook=powersgd", "--print_config"))
    strategy = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert (strategy["class_path"], strategy["init_args"]["comm_hook"]) == ("strategies.DDPStrategy", "powersgd")


@pytest.mark.parametrize("logger", ["false", "CSVLogger"])
def test_the_config_lies_beside_the_checkpoints_and_repeats_the_run(logger: str, in_folder: Path) -> None:
    logs = (
        ["--trainer.logger=false"]
        if logger == "false"
        else ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    )
    main(option(ONE_DEVICE, *logs))
    (checkpoint,) = in_folder.rglob("*.ckpt")
    (saved,) = in_folder.glob("[!c]*/**/config.yaml")
    assert saved.parent == checkpoint.parent
    config = yaml.safe_load(saved.read_text())
    assert config["data"]["init_args"]["width"] == 16  # the interpolation is resolved
    assert config["seed_everything"] == 7
    before = torch.load(checkpoint, weights_only=True)["state_dict"]

    main(["fit", f"--config={saved}", "--trainer.default_root_dir=again", "--trainer.logger=false"])
    (repeated,) = in_folder.glob("again/**/*.ckpt")
    after = torch.load(repeated, weights_only=True)["state_dict"]
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_second_run_keeps_the_first_ones_config(in_folder: Path) -> None:
    for lr in ("0.1", "0.1", "0.2"):
        main(option(ONE_DEVICE, f"--model.lr={lr}"))
    folder = in_folder / "run/checkpoints"
    rates = {file.name: yaml.safe_load(file.read_text())["model"]["init_args"]["lr"] for file in folder.glob("*.yaml")}
    assert rates == {"config.yaml": 0.1, "config-v1.yaml": 0.2}


def test_without_checkpoints_the_config_goes_to_the_log_directory(in_folder: Path) -> None:
    main(option(ONE_DEVICE, "--trainer.enable_checkpointing=false"))
    assert [str(path.relative_to(in_folder)) for path in in_folder.glob("run/**/*.*")] == ["run/config.yaml"]


@pytest.mark.parametrize("is_global_zero", [True, False])
def test_rank_0_alone_writes_the_config(is_global_zero: bool, in_folder: Path) -> None:
    trainer: Any = SimpleNamespace(
        log_dir="logs", is_global_zero=is_global_zero, checkpoint_callbacks=[ModelCheckpoint("here"), ModelCheckpoint()]
    )
    SaveConfigBesideCheckpoints(Parser(), Namespace()).on_fit_start(trainer, cli_models.Net())
    written = [str(path.relative_to(in_folder)) for path in in_folder.rglob("config.yaml") if path.parent != in_folder]
    assert written == (["here/config.yaml"] if is_global_zero else [])


def test_the_other_commands_use_a_checkpoint_and_write_nothing(in_folder: Path) -> None:
    main(option(ONE_DEVICE))
    (checkpoint,) = in_folder.rglob("*.ckpt")
    before = sorted(in_folder.rglob("*"))
    for subcommand in ("validate", "test", "predict"):
        main([subcommand, "--config=config.yaml", ONE_DEVICE, f"--ckpt_path={checkpoint}"])
        assert sorted(in_folder.rglob("*")) == before, subcommand


def test_a_plan_and_the_configuration_that_it_gives(
    in_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.planning.plan.BUDGET_SECONDS", 0.01)
    given = ["--config=config.yaml", "--model=cli_models.Deep"]
    choices = ["--microbatches=[2,4]", "--schedules=[zb-h1]", "--json=plan.json", "--picture=plan.svg"]
    pipeline = ["--trainer.strategy=rpc_sequential", "--trainer.devices=2", "--trainer.strategy.checkpoint=never"]
    main(["plan", *given, *pipeline, *choices])
    said = capsys.readouterr().out
    found = json.loads(Path("plan.json").read_text())
    assert [row["microbatches"] for row in found["rows"]] == [2, 4]
    assert [found["measured_on"], found["notes"]] == ["training_step on a batch of 8 rows", []]
    assert ElementTree.parse("plan.svg").getroot().tag.endswith("svg")
    assert not list(in_folder.glob("run/**/*"))

    Path("plan.yaml").write_text(said[said.index("trainer:\n") :])
    with pytest.raises(SystemExit):
        main(["fit", *given, "--config=plan.yaml", "--print_config"])
    saved = capsys.readouterr().out
    trainer = yaml.safe_load(saved)["trainer"]
    best = found["rows"][found["best"]]
    arguments = trainer["strategy"]["init_args"]
    assert trainer["devices"] == 2 and arguments["checkpoint"] == "never"
    expected = {"name": best["schedule"], "chunks": best["chunks_per_stage"]}
    assert {name: arguments["schedule"][name] for name in expected} == expected
    for name in ("balance", "microbatches"):
        assert arguments[name] == best[name]

    Path("saved.yaml").write_text(saved)
    assert "ckpt_path" in yaml.safe_load(saved)
    main(["plan", "--config=saved.yaml", "--microbatches=2", "--schedules=zb-h1", "--json=again.json"])
    assert json.loads(Path("again.json").read_text())["rows"][0]["balance"] == best["balance"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])  # a plan in bf16-true measures a copy of the model
def test_a_plan_counts_the_optimizer_of_the_configuration(
    precision: str, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.planning.plan.BUDGET_SECONDS", 0.01)
    given = ["--config=config.yaml", "--model=cli_models.Deep", "--optimizer=AdamW", f"--trainer.precision={precision}"]
    pipeline = ["--trainer.strategy=rpc_sequential", "--trainer.devices=2"]
    main(["plan", *given, *pipeline, "--microbatches=2", "--schedules=1f1b", "--json=plan.json"])
    (row,) = json.loads(Path("plan.json").read_text())["rows"]
    for process in row["processes"]:
        assert process["optimizer_bytes"] == 2 * process["parameters_bytes"] > 0
        assert process["optimizer_step_seconds"] > 0


def test_unknown_key_at_each_level() -> None:
    keys = ["model", "trainer.devices", "trainer.logger", "trainer.logger.help"]
    assert unknown_key("traner.devices", keys) == "unknown key 'traner'; did you mean 'trainer'?"
    assert unknown_key("trainer.device", keys) == "unknown key 'trainer.device'; did you mean 'devices'?"
    assert unknown_key("trainer.x", keys) == "unknown key 'trainer.x'; valid names: devices, logger"


def test_unknown_class_without_a_known_subclass() -> None:
    assert unknown_class("Whatever", [int]) == "unknown class 'Whatever'; valid names: none"
    assert unknown_class("cli_models.Net", []) is None
    assert unknown_class("nowhere_at_all.X", []) == "cannot import 'nowhere_at_all.X': no module 'nowhere_at_all'"


def test_condense() -> None:
    value: dict[str, Any] = {"init_arg": 1}
    message = (
        'Parser key "model":\n  Does not validate against any of the Union subtypes\n  Subtypes: [a, b]\n  Errors:\n'
        "    - Not a valid subclass of X\n      Subclass types expect one of:\n      - a class path (str)\n"
        f"    - Expected a <class 'NoneType'>\n  Given value type: <class 'dict'>\n  Given value: {value}"
    )
    assert condense(message) == "model: expected class_path and init_args, got 'init_arg'; did you mean 'init_args'?"
    assert condense(message.replace(str(value), "[1]")) == "model: expected class_path and init_args, got [1]"
    assert condense("plain words") == "plain words"
    assert condense("two\nlines") == "two; lines"
