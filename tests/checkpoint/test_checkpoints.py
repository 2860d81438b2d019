"""Which checkpoints are complete, which one is resumed, and that there always is one."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from transformers import TrainerCallback
from transformers.utils import logging

from tests.factories.comparison import checkpoint_names, groups_since, history, messages
from tests.factories.configurations import make_trainer, train
from tests.factories.tiny import logged, plain_dataset, run
from tests.factories.training import before_reward
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff import trainer as trainer_module
from trl_dataeff.checkpoint import manifest as manifest_module
from trl_dataeff.checkpoint import resume
from trl_dataeff.checkpoint.manifest import MANIFEST, check_checkpoint, is_complete
from trl_dataeff.checkpoint.resume import ResumedRun, checkpoints, failure_notes, remove_older, resolve_run
from trl_dataeff.checkpoint.state import CheckpointError
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.utils import UserError, hash_json, write_atomically


class Killed(BaseException):
    """As good as SIGKILL: nothing of the trainer's own handles it."""


def notes_of_failure(trainer, step: int) -> list[str]:
    """Train until the reward function fails in the step after `step`; the notes of its error."""
    before_reward(trainer, step, Mock(side_effect=KeyError("answer")))
    with pytest.raises(KeyError) as raised:
        trainer.train()
    return raised.value.__notes__


# Which checkpoint is resumed


def test_the_latest_complete_one_is_taken_and_said(tmp_path, caplog_transformers):
    whole = train(tmp_path)
    (tmp_path / "checkpoint-12" / MANIFEST).unlink()
    path = tmp_path / "checkpoint-11" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "checkpoint-10" / "optimizer.pt").unlink()
    again = train(tmp_path, resume=True)
    assert len(messages(caplog_transformers, str(tmp_path / "checkpoint-9"))) == 1
    (said,) = messages(caplog_transformers, "Rejected")
    rejected = {re.search(r"checkpoint-\d+", line)[0]: line for line in said.split("\n")[1:]}
    assert rejected.keys() == {"checkpoint-11", "checkpoint-10"}
    assert "model.safetensors" in rejected["checkpoint-11"]
    assert "optimizer.pt" in rejected["checkpoint-10"]
    assert history(again.state.log_history) == history(whole.state.log_history)
    for path in checkpoints(tmp_path):
        check_checkpoint(path)


def test_of_two_runs_in_a_folder_the_later_one_is_resumed(tmp_path, caplog_transformers):
    train(tmp_path, max_steps=6, save_steps=6)
    assert not messages(caplog_transformers, "`output_dir`")
    train(tmp_path, max_steps=3, save_steps=3, seed=7)
    (said,) = messages(caplog_transformers, "`output_dir`")
    assert str(tmp_path) in said
    assert "checkpoint-6" in said
    resumed = train(tmp_path, resume=True, max_steps=4, save_steps=100, seed=7)
    assert resumed.state.global_step == 4, "the other run's checkpoint-6 was taken"
    assert train(tmp_path, resume=str(tmp_path / "checkpoint-6"), max_steps=7).state.global_step == 7


def test_without_a_complete_checkpoint_true_warns_and_starts_from_step_0(tmp_path, caplog_transformers):
    """Also after a run that was killed in its first save."""
    groups = []
    for _ in range(2):
        assert train(tmp_path, resume=True, max_steps=2, save_steps=2).state.global_step == 2
        groups.append(groups_since(tmp_path, 0))
        (tmp_path / "checkpoint-2" / MANIFEST).unlink()
    pd.testing.assert_frame_equal(*groups)
    assert len(messages(caplog_transformers, str(tmp_path))) == 2
    for name, named in (("checkpoint-2", MANIFEST), ("checkpoint-9", "exist")):
        with pytest.raises(CheckpointError, match=f"{name} .*{named}"):
            train(tmp_path, resume=str(tmp_path / name))


