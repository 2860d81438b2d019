"""Files are written completely or not at all."""

import pytest

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
