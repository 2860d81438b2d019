"""What an exception that ends a run says of it: which prompts were in use, and where to resume."""

import pytest

from tests.factories import make_trainer, train
from trl_dataeff.checkpoint.manifest import MANIFEST
from trl_dataeff.checkpoint.resume import failure_notes
from trl_dataeff.checkpoint.runs import Run
from trl_dataeff.checkpoint.state import CheckpointError


def run_with_checkpoint(folder) -> Run:
    """Its checkpoint counts as complete: the files are not read."""
    path = folder / "checkpoint-10" / MANIFEST
    path.parent.mkdir(parents=True)
    path.touch()
    return Run("id", str(folder), str(folder / "checkpoint-10"))


def notes_of(run, error, ids=(), flush=lambda: None) -> list[str]:
    with pytest.raises(type(error)) as raised, failure_notes(run, lambda: ids, flush):
        raise error
    assert raised.value is error
    return getattr(error, "__notes__", [])


def test_prompts_and_the_latest_complete_checkpoint_are_named(tmp_path):
    run = run_with_checkpoint(tmp_path)
    prompts, checkpoint = notes_of(run, KeyError("answer"), [3, 11])
    assert prompts == "The last prompts of this process were the dataset's rows [3, 11]."
    assert checkpoint.startswith(
        f"The latest complete checkpoint of this run is {run.checkpoint}. After fixing the cause, resume"
    )
    assert f"`trainer.train(resume_from_checkpoint='{run.checkpoint}')`" in checkpoint


def test_of_many_prompts_sixteen_are_named(tmp_path):
    (note,) = notes_of(Run("id", str(tmp_path)), ValueError(), list(range(20)))
    assert note.endswith(f"{list(range(16))} and 4 more.")


def test_before_anything_was_generated_there_is_nothing_to_say(tmp_path):
    assert notes_of(Run("id", str(tmp_path / "absent")), ValueError()) == []


def test_an_interrupt_is_not_the_fault_of_a_prompt(tmp_path):
    run = run_with_checkpoint(tmp_path)
    (note,) = notes_of(run, KeyboardInterrupt(), [3])
    assert run.checkpoint in note


def test_an_error_of_a_checkpoint_says_itself_where_to_resume(tmp_path):
    (note,) = notes_of(run_with_checkpoint(tmp_path), CheckpointError("full"), [3])
    assert "rows [3]" in note


def test_a_table_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    def full():
        raise OSError("No space left on device")

    (note,) = notes_of(Run("id", str(tmp_path)), ValueError("the cause"), flush=full)
    assert note == "The last rows of groups.parquet could not be written either: No space left on device"


def test_nothing_is_flushed_by_a_run_that_succeeds(tmp_path):
    with failure_notes(Run("id", str(tmp_path)), lambda: [1], lambda: pytest.fail("flushed")):
        pass


def test_notes_of_a_run_are_about_that_run(tmp_path):
    """Prompts of an earlier call of `train` are not named by one that fails before it generates."""
    train(tmp_path, max_steps=1)
    trainer = make_trainer(tmp_path, "dynamic", max_steps=2)
    trainer.train()
    trainer.args.max_steps = 3
    with pytest.raises(CheckpointError) as raised:
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    assert not getattr(raised.value, "__notes__", [])
