"""Reading what runs have written, whole or not, ours or plain TRL's."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.factories import RUNS
from trl_dataeff.tracking.examples import examples_of
from trl_dataeff.tracking.recorded import NoRunError, read_run, with_costs


@pytest.fixture
def copy(tmp_path):
    """A copy of a recorded run, to damage."""

    def _copy(name: str):
        return shutil.copytree(RUNS / name, tmp_path / name)

    return _copy


def test_a_run_of_ours():
    run = read_run(RUNS / "dots-0")
    assert run.missing == []
    assert run.held_out == "eval_reward"
    assert run.group_size == 8
    x, y = run.series("eval_reward", "rollouts")
    assert x[0] == 0
    assert len(x) == len(y) >= 12
    assert np.all(np.diff(x) >= 0)
    assert run.own("effective_ratio")[1].max() <= 1
    assert np.isnan(run.last("no such metric"))


@pytest.mark.parametrize("part", ["", "dataeff", "dataeff/groups.parquet"])
def test_a_run_is_found_by_its_folder_or_by_a_file_in_it(part):
    assert read_run(RUNS / "dots-0" / part).name == "dots-0"


def test_a_run_of_plain_trl_is_read_from_its_checkpoint():
    run = read_run(RUNS / "plain")
    assert run.held_out == "eval_reward"
    assert any("--rollouts_per_step" in text for text in run.missing)
    assert not len(run.series("reward", "rollouts")[0])
    run = read_run(RUNS / "plain", rollouts_per_step=64)
    x, _ = run.series("reward", "rollouts")
    assert x[-1] == 64 * 120
    tokens, seconds = run.series("reward", "tokens")[0], run.series("reward", "seconds")[0]
    assert 6 * x[-1] < tokens[-1] <= 8 * x[-1]  # completions of at most 8 tokens
    assert np.all(np.diff(seconds) > 0)


def test_costs_of_plain_trl_by_hand():
    history = [
        {"step": 0, "eval_reward": 0.1},
        {"step": 2, "reward": 0.2, "completions/mean_length": 5.0, "step_time": 3.0},
        {"step": 2, "eval_reward": 0.3},
        {"step": 5, "reward": 0.4, "completions/mean_length": 2.0, "step_time": 1.0},
    ]
    lines = with_costs(history, 10)
    assert [line["rollouts"] for line in lines] == [0, 20, 20, 50]
    assert [line["tokens"] for line in lines] == [0, 100, 100, 160]
    assert [line["seconds"] for line in lines] == [0, 6, 6, 9]
    assert all("rollouts" not in line for line in with_costs(history, None))


def test_tokens_of_plain_trl_do_not_need_the_time_of_steps():
    history = [{"step": step, "reward": 0.2, "completions/mean_length": 10.0} for step in (10, 20, 30, 40)]
    history.insert(2, {"step": 25, "eval_reward": 0.3})
    assert with_costs(history, 64)[-1]["tokens"] == 40 * 64 * 10


def test_rollouts_of_plain_trl_are_estimated_from_logged_completions(copy):
    folder = copy("plain")
    (folder / "completions").mkdir()
    for step, rows in ((0, 16), (1, 64), (2, 64)):  # that of an evaluation before training, and two of training
        table = pa.table({"prompt": ["a"] * rows})
        pq.write_table(table, folder / "completions" / f"completions_{step:05d}.parquet")
    (folder / "completions" / "completions_00003.parquet").write_bytes(b"PAR1")
    run = read_run(folder)
    assert run.series("reward", "rollouts")[0][-1] == 64 * run.series("reward")[0][-1]
    shutil.rmtree(folder / "completions")
    shutil.copytree(RUNS / "dots-0" / "completions", folder / "completions")
    run = read_run(folder)
    assert run.series("reward", "rollouts")[0][-1] > 0
    assert any("estimated" in text for text in run.missing)


def test_what_is_damaged_is_named_and_the_rest_is_shown(copy):
    folder = copy("dots-0")
    (folder / "dataeff" / "groups.parquet").write_bytes(b"PAR1 half")
    (folder / "dataeff" / "run.json").write_text("{")
    with open(folder / "dataeff" / "metrics.jsonl", "a") as file:
        file.write('{"step": 121, "rew')
    run = read_run(folder)
    assert run.groups is None
    assert len(run.lines) == len(read_run(RUNS / "dots-0").lines)
    assert [text for text in run.missing if "groups.parquet" in text and "cannot be read" in text]
    assert [text for text in run.missing if "run.json" in text]


def test_a_table_of_others_columns_is_not_shown(copy):
    folder = copy("dots-0")
    pq.write_table(pa.table({"step": [1], "uid": ["a"]}), folder / "dataeff" / "groups.parquet")
    run = read_run(folder)
    assert run.groups is None
    assert any("lacks the columns kind, prompt_id" in text for text in run.missing)


@pytest.mark.parametrize("content", ["absent", "empty", "another folder", "an empty history", "not a state"])
def test_nothing_to_show(tmp_path, content):
    folder = tmp_path / "run"
    if content != "absent":
        folder.mkdir()
    if content == "another folder":
        (folder / "model.safetensors").write_bytes(b"0")
    if content == "an empty history":
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": []}))
    if content == "not a state":
        (folder / "trainer_state.json").write_text("[1]")
    with pytest.raises(NoRunError, match="Give the `output_dir` of a run"):
        read_run(folder)


def test_nan_rewards_are_left_out(copy):
    folder = copy("dots-0")
    path = folder / "dataeff" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[::2]:
        line["reward"] = float("nan")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert np.isfinite(read_run(folder).series("reward")[1]).all()


def test_examples_are_completions_of_the_prompt():
    run = read_run(RUNS / "dots-0")
    texts = run.prompts["prompt"].to_pylist()
    found = examples_of(run.path, texts)
    assert found
    for example in found.values():
        assert set(example) == {"step", "completion", "rewards"}
        assert list(example["rewards"]) == ["reward"]
    assert examples_of(run.path, ["no such prompt"]) == {}
