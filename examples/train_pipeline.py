"""Trains the character GPT from a script; `train_single.py` and `train_pipeline.py` differ in one argument."""

from pytorch_lightning import seed_everything

from examples.gpt import GPT
from examples.report import Report
from examples.text import PythonDocs
from trainer import Trainer

seed_everything(1)
trainer = Trainer(
    accelerator="cpu",
    devices=2,  # processes; "single_device" uses only one
    strategy="rpc_sequential",
    max_epochs=1,
    default_root_dir="runs",
    callbacks=[Report()],
)
trainer.fit(GPT(), PythonDocs())
