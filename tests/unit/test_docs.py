"""Links and references to code in README, CONTRIBUTING and docs lead to something that exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md"), *ROOT.glob("benchmarks/*.md")]
)
_LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_REFERENCE = re.compile(r"`((?:strategies|trainer|benchmarks|tests|examples)/[\w/]+\.py)(?::([\w.]+))?`")


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and their members, module-level assignments."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        found |= _names_of(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _names_of(inner)}
    return frozenset(found)


def _names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {node.target.id} if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_references(page: Path) -> None:
    text = page.read_text()
    is_record = page.parent.name == "decisions" and page.name[0].isdigit()  # tells of the code as it was
    broken = [link for link, _ in _LINK.findall(text) if not (page.parent / link).exists()]
    for file, name in _REFERENCE.findall(text) if not is_record else ():
        if not (ROOT / file).is_file():
            broken.append(file)
        elif name and name not in names_in(ROOT / file):
            broken.append(f"{file}:{name}")
    assert not broken
