"""What a process has noted about itself, as other processes read it."""

from pathlib import Path

import pytest

from strategies.common.activity import ActivityFile, noted


def test_a_note_that_is_removed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a session removes the notes, and a thread may just ask how a worker of the session has ended."""
    note = tmp_path / "doing-0"
    ActivityFile(note).write("in F2")
    assert noted(note) == "in F2"
    note.unlink()
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as just before it was removed
    assert noted(note) == "while it started"
