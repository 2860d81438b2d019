"""Files are written completely or not at all."""

from types import SimpleNamespace

import pytest

from trl_dataeff.checkpoint import files
from trl_dataeff.checkpoint.files import write_atomically


def test_a_failed_write_leaves_the_former_file(tmp_path):
    path = tmp_path / "folder" / "file"
    write_atomically(path, lambda temporary: temporary.write_text("first"))

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, fail)
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_windows_cannot_open_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(files.os, "open", lambda *args: pytest.fail("a folder was opened"))
    write_atomically(tmp_path / "file", lambda temporary: temporary.write_text("text"))
    assert (tmp_path / "file").read_text() == "text"
