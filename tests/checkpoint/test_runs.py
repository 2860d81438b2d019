"""Which run a folder is used for: a run that starts again, and runs that share a folder."""

import json
import signal
from pathlib import Path

import pandas as pd
import pytest

from tests.factories import checkpoint_names, groups_since, history, make_trainer, messages, train
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.checkpoint.manifest import MANIFEST, check_checkpoint
from trl_dataeff.checkpoint.runs import RUN_FILE, latest_run, run_of
from trl_dataeff.checkpoint.state import CheckpointError
from trl_dataeff.utils import hash_json


TABLE = "dataeff/groups.parquet"


class Killed(BaseException):
    """As good as SIGKILL: nothing of the trainer's own handles it."""


def kill(*args, **kwargs):
    raise Killed


def stop_at(trainer, step: int) -> None:
    """Train, and send SIGTERM in the step before `step`."""
    plain, pending = trainer.reward_funcs[0], [signal.SIGTERM]

    def reward(*args, **kwargs):
        if trainer.state.global_step == step - 1 and pending:
            signal.raise_signal(pending.pop())
        return plain(*args, **kwargs)

    trainer.reward_funcs = [reward]
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.state.global_step == step


def fail_at(trainer, step: int) -> list[str]:
    """Train until the reward function fails in the step after `step`; the notes of its error."""
    plain = trainer.reward_funcs[0]

    def reward(*args, **kwargs):
        if trainer.state.global_step == step:
            raise KeyError("answer")
        return plain(*args, **kwargs)

    trainer.reward_funcs = [reward]
    with pytest.raises(KeyError) as raised:
        trainer.train()
    return raised.value.__notes__


@pytest.fixture
def two_runs(tmp_path) -> tuple[str, str]:
    """A folder that was used for two runs: 6 steps of the first, then 3 of the second, stopped. Their ids."""
    train(tmp_path, max_steps=6, save_steps=6)
    first = latest_run(tmp_path)
    stop_at(make_trainer(tmp_path, "dynamic", max_steps=12, save_steps=100, save_on_signal=True, seed=7), 3)
    return first, latest_run(tmp_path)


# A run without a checkpoint


@pytest.mark.parametrize("present", ["empty", "absent"])
def test_true_without_any_checkpoint_warns_and_starts_from_step_0(tmp_path, present, caplog_transformers):
    folder = tmp_path / "run"
    if present == "empty":
        folder.mkdir()
    trainer = train(folder, resume=True, max_steps=2)
    assert trainer.state.global_step == 2
    (said,) = messages(caplog_transformers, "There is no complete checkpoint")
    assert said == f"There is no complete checkpoint of this run in {folder}: training starts from step 0."
    with pytest.raises(CheckpointError, match="no such folder"):
        train(folder, resume=str(folder / "checkpoint-9"))


def test_a_run_killed_in_its_first_save_is_restarted_by_the_same_command(tmp_path, monkeypatch, caplog_transformers):
    whole = train(tmp_path / "whole", max_steps=4, save_steps=2)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(DataEfficientGRPOTrainer, "_save_rng_state", kill, raising=False)
        with pytest.raises(Killed):
            train(folder, resume=True, max_steps=4, save_steps=2)
    assert checkpoint_names(folder) == {"checkpoint-2"}
    with pytest.raises(CheckpointError, match="checkpoint-2 is incomplete"):
        train(folder, resume=str(folder / "checkpoint-2"))
    caplog_transformers.clear()
    again = train(folder, resume=True, max_steps=4, save_steps=2)
    assert checkpoint_names(folder) == {"_incomplete-checkpoint-2", "checkpoint-2", "checkpoint-4"}
    (said,) = messages(caplog_transformers, "There is no complete checkpoint of the last run")
    assert "renamed, and can be deleted: _incomplete-checkpoint-2." in said
    assert history(again.state.log_history) == history(whole.state.log_history)
    pd.testing.assert_frame_equal(groups_since(folder, 0), groups_since(tmp_path / "whole", 0))
    check_checkpoint(folder / "checkpoint-2")


