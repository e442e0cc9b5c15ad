"""Imports every module that the source tree has from an installation alone, and looks for the command ``relay`` there.

``import_all.py INSTALLED SOURCE``
"""

import importlib
import importlib.util
import sys
from importlib.metadata import distributions
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
    if path.name == "ray.py" and importlib.util.find_spec("ray") is None:  # an extra
        continue
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    assert Path(module.__file__).is_relative_to(installed), f"{path} is not installed: {module.__file__} was imported"
(distribution,) = distributions(name="relay-trainer", path=[str(installed)])
(command,) = distribution.entry_points.select(group="console_scripts", name="relay")
assert command.load() is importlib.import_module("trainer.cli").main
assert (installed / "bin" / "relay").is_file(), "the command relay is not installed"
print(f"{len(paths)} modules installed and importable")
