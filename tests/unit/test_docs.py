"""Links, references to code and the picture of the rooms in README, CONTRIBUTING and docs match what exists."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
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
    broken = [link for link, _ in _LINK.findall(text) if not (page.parent / link).exists()]
    for file, name in _REFERENCE.findall(text):
        if not (ROOT / file).is_file():
            broken.append(file)
        elif name and name not in names_in(ROOT / file):
            broken.append(f"{file}:{name}")
    for test in re.findall(r"`(test_[\w*]+\.py)`", text):
        broken += [] if list((ROOT / "tests").glob(f"*/**/{test}")) else [test]
    assert not broken


def test_the_table_of_parity_names_every_test_of_parity() -> None:
    named = re.findall(r"`(test_[\w*]+\.py)`", (ROOT / "docs/parity.md").read_text())
    files = [path.name for path in (ROOT / "tests/integration/parity").rglob("test_*.py")]
    assert not [file for file in files if not any(fnmatch(file, name) for name in named)]


def test_records_are_listed_and_exist_wherever_they_are_named() -> None:
    records = {path.name[:3]: path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert len(records) == len(list((ROOT / "docs/decisions").glob("[0-9]*.md"))), "a number is used twice"
    index = (ROOT / "docs/decisions/README.md").read_text()
    assert re.findall(r"^\| (\d{3}) \| \[.*?\]\((\S+?)\)", index, re.MULTILINE) == sorted(records.items())
    named = re.compile(r"decisions/(\d{3})[\w-]*\.md|\b[Rr]ecords? \[?(\d{3})\b")
    files = [
        *PAGES,
        *(file for room in ("strategies", "trainer", "tests", "benchmarks") for file in ROOT.glob(f"{room}/**/*.py")),
    ]
    numbers = {(file, page or text) for file in files for page, text in named.findall(file.read_text())}
    assert not [(file, number) for file, number in numbers if number not in records]


def test_options_are_those_of_the_docstrings() -> None:
    program = [sys.executable, str(ROOT / ".ci" / "options_page.py"), "--check"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(listed) == sorted(pages | {"decisions/README.md"})


@pytest.mark.parametrize("package", ["trainer", "strategies", "strategies.pipeline"])
def test_the_page_on_the_api_has_every_public_name(package: str) -> None:
    listed = re.findall(
        rf"^::: {re.escape(package)}\.(?:[\w.]+\.)?(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE
    )
    assert set(import_module(package).__all__) <= set(listed)


def test_the_version_is_the_same_everywhere() -> None:
    versions = [
        re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
        for file, pattern in {"pyproject.toml": r'^version = "(.*)"$', "CITATION.cff": "^version: (.*)$"}.items()
    ]
    assert all(versions) and len({version[1] for version in versions if version}) == 1
    assert versions[0] and f"## [{versions[0][1]}]" in (ROOT / "CHANGELOG.md").read_text()


def packages() -> set[str]:
    """Paths of all packages, such as ``strategies/pipeline/stage``."""
    found = [path.parent for room in ("strategies", "trainer") for path in ROOT.glob(f"{room}/**/__init__.py")]
    return {str(path.relative_to(ROOT)) for path in found}


def rooms_of_picture() -> list[tuple[str, int]]:
    """Each package that the picture in ``docs/architecture.md`` names, from top to bottom, with its layer's number."""
    picture = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms\n")[1].split("```")[1]
    found: list[tuple[str, int]] = []
    parents: list[str] = []  # the room itself and those around it, by indentation
    layer = 0
    for line in picture.splitlines():
        layer += line.startswith((" ─", " ═"))
        if room := re.match(r" ( *)(\w+)/ ", line):
            parents[len(room[1]) // 2 :] = [room[2]]
            found.append(("/".join(parents), layer))
    return found


def test_picture_of_the_rooms() -> None:
    rooms = rooms_of_picture()
    assert {room for room, _ in rooms} == packages()
    assert len(rooms) == len(packages())


def test_picture_has_the_layers_that_make_check_checks() -> None:
    layer_of = {room.replace("/", "."): layer for room, layer in rooms_of_picture()}
    contracts = re.findall(
        r'type = "layers"\n(?:containers = \["(.*)"\]\n)?layers = (\[[^]]*\])', (ROOT / "pyproject.toml").read_text()
    )
    assert contracts
    for container, layers in contracts:
        drawn = []  # the numbers of each layer's rooms; modules are not in the picture
        for names in ast.literal_eval(layers):
            rooms = [f"{container}.{name}".strip(".") for name in re.split(r" *[|:] *", names)]
            drawn += [{layer_of[room] for room in rooms if room in layer_of}]
        numbers = [layer.pop() for layer in drawn if layer]
        assert not any(drawn), "rooms of one layer stand between the same two lines"
        assert numbers == sorted(set(numbers)), "layers stand in the order of the contract"
