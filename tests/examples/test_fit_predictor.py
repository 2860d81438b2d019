"""`examples/fit_predictor.py` goes from the groups of runs to a predictor that is better than their mean."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

import trl_dataeff.difficulty.embedding
from tests.factories.groups import difficulty_problem
from trl_dataeff.difficulty import load_predictor
from trl_dataeff.tracking.groups import SCHEMA


SCRIPT = Path(__file__).parents[2] / "examples" / "fit_predictor.py"
N = 200
E, P = difficulty_problem(N)


def save_groups(path: Path, steps: int = 40, seed: int = 0, invert: bool = False) -> str:
    """A run's groups, 16 a step; some have no success rate, and some no prompt id."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([rng.choice(N, 16, replace=False) for _ in range(steps)])
    rates = rng.binomial(8, np.clip(P.numpy()[ids], 0.02, 0.98)) / 8
    table: dict = {name: [None] * len(ids) for name in SCHEMA.names}
    table["step"] = np.repeat(np.arange(steps), 16)
    table["success_rate"] = [None if i % 50 == 3 else float(1 - r if invert else r) for i, r in enumerate(rates)]
    table["prompt_id"] = np.where(np.arange(len(ids)) % 50 == 7, -1, ids)
    pq.write_table(pa.table(table, schema=SCHEMA), path)
    return str(path)


@pytest.mark.parametrize("kind", ["logistic", "attention"])
def test_from_groups_to_a_predictor(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trl_dataeff.difficulty.embedding, "embed_dataset", lambda dataset, model: E.half().numpy())
    Dataset.from_dict({"question": [f"q{i}" for i in range(N)]}).to_json("data.jsonl")
    options = [
        "--dataset",
        "data.jsonl",
        "--prompt_column",
        "question",
        "--embedding",
        "some/model",
        "--output",
        "out",
    ]
    options += ["--groups", save_groups(tmp_path / "a.parquet"), "--kind", kind]
    monkeypatch.setattr(sys, "argv", ["fit_predictor.py", *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert kind in capsys.readouterr().out
    predictor = load_predictor("out")
    assert '"embedding": "some/model"' in Path("out", "config.json").read_text()
    assert np.corrcoef(predictor.predict(E), P)[0, 1] > 0.7


def test_groups_are_predicted_from_their_own_run(tmp_path):
    """Two runs in which the same prompts have opposite success rates: together they would say nothing."""
    script = runpy.run_path(str(SCRIPT), run_name="example")
    runs = [save_groups(tmp_path / "a.parquet", 60), save_groups(tmp_path / "b.parquet", 60, seed=1, invert=True)]
    slices = script["read_slices"](runs, N)
    assert all(len(np.unique(piece.prompt_ids)) == len(piece.prompt_ids) for piece in slices)
    _, quality = script["fit_offline"]("logistic", E, slices, seed=0)
    fitted, mean, nearest = quality
    assert fitted.pearson > 0.7
    assert fitted.mean_absolute_error < mean.mean_absolute_error
    assert nearest.pearson > 0.3
