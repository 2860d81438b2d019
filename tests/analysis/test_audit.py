"""`trl-dataeff audit`: groups of our runs, of plain TRL and of any other trainer."""

import json
import math
import os
import random

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from trl import GRPOTrainer

from tests.factories.tiny import even_length_reward, letter_share_reward, plain_dataset, run
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
    assert found.shares["steps"].tolist() == ["1", "2", "1-2"]
    assert found.shares["groups"].tolist() == [4, 4, 8]
    assert found.shares[["effective", "easy", "hard"]].to_numpy().tolist() == [[1 / 4, 1 / 4, 1 / 2]] * 3
    assert found.again == (3, 2 / 3)  # 07 and 7e0 stay, 7.0 does not
    assert found.after_effective == (1, 1)  # 7
    by_order = overall([path], prompt="question", reward="score")  # without a step a group's rows follow each other
    assert (by_order["in order"], by_order["groups"], by_order["effective"]) == ("1-8", 8, 2 / 8)


def write(path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def completions(prompts: str, rewards: list[int], **columns) -> list[dict]:
    """Rows of the default columns: a prompt is a letter."""
    rows = [{"prompt": prompt, "reward": reward} for prompt, reward in zip(prompts, rewards, strict=True)]
    return [row | {name: values[i] for name, values in columns.items()} for i, row in enumerate(rows)]


def test_rows_of_a_prompt_that_do_not_stand_together_are_one_group(tmp_path):
    path = write(tmp_path / "rows.jsonl", completions("abbbbaaa", [0, 1, 1, 1, 1, 0, 1, 1]))
    found = audit([path])
    assert found.shares.iloc[-1][["files", "groups", "effective", "easy"]].tolist() == ["1", 2, 1 / 2, 1 / 2]
    assert "(up to 4)" in found.notes[0]


def test_without_steps_a_prompt_that_occurs_again_at_once_has_another_group(tmp_path):
    path = write(tmp_path / "rows.jsonl", completions("aabbbbaabb", [0, 0, 1, 1, 0, 1, 1, 0, 1, 1]))
    found = audit([path])
    assert found.shares.iloc[-1][["in order", "groups", "effective", "easy"]].tolist() == ["1-4", 5, 2 / 5, 2 / 5]
    assert found.again == (1, 0)  # a
    assert found.after_effective == (1, 1)  # b, of whose first two groups the later one counts
    once = write(tmp_path / "once.jsonl", completions("aabbbb", [0, 0, 1, 1, 0, 1]))
    assert overall([once])["groups"] == 2, "groups may be of different sizes where no prompt occurs again"


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        ("aabbbbcc", 4),
        ("abcbabcb", 4),  # wherever the rows stand
        ("aabbbbccd", 4),  # the last group was cut off
        ("aabbbccddddd", 4),  # groups of different sizes
        ("aaabbbb", 2),
    ],
)
def test_a_prompt_that_occurs_several_times_in_a_step_has_several_groups(tmp_path, prompts, groups):
    path = write(tmp_path / "rows.jsonl", completions(prompts, [0] * len(prompts), step=[1] * len(prompts)))
    assert overall([path])["groups"] == groups


@pytest.mark.parametrize("steps", [1, 3])
def test_the_order_of_rows_in_a_step_does_not_count(tmp_path, steps):
    generator = random.Random(0)
    rewards = {
        (step, prompt): [generator.randint(0, 1) for _ in range(3)] for step in range(steps) for prompt in "abcde"
    }
    rows = [
        {"prompt": prompt, "reward": reward, "step": step}
        for (step, prompt), scores in rewards.items()
        for reward in scores
    ]
    generator.shuffle(rows)
    if steps == 1:
        rows = [{name: row[name] for name in ("prompt", "reward")} for row in rows]
    found = overall([write(tmp_path / "rows.jsonl", rows)])
    share = np.mean([len(set(scores)) > 1 for scores in rewards.values()])
    assert found[["groups", "effective"]].tolist() == [5 * steps, pytest.approx(share)]


def test_processes_with_a_file_each_share_the_groups_of_a_step(tmp_path):
    files = [write(tmp_path / f"{rank}.jsonl", completions("ab", [rank, 1], step=[7, 7])) for rank in range(2)]
    assert overall(files)[["steps", "groups", "effective"]].tolist() == ["7", 2, 1 / 2]


