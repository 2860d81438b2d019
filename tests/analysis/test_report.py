"""The report of runs whose files are not as they should be: something is shown, and the rest is said, without a traceback."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.factories import RUNS
from trl_dataeff.analysis.report import make_page, summary
from trl_dataeff.tracking.recorded import read_run


def with_columns(name, **made):
    def damage(folder):
        table = pq.read_table(folder / name)
        for column, make in made.items():
            table = table.set_column(table.column_names.index(column), column, make(len(table)))
        pq.write_table(table, folder / name)

    return damage


def with_lines(**made):
    def damage(folder):
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) | made for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return damage


def with_about(**made):
    return lambda folder: (folder / "run.json").write_text(json.dumps(made))


GROUPS, PROMPTS = "groups.parquet", "prompts.parquet"
DAMAGES = {
    "rates are NaN": with_columns(GROUPS, success_rate=lambda n: pa.array(np.full(n, np.nan))),
    "rates are null": with_columns(GROUPS, success_rate=lambda n: pa.nulls(n, pa.float32())),
    "predictions are text": with_columns(GROUPS, predicted=lambda n: pa.array(["x"] * n)),
    "predictions are out of range": with_columns(GROUPS, predicted=lambda n: pa.array(np.linspace(-9, 9, n))),
    "ids are text": with_columns(GROUPS, prompt_id=lambda n: pa.array([f"p{i}" for i in range(n)])),
    "steps are null": with_columns(GROUPS, step=lambda n: pa.nulls(n, pa.int32())),
    "steps are huge": with_columns(GROUPS, step=lambda n: pa.array([2**62] * n)),
    "kinds are unknown": with_columns(GROUPS, kind=lambda n: pa.array(["good"] * n)),
    "prompts are null": with_columns(PROMPTS, prompt=lambda n: pa.nulls(n, pa.string())),
    "prompts are repeated": with_columns(PROMPTS, prompt_id=lambda n: pa.array([0] * n)),
    "prompts are numbers": with_columns(PROMPTS, prompt=lambda n: pa.array(range(n))),
    "logs are texts": with_lines(reward="high", rollouts="many", seconds={}, eval_reward=[1]),
    "logs are huge": with_lines(reward=10**400, rollouts=10**300, step=10**30),
    "logs are not finite": with_lines(reward=float("nan"), rollouts=float("inf")),
    "settings are of other types": with_about(arguments=[1], settings="x", dataset=5, started=3, resumed=7, changed=None),
    "settings are no numbers": with_about(
        arguments={"num_generations": "eight", "replay_fraction": "x"}, dataset={"size": "many"}, changed=["seed"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_runs(tmp_path, damage):
    folder = shutil.copytree(RUNS / "dots-0", tmp_path / "run")
    damage(folder / "dataeff")
    run = read_run(folder)
    text = "\n".join(summary(run))
    assert "Run run" in text
    assert "nan" not in text
    page = make_page(run)
    assert page.plots or page.missing


def test_tiles_agree_with_the_figure():
    page = make_page(read_run(RUNS / "dots-0"))
    (reward,) = (value for value, label in page.tiles if label == "reward in training")
    (figure,) = (plot for plot in page.plots if plot.name == "progress-rollouts")
    assert f"training {reward.replace(' → ', ' to ')}" in figure.title
