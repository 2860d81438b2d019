"""Which checkpoints are complete, which one is resumed, and that there always is one."""

import errno
import resource
import signal
from pathlib import Path

import pytest
import torch

from tests.factories import checkpoint_names, history, make_trainer, messages, plain_dataset, train
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff import trainer as trainer_module
from trl_dataeff.checkpoint.manifest import MANIFEST, check_checkpoint, is_complete
from trl_dataeff.checkpoint.resume import checkpoints, remove_older, resolve_run
from trl_dataeff.checkpoint.state import CheckpointError
from trl_dataeff.rollouts.distributed import Processes


def test_the_latest_complete_one_is_taken_and_said(tmp_path, caplog_transformers):
    whole = train(tmp_path)
    (tmp_path / "checkpoint-12" / MANIFEST).unlink()
    path = tmp_path / "checkpoint-11" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "checkpoint-10" / "optimizer.pt").unlink()
    again = train(tmp_path, resume=True)
    said = [m for m in messages(caplog_transformers) if "Rejected:" in m]
    assert len(said) == 1
    assert said[0].startswith(f"Resuming from {tmp_path / 'checkpoint-9'}. Rejected:")
    assert "checkpoint-12 is incomplete" in said[0]
    assert "checkpoint-11 is corrupt: model.safetensors has" in said[0]
    assert "checkpoint-10 is corrupt: optimizer.pt is missing" in said[0]
    assert history(again.state.log_history) == history(whole.state.log_history)
    for path in checkpoints(tmp_path):
        check_checkpoint(path)


def test_the_manifest_is_there_before_an_older_one_goes(tmp_path, monkeypatch):
    seen = []

    def watched(checkpoint, *args):
        seen.append((is_complete(checkpoint), checkpoint_names(tmp_path)))
        remove_older(checkpoint, *args)
        seen[-1] += (checkpoint_names(tmp_path),)

    monkeypatch.setattr(trainer_module, "remove_older", watched)
    train(tmp_path, max_steps=4, save_total_limit=1)
    assert [complete for complete, *_ in seen] == [True] * 4
    assert [(before, after) for _, before, after in seen][1:] == [
        ({f"checkpoint-{n - 1}", f"checkpoint-{n}"}, {f"checkpoint-{n}"}) for n in (2, 3, 4)
    ]


def test_save_total_limit_and_the_best_model(tmp_path):
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2,
        "metric_for_best_model": "eval_reward", "greater_is_better": True,
        "per_device_eval_batch_size": 4,
        "trainer": {"train_dataset": plain_dataset(), "eval_dataset": plain_dataset(4)},
    }  # fmt: skip
    trainer = train(tmp_path, "off", max_steps=6, **options)
    best = Path(trainer.state.best_model_checkpoint)
    assert checkpoint_names(tmp_path) == {best.name, "checkpoint-6"} | (
        {"checkpoint-5"} if best.name == "checkpoint-6" else set()
    )
    check_checkpoint(best)
    rewards = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
    assert best.name == f"checkpoint-{1 + rewards.index(max(rewards))}"
    resumed = train(tmp_path, "off", max_steps=8, resume=True, **options)
    assert resumed.state.global_step == 8


def test_a_later_corrupt_one_does_not_cost_the_one_just_written(tmp_path):
    """All within a second, so that the Trainer's own rotation would go by the step's number."""
    train(tmp_path, max_steps=4)
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    (tmp_path / "checkpoint-3" / MANIFEST).unlink()
    train(tmp_path, max_steps=3, resume=str(tmp_path / "checkpoint-2"), save_total_limit=1)
    check_checkpoint(tmp_path / "checkpoint-3")


def test_only_the_model(tmp_path, caplog_transformers):
    train(tmp_path / "run", max_steps=2, save_only_model=True)
    trainer = make_trainer(tmp_path / "run", "dynamic")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert not (checkpoint / "dataeff" / "state.json").exists()
    with pytest.raises(CheckpointError, match="was written with `save_only_model=True`") as error:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert "Start a new run with it as the model" in str(error.value)
    with pytest.raises(CheckpointError, match="`save_only_model=True`"):
        trainer.train(resume_from_checkpoint=True)


