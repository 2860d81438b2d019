"""What a run writes beside its checkpoints: `run.json`, `metrics.jsonl`, `prompts.parquet`."""

import json
from itertools import pairwise

import pandas as pd
import pytest
from datasets import ClassLabel, Dataset

from tests.factories import messages, mixed_reward, plain_dataset, run, train
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.tracking.about import HIDDEN, command
from trl_dataeff.tracking.metrics_log import MetricsLog, read_lines
from trl_dataeff.tracking.prompt_table import LONGEST_PROMPT, PromptTable, prompt_rows


OPTIONS = {"dynamic_sampling": True, "rewards": mixed_reward, "save_strategy": "steps", "save_steps": 5}
CLOCKS = ("seconds", "time", "run", "step_time", "train_runtime")


def start(folder, train=True, **options):
    return run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, folder, train=train, **OPTIONS, **options)


def lines_of(folder) -> list[dict]:
    return list(read_lines(folder / "dataeff" / "metrics.jsonl"))


def without_clocks(lines: list[dict]) -> list[dict]:
    return [
        {
            name: value
            for name, value in line.items()
            if name not in CLOCKS and "time/" not in name and "_per_second" not in name
        }
        for line in lines
    ]


def test_every_logged_scalar_is_written_with_what_was_generated(tmp_path):
    trainer = start(tmp_path, eval_strategy="steps", eval_steps=6, trainer={"eval_dataset": plain_dataset(4)})
    lines, history = lines_of(tmp_path), trainer.state.log_history
    assert len(lines) == len(history)
    for line, log in zip(lines, history):
        assert {name: line[name] for name in log} == log
    generated = [line["rollouts"] for line in lines]
    assert generated == sorted(generated)
    assert generated[-1] == trainer.collector.counters.values["rollouts_generated"]
    assert lines[-1]["tokens"] == trainer.collector.counters.values["tokens_generated"]
    evaluation = next(line for line in lines if "eval_reward" in line)
    assert evaluation["step"] == 6
    assert 0 < evaluation["rollouts"] < generated[-1]
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(lines))


def test_metrics_go_on_where_the_checkpoint_was(tmp_path):
    start(tmp_path)
    before = lines_of(tmp_path)
    start(tmp_path, train=False).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    after = lines_of(tmp_path)
    assert without_clocks(after[:-1]) == without_clocks(before[:-1])
    assert after[:5] == before[:5]
    assert {line["run"] for line in after} == {before[0]["run"]}
    assert after[5]["seconds"] >= after[4]["seconds"], "the time of training goes on"


def test_a_new_run_begins_new_files_and_a_resumed_one_gets_its_own_back(tmp_path):
    start(tmp_path)
    first = lines_of(tmp_path)
    start(tmp_path, max_steps=2, seed=3)
    assert len(lines_of(tmp_path)) == 3
    kept = list(read_lines(tmp_path / "dataeff" / f"metrics-{first[0]['run']}.jsonl"))
    assert kept == first
    start(tmp_path, train=False).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert lines_of(tmp_path)[:10] == first[:10]


