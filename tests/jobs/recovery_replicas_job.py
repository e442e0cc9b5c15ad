"""A user's script: fits of two pipelines of two stages, of which workers of one or both are killed.

The pipelines are two replicas, or divide the layers of one.

Run as ``python recovery_replicas_job.py FOLDER NAME``, or by torchrun with four ranks. Each driver writes what it has
come to into ``FOLDER/PIPELINE``. Without torchrun, Lightning starts the second driver by running this script once more.
"""

import os
import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from repair_job import MAX_RESTARTS, Kills, Net, differences, evaluate, fit
from torch import Tensor, nn

from strategies import Recovery
from strategies.pipeline.recovery import recovery

REPLICAS, STAGES = 2, 2

LIMIT_BYTES = 10_000
"""The size of the log from which on an early snapshot is taken."""


class ReplicaNet(Net):
    """Exchanges values with the other replica within steps, in validation, and between steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss.detach(), sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log("norms", torch.tensor(self.norms[self.current_epoch][-1]), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.gathered = self.all_gather(torch.tensor(self.seen[-1][1])).tolist()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        error = (self.sequential_module(batch[0]) * self.scale - batch[1]).square().mean()
        self.log("val_loss", error, sync_dist=True)


class Kept(ReplicaNet):
    """Adds the gradients of each second step to those of the step before."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class KeepsOutput(ReplicaNet):
    """The second replica keeps an output over a step, and cannot take the snapshot that the first one takes then."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self.sequential_module(batch[0])
        if self.trainer.global_rank == 1 and self.trainer.global_step % 2 == 0:
            self.kept: Tensor | None = output
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.trainer.global_step % 2 == 0:
            self.kept = None
            running = self.trainer.strategy.pipeline._running
            assert running is None or not running.executor.unfinished, "an output that training_step dropped is kept"


class Evaluating(ReplicaNet):
    """Passes of an evaluation fill the log, in one replica faster than in the other."""

    passes = (100, 50)
    most_logged_bytes = 150_000
    """A replica learns after up to 30 ms, and more on a busy machine, what snapshots the other one has."""

    def on_validation_start(self) -> None:
        self.sizes: list[int] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for _ in range(self.passes[self.trainer.global_rank]):
            self.sequential_module(batch[0])
            self.sizes.append(self.trainer.strategy.pipeline.log_bytes)
        super().validation_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        assert max(self.sizes) < self.most_logged_bytes, (min(self.sizes), max(self.sizes))


class EvaluatingAlike(Evaluating):
    """Pipelines that divide layers or parameters run the same passes, and agree on snapshots at once."""

    passes = (30, 30)
    most_logged_bytes = 50_000


class Divided(ReplicaNet):
    """Two pipelines of a replica divide two layers of the worker and two of the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[2] = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 6))

    def tensor_parallel_plan(self) -> dict[str, str]:
        styles = {"2.0": "colwise", "2.2": "rowwise", "10": "colwise", "11": "rowwise"}
        return {f"sequential_module.{name}": style for name, style in styles.items()}


class DividedEvaluating(Divided, EvaluatingAlike): ...


class ChangesOnce(nn.Linear):
    """Computes wrongly once, on the worker of the second pipeline."""

    def forward(self, rows: Tensor) -> Tensor:
        changed, output = Path("changed"), super().forward(rows)
        if self.training and Path.cwd().name == "pipeline-1" and not changed.exists():
            changed.touch()
            return output + 0.01
        return output


class Faulty(Divided):
    """A worker of the second pipeline computes wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[0] = ChangesOnce(4, 6)


class Ending(ReplicaNet):
    """Fails in the second replica, whose workers live."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 4 and self.trainer.global_rank == 1:
            raise KeyError("of the user")
        return super().training_step(batch, batch_idx)


class Killed(ReplicaNet):
    """The driver of the second replica is killed while the first one repairs a worker."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 4 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == 4:
            self.trainer.strategy.pipeline.workers.kill(0)
        return super().training_step(batch, batch_idx)


Case = tuple[dict[str, Any], Sequence[tuple[tuple[Kills, Kills], int]]]
"""Arguments of ``fit``, and for each fit the kills in both pipelines and ``snapshot_every_n_steps``.

Of four pipelines, the third and the fourth have the kills of the first and the second.
"""

STEPS: tuple[Kills, Kills] = (
    {3: ["backward-0"], 8: ["forward-0"], 12: ["forward-0"]},
    {0: ["forward-0"], 5: ["step-0"], 8: ["forward-0"], 10: ["snapshot-0"]},
)
"""Batch 8: two losses at once."""
THIRD: tuple[Kills, Kills] = ({5: ["backward-0"]}, {1: ["step-0"], 13: ["forward-0"]})
QUIET: tuple[Kills, Kills] = ({1: ["step-0"], 4: ["backward-0"]}, {2: ["step-0"], 9: ["forward-0"]})
ODD_STEPS: tuple[Kills, Kills] = ({3: ["backward-0"], 9: ["forward-0"]}, {5: ["backward-0"], 11: ["backward-0"]})
"""Both replicas have a snapshot of the step before, and the first one has one of this step.

