"""Groups of a run from the files that TRL and other frameworks leave behind."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trl import GRPOConfig, GRPOTrainer

from tests.factories import mixed_reward, run
from tests.factories.rollouts import VISITS, completions, write_lines, write_tables
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.analysis.audit import cost
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.tracking.completion_columns import UnreadableRollouts
from trl_dataeff.tracking.completions import RecordedGroups, read_groups
from trl_dataeff.tracking.group_table import RUN, SCHEMA


KINDS = [HARD, EASY, EFFECTIVE, HARD, EFFECTIVE, EASY, EFFECTIVE, EASY, EASY]  # of VISITS
SUCCESS = [0, 1, 0.5, 0, 0.75, 1, 0.25, 1, 1]


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def by_step_and_prompt(groups: RecordedGroups, values: np.ndarray) -> list:
    return values[np.lexsort((groups.prompt, groups.step))].tolist()


def assert_visits(groups: RecordedGroups) -> None:
    """The groups are those of VISITS."""
    assert by_step_and_prompt(groups, groups.kind) == KINDS
    assert by_step_and_prompt(groups, groups.success) == SUCCESS
    assert by_step_and_prompt(groups, groups.step) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert groups.group_size == 4
    assert len(groups) == 9


def renamed(rows, **names):
    return [{names.get(key, key): value for key, value in row.items() if names.get(key, key)} for row in rows]


def test_tables_of_trl(tmp_path):
    groups = read_groups([write_tables(tmp_path, completions(VISITS))])
    assert_visits(groups)
    assert groups.format == "TRL completion tables"
    assert groups.files == 3
    assert groups.texts == ("prompt a", "prompt b", "prompt c")
    assert groups.estimated_tokens
    assert groups.tokens.tolist() == [10.0] * 9  # 4 + 8 + 12 + 16 characters
    assert groups.notes == ()


def test_files_may_be_given_one_by_one(tmp_path):
    folder = write_tables(tmp_path, completions(VISITS)) / "completions"
    assert_visits(read_groups(sorted(folder.glob("*.parquet"))[::-1]))


def test_conversations_are_told_apart_by_their_contents(tmp_path):
    rows = completions(VISITS)
    for row in rows:
        row["prompt"] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": row["prompt"]}]
        row["completion"] = [{"role": "assistant", "content": row["completion"]}]
    groups = read_groups([write_tables(tmp_path, rows)])
    assert_visits(groups)
    assert groups.texts[0] == "be brief\nprompt a"
    assert groups.tokens.tolist() == [10.0] * 9


@pytest.mark.parametrize(
    ("name", "names", "extra", "file"),
    [
        ("verl rollouts", {"prompt": "input", "completion": "output", "reward": "score"}, {"gts": "7"}, "{}.jsonl"),
        ("prime-rl rollouts", {"step": ""}, {"example_id": 3, "task": "t"}, "step_{}/train_rollouts.jsonl"),
        ("OpenRLHF rollouts", {"prompt": "input", "completion": "output"}, {}, "{}.jsonl.gz"),
        ("open-instruct rollouts", {"prompt": "prompt_idx"}, {"response_tokens": [1, 2, 3]}, "shard{}.jsonl"),
        ("rollouts", {"prompt": "question", "reward": "score", "step": "global_step"}, {}, "{}.jsonl"),
        ("rollouts", {"step": ""}, {}, "{}.jsonl"),
    ],
)
def test_rollouts_of_other_frameworks(tmp_path, name, names, extra, file):
    rows = completions(VISITS)
    for step in (1, 2, 3):
        part = [row | extra for row in rows if row["step"] == step]
        write_lines(tmp_path / file.format(step), renamed(part, **names))
    groups = read_groups([tmp_path])
    assert_visits(groups)
    assert groups.format == name
    assert groups.tokens.tolist() == [12.0 if "response_tokens" in extra else 10.0] * 9


def test_a_line_may_be_a_group(tmp_path):
    lines = [
        {"prompt": prompt, "responses": ["abcd"] * 4, "rewards": [int(d) for d in digits], "step": step}
        for step, prompt, digits in VISITS
    ]
    groups = read_groups([write_lines(tmp_path / "log.jsonl", lines)])
    assert_visits(groups)
    assert groups.tokens.tolist() == [4.0] * 9


def test_names_are_mapped_and_rewards_are_summed(tmp_path):
    rows = [
        {"q": row["prompt"], "ok": row["reward"], "style": 2 * row["reward"], "at": row["step"], "n": 5}
        for row in completions(VISITS)
    ]
    file = write_lines(tmp_path / "log.jsonl", rows)
    groups = read_groups([file], {"prompt": "q", "reward": "ok+0.5*style", "step": "at", "tokens": "n"})
    assert_visits(groups)
    assert groups.tokens.tolist() == [20.0] * 9
    pd.DataFrame(rows).to_parquet(tmp_path / "log.parquet")
    assert_visits(read_groups([tmp_path / "log.parquet"], {"prompt": "q", "reward": "ok+0.5*style", "step": "at"}))


def test_rewards_that_cancel_are_told_by_the_advantage(tmp_path):
    """Two functions sum to the same with weight 1; the run's weights were others, and its advantages are not zero."""
    rows = completions(VISITS)
    groups = read_groups([write_tables(tmp_path, rows, style=lambda row: 1 - row["reward"])])
    assert by_step_and_prompt(groups, groups.kind != EFFECTIVE) == [kind != EFFECTIVE for kind in KINDS]
    assert any("accuracy + style" in note for note in groups.notes)


