"""`trl-dataeff simulate`, from the command line to the advice."""

from __future__ import annotations

import io
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from trl_dataeff.analysis.simulate import Outcome
from trl_dataeff.cli.main import main
from trl_dataeff.cli.simulate_log import shares_of_log
from trl_dataeff.cli.simulate_report import CAVEAT, report
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.tracking.group_table import SCHEMA


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SMALL = ["--prompts", "300", "--max_steps", "25", "--seeds", "1"]


def table(text: str) -> dict[str, list[str]]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows[2:]}


def log(path, rates, extra_rows: int = 5, completions=None) -> str:
    """A run's log: each prompt twice, all right the second time; some rows without a prompt id or a success rate."""
    n = len(rates)
    columns = {name: [None] * (2 * n + 2 * extra_rows) for name in SCHEMA.names}
    columns["step"] = [0] * n + [9] * (n + 2 * extra_rows)
    columns["prompt_id"] = [*range(n), *range(n), *[-1] * extra_rows, *range(n, n + extra_rows)]
    columns["success_rate"] = [*rates, *[1.0] * n, *[1.0] * extra_rows, *[None] * extra_rows]
    if completions is not None:
        columns["completions"][:n] = completions
    pq.write_table(pa.table(columns, schema=SCHEMA), path)
    return str(path)


def test_it_says_what_a_run_would_save_and_how(capsys):
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.6", "--seconds_per_rollout", "3"]) == 0
    text = capsys.readouterr().out
    rows = table(text)
    assert rows["uniform"][:3] == ["25", f"{25 * 16 * 8:,}", "1.00"]
    assert rows["uniform"][6] == "2.7 h"  # 25 x 128 rollouts of 3 s
    assert "% of the time" in text
    assert float(rows["default"][2]) < 0.6
    times = [float(row[7]) for row in rows.values() if row[7] != "-"]
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
    assert len(table(text)["uniform"]) == 6
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


def test_a_stopped_group_counts_as_the_completions_that_it_has(tmp_path):
    """Of prompts with a success rate of 0.2, two in five have no success in 4 completions; in 8, one in six."""
    rng = np.random.default_rng(0)
    halves = rng.binomial(4, 0.2, 3000)
    stopped = halves == 0
    successes = halves + rng.binomial(4, 0.2, 3000) * ~stopped
    trials = np.where(stopped, 4, 8)
    shares = shares_of_log(log(tmp_path / "groups.parquet", successes / trials, completions=trials), 8)
    assert shares.dead < 0.05
    assert 0.15 < shares.rates[0] < shares.rates[1] < 0.3


def test_a_log_without_mixed_groups_is_taken_for_what_it_says(tmp_path, capsys):
    path = log(tmp_path / "groups.parquet", [0.0] * 40)
    assert main(["simulate", *SMALL, "--groups", path]) == 2
    assert "is learnable" in capsys.readouterr().err


