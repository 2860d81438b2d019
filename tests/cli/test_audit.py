"""`trl-dataeff audit`, from files to what is printed; and `simulate --from-audit`."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import yaml

from tests.factories import RUNS
from tests.factories.rollouts import VISITS, completions, write_lines, write_tables
from trl_dataeff.cli.main import main
from trl_dataeff.config import DataEfficientGRPOConfig


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Rollouts of 60 prompts over 24 steps: two thirds are never solved, a sixth always, and a sixth more and more often."""
    rng, visits = np.random.default_rng(0), []
    for step in range(24):
        for prompt in range(10 * (step % 6), 10 * (step % 6) + 10):
            p = {0: 1.0, 1: 0.15 + 0.025 * step}.get(prompt % 6, 0.0)
            visits.append((step, str(prompt), "".join(str(int(rng.random() < p)) for _ in range(8))))
    rows = [row | {"completion": "abcd"} for row in completions(visits)]
    return write_lines(tmp_path_factory.mktemp("rollouts") / "log.jsonl.gz", rows), visits


def output(capsys, *argv) -> str:
    assert main(["audit", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_the_text(lines, capsys):
    path, visits = lines
    text = output(capsys, path, "--seconds-per-step", "90")
    zero = [len(set(digits)) == 1 for *_, digits in visits]
    assert f"{np.mean(zero):.0%} of the groups carried no gradient" in text
    assert f"{8 * sum(zero):,} of 1,920 rollouts" in text
    assert "24 steps, 240 groups of 8 completions, 60 prompts" in text
    assert f"about {8 * sum(zero):,} of 1,920 tokens" in text
    assert f"{sum(zero) / 240 * 36:.1f} minutes of 36.0 minutes" in text
    last, again, cases = {}, 0, 0
    for (_, prompt, _), now in zip(visits, zero, strict=True):
        again, cases = again + (last.get(prompt, False) and now), cases + last.get(prompt, False)
        last[prompt] = now
    assert f"the prompt's next one has zero variance ({again} of {cases})" in text
    assert "DOTS and replay" in text
    recipe = text.split("grpo`:\n\n")[1].split("\n\n")[0]
    DataEfficientGRPOConfig("unused", use_cpu=True, bf16=False, report_to="none", **yaml.safe_load(recipe))
    assert max(map(len, text.splitlines())) <= 110


def test_json_and_simulate(lines, capsys, tmp_path):
    path, visits = lines
    found = json.loads(output(capsys, path, "--json"))
    zero = np.array([len(set(digits)) == 1 for *_, digits in visits])
    assert found["audit"]["overall"]["effective"] == pytest.approx(1 - zero.mean())
    assert found["audit"]["cost"]["hours"] is None
    assert {s["name"] for s in found["projection"]["savings"]} >= {"DOTS", "GRESO", "dynamic sampling"}
    simulation = found["simulation"]
    assert (simulation["prompts"], simulation["groups_per_step"], simulation["max_steps"]) == (60, 10, 24)
    assert simulation["dead"] == pytest.approx(4 / 6, abs=0.08)
    assert simulation["easy"] == pytest.approx(1 / 6, abs=0.08)
    file = tmp_path / "audit.json"
    file.write_text(json.dumps(found))
    assert main(["simulate", "--from-audit", str(file), "--seeds", "1", "--max_steps", "20"]) == 0
    text = capsys.readouterr().out
    assert "60 prompts" in text
    assert "10 groups of 8 a step" in text
    assert "in 20 steps" in text
    assert main(["simulate", "--from-audit", str(file), "--groups", "x"]) == 2
    assert "Leave one of them out" in capsys.readouterr().err


def test_a_small_run_is_described_and_not_projected(tmp_path, capsys):
    write_tables(tmp_path, completions(VISITS))
    text = output(capsys, tmp_path)
    assert "TRL completion tables, 3 files" in text
    assert "67% of the groups" in text
    assert "not projected, 9 groups are too few" in text
    file = tmp_path / "audit.json"
    file.write_text(output(capsys, tmp_path, "--json"))
    assert main(["simulate", "--from-audit", str(file)]) == 2
    assert "9 groups are too few" in capsys.readouterr().err


def test_a_partial_record_says_what_is_missing(tmp_path, capsys):
    rows = [{k: v for k, v in row.items() if k != "step"} for row in completions(VISITS)]
    text = output(capsys, write_lines(tmp_path / "log.jsonl", rows))
    assert "No step is recorded" in text
    assert "hours: not known; give --seconds_per_step" in text
    once = write_lines(tmp_path / "once.jsonl", completions(VISITS[:3]))
    assert "every prompt occurs once" in output(capsys, once)
    sparse = [row | {"step": 10 * row["step"]} for row in completions(VISITS)]
    text = output(capsys, write_lines(tmp_path / "sparse.jsonl", sparse))
    assert "One step of 10 is recorded" in text
    assert "in the steps recorded, one of 10" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--map", "prompts=x"], "Did you mean `prompt`?"),
        (["--map", "reward"], "not ROLE=COLUMN"),
        (["--map", "reward=quality"], "no column 'quality'"),
        (["--seconds_per_step", "0"], "takes a number > 0"),
        (["--num_generations", "1"], "takes an integer >= 2"),
        (["--prompts", "0"], "takes an integer >= 1"),
        (["--prompts", "2"], "the run has groups of 3 prompts"),
        (["--predictability", "2"], "takes a number in [0, 1]"),
        (["--reward_range", "1", "0"], "LOW < HIGH"),
    ],
)
def test_mistakes(tmp_path, capsys, options, message):
    file = write_lines(tmp_path / "log.jsonl", completions(VISITS))
    assert main(["audit", str(file), *options]) == 2
    assert message in capsys.readouterr().err


def test_hours_that_would_be_saved_are_those_of_the_whole_run(tmp_path, capsys):
    """A run of 120 steps, recorded whole and every second step: half of the groups tell about the same."""
    rng, visits = np.random.default_rng(0), []
    for step in range(120):
        for prompt in range(10 * (step % 6), 10 * (step % 6) + 10):
            p = {0: 1.0, 1: 0.15 + 0.005 * step}.get(prompt % 6, 0.0)
            visits.append((step, str(prompt), "".join(str(int(rng.random() < p)) for _ in range(8))))
    hours = []
    for every in (1, 2):
        rows = completions([visit for visit in visits if visit[0] % every == 0])
        text = output(capsys, write_lines(tmp_path / f"{every}.jsonl", rows), "--seconds_per_step", "3600")
        hours.append(float(re.search(r"up to ([\d.]+) hours", text).group(1)))
    assert hours[1] == pytest.approx(hours[0], rel=0.15)


def test_columns_of_our_own_table_cannot_be_named(capsys):
    folder = RUNS / "uniform-0"
    for options in (["--map", "reward=x"], ["--reward_range", "0", "2"]):
        assert main(["audit", str(folder), *options]) == 2
        assert "whose columns are known" in capsys.readouterr().err


def test_a_run_with_other_methods_is_described_and_not_projected(capsys):
    for name, methods in (("dots-0", "predictions and replay"), ("dapo", "predictions, replay and dynamic sampling")):
        assert f"not projected, this run used {methods}," in " ".join(output(capsys, RUNS / name).split())
    assert "not projected, this run used" not in output(capsys, RUNS / "uniform-0")


def test_nothing_to_show_is_exit_code_2(tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "holds no rollouts" in error
    assert "log_completions=True" in error
    other = tmp_path / "audit.json"
    other.write_text("{}")
    assert main(["simulate", "--from-audit", str(other)]) == 2
    assert "is not an audit" in capsys.readouterr().err