def test_groups_parquet(tmp_path):
    names = ("effective", "easy", "hard")
    rows = [
        {"step": i // 3, "prompt_id": 10 + i % 3, "success_rate": s, "kind": names[k], "origin": "fresh", "tokens": 9}
        for i, (s, k) in enumerate(zip(SUCCESS, KINDS, strict=True))
    ]
    rows += [rows[0] | {"prompt_id": -1}, rows[0] | {"origin": "replayed"}]
    (tmp_path / "dataeff").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "dataeff" / "groups.parquet")
    groups = read_groups([tmp_path])
    assert by_step_and_prompt(groups, groups.kind) == KINDS
    assert groups.group_size == 4
    assert groups.tokens.sum() == 81
    assert not groups.methods
    predicted = pa.Table.from_pylist([row | {"predicted": 0.5} for row in rows], schema=SCHEMA)
    pq.write_table(predicted, tmp_path / "dataeff" / "groups.parquet")
    assert read_groups([tmp_path]).methods == ("predictions",)
    (tmp_path / "dataeff" / "groups.parquet").unlink()
    dropped = pa.Table.from_pylist([row | {"disposition": "dropped"} for row in rows], schema=SCHEMA)
    pq.write_table(dropped, tmp_path / "dataeff" / "groups.parquet")
    assert read_groups([tmp_path]).methods == ("dynamic sampling",)
    streamed = pa.Table.from_pylist([row | {"prompt_id": -1} for row in rows], schema=SCHEMA)
    pq.write_table(streamed, tmp_path / "dataeff" / "groups.parquet")
    assert "its prompts are not known by row" in rejected(tmp_path)


def test_rollouts_are_counted_from_the_log_where_it_has_them(tmp_path):
    """Groups of 8, of which two were stopped after 4; their success rates alone look like groups of 4."""
    rows = [
        {"step": i, "prompt_id": i, "success_rate": rate, "kind": kind, "origin": "fresh", "completions": n}
        for i, (rate, kind, n) in enumerate(
            [(0.25, "effective", 8), (0.5, "effective", 8), (0.75, "effective", 8), (0.0, "hard", 4), (1.0, "easy", 4)]
        )
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "groups.parquet")
    groups = read_groups([tmp_path])
    assert groups.group_size == 8
    assert groups.sizes.tolist() == [8, 8, 8, 4, 4]
    costs = cost(groups, float("nan"))
    assert (costs.rollouts, costs.wasted_rollouts) == (32, 8)