def test_completions_in_no_group_are_counted(tmp_path, capsys):
    rows = completions("aabba", [0, 1, 1, 1, 1], step=[1, 1, 1, 1, 2])
    rows += [{"prompt": None, "reward": 1, "step": 2}] * 2 + [{"prompt": "b", "reward": 1, "step": None}]
    path = write(tmp_path / "rows.jsonl", rows)
    assert overall([path])["groups"] == 2
    assert main(["audit", path]) == 0
    assert "4 of 8 completions are in no group" in capsys.readouterr().out


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


def test_columns_that_are_summed_are_named(tmp_path, capsys):
    rows = [{"prompt": "p", "step": 1, "advantage": i - 0.5, "right": i, "words": 7 * i} for i in (0, 1)]
    (tmp_path / "completions").mkdir()
    pd.DataFrame(rows).to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert main(["audit", str(tmp_path)]) == 0
    assert "right, words" in capsys.readouterr().out
    assert main(["audit", str(tmp_path), "--reward_column", "right"]) == 0
    assert "right, words" not in capsys.readouterr().out


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
    assert overall([tmp_path / "completions"]).equals(found)
    tables = (tmp_path / "completions").rename(tmp_path / "elsewhere")
    assert overall(sorted(tables.glob("*.parquet"))).equals(found)


def test_of_a_run_of_trl_with_a_prompt_in_two_rows(tmp_path):
    rows = plain_dataset(5).to_list()
    options_of_run = options(tmp_path, log_completions=True, rewards=mixed_reward, max_steps=4, save_steps=4)
    trained_on = {"train_dataset": Dataset.from_list([*rows, rows[2]])}
    trainer = run(trainer_class=GRPOTrainer, trainer=trained_on, per_device_train_batch_size=24, **options_of_run)
    shares = [1 - log["frac_reward_zero_std"] for log in trainer.state.log_history if "frac_reward_zero_std" in log]
    found = overall([tmp_path])
    assert found["groups"] == 6 * 4
    assert found["effective"] == pytest.approx(np.mean(shares))


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
    alone = tmp_path / "trainer_state (1).json"
    (tmp_path / "checkpoint-8" / "trainer_state.json").rename(alone)
    assert overall([alone]).equals(found)
    assert main(["report", str(alone)]) == 0


def test_of_our_own_run(tmp_path):
    trainer = run(**options(tmp_path, selection="greso", max_rollout_rounds=4, rewards=mixed_reward))
    found = overall([tmp_path])
    counts = trainer._dataeff_observer.counters
    assert found["groups"] == counts["rollouts_generated"] // 4
    kinds = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")["kind"]
    assert found["hard"] == pytest.approx((kinds == "hard").mean())
    assert found["steps"] == f"1-{trainer.state.global_step}", "steps are counted as TRL counts them"
    for part in ("dataeff", "dataeff/groups.parquet", "dataeff/metrics.jsonl"):
        assert overall([tmp_path / part]).equals(found)
    (tmp_path / "dataeff" / "groups.parquet").unlink()
    assert overall([tmp_path / "dataeff"])["effective"] > 0, "of the logs"


@pytest.mark.parametrize(
    ("fields", "selects"),
    [({"selection": "dots"}, True), ({"selection": "greso"}, True), ({"max_rollout_rounds": 4}, False), ({}, False)],
)
def test_that_prompts_were_selected_is_said(tmp_path, capsys, fields, selects):
    run(**options(tmp_path, rewards=mixed_reward, **fields))
    for path in (tmp_path, tmp_path / "checkpoint-8" / "trainer_state.json"):
        assert main(["audit", str(path)]) == 0
        assert ("uniform draws" in capsys.readouterr().out) == selects


def test_an_output_folder_may_have_the_name_of_one_in_it(tmp_path):
    folder = tmp_path / "dataeff"
    run(**options(folder, rewards=mixed_reward))
    assert overall([folder]).equals(overall([folder / "dataeff"]))