@pytest.mark.parametrize("station", ["before rmtree", "in rmtree", "_save_rng_state"])
def test_killed_while_a_complete_one_is_written_again(tmp_path, monkeypatch, station):
    """An earlier one is resumed, and a half-deleted or half-written one never: the manifest goes first."""
    whole = train(tmp_path, max_steps=4)
    remove = shutil.rmtree

    def remove_half(path, **kwargs):
        if station == "in rmtree":
            remove(Path(path) / "dataeff", **kwargs)
        raise Killed

    with monkeypatch.context() as patch:
        if "rmtree" in station:
            patch.setattr(resume.shutil, "rmtree", remove_half)
        else:
            patch.setattr(DataEfficientGRPOTrainer, station, Mock(side_effect=Killed), raising=False)
        with pytest.raises(Killed):
            train(tmp_path, max_steps=4, resume=str(tmp_path / "checkpoint-3"))
    assert not is_complete(tmp_path / "checkpoint-4")
    assert resolve_run(True, tmp_path).checkpoint == str(tmp_path / "checkpoint-3")
    again = train(tmp_path, max_steps=4, resume=True)
    assert history(again.state.log_history) == history(whole.state.log_history)


@pytest.mark.parametrize("kind", ["corrupt", "of another trainer"])
def test_a_checkpoint_that_may_be_of_use_is_never_replaced_by_a_new_start(tmp_path, kind):
    checkpoint = tmp_path / "checkpoint-1"
    if kind == "corrupt":
        train(tmp_path, max_steps=1)
        (checkpoint / "model.safetensors").unlink()
    else:
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text("{}")
    named = {"corrupt": "model.safetensors", "of another trainer": "DataEfficientGRPOTrainer"}[kind]
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*\n- .*checkpoint-1.*{named}"):
        train(tmp_path, resume=True)
    assert checkpoint.is_dir()


