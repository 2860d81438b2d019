"""`trl-dataeff audit`: groups of our runs, of plain TRL and of any other trainer."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from trl import GRPOTrainer

from tests.factories.tiny import even_length_reward, letter_share_reward, run
from tests.factories.training import mixed_reward
from trl_dataeff.analysis.audit import audit
from trl_dataeff.cli.main import main


def table(*groups, **columns) -> list[dict]:
    """Rows of completions: each group is a step, a prompt and its rewards."""
    return [
        {"iteration": step, "question": prompt, "score": reward, **columns}
        for step, prompt, rewards in groups
        for reward in rewards
    ]


# Prompts of which some are equal as numbers
ROWS = table(
    (1, "7", [0, 1]), (1, "07", [0, 0]), (1, "7.0", [1, 1]), (1, "7e0", [0.5, 0.5]),
    (2, "7", [1, 1]), (2, "07", [0, 0]), (2, "7.0", [1, 0]), (2, "7e0", [0.5, 0.5]),
)  # fmt: skip
COLUMNS = {"prompt": "question", "reward": "score", "step": "iteration"}


def overall(*args, **columns) -> pd.Series:
    return audit(*args, **columns).shares.iloc[-1]


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_by_hand(tmp_path, ending):
    path = tmp_path / f"rollouts.{ending}"
    frame = pd.DataFrame(ROWS)
    frame.to_json(path, orient="records", lines=ending == "jsonl")
    if ending == "parquet":
        frame.assign(image=b"\xff").to_parquet(path)
    found = audit([path], **COLUMNS)
    assert found.shares["steps"].tolist() == ["1-1", "2-2", "1-2"]
    assert found.shares["groups"].tolist() == [4, 4, 8]
    assert found.shares[["effective", "easy", "hard"]].to_numpy().tolist() == [[1 / 4, 1 / 4, 1 / 2]] * 3
    assert found.again == 2 / 3  # 07 and 7e0 stay, 7.0 does not
    assert found.after_effective == 1  # 7
    by_order = overall([path], prompt="question", reward="score")  # without a step a group's rows follow each other
    assert (by_order["groups"], by_order["effective"]) == (8, 2 / 8)


def test_without_a_success_every_group_is_hard(tmp_path):
    path = tmp_path / "rollouts.parquet"
    pd.DataFrame(table((1, "a", [0, 0]), (1, "b", [None, 0]))).to_parquet(path)
    assert overall([path], **COLUMNS)[["groups", "hard"]].tolist() == [2, 1]


def test_files_may_be_equal_and_prompts_differ_in_a_token(tmp_path):
    prompts = [[0] * 999 + [token] + [0] * 999 for token in range(2)]
    rows = table(*((1, prompt, [1, 1]) for prompt in prompts))
    files = [tmp_path / f"{step}.parquet" for step in range(3)]
    for file in files:
        pd.DataFrame(rows).drop(columns="iteration").to_parquet(file)
    assert overall(files, prompt="question", reward="score")["groups"] == 6


def options(folder, **fields):
    return {"output_dir": folder, "max_steps": 8, "save_strategy": "steps", "save_steps": 8, **fields}


def logging_reward(completions, log_extra, **kwargs):
    log_extra("solution", ["18"] * len(completions))
    return mixed_reward(completions=completions, **kwargs)


@pytest.mark.parametrize("rewards", [logging_reward, [letter_share_reward, even_length_reward]], ids=["one", "two"])
@pytest.mark.parametrize("batches", [8, 2])  # of two groups each, for eight optimizer steps
def test_of_a_run_of_trl_with_completions(tmp_path, rewards, batches):
    fields = {"log_completions": True, "rewards": rewards, "num_iterations": 8 // batches}
    trainer = run(trainer_class=GRPOTrainer, **options(tmp_path, **fields))
    found = overall([tmp_path])
    shares = [1 - log["frac_reward_zero_std"] for log in trainer.state.log_history if "frac_reward_zero_std" in log]
    assert found["groups"] == 2 * batches
    assert found["effective"] == pytest.approx(np.mean(shares))
    assert found["effective"] + found["easy"] + found["hard"] == pytest.approx(1)


def test_of_a_run_of_trl_without_completions_its_logs_have_the_share(tmp_path, capsys):
    trainer = run(trainer_class=GRPOTrainer, **options(tmp_path, rewards=mixed_reward))
    found = overall([tmp_path])
    zero = [log["frac_reward_zero_std"] for log in trainer.state.log_history if "loss" in log]
    assert found["effective"] == pytest.approx(1 - np.mean(zero))
    assert math.isnan(found["easy"])
    assert main(["audit", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"{np.mean(zero):.0%} of the groups carried no gradient" in printed
    assert "log_completions=True" in printed


def test_of_our_own_run(tmp_path):
    trainer = run(**options(tmp_path, selection="greso", max_rollout_rounds=4, rewards=mixed_reward))
    found = overall([tmp_path])
    counts = trainer.collector.counters
    assert found["groups"] == counts["rollouts_generated"] // 4
    kinds = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")["kind"]
    assert found["hard"] == pytest.approx((kinds == "hard").mean())
    assert found["steps"] == f"1-{trainer.state.global_step}", "steps are counted as TRL counts them"
    assert overall([tmp_path / "dataeff" / "groups.parquet"]).equals(found)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rows.jsonl"], "no column 'prompt' for the prompt. The columns are iteration, question, score"),
        (["rows.jsonl", "--prompt_column", "qestion"], "Did you mean `question`"),
        (["rows.jsonl", "--prompt_column", "question"], "no column 'reward' for the reward"),
        (["single.jsonl", "--prompt_column", "question", "--reward_column", "question"], "non-numeric"),
        (["single.jsonl", "--prompt_column", "question", "--reward_column", "score"], "no groups. Name the step"),
        (["text.jsonl"], "cannot be read"),
        (["nothing.jsonl"], "cannot be read"),
        (["."], "has no logs of a run"),
        ([".", "rows.jsonl"], "describes one run"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    single = table(*((s, f"p{s}", [1]) for s in range(4)))
    (tmp_path / "single.jsonl").write_text("\n".join(json.dumps(row) for row in single))
    (tmp_path / "text.jsonl").write_text("not json")
    assert main(["audit", *arguments]) == 2
    assert says in capsys.readouterr().err