def test_the_log_of_a_run_that_chose_its_prompts_is_refused(tmp_path, capsys):
    path = log(tmp_path / "groups.parquet", [0.5] * 40)
    rows = pq.read_table(path)
    predicted = rows.set_column(
        rows.column_names.index("predicted"), "predicted", pa.array([0.4] * len(rows), pa.float32())
    )
    pq.write_table(predicted, path)
    assert main(["simulate", *SMALL, "--groups", path]) == 2
    assert "with predictions, which mostly chose its prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "`--prompts`, `--easy`, `--dead` are missing"),
        (["--prompts", "99", "--easy", "0.8", "--dead", "0.8"], "together at most 1"),
        (["--prompts", "10", "--easy", "0.1", "--dead", "0.1"], "A step takes 16 prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "replay_fractoin=0.2"], "Did you mean `replay_fraction`"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "num_generations=4"], "decides which prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "learning_rate=1e-5"], "decides which prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "replay_clip=proximal"], "decides which prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "replay_max_movement=0.1"], "decides which prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "advantage_baseline=tracked"], "decides which prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "history_from=out"], "decides which prompts"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--max_steps", "9", "--try", "dots_predictor=nowhere"], "There is no predictor 'nowhere'"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--seconds_per_step", "3"], "needs `--seconds_per_rollout`"),
        (["--prompts", "99", "--easy", "0", "--dead", "1"], "None of 99 prompts is learnable"),
        (["--prompts", "99", "--easy", "1", "--dead", "0"], "None of 99 prompts is learnable: all are easy (solved already) or dead"),
        (["--prompts", "99", "--easy", "0", "--dead", "0.97", "--max_steps", "1"], "learns next to nothing"),
        (["--prompts", "99", "--groups", "x.parquet", "--success_rates", "0.1", "0.2"], "estimated from `--groups`"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "replay_fraction=high"], "it takes a number"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "replay_fraction=1.5"], "`replay_fraction` is 1.5"),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "selection=grso"], "`--try selection=grso`: "),
        (["--prompts", "99", "--easy", "0.1", "--dead", "0.1", "--try", "history_half_lives=[4,-16],exploration=0"], "`history_half_lives` is [4, -16]; it takes a list of numbers > 0"),
        (["--prompts", "99", "--groups", "absent.parquet"], "`--groups absent.parquet` does not exist: there is no such file. A run writes it to `<output_dir>/dataeff"),
        (["--prompts", "99", "--groups", "."], "`--groups .` is a folder"),
        (["--prompts", "99", "--groups", __file__], "cannot be read as a parquet file"),
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


@pytest.mark.parametrize("solved", [0.0, 1.0])
def test_a_pool_without_a_learnable_prompt_gets_no_table_and_no_advice(tmp_path, capsys, solved):
    path = log(tmp_path / "groups.parquet", [solved] * 40)
    assert main(["simulate", *SMALL, "--groups", path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is learnable" in captured.err
    assert "nan" not in captured.err


def test_a_parquet_file_of_something_else_is_described_in_a_line(tmp_path, capsys):
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({f"column_{i}": [1] for i in range(30)} | {"prompt_id": [1]}), path)
    assert main(["simulate", *SMALL, "--groups", str(path)]) == 2
    error = capsys.readouterr().err
    assert "it lacks `success_rate`, `predicted`, and has `column_0`, " in error
    assert "and 25 more. A run writes it to" in error
    assert len(error.splitlines()) == 1
    assert len(error) < 500


def test_columns_of_another_type_are_described_in_a_line(tmp_path, capsys):
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"prompt_id": [1], "success_rate": ["high"], "predicted": [None]}), path)
    assert main(["simulate", *SMALL, "--groups", str(path)]) == 2
    error = capsys.readouterr().err
    assert "is not the groups.parquet of a run (" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("text", ["replay_fraction", "replay_fraction=", "exploration=0,replay_fraction"])
def test_a_field_without_a_value_is_told_what_it_takes(text, capsys):
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.1", "--try", text]) == 2
    error = capsys.readouterr().err
    assert (
        "`replay_fraction` has no value; write `replay_fraction=VALUE`. It takes a number, and is 0.5 by default"
        in error
    )
    assert "Did you mean" not in error


