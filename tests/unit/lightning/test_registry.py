"""Relay's names under Lightning's own Trainer, by its registry; each case in an interpreter of its own."""

import pytest
from paths import python

CASES = [
    ("pytorch_lightning", "strategies"),
    pytest.param("pytorch_lightning", "Lightning", marks=pytest.mark.slow),
    pytest.param("lightning.pytorch", "strategies", marks=pytest.mark.slow),
    pytest.param("lightning.pytorch", "Lightning", marks=pytest.mark.slow),
]
"""The package of Lightning, and what is imported first."""


SHOW = """
import strategies as relay
for name in ("rpc_sequential", "zero", "dp", "ddp"):
    made = pl.strategies.StrategyRegistry.get(name)
    print(name, type(made).__module__.split(".")[0], type(made).__name__, isinstance(made, pl.strategies.Strategy))
trainer = pl.Trainer(strategy="rpc_sequential", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
assert type(trainer.strategy) is relay.RPCSequentialStrategy
assert "rpc_sequential" in pl.strategies.StrategyRegistry.available_strategies()
"""


@pytest.mark.parametrize(("package", "first"), CASES)
def test_lightnings_trainer_knows_relays_names_and_keeps_its_own(package: str, first: str) -> None:
    imports = ["import strategies", f"import {package} as pl"]
    shown = python("\n".join(imports if first == "strategies" else imports[::-1]) + SHOW)
    assert shown.splitlines() == [
        "rpc_sequential strategies RPCSequentialStrategy True",
        "zero strategies ZeROStrategy True",
        "dp strategies DataParallelStrategy True",
        f"ddp {package.split('.')[0]} DDPStrategy True",
    ]


@pytest.mark.slow
def test_a_trainer_of_the_other_package_is_refused() -> None:
    said = python(
        """
import pytorch_lightning, strategies, lightning.pytorch as other
try:
    other.Trainer(strategy="zero", accelerator="cpu", devices=1)
except Exception as error:
    print(type(error).__name__, error)
"""
    )
    assert said == (
        "MisconfigurationException the Trainer is of lightning.pytorch, but strategies use pytorch_lightning, which "
        "this process imported first. Import lightning.pytorch before pytorch_lightning, trainer and strategies."
    )


def test_names_cost_no_import_of_lightning_or_torch() -> None:
    python("import sys, strategies; assert not {'torch', 'pytorch_lightning', 'lightning'} & set(sys.modules)")
