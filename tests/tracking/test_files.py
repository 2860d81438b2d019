"""What a run writes beside its checkpoints: `metrics.jsonl`, `groups.parquet`, `run.json`, and its model card."""

import json
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from huggingface_hub import ModelCard

from tests.factories.comparison import history, messages
from tests.factories.groups import make_group
from tests.factories.tiny import even_length_reward, plain_dataset, run, save_tiny
from tests.factories.training import mixed_reward
from trl_dataeff.rollouts.scale import RewardScale
from trl_dataeff.tracking.files import read_groups
from trl_dataeff.tracking.groups import GroupLog
from trl_dataeff.tracking.methods import methods_used
from trl_dataeff.tracking.metrics import MetricsLog
from trl_dataeff.utils import UserError


start = partial(run, rewards=mixed_reward, max_rollout_rounds=4, save_strategy="steps", save_steps=5)


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "dataeff" / "metrics.jsonl").read_text().splitlines()]


def without_clocks(lines: list[dict]) -> list[dict]:
    return history([{name: value for name, value in line.items() if name != "seconds"} for line in lines])


def test_every_logged_scalar_is_written_with_what_was_generated(tmp_path):
    trainer = start(tmp_path, eval_strategy="steps", eval_steps=6, trainer={"eval_dataset": plain_dataset(4)})
    lines = lines_of(tmp_path)
    for line, log in zip(lines, trainer.state.log_history, strict=True):
        assert {name: line[name] for name in log} == log
    generated = [line["rollouts"] for line in lines]
    assert generated == sorted(generated)
    assert generated[-1] == trainer._dataeff_observer.counters["rollouts_generated"]
    evaluation = next(line for line in lines if "eval_reward" in line)
    assert 0 < evaluation["rollouts"] < generated[-1]
    assert evaluation["dataeff/rollouts_generated"] == evaluation["rollouts"], "an x axis for held-out reward"
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(lines))


def test_files_go_on_where_the_checkpoint_was(tmp_path):
    start(tmp_path)
    before = lines_of(tmp_path)
    start(tmp_path, resume=str(tmp_path / "checkpoint-5"))
    after = lines_of(tmp_path)
    assert without_clocks(after) == without_clocks(before)
    assert after[:5] == before[:5]
    assert after[5]["seconds"] >= after[4]["seconds"], "the time of training goes on"


def test_a_new_run_begins_new_files(tmp_path):
    start(tmp_path)
    start(tmp_path, max_steps=2, seed=3)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 2]
    assert read_groups(tmp_path / "dataeff" / "groups.parquet")["step"].to_numpy().max() == 1


def test_a_line_that_was_not_written_whole_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "seconds": 2.0}\n[1]\n{"step": 1, "st')
    log = MetricsLog(path)
    log.begin(1)
    log.add({"reward": float("nan"), "loss": 0.5, "name": "text", "seconds": 0}, step=2, rollouts=8, tokens=40)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"step": 1, "seconds": 2.0}
    assert second.pop("seconds") >= 2.0
    assert second == {"step": 2, "rollouts": 8, "tokens": 40, "reward": None, "loss": 0.5}


def told(success_rate: float, predicted: float, seconds: float) -> dict[str, list]:
    """What the table is told of a group, beside the group."""
    values = {"success_rates": [success_rate], "predicted": [predicted], "seconds": [seconds]}
    return {**values, "origins": ["fresh"], "dispositions": ["trained"]}


def add_scalars(log, step):
    log.add({"loss": 1.0}, step=step, rollouts=0, tokens=0)


def add_groups(log, step):
    log.add([make_group(step=step)], **told(0.5, 0.5, 0.1))
    log.flush(force=True)


@pytest.mark.parametrize(
    ("kind", "add", "read"),
    [
        (MetricsLog, add_scalars, lambda path: pd.read_json(path, lines=True)),
        (GroupLog, add_groups, pd.read_parquet),
    ],
)
def test_a_full_disk_does_not_stop_training(tmp_path, caplog_transformers, kind, add, read):
    log = kind(tmp_path / "folder" / "file")
    (tmp_path / "folder").write_text("in the way")
    add(log, 1)
    add(log, 2)
    assert len(messages(caplog_transformers, "could not be written")) == 1
    (tmp_path / "folder").unlink()
    add(log, 3)
    assert read(log.path)["step"].tolist() == [1, 2, 3]


def test_a_group_by_hand(tmp_path):
    log = GroupLog(tmp_path / "groups.parquet")
    rewards = np.float32([[1, 0], [0, 2]])
    group = make_group(prompt_id=7, step=4, rewards=rewards, totals=np.float32([1, 1]))
    log.add([group], **told(float("nan"), 0.25, 1.5))
    log.flush(force=True)
    (row,) = pd.read_parquet(log.path).to_dict("records")
    assert (row["prompt_id"], row["step"], row["reward"], row["completions"]) == (7, 4, 1.0, 2)
    assert np.isnan(row["success_rate"])
    assert (row["predicted"], row["seconds"]) == (0.25, 1.5)
    assert (row["origin"], row["disposition"]) == ("fresh", "trained")


