"""`trl-dataeff simulate`, from the command line to the advice."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from trl_dataeff.cli.main import main
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.tracking.group_log import SCHEMA


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SMALL = ["--prompts", "300", "--max_steps", "25", "--seeds", "1"]


def table(text: str) -> dict[str, list[str]]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows[2:]}


def log(path, rates, extra_rows: int = 5) -> str:
    """A run's log: each prompt twice, all right the second time; some rows without a prompt id or a success rate."""
    n = len(rates)
    columns = {name: [None] * (2 * n + 2 * extra_rows) for name in SCHEMA.names}
    columns["step"] = [0] * n + [9] * (n + 2 * extra_rows)
    columns["prompt_id"] = [*range(n), *range(n), *[-1] * extra_rows, *range(n, n + extra_rows)]
    columns["success_rate"] = [*rates, *[1.0] * n, *[1.0] * extra_rows, *[None] * extra_rows]
    pq.write_table(pa.table(columns, schema=SCHEMA), path)
    return str(path)


def test_it_says_what_a_run_would_save_and_how(capsys):
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.6", "--seconds_per_rollout", "3"]) == 0
    text = capsys.readouterr().out
    rows = table(text)
    assert rows["uniform"][:3] == ["25", f"{25 * 16 * 8:,}", "1.00"]
    assert rows["uniform"][4] == "2.7 h"  # 25 x 128 rollouts of 3 s
    assert "% of the time" in text
    assert float(rows["default"][2]) < 0.6
    times = [float(row[5]) for row in rows.values() if row[5] != "-"]
    assert times == sorted(times)
    assert "Take 'default'" in text
    assert "Warning" not in text


def test_a_setting_of_ones_own_stands_beside_the_others_and_can_be_taken_into_a_recipe(capsys):
    tried = "replay_fraction=0.75,exploration=0"
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.6", "--try", tried]) == 0
    text = capsys.readouterr().out
    assert tried in table(text)
    assert f"Take {tried!r}" in text
    recipe = yaml.safe_load("".join(line + "\n" for line in text.splitlines() if line.startswith("    ")))
    assert recipe == {"replay_fraction": 0.75, "exploration": 0.0}
    assert set(recipe) <= set(DataEfficientGRPOConfig.__dataclass_fields__)


def test_time_is_left_out_where_it_is_not_known(capsys):
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.6"]) == 0
    text = capsys.readouterr().out
    assert len(table(text)["uniform"]) == 4
    assert " h " not in text
    assert "of the time" not in text


def test_it_says_when_the_plan_goes_on_long_after_everything_is_learned(capsys):
    given = ["--prompts", "300", "--max_steps", "60", "--seeds", "1", "--easy", "0.1", "--dead", "0.1", "--speed", "1"]
    assert main(["simulate", *given]) == 0
    assert "nearly everything is learned" in capsys.readouterr().out
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.6"]) == 0
    assert "nearly everything is learned" not in capsys.readouterr().out


def test_where_nothing_is_to_be_saved_it_says_so(capsys):
    # Nothing to select, and steps that cost so much more than rollouts that replay is no gain
    few = ["--easy", "0", "--dead", "0", "--success_rates", "0.4", "0.6", "--speed", "0.001"]
    costs = ["--seconds_per_rollout", "0.001", "--seconds_per_step", "100"]
    assert main(["simulate", *SMALL, *few, *costs]) == 0
    assert "Little is to be saved" in capsys.readouterr().out


def test_shares_come_from_the_log_of_a_run(tmp_path, capsys):
    rng = np.random.default_rng(0)
    rates = rng.binomial(8, rng.choice([0.0, 0.4, 1.0], 3000, p=[0.5, 0.3, 0.2])) / 8
    assert main(["simulate", *SMALL, "--groups", log(tmp_path / "groups.parquet", rates)]) == 0
    text = capsys.readouterr().out
    easy, dead = (int(share) for share in re.search(r"(\d+)% of them easy, (\d+)% dead", text).groups())
    assert easy == pytest.approx(20, abs=3)
    assert dead == pytest.approx(50, abs=3)
    low, high = (float(rate) for rate in re.search(r"rates of (0\.\d+) to (0\.\d+)", text).groups())
    assert 0.3 < low <= 0.45
    assert 0.35 < high < 0.5
    assert "the 3,000 in" in text