def test_a_group_on_a_line_without_one_of_its_rewards(tmp_path):
    lines = [{"prompt": "p", "a": [1, 0], "b": [1, 1], "step": 0}, {"prompt": "q", "a": [1, 1], "b": None, "step": 1}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    groups = read_groups([tmp_path / "r.jsonl"], {"reward": "a+b"})
    assert groups.kind.tolist() == [EFFECTIVE, HARD], "the second has the lowest total, 1, for all"


def test_a_run_of_trl(tmp_path):
    """What GRPOTrainer writes, each generation batch twice: it is trained on for two steps."""
    told = []

    def reward(prompts, completion_ids, **kwargs):
        told.append(mixed_reward(prompts, completion_ids))
        return told[-1]

    trainer = run(
        *(GRPOTrainer, GRPOConfig, tmp_path),
        rewards=reward,
        log_completions=True,
        logging_steps=1,
        num_iterations=2,
        max_steps=6,
        save_strategy="steps",
        save_steps=6,
    )
    groups = read_groups([trainer.args.output_dir])
    size = trainer.num_generations
    rewards = np.concatenate(told).reshape(-1, size)
    assert len(groups) == len(rewards)
    assert groups.group_size == size
    assert sorted(groups.success.tolist()) == sorted(rewards.mean(axis=1).tolist())
    assert (groups.kind == EFFECTIVE).sum() == (rewards.min(axis=1) < rewards.max(axis=1)).sum()
    assert any("train again" in note for note in groups.notes)
    times = [entry["step_time"] for entry in trainer.state.log_history if "step_time" in entry]
    assert groups.step_seconds == pytest.approx(np.mean(times))


def test_a_prompt_that_comes_up_twice_in_a_step_has_two_groups(tmp_path):
    visits = [(1, "a", "0000"), (1, "b", "0101"), (1, "c", "1111"), (1, "a", "0011")]
    groups = read_groups([write_lines(tmp_path / "log.jsonl", completions(visits))])
    assert sorted(groups.kind.tolist()) == [EFFECTIVE, EFFECTIVE, EASY, HARD]
    assert len(np.unique(groups.prompt)) == 3


def test_groups_that_are_cut_off_are_left_out(tmp_path):
    groups = read_groups([write_lines(tmp_path / "log.jsonl", completions([*VISITS, (4, "a", "00")]))])
    assert_visits(groups)
    assert "fewer than 4" in groups.notes[0]


def test_without_steps_groups_are_completions_in_a_row(tmp_path):
    groups = read_groups([write_lines(tmp_path / "run1.jsonl", renamed(completions(VISITS), step=""))])
    assert groups.kind.tolist() == KINDS
    assert not groups.has_steps


def test_the_reward_range_decides_what_is_easy(tmp_path):
    file = write_lines(tmp_path / "log.jsonl", completions([(1, "a", "1111"), (1, "b", "0011")]))
    assert EASY in read_groups([file]).kind
    graded = read_groups([file], reward_range=(0.0, 2.0))
    assert sorted(graded.kind.tolist()) == [EFFECTIVE, HARD]
    assert sorted(graded.success.tolist()) == [0.25, 0.5]


def test_completions_without_a_reward_are_left_out_of_their_group(tmp_path):
    rows = completions([(1, "a", "0011"), (1, "b", "1111"), (1, "c", "0000"), (1, "d", "0011")])
    for i in (0, 1, 4, *range(8, 12), 12):  # the zeros of a, one of b, all of c, a zero of d
        rows[i]["reward"] = math.nan
    groups = read_groups([write_lines(tmp_path / "log.jsonl", rows)])
    assert groups.kind.tolist() == [EASY, EASY, HARD, EFFECTIVE]
    assert groups.success[[0, 1, 3]].tolist() == pytest.approx([1, 1, 2 / 3])
    assert math.isnan(groups.success[2])
    assert "50.0% of the completions have no reward" in groups.notes[0]


def test_a_function_without_a_score_is_left_out_of_the_total(tmp_path):
    """As TRL does; without its advantages, here."""
    rows = [
        {"step": 1, "prompt": "a", "first": first, "second": second}
        for first, second in ((1, None), (None, 1), (1, 0), (0, 1), (None, None), (0.3, 0.7), (0.5, 0.5), (1, None))
    ]
    rows = [row | {"prompt": "ab"[i // 4]} for i, row in enumerate(rows)] + [
        {"step": 1, "prompt": "c", "first": first, "second": 1} for first in (None, 1, 1, 1)
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "log.parquet")
    for file in (tmp_path / "log.parquet", write_lines(tmp_path / "log.jsonl", rows)):
        groups = read_groups([file], {"reward": "first+second"})
        assert (groups.kind != EFFECTIVE).tolist() == [True, True, False]
        assert groups.success.tolist() == pytest.approx([0, 0, 0.75])  # totals are 1, and up to 2


def test_damaged_files_are_left_out_and_said(tmp_path):
    folder = write_tables(tmp_path, completions([*VISITS, (4, "a", "0000")])) / "completions"
    file = folder / "completions_00004.parquet"
    file.write_bytes(file.read_bytes()[:200])
    groups = read_groups([tmp_path])
    assert_visits(groups)
    assert "1 of 4 files were left out" in groups.notes[0]
    assert "completions_00004.parquet" in groups.notes[0]


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_last_line_that_is_half_written_is_left_out(tmp_path, name):
    file = write_lines(tmp_path / name, completions([*VISITS, *VISITS[:1]] if name.endswith("z") else VISITS))
    content = file.read_bytes()
    file.write_bytes(content[:-20] if name.endswith("gz") else content + b'{"step": 4, "pro')
    groups = read_groups([file])
    assert len(groups) >= 8
    assert any("Unreadable lines" in note for note in groups.notes)


def rejected(*paths, **options) -> str:
    with pytest.raises(UnreadableRollouts) as error:
        read_groups(paths, **options)
    return str(error.value)


def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path):
    rows = completions(VISITS)
    assert "does not exist" in rejected(tmp_path / "none")
    assert "holds no rollouts" in rejected(tmp_path)
    half = tmp_path / "half.parquet"
    half.write_bytes(b"PAR1 nothing more")
    assert "half-written" in rejected(half)
    text = tmp_path / "notes.txt"
    text.write_text("x")
    assert "neither .parquet nor .jsonl" in rejected(text)
    lines = tmp_path / "words.jsonl"
    lines.write_text("hello\nworld\n")
    assert "line 1 is no JSON object" in rejected(lines)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "no completions" in rejected(empty)
    other = write_lines(tmp_path / "other.jsonl", renamed(rows, prompt="x", reward="loss"))
    message = rejected(other)
    assert "no column for the prompt and the reward; it has step, x, completion, loss" in message
    assert "--map prompt=COLUMN,reward=COLUMN" in message
    file = write_lines(tmp_path / "log.jsonl", rows)
    assert "no column 'quality'" in rejected(file, columns={"reward": "completion+quality"})
    assert "no reward is a number" in rejected(
        write_lines(tmp_path / "nan.jsonl", [r | {"reward": None} for r in rows])
    )
    single = write_lines(tmp_path / "single.jsonl", rows[::4])
    assert "one completion in a step" in rejected(single)
    shuffled = write_lines(
        tmp_path / "shuffled.jsonl", renamed(sorted(rows, key=lambda r: -len(r["completion"])), step="")
    )
    assert "--map step=COLUMN" in rejected(shuffled)
    assert "no group has 7 completions" in rejected(file, group_size=7)
    pd.DataFrame([r | {"reward": "good"} for r in rows]).to_parquet(tmp_path / "text.parquet")
    assert "not one of numbers" in rejected(tmp_path / "text.parquet")


@pytest.mark.parametrize(
    ("about", "methods"),
    [
        ({"settings": {"selector": "UniformSelector"}, "arguments": {"replay_fraction": 0.0}}, ()),
        ({"settings": {"selector": "UniformSelector"}, "arguments": {"replay_fraction": 0.5}}, ("replay",)),
        ({"settings": {"selector": "UniformSelector", "replays": False}, "arguments": {"replay_fraction": 0.5}}, ()),
        ({"settings": {"selector": "GresoSelector"}, "arguments": {"sequential_rollouts": True}}, ("GresoSelector", "sequential rollouts")),
        ({"settings": {"selector": "GresoSelector"}, "arguments": {}, "run": "a later one"}, ()),
        ({"settings": None}, ()),
        ([], ()),
    ],
)  # fmt: skip
def test_what_a_run_was_is_in_its_own_file(tmp_path, about, methods):
    row = {"step": 0, "prompt_id": 1, "success_rate": 0.5, "kind": "effective", "origin": "fresh", "tokens": 9}
    table = pa.Table.from_pylist([row], schema=SCHEMA).replace_schema_metadata({RUN: "this one"})
    pq.write_table(table, tmp_path / "groups.parquet")
    about = {"run": "this one", **about} if about else about
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert read_groups([tmp_path]).methods == methods


def test_the_collector_says_what_is_in_effect(tmp_path):
    """One group per process: nothing can be replayed, whatever was asked for."""
    options = {"replay_fraction": 0.5, "max_steps": 1}
    for size, methods in ((4, ()), (8, ("replay",))):
        folder = tmp_path / str(size)
        run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, folder, **options, per_device_train_batch_size=size)
        assert read_groups([folder]).methods == methods


def test_a_file_that_is_given_twice_counts_once(tmp_path):
    file = write_lines(tmp_path / "log.jsonl", completions(VISITS))
    assert_visits(read_groups([file, tmp_path / "." / "log.jsonl"]))


def test_a_folder_for_each_step_with_a_file_for_each_process(tmp_path):
    for row in completions(VISITS):
        path = tmp_path / f"step_{row['step']}" / f"rank_{'abc'.index(row['prompt'][-1])}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as lines:
            lines.write(json.dumps({name: row[name] for name in ("prompt", "completion", "reward")}) + "\n")
    assert_visits(read_groups([tmp_path]))


def test_one_folder_is_no_step(tmp_path):
    for row in completions(VISITS):
        path = tmp_path / "step_7" / f"{row['step']}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as lines:
            lines.write(json.dumps({name: row[name] for name in ("prompt", "completion", "reward")}) + "\n")
    assert_visits(read_groups([tmp_path / "step_7"]))


def test_steps_that_train_on_the_same_completions_count_once_in_tables_of_trl(tmp_path):
    solved = [(step, prompt, "1111") for step in (1, 2, 3) for prompt in "ab"]
    rows = [row | {"completion": "1"} for row in completions(solved)]
    groups = read_groups([write_tables(tmp_path / "same", rows)])
    assert len(groups) == 2
    assert any("2 steps repeat" in note for note in groups.notes)
    other = [row | {"completion": str(row["step"])} for row in rows]  # as long, with the same rewards and advantages
    assert len(read_groups([write_tables(tmp_path / "other", other)])) == 6
    assert len(read_groups([write_lines(tmp_path / "log.jsonl", rows)])) == 6
    as_lines = [row | {"advantage": 0.0} for row in other]  # TRL's tables, saved as JSON lines
    assert len(read_groups([write_lines(tmp_path / "trl.jsonl", as_lines)], {"reward": "reward"})) == 6


def test_tokens_of_a_group_on_a_line_are_those_that_it_records(tmp_path):
    line = {
        "step": 1,
        "prompt": "a",
        "rewards": [0, 1, 0, 1],
        "completions": ["x"] * 4,
        "completion_tokens": [3, 4, 5, 6],
    }
    groups = read_groups([write_lines(tmp_path / "log.jsonl", [line, line | {"step": 2}])])
    assert groups.tokens.tolist() == [18, 18]
    assert not groups.estimated_tokens


def test_runs_are_not_mixed(tmp_path):
    first = write_tables(tmp_path / "a", completions(VISITS))
    second = write_tables(tmp_path / "b", completions(VISITS))
    assert "different runs" in rejected(first, second)
    lines = write_lines(tmp_path / "log.jsonl", renamed(completions(VISITS), prompt="input", completion="output"))
    assert "Audit one run at a time" in rejected(first, lines)


def test_reading_imports_no_torch(tmp_path):
    write_tables(tmp_path, completions(VISITS))
    code = (
        "import sys; from trl_dataeff.tracking.completions import read_groups; from trl_dataeff.analysis.audit import audit\n"
        f"audit(read_groups([{str(tmp_path)!r}])); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.strip()) == []


@pytest.mark.parametrize("reward", [10**400, True, "1.5", [1], {"a": 1}])
def test_rewards_of_any_type_are_read(tmp_path, reward):
    rows = completions(VISITS)
    rows[0]["reward"] = reward
    assert len(read_groups([write_lines(tmp_path / "log.jsonl", rows)])) == len(
        read_groups([write_lines(tmp_path / "o.jsonl", completions(VISITS))])
    )


@pytest.mark.parametrize("step", [None, "x", [1], 10**30])
def test_a_row_without_a_step_is_said(tmp_path, step):
    rows = completions(VISITS)
    rows[0]["step"] = step
    assert "some rows have no step" in rejected(write_lines(tmp_path / "log.jsonl", rows))


def test_a_line_that_is_nested_too_deeply_is_left_out(tmp_path):
    file = write_lines(tmp_path / "log.jsonl", completions(VISITS))
    file.write_text(file.read_text() + "[" * 100_000 + "\n")
    assert any("Unreadable lines" in note for note in read_groups([file]).notes)