def test_a_table_that_cannot_be_read_is_replaced(tmp_path, caplog_transformers):
    log = GroupLog(tmp_path / "groups.parquet")
    log.path.write_text("no parquet")
    with pytest.raises(UserError, match="no table of groups"):
        read_groups(log.path)
    log.begin(3, "", RewardScale())
    assert len(messages(caplog_transformers, "a new table begins with step 3")) == 1


def test_run_json_and_the_card_say_what_happened(tmp_path):
    options = {"selection": "dots", "replay": "share", "per_device_train_batch_size": 16}
    trainer = start(tmp_path, rewards=even_length_reward, **options)
    about = json.loads((tmp_path / "dataeff" / "run.json").read_text())
    assert (about["selector"], about["prompts"]) == ("DotsSelector", 24)
    card = (tmp_path / "README.md").read_text()
    assert "DOTS selection" in card
    assert "replay" in card
    assert "dynamic sampling" in card
    counts = trainer._dataeff_observer.counters
    share = counts["rollouts_replayed"] / counts["rollouts_trained"]
    assert f"{share:.0%} of the trained rollouts were replayed" in card
    assert f"{counts['rollouts_discarded']:,} rollouts were dropped" in card
    assert "arXiv:2506.05316" in card and "arXiv:2503.14476" in card and "arXiv:2506.02177" not in card  # noqa: PT018
    assert trainer._dataeff_observer.counters["rollouts_replayed"] > 0
    trainer.create_model_card(model_name=tmp_path.name)  # as `push_to_hub` does
    assert (tmp_path / "README.md").read_text() == card
    # One group in a batch: half of it rounds to none, so that no replay is claimed
    start(tmp_path / "none", max_rollout_rounds=1, replay="share", per_device_train_batch_size=4)
    card = (tmp_path / "none" / "README.md").read_text()
    assert "plain GRPO" in card
    assert "replayed" not in card


@pytest.mark.parametrize(
    ("folder", "said", "metadata"),
    [
        ("mine/small", "a fine-tuned version of the local model `small`.", {}),
        (
            "models--of--small/snapshots/0a1b",
            "a fine-tuned version of [of/small](https://huggingface.co/of/small).",
            {"base_model": "of/small"},
        ),
    ],
)
def test_the_card_names_a_model_in_a_folder(tmp_path, folder, said, metadata):
    out = tmp_path / "out"
    model = {"model": save_tiny(tmp_path / folder)}
    trainer = run(out, max_steps=1, save_strategy="steps", save_steps=1, trainer=model)
    card = ModelCard.load(out / "README.md")
    assert said in card.text
    assert f'pipeline("text-generation", model="{out}"' in card.text
    assert "None" not in card.content
    assert {name: value for name, value in card.data.to_dict().items() if name == "base_model"} == metadata
    assert trainer.model.config._name_or_path == str(tmp_path / folder)


@pytest.mark.parametrize(
    ("selector", "highest", "said"),
    [
        ("UniformSelector", {}, ["plain GRPO"]),
        (None, {"update/tokens_saved": 0.4}, ["plain GRPO", "faster update"]),
        (
            "UniformSelector",
            {"rollouts_replayed": 5, "rollouts_trained": 10},
            ["uniform selection", "replay"],
        ),
        ("DotsSelector", {"update/tokens_saved": 0.4}, ["DOTS selection", "faster update"]),
        ("DotsSelector", {"rollouts_replayed": 0, "rounds": 2}, ["DOTS selection", "replay", "dynamic sampling"]),
    ],
)
def test_what_a_run_did_is_said_in_words(selector, highest, said):
    logged = {f"dataeff/{name}": value for name, value in highest.items()}
    assert methods_used({"selector": selector}, logged) == said


def test_the_card_of_a_stream_is_written(tmp_path):
    """No selector proposes prompts that come from TRL's dataloader."""
    stream = {"train_dataset": plain_dataset().to_iterable_dataset()}
    run(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, trainer=stream)
    assert "plain GRPO" in (tmp_path / "README.md").read_text()


def test_training_imports_no_plotting_and_no_pandas_of_ours():
    code = (
        "import sys, trl, trl.trainer.grpo_trainer; before = set(sys.modules)\n"
        "import trl_dataeff.trainer, trl_dataeff.collector\n"
        "print([m for m in ('matplotlib', 'pandas') if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_a_write_of_the_table_takes_no_longer_for_the_number_of_writes_before(tmp_path):
    """The last of 600 writes has 30 times the rows of the twentieth, which cost little beside the file itself."""
    log = GroupLog(tmp_path / "groups.parquet")
    log.begin(0, "", RewardScale())
    groups = [make_group()] * 8
    columns = {"success_rates": [0.5] * 8, "predicted": [0.5] * 8, "seconds": [0.1] * 8}
    seconds = []
    for _ in range(600):
        log.add(groups, **columns, origins=["fresh"] * 8, dispositions=["trained"] * 8)
        started = time.process_time()
        log.flush(force=True)
        seconds.append(time.process_time() - started)
    assert min(seconds[-20:]) < 6 * min(seconds[:20])
    assert len(read_groups(tmp_path / "groups.parquet")) == 600 * 8