def test_a_log_says_how_many_completions_its_groups_had(tmp_path, capsys):
    rng = np.random.default_rng(0)
    rates = rng.binomial(4, rng.choice([0.0, 0.4, 1.0], 3000, p=[0.3, 0.5, 0.2])) / 4
    path = log(tmp_path / "groups.parquet", rates)
    assert main(["simulate", *SMALL, "--groups", path, "--logged_num_generations", "4"]) == 0
    dead = int(re.search(r"(\d+)% dead", capsys.readouterr().out).group(1))
    assert dead == pytest.approx(30, abs=6)
    assert main(["simulate", *SMALL, "--groups", path, "--logged_num_generations", "6"]) == 2
    assert "are not shares of 6 completions" in capsys.readouterr().err


def test_a_log_without_mixed_groups_is_taken_for_what_it_says(tmp_path, capsys):
    path = log(tmp_path / "groups.parquet", [0.0] * 40)
    assert main(["simulate", *SMALL, "--groups", path]) == 2
    assert "learns next to nothing" in capsys.readouterr().err


def test_the_log_of_a_run_that_chose_its_prompts_is_refused(tmp_path, capsys):
    path = log(tmp_path / "groups.parquet", [0.5] * 40)
    rows = pq.read_table(path)
    predicted = rows.set_column(
        rows.column_names.index("predicted"), "predicted", pa.array([0.4] * len(rows), pa.float32())
    )
    pq.write_table(predicted, path)
    assert main(["simulate", *SMALL, "--groups", path]) == 2
    assert "chose its prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "`--prompts`, `--easy`, `--dead` is missing"),
        (["--prompts", "99", "--easy", "0.8", "--dead", "0.8"], "together at most 1"),
        (["--prompts", "10", "--easy", "0.1", "--dead", "0.1"], "A step takes 16 prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "replay_fractoin=0.2"], "Did you mean `replay_fraction`"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "num_generations=4"], "decides which prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "learning_rate=1e-5"], "decides which prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "replay_clip=proximal"], "decides which prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--max_steps", "9", "--try", "dots_predictor=nowhere"], "There is no predictor 'nowhere'"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--seconds_per_step", "3"], "needs `--seconds_per_rollout`"),
        (["--prompts", "99", "--easy", "0", "--dead", "1"], "learns next to nothing"),
        (["--prompts", "99", "--groups", "x.parquet", "--success_rates", "0.1", "0.2"], "estimated from `--groups`"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "replay_fraction=high"], "it takes a number"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "replay_fraction=1.5"], "`replay_fraction` is 1.5"),
        (["--prompts", "99", "--groups", "absent.parquet"], "is not the groups.parquet of a run"),
        (["--prompts", "99", "--groups", "absent.parquet", "--easy", "0.1"], "estimated from `--groups`"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--num_generations", "1"], "`--num_generations` is 1"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--seeds", "0"], "`--seeds` is 0"),
    ],
)  # fmt: skip
def test_mistakes_are_said(given, says, capsys):
    assert main(["simulate", *given]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_a_log_of_few_prompts_is_refused(tmp_path, capsys):
    assert main(["simulate", *SMALL, "--groups", log(tmp_path / "groups.parquet", [0.5] * 8)]) == 2
    assert "groups of 8 prompts; at least 32" in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_of_the_page_prints_what_the_page_shows(capsys):
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    command = re.search(r"^trl-dataeff (simulate .*?)\n```", page, re.DOTALL | re.MULTILINE).group(1)
    assert main(command.replace("\\\n", " ").split()) == 0
    assert capsys.readouterr().out.strip() in page