def test_two_groups_of_a_prompt_in_a_step_do_not_follow_each_other(tmp_path):
    rows = plain_dataset(1).to_list() * 4
    for steps in (1, 2):
        folder = tmp_path / str(steps)
        run(folder, max_steps=steps, trainer={"train_dataset": Dataset.from_list(rows)})
        found = audit([folder])
        assert found.again.groups + found.after_effective.groups == steps - 1


def test_of_a_checkpoint_of_ours_the_groups_up_to_it(tmp_path, monkeypatch):
    run(**{**options(tmp_path, rewards=mixed_reward), "save_steps": 3})
    groups = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    found = overall([tmp_path / "checkpoint-3"])
    assert found["steps"] == "1-3"
    assert found["groups"] == (groups["step"] < 3).sum() < len(groups)
    monkeypatch.chdir(tmp_path / "checkpoint-3")
    assert overall(["."]).equals(found)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rows.jsonl"], "no column 'prompt' for the prompt. The columns are iteration, question, score"),
        (["rows.jsonl", "--prompt_column", "qestion"], "Did you mean `question`"),
        (["rows.jsonl", "--prompt_column", "question"], "no column 'reward' for the reward"),
        (
            ["single.jsonl", "--prompt_column", "question", "--reward_column", "question"],
            "reward is non-numeric in question",
        ),
        (["words.jsonl"], "step is non-numeric in step"),
        (
            ["single.jsonl", "--prompt_column", "question", "--reward_column", "score"],
            "All 4 prompts (column 'question')",
        ),
        (["sorted.jsonl", "--step_column", "place"], "no groups. Name the step"),
        (["torn.jsonl"], "error: Groups cannot be found without a column of steps"),
        (["without.jsonl"], "No row has a prompt"),
        (["lines"], "It has 2 .jsonl files: if they hold completions, give lines/*.jsonl"),
        (["trainer_state.json", "rows.jsonl"], "describes one run"),
        (["huge.jsonl"], "huge.jsonl: larger than the memory"),
        (["escapes.jsonl"], r"The columns are \x1b[2Jprompt, \u202escore"),
        (["text.jsonl"], "cannot be read"),
        (["nothing.jsonl"], "There is no file or folder 'nothing.jsonl'"),
        (["nothing"], "There is no file or folder 'nothing'"),
        (["empty.jsonl"], "have no rows"),
        (["."], "`dataeff/groups.parquet`; one of TRL has `completions/completions_*.parquet`"),
        ([".", "rows.jsonl"], "describes one run"),
        (["a/dataeff/groups.parquet", "b/dataeff/groups.parquet"], "describes one run"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    single = table(*((s, f"p{s}", [1]) for s in range(4)))
    (tmp_path / "single.jsonl").write_text("\n".join(json.dumps(row) for row in single))
    (tmp_path / "text.jsonl").write_text("not json")
    (tmp_path / "empty.jsonl").touch()
    write(tmp_path / "sorted.jsonl", completions("aabb", [0] * 4, place=[1, 2, 3, 4]))
    write(tmp_path / "torn.jsonl", completions("aabbbba", [0] * 7))
    write(tmp_path / "words.jsonl", completions("aa", [0, 1], step=["first", "first"]))
    write(tmp_path / "without.jsonl", [{"prompt": None, "reward": 0}])
    write(tmp_path / "escapes.jsonl", [{"\x1b[2Jprompt": "a", "\u202escore": 0}])
    write(tmp_path / "trainer_state.json", [{"log_history": []}])
    (tmp_path / "lines").mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "dataeff").mkdir(parents=True)
        (tmp_path / name / "dataeff" / "groups.parquet").touch()
    for i in range(2):
        write(tmp_path / "lines" / f"{i}.jsonl", ROWS)
    (tmp_path / "huge.jsonl").touch()
    os.truncate(tmp_path / "huge.jsonl", 2**43)  # takes no room on the disk
    assert main(["audit", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_rows_that_do_not_fit_into_memory_are_one_sentence(tmp_path, monkeypatch, capsys):
    def read_json(*args, **kwargs):
        raise MemoryError

    path = write(tmp_path / "rows.jsonl", completions("aa", [0, 1]))
    monkeypatch.setattr(pd, "read_json", read_json)
    assert main(["audit", path]) == 2
    assert f"{path}: larger than the memory" in capsys.readouterr().err