def test_with_only_the_model_no_message_advises_resuming(tmp_path, caplog_transformers, monkeypatch):
    options = {"save_only_model": True, "save_steps": 1, "save_on_signal": True}
    trainer = make_trainer(tmp_path / "stopped", "dynamic", **options)
    rewards, pending = trainer.reward_funcs[0], [signal.SIGTERM]
    trainer.reward_funcs = [lambda *a, **kw: (pending and signal.raise_signal(pending.pop()), rewards(*a, **kw))[1]]
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    (said,) = messages(caplog_transformers, "Stopped by SIGTERM after step 1 of 12")
    assert said.endswith("no checkpoint to resume from (`save_only_model=True` keeps the model alone).")
    trainer = make_trainer(tmp_path / "failed", "dynamic", **options)
    trainer.reward_funcs = [lambda *a, **kw: rewards(*a, **kw) if trainer.state.global_step < 2 else 1 / 0]
    with pytest.raises(ZeroDivisionError) as failed:
        trainer.train()
    monkeypatch.setattr("trl_dataeff.checkpoint.saving.write_manifest", fail(FULL))
    with pytest.raises(CheckpointError) as full:
        train(tmp_path / "full", **options)
    for error in (stopped, failed, full):
        assert not [note for note in getattr(error.value, "__notes__", []) if "resume" in note]
    assert "This run has no checkpoint to resume from: make room, and start it again." in str(full.value)


def test_a_checkpoint_of_trl_is_said_to_be_one(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(CheckpointError, match="not written by DataEfficientGRPOTrainer at all"):
        resolve_run(str(tmp_path / "checkpoint-3"), tmp_path)


class Killed(BaseException):
    """As good as SIGKILL: nothing of the trainer's own handles it."""


def fail(error):
    def failing(*args, **kwargs):
        raise error

    return failing


def test_killed_while_a_complete_one_is_written_again(tmp_path, monkeypatch):
    whole = train(tmp_path, max_steps=4)
    with monkeypatch.context() as patch:
        patch.setattr(DataEfficientGRPOTrainer, "_save_rng_state", fail(Killed()), raising=False)
        with pytest.raises(Killed):
            train(tmp_path, max_steps=4, resume=str(tmp_path / "checkpoint-3"))
    assert checkpoint_names(tmp_path) >= {"checkpoint-4", "replaced-checkpoint-4"}
    assert not is_complete(tmp_path / "checkpoint-4")
    assert resolve_run(True, tmp_path).checkpoint == str(tmp_path / "checkpoint-4")
    check_checkpoint(tmp_path / "checkpoint-4")
    assert "replaced-checkpoint-4" not in checkpoint_names(tmp_path)
    again = train(tmp_path, max_steps=4, resume=True)
    assert history(again.state.log_history) == history(whole.state.log_history)


FULL = OSError(errno.ENOSPC, "No space left on device")
PARTS = {
    "selection state": ("trl_dataeff.collector.state.save_state", FULL),
    "model": ("transformers.Trainer._save", FULL),
    "optimizer": ("transformers.Trainer._save_optimizer_and_scheduler", RuntimeError("file write failed")),
    "random state": ("transformers.Trainer._save_rng_state", FULL),
    "manifest": ("trl_dataeff.checkpoint.saving.write_manifest", FULL),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_checkpoint_that_cannot_be_written(tmp_path, monkeypatch, part):
    train(tmp_path, max_steps=2, save_steps=2)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    target, error = PARTS[part]
    monkeypatch.setattr(target, fail(error))
    with pytest.raises(CheckpointError, match=r"checkpoint-4 could not be written \(.*: .*(left|failed)") as raised:
        train(tmp_path, max_steps=4, save_steps=2, resume=True)
    assert f"{tmp_path / 'checkpoint-2'} is unchanged" in str(raised.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before, "litter"
    monkeypatch.undo()
    assert train(tmp_path, max_steps=4, save_steps=2, resume=True).state.global_step == 4


@pytest.mark.parametrize("size", [100, 60_000, 200_000])
def test_a_real_limit_on_what_can_be_written(tmp_path, size):
    """As `torch.save`, safetensors and Python put it when the system refuses to write on."""
    train(tmp_path, max_steps=1)
    trainer = make_trainer(tmp_path, "dynamic", max_steps=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint-2 could not be written .*checkpoint-1 is unchanged"):
            trainer.train(resume_from_checkpoint=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint_names(tmp_path) == {"checkpoint-1"}
    assert not list(tmp_path.rglob("*.tmp"))
    assert train(tmp_path, max_steps=3, resume=True).state.global_step == 3


def test_another_number_of_processes_or_version_is_said(tmp_path, caplog_transformers, monkeypatch):
    train(tmp_path, max_steps=1)
    resolve_run(True, tmp_path)
    assert not [m for m in messages(caplog_transformers) if "was written with" in m]
    monkeypatch.setattr("trl_dataeff.checkpoint.resume.version", lambda name: "99.0")
    resolve_run(True, tmp_path, Processes(world_size=2, gather=lambda x: x))
    (said,) = [m for m in messages(caplog_transformers) if "was written with" in m]
    assert f"torch {torch.__version__}, now 99.0" in said
    assert "1 processes, now 2" in said