def test_a_value_that_is_no_yaml_is_a_users_mistake(capsys):
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.1", "--try", "replay_fraction=[1"]) == 2
    assert "cannot be read as YAML" in capsys.readouterr().err


def test_the_default_predictability_is_the_papers_and_a_range_stands_beside_it(capsys):
    given = ["simulate", *SMALL, "--seeds", "2", "--easy", "0.2", "--dead", "0.5"]
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "Predictability 0.6; rollouts/uniform also at 0.3 and 0.9." in text
    ratios = {name: [float(cell) for cell in row[2:5]] for name, row in table(text).items() if "never" not in row[2:5]}
    for name in ("default", "dots"):
        middle, low, high = ratios[name]
        assert high < min(middle, low), (
            name
        )  # those may be alike: selection that gains little gives way to uniform sampling
    for name in ("uniform", "greso"):  # they predict nothing
        assert len(set(ratios[name])) == 1
    assert re.search(r"about \d+% of the rollouts \(\d+% at predictability 0.3, \d+% at predictability 0.9\)", text)
    # The benchmark that relates it to a run's own metric says so of the default
    scale = (Path(__file__).parents[2] / "benchmarks" / "results" / "simulate_scale.txt").read_text()
    assert 0.70 <= float(re.search(r"^\| 0\.6 \| (0\.\d+) \|$", scale, re.MULTILINE).group(1)) <= 0.78


def test_a_predictability_of_ones_own_is_taken_alone(capsys):
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.6", "--predictability", "0.9"]) == 0
    text = capsys.readouterr().out
    assert "Predictability 0.9.\n" in text
    assert len(table(text)["default"]) == 4
    assert "at predictability" not in text


def test_advice_that_hangs_on_predictability_says_so():
    def outcome(ratio):
        return Outcome(10, 1000 * ratio, 1000 * ratio, 0.5, ratio, 0.8)

    args = SimpleNamespace(
        groups_per_step=16, num_generations=8, max_steps=25, seeds=1, seconds_per_rollout=None, predictability=None
    )
    outcomes = {"uniform": outcome(1.0), "greso": outcome(0.8), "dots": outcome(0.6)}
    settings = {"uniform": {}, "greso": {"selection": "greso"}, "dots": {"selection": "dots"}}
    never = replace(outcome(1.0), rollouts=math.inf, seconds=math.inf, ratio=math.inf)
    text = report(args, "Prompts", outcomes, settings, {0.3: {"dots": never}, 0.9: {"dots": outcome(0.5)}})
    assert "Take 'dots': about 60% of the rollouts (never at predictability 0.3, 50% at predictability 0.9)." in text
    assert "At predictability 0.3 that would be 'greso'." in text
    assert "At predictability 0.9 that" not in text
    assert table(text)["dots"][2:5] == ["0.60", "never", "0.50"]


def test_it_says_that_its_constants_come_from_one_small_model(capsys):
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.6", "--predictability", "0.6"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(CAVEAT)
    assert "one small model" in CAVEAT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_on_stderr_that_reaches_its_end(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", Terminal())
    assert main(["simulate", *SMALL, "--easy", "0.1", "--dead", "0.6"]) == 0
    shown = sys.stderr.getvalue()
    assert "uniform, seed 0" in shown
    shares = [int(share) for share in re.findall(r"(\d+)%\|", shown)]
    assert shares == sorted(shares)
    assert shares[0] < 10
    assert max(shares) > 80
    assert "seed" not in capsys.readouterr().out


def test_without_a_terminal_only_what_takes_minutes_says_where_it_is(monkeypatch, capsys):
    given = ["simulate", *SMALL, "--easy", "0.1", "--dead", "0.6", "--predictability", "0.9"]
    assert main(given) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("trl_dataeff.cli.simulate.LARGE", 1)
    assert main(given) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "  run 1 of 7: uniform, seed 0"
    assert len(lines) == 7


def test_the_page_has_the_measured_relation_of_predictability_and_the_runs_own_metric():
    root = Path(__file__).parents[2]
    row = re.compile(r"^\| (0\.\d+) \| (0\.\d+) \|$", re.MULTILINE)
    measured = row.findall((root / "benchmarks" / "results" / "simulate_scale.txt").read_text())
    assert len(measured) == 6
    assert row.findall((root / "docs" / "simulate.md").read_text()) == measured


@pytest.mark.slow
def test_the_example_of_the_page_prints_what_the_page_shows(capsys):
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    command = re.search(r"^trl-dataeff (simulate .*?)\n```", page, re.DOTALL | re.MULTILINE).group(1)
    assert main(command.replace("\\\n", " ").split()) == 0
    assert capsys.readouterr().out.strip() in page
