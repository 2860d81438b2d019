"""From the groups of runs to a predictor and a report."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from tests.factories import difficulty_problem
from trl_dataeff.cli.main import main
from trl_dataeff.difficulty import offline
from trl_dataeff.difficulty.loading import load_predictor
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.tracking.group_table import SCHEMA
from trl_dataeff.utils import UserError


N = 200
E, P = difficulty_problem(N)


@pytest.fixture
def embedded(monkeypatch) -> list:
    """Embeddings without a model; what was embedded, by which model."""
    calls: list = []

    def embed_dataset(dataset, embedding):
        if embedding == "absent":
            raise UserError("The model 'absent' cannot be loaded.")
        calls.append((dataset["prompt"][:2], embedding))
        return E.half().numpy()

    module = types.ModuleType("trl_dataeff.difficulty.embedding")
    module.embed_dataset = embed_dataset
    monkeypatch.setitem(sys.modules, "trl_dataeff.difficulty.embedding", module)
    return calls


def groups(path, steps: int = 40, seed: int = 0, invert: bool = False, per_step: int = 16) -> str:
    """A run's groups; some have no success rate, and some no prompt id."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([rng.choice(N, per_step, replace=False) for _ in range(steps)])
    rates = rng.binomial(8, np.clip(P.numpy()[ids], 0.02, 0.98)) / 8
    table = {name: [None] * len(ids) for name in SCHEMA.names}
    table["step"] = np.repeat(np.arange(steps), per_step)
    table["success_rate"] = [None if i % 50 == 3 else float(1 - r if invert else r) for i, r in enumerate(rates)]
    table["prompt_id"] = np.where(np.arange(len(ids)) % 50 == 7, -1, ids)
    pq.write_table(pa.table(table, schema=SCHEMA), path)
    return str(path)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Arguments of a command in an empty folder with a dataset and a run."""
    monkeypatch.chdir(tmp_path)
    Dataset.from_dict({"question": [f"q{i}" for i in range(N)]}).to_json("data.jsonl")
    files = [groups(tmp_path / "a.parquet")]
    return lambda *more, kind="logistic", runs=files: [
        *("fit-predictor", "--groups", *runs, "--dataset", "data.jsonl", "--prompt_column", "question"),
        *("--embedding", "some/model", "--output", "out", "--kind", kind, *more),
    ]


def rows(text: str) -> dict[str, list[float]]:
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    return {cells[0].strip(): [float(cell) for cell in cells[1:]] for cells in table}


@pytest.mark.parametrize("kind", ["logistic", "attention"])
def test_from_groups_to_a_predictor(kind, command, embedded, monkeypatch, capsys):
    monkeypatch.setattr(offline, "EPOCHS", 2)
    assert main(command(kind=kind)) == 0
    text = capsys.readouterr().out
    assert embedded == [(["q0", "q1"], "some/model")]
    report = Path("out/report.md").read_text()
    assert report in text
    quality = rows(report)
    assert list(quality) == [kind, "mean", "nearest neighbours"]
    assert quality[kind][0] > 0.7
    assert quality[kind][1] < quality["mean"][1]
    assert np.isnan(quality["mean"][0])
    predictor = load_predictor("out")
    assert predictor.embedding == "some/model"
    assert np.corrcoef(predictor.predict(E), P)[0, 1] > 0.7
    assert RollingDifficulty(E, predictor).refresh(0).shape == (N,)


def test_the_seed_decides(command, embedded, monkeypatch):
    monkeypatch.setattr(offline, "EPOCHS", 1)
    predictions = []
    for seed in ("3", "3", "4"):
        assert main(command("--force", "--seed", seed, kind="attention")) == 0
        predictions.append(load_predictor("out").predict(E))
    assert torch.equal(predictions[0], predictions[1])
    assert not torch.equal(predictions[0], predictions[2])


def test_groups_are_predicted_from_their_own_run_and_nearby_steps(tmp_path):
    """Two runs in which the same prompts have opposite success rates: together they would say nothing."""
    runs = [groups(tmp_path / "a.parquet", 60), groups(tmp_path / "b.parquet", 60, seed=1, invert=True)]
    slices = offline.read_slices(runs, N)
    assert len(slices) == 4
    assert all(len(np.unique(piece.prompt_ids)) == len(piece.prompt_ids) for piece in slices)
    _, quality = offline.fit_offline("logistic", E, slices, seed=0)
    assert quality[0].pearson > 0.7
    nearest = quality[2]
    assert nearest.name == "nearest neighbours"
    assert nearest.pearson > 0.3


def test_slices_are_in_the_order_of_steps_and_keep_the_newest_group(tmp_path):
    table = pa.table({"step": [2, 0, 1, 1], "prompt_id": [5, 5, 6, 7], "success_rate": [1.0, 0.0, 0.5, None]})
    pq.write_table(table, tmp_path / "g.parquet")
    (piece,) = offline._slices_of(tmp_path / "g.parquet", 10)
    assert piece.prompt_ids.tolist() == [6, 5]
    assert piece.rates.tolist() == [0.5, 1.0]


def test_held_out_prompts_take_no_part(monkeypatch):
    """What the held-out groups of a slice are predicted from does not contain them, whatever their success rate is."""
    ids = np.arange(N)
    held_out = ids % 5 == 0
    seen = []

    def predict(references, p, queries):
        seen.append((references, queries))
        return np.full(len(queries), float(p.mean()))

    offline.measure("x", predict, [offline.Slice(ids, P.numpy())], held_out)
    ((references, queries),) = seen
    assert held_out[queries].all()
    assert not held_out[references].any()
    changed = [offline.Slice(ids, np.where(held_out, 1 - P.numpy(), P.numpy()))]
    monkeypatch.setattr(offline, "EPOCHS", 1)
    for fit in (offline._fit_logistic, offline._fit_attention):
        results = []
        for slices in ([offline.Slice(ids, P.numpy())], changed):
            fitted = fit(E, slices, held_out, np.random.default_rng(0), 0)
            results.append(fitted.predict(ids[~held_out], P[~held_out], ids[held_out]))
        np.testing.assert_array_equal(*results)


def test_nearest_neighbours_by_hand():
    angles = torch.linspace(0, 1.5, 30)
    points = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.rand(30, 1).add(0.5)
    p = torch.arange(29) / 28
    got = offline.nearest_neighbours(points, np.arange(29), p, np.array([29, 0]))
    np.testing.assert_allclose(got, [p[19:].mean(), p[:10].mean()], rtol=1e-6)


def write_parquet(**columns):
    pq.write_table(pa.table(columns), "bad.parquet")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: None, "There is no file bad.parquet"),
        (lambda: Path("bad.parquet").write_text("no"), "bad.parquet is not a parquet file"),
        (lambda: write_parquet(step=[1], prompt_id=[2]), "has the columns step, prompt_id, and lacks success_rate"),
        (lambda: write_parquet(step=[1], prompt_id=[N], success_rate=[0.5]), f"prompt {N}, and the dataset has {N}"),
        (lambda: write_parquet(step=[1], prompt_id=[0], success_rate=[1.5]), "success rates lie in [0, 1]"),
        (lambda: write_parquet(step=[1], prompt_id=[0], success_rate=[0.5]), "1 prompts with a known success rate"),
    ],
)
def test_wrong_groups_are_refused(make, says, command, embedded, capsys):
    make()
    assert main(command(runs=["bad.parquet"])) == 2
    assert says in capsys.readouterr().err


def test_other_mistakes(command, embedded, tmp_path, capsys):
    for more, says in [
        (("--embedding", "absent"), "cannot be loaded"),
        (("--embedding", "policy"), "There is no policy here"),
        (("--prompt_column", "missing"), "`prompt_column` is 'missing'"),
        (("--dataset_split", "test"), "has no split `test`; it has `train`. Name one of them as `dataset_split`"),
        (("--output", f"{__file__}/out"), "is a file, not a folder"),
        (("--seed", "-1"), "`--seed` is -1; it takes an integer >= 0"),
        (("--dataset", "gone.jsonl"), "does not exist"),
    ]:
        assert main(command(*more)) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    assert main(command()) == 2
    assert "exists already" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["fit-predictor", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "--groups FILE" in text
    assert "dataeff/groups.parquet" in text
    assert main(["--help"]) == 0
    assert "fit-predictor" in capsys.readouterr().out
