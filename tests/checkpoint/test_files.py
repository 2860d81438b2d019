"""Files are written completely or not at all."""

from types import SimpleNamespace

import pytest

from trl_dataeff.checkpoint import files
from trl_dataeff.checkpoint.files import write_atomically


def test_a_write_that_fails_leaves_the_former_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda p: p.write_text("old"))

    def fail(p):
        p.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_on_windows_no_folder_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(files.os, "open", lambda *args: pytest.fail("a folder was opened"))
    write_atomically(tmp_path / "file", lambda p: p.write_text("text"))
    assert (tmp_path / "file").read_text() == "text"
