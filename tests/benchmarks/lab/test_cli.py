"""The command, from arguments to files."""

import shutil

import pyarrow.parquet as pq
import pytest

from benchmarks.lab import cli, pretrain, studies
from benchmarks.lab.store import read_rows
from tests.benchmarks.lab.conftest import TINY


@pytest.fixture
def tiny_start(monkeypatch, start):
    monkeypatch.setattr(pretrain, "StartRecipe", lambda: TINY)
    return start


@pytest.mark.usefixtures("tiny_bounds")
def test_run_and_its_table(tiny_start, tmp_path, capsys):
    arguments = ["run", "--methods", "uniform", "oracle", "--seeds", "0", "--steps", "1"]
    cli.main([*arguments, "--workers", "0", "--cache", str(tiny_start.parent), "--out", str(tmp_path)])
    assert "| plain GRPO, learnable prompts " in capsys.readouterr().out
    table = pq.read_table(tmp_path / "results.parquet")
    assert table.num_rows == 4
    assert b"python -m benchmarks.lab run --methods uniform oracle" in table.schema.metadata[b"command"]


@pytest.mark.usefixtures("tiny_bounds")
def test_a_study_goes_on_from_its_runs_and_its_table(tiny_start, tmp_path, capsys, monkeypatch):
    short = {"steps": 1, "prompts": 4, "group_size": 4}
    part = studies.Part(("first",), (0, 1), dict.fromkeys(("uniform", "oracle"), short))
    monkeypatch.setitem(studies.STUDIES, "small", (part,))
    table = tmp_path / "tables" / "small" / "results.parquet"
    places = ["--cache", str(tiny_start.parent), "--out", str(tmp_path / "runs"), "--tables", str(tmp_path / "tables")]
    places += ["--workers", "0"]
    cli.main(["study", "small", "--methods", "uniform", "--seeds", "1", *places])
    assert "1 runs, 0" in capsys.readouterr().out
    cli.main(["study", "small", *places])
    assert "4 runs, 1" in capsys.readouterr().out
    rows = read_rows(table)
    assert {(row["method"], row["seed"]) for row in rows} == {(m, s) for m in ("uniform", "oracle") for s in (0, 1)}
    shutil.rmtree(tmp_path / "runs")  # what the table has is not run again
    cli.main(["study", "small", "--methods", "uniform", *places])
    assert "2 runs, 2" in capsys.readouterr().out
    assert read_rows(table) == rows
    for wrong in (["study", "large"], ["study", "small", "--methods", "dynamic"], ["study", "small", "--pools", "x"]):
        with pytest.raises(SystemExit, match=r"not (one of|in the study)"):
            cli.main([*wrong, *places])
