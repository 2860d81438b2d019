"""The command, from arguments to files."""

import pytest
import torch

import trl_dataeff
from benchmarks.lab import cli, pretrain, studies
from benchmarks.lab.store import read_rows, read_runs
from tests.benchmarks.lab.conftest import TINY


@pytest.fixture
def tiny_start(monkeypatch, start):
    monkeypatch.setattr(pretrain, "StartRecipe", lambda: TINY)
    return start


@pytest.mark.usefixtures("tiny_bounds")
def test_run_and_its_table(tiny_start, tmp_path, capsys):
    arguments = ["run", "--methods", "uniform", "oracle", "--seeds", "0", "--steps", "1"]
    arguments += ["--workers", "0", "--cache", str(tiny_start.parent), "--out", str(tmp_path)]
    cli.main(arguments)
    assert "| plain GRPO, learnable prompts " in capsys.readouterr().out
    path = tmp_path / "results.jsonl"
    rows = read_rows(path)
    assert [(row["method"], row["step"]) for row in rows] == [
        ("uniform", 0),
        ("uniform", 1),
        ("oracle", 0),
        ("oracle", 1),
    ]
    for row in rows:
        assert row["torch"] == torch.__version__
        assert row["trl_dataeff"] == trl_dataeff.__version__
        assert row.keys() >= {"commit", "trl", "transformers"}
    cli.main([*arguments, "--fresh"])
    assert len(path.read_text().splitlines()) == 4, "a file only grows"
    assert len(read_runs(path)) == 2


@pytest.mark.usefixtures("tiny_bounds")
def test_a_study_goes_on_from_its_file(tiny_start, tmp_path, capsys, monkeypatch):
    short = {"steps": 1, "prompts": 4, "group_size": 4}
    part = studies.Part(("first",), (0, 1), dict.fromkeys(("uniform", "oracle"), short))
    monkeypatch.setitem(studies.STUDIES, "small", (part,))
    options = ["--cache", str(tiny_start.parent), "--out", str(tmp_path), "--workers", "0"]
    cli.main(["study", "small", "--methods", "uniform", "--seeds", "1", *options])
    assert "1 runs, 0" in capsys.readouterr().out
    first_line = (tmp_path / "small.jsonl").read_text()
    cli.main(["study", "small", *options])
    assert "4 runs, 1" in capsys.readouterr().out
    rows = read_rows(tmp_path / "small.jsonl")
    expected = {("uniform", 0), ("uniform", 1), ("oracle", 0), ("oracle", 1)}
    assert {(row["method"], row["seed"]) for row in rows} == expected
    assert (tmp_path / "small.jsonl").read_text().startswith(first_line)
    for wrong in (["study", "large"], ["study", "small", "--methods", "dynamic"], ["study", "small", "--pools", "x"]):
        with pytest.raises(SystemExit, match=r"not (one of|in the study)"):
            cli.main([*wrong, *options])
