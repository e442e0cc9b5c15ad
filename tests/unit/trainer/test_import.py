"""A module of the user's that has the name of one of Relay's packages, beside the script."""

import subprocess
import sys
from pathlib import Path

from paths import ROOT


def test_a_users_own_strategies(tmp_path: Path) -> None:
    own = tmp_path / "strategies" / "__init__.py"
    own.parent.mkdir()
    own.write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import trainer"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"Relay's package strategies, but Python has found {own}. Rename" in ended.stderr
    assert "the command relay" in ended.stderr
