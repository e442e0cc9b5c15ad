"""Imports, from an installation alone, every module that the source tree has: `import_all.py INSTALLED SOURCE`."""

import importlib
import sys
from pathlib import Path

installed, source = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
sys.path.insert(0, str(installed))
paths = [
    path.relative_to(source) for package in ("trainer", "strategies") for path in source.glob(f"{package}/**/*.py")
]
for path in paths:
    if path.stem == "__main__":
        assert (installed / path).is_file(), f"{path} is not installed"
        continue
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    assert Path(module.__file__).is_relative_to(installed), f"{path} is not installed: {module.__file__} was imported"
print(f"{len(paths)} modules installed and importable")