def test_only_the_model(tmp_path, caplog_transformers, monkeypatch):
    """Such a checkpoint cannot be resumed from, and no message advises it."""
    options = {"save_only_model": True, "save_steps": 1, "save_on_signal": True}
    trainer = make_trainer(tmp_path, "dynamic", **options)
    before_reward(trainer, 0, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.train()
    (said,) = messages(caplog_transformers, "SIGTERM")
    assert "`save_only_model=True`" in said
    assert "resume_from_checkpoint" not in said
    for wanted in (True, str(tmp_path / "checkpoint-1")):
        with pytest.raises(CheckpointError, match="`save_only_model=True`"):
            trainer.train(resume_from_checkpoint=wanted)
    notes = notes_of_failure(make_trainer(tmp_path / "failed", "dynamic", **options), 2)
    assert not [note for note in notes if "resume" in note]
    monkeypatch.setattr(resume, "write_manifest", Mock(side_effect=FULL))
    with pytest.raises(CheckpointError, match=str(tmp_path / "full")):
        train(tmp_path / "full", **options)


@pytest.mark.parametrize("configuration", ["dynamic", "off"])
def test_another_learning_rate_is_said(tmp_path, caplog_transformers, configuration):
    options = {"name": configuration, "max_steps": 4, "save_steps": 1}
    train(tmp_path, **options, learning_rate=1e-3)
    again = train(tmp_path, **options, learning_rate=5e-2, resume=str(tmp_path / "checkpoint-2"))
    (said,) = messages(caplog_transformers, "`learning_rate`")
    assert "0.05" in said
    assert "0.001" in said
    assert [log["learning_rate"] for log in again.state.log_history[2:4]] == pytest.approx([5e-4, 2.5e-4])
    assert not messages(caplog_transformers, "jumps")


def test_the_rate_that_counts_is_the_one_when_training_began(tmp_path, caplog_transformers):
    options = {"name": "dynamic", "max_steps": 4, "save_steps": 1}
    trainer = make_trainer(tmp_path, **options, learning_rate=1e-3)
    trainer.args.learning_rate = 5e-2
    trainer.train()
    train(tmp_path, **options, learning_rate=5e-2, resume=str(tmp_path / "checkpoint-2"))
    assert not messages(caplog_transformers, "`learning_rate`")


class BatchWithSets(DataEfficientGRPOTrainer):
    """Adds a set for each row, for a loss of its own."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["words"] = [{row} for row in range(len(inputs))]
        return batch


class BatchWithOneSet(BatchWithSets):
    """Only the last micro-batch has one."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["words"] = torch.arange(len(inputs))
        return batch

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self._buffered_inputs[-1]["words"] = [{1}]
        return inputs


@pytest.mark.parametrize("trainer_class", [BatchWithSets, BatchWithOneSet])
@pytest.mark.parametrize("fields", [{}, {"selection": "dots", "replay": "fill"}], ids=["default", "dots"])
def test_a_half_used_batch_that_cannot_be_written_costs_nothing_but_itself(
    tmp_path, caplog_transformers, fields, trainer_class
):
    logging.warning_once.cache_clear()  # a line is said once in a process
    options = {"steps_per_generation": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1, **fields}
    run(tmp_path, trainer_class, **options)
    (said,) = messages(caplog_transformers, "half-used")
    assert "words" in said
    caplog_transformers.clear()
    again = run(tmp_path, trainer_class, **options, resume=str(tmp_path / "checkpoint-1"))
    assert again.state.global_step == 4


@pytest.mark.parametrize("betas", [(0.0, 0.1), (0.1, 0.0)])
def test_a_half_used_batch_without_reference_log_probs_is_not_resumed_with_a_kl_term(
    tmp_path, caplog_transformers, betas
):
    """With TRL, a batch begins there."""
    options = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    run(tmp_path, **options, beta=betas[0])
    run(tmp_path, **options, beta=betas[0], resume=str(tmp_path / "checkpoint-3"))
    assert not messages(caplog_transformers, "half-used")
    again = run(tmp_path, **options, beta=betas[1], resume=str(tmp_path / "checkpoint-1"))
    assert messages(caplog_transformers, "half-used")
    assert again.state.global_step == 4


def test_a_default_run_with_another_setting_goes_on_counting(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = run(tmp_path, **options)
    again = run(tmp_path, **options, beta=0.1, resume=str(tmp_path / "checkpoint-2"))
    counted = [logged(trainer, "dataeff/rollouts_generated") for trainer in (whole, again)]
    assert counted[0] == counted[1]
    assert counted[0][-1][0] == 4 * counted[0][0][0]


def test_selection_does_not_go_on_from_a_default_run(tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    run(tmp_path, **options)
    with pytest.raises(CheckpointError, match="selector = None, not 'GresoSelector'"):
        run(tmp_path, **options, selection="greso", resume=str(tmp_path / "checkpoint-2"))


def test_another_number_of_processes_or_version_is_said(tmp_path, caplog_transformers, monkeypatch):
    train(tmp_path, max_steps=4, save_steps=1)
    resolve_run(True, tmp_path)
    assert not messages(caplog_transformers, "checkpoint-")
    monkeypatch.setattr(resume, "version", lambda name: "99.0")
    resolve_run(True, tmp_path, Processes(world_size=2, gather=lambda x: x))
    (said,) = messages(caplog_transformers, "99.0")
    assert f"torch {version('torch')}" in said  # without a build such as `+cu130`
    assert re.search(r"\b1 processes.*\b2\b", said)


# Which checkpoints are kept


def test_the_manifest_is_there_before_an_older_one_goes(tmp_path, monkeypatch):
    seen = []

    def watched(checkpoint, *args):
        assert is_complete(checkpoint)
        before = checkpoint_names(tmp_path)
        remove_older(checkpoint, *args)
        seen.append((len(before), checkpoint_names(tmp_path)))

    monkeypatch.setattr(trainer_module, "remove_older", watched)
    train(tmp_path, max_steps=4, save_total_limit=1)
    assert seen == [(min(n, 2), {f"checkpoint-{n}"}) for n in (1, 2, 3, 4)]


def test_save_total_limit_and_the_best_model(tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_reward",
        "greater_is_better": True,
        "save_total_limit": 2,
        "trainer": {"train_dataset": plain_dataset(), "eval_dataset": plain_dataset(4)},
    }
    trainer = train(tmp_path, "off", max_steps=6, **options)
    best = Path(trainer.state.best_model_checkpoint)
    others = {"checkpoint-5"} if best.name == "checkpoint-6" else set()
    assert checkpoint_names(tmp_path) == {best.name, "checkpoint-6"} | others
    check_checkpoint(best)
    assert train(tmp_path, "off", max_steps=8, resume=True, **options).state.global_step == 8


def test_a_later_corrupt_one_does_not_cost_the_one_just_written(tmp_path):
    """All within a second, so that the Trainer's own rotation would go by the step's number."""
    train(tmp_path, max_steps=4)
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    (tmp_path / "checkpoint-3" / MANIFEST).unlink()
    train(tmp_path, max_steps=3, resume=str(tmp_path / "checkpoint-2"), save_total_limit=1)
    check_checkpoint(tmp_path / "checkpoint-3")


def test_the_clock_does_not_decide_which_one_is_latest(tmp_path, monkeypatch):
    """It is set back by an hour after the second checkpoint."""
    now = manifest_module.time.time

    def clock() -> float:
        return now() - 3600 * ((tmp_path / "checkpoint-2").exists() and is_complete(tmp_path / "checkpoint-2"))

    monkeypatch.setattr(manifest_module.time, "time", clock)
    train(tmp_path, max_steps=7, save_total_limit=2)
    assert checkpoint_names(tmp_path) == {"checkpoint-6", "checkpoint-7"}
    assert resolve_run(True, tmp_path).checkpoint == str(tmp_path / "checkpoint-7")


def test_checkpoints_of_a_version_without_numbers_are_older_and_ordered_by_time(tmp_path):
    train(tmp_path, max_steps=3)
    for step, written in ((3, 100.0), (2, 200.0)):
        path = tmp_path / f"checkpoint-{step}" / MANIFEST
        content = json.loads(path.read_text())
        del content["order"], content["hash"]
        content["written"] = written
        path.write_text(json.dumps({**content, "hash": hash_json(content)}))
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("how", ["a limit", "the same step"])
def test_removing_a_link_leaves_the_run_that_it_points_to(tmp_path, how):
    train(tmp_path / "a", max_steps=2)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoint-2").symlink_to(tmp_path / "a" / "checkpoint-2", target_is_directory=True)
    options = {"save_total_limit": 1} if how == "a limit" else {}
    train(tmp_path / "b", max_steps=3 if how == "a limit" else 2, resume=False, **options)
    check_checkpoint(tmp_path / "a" / "checkpoint-2")
    if how == "a limit":
        assert checkpoint_names(tmp_path / "b") == {"checkpoint-3"}
    assert resolve_run(True, tmp_path / "a").checkpoint == str(tmp_path / "a" / "checkpoint-2")


class Edits(TrainerCallback):
    """Changes a file of each checkpoint when it is saved."""

    def __init__(self, name: str, edit):
        self.name = name
        self.edit = edit

    def on_save(self, args, state, control, **kwargs):
        self.edit(Path(args.output_dir, f"checkpoint-{state.global_step}", self.name))


def append_space(path: Path) -> None:
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("generation_config.json", append_space),
        ("tokenizer_config.json", append_space),
        ("config.json", append_space),
        ("tokenizer.json", Path.unlink),
        ("training_args.bin", Path.unlink),
        ("optimizer.pt", Path.unlink),
    ],
)
def test_a_callback_may_change_what_does_not_decide_the_run(tmp_path, caplog_transformers, name, edit):
    trainer = make_trainer(tmp_path, "dynamic", max_steps=4)
    trainer.add_callback(Edits(name, edit))
    trainer.train()
    resumed = train(tmp_path, max_steps=6, resume=True)
    assert resumed.state.global_step == 6
    (said,) = messages(caplog_transformers, name)
    assert ("is missing" in said) == (edit is Path.unlink)
    assert "Rejected" not in said
    assert resolve_run(str(tmp_path / "checkpoint-3"), tmp_path).checkpoint


@pytest.mark.parametrize("name", ["trainer_state.json", "model.safetensors", "scheduler.pt", "rng_state.pth"])
def test_one_flipped_bit_of_what_decides_the_run_costs_one_checkpoint(tmp_path, name):
    train(tmp_path, max_steps=3)
    path = tmp_path / "checkpoint-3" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert resolve_run(True, tmp_path).checkpoint == str(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        resolve_run(str(tmp_path / "checkpoint-3"), tmp_path)


class Sharded(DataEfficientGRPOTrainer):
    """Writes an index of shards, as for a large model."""

    def save_model(self, output_dir=None, **kwargs):
        super().save_model(output_dir, **kwargs)
        Path(output_dir, "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))


def test_a_damaged_index_of_shards_costs_one_checkpoint(tmp_path):
    train(tmp_path, max_steps=2, trainer_class=Sharded)
    (tmp_path / "checkpoint-2" / "model.safetensors.index.json").write_text('{"weight_map": {]}')
    assert resolve_run(True, tmp_path).checkpoint == str(tmp_path / "checkpoint-1")


def test_a_later_checkpoint_whose_manifest_cannot_be_read_is_named(tmp_path, caplog_transformers):
    train(tmp_path, max_steps=2)
    (tmp_path / "checkpoint-2" / MANIFEST).write_text('{"step": 2')
    assert resolve_run(True, tmp_path).checkpoint == str(tmp_path / "checkpoint-1")
    (found,) = messages(caplog_transformers, "Rejected")
    assert "checkpoint-2 is corrupt" in found


# A folder has one run at a time


def test_a_second_run_in_a_folder_is_an_error_until_the_first_has_ended(tmp_path):
    trainer = make_trainer(tmp_path, "dynamic", max_steps=2)
    second = make_trainer(tmp_path, "dynamic", max_steps=2)
    refused = []

    def start_another():
        with pytest.raises(UserError, match=re.escape(str(tmp_path))) as raised:
            second.train()
        refused.append(raised)

    before_reward(trainer, 1, start_another)
    trainer.train()
    assert len(refused) == 1
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert holder in str(refused[0].value)
    second.train()


def test_what_a_killed_process_left_half_written_is_removed_at_the_start(tmp_path):
    def killed(path: Path) -> None:
        path.write_bytes(b"half")
        raise Killed

    left = []
    for name in ("dataeff/groups.parquet", "_dataeff/embeddings-0.npy"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "unlink", lambda path, missing_ok=False: left.append(path))
            with pytest.raises(Killed):
                write_atomically(tmp_path / name, killed)
    assert len(left) == 2
    assert all(path.exists() for path in left)
    (tmp_path / "dataeff" / "notes.tmp").write_text("a user's own")
    train(tmp_path, max_steps=1)
    assert not any(path.exists() for path in left)
    assert (tmp_path / "dataeff" / "notes.tmp").exists()


# Checkpoints that cannot be written


def test_a_process_that_has_ended_is_named_and_room_is_not_asked_for(tmp_path):
    processes = Mock(spec=Processes, world_size=2, wait=Mock(side_effect=RuntimeError("Connection closed by peer")))
    context = resume.complete_checkpoint(ResumedRun(), tmp_path / "checkpoint-1", 1, True, True, processes)
    with pytest.raises(CheckpointError, match="another process") as raised, context:
        pass
    assert "room" not in str(raised.value)
    assert not (tmp_path / "checkpoint-1").exists()


def test_a_folder_that_vanishes_during_a_save_does_not_hide_the_cause(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint-1"
    context = resume.complete_checkpoint(ResumedRun(), checkpoint, 1, True, True, Processes())

    def write_where_nothing_is():
        shutil.rmtree(tmp_path / "run")
        (checkpoint / "model.safetensors").write_bytes(b"")

    with pytest.raises(CheckpointError, match="No such file"), context:
        write_where_nothing_is()


@pytest.mark.parametrize("text", ["mat1 and mat2 shapes cannot be multiplied", "CUDA out of memory", "lost a peer"])
def test_an_error_that_is_not_about_files_stays_what_it_is(tmp_path, text):
    context = resume.complete_checkpoint(ResumedRun(), tmp_path / "checkpoint-1", 1, True, True, Processes())
    with pytest.raises(RuntimeError, match=text), context:
        raise RuntimeError(text)
    assert not is_complete(tmp_path / "checkpoint-1")


@pytest.mark.parametrize(
    ("error", "asks"),
    [(OSError(errno.ENOSPC, "No space left on device"), True), (PermissionError(errno.EACCES, "denied"), False)],
)
def test_room_is_asked_for_where_there_is_none(tmp_path, error, asks):
    context = resume.complete_checkpoint(ResumedRun(), tmp_path / "checkpoint-1", 1, True, True, Processes())
    with pytest.raises(CheckpointError) as raised, context:
        raise error
    assert ("Make room" in str(raised.value)) == asks


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("part", "size"), [("state", 100), ("model", 60_000), ("optimizer", 160_000), ("manifest", resource.RLIM_INFINITY)]
)
def test_a_checkpoint_that_cannot_be_written(tmp_path, monkeypatch, part, size):
    """
    All but the manifest by a real limit on the size of files: the errors are those of `torch.save`, safetensors and
    Python.
    """
    train(tmp_path, max_steps=2, save_steps=2)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    trainer = make_trainer(tmp_path, "dynamic", max_steps=4, save_steps=2)
    if part == "manifest":
        monkeypatch.setattr(resume, "write_manifest", Mock(side_effect=FULL))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"checkpoint-4 .*{tmp_path / 'checkpoint-2'}"):
            trainer.train(resume_from_checkpoint=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before, "litter"
    monkeypatch.undo()
    assert train(tmp_path, max_steps=4, save_steps=2, resume=True).state.global_step == 4


# Notes of a failure: which prompts were in use, and where to resume


def test_notes_name_the_prompts_and_the_checkpoint_of_this_run(tmp_path):
    train(tmp_path, max_steps=6, save_steps=6)
    notes = notes_of_failure(make_trainer(tmp_path, "dynamic", save_steps=2), 1)
    assert not [note for note in notes if "resume" in note], "the other run's checkpoint"
    prompts, checkpoint = notes_of_failure(make_trainer(tmp_path, "dynamic", save_steps=2), 3)
    assert "dataset's rows [" in prompts
    assert f"`trainer.train(resume_from_checkpoint='{tmp_path / 'checkpoint-2'}')`" in checkpoint


@pytest.mark.parametrize(
    ("error", "ids", "noted"),
    [
        (ValueError(), list(range(20)), f"rows {list(range(16))} and 4 more."),
        (ValueError(), [], ""),
        (KeyboardInterrupt(), [3], ""),  # not the fault of a prompt
    ],
)
def test_notes_without_a_checkpoint(error, ids, noted):
    flush = Mock()
    with pytest.raises(type(error)) as raised, failure_notes(ResumedRun(), ids, flush):
        raise error
    assert raised.value is error
    assert flush.called
    assert "".join(getattr(error, "__notes__", [])).endswith(noted)
