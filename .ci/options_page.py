"""Writes docs/options.md: the options of each strategy, from the docstring of its class.

``python .ci/options_page.py`` writes the page, and ``--check`` fails if the page differs. It reads the source and
imports nothing of Relay.
"""

import ast
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "options.md"

STRATEGIES = [  # heading, class, file
    ('Pipeline: `strategy="rpc_sequential"`', "RPCSequentialStrategy", "strategies/rpc_sequential.py"),
    ('ZeRO: `strategy="zero"`', "ZeROStrategy", "strategies/data_parallel/zero.py"),
    ('DDP: `strategy="ddp"`', "DDPStrategy", "strategies/data_parallel/ddp.py"),
    ('DataParallel: `strategy="dp"`', "DataParallelStrategy", "strategies/data_parallel/dp.py"),
]

DATACLASSES = [  # class, file
    ("Schedule", "strategies/lightning/options.py"),
    ("Rebalance", "strategies/lightning/options.py"),
    ("Recovery", "strategies/pipeline/recovery/repairs.py"),
]
"""Options of one theme, for an argument of the pipeline."""

HEAD = """# Options

<!-- Written by .ci/options_page.py from the docstrings of the strategies. Change those, then run it. -->

All options of each strategy, as arguments in Python or below `init_args` in YAML:

```python
trainer = Trainer(devices=2, strategy=RPCSequentialStrategy(microbatches=4, schedule="1f1b"))
```
```yaml
trainer:
  devices: 2
  strategy:
    class_path: strategies.RPCSequentialStrategy
    init_args:
      microbatches: 4
      schedule: 1f1b
```

A dataclass such as `Schedule("interleaved", chunks=2)` is a mapping in YAML:
`schedule: {name: interleaved, chunks: 2}`.
An option that would have no effect is an error. [Choose a strategy](choose_a_strategy.md) compares strategies and
schedules.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for heading, name, file in STRATEGIES:
        tree = ast.parse((ROOT / file).read_text())
        cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        options = _arguments(ast.get_docstring(cls) or "")
        assert {option for option, _ in options} == _names(cls), f"{name} documents the arguments that it has"
        parts.append(f"## {heading}\n")
        parts += [f"### `{option}`\n\n{_markdown(text)}\n" for option, text in options]
        if name == "RPCSequentialStrategy":
            parts += [_fields(*each) for each in DATACLASSES]
    return "\n".join(parts)


def _fields(name: str, file: str) -> str:
    """Return the section of a dataclass."""
    tree = ast.parse((ROOT / file).read_text())
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    docstring = ast.get_docstring(cls) or ""
    options = _arguments(docstring)
    targets = [node.target for node in cls.body if isinstance(node, ast.AnnAssign)]
    fields = {target.id for target in targets if isinstance(target, ast.Name)}
    assert {option for option, _ in options} == fields, f"{name} documents the fields that it has"
    entries = "".join(f"\n- `{option}`: " + _markdown(text).replace("\n", "\n  ") for option, text in options)
    return f"### `{name}(...)`\n\n{_markdown(docstring.partition(chr(10))[0])}\n{entries}\n"


def _names(cls: ast.ClassDef) -> set[str]:
    """Return the names of the arguments of the constructor."""
    arguments = next(node.args for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    names = {each.arg for each in (*arguments.args[1:], *arguments.kwonlyargs)}
    return names | ({f"**{arguments.kwarg.arg}"} if arguments.kwarg else set())


def _arguments(docstring: str) -> list[tuple[str, str]]:
    """Return name and text of each entry below ``Args:``."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    assert section, "a strategy documents its arguments"
    entries = re.split(r"^    (\*{0,2}\w+): ", section[1].rstrip(), flags=re.MULTILINE)[1:]
    return [
        (name, text.split("\n", 1)[0] + "\n" + inspect.cleandoc("\n" + "".join(text.split("\n", 1)[1:])))
        for name, text in zip(entries[::2], entries[1::2], strict=True)
    ]


def _markdown(text: str) -> str:
    """Turn the reStructuredText of a docstring into Markdown, with links to the pages that it names."""
    text = re.sub(r":\w+:`~?[\w.]*?(\w+)`", r"`\1`", text.strip()).replace("``", "`")
    text = re.sub(r"`docs/([\w/-]+\.md)`", lambda match: f"[{_title_of(match[1])}]({match[1]})", text)
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def _title_of(page: str) -> str:
    """Return the text of a link to a page: its heading, or the number of a record."""
    if page.startswith("decisions/"):
        return f"record {Path(page).name[:3]}"
    return (PAGE.parent / page).read_text().split("\n", 1)[0].removeprefix("# ")


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/options.md differs from the docstrings: run python .ci/options_page.py")