def test_a_line_that_was_not_written_whole_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"run": "a", "step": 1, "seconds": 2.0}\n[1]\n{"run": "a", "st')
    log = MetricsLog(path)
    log.begin("a", 1)
    log.add({"reward": float("nan"), "loss": 0.5, "name": "text"}, step=2, rollouts=8, tokens=40)
    first, second = read_lines(path)
    assert first == {"run": "a", "step": 1, "seconds": 2.0}
    assert second.pop("seconds") >= 2.0
    assert second.pop("time") > 0
    assert second == {"run": "a", "step": 2, "rollouts": 8, "tokens": 40, "reward": None, "loss": 0.5}


def test_a_full_disk_does_not_stop_training(tmp_path, caplog_transformers):
    log = MetricsLog(tmp_path / "folder" / "metrics.jsonl")
    log.begin("a", 0)
    (tmp_path / "folder").write_text("in the way")
    log.add({"loss": 1.0}, step=1, rollouts=0, tokens=0)
    log.add({"loss": 2.0}, step=2, rollouts=0, tokens=0)
    assert len(messages(caplog_transformers, "could not be written")) == 1
    (tmp_path / "folder").unlink()
    log.add({"loss": 3.0}, step=3, rollouts=0, tokens=0)
    assert [line["loss"] for line in read_lines(log.path)] == [1.0, 2.0, 3.0]


def test_run_json_says_how_the_run_was_started(tmp_path):
    trainer = train(tmp_path, max_steps=2)
    about = json.loads((tmp_path / "dataeff" / "run.json").read_text())
    assert about["arguments"]["max_steps"] == 2
    assert "max_steps" in about["changed"]
    assert "adam_beta1" not in about["changed"]
    assert about["arguments"]["num_generations"] == trainer.args.num_generations
    assert about["command"]
    assert about["dataset"]["size"] == len(trainer.train_dataset)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/usr/bin/trl-dataeff", "grpo", "--config", "a b.yaml"], "trl-dataeff grpo --config 'a b.yaml'"),
        (["train.py", "--hub_token", "hf_x", "--lr", "1"], f"train.py --hub_token '{HIDDEN}' --lr 1"),
        (["train.py", "--hub_token=hf_x"], f"train.py '--hub_token={HIDDEN}'"),
        (["train.py", "--max_tokens", "5", "--api-key", "k"], f"train.py --max_tokens 5 --api-key '{HIDDEN}'"),
        ([], "''"),
    ],
)
def test_the_command_without_secrets(argv, shown):
    assert command(argv) == shown


def test_prompts_that_were_rolled_out_are_described(tmp_path):
    trainer = start(tmp_path)
    prompts = pd.read_parquet(tmp_path / "dataeff" / "prompts.parquet")
    groups = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    assert set(prompts["prompt_id"]) == set(groups["prompt_id"])
    for row in prompts.to_dict("records"):
        own = trainer.train_dataset[row["prompt_id"]]
        assert (row["prompt"], row["answer"]) == (own["prompt"], own["answer"])


def test_columns_of_prompts():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x" * 3000}]
    dataset = Dataset.from_dict(
        {"prompt": [chat], "level": [2], "source": ["s" * 300], "tags": [["a"]], "label": [1], "none": [None]}
    ).cast_column("label", ClassLabel(names=["easy", "hard"]))
    (row,) = prompt_rows(dataset, pd.Series([0]).to_numpy()).to_pylist()
    assert row["prompt"].startswith("Be brief.\nxxx")
    assert len(row["prompt"]) == LONGEST_PROMPT
    assert len(row["source"]) == 200
    assert (row["level"], row["label"]) == (2, "hard")
    assert "tags" not in row


def test_a_column_that_is_null_in_the_first_prompts(tmp_path, caplog_transformers):
    rows = {"prompt": list("abcd"), "level": [None, None, 3, 4], "source": [None, None, None, "s"]}
    dataset = Dataset.from_dict(rows)
    table = PromptTable(tmp_path / "prompts.parquet", lambda ids: prompt_rows(dataset, ids))
    for ids in ([0, 1], [0, 1, 2], [0, 1, 2, 3]):
        table.write(pd.Series(ids).to_numpy())
    assert not messages(caplog_transformers)
    written = pd.read_parquet(tmp_path / "prompts.parquet")
    assert written["source"].tolist()[3] == "s"
    assert written["level"].tolist()[2:] == [3, 4]


def test_a_dataset_that_cannot_be_read_is_only_warned_of(tmp_path, caplog_transformers):
    def fails(ids):
        raise ValueError("no such column")

    PromptTable(tmp_path / "prompts.parquet", fails).write(pd.Series([1]).to_numpy())
    assert len(messages(caplog_transformers, "could not be written")) == 1