def test_a_complete_checkpoint_that_is_corrupt_is_never_set_aside(tmp_path):
    train(tmp_path, max_steps=1)
    (tmp_path / "checkpoint-1" / "optimizer.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"No checkpoint in .* can be resumed from:\n- .*optimizer.pt is missing"
    ):
        train(tmp_path, resume=True)
    assert checkpoint_names(tmp_path) == {"checkpoint-1"}


def test_a_checkpoint_of_another_trainer_is_never_set_aside(tmp_path):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not written by DataEfficientGRPOTrainer at all"):
        train(tmp_path, resume=True)
    assert checkpoint.is_dir()


# Runs that share a folder


def test_the_run_is_named_in_its_folder_and_in_its_checkpoints_and_keeps_its_id(tmp_path):
    train(tmp_path, max_steps=2)
    first = json.loads((tmp_path / RUN_FILE).read_text())
    assert run_of(tmp_path / "checkpoint-2") == first["run"] == latest_run(tmp_path)
    assert first["dataset"]["size"] == 24
    assert first["resumed"] == []
    train(tmp_path, max_steps=3, resume=True)
    second = json.loads((tmp_path / RUN_FILE).read_text())
    assert (second["run"], second["started"]) == (first["run"], first["started"])
    assert [entry["checkpoint"] for entry in second["resumed"]] == [str(tmp_path / "checkpoint-2")]
    train(tmp_path, max_steps=1)
    assert latest_run(tmp_path) != first["run"]


def test_true_takes_the_checkpoint_of_the_latest_run_and_mentions_the_others(tmp_path, two_runs, caplog_transformers):
    first, second = two_runs
    assert checkpoint_names(tmp_path) == {"checkpoint-6", "checkpoint-3"}
    caplog_transformers.clear()
    resumed = train(tmp_path, resume=True, max_steps=4, save_steps=100, seed=7)
    assert resumed.state.log_history[0]["step"] == 1
    assert resumed.state.global_step == 4, "the other run's checkpoint-6 was taken"
    (said,) = messages(caplog_transformers, "checkpoints of other runs")
    assert f"Resuming from {tmp_path / 'checkpoint-3'}" in said
    assert "(checkpoint-6)" in said
    assert latest_run(tmp_path) == second
    assert run_of(tmp_path / "checkpoint-6") == first


def test_true_with_checkpoints_of_other_runs_alone_starts_a_run_and_names_them(tmp_path, caplog_transformers):
    train(tmp_path, max_steps=2, save_steps=2)
    fail_at(make_trainer(tmp_path, "dynamic"), 0)  # another run, without a checkpoint
    train(tmp_path, max_steps=1, resume=True, save_strategy="no")
    (said,) = messages(caplog_transformers, "There is no complete checkpoint of the last run")
    assert "Checkpoints of other runs are not used: checkpoint-2." in said
    assert f"`resume_from_checkpoint='{tmp_path / 'checkpoint-2'}'`" in said


def test_advice_after_a_stop_names_the_path(tmp_path, caplog_transformers):
    stop_at(make_trainer(tmp_path, "dynamic", save_steps=100, save_on_signal=True), 3)
    (said,) = messages(caplog_transformers, "Stopped by SIGTERM after step 3 of 12")
    path = tmp_path / "checkpoint-3"
    assert f"`trainer.train(resume_from_checkpoint='{path}')`, or `--resume_from_checkpoint {path}`" in said


def test_notes_of_a_failure_name_this_runs_checkpoint_or_none(tmp_path):
    train(tmp_path, max_steps=6, save_steps=6)
    notes = fail_at(make_trainer(tmp_path, "dynamic", save_steps=2), 1)
    assert not [note for note in notes if "resume" in note], "the other run's checkpoint"
    notes = fail_at(make_trainer(tmp_path, "dynamic", save_steps=2), 3)
    (note,) = [note for note in notes if "resume" in note]
    assert note.startswith(f"The latest complete checkpoint of this run is {tmp_path / 'checkpoint-2'}.")


