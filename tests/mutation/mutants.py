"""One-line mutants of a source file, made by cosmic-ray's operators, and a seeded draw among them."""

from __future__ import annotations

import ast
import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

Position = tuple[int, int]
"""Line and column in characters; lines count from 1, columns from 0."""


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Attributes:
        path: The source file, relative to the checkout.
        line: Number of the changed line.
        operator: Name of cosmic-ray's operator.
        occurrence: Which of the operator's positions in the file is changed.
        before: The line as it is.
        after: The line with the defect; empty if the operator removes it.
    """

    path: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """A short name that is the same in each run."""
        return hashlib.sha1(f"{self.path}:{self.line}:{self.before}:{self.after}".encode()).hexdigest()[:10]


def draw(root: Path, covered: Mapping[str, Sequence[int]], *, seed: int, count: int) -> list[Mutant]:
    """Draws mutants on different lines: first a covered line, then one of its mutants, each with the same probability.

    Args:
        root: The checkout.
        covered: The numbers of the covered lines of each source file, by its path relative to ``root``.
        seed: Seed of the random numbers.
        count: How many mutants.

    Raises:
        ValueError: If fewer covered lines than ``count`` have a mutant.
    """
    generator = random.Random(seed)
    lines = [(path, line) for path in sorted(covered) for line in sorted(covered[path])]
    generator.shuffle(lines)
    of_file: dict[str, dict[int, list[tuple[str, int]]]] = {}
    drawn: list[Mutant] = []
    for path, line in lines:
        source = (root / path).read_text()
        if path not in of_file:
            of_file[path] = places_by_line(source)
        places = list(of_file[path].get(line, []))
        generator.shuffle(places)
        mutants = (mutant_at(path, source, line, operator, occurrence) for operator, occurrence in places)
        if (mutant := next((m for m in mutants if m is not None), None)) is not None:
            drawn.append(mutant)
        if len(drawn) == count:
            return drawn
    raise ValueError(f"{count} mutants were wanted, but only {len(drawn)} covered lines have one")


def places_by_line(source: str) -> dict[int, list[tuple[str, int]]]:
    """The operators that can change one line of a source file, with the number of the occurrence, by line."""
    nodes = list(ast_nodes(get_ast(source)))
    excluded = list(excluded_ranges(source))
    places: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue  # it would have to be told which variable to replace
        operator = operator_class()
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (start, stop) in enumerate(positions):
            if not any(first <= start and stop <= last for first, last in excluded):
                places[start[0]].append((name, occurrence))
    return dict(places)


def mutant_at(path: str, source: str, line: int, operator: str, occurrence: int) -> Mutant | None:
    """The mutant, unless it changes other lines, changes nothing but spaces, or is no Python."""
    changed = mutate_code(source, get_operator(operator)(), occurrence)
    if changed is None:
        return None
    before, after = source.splitlines(), changed.splitlines()
    kept = len(before) - line
    if before[: line - 1] != after[: line - 1] or before[line:] != after[len(after) - kept :]:
        return None
    new = after[line - 1 : len(after) - kept]
    if len(new) > 1:
        return None
    try:
        tree, original = ast.parse(changed), ast.parse(source)
    except SyntaxError:
        return None
    if ast.dump(tree) == ast.dump(original) or _num_positional_only(tree) != _num_positional_only(original):
        return None  # cosmic-ray takes the `*` and `/` between parameters for operators
    return Mutant(path, line, operator, occurrence, before[line - 1], new[0] if new else "")


def _num_positional_only(tree: ast.Module) -> int:
    return sum(len(node.posonlyargs) for node in ast.walk(tree) if isinstance(node, ast.arguments))


def excluded_ranges(source: str) -> Iterator[tuple[Position, Position]]:
    """Where a defect would change only words or types: messages, annotations, ``__repr__``, code for type checkers.

    ``frozen=True`` of a dataclass is for readers, too: it refuses assignments, of which there are none.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield _range(source, node.exc)
        elif isinstance(node, ast.keyword) and node.arg == "frozen":
            yield _range(source, node.value)
        elif (
            isinstance(node, ast.JoinedStr)
            or (isinstance(node, ast.Call) and _name(node.func) in {"warn", "rank_zero_warn", "write", "print"})
            or (isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING")
        ):
            yield _range(source, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name in {"__repr__", "__str__", "extra_repr"}:
                yield _range(source, node)
            if any(_name(decorator) == "overload" for decorator in node.decorator_list):
                yield (node.decorator_list[0].lineno, 0), _range(source, node)[1]
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            annotations = [argument.annotation for argument in every if argument is not None]
            yield from (_range(source, annotation) for annotation in [*annotations, node.returns] if annotation)
        elif isinstance(node, ast.AnnAssign):
            yield _range(source, node.annotation)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _range(source: str, node: ast.stmt | ast.expr) -> tuple[Position, Position]:
    """Start and end in characters; ``ast`` counts columns in bytes of UTF-8."""
    lines = source.splitlines()

    def position(line: int, column: int) -> Position:
        return line, len(lines[line - 1].encode()[:column].decode(errors="ignore"))

    assert node.end_lineno is not None and node.end_col_offset is not None
    return position(node.lineno, node.col_offset), position(node.end_lineno, node.end_col_offset)
