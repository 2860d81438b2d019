"""The files of finished runs."""

import json

import pytest

from benchmarks.lab import studies
from benchmarks.lab.store import append_run, read_rows, read_runs


def rows_of_run(name: str, seed: int = 0, accuracy: float = 0.25) -> list[dict]:
    run = {
        "run": name,
        "pool": "first",
        "method": "uniform",
        "learning_rate": 1e-4,
        "seed": seed,
        "prompts": 16,
        "group_size": 8,
        "commit": "abc",
    }
    first = {**run, "step": 0, "accuracy_sampled": accuracy, "accuracy_by_kind": {"a": 0.1}, "replay_age": None}
    last = {**run, "step": 5, "accuracy_sampled": 2 * accuracy, "accuracy_by_kind": {"a": 1 / 3}, "replay_age": 1.0}
    return [first, last]


def test_rows_come_back_as_they_were(tmp_path):
    path = tmp_path / "new" / "runs.jsonl"
    assert read_runs(path) == {}
    append_run(path, rows_of_run("a"))
    append_run(path, rows_of_run("b"))
    assert read_runs(path) == {"a": rows_of_run("a"), "b": rows_of_run("b")}
    assert read_rows(path) == rows_of_run("a") + rows_of_run("b")
    first, _ = path.read_text().splitlines()
    assert json.loads(first)["evaluations"]["step"] == [0, 5]
    assert first.count("abc") == 1, "what is the same for a run is written once"


def test_a_column_without_values_is_left_out(tmp_path):
    path = tmp_path / "runs.jsonl"
    rows = [{**row, "replay_age": None} for row in rows_of_run("a")]
    append_run(path, rows)
    assert all("replay_age" not in row for row in read_rows(path))


def test_a_run_that_was_made_again_counts_once(tmp_path):
    path = tmp_path / "runs.jsonl"
    for name, accuracy in (("a", 0.1), ("b", 0.2), ("a", 0.3)):
        append_run(path, rows_of_run(name, accuracy=accuracy))
    runs = read_runs(path)
    assert list(runs) == ["a", "b"]
    assert runs["a"][0]["accuracy_sampled"] == 0.3


@pytest.mark.parametrize("kept", [1, 100, -1])
def test_half_a_line_of_a_killed_writer_is_no_run(tmp_path, kept):
    path = tmp_path / "runs.jsonl"
    append_run(path, rows_of_run("a"))
    whole = path.read_bytes()
    append_run(path, rows_of_run("b"))
    path.write_bytes(whole + path.read_bytes()[len(whole) :][:kept])
    assert list(read_runs(path)) == ["a"]
    append_run(path, rows_of_run("c"))
    assert list(read_runs(path)) == ["a", "c"]
    assert path.read_bytes().startswith(whole)


def test_a_damaged_line_before_the_last_is_an_error(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"run": "a", "evalu\n')
    append_run(path, rows_of_run("b"))
    with pytest.raises(json.JSONDecodeError):
        read_runs(path)


def test_runs_that_differ_in_settings_only_are_not_averaged(tmp_path, monkeypatch):
    path = tmp_path / "some.jsonl"
    monkeypatch.setattr(studies, "file_of", lambda study: path)
    append_run(path, rows_of_run("a", seed=1))
    append_run(path, rows_of_run("a, seed 2", seed=2))
    assert [curve.seed for curve in studies.runs_of_study("some")] == [1, 2]
    append_run(path, rows_of_run("a with other defaults", seed=1))
    with pytest.raises(ValueError, match="keep one of a and a with other defaults"):
        studies.runs_of_study("some")
