"""The command, from arguments to files."""

from __future__ import annotations

import shutil

import pyarrow.parquet as pq
import pytest

from benchmarks.lab import cli, pretrain, studies
from benchmarks.lab.methods import METHODS, Method
from benchmarks.lab.store import read_rows
from tests.benchmarks.lab.tiny import TINY


@pytest.fixture
def tiny_start(monkeypatch, start):
    monkeypatch.setattr(pretrain, "StartRecipe", lambda: TINY)
    return start


@pytest.mark.usefixtures("tiny_bounds")
def test_run_and_report(tiny_start, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["run", "--methods", "uniform", "oracle", "--seeds", "0", "--steps", "1"]
    cli.main([*arguments, "--cache", str(tiny_start.parent), "--out", str(tmp_path)])
    assert "| oracle " in capsys.readouterr().out
    table = pq.read_table(tmp_path / "results.parquet")
    assert table.num_rows == 4
    assert b"python -m benchmarks.lab run --methods uniform oracle" in table.schema.metadata[b"command"]
    (tmp_path / "report.html").unlink()
    cli.main(["report", str(tmp_path / "results.parquet")])
    assert "<svg" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("tiny_bounds")
def test_a_study_goes_on_from_its_runs_and_its_table(tiny_start, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    short = {"steps": 1, "prompts": 4, "group_size": 4}
    monkeypatch.setitem(METHODS, "stranger", Method("x", trainer="not_installed_here:Trainer"))
    study = studies.Study("x", "first", dict.fromkeys(("uniform", "oracle", "stranger"), short), seeds=[0, 1])
    monkeypatch.setitem(studies.STUDIES, "small", study)
    table = tmp_path / "tables" / "small" / "results.parquet"
    places = ["--cache", str(tiny_start.parent), "--out", str(tmp_path / "runs"), "--tables", str(tmp_path / "tables")]
    cli.main(["study", "small", "--methods", "uniform", "--seeds", "1", *places])
    assert "1 runs, 0 of them finished" in capsys.readouterr().out
    cli.main(["study", "small", *places])
    text = capsys.readouterr().out
    assert "4 runs, 1 of them finished" in text
    assert "not_installed_here is not installed" in text
    rows = read_rows(table)
    assert {(row["method"], row["seed"]) for row in rows} == {(m, s) for m in ("uniform", "oracle") for s in (0, 1)}
    shutil.rmtree(tmp_path / "runs")  # what the table has is not run again
    cli.main(["study", "small", "--methods", "uniform", *places])
    assert "2 runs, 2 of them finished" in capsys.readouterr().out
    assert read_rows(table) == rows
    for wrong in (["study", "large"], ["study", "small", "--methods", "dots"], ["study", "small", "--pools", "x"]):
        with pytest.raises(SystemExit, match=r"not (one of|in the study)"):
            cli.main([*wrong, *places])
