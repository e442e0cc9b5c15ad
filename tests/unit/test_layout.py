"""Where things are: the test of a module is found by its name, or by the table here; no two classes have one name."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

TESTS = ROOT / "tests"

ELSEWHERE: dict[str, list[str]] = {
    "strategies/checkpoint/divided_rows.py": ["integration/data_parallel/test_zero.py"],
    "strategies/commands/declaration.py": [
        "unit/pipeline/control/test_stage_commands.py",
        "unit/remote/test_module_commands.py",
        "unit/commands/test_host.py",
    ],
    "strategies/common/autograd.py": [
        "unit/pipeline/stage/test_stage.py",
        "unit/pipeline/executor/test_per_microbatch.py",
        "unit/pipeline/optim/test_averaging.py",
    ],
    "strategies/common/initialisation.py": [
        "unit/sharding/test_model.py",
        "integration/models/test_configure_model.py",
    ],
    "strategies/common/names.py": ["unit/trainer/test_trainer.py", "integration/trainer/test_script_form.py"],
    "strategies/common/random_seeds.py": [
        "unit/pipeline/stage/test_python_generator.py",
        "unit/trainer/test_random_state.py",
    ],
    "strategies/common/torch_compat.py": ["unit/test_compat.py"],
    "strategies/common/trees.py": ["unit/pipeline/transport/test_nccl.py", "unit/pipeline/transport/test_simulated.py"],
    "strategies/common/waiting.py": [
        "unit/pipeline/transport/test_device.py",
        "unit/pipeline/transport/test_simulated.py",
    ],
    "strategies/checkpoint/consolidate.py": [
        "integration/checkpoint/test_checkpoint_sharded.py",
        "integration/replicas/test_security.py",
    ],
    "strategies/data_parallel/ddp.py": ["integration/data_parallel/test_ddp.py"],
    "strategies/data_parallel/dp.py": ["integration/data_parallel/test_dp.py"],
    "strategies/data_parallel/zero.py": ["integration/data_parallel/test_zero.py"],
    "strategies/launch/fork_server.py": [
        "integration/launch/test_fork_server.py",
        "integration/launch/test_first_fit.py",
    ],
    "strategies/launch/private_rpc.py": ["integration/pipe/test_pipe_rpc.py"],
    "strategies/launch/rank_supervisor.py": [
        "integration/launch/test_rank_supervisor.py",
        "faults/test_rank_recovery.py",
    ],
    "strategies/launch/ranks.py": [
        "integration/replicas/test_launch.py",
        "unit/launch/test_sessions_of_ranks.py",
        "unit/launch/test_world.py",
    ],
    "strategies/launch/workers.py": ["unit/test_rpc_sequential.py", "integration/launch/test_fork_server.py"],
    "strategies/lightning/compat.py": [
        "unit/test_compat.py",
        "unit/lightning/test_packages.py",
        "integration/trainer/test_import_lightning.py",
    ],
    "strategies/lightning/features/batch_norm.py": [
        "unit/test_rpc_sequential.py",
        "integration/parity/training/test_parity_batchnorm.py",
    ],
    "strategies/lightning/features/gradient_hooks.py": ["unit/test_rpc_sequential.py"],
    "strategies/lightning/features/layers/construction.py": ["integration/models/test_configure_model.py"],
    "strategies/lightning/features/layers/division.py": [
        "integration/parity/schedules/test_parity_auto.py",
        "integration/parity/schedules/test_parity_rebalance.py",
    ],
    "strategies/lightning/features/precision.py": [
        "unit/test_rpc_sequential.py",
        "integration/parity/training/test_parity_gradients.py",
    ],
    "strategies/lightning/features/recovery.py": ["integration/pipeline/test_recovery.py"],
    "strategies/lightning/features/pipelines/replicas.py": [
        "integration/replicas/test_replicas.py",
        "integration/replicas/test_replicas_features.py",
    ],
    "strategies/lightning/features/kept_seeds.py": ["integration/checkpoint/test_checkpoint_resume.py"],
    "strategies/lightning/launch/requeue.py": ["integration/launch/test_requeue.py"],
    "strategies/lightning/finding_blocks.py": ["unit/test_rpc_sequential.py", "unit/lightning/test_partitioning.py"],
    "strategies/lightning/model_copies.py": ["integration/parity/training/test_parity_weight_averaging.py"],
    "strategies/lightning/options.py": ["unit/test_rpc_sequential.py", "unit/lightning/test_arguments.py"],
    "strategies/lightning/run.py": ["unit/test_rpc_sequential.py"],
    "strategies/lightning/whole_batch.py": ["integration/parity/training/test_parity_steps.py"],
    "strategies/ray.py": ["integration/launch/test_ray.py"],
    "strategies/lightning/launch/loopback.py": ["integration/replicas/test_security.py", "faults/test_faults_ranks.py"],
    "strategies/lightning/launch/phases.py": ["faults/test_faults_ranks.py"],
    "strategies/lightning/launch/rank_launcher.py": ["integration/replicas/test_launch.py"],
    "strategies/lightning/launch/replicated_strategy.py": [
        "integration/replicas/test_replicas.py",
        "integration/replicas/test_replicas_features.py",
    ],
    "strategies/lightning/launch/script_launcher.py": [
        "faults/test_faults_ranks.py",
        "integration/replicas/test_replicas.py",
    ],
    "strategies/lightning/features/per_microbatch.py": [
        "unit/lightning/features/test_num_gradient_sets.py",
        "integration/parity/schedules/test_1f1b_outputs.py",
        "integration/parity/schedules/test_parity_1f1b.py",
    ],
    "strategies/lightning/features/profiler.py": ["integration/parity/trainer/test_parity_profilers.py"],
    "strategies/lightning/features/summary.py": ["integration/parity/trainer/test_summary.py"],
    "strategies/lightning/features/averages.py": ["integration/parity/training/test_parity_weight_averaging.py"],
    "strategies/optim/gradients.py": [
        "unit/optim/test_restricted.py",
        "integration/parity/training/test_parity_gradients.py",
    ],
    "strategies/optim/small_copies.py": ["unit/optim/test_trial.py", "unit/optim/test_costs.py"],
    "strategies/optim/trial_process.py": ["unit/optim/test_trial.py"],
    "strategies/pipeline/construction/initialise.py": ["integration/models/test_configure_model.py"],
    "strategies/pipeline/construction/recipe.py": ["unit/pipeline/construction/test_without_memory.py"],
    "strategies/pipeline/construction/stored.py": [
        "unit/checkpoint/test_references.py",
        "integration/models/test_configure_model.py",
    ],
    "strategies/pipeline/control/batch_recording.py": ["integration/pipeline/test_monitor.py"],
    "strategies/pipeline/control/commands.py": [
        "unit/pipeline/control/test_stage_commands.py",
        "integration/pipeline/test_typed_commands.py",
    ],
    "strategies/pipeline/control/operations.py": [
        "unit/pipeline/state/test_remote_operations.py",
        "unit/pipeline/state/test_stage_state.py",
    ],
    "strategies/pipeline/control/parts.py": ["unit/checkpoint/test_pipeline_checkpoint.py"],
    "strategies/pipeline/control/shelf.py": ["unit/checkpoint/test_pipeline_checkpoint.py"],
    "strategies/pipeline/driver.py": [
        "unit/pipeline/stage/test_stage.py",
        "integration/pipeline/test_pipeline_engine.py",
        "integration/pipeline/test_recovery.py",
    ],
    "strategies/pipeline/executor/executor.py": [
        "unit/pipeline/stage/test_stage.py",
        "integration/pipeline/test_pipeline_engine.py",
        "integration/parity/schedules/test_parity_schedules.py",
    ],
    "strategies/pipeline/executor/settings.py": [
        "unit/test_rpc_sequential.py",
        "unit/pipeline/schedule/test_program.py",
    ],
    "strategies/pipeline/optim/clipping.py": [
        "unit/test_rpc_sequential.py",
        "integration/parity/training/test_parity_gradients.py",
    ],
    "strategies/pipeline/optim/optimizers.py": [
        "integration/parity/training/test_parity_optimizers.py",
        "integration/parity/training/test_parity_steps.py",
    ],
    "strategies/pipeline/optim/replicas.py": [
        "unit/pipeline/optim/test_averaging.py",
        "integration/replicas/test_replicas.py",
        "faults/test_recovery_replicas.py",
    ],
    "strategies/pipeline/partition/blocks/calls.py": ["unit/pipeline/partition/blocks/test_deferred_blocks.py"],
    "strategies/pipeline/partition/blocks/expected.py": ["unit/pipeline/partition/blocks/test_deferred_blocks.py"],
    "strategies/pipeline/partition/blocks/output.py": ["unit/pipeline/partition/blocks/test_deferred_blocks.py"],
    "strategies/pipeline/partition/blocks/deferred_calls.py": [
        "unit/pipeline/partition/blocks/test_deferred_blocks.py"
    ],
    "strategies/pipeline/pipe/followed.py": ["integration/pipe/test_pipe_rpc.py"],
    "strategies/pipeline/pipe/rpc_partitions.py": ["integration/pipe/test_pipe_rpc.py"],
    "strategies/pipeline/pipe/with_device.py": ["integration/pipe/test_pipe_rpc.py", "unit/pipeline/pipe/test_pipe.py"],
    "strategies/pipeline/recovery/recovery.py": ["integration/pipeline/test_recovery.py"],
    "strategies/pipeline/schedule/operations.py": [
        "unit/pipeline/schedule/test_device_simulator.py",
        "unit/pipeline/schedule/test_posting.py",
    ],
    "strategies/pipeline/stage/batchnorm.py": [
        "unit/pipeline/stage/test_stage.py",
        "integration/parity/training/test_parity_batchnorm.py",
    ],
    "strategies/pipeline/stage/calling.py": ["unit/pipeline/pipe/test_pipe.py"],
    "strategies/pipeline/stage/edges.py": ["unit/pipeline/transport/test_device.py"],
    "strategies/pipeline/stage/microbatch/chunks.py": ["unit/pipeline/pipe/test_pipe.py"],
    "strategies/pipeline/stage/passes.py": ["unit/pipeline/stage/test_stage.py"],
    "strategies/pipeline/stage/action_recorder.py": ["integration/pipeline/test_monitor.py"],
    "strategies/pipeline/stage/records.py": ["unit/planning/test_measured.py", "integration/pipeline/test_monitor.py"],
    "strategies/pipeline/stage/side_outputs.py": ["integration/parity/values/test_side_outputs.py"],
    "strategies/pipeline/state/held.py": [
        "unit/pipeline/state/test_stage_state.py",
        "unit/checkpoint/test_pipeline_checkpoint.py",
    ],
    "strategies/pipeline/state/returning.py": [
        "integration/pipeline/test_pipeline_engine.py",
        "integration/parity/schedules/test_parity_rebalance.py",
    ],
    "strategies/pipeline/state/shelved.py": ["unit/checkpoint/test_pipeline_checkpoint.py"],
    "strategies/pipeline/state/state_dict.py": ["unit/checkpoint/test_pipeline_checkpoint.py"],
    "strategies/pipeline/transport/interface.py": [
        "unit/pipeline/worker/test_hosted.py",
        "unit/pipeline/state/test_stage_state.py",
    ],
    "strategies/pipeline/transport/storages.py": ["unit/pipeline/transport/test_slots.py"],
    "strategies/pipeline/worker/process.py": ["integration/launch/test_fork_server.py", "faults/test_faults.py"],
    "strategies/pipeline/worker/serve.py": ["integration/replicas/test_launch.py", "faults/test_rank_recovery.py"],
    "strategies/pipeline/worker/setup.py": ["unit/pipeline/worker/test_hosted.py"],
    "strategies/remote/client.py": ["integration/remote/test_remote_module.py"],
    "strategies/remote/commands.py": [
        "unit/remote/test_module_commands.py",
        "integration/remote/test_remote_module.py",
    ],
    "strategies/remote/host.py": ["unit/remote/test_module_commands.py", "integration/remote/test_remote_module.py"],
    "strategies/remote/module.py": ["integration/remote/test_remote_module.py"],
    "strategies/remote/optimizer.py": ["integration/remote/test_remote_module.py"],
    "strategies/sharding/bucket.py": [
        "unit/sharding/test_divided_optimizers.py",
        "integration/data_parallel/test_zero.py",
    ],
    "strategies/sharding/initialise.py": ["unit/sharding/test_model.py"],
    "strategies/sharding/optimizers.py": ["integration/data_parallel/test_zero.py"],
    "strategies/sharding/reducer.py": ["integration/data_parallel/test_zero.py"],
    "strategies/sharding/row_optimizers.py": ["integration/data_parallel/test_zero.py"],
    "strategies/sharding/rows.py": ["unit/sharding/test_division_by_rows.py"],
    "strategies/sharding/transfer.py": ["integration/data_parallel/test_zero.py"],
    "trainer/cli/command.py": ["unit/trainer/test_cli.py"],
    "trainer/cli/one_line_errors.py": ["unit/trainer/test_cli.py"],
    "trainer/cli/lightning_cli.py": ["unit/trainer/test_cli.py", "integration/trainer/test_import_lightning.py"],
    "trainer/cli/parser_messages.py": ["unit/trainer/test_cli.py"],
    "trainer/cli/model_class.py": ["unit/lightning/test_packages.py", "integration/trainer/test_import_lightning.py"],
    "trainer/cli/parser.py": ["unit/trainer/test_cli.py"],
    "trainer/cli/saved_config.py": ["unit/trainer/test_cli.py"],
    "trainer/monitor.py": ["unit/trainer/test_monitor_settings.py", "integration/pipeline/test_monitor.py"],
    "trainer/plan_report.py": ["unit/planning/test_plan.py"],
    "trainer/report/charts.py": ["unit/trainer/test_report.py"],
    "trainer/report/page.py": ["unit/trainer/test_report.py"],
    "trainer/report/run_folder.py": ["unit/trainer/test_report.py", "unit/trainer/test_monitor_settings.py"],
    "trainer/resume/combined_loader.py": ["unit/trainer/test_resume.py"],
    "trainer/resume/epoch_results.py": ["unit/trainer/test_resume.py"],
    "trainer/resume/loader.py": ["unit/trainer/test_resume.py", "unit/trainer/test_resume_corners.py"],
    "trainer/resume/loops.py": ["unit/trainer/test_resume.py", "unit/trainer/test_resume_corners.py"],
    "trainer/resume/replay.py": ["unit/trainer/test_resume.py", "unit/trainer/test_resume_corners.py"],
    "trainer/resume/sample_order.py": [
        "integration/checkpoint/test_resume_strategies.py",
        "unit/trainer/test_resume_corners.py",
    ],
    "trainer/resume/stateful_dataset.py": ["unit/trainer/test_resume.py", "unit/trainer/test_resume_corners.py"],
    "trainer/verification/certificate_report.py": [
        "unit/trainer/verification/test_verify_settings.py",
        "integration/trainer/test_verify.py",
    ],
    "trainer/verification/blocks.py": ["unit/trainer/verification/test_verify_settings.py"],
    "trainer/verification/launched_ranks.py": ["integration/trainer/test_verify.py"],
    "trainer/verification/process.py": [
        "unit/trainer/verification/test_certificate.py",
        "integration/trainer/test_verify.py",
    ],
    "trainer/verification/observed_run.py": [
        "unit/trainer/verification/test_compare.py",
        "integration/trainer/test_verify.py",
    ],
    "trainer/verification/observer.py": [
        "unit/trainer/verification/test_certificate.py",
        "integration/trainer/test_verify.py",
    ],
    "trainer/verification/runner.py": [
        "unit/trainer/verification/test_verify_settings.py",
        "integration/trainer/test_verify.py",
    ],
    "trainer/resume/worker_random_state.py": [
        "integration/trainer/test_resume_everywhere.py",
        "integration/checkpoint/test_resume_strategies.py",
    ],
}
"""Modules without a test file of the mirrored name, and the files, relative to ``tests/``, that test what they do."""


def mirrored(module: Path) -> list[Path]:
    """Return the names that the test file of a module may have, all relative to ``tests/``.

    The room ``strategies`` is left out; the files of the rooms of ``trainer`` may lie in ``unit/trainer`` itself.
    """
    test, rooms = f"test_{module.name}", module.parent.parts
    if rooms[0] == "strategies":
        return [Path("unit", *rooms[1:], test)]
    return [Path("unit", *rooms, test), Path("unit", "trainer", test)]


def modules() -> list[Path]:
    """Return the modules of both packages, relative to the root, without ``__init__`` and ``__main__``."""
    found = [path for package in ("strategies", "trainer") for path in (ROOT / package).rglob("*.py")]
    return sorted(path.relative_to(ROOT) for path in found if path.stem not in ("__init__", "__main__"))


def is_mirrored(module: Path) -> bool:
    return any((TESTS / file).is_file() for file in mirrored(module))


def classes_and_types(file: Path) -> Iterator[str]:
    """Yield the names of all classes in a file, and of its aliases of types, without leading underscores.

    An alias of a type is a variable of the module with a name like that of a class. Type variables do not count.
    """
    tree = ast.parse(file.read_text())
    yield from (node.name.lstrip("_") for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        target = (
            node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else 0
        )
        if isinstance(target, ast.Name) and "TypeVar" not in ast.unparse(node):
            name = target.id.lstrip("_")
            if name[:1].isupper() and not name.isupper():
                yield name


def test_no_two_classes_have_one_name() -> None:
    """Neither if one of them is private, nor if one of them is another name of a type."""
    files = [file for folder in ("strategies", "trainer") for file in (ROOT / folder).rglob("*.py")]
    names = Counter(name for file in files for name in classes_and_types(file))
    names["Trainer"] -= 1  # compat.py also gives Lightning's
    assert [name for name, number in names.items() if number > 1] == []


def test_every_module_has_a_test_file() -> None:
    lacking = [str(module) for module in modules() if not is_mirrored(module) and str(module) not in ELSEWHERE]
    assert not lacking, "write the test file of the mirrored name, or name in ELSEWHERE the files that test the module"


def test_no_entry_is_superfluous() -> None:
    assert not ELSEWHERE.keys() - {str(module) for module in modules()}, "these modules do not exist"
    assert not [module for module in ELSEWHERE if is_mirrored(Path(module))], "these have the mirrored test file"


def test_named_files_exist() -> None:
    missing = {file for files in ELSEWHERE.values() for file in files if not (TESTS / file).is_file()}
    assert not missing
    assert all(1 <= len(set(files)) == len(files) <= 3 for files in ELSEWHERE.values())
