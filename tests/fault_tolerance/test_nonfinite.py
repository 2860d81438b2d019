"""Steps whose log-probabilities are not finite (`skip_nonfinite_steps`)."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.factories import all_finite, history, make_trainer, messages, mixed_reward, run, train_briefly
from trl_dataeff.fault_tolerance.nonfinite import MOST_IN_A_ROW, NonfiniteStepGuard


NAN, INF = float("nan"), float("inf")


def spoil(trainer, steps, value=NAN):
    """Make the log-probabilities of the micro-batches of `steps` not finite."""
    plain = trainer._get_per_token_logps_and_entropies

    def spoiled(*args, **kwargs):
        logps, *rest = plain(*args, **kwargs)
        return (logps * value if trainer.state.global_step in steps else logps, *rest)

    trainer._get_per_token_logps_and_entropies = spoiled


@pytest.mark.parametrize("value", [NAN, INF])
def test_log_probabilities_that_are_not_finite_cost_a_step_not_the_model(tmp_path, caplog_transformers, value):
    trainer = make_trainer(tmp_path, "off", max_steps=6, save_strategy="no", skip_nonfinite_steps=True)
    spoil(trainer, {2, 3}, value)
    trainer.train()
    assert all_finite(trainer)
    skipped = [log.get("dataeff/steps_skipped") for log in trainer.state.log_history if "dataeff/rounds" in log]
    assert skipped == [None, None, None, 1, 2, 2]  # a count of faults is logged from the first one on
    (message,) = messages(caplog_transformers, "is not finite")
    assert message.startswith("The gradient of step 3 is not finite")


def test_without_end_it_is_an_error(tmp_path):
    trainer = make_trainer(tmp_path, "off", max_steps=100, save_steps=2, skip_nonfinite_steps=True)
    spoil(trainer, range(3, 100))
    with pytest.raises(FloatingPointError, match="not finite in 10 steps in a row"):
        trainer.train()
    assert all_finite(trainer)


def test_off_such_a_step_is_taken_as_by_trl(tmp_path, caplog_transformers):
    """The last step's gradient is NaN: so are the weights then, and every number that TRL logs is TRL's."""
    options = {"rewards": mixed_reward, "max_steps": 4, "train": False}
    reference = run(GRPOTrainer, GRPOConfig, tmp_path / "trl", **options)
    spoil(reference, {3})
    reference.train()
    ours = make_trainer(tmp_path / "ours", "off", max_steps=4, save_strategy="no")
    spoil(ours, {3})
    ours.train()
    rows = history(ours.state.log_history)
    for expected, got in zip(history(reference.state.log_history), rows, strict=True):
        assert expected.items() <= got.items()
    assert [row["grad_norm"] == "nan" for row in rows] == [False] * 3 + [True]
    assert not all_finite(ours)
    for a, b in zip(reference.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert ours.collector.counters.values["steps_skipped"] == 0
    assert messages(caplog_transformers, "is not finite") == []


def test_without_such_a_step_skipping_changes_nothing(tmp_path):
    runs = [train_briefly(tmp_path / str(skip), "off", skip_nonfinite_steps=skip) for skip in (False, True)]
    assert history(runs[0].state.log_history) == history(runs[1].state.log_history)
    assert runs[0]._nonfinite is None


def test_a_loss_scaler_skips_such_steps_itself(tmp_path):
    trainer = make_trainer(tmp_path, "off", skip_nonfinite_steps=True)
    trainer.accelerator.scaler = object()
    trainer._begin_run()
    assert trainer._nonfinite is None
    trainer.accelerator.scaler = None
    trainer._begin_run()
    assert trainer._nonfinite is not None


def test_norms_of_every_kind():
    skipped = []
    guard = NonfiniteStepGuard(lambda: skipped.append(1))
    assert not any(guard.skips(norm, 1) for norm in (None, 0.0, 3, torch.tensor(1e30)))
    assert all(guard.skips(norm, 1) for norm in (NAN, INF, -INF, torch.tensor(NAN), torch.tensor([INF])))
    assert len(skipped) == 5


@pytest.mark.parametrize("finite", [1.0, None])
def test_only_steps_in_a_row_end_the_run(finite, caplog_transformers):
    guard = NonfiniteStepGuard(lambda: None)
    for _ in range(3):
        assert all(guard.skips(NAN, 1) for _ in range(MOST_IN_A_ROW - 1))
        assert not guard.skips(finite, 1)
    assert len(messages(caplog_transformers, "is not finite")) == 3  # once in a row
    quiet = NonfiniteStepGuard(lambda: None, is_main_process=False)
    assert all(quiet.skips(NAN, 1) for _ in range(MOST_IN_A_ROW - 1))
    with pytest.raises(FloatingPointError, match=r"10 steps in a row\. Lower `learning_rate`"):
        quiet.skips(NAN, 1)
    assert len(messages(caplog_transformers, "is not finite")) == 3