They meet after these phases, so the first one cannot have one of the next step.
"""
WITH_BOTH: tuple[Kills, Kills] = ({7: ["backward-0"]}, {13: ["forward-0"]})
VALIDATION: tuple[Kills, Kills] = ({0: ["sanity-0"], 13: ["validation-0"]}, {6: ["validation-0"]})
BETWEEN: tuple[Kills, Kills] = (
    {2: ["on_train_batch_end-0"], 6: ["on_validation_start-0"], 13: ["on_train_end-0"]},
    {4: ["on_train_batch_end-0"], 8: ["on_train_batch_end-0"], 13: ["on_validation_batch_start-0"]},
)

SAVING: tuple[Kills, Kills] = (
    {0: ["sanity-0"], 2: ["state_dict-0"], 5: ["on_save_checkpoint-0"], 13: ["on_save_checkpoint-0"]},
    {6: ["on_save_checkpoint-0"]},
)
"""The first replica writes; the other one has passed on or waits."""
EVALUATION: tuple[Kills, Kills] = (
    {6: ["on_validation_batch_end-0"], 13: ["on_validation_batch_end-0"]},
    {6: ["on_validation_end-0"], 13: ["on_validation_batch_end-0"]},
)
TEARDOWN: tuple[Kills, Kills] = ({13: ["at-end-0"]}, {5: ["backward-0"]})

PARTS: dict[str, Any] = {"net": Divided, "replicas": 1, "parts": 2}
PARAMETERS: dict[str, Any] = {"zero_stage": 3}

CASES: dict[str, Case] = {
    "gpipe": ({"accumulate_grad_batches": 1}, [(({}, {}), 1), (STEPS, 1), (THIRD, 3)]),
    "1f1b": ({"schedule": "1f1b"}, [(STEPS, 1), (THIRD, 3)]),
    "saving": ({"accumulate_grad_batches": 1}, [(SAVING, 1), (SAVING, 4)]),
    "quiet": ({"net": Net}, [(QUIET, 1)]),
    "validation": ({}, [(VALIDATION, 1), (VALIDATION, 4)]),
    "teardown": ({}, [(TEARDOWN, 1)]),
    "divided": (
        {"accumulate_grad_batches": 1, "options": {"zero_stage": 1}},
        [(STEPS, 1), (BETWEEN, 3)],
    ),
    "keeps output": ({"net": KeepsOutput, "accumulate_grad_batches": 1}, [(ODD_STEPS, 1), (WITH_BOTH, 3)]),
    "evaluation": ({"net": Evaluating}, [(EVALUATION, 4)]),
    "verified-evaluation": (
        {"net": Evaluating, "options": {"recovery": Recovery(MAX_RESTARTS, verify_every_n_steps=1)}},
        [(EVALUATION, 1)],
    ),
    "verified": (
        {
            "accumulate_grad_batches": 1,
            "options": {"zero_stage": 1, "recovery": Recovery(MAX_RESTARTS, verify_every_n_steps=2)},
        },
        [(STEPS, 1)],
    ),
    "verified, saving": (
        {
            "accumulate_grad_batches": 1,
            "options": {"zero_stage": 1, "recovery": Recovery(MAX_RESTARTS, verify_every_n_steps=1)},
        },
        [(SAVING, 1), (TEARDOWN, 1)],
    ),
    "reduced": (
        {"net": Kept, "accumulate_grad_batches": 1, "options": {"zero_stage": 2}},
        [(STEPS, 1), (BETWEEN, 3)],
    ),
    "reduced, verified": (
        {
            "schedule": "1f1b",
            "options": {"zero_stage": 2, "recovery": Recovery(MAX_RESTARTS, verify_every_n_steps=2)},
        },
        [(STEPS, 1)],
    ),
    "parts": ({**PARTS, "accumulate_grad_batches": 1}, [(STEPS, 1)]),
    "parts, between": ({**PARTS, "accumulate_grad_batches": 1}, [(BETWEEN, 3)]),
    "parts, 1f1b": ({**PARTS, "schedule": "1f1b"}, [(STEPS, 1), (THIRD, 3)]),
    "parts, saving": ({**PARTS, "accumulate_grad_batches": 1}, [(SAVING, 1), (SAVING, 4), (TEARDOWN, 1)]),
    "parts, evaluation": ({**PARTS, "net": DividedEvaluating}, [(EVALUATION, 4)]),
    "parts, verified": (
        {**PARTS, "options": {"recovery": Recovery(MAX_RESTARTS, verify_every_n_steps=2)}},
        [(STEPS, 1)],
    ),
    "parts, verified evaluation": (
        {
            **PARTS,
            "net": DividedEvaluating,
            "options": {"recovery": Recovery(MAX_RESTARTS, verify_every_n_steps=1)},
        },
        [(EVALUATION, 1)],
    ),
    "parts and replicas, evaluation": (
        {
            "net": DividedEvaluating,
            "parts": 2,
            "options": {"recovery": Recovery(MAX_RESTARTS, 4, verify_every_n_steps=2)},
        },
        [(EVALUATION, 4)],
    ),
    "parts and replicas": ({"net": Divided, "parts": 2, "schedule": "1f1b"}, [(STEPS, 1), (VALIDATION, 2)]),
    "parameters": ({"accumulate_grad_batches": 1, "options": PARAMETERS}, [(STEPS, 1)]),
    "parameters, between": ({"accumulate_grad_batches": 1, "options": PARAMETERS}, [(BETWEEN, 3)]),
    "parameters, saving": (
        {"accumulate_grad_batches": 1, "options": PARAMETERS},
        [(SAVING, 1), (SAVING, 4), (TEARDOWN, 1)],
    ),
    "parameters, evaluation": ({"net": EvaluatingAlike, "options": PARAMETERS}, [(EVALUATION, 4)]),
    "parameters, verified": (
        {
            "schedule": "1f1b",
            "options": {**PARAMETERS, "recovery": Recovery(MAX_RESTARTS, verify_every_n_steps=2)},
        },
        [(STEPS, 1)],
    ),
    "between": ({"accumulate_grad_batches": 1}, [(BETWEEN, 1), (BETWEEN, 4)]),
}

LAUNCHED: dict[str, Case] = {
    name: (
        {"accumulate_grad_batches": 1, **options},
        [(({3: ["backward-0"], 9: ["forward-0"]}, {8: ["step-0"], 9: ["forward-0"]}), 1)],
    )
    for name, options in {"launched": {"options": {"zero_stage": 1}}, "launched, parts": PARTS}.items()
}
"""Fits of ranks of torchrun and SLURM."""

FOUND: dict[str, Any] = {"recovery": Recovery(verify_every_n_steps=1)}
ENDS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "error": (Ending, {"replicas": 2}),
    "driver": (Killed, {"replicas": 2}),
    "kept output": (KeepsOutput, {"replicas": 2, "options": FOUND}),
    "faulty part": (Faulty, {"parts": 2, "options": FOUND}),
    "faulty replica": (Faulty, {"replicas": 2, "options": FOUND}),
    "faulty replica, parameters": (Faulty, {"replicas": 2, "options": {**FOUND, "zero_stage": 3}}),
}
"""Fits that end by an error."""


EVALUATIONS: dict[str, dict[str, Any]] = {
    "evaluations": {"net": Net, "data_parallel_size": 2},
    "evaluations, parts": {"net": Divided, "tensor_parallel_size": 2},
}
"""``validate``, ``test`` and ``predict``, in each of which each pipeline loses its worker twice."""


def main(folder: Path, name: str) -> None:
    rank = int(os.environ.get("SLURM_LOCALID") or os.environ.get("LOCAL_RANK", "0"))
    if {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"} & {
        *os.environ
    }:  # a rank for each stage; those that divide a stage follow each other
        rank = rank % 2 if "parts" in name else rank // STAGES
    place = folder / f"pipeline-{rank}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    if name in ENDS:
        net, settings = ENDS[name]
        fit({}, 1, net=net, stages=STAGES, accumulate_grad_batches=1, **settings)
    if name in EVALUATIONS:
        settings = {**EVALUATIONS[name], "balance": [5, 7], "pipelines": 2, "max_restarts": 4}
        found = evaluate(is_disturbed=True, **settings)
        differing = differences(found, evaluate(is_disturbed=False, **settings))
        (folder / str(rank)).write_bytes(pickle.dumps((differing, found["repairs"])))
        return
    options, cases = {**CASES, **LAUNCHED}[name]
    if issubclass(options.get("net", Net), Evaluating):
        recovery.MOST_LOGGED_BYTES = LIMIT_BYTES
    settings = {"net": ReplicaNet, "stages": STAGES, "replicas": REPLICAS, **options}
    repaired = [fit(kills[rank % 2], every_n_steps, **settings) for kills, every_n_steps in cases]
    settings["options"] = {name: each for name, each in settings.get("options", {}).items() if name != "recovery"}
    expected = fit({}, 0, **settings)  # last: whether ranks of torchrun replace workers is decided by the first fit
    answers = [(differences(found, expected), found["repairs"]) for found in repaired]
    (folder / str(rank)).write_bytes(pickle.dumps(answers))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