def test_a_new_run_in_a_used_folder_warns_at_the_start(tmp_path, caplog_transformers):
    train(tmp_path, max_steps=2, save_steps=2)
    assert not messages(caplog_transformers, "another run")
    seen = []
    trainer = make_trainer(tmp_path, "dynamic", max_steps=1)
    trainer.reward_funcs = [
        lambda completions, **_: [seen.append(messages(caplog_transformers, "another run")) or 1.0] * len(completions)
    ]
    trainer.train()
    (said,) = seen[0]
    assert f"{tmp_path} holds checkpoints of another run (checkpoint-2)" in said
    assert "set another `output_dir`" in said
    assert f"`resume_from_checkpoint='{tmp_path / 'checkpoint-2'}'`" in said


def test_runs_are_never_mixed_in_one_table(tmp_path, two_runs):
    first, second = two_runs
    of_first = pd.read_parquet(tmp_path / "dataeff" / f"groups-{first}.parquet")
    of_second = pd.read_parquet(tmp_path / TABLE)
    assert of_first["step"].max() == 5
    assert of_second["step"].max() == 2
    train(tmp_path, resume=str(tmp_path / "checkpoint-6"), max_steps=7, save_steps=100)
    now = pd.read_parquet(tmp_path / TABLE)
    pd.testing.assert_frame_equal(now[now["step"] < 6], of_first)
    assert now["step"].max() == 6
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "dataeff" / f"groups-{second}.parquet"), of_second)
    assert latest_run(tmp_path) == first


def test_save_total_limit_leaves_other_runs_alone(tmp_path):
    train(tmp_path, max_steps=6, save_steps=3)
    train(tmp_path, max_steps=5, save_steps=1, save_total_limit=1)
    assert checkpoint_names(tmp_path) == {"checkpoint-6", "checkpoint-5"}  # checkpoint-3 is replaced


def test_a_run_that_fails_before_it_trains_leaves_the_folder_to_the_last_one(tmp_path, monkeypatch):
    train(tmp_path, max_steps=2)
    first, table = latest_run(tmp_path), (tmp_path / TABLE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("trl_dataeff.trainer.make_collector", kill)
        with pytest.raises(Killed):
            train(tmp_path, max_steps=2)
    assert latest_run(tmp_path) == first
    assert (tmp_path / TABLE).read_bytes() == table
    assert train(tmp_path, resume=True, max_steps=3).state.global_step == 3


@pytest.mark.parametrize("damage", ["{", '{"run": 3}', "[]"])
def test_a_run_json_that_cannot_be_read_is_ignored(tmp_path, damage, caplog_transformers):
    train(tmp_path, max_steps=2)
    run = latest_run(tmp_path)
    (tmp_path / RUN_FILE).write_text(damage)
    assert train(tmp_path, resume=True, max_steps=3).state.global_step == 3
    assert messages(caplog_transformers, f"{tmp_path / RUN_FILE} cannot be read")
    assert latest_run(tmp_path) == run


def test_a_folder_without_run_json_resumes_its_latest_checkpoint(tmp_path):
    train(tmp_path, max_steps=2)
    run = latest_run(tmp_path)
    (tmp_path / RUN_FILE).unlink()
    assert train(tmp_path, resume=True, max_steps=3).state.global_step == 3
    assert latest_run(tmp_path) == run


def test_a_checkpoint_that_names_no_run_is_resumed(tmp_path):
    """As one of an earlier version."""
    train(tmp_path, max_steps=2)
    run, path = latest_run(tmp_path), Path(tmp_path / "checkpoint-2" / MANIFEST)
    manifest = json.loads(path.read_text())
    del manifest["run"], manifest["xxh3_128"]
    path.write_text(json.dumps(manifest | {"xxh3_128": hash_json(manifest)}))
    assert train(tmp_path, resume=True, max_steps=3).state.global_step == 3
    assert latest_run(tmp_path) == run
