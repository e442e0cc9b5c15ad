"""A pipeline's checkpoint in parts: every stage writes and reads its own, at the same time as the others.

            driver ──── shelve ───▶ every stage sets its tensors aside, in order with its other commands
(thread of) driver ──── write ────▶ every stage writes them, beside its other commands; the driver its own
(thread of) driver: meta.pt, which makes it a checkpoint
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from strategies.checkpoint import shards
from strategies.common.trees import flat, layouts
from strategies.optim.restricted import parameters_of, part_of
from strategies.pipeline.driver import Pipeline

_NUMBER = 0
"""Place on the shelf; one checkpoint is under way at a time."""


def tensors_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """What of a checkpoint is in parts, by flat names."""
    return flat({part: checkpoint[part] for part in shards.PARTS if part in checkpoint})


def shelve(
    checkpoint: Mapping[str, Any], pipeline: Pipeline | None, path: str, *, copies: bool
) -> list[dict[str, str]]:
    """Has every stage set aside what it will write, and returns when all have.

    Args:
        checkpoint: What is to be saved; tensors on the ``meta`` device are those of other stages.
        pipeline: Where they are; may be left out if there are none.
        path: Of the pipelined module within the model.
        copies: Whether training goes on before they are written.

    Returns:
        For each stage the names that it writes, and those that the tensors have there.
    """
    if pipeline is None:
        return []
    names: list[dict[str, str]] = [{} for _ in pipeline.remotes]
    firsts: dict[int, str] = {}
    for name, tensor in tensors_of(checkpoint).items():
        if tensor.is_meta:
            first = firsts.setdefault(id(tensor), name.replace(f"state_dict.{path}.", "state_dict.", 1))
            names[_stage_of(first, pipeline)][name] = first
    answers = [
        remote.start("shelve", _NUMBER, own, copies) for remote, own in zip(pipeline.remotes, names, strict=True)
    ]
    for remote, answer in zip(pipeline.remotes, answers, strict=True):
        remote.result(answer)
    return names


def _stage_of(name: str, pipeline: Pipeline) -> int:
    """The stage that holds a tensor: a tied one is its owner's, which is the first that uses it."""
    part, place, *rest = name.split(".")
    if part == "state_dict":
        return next(i for i, layers in enumerate(pipeline.stages) if place in layers._modules)
    number = int(rest[1])
    return next(i for i, own in enumerate(pipeline.optimizers.numbers) if number in own[int(place)])


def save(checkpoint: Mapping[str, Any], path: Path, pipeline: Pipeline | None, names: list[dict[str, str]]) -> None:
    """Writes what has been shelved, and what is here."""
    tensors, remotes = tensors_of(checkpoint), pipeline.remotes if pipeline is not None else []
    own = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}

    def write_all(directory: Path, plans: list[Any]) -> list[Any]:
        replies = [
            remote.beside(shards.write_of, _NUMBER, directory, plan)
            for remote, plan in zip(remotes, plans, strict=False)
        ]
        try:
            mine = shards.write(directory, plans[-1], own)
        finally:
            errors = [error for reply in replies if (error := _error_of(reply)) is not None]
        if errors:
            raise errors[0]
        return [*(reply.value() for reply in replies), mine]

    plans = [shards.plan({name: tensors[name] for name in theirs}) for theirs in names]
    shards.save(path, checkpoint, [*plans, shards.plan(own)], write_all)


def load_optimizer_states(states: list[dict[str, Any]], directory: Path, pipeline: Pipeline) -> None:
    """Gives each stage the optimizer states of its parameters, which it reads itself.

    Args:
        states: Those of all optimizers, without values.
        directory: Where the values are.
        pipeline: Whose.

    Nothing is loaded before everything has been read.
    """
    optimizers, prefix = pipeline.optimizers, "optimizer_states"

    def part(numbers: Callable[[int], list[int]]) -> dict[int, Any]:
        return {k: {"state": part_of(state["state"], numbers(k))} for k, state in enumerate(states)}

    replies = [
        remote.beside(shards.read_of, _NUMBER, directory, layouts(part(numbers.__getitem__)), prefix)
        for remote, numbers in zip(pipeline.remotes, optimizers.numbers, strict=True)
    ]
    here = [[n for n, p in enumerate(parameters_of(own)) if not p.is_meta] for own in optimizers.optimizers]
    mine = part(here.__getitem__)
    mine = shards.replaced(mine, shards.fill(directory, flat(mine, prefix)), prefix)
    for reply in replies:
        reply.wait()
    for remote in pipeline.remotes:
        remote.start("load_shelved_optimizer_states", _NUMBER)
    for k, optimizer in enumerate(optimizers.optimizers):
        optimizers.load_here(optimizer, {**states[k], **mine[k]})
    pipeline.wait()


def _error_of(reply: Any) -> Exception | None:
    try:
        reply.wait()
    except Exception as error:  # of any kind: that of the function, or of RPC where its process has gone
        return error
    return None
