"""Run a ``Pipe`` whose partitions are all in this process. All micro-batches form one autograd graph.

    cycle          0    1    2    3          m.i: micro-batch m in partition i
    partition 0   0.0  1.0  2.0
    partition 1        0.1  1.1  2.1         one thread; GPUs overlap because their kernels are launched ahead

Everything that works with a plain ``nn.Sequential`` works here: ``retain_graph``, ``torch.autograd.grad``, parameter
hooks, and ``DistributedDataParallel``, which sees the gradient of each parameter once per backward pass, even with
recomputation.

Index letters: ``m`` micro-batch, ``i`` partition.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from strategies.common.random_seeds import preserved_random_state
from strategies.common.torch_compat import tree_flatten, tree_map_only, tree_unflatten
from strategies.pipeline.pipe.with_device import Partition
from strategies.pipeline.schedule.tables import num_recomputed
from strategies.pipeline.stage.calling import call_partition
from strategies.pipeline.stage.layers import KeptState, Layers, ReusedInput
from strategies.pipeline.stage.microbatch.chunks import has_tensor
from strategies.pipeline.stage.microbatch.split import pack_objects, unpack_objects
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.skip import SkipKey, skips_of


class LocalEngine:
    """Runs the partitions.

    Args:
        partitions: All partitions, each on a device of this process.
        deferred_batch_norm: Update running statistics once per pass instead of once per micro-batch.
    """

    def __init__(self, partitions: Sequence[Partition], *, deferred_batch_norm: bool) -> None:
        self._partitions = [
            _LocalPartition(partition, partition.describe(i), deferred_batch_norm)
            for i, partition in enumerate(partitions)
        ]

    def run(self, parts: Sequence[Any], this: Pass) -> list[Any]:
        """Run the pass on the inputs of the micro-batches, and return their outputs."""
        values: list[Any] = list(parts)
        if len(parts) > 1:  # an in-place change by a layer must not change other micro-batches
            values = [unpack_objects(pack_objects(part, torch.clone)) for part in parts]
        if len(parts) > 1 or torch.is_grad_enabled():
            values = tree_map_only(Tensor, torch.clone, values)
        skips: list[dict[SkipKey, Tensor | None]] = [{} for _ in parts]
        num_again = num_recomputed(this.checkpoint, this.microbatches)
        for m, i in clock_cycles(len(parts), len(self._partitions)):
            values[m] = self._partitions[i].run(values[m], skips[m], m, this, is_recomputed=m < num_again)
            if m == len(parts) - 1:
                self._partitions[i].end_forward()
        return values


def clock_cycles(microbatches: int, partitions: int) -> Iterator[tuple[int, int]]:
    """Yield ``(m, i)`` in the order of the timetable above, cycle by cycle."""
    for cycle in range(microbatches + partitions - 1):
        for i in range(max(0, cycle - microbatches + 1), min(cycle + 1, partitions)):
            yield cycle - i, i


def check_output(value: Any, description: str) -> None:
    """Check the output of a partition.

    Raises:
        TypeError: If it contains no tensor.
    """
    if not has_tensor(value if isinstance(value, tuple | list) else (value,)):
        raise TypeError(
            f"{description} returned {type(value).__name__} without a tensor; a partition returns at least one"
        )


class _LocalPartition:
    def __init__(self, partition: Partition, description: str, deferred_batch_norm: bool) -> None:
        self._description, self._device = description, partition.place.device
        self._layers = Layers(
            partition.layers,
            partition.layers.spans[0].start,
            self._device,
            deferred_batch_norm=deferred_batch_norm,
            call=call_partition,
            adds_in_place=False,  # there is only one autograd graph
        )
        self._popped = skips_of(partition.layers)[1]
        self._reused_input = ReusedInput(self._layers.description)

    def end_forward(self) -> None:
        self._layers.end_forward()

    def run(self, value: Any, skips: dict[SkipKey, Tensor | None], m: int, this: Pass, *, is_recomputed: bool) -> Any:
        """Run the layers on a micro-batch. Removes popped skips from ``skips`` and adds stashed skips."""
        if m == 0:
            self._layers.begin_pass()
        carried = _on(self._device, (value, {key: skips.pop(key) for key in self._popped if key in skips}))
        run = self._run_recomputed if is_recomputed else self._run_once
        output, stashed = run(carried, m, this)
        check_output(output, self._description)
        skips.update(stashed)
        return output

    def _run_once(
        self, carried: Any, m: int, this: Pass, *, checkpointing: bool = False, recomputing: bool = False
    ) -> Any:
        with preserved_random_state(self._device):
            grad = torch.is_grad_enabled()
            return self._layers.run(
                carried,
                m,
                this.seed,
                this.context,
                grad=grad,
                checkpointing=checkpointing,
                recomputing=recomputing,
            )

    def _run_recomputed(self, carried: Any, m: int, this: Pass) -> Any:
        state: KeptState | None = None
        leaves, spec = tree_flatten(pack_objects(carried))
        del carried

        def run(*leaves: Any) -> Any:
            nonlocal state
            again = state is not None
            x = tree_unflatten(list(leaves), spec)
            around = self._layers.kept() if state is None else self._layers.restored(state)
            with around as state, self._reused_input.lent(x, state) as own:
                y = pack_objects(
                    self._run_once(unpack_objects(own), m, this, checkpointing=not again, recomputing=again)
                )
            return unpack_objects(tree_map_only(Tensor, _Recomputed.apply, y))

        with set_checkpoint_early_stop(False):
            return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=False)


class _Recomputed(torch.autograd.Function):
    """The identity. It saves a tensor for the backward pass, so that torch also recomputes layers that save nothing."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output.new_empty(0))
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors
        return grads[0]


def _on(device: torch.device, value: Any) -> Any:
    def moved(tensor: Tensor) -> Tensor:
        # Nothing would wait for a non-blocking copy to the host. A copy from pinned memory could read later writes.
        between_gpus = device.type == tensor.device.type == "cuda"
        return tensor.to(device, non_blocking=between_gpus)

    return tree_map_only(Tensor, moved, value)
